// Blockwise 8-bit codes: y = (x / a) * 127, a the block's largest magnitude, each operation rounded to float32.
#pragma once
#include "common.cuh"

namespace gc {

constexpr int INT8_TOP = 127;

// What x is divided by: infinity, which makes all codes zero, for a block whose a counts as zero or is not finite.
GC_HD float int8_divisor(float a) { return a >= TINY && a <= FLOAT_MAX ? a : float_of(0x7f800000u); }

// What is sent for a: 0 for what counts as zero.
GC_HD float int8_scale(float a) { return a < TINY ? 0.0f : a; }

// y rounded to the nearest integer, ties to even: adding 1.5 * 2^23 leaves no room for a fraction. The divisor is
// finite.
GC_HD int32_t int8_rounded(float x, float divisor) {
  const float rounded = x / divisor * (float)INT8_TOP + 0x1.8p23f;
  return (int32_t)(bits_of(rounded) - bits_of(0x1.8p23f));
}

// The same for any divisor: infinity over infinity is the only quotient that is NaN; it becomes 0.
GC_HD int32_t int8_nearest(float x, float divisor) {
  const float y = x / divisor;
  return y == y ? int8_rounded(x, divisor) : 0;
}

// floor(|y|), and one more iff u / 2^24 < the rest of |y|; with the sign of y.
GC_HD int32_t int8_stochastic(float x, float divisor, uint32_t draw) {
  const float y = x / divisor * (float)INT8_TOP, size = magnitude(y);
  const int32_t low = size <= (float)INT8_TOP ? (int32_t)size : 0;
  const int32_t code = low + (int32_t)((float)(int32_t)draw * 0x1p-24f < size - (float)low);
  return is_negative(y) ? -code : code;
}

}  // namespace gc
