// Blockwise 8-bit codes on the CPU. Encoding with its statistic reads 4 bytes per element where blocks are short, else
// 8, and writes 1; decoding reads 1 and writes 4, a mean reads 1 per payload.
#include <stdlib.h>

#include "int8.cuh"
#include "blocks.hpp"
#include "levels.cuh"
#include "called.hpp"

using namespace gc;

namespace {

constexpr int MANY = TILE / STEP;  // blocks in a tile that are too short for loops of their own

// The codes code(0) ... code(count - 1) of x.
template <class F>
inline void write_codes(F code, const float* x, int count, int8_t* codes) {
  int done = 0;
  GC_ROLLED for (; done + STEP <= count; done += STEP) {
    ask_lines<HALF / 16>(x + done, 0);
    GC_SIMD for (int i = done; i < done + STEP; ++i) codes[i] = (int8_t)code(i);
  }
  GC_SIMD for (int i = done; i < count; ++i) codes[i] = (int8_t)code(i);
}

// Codes of x, all of one block, whose magnitudes are no larger than the divisor. `draw` is null for the nearest.
inline void encode_part(const float* x, float divisor, const uint32_t* draw, int count, int8_t* codes) {
  if (divisor > FLOAT_MAX) {
    memset(codes, 0, count);
  } else if (draw) {
    write_codes([=](int i) { return int8_stochastic(x[i], divisor, draw[i]); }, x, count, codes);
  } else {
    write_codes([=](int i) { return int8_rounded(x[i], divisor); }, x, count, codes);
  }
}

// As encode_part, each element with a divisor of its own.
inline void encode_mixed(const float* x, const float* divisor, const uint32_t* draw, int count, int8_t* codes) {
  if (draw) {
    write_codes([=](int i) { return int8_stochastic(x[i], divisor[i], draw[i]); }, x, count, codes);
  } else {
    write_codes([=](int i) { return int8_nearest(x[i], divisor[i]); }, x, count, codes);
  }
}

constexpr int VECTORS = 4;                // whose sums stay in registers
constexpr int CHUNK = VECTORS * WIDTH;    // elements of these
constexpr int AHEAD = 2 * TILE;           // codes from what is read to what is prefetched

// Payloads of a mean: codes and scales of each, and the number of workers.
struct Payloads {
  const int8_t* const* codes;
  const float* const* scales;
  const float* counts;
  int number;
};

inline VecI wide_codes(const int8_t* codes) {
#if defined(__AVX512F__)
  return (VecI)_mm512_cvtepi8_epi32(load_vector<__m128i>(codes));
#elif defined(__AVX2__)
  return (VecI)_mm256_cvtepi8_epi32(_mm_loadu_si64(codes));
#else
  VecI wide;
  for (int l = 0; l < WIDTH; ++l) wide[l] = codes[l];
  return wide;
#endif
}

inline VecF ratios(VecI code) {  // level_ratio for 127 levels
  const VecF number = __builtin_convertvector(code, VecF), top = VecF{} + (float)INT8_TOP;
#if defined(__AVX512F__)
  const __m512 reciprocal = _mm512_set1_ps(1.0f / (float)INT8_TOP), estimate = (__m512)number * reciprocal;
  return (VecF)_mm512_fmadd_ps(_mm512_fnmadd_ps(estimate, (__m512)top, (__m512)number), reciprocal, estimate);
#elif defined(__AVX2__) && defined(__FMA__)
  const __m256 reciprocal = _mm256_set1_ps(1.0f / (float)INT8_TOP), estimate = (__m256)number * reciprocal;
  return (VecF)_mm256_fmadd_ps(_mm256_fnmadd_ps(estimate, (__m256)top, (__m256)number), reciprocal, estimate);
#else
  return number / top;
#endif
}

// Sums of the decoded values of all payloads times their counts, of the elements from `begin` to `end` of the
// tile at `start`, all in segment s. `lowest`: the lowest codes.
inline void add_part(const Payloads& in, int64_t start, int64_t s, int begin, int end, float* sums, VecI& lowest) {
  int i = begin;
  GC_ROLLED for (; i + CHUNK <= end; i += CHUNK) {
    VecF sum[VECTORS];
    VecI low = lowest;
    GC_UNROLL
    for (int v = 0; v < VECTORS; ++v) sum[v] = -VecF{};  // -0 is the neutral element
    GC_ROLLED for (int p = 0; p < in.number; ++p) {
      const int8_t* codes = in.codes[p] + start + i;
      const float scale = in.scales[p][s], times = in.counts[p];
      __builtin_prefetch(codes + AHEAD);
      GC_UNROLL
      for (int v = 0; v < VECTORS; ++v) {
        const VecI code = wide_codes(codes + v * WIDTH);
        low = code < low ? code : low;
        sum[v] += ratios(code) * scale * times;
      }
    }
    lowest = low;
    memcpy(sums + i, sum, sizeof sum);
  }
  for (; i < end; ++i) {
    float sum = -0.0f;
    for (int p = 0; p < in.number; ++p) {
      const int code = in.codes[p][start + i];
      lowest[0] = code < lowest[0] ? code : lowest[0];
      sum += level_ratio((float)code, (float)INT8_TOP, 1.0f / (float)INT8_TOP) * in.scales[p][s] * in.counts[p];
    }
    sums[i] = sum;
  }
}

}  // namespace

