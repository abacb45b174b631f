// Evenly spaced levels of a norm (QSGD, and the 127 levels of int8 blocks): code k stands for (k / levels) * norm,
// each operation rounded to float32.
#pragma once
#include "common.cuh"

namespace gc {

// code / levels, correctly rounded, for whole numbers up to 2^15; `reciprocal` is 1 / levels. The quotient's estimate
// is off by its own remainder, which one fused operation gives exactly (Markstein 1990). That the result is the
// division's for every code and number of levels, tests/kernel_cases/levels.py tries.
GC_HD float level_ratio(float code, float levels, float reciprocal) {
#if defined(__CUDA_ARCH__)
  const float estimate = code * reciprocal;
  return __fmaf_rn(__fmaf_rn(-estimate, levels, code), reciprocal, estimate);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  const float estimate = code * reciprocal;
  return __builtin_fmaf(__builtin_fmaf(-estimate, levels, code), reciprocal, estimate);
#else
  (void)reciprocal;
  return code / levels;
#endif
}

// Whether an encoder sends this norm; `least` is TINY * levels.
GC_HD bool level_norm_sent(float norm, float least) {
  return (norm == 0) | ((norm >= least) & (norm <= FLOAT_MAX));  // without branches, for loops over many
}

// The norm that codes are drawn with: NaN, which leads to zeros, for one that is not finite; 1 for one that counts as
// zero, as such a segment's elements are next to 1 never rounded up.
GC_HD float level_divisor(float norm) {
  if (norm == 0) return 1.0f;
  return norm <= FLOAT_MAX ? norm : float_of(0x7fc00000u);
}

// What a magnitude times 2^-24 is multiplied with for a guess at the number of its level; so scaled no norm's is
// denormal. Five roundings of 2^-24 each lie between the guess and the rule that counts, so what is added makes it at
// least the level, and at most one above.
GC_HD float level_guess24(float divisor, float levels) {
  return levels / (divisor * 0x1p-24f) * (1.0f + 0x1p-21f);
}

// The same for a magnitude itself, and much too high for norms of 2^100 and more.
GC_HD float level_guess(float divisor, float levels) {
  const float guess = level_guess24(divisor, levels) * 0x1p-24f;
  return guess < 0x1p-100f ? 0x1p-100f : guess;
}

// The code of an element at or above level k, given what k and k + 1 stand for: k + 1 iff (u + 1/2) * (distance
// between the two) / 2^24 <= |x| - level k; with the sign of x.
GC_HD int32_t level_drawn(float x, int32_t k, float below, float above, uint32_t draw) {
  const float gap = (above - below) * 0x1p-24f;
  const uint32_t code = (uint32_t)k + (uint32_t)(draw_half(draw) * gap <= magnitude(x) - below);
  const uint32_t sign = 0u - is_negative(x);
  return (int32_t)((code ^ sign) - sign);
}

// The code of x with the level as `level_guess` has it. `wrong` is not zero where that is too high, which is seldom,
// and then the code counts for nothing.
GC_HD int32_t level_code_guessed(float x, float divisor, float guess, float levels, float reciprocal, uint32_t draw,
                                 uint32_t& wrong) {
  const int32_t k = (int32_t)(magnitude(x) * guess);
  const float code = (float)k;
  const float below = level_ratio(code, levels, reciprocal) * divisor;
  const float above = level_ratio(code + 1.0f, levels, reciprocal) * divisor;
  wrong = (uint32_t)!(below <= magnitude(x));
  return level_drawn(x, k, below, above, draw);
}

// The code of x; the level is the highest that is not above |x|.
GC_HD int32_t level_code(float x, float divisor, float guess24, float levels, float reciprocal, uint32_t draw) {
  const int32_t high = divisor > 0 ? (int32_t)(magnitude(x) * 0x1p-24f * guess24) : 0;  // and 0 stays, as with NaN
  const int32_t k = high - (int32_t)(level_ratio((float)high, levels, reciprocal) * divisor > magnitude(x));
  const float code = (float)k;
  const float below = level_ratio(code, levels, reciprocal) * divisor;
  const float above = level_ratio(code + 1.0f, levels, reciprocal) * divisor;
  return level_drawn(x, k, below, above, draw);
}

}  // namespace gc
