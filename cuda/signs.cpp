// Signs on the CPU: packing reads 4 bytes per element and writes 1/8 or 1/4; values and means of payloads the reverse.
#include <math.h>

#include <algorithm>

#include "signs.hpp"

using namespace gc;

namespace {

// ---- decoding --------------------------------------------------------------------------------------------------

// Whether a segment has a bit 0 and a bit 1; reads no further than it needs.
struct Found {
  uint32_t zeros, ones;
};

Found classes_of(const uint32_t* words, int64_t n, int64_t start, int64_t stop) {
  Found found{0, 0};
  for (int64_t at = start; at < stop && !(found.zeros && found.ones);) {
    const int64_t tile = at / TILE, end = std::min(stop, (tile + 1) * TILE);
    const int count = count_of(tile, n), lanes = count == TILE ? LANES : (count + LANES - 1) / LANES;
    const int from = (int)(at - tile * TILE), to = (int)(end - tile * TILE);
    const uint32_t* word = words + tile * LANES;
    const int first = from / lanes, skip = from % lanes, last = to / lanes, more = to % lanes;
    uint32_t zeros = 0, ones = 0;
#pragma omp simd reduction(| : zeros, ones)
    for (int l = 0; l < lanes; ++l) {
      // Rows first + [l < skip] up to last + [l < more], which may be all 32.
      const uint64_t upto = ((uint64_t)1 << (last + (l < more))) - 1;
      const uint64_t before = ((uint64_t)1 << (first + (l < skip))) - 1;
      const uint32_t mask = (uint32_t)(upto & ~before);
      ones |= word[l] & mask;
      zeros |= ~word[l] & mask;
    }
    found.zeros |= zeros;
    found.ones |= ones;
    at = end;
  }
  return found;
}

// The fault of bits and values (`low` null: `high` and its negative), a `Wrong`.
int64_t wrong_values(const uint32_t* words, const Segments& segments, const float* low, const float* high,
                     int threads) {
  const int64_t n = segments.numel();
  if (set_after_last(words, n, 1)) return AFTER_LAST;
  int64_t wrong = NOTHING;
  parallel(segments.count, threads, [&](int64_t first, int64_t last) {
    for (int64_t s = first; s < last; ++s) {
      const float below = low ? low[s] : 0.0f, above = high[s];
      const int64_t start = segments.offsets[s], stop = segments.offsets[s + 1];
      if (!is_finite(below) || !is_finite(above)) report(wrong, NOT_FINITE);
      if (below > 0.0f || above < 0.0f) report(wrong, WRONG_SIDE);
      if (start == stop) {
        if (below != 0.0f || above != 0.0f) report(wrong, OF_NOTHING);
      } else if (low && (below != 0.0f || above != 0.0f)) {
        const Found found = classes_of(words, n, start, stop);
        if ((below != 0.0f && !found.zeros) || (above != 0.0f && !found.ones)) report(wrong, OF_NOTHING);
      }
    }
  });
  return wrong;
}

// ---- means -----------------------------------------------------------------------------------------------------

// Payloads of a mean: bits, values as gc_sign_values takes them, and the number of workers of each.
struct Payloads {
  const uint32_t* const* words;
  const float* const* low;
  const float* const* high;
  const float* counts;
  int number;

