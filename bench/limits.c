// What the machine can do with so many threads: bytes read from memory a second, and int8 multiply-adds a second.
// cc -O2 -march=native -pthread limits.c -o limits && ./limits THREADS     prints JSON; each figure is the best of several tries
#include <immintrin.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__AVX512VNNI__)
#define INT8 "vpdpbusd, 512 bits"
#elif defined(__AVXVNNI__)
#define INT8 "vpdpbusd, 256 bits"
#else
#define INT8 "vpmaddubsw + vpaddw, 256 bits"
#endif

enum { TRIES = 9, MIB_PER_THREAD = 192 };
static const uint64_t LOOPS = 4000000;
static pthread_barrier_t together;
static uint8_t *memory;
static volatile uint64_t sink;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static uint64_t read_all(const uint8_t *from, size_t bytes) {
    __m256i sum[8] = {0};
    for (size_t at = 0; at < bytes; at += sizeof sum)
        for (int i = 0; i < 8; i++)
            sum[i] = _mm256_xor_si256(sum[i], _mm256_load_si256((const __m256i *)(from + at) + i));
    for (int i = 1; i < 8; i++) sum[0] = _mm256_xor_si256(sum[0], sum[i]);
    return _mm256_extract_epi64(sum[0], 0);
}

// Eight independent chains from registers; returns the products made.
static double multiply(void) {
    for (uint64_t i = 0; i < LOOPS; i++) {
#if defined(__AVX512VNNI__)
#define STEP(n) "vpdpbusd %%zmm30, %%zmm31, %%zmm" #n "\n"
        __asm__ volatile(STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
                         ::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");
#elif defined(__AVXVNNI__)
#define STEP(n) "{vex} vpdpbusd %%ymm12, %%ymm13, %%ymm" #n "\n"
        __asm__ volatile(STEP(0) STEP(1) STEP(2) STEP(3) STEP(4) STEP(5) STEP(6) STEP(7)
                         ::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7");
#else
#define STEP(n, t) "vpmaddubsw %%ymm12, %%ymm13, %%ymm" #t "\nvpaddw %%ymm" #t ", %%ymm" #n ", %%ymm" #n "\n"
        __asm__ volatile(STEP(0, 8) STEP(1, 9) STEP(2, 10) STEP(3, 11) STEP(4, 8) STEP(5, 9) STEP(6, 10) STEP(7, 11)
                         ::: "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11");
#endif
    }
#if defined(__AVX512VNNI__)
    return LOOPS * 8.0 * 64;
#else
    return LOOPS * 8.0 * 32;
#endif
}

static double best[2], products;

static void *thread(void *index) {
    uint8_t *mine = memory + (size_t)(uintptr_t)index * MIB_PER_THREAD * 1048576;
    memset(mine, 1, (size_t)MIB_PER_THREAD * 1048576);
    for (int try = 0; try < 2 * TRIES; try++) {
        int kind = try % 2;
        pthread_barrier_wait(&together);
        double start = now();
        if (kind) products = multiply();
        else sink += read_all(mine, (size_t)MIB_PER_THREAD * 1048576);
        pthread_barrier_wait(&together);
        double took = now() - start;
        if (index == 0 && (try < 2 || took < best[kind])) best[kind] = took;
    }
    return 0;
}

int main(int count, char **words) {
    int threads = count > 1 ? atoi(words[1]) : 2;
    pthread_t all[256];
    if (threads < 1 || threads > 256 || posix_memalign((void **)&memory, 4096, (size_t)threads * MIB_PER_THREAD * 1048576)) return 1;
    pthread_barrier_init(&together, 0, threads);
    for (int i = 0; i < threads; i++) pthread_create(&all[i], 0, thread, (void *)(uintptr_t)i);
    for (int i = 0; i < threads; i++) pthread_join(all[i], 0);
    printf("{\"threads\": %d, \"read_gb_s\": %.2f, \"int8_gmac_s\": %.1f, \"int8_by\": \"%s\"}\n", threads,
           threads * MIB_PER_THREAD * 1048576.0 / best[0] / 1e9, threads * products / best[1] / 1e9, INT8);
}
