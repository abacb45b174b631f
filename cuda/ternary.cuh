// Ternary codes (TernGrad): the code of an element is t + 1, t in {-1, 0, 1}.
#pragma once
#include "common.cuh"

namespace gc {

// t != 0 iff (u + 1/2) step <= min(|x|, limit), step = scale / 2^24; a NaN anywhere gives 0.
GC_HD uint32_t ternary_code(float x, float limit, float step, uint32_t draw) {
  const float threshold = draw_half(draw) * step, size = magnitude(x);
  const bool hit = (threshold <= size) & (threshold <= limit);
#if defined(__CUDA_ARCH__)
  return 1u + hit - ((hit & is_negative(x)) << 1);
#else
  return (hit ? ~bits_of(x) & 0x80000000u : 0x40000000u) >> 30;  // one blend, at the top, where packing wants it
#endif
}

// What a scale is multiplied with the draws as; infinity, which no magnitude reaches, for a scale that counts as 0.
GC_HD float ternary_step(float scale) { return scale < TINY ? float_of(0x7f800000u) : scale * 0x1p-24f; }

// The value of a sum of codes of one over all `count` workers.
GC_HD float ternary_unit(float scale, float count) { return scale < TINY ? 0.0f : scale / count; }

}  // namespace gc