// Codes of x, (n,), and the scale of each block; `stochastic` or nearest. The key is for the draws.
int64_t gc_int8_encode(const float* x, int64_t n, const Segments& segments, int stochastic, const Key& key,
                       int8_t* codes, float* scales, int threads) {
  const bool fused = all_short(segments);
  if (!fused) {
    gc_segment_absmax(x, segments, scales, threads);
  } else {
    for (int64_t s = 0; s < segments.count; ++s) {
      if (!segments.length(s)) scales[s] = 0;
    }
  }
  parallel(tiles_of(n), threads, [=, &segments, &key](int64_t first, int64_t last) {
    Draws draws(key, first);
    GC_ALIGNED float divisors[TILE];
    int64_t at = segments.holding(first * TILE), known = -1;
    float divisor = 0;  // of block `known`
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE;
      const int count = (int)(n - start < TILE ? n - start : TILE);
      const float* part = x + start;
      const uint32_t* draw = stochastic ? draws.tile_for(part, count) : nullptr;
      while (segments.offsets[at + 1] <= start) ++at;
      const bool many = segments.offsets[at + MANY < segments.count ? at + MANY : segments.count] < start + count;
      for_parts(segments, start, count, at, [&](int64_t s, int begin, int end) {
        if (s != known) {  // where threads share a block, each finds its largest magnitude
          const int64_t from = segments.offsets[s], length = segments.offsets[s + 1] - from;
          const float top = fused ? largest(x + from, length) : scales[s];
          if (fused && from >= first * TILE) scales[s] = top;
          divisor = int8_divisor(top);
          known = s;
        }
        if (many) {
          GC_SIMD for (int i = begin; i < end; ++i) divisors[i] = divisor;
        } else {
          encode_part(part + begin, divisor, draw ? draw + begin : nullptr, end - begin, codes + start + begin);
        }
      });
      if (many) encode_mixed(part, divisors, draw, count, codes + start);
    }
  });
  for (int64_t s = 0; s < segments.count; ++s) scales[s] = int8_scale(scales[s]);
  return 0;
}
GC_CALLED(gc_int8_encode)

// The sum over `number` payloads of (code / 127) * scale, each times its count, divided by `divisor`. Returns 1
// if a scale, 2 if a code is invalid.
int64_t gc_int8_mean(const int8_t* const* codes, const float* const* scales, const float* counts, int number,
                     float divisor, int64_t n, const Segments& segments, float* out, int threads) {
  const Payloads in{codes, scales, counts, number};
  for (int p = 0; p < number; ++p) {
    if (!good_scales(scales[p], segments.count)) return 1;
  }
  const bool stream = n >= STREAM_FROM;
  int64_t bad = 0;
  parallel(tiles_of(n), threads, [=, &segments, &in, &bad](int64_t first, int64_t last) {
    GC_ALIGNED float sums[TILE];
    VecI lowest = {};
    int64_t s = segments.holding(first * TILE);
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE;
      const int count = (int)(n - start < TILE ? n - start : TILE);
      for_parts(segments, start, count, s, [&](int64_t part, int begin, int end) {
        add_part(in, start, part, begin, end, sums, lowest);
      });
      if (divisor != 1) divide_tile(sums, count, divisor);
      write_tile(out + start, sums, count, stream);
    }
    for (int l = 0; l < WIDTH; ++l) report(bad, lowest[l] < -INT8_TOP ? 2 : 0);
  });
  return bad;
}
GC_CALLED(gc_int8_mean)

// (code / 127) * scale, or `onto` plus `count` times that. Returns as gc_int8_mean. `out` may be `onto`.
int64_t gc_int8_decode(const int8_t* codes, const float* scales, int64_t n, const Segments& segments, const float* onto,
                       float count, float* out, int threads) {
  const float one = 1;
  if (!onto) return gc_int8_mean(&codes, &scales, &one, 1, 1.0f, n, segments, out, threads);
  if (!good_scales(scales, segments.count)) return 1;
  const bool stream = n >= STREAM_FROM && onto != out;
  const float reciprocal = 1.0f / (float)INT8_TOP;
  int64_t bad = 0;
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
      const float* base = onto + t * TILE;
      GC_SIMD for (int i = 0; i < some; ++i) values[i] = base[i] + values[i] * count;
      write_tile(out + t * TILE, values, some, stream);
    }
    report(bad, lowest < -INT8_TOP ? 2 : 0);
  });
  return bad;
}
GC_CALLED(gc_int8_decode)
