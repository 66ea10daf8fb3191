// Preloaded into llama.cpp: the system refuses AMX's tiles, so that it falls back to the buffers repacked for AVX.
// cc -O2 -shared -fPIC no_amx.c -o no_amx.so && LD_PRELOAD=./no_amx.so ...
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <sys/syscall.h>

enum { ARCH_REQ_XCOMP_PERM = 0x1023 };

long syscall(long number, ...) {
    static long (*real)(long, ...);
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_arch_prctl && a[0] == ARCH_REQ_XCOMP_PERM) {
        errno = EINVAL;
        return -1;
    }
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
