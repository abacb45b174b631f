// Walsh-Hadamard transforms of segments.
//
// H of d = 2^k elements: x times 1 / sqrt(d), then (a, b) -> (a + b, a - b) for elements h apart, h = 1, 2, 4 ... d / 2.
// Butterflies of one h do not depend on each other, so blocks may be finished in any order without changing a bit.
#pragma once
#include <algorithm>
#include <cmath>

#include "loops.hpp"

namespace gc {

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
inline void transform(const float* x, int64_t d, float factor, float* out) {
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

// out = H x of one segment: the binary digits of its length from the left, the largest first. `out` may be x.
inline void rotate_any(const float* x, int64_t n, float* out) {
  for (int64_t start = 0; start < n;) {
    int64_t d = 1;
    while (2 * d <= n - start) d *= 2;
    transform(x + start, d, (float)(1.0 / std::sqrt((double)d)), out + start);
    start += d;
  }
}

// The same; NaN becomes 0, and what is beyond float32 the largest float.
inline void rotate(const float* x, int64_t n, float* out) {
  rotate_any(x, n, out);
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

}  // namespace gc
