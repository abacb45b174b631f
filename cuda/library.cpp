// Information for the loader: the processor, and a digest of its sources.
#include "called.hpp"

#define GC_API extern "C" __attribute__((visibility("default")))

// 0: any processor; 1: AVX2 and FMA; 2: AVX-512 (F, BW, DQ, VL, CD). As GCC's x86-64, x86-64-v3 and x86-64-v4.
GC_API int64_t gc_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  return avx2 ? (avx512 ? 2 : 1) : 0;
#else
  return 0;
#endif
}

GC_API const char* gc_sources() { return GC_SOURCES; }

// A line for each function that is GC_CALLED: see called.hpp.
GC_API const char* gc_functions() { return gc::functions().c_str(); }
