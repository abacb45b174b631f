// Operations around a Fourier transform on the CPU: segments scaled by powers of two and back, energies of bins, sums of
// sparse spectra, and the step between a real transform and a complex one of half the length: `gcbench.ops.spectrum`,
// `gcbench.ops.transform`.

#include <algorithm>
#include <memory>

#include "called.hpp"

using namespace gc;

namespace {

constexpr int64_t PIECE = TILE / 2;  // complex numbers of one tile

// Round to the nearest fp16, ties to even, and back. The float that is added and subtracted has the exponent at which
// float32 rounds to fp16's precision: to 11 digits, or to multiples of 2^-24. Scaled values do not overflow fp16;
// infinities and NaN stay.
inline float to_half(float x) {
  const uint32_t u = bits_of(x), sign = u & 0x80000000u, exponent = u & 0x7f800000u, least = (127 - 14) << 23;
  const float shift = float_of((exponent > least ? exponent : least) + (13 << 23)), size = float_of(u ^ sign);
  const float rounded = (size + shift) - shift;
  return float_of(exponent == 0x7f800000u ? u : bits_of(rounded) | sign);
}

// `gcbench.ops.spectrum.Rows`: where segments lie in another buffer; without a table, where they lie in their own.
struct Rows {
  const int64_t *starts, *widths, *offsets;

  Rows(const int64_t* table, const Segments& segments)
      : starts(table), widths(table ? table + segments.count : nullptr), offsets(segments.offsets) {}

  int64_t place(int64_t s, int64_t element) const { return starts ? starts[s] + (element - offsets[s]) : element; }
};

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

}  // namespace

// unit = the power of two below a segment's largest magnitude, in [2^-110, 2^126], over `peak`, a power of two;
// out = x / unit, rounded to fp16 if `half`, and zeros in a segment whose largest is below `tiny`, as rows.
int64_t gc_spectrum_scaled(const float* x, const Segments& segments, float peak, float tiny, int half,
                           const int64_t* places, float* unit, float* out, int threads) {
  const Rows rows(places, segments);
  // The reciprocal of a power of two is exact; 0 says that the segment counts as zero.
  std::unique_ptr<float[]> inverses(new float[segments.count]);
  float* inverse = inverses.get();
  gc_segment_absmax(x, segments, unit, threads);
  for (int64_t s = 0; s < segments.count; ++s) {
    const float power = float_of(bits_of(unit[s]) & 0x7f800000u);
    const bool zero = unit[s] < tiny;
    unit[s] = (power < 0x1p-110f ? 0x1p-110f : power > 0x1p126f ? 0x1p126f : power) / peak;
    inverse[s] = zero ? 0.0f : 1.0f / unit[s];
  }
  const bool stream = segments.numel() >= STREAM_FROM;
  for_tiles(segments, threads, [&](int64_t s, int64_t start, int count) {
    const float by = inverse[s], *from = x + start;
    float* to = out + rows.place(s, start);
    GC_ALIGNED float buffer[TILE];
    float* tile = stream ? buffer : to;
    if (stream) ask_ahead(from);
    if (by == 0) {
      for (int i = 0; i < count; ++i) tile[i] = 0.0f;
    } else if (half) {
      GC_SIMD for (int i = 0; i < count; ++i) tile[i] = to_half(from[i] * by);
    } else {
      GC_SIMD for (int i = 0; i < count; ++i) tile[i] = from[i] * by;
    }
    if (stream) write_tile(to, tile, count, stream);
    const int64_t end = segments.offsets[s + 1];
    if (places && start + count == end) {
      memset(to + count, 0, (rows.widths[s] - (end - segments.offsets[s])) * sizeof *to);
    }
  });
  return 0;
}
GC_CALLED(gc_spectrum_scaled)

// energy = |X|^2 and out = X unit for the bins of all segments, which come as rows; `segments` count floats, two a bin.
int64_t gc_spectrum_unscaled(const float* bins, const float* unit, const Segments& segments, const int64_t* places,
                             float* out, float* energy, int threads) {
  const Rows rows(places, segments);
  const bool stream = segments.numel() >= STREAM_FROM;
  for_tiles(segments, threads, [&](int64_t s, int64_t start, int count) {
    const float by = unit[s], *from = bins + rows.place(s, start);
    GC_ALIGNED float buffer[TILE], sizes[PIECE];
    float *tile = stream ? buffer : out + start, *size = stream ? sizes : energy + start / 2;
    if (stream) ask_ahead(from);
    GC_SIMD for (int i = 0; i < count / 2; ++i) {
      const float re = from[2 * i], im = from[2 * i + 1];
      size[i] = re * re + im * im;
      tile[2 * i] = re * by;
      tile[2 * i + 1] = im * by;
    }
    if (stream) {
      write_tile(out + start, tile, count, stream);
      write_tile(energy + start / 2, size, count / 2, stream);
    }
  });
  return 0;
}
GC_CALLED(gc_spectrum_unscaled)

// out = x unit, within the finite floats; x comes as rows.
int64_t gc_spectrum_restored(const float* x, const float* unit, const Segments& segments, const int64_t* places,
                             float* out, int threads) {
  const Rows rows(places, segments);
  const bool stream = segments.numel() >= STREAM_FROM;
  for_tiles(segments, threads, [&](int64_t s, int64_t start, int count) {
    const float by = unit[s], *from = x + rows.place(s, start);
    GC_ALIGNED float buffer[TILE];
    float* tile = stream ? buffer : out + start;
    if (stream) ask_ahead(from);
    GC_SIMD for (int i = 0; i < count; ++i) {
      const float v = from[i] * by;
      tile[i] = v > FLOAT_MAX ? FLOAT_MAX : v < -FLOAT_MAX ? -FLOAT_MAX : v;
    }
    if (stream) write_tile(out + start, tile, count, stream);
  });
  return 0;
}
GC_CALLED(gc_spectrum_restored)

