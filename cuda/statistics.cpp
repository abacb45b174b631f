// Largest magnitude, sum and sum of squares of segments on the CPU, in one pass: 4 bytes per element.
//
// Sums are in float64, over tiles of 1024 that begin where their segment does: element i is added to i + 512, then
// i + 256, and so on, and tiles' sums are added the same way until one is left. Tiles do not depend on threads.
#include <math.h>

#include <algorithm>

#include "called.hpp"

using namespace gc;

namespace {

struct Moments {
  double sum, square;
  uint32_t top;  // bits of the largest magnitude: as integers, they order as magnitudes do, and NaN above all
};

// Keep the larger of `top` and the magnitudes of WIDTH elements.
inline void keep_largest(VecI& top, const float* x) {
  const VecI size = load_vector<VecI>(x) & 0x7fffffff;
  top = size > top ? size : top;
}

uint32_t largest_of(VecI tops) {
  int32_t top = 0;
  for (int l = 0; l < WIDTH; ++l) top = tops[l] > top ? tops[l] : top;
  return (uint32_t)top;
}

uint32_t largest(const float* x, int64_t n) {
  constexpr int STEP = 64;
  VecI tops = {};
  const auto keep = [&tops, x](int64_t from) {
    GC_UNROLL
    for (int k = 0; k < STEP; k += WIDTH) keep_largest(tops, x + from + k);
  };
  int64_t i = n < APART ? 0 : from_four<STEP>(n, keep);
  GC_ROLLED for (; i + STEP <= n; i += STEP) {
    ask_lines<STEP / 16>(x + i - TILE, 0);
    keep(i);
  }
  uint32_t top = largest_of(tops);
  for (; i < n; ++i) {
    const uint32_t u = bits_of(x[i]) & 0x7fffffffu;
    top = u > top ? u : top;
  }
  return top;
}

Moments tile_moments(const float* x, int count) {
  GC_ALIGNED double sum[TILE / 2], square[TILE / 2];
  if (count == TILE) {
    constexpr int PART = TILE / 4, STEP = 16;
    VecI tops = {};
    GC_ROLLED for (int start = 0; start < PART; start += STEP) {
      ask_lines<4>(x - TILE, start / 4);  // of the next tile
      GC_SIMD for (int i = start; i < start + STEP; ++i) {
        const double a = x[i], b = x[i + PART], c = x[i + 2 * PART], d = x[i + 3 * PART];
        sum[i] = (a + c) + (b + d);
        square[i] = (a * a + c * c) + (b * b + d * d);
      }
      GC_UNROLL
      for (int k = 0; k < STEP; k += WIDTH) {
        GC_UNROLL
        for (int part = 0; part < TILE; part += PART) keep_largest(tops, x + part + start + k);
      }
    }
    return {halve(sum, PART), halve(square, PART), largest_of(tops)};
  }
  // Zeros up to a power of two; more than half of it are elements.
  const int width = width_of(count), half = width > 1 ? width / 2 : 1, both = count - half;
  GC_SIMD for (int i = 0; i < half; ++i) {
    const double a = x[i];
    sum[i] = a;
    square[i] = a * a;
  }
  if (width > 1) {
    GC_SIMD for (int i = 0; i < both; ++i) {
      const double b = x[i + half];
      sum[i] += b;
      square[i] += b * b;
    }
    GC_SIMD for (int i = both; i < half; ++i) sum[i] += 0.0;  // -0.0 becomes 0.0
  }
  return {halve(sum, half), halve(square, half), largest(x, count)};
}

// Call take(segment, moments) for each segment, in any order and from any thread.
template <class Take>
void for_segments(const float* x, const Segments& segments, int threads, Take take) {
  const int64_t tiles = segments.tiles[segments.count];
  std::unique_ptr<double[]> all_sums(new double[2 * tiles]);
  std::unique_ptr<uint32_t[]> all_tops(new uint32_t[tiles]);
  double *sums = all_sums.get(), *squares = sums + tiles;
  uint32_t* tops = all_tops.get();
  parallel(tiles, threads, [&](int64_t first, int64_t last) {
    int64_t s = segments.of_tile(first);
    for (int64_t t = first; t < last; ++t) {
      while (segments.tiles[s + 1] <= t) ++s;
      const int64_t start = segments.offsets[s] + (t - segments.tiles[s]) * TILE, left = segments.offsets[s + 1] - start;
      const Moments got = tile_moments(x + start, (int)(left < TILE ? left : TILE));
      // Where there are more tiles, the last one is filled up with zeros to 1024: -0.0 becomes 0.0.
      sums[t] = left < TILE && start > segments.offsets[s] ? got.sum + 0.0 : got.sum;
      squares[t] = got.square;
      tops[t] = got.top;
    }
  });
  for (int64_t s = 0; s < segments.count; ++s) {
    const int64_t first = segments.tiles[s], number = segments.tiles[s + 1] - first;
    Moments all{0.0, 0.0, 0};
    for (int64_t t = first; t < first + number; ++t) all.top = tops[t] > all.top ? tops[t] : all.top;
    if (number) {
      all.sum = halve_all(sums + first, number);
      all.square = halve_all(squares + first, number);
    }
    take(s, all);
  }
}

}  // namespace

