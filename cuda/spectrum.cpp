// What lies around a Fourier transform on the CPU: segments scaled by powers of two and back, energies of bins, and
// the step between a real transform and a complex one of half the length: `gcbench.ops.spectrum`, `gcbench.ops.transform`.
#include <stdlib.h>

#include "loops.hpp"

using namespace gc;

// In statistics.cpp.
GC_API int64_t gc_segment_absmax(const float* x, const int64_t* table, int64_t m, float* absmax, int threads);

namespace {

constexpr int64_t PIECE = TILE / 2;  // complex numbers of one tile

// Round to the nearest fp16, ties to even, and back. What is added has the exponent at which float32 rounds to fp16's
// digits: 11 of them, or multiples of 2^-24. Of what is scaled nothing overflows fp16; infinities and NaN stay.
inline float to_half(float x) {
  const uint32_t u = bits_of(x), sign = u & 0x80000000u, exponent = u & 0x7f800000u, least = (127 - 14) << 23;
  const float shift = float_of((exponent > least ? exponent : least) + (13 << 23)), size = float_of(u ^ sign);
  const float rounded = (size + shift) - shift;
  return float_of(exponent == 0x7f800000u ? u : bits_of(rounded) | sign);
}

// f(segment, first element, elements) for tiles, each inside one segment.
template <class F>
void for_tiles(const Segments& segments, int threads, F f) {
  parallel(segments.tiles[segments.count], threads, [&](int64_t first, int64_t last) {
    int64_t s = segments.of_tile(first);
    for (int64_t t = first; t < last; ++t) {
      while (segments.tiles[s + 1] <= t) ++s;
      const int64_t start = segments.offsets[s] + (t - segments.tiles[s]) * TILE, left = segments.offsets[s + 1] - start;
      f(s, start, (int)(left < TILE ? left : TILE));
    }
  });
}

// Complex numbers, moved whole.
typedef uint64_t __attribute__((may_alias)) Pair;

// Real and imaginary parts of a piece, apart until all are computed: where a difference and a sum are written side by
// side, gcc 12 makes one fused instruction of both, -ffp-contract=off or not, and the bytes differ.
struct Parts {
  GC_ALIGNED float re[PIECE], im[PIECE];

  void join(int count, float* to) const {
    GC_SIMD for (int i = 0; i < count; ++i) {
      to[2 * i] = re[i];
      to[2 * i + 1] = im[i];
    }
  }
};

// Copy complex numbers backwards: the last of them first.
inline void reverse(const float* from, int count, float* to) {
  const Pair* pairs = (const Pair*)from;
  Pair* out = (Pair*)to;
  GC_SIMD for (int i = 0; i < count; ++i) out[i] = pairs[count - 1 - i];
}

// f(first complex number, how many) for pieces of `length` numbers.
template <class F>
void for_pieces(int64_t length, int threads, F f) {
  parallel((length + PIECE - 1) / PIECE, threads, [&](int64_t first, int64_t last) {
    for (int64_t start = first * PIECE; start < last * PIECE && start < length; start += PIECE) {
      f(start, (int)(length - start < PIECE ? length - start : PIECE));
    }
  });
}

// Tables of factors: real and imaginary part of a, then of b, each h + 1 floats.
struct Factors {
  const float *ar, *ai, *br, *bi;

  Factors(const float* factors, int64_t h)
      : ar(factors), ai(factors + (h + 1)), br(factors + 2 * (h + 1)), bi(factors + 3 * (h + 1)) {}
};

}  // namespace

// unit = the power of two below a segment's largest magnitude, in [2^-110, 2^126], over `peak`, a power of two;
// out = x / unit, rounded to fp16 if `half`, and zeros in a segment whose largest is below `tiny`.
GC_API int64_t gc_spectrum_scaled(const float* x, const int64_t* table, int64_t m, float peak, float tiny, int half,
                                  float* unit, float* out, int threads) {
  const Segments segments(table, m);
  gc_segment_absmax(x, table, m, unit, threads);
  // The reciprocal of a power of two is exact; 0 says that the segment counts as zero.
  float* inverse = (float*)malloc((m + 1) * sizeof *inverse);
  for (int64_t s = 0; s < m; ++s) {
    const float power = float_of(bits_of(unit[s]) & 0x7f800000u);
    const bool zero = unit[s] < tiny;
    unit[s] = (power < 0x1p-110f ? 0x1p-110f : power > 0x1p126f ? 0x1p126f : power) / peak;
    inverse[s] = zero ? 0.0f : 1.0f / unit[s];
  }
  for_tiles(segments, threads, [&](int64_t s, int64_t start, int count) {
    const float by = inverse[s], *from = x + start;
    float* to = out + start;
    if (by == 0) {
      for (int i = 0; i < count; ++i) to[i] = 0.0f;
    } else if (half) {
      GC_SIMD for (int i = 0; i < count; ++i) to[i] = to_half(from[i] * by);
    } else {
      GC_SIMD for (int i = 0; i < count; ++i) to[i] = from[i] * by;
    }
  });
  free(inverse);
  return 0;
}

// energy = |X|^2 and out = X unit for the bins of all segments; `table` counts floats, two a bin.
GC_API int64_t gc_spectrum_unscaled(const float* bins, const float* unit, const int64_t* table, int64_t m, float* out,
                                    float* energy, int threads) {
  const Segments segments(table, m);
  for_tiles(segments, threads, [&](int64_t s, int64_t start, int count) {
    const float by = unit[s], *from = bins + start;
    float *to = out + start, *size = energy + start / 2;
    GC_SIMD for (int i = 0; i < count / 2; ++i) {
      const float re = from[2 * i], im = from[2 * i + 1];
      size[i] = re * re + im * im;
      to[2 * i] = re * by;
      to[2 * i + 1] = im * by;
    }
  });
  return 0;
}

