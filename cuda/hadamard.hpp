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

// a + b s of lanes that are 1 or -1 in s: a product without rounding, so one instruction may do both.
inline VecF add_signed(VecF a, VecF b, VecF s) {
#if defined(__AVX512F__)
  return (VecF)_mm512_fmadd_ps((__m512)b, (__m512)s, (__m512)a);
#elif defined(__FMA__)
  return (VecF)_mm256_fmadd_ps((__m256)b, (__m256)s, (__m256)a);
#else
  return a + (VecF)((VecI)b ^ ((VecI)s & INT32_MIN));
#endif
}

// The butterflies of lanes H apart, and of those 2 H, 4 H ... apart.
template <int H, int... LANE>
inline VecF in_vector(VecF v, std::integer_sequence<int, LANE...> lanes) {
  if constexpr (H < WIDTH) {
    return in_vector<2 * H>(add_signed(exchanged<H>(v, lanes), v, VecF{(LANE & H ? -1.0f : 1.0f)...}), lanes);
  } else {
    return v;
  }
}

// The butterflies of R vectors: those 1, 2 ... R / 2 vectors apart.
template <int R>
inline void between_vectors(VecF (&v)[R]) {
  GC_UNROLL
  for (int k = 0; k < R / 2 * __builtin_ctz(R); ++k) {
    const int h = 1 << k / (R / 2), low = k % (R / 2), i = low / h * 2 * h + low % h;
    const VecF a = v[i], b = v[i + h];
    v[i] = a + b;
    v[i + h] = a - b;
  }
}

// The butterflies h, 2 h ... R h / 2 apart of all d elements, from h on while R h <= d; h is at least WIDTH.
template <int R>
inline int64_t levels(float* x, int64_t h, int64_t d) {
  for (; R * h <= d; h *= R) {
    GC_ROLLED for (int64_t start = 0; start < d; start += R * h) {
      GC_ROLLED for (float* at = x + start; at < x + start + h; at += WIDTH) {
        VecF v[R];
        GC_UNROLL
        for (int r = 0; r < R; ++r) v[r] = load_vector<VecF>(at + r * h);
        between_vectors(v);
        GC_UNROLL
        for (int r = 0; r < R; ++r) memcpy(at + r * h, v + r, sizeof *v);
      }
    }
  }
  return h;
}

// What a transform reads: `vector(i)` is elements i ... i + WIDTH - 1, `one(i)` element i, `from(i)` all from i on; there
// are at most MOST elements.
struct Plain {
  static constexpr int64_t MOST = INT64_MAX;
  const float* x;

  VecF vector(int64_t i) const { return load_vector<VecF>(x + i); }
  float one(int64_t i) const { return x[i]; }
  Plain from(int64_t i) const { return {x + i}; }
};

// The same, with the signs that bit 31 - `shift` of each draw has.
struct Flipped {
  static constexpr int64_t MOST = TILE;
  const float* x;
  const uint32_t* draws;
  int shift;

  VecF vector(int64_t i) const {
    return (VecF)(load_vector<VecU>(x + i) ^ (load_vector<VecU>(draws + i) << shift & 0x80000000u));
  }
  float one(int64_t i) const { return float_of(bits_of(x[i]) ^ (draws[i] << shift & 0x80000000u)); }
  Flipped from(int64_t i) const { return {x + i, draws + i, shift}; }
};

// The butterflies up to R WIDTH / 2 apart of the elements of x times `factor`; d is a multiple of R WIDTH.
template <int R, class X>
inline void first_levels(X x, int64_t d, float factor, float* out) {
  GC_ROLLED for (int64_t i = 0; i < d; i += R * WIDTH) {
    VecF v[R];
    GC_UNROLL
    for (int r = 0; r < R; ++r) {
      v[r] = in_vector<1>(x.vector(i + r * WIDTH) * factor, std::make_integer_sequence<int, WIDTH>());
    }
    between_vectors(v);
    GC_UNROLL
    for (int r = 0; r < R; ++r) memcpy(out + i + r * WIDTH, v + r, sizeof *v);
  }
}

// out = the transform of the elements of x times `factor`, d a power of two. `out` may be where x lies.
template <class X>
inline void transform(X x, int64_t d, float factor, float* out) {
  constexpr int R = 8;  // vectors that fit the registers
  if (d > X::MOST) __builtin_unreachable();
  if (d > LEAF) {
    transform(x, d / 2, factor, out);
    transform(x.from(d / 2), d / 2, factor, out + d / 2);
    levels<2>(out, d / 2, d);
  } else if (d >= WIDTH) {
    const bool many = d >= R * WIDTH;
    many ? first_levels<R>(x, d, factor, out) : first_levels<1>(x, d, factor, out);
    levels<2>(out, levels<4>(out, levels<R>(out, many ? R * WIDTH : WIDTH, d), d), d);
  } else {
    for (int64_t i = 0; i < d; ++i) out[i] = x.one(i) * factor;
    for (int64_t h = 1; h < d; h *= 2) {
      for (int64_t start = 0; start < d; start += 2 * h) {
        for (int64_t i = start; i < start + h; ++i) {
          const float a = out[i], b = out[i + h];
          out[i] = a + b;
          out[i + h] = a - b;
        }
      }
    }
  }
}

// out = H x of one segment: the binary digits of its length from the left, the largest first. `out` may be where x lies.
template <class X>
inline void rotate_any(X x, int64_t n, float* out) {
  for (int64_t start = 0; start < n;) {
    int64_t d = 1;
    while (2 * d <= n - start) d *= 2;
    transform(x.from(start), d, (float)(1.0 / std::sqrt((double)d)), out + start);
    start += d;
  }
}

// The same; NaN becomes 0, and what is beyond float32 the largest float.
template <class X>
inline void rotate(X x, int64_t n, float* out) {
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