  float above(int p, int64_t s) const { return high[p][s] * counts[p]; }
  float below(int p, int64_t s) const { return low ? low[p][s] * counts[p] : -above(p, s); }
};

constexpr int PARTS = LANES / WIDTH;          // vectors in a row
constexpr int TOGETHER = PARTS > 2 ? 1 : 4;  // rows whose sums stay in registers
constexpr int FEW = 4;                        // segments in a tile that are worth to be walked row by row

// Sums of ROWS rows, from `row` on, of a whole tile whose words begin at `place`, all in segment s.
template <int ROWS>
inline void add_rows(const Payloads& in, int64_t place, int row, int64_t s, float* sums) {
  VecF sum[ROWS][PARTS];
  GC_UNROLL
  for (int k = 0; k < ROWS * PARTS; ++k) sum[k / PARTS][k % PARTS] = -VecF{};  // -0 is the neutral element
  GC_ROLLED for (int p = 0; p < in.number; ++p) {
    const VecF above = -VecF{} + in.above(p, s), below = -VecF{} + in.below(p, s);
    GC_UNROLL
    for (int v = 0; v < PARTS; ++v) {
      const VecU word = load_vector<VecU>(in.words[p] + place + v * WIDTH);
      GC_UNROLL
      for (int r = 0; r < ROWS; ++r) sum[r][v] += (word & 1u << (row + r)) != 0 ? above : below;
    }
  }
  memcpy(sums + row * LANES, sum, sizeof sum);
}

// Sums of the elements from `begin` to `end` of a whole tile, all in segment s.
void add_part(const Payloads& in, int64_t place, int64_t s, int begin, int end, float* sums) {
  const auto one_by_one = [&](int from, int to) {
    for (int i = from; i < to; ++i) {
      float sum = -0.0f;
      for (int p = 0; p < in.number; ++p) {
        sum += in.words[p][place + i % LANES] >> (i / LANES) & 1 ? in.above(p, s) : in.below(p, s);
      }
      sums[i] = sum;
    }
  };
  int row = (begin + LANES - 1) / LANES;
  const int last = end / LANES;
  if (row > last) return one_by_one(begin, end);
  one_by_one(begin, row * LANES);
  GC_ROLLED for (; row + TOGETHER <= last; row += TOGETHER) add_rows<TOGETHER>(in, place, row, s, sums);
  GC_ROLLED for (; row < last; ++row) add_rows<1>(in, place, row, s, sums);
  one_by_one(last * LANES, end);
}

// Sums of a tile of many segments, or of a short one; `s` holds its first.
void add_tile(const Payloads& in, const Segments& segments, int64_t start, int count, int64_t s, float* sums) {
  GC_ALIGNED uint32_t codes[TILE];
  uint32_t* code_of = codes;
  for (int i = 0; i < count; ++i) sums[i] = -0.0f;
  for (int p = 0; p < in.number; ++p) {
    unpack_tile<1>(in.words[p] + start / TILE * LANES, count, [=](int i, uint32_t code) { code_of[i] = code; });
    int64_t at = s;
    for_parts(segments, start, count, at, [=, &in](int64_t part, int from, int to) {
      const float above = in.above(p, part), below = in.below(p, part);
      GC_SIMD for (int i = from; i < to; ++i) sums[i] += code_of[i] ? above : below;
    });
  }
}

}  // namespace

// ---- what Python calls -----------------------------------------------------------------------------------------

// Codes of x, (n,): [x >= 0] in 1 bit, sign + 1 in 2.
int64_t gc_sign_pack(const float* x, int64_t n, int bits, uint32_t* out, int threads) {
  parallel(tiles_of(n), threads, [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      ask_ahead(part);
      if (bits == 1) {
        pack_tile<1>([=](int i) { return sign_bit(part[i]); }, count_of(t, n), out + t * LANES);
      } else {
        pack_tile<2>([=](int i) { return sign_code(part[i]); }, count_of(t, n), out + t * 2 * LANES);
      }
    }
  });
  return 0;
}
GC_CALLED(gc_sign_pack)

// Codes of 2 bits, sign 0 below `factor` times the root mean square; `square`, (m,), are sums of squares.
int64_t gc_sign_pack_above(const float* x, const Segments& segments, const double* square, double factor, uint32_t* out,
                           int threads) {
  const int64_t n = segments.numel();
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    auto spread = spread_values<1>(segments, first * TILE, [&](int64_t s, float* values) {
      values[0] = (float)(factor * sqrt(square[s] / (double)segments.length(s)));
    });
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      const int count = count_of(t, n);
      ask_ahead(part);
      spread.tile(t * TILE, count);
      const float* limits = spread.row[0];
      pack_tile<2>([=](int i) { return sign_code_above(part[i], limits[i]); }, count, out + t * 2 * LANES);
    }
  });
  return 0;
}
GC_CALLED(gc_sign_pack_above)

