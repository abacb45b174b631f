// Walsh-Hadamard transforms of segments, and rotated blocks in 4 bits: `gcbench.ops.hadamard`.
//
// H of d = 2^k elements: x times 1 / sqrt(d), then (a, b) -> (a + b, a - b) for elements h apart, h = 1, 2, 4 ... d / 2.
// Butterflies of one h do not depend on each other, so blocks may be finished in any order without changing a bit.
// Bytes per element: `gc_hadamard` reads 4 and writes 4, `gc_hadamard_encode` reads 4 and writes 1/2,
// `gc_hadamard_decode` reads 1/2 and writes 4. Segments longer than a cache are read and written again.
#include <algorithm>
#include <cmath>
#include <memory>

#include "blocks.hpp"
#include "levels.cuh"
#include "called.hpp"

using namespace gc;

namespace {

constexpr int TOP = 7, BITS = 4;
constexpr int64_t LEAF = 2048;  // elements whose butterflies are finished in the first-level cache

// Lane l of the result is lane l ^ H of v.
template <int H, int... LANE>
inline VecF exchanged(VecF v, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
  return __builtin_shufflevector(v, v, (LANE ^ H)...);
#else
  return __builtin_shuffle(v, VecI{(LANE ^ H)...});
#endif
}

template <int H, int... LANE>
inline VecI negated(std::integer_sequence<int, LANE...>) {
  return VecI{(LANE & H ? INT32_MIN : 0)...};
}

// The butterflies of lanes H apart, and of those 2 H, 4 H ... apart.
template <int H>
inline VecF in_vector(VecF v) {
  if constexpr (H < WIDTH) {
    constexpr auto lanes = std::make_integer_sequence<int, WIDTH>();
    return in_vector<2 * H>(exchanged<H>(v, lanes) + (VecF)((VecI)v ^ negated<H>(lanes)));
  } else {
    return v;
  }
}

// The butterflies h apart of 2 h elements.
inline void level(float* x, int64_t h) {
  GC_SIMD for (int64_t j = 0; j < h; ++j) {
    const float a = x[j], b = x[j + h];
    x[j] = a + b;
    x[j + h] = a - b;
  }
}

// The butterflies h apart and those 2 h apart of 4 h elements, which are read and written once.
inline void two_levels(float* x, int64_t h) {
  GC_SIMD for (int64_t j = 0; j < h; ++j) {
    const float a = x[j], b = x[j + h], c = x[j + 2 * h], d = x[j + 3 * h];
    const float sum = a + b, difference = a - b, more = c + d, other = c - d;
    x[j] = sum + more;
    x[j + h] = difference + other;
    x[j + 2 * h] = sum - more;
    x[j + 3 * h] = difference - other;
  }
}

// out = the transform of the elements of x times `factor`, d a power of two. `out` may be x.
void transform(const float* x, int64_t d, float factor, float* out) {
  if (d > LEAF) {
    transform(x, d / 2, factor, out);
    transform(x + d / 2, d / 2, factor, out + d / 2);
    level(out, d / 2);
    return;
  }
  int64_t h = 1;
  if (d >= WIDTH) {
    GC_ROLLED for (int64_t i = 0; i < d; i += WIDTH) {
      const VecF v = in_vector<1>(load_vector<VecF>(x + i) * factor);
      memcpy(out + i, &v, sizeof v);
    }
    h = WIDTH;
  } else {
    for (int64_t i = 0; i < d; ++i) out[i] = x[i] * factor;
  }
  for (; 4 * h <= d; h *= 4) {
    GC_ROLLED for (int64_t i = 0; i < d; i += 4 * h) two_levels(out + i, h);
  }
  if (h < d) level(out, h);
}

// out = H x of one segment: the binary digits of its length from the left, the largest first; NaN becomes 0, and what
// is beyond float32 the largest float. `out` may be x.
void rotate(const float* x, int64_t n, float* out) {
  for (int64_t start = 0; start < n;) {
    int64_t d = 1;
    while (2 * d <= n - start) d *= 2;
    transform(x + start, d, (float)(1.0 / std::sqrt((double)d)), out + start);
    start += d;
  }
  GC_SIMD for (int64_t i = 0; i < n; ++i) {
    const float v = out[i], high = v > FLOAT_MAX ? FLOAT_MAX : v, low = high < -FLOAT_MAX ? -FLOAT_MAX : high;
    out[i] = v == v ? low : 0.0f;
  }
}

// Call f(first segment, last segment) on each thread, which has the segments that begin in its tiles.
template <class F>
void for_segments(const Segments& segments, int threads, F f) {
  const int64_t* end = segments.offsets + segments.count;
  parallel(tiles_of(*end), threads, [&](int64_t first, int64_t last) {
    const int64_t from = std::lower_bound(segments.offsets, end, first * TILE) - segments.offsets;
    f(from, std::lower_bound(segments.offsets, end, last * TILE) - segments.offsets);
  });
}

// round(7 y / top), ties to even, for |y| at most `top`, or 0 if `top` is infinity; the integer is in the lowest bits
// of what replaces y, as the number that is added leaves no room for a fraction.
inline void quantize(float* y, float top, int64_t n) {
  GC_SIMD for (int64_t i = 0; i < n; ++i) y[i] = y[i] / top * (float)TOP + 0x1.8p23f;
}

inline uint32_t code_of(float quantized) { return bits_of(quantized) - bits_of(0x1.8p23f) + TOP; }

}  // namespace