// Each output, (m,), may be null.
int64_t gc_segment_statistics(const float* x, const Segments& segments, float* absmax, double* sum, double* square,
                              int threads) {
  for_segments(x, segments, threads, [&](int64_t s, const Moments& got) {
    if (absmax) absmax[s] = float_of(got.top);
    if (sum) sum[s] = got.sum;
    if (square) square[s] = got.square;
  });
  return 0;
}
GC_CALLED(gc_segment_statistics)

// The largest magnitude alone, (m,).
int64_t gc_segment_absmax(const float* x, const Segments& segments, float* absmax, int threads) {
  const int64_t tiles = segments.tiles[segments.count];
  uint32_t* tops = (uint32_t*)absmax;  // bits of floats: integers order as magnitudes do
  for (int64_t s = 0; s < segments.count; ++s) tops[s] = 0;
  parallel(tiles, threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first, s = segments.of_tile(first); t < last;) {
      while (segments.tiles[s + 1] <= t) ++s;
      const int64_t end = segments.tiles[s + 1] < last ? segments.tiles[s + 1] : last;
      const int64_t start = segments.offsets[s] + (t - segments.tiles[s]) * TILE;
      int64_t stop = segments.offsets[s] + (end - segments.tiles[s]) * TILE;
      if (stop > segments.offsets[s + 1]) stop = segments.offsets[s + 1];
      const uint32_t top = largest(x + start, stop - start);
      if (segments.tiles[s] >= first && segments.tiles[s + 1] <= last) {
        tops[s] = top;
      } else {  // another thread has the rest
#pragma omp critical
        tops[s] = top > tops[s] ? top : tops[s];
      }
      t = end;
    }
  });
  return 0;
}
GC_CALLED(gc_segment_absmax)

// Thresholds and scales of ternary codes, (m,) each: `gcbench.ops.ternary.scales`. `limit` is null for
// clip = 0, and with `at_limit` only `scale` is written. Where all values are equal nothing is clipped.
int64_t gc_ternary_scales(const float* x, const Segments& segments, float clip, int at_limit, float* limit,
                          float* scale, int threads) {
  if (clip == 0) return gc_segment_absmax(x, segments, scale, threads);
  for_segments(x, segments, threads, [&](int64_t s, const Moments& got) {
    const double count = std::max<double>((double)segments.length(s), 1.0), mean = got.sum / count;
    const double spread = got.square / count - mean * mean;
    const float sigma = (float)sqrt(spread < 0 ? 0.0 : spread), largest = float_of(got.top);
    const bool even = sigma <= largest * EVEN;
    float bound = even ? FLOAT_MAX : sigma * clip;
    if (bound > FLOAT_MAX) bound = FLOAT_MAX;
    if (at_limit) {
      scale[s] = even ? largest : bound;
    } else {
      limit[s] = bound;
      scale[s] = largest < bound || largest != largest ? largest : bound;
    }
  });
  return 0;
}
GC_CALLED(gc_ternary_scales)
