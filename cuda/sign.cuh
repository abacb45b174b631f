// Signs: 1 bit per element, [x >= 0], or 2 bits, sign + 1; and the float32 means that stand for classes of them.
#pragma once
#include "common.cuh"

namespace gc {

// [x >= 0]: zeros of either sign count as +1, and a NaN as -1.
GC_HD uint32_t sign_bit(float x) { return (uint32_t)(x >= 0.0f); }

// sign + 1; a NaN has sign 0.
GC_HD uint32_t sign_code(float x) { return 1u + (uint32_t)(x > 0.0f) - (uint32_t)(x < 0.0f); }

// sign + 1, and sign 0 below the limit.
GC_HD uint32_t sign_code_above(float x, float limit) {
  const uint32_t kept = (uint32_t)(magnitude(x) >= limit);
  return 1u + (kept & (uint32_t)(x > 0.0f)) - (kept & (uint32_t)(x < 0.0f));
}

// The part of x in the sum of its class: x itself, or 0 in the other class; a NaN is in both.
GC_HD double below_zero(double x) { return x > 0.0 ? 0.0 : x; }
GC_HD double above_zero(double x) { return x < 0.0 ? 0.0 : x; }

// total / count in float32, and +0, never -0, for a class that is empty or all zeros.
GC_HD float class_mean(double total, double count) { return (float)(total / (count < 1.0 ? 1.0 : count)) + 0.0f; }

GC_HD bool is_finite(float x) { return magnitude(x) <= FLOAT_MAX; }

// Bits 0, 2, 4, ... of a word as its low 16 bits, and back: the two bits of packed codes as planes of one bit.
GC_HD uint32_t squeeze_even(uint32_t w) {
  w &= 0x55555555u;
  w = (w | (w >> 1)) & 0x33333333u;
  w = (w | (w >> 2)) & 0x0f0f0f0fu;
  w = (w | (w >> 4)) & 0x00ff00ffu;
  return (w | (w >> 8)) & 0x0000ffffu;
}

GC_HD uint32_t spread_even(uint32_t w) {
  w &= 0x0000ffffu;
  w = (w | (w << 8)) & 0x00ff00ffu;
  w = (w | (w << 4)) & 0x0f0f0f0fu;
  w = (w | (w << 2)) & 0x33333333u;
  return (w | (w << 1)) & 0x55555555u;
}

}  // namespace gc
