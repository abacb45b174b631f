// Natural compression: the sign and the 8 bits of a float's exponent, 9 bits per code; code << 23 is the float.
#pragma once
#include "common.cuh"

namespace gc {

constexpr int NATURAL_BITS = 9;

// The code of x: the next exponent iff draw < 2 fraction, the fraction as the 23 bits that it has in the float. Twice
// the fraction, and what the draw lacks of 2^24 - 1, carry into the exponent exactly then. Zeros and denormals have
// nothing that could carry, and neither has 2^127, which stands for all that is above.
GC_HD uint32_t natural_code(float x, uint32_t draw) {
  constexpr uint32_t TOP = 0xfe000000u, LEAST = 0x01000000u;  // 2^127 and 2^-126, one bit further up
  const uint32_t size = bits_of(x) << 1;
  const uint32_t kept = size < LEAST ? 0u : size < TOP ? size : TOP;
  const uint32_t exponent = (kept + (0xffffffu - draw)) >> 24;
  return exponent | (x <= -0x1p-126f ? 0x100u : 0u);  // a NaN has no sign
}

GC_HD float natural_value(uint32_t code) { return float_of(code << 23); }

// Whether no encoder sends this code: infinity, NaN or a negative zero.
GC_HD bool natural_wrong(uint32_t code) { return (code & 0xffu) == 0xffu || code == 0x100u; }

}  // namespace gc