// The sum of `number` sparse spectra times their weights, in their order: spectrum p has kept[p] bins, which increase,
// and two floats for each. Returns 1 if they do not increase, or one is not in [0, length).
int64_t gc_spectrum_mean(const float* const* values, const int64_t* const* bins, const int64_t* kept,
                         const float* weights, int64_t number, float* out, int64_t length, int threads) {
  int64_t left = 0;
  const int64_t tiles = (length + PIECE - 1) / PIECE;
  const bool stream = 2 * length >= STREAM_FROM;
  parallel(tiles, threads, [&](int64_t first, int64_t last) {
    std::unique_ptr<int64_t[]> at(new int64_t[number]);
    GC_ALIGNED float buffer[2 * PIECE];
    int64_t added = 0;
    for (int64_t p = 0; p < number; ++p) {
      at[p] = first ? std::lower_bound(bins[p], bins[p] + kept[p], first * PIECE) - bins[p] : 0;
    }
    for (int64_t start = first * PIECE; start < last * PIECE && start < length; start += PIECE) {
      const int64_t stop = start + PIECE < length ? start + PIECE : length;
      float* sums = stream ? buffer : out + 2 * start;
      memset(sums, 0, (stop - start) * sizeof(Pair));
      for (int64_t p = 0; p < number; ++p) {
        const int64_t *own = bins[p], end = kept[p];
        const float weight = weights[p], *from = values[p];
        int64_t j = at[p], before = start - 1;
        for (; j < end && own[j] < stop; ++j) {
          if (own[j] <= before) break;  // it stays left
          before = own[j];
          sums[2 * (before - start)] += from[2 * j] * weight;
          sums[2 * (before - start) + 1] += from[2 * j + 1] * weight;
        }
        added += j - at[p];
        at[p] = j;
      }
      if (stream) write_tile(out + 2 * start, sums, (int)(2 * (stop - start)), stream);
    }
#pragma omp atomic
    left -= added;
  });
  for (int64_t p = 0; p < number; ++p) left += kept[p];
  return left != 0;
}
GC_CALLED(gc_spectrum_mean)

// out_k = s ((v_k + conj v_h-k) + t_k (v_k - conj v_h-k)) for k = 0 ... h, where v_h is v_0 and t_h-k = conj t_k; with
// `inverse` v_0 and v_h count as real, t is conjugate, and h is left out. v_k and v_h-k make out_k and out_h-k.
int64_t gc_spectrum_fold(const float* waves, const float* factors, float scale, int64_t h, int inverse, float* out,
                         int threads) {
  const uint32_t flip = inverse ? 0x80000000u : 0;
  const int64_t pairs = h / 2 + 1;
  const bool stream = 2 * h >= STREAM_FROM;
  parallel((pairs + PIECE - 1) / PIECE, threads, [&](int64_t first, int64_t last) {
    for (int64_t start = first * PIECE; start < last * PIECE && start < pairs; start += PIECE) {
      const int count = (int)(pairs - start < PIECE ? pairs - start : PIECE);
      GC_ALIGNED float own[2 * PIECE], back[2 * PIECE];
      Parts near, far;
      const int64_t least = h - start - count + 1;  // of h - k
      const int whole = !inverse && start == 0;      // v_h is not there
      memcpy(own, waves + 2 * start, count * sizeof(Pair));
      if (whole) memcpy(back, waves, sizeof(Pair));
      reverse(waves + 2 * least, count - whole, back + 2 * whole);
      if (inverse && start == 0) own[1] = back[1] = 0.0f;
      const float* turn = factors + 2 * start;
      if (stream) {
        ask_ahead(waves + 2 * start);
        ask_ahead(turn);
      }
      GC_SIMD for (int i = 0; i < count; ++i) {
        const float a = own[2 * i], b = own[2 * i + 1], c = back[2 * i], d = back[2 * i + 1];
        const float real = turn[2 * i], imag = float_of(bits_of(turn[2 * i + 1]) ^ flip);
        const float x = a - c, y = b + d, p = real * x - imag * y, q = real * y + imag * x;
        near.re[i] = ((a + c) + p) * scale;
        near.im[i] = ((b - d) + q) * scale;
        far.re[i] = ((a + c) - p) * scale;
        far.im[i] = (q - (b - d)) * scale;
      }
      if (stream) {
        near.join(count, own);
        write_tile(out + 2 * start, own, 2 * count, stream);
      } else {
        near.join(count, out + 2 * start);
      }
      // Of the others, those with h - k above k: not the last of even h; and not h itself, if that is left out.
      const int skip = inverse && start == 0, most = 2 * (start + count - 1) < h ? count : count - 1;
      far.join(count, back);
      float* to = out + 2 * (h - start - most + 1);
      if (stream) {
        reverse(back + 2 * skip, most - skip, own);
        write_tile(to, own, 2 * (most - skip), stream);
      } else {
        reverse(back + 2 * skip, most - skip, to);
      }
    }
  });
  return 0;
}
GC_CALLED(gc_spectrum_fold)
