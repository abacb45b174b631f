// The 16-bit floating-point formats: float16 and bfloat16, clipped to their largest value, rounded to nearest even.
#pragma once
#include "common.cuh"

namespace gc {

constexpr uint32_t INFINITE = 0x7f800000u;  // bits of a float's infinity: NaN is above

// What the upper bits of a code are that is infinite or NaN.
template <bool BRAIN>
constexpr uint32_t HALF_EXPONENT = BRAIN ? 0x7f80u : 0x7c00u;

// The code of x. A NaN stays one, quiet, with its upper bits, as processors have it.
template <bool BRAIN>
GC_HD uint32_t half_code(float x) {
  constexpr uint32_t LARGEST = BRAIN ? 0x7f7f0000u : 0x477fe000u;  // of the format, as a float
  constexpr int SHIFT = BRAIN ? 16 : 13;
  const uint32_t size = bits_of(x) & 0x7fffffffu, sign = bits_of(x) >> 16 & 0x8000u;
  const uint32_t clipped = size < LARGEST ? size : LARGEST;
  const uint32_t even = clipped + ((1u << (SHIFT - 1)) - 1u) + (clipped >> SHIFT & 1u);
  if (BRAIN) return (size > INFINITE ? size >> SHIFT | 0x40u : even >> SHIFT) | sign;
  // Beside 1/2 a float has the steps of the denormals, so the sum is rounded as they are.
  const uint32_t denormal = bits_of(float_of(clipped) + 0.5f) - 0x3f000000u;
  const uint32_t code = clipped < 0x38800000u ? denormal : (even - 0x38000000u) >> SHIFT;
  return (size > INFINITE ? (size >> SHIFT & 0x3ffu) | 0x7e00u : code) | sign;
}

// What a code stands for.
template <bool BRAIN>
GC_HD float half_value(uint32_t code) {
  if (BRAIN) return float_of(code << 16);
  const uint32_t sign = (code & 0x8000u) << 16, size = (code & 0x7fffu) << 13;
  // No denormal of a float is calculated with: a setting of the processor may make them zeros.
  const uint32_t denormal = bits_of(float_of(size + 0x38800000u) - 0x1p-14f);
  const uint32_t other = size + (code & 0x7c00u ? 0x38000000u : 0u);
  const uint32_t beyond = size + 0x70000000u;
  const bool infinite = (code & 0x7c00u) == 0x7c00u;
  return float_of((infinite ? beyond : code & 0x7c00u ? other : denormal) | sign);
}

}  // namespace gc
