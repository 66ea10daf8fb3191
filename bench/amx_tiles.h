// Included before everything in llama.cpp's build. GCC 12's _tile_loadconfig names 8 of the 64 bytes that the instruction reads,
// so that it drops llama.cpp's stores to the others: the first product on AMX then dies of SIGSEGV.
#ifdef __AMX_TILE__
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char (*)[64])(config)))
#endif