// out = x unit, within the finite floats.
GC_API int64_t gc_spectrum_restored(const float* x, const float* unit, const int64_t* table, int64_t m, float* out,
                                    int threads) {
  const Segments segments(table, m);
  for_tiles(segments, threads, [&](int64_t s, int64_t start, int count) {
    const float by = unit[s], *from = x + start;
    float* to = out + start;
    GC_SIMD for (int i = 0; i < count; ++i) {
      const float v = from[i] * by;
      to[i] = v > FLOAT_MAX ? FLOAT_MAX : v < -FLOAT_MAX ? -FLOAT_MAX : v;
    }
  });
  return 0;
}

// out = x chirp, then zeros up to `width`.
GC_API int64_t gc_spectrum_pad(const float* x, const float* chirp, int64_t length, int64_t width, float* out,
                               int threads) {
  memset(out + 2 * length, 0, (width - length) * sizeof(Pair));
  for_pieces(length, threads, [&](int64_t start, int count) {
    Parts parts;
    const float *from = x + 2 * start, *by = chirp + 2 * start;
    GC_SIMD for (int i = 0; i < count; ++i) {
      const float re = from[2 * i], im = from[2 * i + 1], r = by[2 * i], q = by[2 * i + 1];
      parts.re[i] = re * r - im * q;
      parts.im[i] = re * q + im * r;
    }
    parts.join(count, out + 2 * start);
  });
  return 0;
}

// out = v chirp, or the conjugate of it.
GC_API int64_t gc_spectrum_cut(const float* waves, const float* chirp, int64_t length, int conjugate, float* out,
                               int threads) {
  const uint32_t flip = conjugate ? 0x80000000u : 0;
  for_pieces(length, threads, [&](int64_t start, int count) {
    Parts parts;
    const float *v = waves + 2 * start, *by = chirp + 2 * start;
    GC_SIMD for (int i = 0; i < count; ++i) {
      const float re = v[2 * i], im = v[2 * i + 1], r = by[2 * i], q = by[2 * i + 1];
      parts.re[i] = re * r - im * q;
      parts.im[i] = float_of(bits_of(re * q + im * r) ^ flip);
    }
    parts.join(count, out + 2 * start);
  });
  return 0;
}

// out_k = a_k v_k + b_k conj v_h-k for k = 0 ... h; v_h is v_0.
GC_API int64_t gc_spectrum_fold(const float* waves, const float* factors, int64_t h, float* out, int threads) {
  const Factors f(factors, h);
  for_pieces(h + 1, threads, [&](int64_t start, int count) {
    GC_ALIGNED float own[2 * PIECE], back[2 * PIECE];
    Parts parts;
    // v_k for these k, the last of them h, and v_h-k, the first of them h, which is taken from 0.
    const int whole = start + count <= h ? count : count - 1, skip = start == 0;
    memcpy(own, waves + 2 * start, whole * sizeof(Pair));
    if (whole < count) memcpy(own + 2 * whole, waves, sizeof(Pair));
    if (skip) memcpy(back, waves, sizeof(Pair));
    reverse(waves + 2 * (h - start - count + 1), count - skip, back + 2 * skip);
    const float *ar = f.ar + start, *ai = f.ai + start, *br = f.br + start, *bi = f.bi + start;
    GC_SIMD for (int i = 0; i < count; ++i) {
      const float re = own[2 * i], im = own[2 * i + 1], r = back[2 * i], q = back[2 * i + 1];
      parts.re[i] = (ar[i] * re - ai[i] * im) + (br[i] * r + bi[i] * q);
      parts.im[i] = (ar[i] * im + ai[i] * re) + (bi[i] * r - br[i] * q);
    }
    parts.join(count, out + 2 * start);
  });
  return 0;
}

// out_k = 2 (a_k conj X_k + conj b_h-k X_h-k) for k < h, then zeros up to `width`; X_0 and X_h count as real.
GC_API int64_t gc_spectrum_unfold(const float* bins, const float* factors, int64_t h, int64_t width, float* out,
                                  int threads) {
  const Factors f(factors, h);
  memset(out + 2 * h, 0, (width - h) * sizeof(Pair));
  for_pieces(h, threads, [&](int64_t start, int count) {
    GC_ALIGNED float own[2 * PIECE], back[2 * PIECE], br[PIECE], bi[PIECE];
    Parts parts;
    const int64_t last = h - start - count + 1;  // the least of h - k
    memcpy(own, bins + 2 * start, count * sizeof(Pair));
    reverse(bins + 2 * last, count, back);
    if (start == 0) own[1] = back[1] = 0.0f;
    GC_SIMD for (int i = 0; i < count; ++i) {
      br[i] = f.br[last + count - 1 - i];
      bi[i] = f.bi[last + count - 1 - i];
    }
    const float *ar = f.ar + start, *ai = f.ai + start;
    GC_SIMD for (int i = 0; i < count; ++i) {
      const float re = own[2 * i], im = own[2 * i + 1], r = back[2 * i], q = back[2 * i + 1];
      parts.re[i] = 2 * ((ar[i] * re + ai[i] * im) + (br[i] * r + bi[i] * q));
      parts.im[i] = 2 * ((ai[i] * re - ar[i] * im) + (br[i] * q - bi[i] * r));
    }
    parts.join(count, out + 2 * start);
  });
  return 0;
}
