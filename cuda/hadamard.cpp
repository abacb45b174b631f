// Walsh-Hadamard transforms of segments, and rotated blocks in 4 bits: `gcbench.ops.hadamard`.
//
// Bytes per element: `gc_hadamard` reads 4 and writes 4, `gc_hadamard_encode` reads 4 and writes 1/2,
// `gc_hadamard_decode` reads 1/2 and writes 4. Segments longer than a cache are read and written again.
#include <algorithm>
#include <memory>

#include "blocks.hpp"
#include "hadamard.hpp"
#include "levels.cuh"
#include "called.hpp"

using namespace gc;

namespace {

constexpr int TOP = 7, BITS = 4;
// round(7 y / top), ties to even, for |y| at most `top`, or 0 if `top` is infinity; the integer is in the lowest bits
// of what replaces y, as the number that is added leaves no room for a fraction.
inline void quantize(float* y, float top, int64_t n) {
  GC_SIMD for (int64_t i = 0; i < n; ++i) y[i] = y[i] / top * (float)TOP + 0x1.8p23f;
}

inline uint32_t code_of(float quantized) { return bits_of(quantized) - bits_of(0x1.8p23f) + TOP; }

}  // namespace

// out = H x of each segment. `out` may be x.
int64_t gc_hadamard(const float* x, const Segments& segments, float* out, int threads) {
  for_segments(segments, threads, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const int64_t start = segments.offsets[s];
      rotate(Plain{x + start}, segments.offsets[s + 1] - start, out + start);
    }
  });
  return 0;
}
GC_CALLED(gc_hadamard)

// Packed codes of y = H x of each segment, round(7 y / a) + 7, and a, the largest |y|, or 0 if it is below TINY.
int64_t gc_hadamard_encode(const float* x, int64_t n, const Segments& segments, uint32_t* words, float* scales,
                           int threads) {
  const int64_t longest = segments.longest();
  for (int64_t s = 0; s < segments.count; ++s) {
    if (!segments.length(s)) scales[s] = 0;
  }
  if (longest > GRAIN * TILE) threads = 1;  // each thread rotates all of the segments that its tiles meet
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    std::unique_ptr<float[]> memory(new float[longest + TILE]);
    float* quantized = memory.get();  // the elements from `base` to `done`
    int64_t s = segments.holding(first * TILE), base = segments.offsets[s], done = base;
    for (int64_t start = first * TILE; start < last * TILE && start < n; start += TILE) {
      const int count = (int)(n - start < TILE ? n - start : TILE);
      for (; done < start + count; ++s) {
        if (base < start && start <= done) {
          memmove(quantized, quantized + (start - base), (done - start) * sizeof *quantized);
          base = start;
        }
        const int64_t length = segments.offsets[s + 1] - done;
        float* y = quantized + (done - base);
        rotate(Plain{x + done}, length, y);
        const float top = largest(y, length);
        quantize(y, top >= TINY ? top : float_of(0x7f800000u), length);
        if (length && done >= first * TILE) scales[s] = top >= TINY ? top : 0.0f;
        done += length;
      }
      const float* tile = quantized + (start - base);
      pack_tile<BITS>([=](int i) { return code_of(tile[i]); }, count, words + start / TILE * BITS * LANES);
    }
  });
  return 0;
}
GC_CALLED(gc_hadamard_encode)

// H of (code - 7) / 7 times its segment's scale. Returns 1 if a scale is invalid, 2 if a code is, 3 if
// there are codes other than 7 in a segment whose scale is 0.
int64_t gc_hadamard_decode(const uint32_t* words, const float* scales, int64_t n, const Segments& segments, float* out,
                           int threads) {
  if (!good_scales(scales, segments.count)) return 1;
  int64_t bad = 0;
  for_segments(segments, threads, [&](int64_t from, int64_t to) {
    GC_ALIGNED uint32_t codes[TILE];
    int64_t unpacked = -1;  // the tile whose codes these are
    uint32_t most = 0, coded = 0;
    for (int64_t s = from; s < to; ++s) {
      const int64_t start = segments.offsets[s], stop = segments.offsets[s + 1];
      for (int64_t i = start; i < stop;) {
        const int64_t tile = i / TILE, first = tile * TILE;
        if (tile != unpacked) {
          const int count = (int)(n - first < TILE ? n - first : TILE);
          unpack_tile<BITS>(words + tile * BITS * LANES, count, [&](int k, uint32_t code) { codes[k] = code; });
          unpacked = tile;
        }
        const int begin = (int)(i - first), end = (int)std::min<int64_t>(stop - first, TILE);
        const float scale = scales[s];
        float* values = out + first;
        uint32_t any = 0;
#pragma omp simd reduction(max : most) reduction(| : any)
        for (int k = begin; k < end; ++k) {
          const int32_t level = (int32_t)codes[k] - TOP;
          most = codes[k] > most ? codes[k] : most;
          any |= (uint32_t)level;
          values[k] = level_ratio((float)level, (float)TOP, 1.0f / (float)TOP) * scale;
        }
        coded |= scale == 0 ? any : 0;
        i = first + end;
      }
      rotate(Plain{out + start}, stop - start, out + start);
    }
    report(bad, most > 2 * TOP ? 2 : coded ? 3 : 0);
  });
  return bad;
}
GC_CALLED(gc_hadamard_decode)
