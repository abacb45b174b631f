// Blocks of 8-bit numbers with 128 levels on the CPU: `gcbench.ops.u8bit`.
//
// |c| is the nearest of the levels to |x| / a, a the block's largest magnitude; x' = sign(c) level[|c|] a. Bytes per
// element: encoding reads 4, or 8 where a block is longer than SHORT, and writes 1; decoding reads 1 and writes 4. The
// look-ups read 64 KiB of `steps`, but 4 KiB suffice for numbers between 2^-8 and 1.
#include "blocks.hpp"
#include "called.hpp"

using namespace gc;

namespace {

constexpr int TOP_CODE = 127;

// The codes of a part of a block whose largest magnitude is `top`; zeros if that counts as zero or is not finite.
inline void encode_part(const float* x, float top, int count, const int32_t* steps, int8_t* codes) {
  if (!(top >= TINY && top <= FLOAT_MAX)) {
    memset(codes, 0, count);
    return;
  }
  const auto code = [=](float value) {
    const uint32_t share = bits_of(magnitude(value) / top);
    const int32_t size = (steps[share >> 16] + (int32_t)(share & 0xffffu)) >> 16;
    return (int8_t)(is_negative(value) ? -size : size);
  };
  int i = 0;
  GC_ROLLED for (; i + STEP <= count; i += STEP) {
    ask_lines<HALF / 16>(x + i, 0);
    GC_SIMD for (int k = i; k < i + STEP; ++k) codes[k] = code(x[k]);
  }
  GC_SIMD for (int k = i; k < count; ++k) codes[k] = code(x[k]);
}

}  // namespace

// Codes of x, (n,), and the scale of each block: its largest magnitude, or 0 if that is below TINY.
GC_API int64_t gc_u8bit_encode(const float* x, int64_t n, const int64_t* table, int64_t m, const int32_t* steps,
                               int8_t* codes, float* scales, int threads) {
  const auto part = [=](const float* x, float top, int count, int8_t* out) { encode_part(x, top, count, steps, out); };
  encode_blocks(x, n, Segments(table, m), codes, scales, threads, part);
  return 0;
}
GC_CALLED(gc_u8bit_encode)

// values[c + 127] a, `values` those of the codes -127 to 127. Returns 1 if a scale is invalid, 2 if a code is -128, 3 if
// there are codes other than zero in a block whose scale is 0.
GC_API int64_t gc_u8bit_decode(const int8_t* codes, const float* scales, int64_t n, const int64_t* table, int64_t m,
                               const float* values, float* out, int threads) {
  const Segments segments(table, m);
  if (!good_scales(scales, m)) return 1;
  const bool stream = n >= STREAM_FROM;
  int bad = 0;
  parallel(tiles_of(n), threads, [=, &segments, &bad](int64_t first, int64_t last) {
    GC_ALIGNED float row[TILE];
    uint32_t coded = 0;
    int lowest = 0;
    int64_t at = segments.holding(first * TILE);
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE;
      const int count = (int)(n - start < TILE ? n - start : TILE);
      const int8_t* part = codes + start;
      int low = 0;
#pragma omp simd reduction(min : low)
      for (int i = 0; i < count; ++i) low = part[i] < low ? part[i] : low;
      lowest = low < lowest ? low : lowest;
      if (lowest < -TOP_CODE) break;
      for_parts(segments, start, count, at, [&](int64_t s, int begin, int end) {
        const float scale = scales[s];
        if (scale == 0) {
          for (int i = begin; i < end; ++i) coded |= part[i] != 0;
        }
        GC_SIMD for (int i = begin; i < end; ++i) row[i] = values[part[i] + TOP_CODE] * scale;
      });
      write_tile(out + start, row, count, stream);
    }
    if (stream) end_stream();
    if (lowest < -TOP_CODE || coded) {
#pragma omp critical
      bad = lowest < -TOP_CODE ? 2 : bad ? bad : 3;
    }
  });
  return bad;
}
GC_CALLED(gc_u8bit_decode)