// Signs as floats, (n,), from codes of 1 or 2 bits. Returns a `Wrong`.
int64_t gc_sign_decode(const uint32_t* words, int64_t n, int bits, float* out, int threads) {
  if (set_after_last(words, n, bits)) return AFTER_LAST;
  const bool stream = n >= STREAM_FROM;
  int64_t wrong = NOTHING;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    GC_ALIGNED float buffer[TILE];
    float* tile = buffer;
    uint32_t both = 0;
    for (int64_t t = first; t < last; ++t) {
      const int count = count_of(t, n);
      if (bits == 1) {
        unpack_tile<1>(words + t * LANES, count, [=](int i, uint32_t code) { tile[i] = code ? 1.0f : -1.0f; });
      } else {
        const uint32_t* word = words + t * 2 * LANES;
        both |= any_code_3(word, words_of(count, 2));
        unpack_tile<2>(word, count, [=](int i, uint32_t code) { tile[i] = (float)((int32_t)code - 1); });
      }
      write_tile(out + t * TILE, tile, count, stream);
    }
    report(wrong, both ? CODE_3 : NOTHING);
  });
  return wrong;
}
GC_CALLED(gc_sign_decode)

// Bits, and two values per segment (`low` null: `high` and its negative), to floats, (n,), written to `out`; with
// `total` the sum of it and of `times` times the values. Returns a `Wrong`, and then nothing is written.
int64_t gc_sign_values(const uint32_t* words, const Segments& segments, const float* low, const float* high,
                       const float* total, float times, float* out, int threads) {
  const int64_t n = segments.numel(), wrong = wrong_values(words, segments, low, high, threads);
  if (wrong) return wrong;

  const bool stream = n >= STREAM_FROM && !total;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    GC_ALIGNED float buffer[TILE];
    GC_ALIGNED uint32_t codes[TILE];
    float* tile = buffer;
    uint32_t* code_of = codes;
    int64_t s = segments.holding(first * TILE);
    for (int64_t t = first; t < last; ++t) {
      const int count = count_of(t, n);
      const int64_t start = t * TILE;
      const uint32_t* word = words + t * LANES;
      while (segments.offsets[s + 1] <= start) ++s;
      if (segments.offsets[s + 1] >= start + count) {
        const float above = high[s] * times, below = low ? low[s] * times : -above;
        unpack_tile<1>(word, count, [=](int i, uint32_t code) { tile[i] = code ? above : below; });
      } else {
        unpack_tile<1>(word, count, [=](int i, uint32_t code) { code_of[i] = code; });
        for_parts(segments, start, count, s, [=](int64_t part, int from, int to) {
          const float above = high[part] * times, below = low ? low[part] * times : -above;
          GC_SIMD for (int i = from; i < to; ++i) tile[i] = code_of[i] ? above : below;
        });
      }
      if (total) {
        const float* before = total + start;
        float* sum = out + start;
        GC_SIMD for (int i = 0; i < count; ++i) sum[i] = before[i] + tile[i];
      } else {
        write_tile(out + start, tile, count, stream);
      }
    }
  });
  return NOTHING;
}
GC_CALLED(gc_sign_values)

// The mean over `number` payloads of the decoded payloads, each times its count, divided by `divisor`: see
// gc_sign_values. Returns a `Wrong`, of the first payload that is.
int64_t gc_sign_mean(const uint32_t* const* words, const float* const* low, const float* const* high,
                     const float* counts, int number, float divisor, const Segments& segments, float* out,
                     int threads) {
  const int64_t n = segments.numel();
  const Payloads in{words, low, high, counts, number};
  for (int p = 0; p < number; ++p) {
    const int64_t wrong = wrong_values(words[p], segments, low ? low[p] : nullptr, high[p], threads);
    if (wrong) return wrong;
  }
  const bool stream = streams(out, n);
  parallel(tiles_of(n), threads, [=, &segments, &in](int64_t first, int64_t last) {
    GC_ALIGNED float sums[TILE];
    int64_t s = segments.holding(first * TILE);
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE;
      const int count = count_of(t, n);
      while (segments.offsets[s + 1] <= start) ++s;
      if (count == TILE && segments.offsets[std::min(s + FEW, segments.count)] >= start + count) {
        for_parts(segments, start, count, s, [&](int64_t part, int begin, int end) {
          add_part(in, t * LANES, part, begin, end, sums);
        });
      } else {
        add_tile(in, segments, start, count, s, sums);
      }
      divide_tile(sums, count, divisor);
      write_tile(out + start, sums, count, stream);
    }
  });
  return NOTHING;
}
GC_CALLED(gc_sign_mean)
