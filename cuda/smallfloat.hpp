// Floats of few bits without infinities: a sign, an exponent and a fraction, as in IEEE 754, with denormals.
#pragma once
#include "loops.hpp"

namespace gc {

// The format whose magnitudes have the codes 0 ... TOP_CODE; a larger one is NaN.
template <int BITS_, int FRACTION, int BIAS, uint32_t TOP_CODE>
struct SmallFloat {
  static constexpr int BITS = BITS_, SHIFT = 23 - FRACTION;
  static constexpr uint32_t TOP = TOP_CODE, SIZE = (1u << (BITS - 1)) - 1, REBASE = (uint32_t)(127 - BIAS) << 23;
  static constexpr uint32_t LEAST_NORMAL = REBASE + (1u << 23);
  // A float whose last place is that of the denormals.
  static constexpr uint32_t DENORMAL = LEAST_NORMAL + ((uint32_t)SHIFT << 23);

  // The bits of a magnitude, at most the largest value.
  static GC_HD uint32_t saturated(float x) {
    const int32_t size = (int32_t)(bits_of(x) & 0x7fffffffu), most = (int32_t)(REBASE + (TOP << SHIFT));
    return (uint32_t)(size < most ? size : most);
  }

  // The code nearest to a magnitude, given as `saturated` returns it; ties to even.
  static GC_HD uint32_t nearest(uint32_t size) {
    const uint32_t denormal = bits_of(float_of(size) + float_of(DENORMAL)) - DENORMAL;
    const uint32_t half = (1u << (SHIFT - 1)) - 1;
    const uint32_t normal = (size + half + (size >> SHIFT & 1u) - REBASE) >> SHIFT;
    return size < LEAST_NORMAL ? denormal : normal;
  }

  // The code below a magnitude, given as `saturated` returns it, or above it with
  // the probability that is unbiased; `draw` is uniform on 24 bits.
  static GC_HD uint32_t stochastic(uint32_t size, uint32_t draw) {
    const float steps = float_of(size) * float_of((277u << 23) - DENORMAL);
    const int32_t whole = (int32_t)steps;
    const int32_t low = whole + ((float)(int32_t)draw * 0x1p-24f < steps - (float)whole);
    const uint32_t rest = size << (32 - SHIFT) >> 8;  // in units of 2^-24
    const int32_t normal = (int32_t)((size - REBASE) >> SHIFT) + ((int32_t)draw < (int32_t)rest);
    return (uint32_t)(size < LEAST_NORMAL ? low : normal);
  }

  // The value of a code that is a number.
  static GC_HD float value(uint32_t code) {
    const uint32_t size = (code & SIZE) << SHIFT;
    const float denormal = float_of(size + LEAST_NORMAL) - float_of(LEAST_NORMAL);
    return float_of(bits_of(size < (1u << 23) ? denormal : float_of(size + REBASE)) | code >> (BITS - 1) << 31);
  }
};

typedef SmallFloat<8, 3, 7, 126> E4M3;
typedef SmallFloat<4, 1, 1, 7> E2M1;

}  // namespace gc
