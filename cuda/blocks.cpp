// Blockwise 8-bit codes on the CPU. Encoding with its statistic reads 4 bytes an element where blocks are short, else
// 8, and writes 1; decoding reads 1 and writes 4.
#include <stdlib.h>

#include "blocks.cuh"
#include "levels.cuh"
#include "loops.hpp"

using namespace gc;

GC_API int64_t gc_segment_absmax(const float* x, const int64_t* table, int64_t m, float* absmax, int threads);

namespace {

constexpr int64_t SHORT = 16 * TILE;  // elements of a block that the cache keeps between its two passes

float largest(const float* x, int64_t n) {
  uint32_t top = 0;  // bits of magnitudes order as these do, and NaN above all
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t u = bits_of(x[i]) & 0x7fffffffu;
    top = u > top ? u : top;
  }
  return float_of(top);
}

}  // namespace

// Codes of x, (n,), and the scale of each block; `stochastic` or nearest. The key is for the draws.
GC_API int64_t gc_int8_encode(const float* x, int64_t n, const int64_t* table, int64_t m, int stochastic,
                              uint64_t seed, uint64_t offset, uint32_t step, uint32_t who, int8_t* codes,
                              float* scales, int threads) {
  const Segments segments(table, m);
  const Key key{seed, offset, step, who};
  bool fused = true;
  for (int64_t s = 0; s < m; ++s) fused &= segments.offsets[s + 1] - segments.offsets[s] <= SHORT;
  if (!fused) {
    gc_segment_absmax(x, table, m, scales, threads);
  } else {
    for (int64_t s = 0; s < m; ++s) {
      if (segments.offsets[s] == segments.offsets[s + 1]) scales[s] = 0;
    }
  }
  parallel(tiles_of(n), threads, [=, &segments, &key](int64_t first, int64_t last) {
    // A block's largest magnitude is found when its first tile is at hand; where threads share one, each finds it.
    auto spread = spread_values<1>(segments, first * TILE, [=, &segments](int64_t s, float* values) {
      const int64_t begin = segments.offsets[s], length = segments.offsets[s + 1] - begin;
      const float top = fused ? largest(x + begin, length) : scales[s];
      if (fused && begin >= first * TILE) scales[s] = top;
      values[0] = int8_divisor(top);
    });
    Draws draws(key, first);
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      int8_t* out = codes + t * TILE;
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      // A tile is a page of memory, beyond which no hardware fetches ahead.
      for (int i = 0; i < TILE; i += 16) __builtin_prefetch(part + 2 * TILE + i, 0, 2);
      spread.tile(t * TILE, count);
      const float* divisor = spread.row[0];
      if (stochastic) {
        const uint32_t* draw = draws.tile();
        GC_SIMD for (int i = 0; i < count; ++i) out[i] = (int8_t)int8_stochastic(part[i], divisor[i], draw[i]);
      } else {
        GC_SIMD for (int i = 0; i < count; ++i) out[i] = (int8_t)int8_nearest(part[i], divisor[i]);
      }
    }
  });
  for (int64_t s = 0; s < m; ++s) scales[s] = int8_scale(scales[s]);
  return 0;
}

// (code / 127) * scale, times `count`, added to `onto` (null: not). Returns 1 if a scale, 2 if a code is what no
// encoder sends. `out` may be `onto`.
GC_API int64_t gc_int8_decode(const int8_t* codes, const float* scales, int64_t n, const int64_t* table, int64_t m,
                              const float* onto, float count, float* out, int threads) {
  const Segments segments(table, m);
  for (int64_t s = 0; s < m; ++s) {
    if (!(scales[s] == 0 || (scales[s] >= TINY && scales[s] <= FLOAT_MAX))) return 1;
  }
  const bool stream = n >= STREAM_FROM && onto != out;
  const float reciprocal = 1.0f / (float)INT8_TOP;
  int bad = 0;
  parallel(tiles_of(n), threads, [=, &segments, &bad](int64_t first, int64_t last) {
    auto spread = spread_values<1>(segments, first * TILE, [=](int64_t s, float* values) { values[0] = scales[s]; });
    GC_ALIGNED float tile[TILE];
    float* values = tile;
    int lowest = 0;
    for (int64_t t = first; t < last; ++t) {
      const int8_t* part = codes + t * TILE;
      const int some = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      spread.tile(t * TILE, some);
      const float* scale = spread.row[0];
#pragma omp simd reduction(min : lowest)
      for (int i = 0; i < some; ++i) {
        const int code = part[i];
        lowest = code < lowest ? code : lowest;
        values[i] = level_ratio((float)code, (float)INT8_TOP, reciprocal) * scale[i];
      }
      if (onto) {
        const float* base = onto + t * TILE;
        GC_SIMD for (int i = 0; i < some; ++i) values[i] = base[i] + values[i] * count;
      }
      write_tile(out + t * TILE, values, some, stream);
    }
    if (stream) end_stream();
    if (lowest < -INT8_TOP) {
#pragma omp critical
      bad = 2;
    }
  });
  return bad;
}
