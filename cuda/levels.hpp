// Shared code of the CPU loops over levels of a norm. Included by *.cpp only.
#pragma once
#include "levels.cuh"
#include "called.hpp"

namespace gc {

// Whether norms are valid: 0 or at least `least`.
static inline bool norms_sent(const float* norms, int64_t m, float least) {
  uint32_t wrong = 0;
#pragma omp simd reduction(| : wrong)
  for (int64_t s = 0; s < m; ++s) wrong |= !level_norm_sent(norms[s], least);
  return !wrong;
}

#if defined(__AVX2__)
// Entry k[i] modulo WIDTH of a table, for each i.
static inline VecF looked_up(VecF table, VecI k) {
#if defined(__AVX512F__)
  return (VecF)_mm512_permutexvar_ps((__m512i)k, (__m512)table);
#else
  return (VecF)_mm256_permutevar8x32_ps((__m256)table, (__m256i)k);
#endif
}

// level_ratio of each.
static inline VecF level_ratios(VecF code, VecF levels, VecF reciprocal) {
  const VecF estimate = code * reciprocal;
#if defined(__AVX512F__)
  const __m512 rest = _mm512_fnmadd_ps((__m512)estimate, (__m512)levels, (__m512)code);
  return (VecF)_mm512_fmadd_ps(rest, (__m512)reciprocal, (__m512)estimate);
#else
  const __m256 rest = _mm256_fnmadd_ps((__m256)estimate, (__m256)levels, (__m256)code);
  return (VecF)_mm256_fmadd_ps(rest, (__m256)reciprocal, (__m256)estimate);
#endif
}
#endif

}  // namespace gc