// out = H x of each segment. `out` may be x.
GC_API int64_t gc_hadamard(const float* x, const int64_t* table, int64_t m, float* out, int threads) {
  const Segments segments(table, m);
  for_segments(segments, threads, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const int64_t start = segments.offsets[s];
      rotate(x + start, segments.offsets[s + 1] - start, out + start);
    }
  });
  return 0;
}
GC_CALLED(gc_hadamard)

// Packed codes of y = H x of each segment, round(7 y / a) + 7, and a, the largest |y|, or 0 if it is below TINY.
GC_API int64_t gc_hadamard_encode(const float* x, int64_t n, const int64_t* table, int64_t m, uint32_t* words,
                                  float* scales, int threads) {
  const Segments segments(table, m);
  int64_t longest = 0;
  for (int64_t s = 0; s < m; ++s) {
    const int64_t length = segments.offsets[s + 1] - segments.offsets[s];
    longest = std::max(longest, length);
    if (!length) scales[s] = 0;
  }
  if (longest > GRAIN * TILE) threads = 1;  // each thread rotates all of the segments that its tiles meet
  bool failed = false;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    std::unique_ptr<float[]> memory(new (std::nothrow) float[longest + TILE]);
    float* quantized = memory.get();  // the elements from `base` to `done`
    if (!quantized) {
#pragma omp atomic write
      failed = true;
      return;
    }
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
        rotate(x + done, length, y);
        const float top = largest(y, length);
        quantize(y, top >= TINY ? top : float_of(0x7f800000u), length);
        if (length && done >= first * TILE) scales[s] = top >= TINY ? top : 0.0f;
        done += length;
      }
      const float* tile = quantized + (start - base);
      pack_tile<BITS>([=](int i) { return code_of(tile[i]); }, count, words + start / TILE * BITS * LANES);
    }
  });
  return failed ? NO_MEMORY : 0;
}
GC_CALLED(gc_hadamard_encode)

// H of (code - 7) / 7 times its segment's scale. Returns 1 if a scale is invalid, 2 if a code is, 3 if
// there are codes other than 7 in a segment whose scale is 0.
GC_API int64_t gc_hadamard_decode(const uint32_t* words, const float* scales, int64_t n, const int64_t* table,
                                  int64_t m, float* out, int threads) {
  const Segments segments(table, m);
  if (!good_scales(scales, m)) return 1;
  int bad = 0;
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
      rotate(out + start, stop - start, out + start);
    }
    if (most > 2 * TOP || coded) {
#pragma omp critical
      bad = most > 2 * TOP ? 2 : bad ? bad : 3;
    }
  });
  return bad;
}
GC_CALLED(gc_hadamard_decode)
