// Signs on the CPU: packing, values, votes, and 1-bit codes with the means of their classes.
//
// Bytes an element: packing reads 4 and writes 1/8 or 1/4; decoding the reverse; a vote reads the packed words alone;
// encoding with error feedback reads 8 and writes 4 1/8 where segments are short, and reads 8 more where they are not.
#include <math.h>

#include <algorithm>
#include <vector>

#include "sign.cuh"
#include "loops.hpp"

using namespace gc;

namespace {

// What is wrong with a payload: the numbers of `gcbench.ops.sign.WRONG`, the one to report first being the least.
enum Wrong : int64_t { NOTHING, AFTER_LAST, CODE_3, NOT_FINITE, WRONG_SIDE, OF_NOTHING };

constexpr int LINE = 16;           // floats that memory hands over at once
constexpr int64_t MANY = 1 << 15;  // elements of a segment that are not read again from a cache

inline int count_of(int64_t tile, int64_t n) { return (int)(n - tile * TILE < TILE ? n - tile * TILE : TILE); }

// Call f(segment, begin, end) for the parts of a tile of `count` elements; `s` holds its first, and then its last one.
template <class F>
inline void for_parts(const Segments& segments, int64_t start, int count, int64_t& s, F f) {
  while (segments.offsets[s + 1] <= start) ++s;
  for (int begin = 0;; ++s) {
    const int64_t stop = segments.offsets[s + 1] - start;
    const int end = (int)(stop < count ? stop : count);
    if (begin < end) f(s, begin, end);
    if (stop >= count) return;
    begin = end;
  }
}

// Whether a bit is set after the last of n codes.
bool set_after_last(const uint32_t* words, int64_t n, int bits) {
  const int rest = (int)(n % TILE), lanes = (rest + LANES - 1) / LANES;
  const uint32_t* last = words + n / TILE * LANES * bits;
  uint32_t beyond = 0;
  for (int l = 0; l < lanes; ++l) {
    const int used = (rest - l + lanes - 1) / lanes * bits;  // of the lane's bits
    for (int k = 0; k < bits; ++k) {
      const int here = used - 32 * k;
      if (here < 32) beyond |= last[k * lanes + l] >> (here < 0 ? 0 : here);
    }
  }
  return beyond != 0;
}

// Whether a code of 2 bits is 3.
uint32_t any_code_3(const uint32_t* words, int64_t number) {
  uint32_t both = 0;
#pragma omp simd reduction(| : both)
  for (int64_t i = 0; i < number; ++i) both |= words[i] & (words[i] >> 1) & 0x55555555u;
  return both;
}

// As pack_tile<1>, bringing the tile that `next` stands for to the cache: the sums of short segments are read in an
// order that the processor does not foresee.
template <class F, class Load>
inline void pack_fetching(F code, int count, uint32_t* out, Load next) {
  if (count < TILE) return pack_rest<1>(code, count, out);
  GC_ALIGNED uint32_t words[LANES] = {};
  GC_ROLLED for (int i = 0; i < TILE; i += LANES) {
    for (int k = 0; k < LANES; k += LINE) next.fetch(i + k);
    GC_SIMD for (int l = 0; l < LANES; ++l) words[l] = (words[l] >> 1) | (code(i + l) << 31);
  }
  memcpy(out, words, sizeof words);
}

// What to bring to the cache of one array.
struct Ahead {
  const float* x;
  void fetch(int64_t i) const { __builtin_prefetch(x + i); }
};

// ---- class sums ------------------------------------------------------------------------------------------------

// Sums of K classes: the negative and the positive elements, or (K = 1) all magnitudes. `ones` counts the bits, K = 2.
template <int K>
struct Sums {
  double total[K];
  int64_t ones;
};

template <int K, class Load>
inline Sums<K> tile_sums(Load load, int count) {
  GC_ALIGNED double first[TILE / 2], second[TILE / 2];
  int32_t ones = 0;
  if (count == TILE) {
    constexpr int PART = TILE / 4, STEP = 16;
    for (int start = 0; start < PART; start += STEP) {
      for (int k = 0; k < 4; ++k) load.fetch(TILE + 4 * start + k * LINE);
#pragma omp simd reduction(+ : ones)
      for (int i = start; i < start + STEP; ++i) {
        const float a = load(i), b = load(i + PART), c = load(i + 2 * PART), d = load(i + 3 * PART);
        const double p = a, q = b, r = c, s = d;
        if constexpr (K == 2) {
          first[i] = (below_zero(p) + below_zero(r)) + (below_zero(q) + below_zero(s));
          second[i] = (above_zero(p) + above_zero(r)) + (above_zero(q) + above_zero(s));
          ones += (int32_t)(sign_bit(a) + sign_bit(b) + sign_bit(c) + sign_bit(d));
        } else {
          first[i] = (fabs(p) + fabs(r)) + (fabs(q) + fabs(s));
        }
      }
    }
    if constexpr (K == 2) {
      return {{halve(first, PART), halve(second, PART)}, ones};
    } else {
      return {{halve(first, PART)}, 0};
    }
  }
  // Zeros up to a power of two; more than half of it are elements.
  const int width = width_of(count), half = width > 1 ? width / 2 : 1, both = count - half;
#pragma omp simd reduction(+ : ones)
  for (int i = 0; i < half; ++i) {
    const float a = load(i);
    if constexpr (K == 2) {
      first[i] = below_zero(a);
      second[i] = above_zero(a);
      ones += (int32_t)sign_bit(a);
    } else {
      first[i] = fabs((double)a);
    }
  }
#pragma omp simd reduction(+ : ones)
  for (int i = 0; i < both; ++i) {
    const float b = load(i + half);
    if constexpr (K == 2) {
      first[i] += below_zero(b);
      second[i] += above_zero(b);
      ones += (int32_t)sign_bit(b);
    } else {
      first[i] += fabs((double)b);
    }
  }
  if constexpr (K == 2) {
    return {{halve(first, half), halve(second, half)}, ones};
  } else {
    return {{halve(first, half)}, 0};
  }
}

// ---- encoding --------------------------------------------------------------------------------------------------

// Encode x, or x + residual (FEEDBACK) leaving what is lost in `left`: bits, and the values that stand for them in
// each segment. K = 2: the means `low` and `high` of the classes; K = 1: the mean magnitude `high`, and its negative.
//
// A segment inside the range of one thread is summed when the thread comes to its first tile, and encoded from the
// cache; long ones, and those that cross ranges, are summed before.
template <int K, bool FEEDBACK>
class Encoder {
 public:
  Encoder(const float* x, const float* residual, const int64_t* table, int64_t m, uint32_t* words, float* low,
          float* high, float* left, int threads)
      : segments_(table, m), n_(segments_.offsets[m]), x_(x), residual_(residual), words_(words), low_(low),
        high_(high), left_(left), threads_(threads) {}

  // Returns NOT_FINITE where a mean is not.
  int64_t run() {
    const int64_t tiles = tiles_of(n_);
    ranges_ = std::max<int64_t>(1, std::min<int64_t>(threads_, tiles / GRAIN));
    sum_apart();
    const int64_t ranges = ranges_;
    if (ranges > 1) {
#pragma omp parallel for num_threads(ranges) schedule(static, 1)
      for (int64_t k = 0; k < ranges; ++k) encode(tiles * k / ranges, tiles * (k + 1) / ranges);
    } else {
      encode(0, tiles);
    }
    return bad_ ? NOT_FINITE : NOTHING;
  }

 private:
  struct Offered {  // what is encoded, from an element on
    const float *x, *residual;
    float operator()(int64_t i) const {
      if constexpr (FEEDBACK) {
        return x[i] + residual[i];
      } else {
        return x[i];
      }
    }
    void fetch(int64_t i) const {
      __builtin_prefetch(x + i);
      if constexpr (FEEDBACK) __builtin_prefetch(residual + i);
    }
  };

  Offered offered(int64_t start) const { return {x_ + start, FEEDBACK ? residual_ + start : nullptr}; }
  int64_t length(int64_t s) const { return segments_.offsets[s + 1] - segments_.offsets[s]; }
  int64_t edge(int64_t range) const { return std::min(tiles_of(n_) * range / ranges_ * TILE, n_); }
  float low(int64_t s) const { return K == 2 ? low_[s] : -high_[s]; }

  void set(int64_t s, const Sums<K>& sums) {
    const int64_t count = length(s);
    if constexpr (K == 2) {
      low_[s] = class_mean(sums.total[0], (double)(count - sums.ones));
      high_[s] = class_mean(sums.total[1], (double)sums.ones);
      if (!is_finite(low_[s]) || !is_finite(high_[s])) bad_ = true;
    } else {
      high_[s] = class_mean(sums.total[0], (double)count);
      if (!is_finite(high_[s])) bad_ = true;
    }
  }

  Sums<K> sums_of_tile(int64_t s, int64_t tile) const {
    const int64_t left = length(s) - tile * TILE;
    return tile_sums<K>(offered(segments_.offsets[s] + tile * TILE), (int)(left < TILE ? left : TILE));
  }

  // Sum the segments that no range sums on its way: long ones, those that cross ranges, and empty ones.
  void sum_apart() {
    std::vector<int64_t> apart, before{0};  // segments, and the tiles before each
    int64_t range = 0;
    for (int64_t s = 0; s < segments_.count; ++s) {
      const int64_t start = segments_.offsets[s], stop = segments_.offsets[s + 1];
      if (start == stop) {
        set(s, Sums<K>{});
        continue;
      }
      while (edge(range + 1) <= start) ++range;
      if (stop - start > MANY || stop > edge(range + 1)) {
        apart.push_back(s);
        before.push_back(before.back() + tiles_of(stop - start));
      }
    }
    const int64_t tiles = before.back();
    std::vector<double> totals(K * tiles);
    std::vector<int32_t> ones(tiles);
    parallel(tiles, threads_, [&](int64_t first, int64_t last) {
      size_t a = std::upper_bound(before.begin(), before.end(), first) - before.begin() - 1;
      for (int64_t t = first; t < last; ++t) {
        while (before[a + 1] <= t) ++a;
        const Sums<K> got = sums_of_tile(apart[a], t - before[a]);
        for (int k = 0; k < K; ++k) totals[k * tiles + t] = got.total[k];
        ones[t] = (int32_t)got.ones;
      }
    });
    for (size_t a = 0; a < apart.size(); ++a) {
      Sums<K> all{};
      for (int k = 0; k < K; ++k) {
        all.total[k] = halve_all(totals.data() + k * tiles + before[a], before[a + 1] - before[a]);
      }
      for (int64_t t = before[a]; t < before[a + 1]; ++t) all.ones += ones[t];
      set(apart[a], all);
    }
  }

  void sum_short(int64_t s) {
    const int64_t tiles = tiles_of(length(s));
    if (tiles == 1) return set(s, sums_of_tile(s, 0));
    double totals[K][MANY / TILE];
    Sums<K> all{};
    for (int64_t t = 0; t < tiles; ++t) {
      const Sums<K> got = sums_of_tile(s, t);
      for (int k = 0; k < K; ++k) totals[k][t] = got.total[k];
      all.ones += got.ones;
    }
    for (int k = 0; k < K; ++k) all.total[k] = halve_all(totals[k], tiles);
    set(s, all);
  }

  void encode(int64_t first, int64_t last) {
    if (first == last) return;
    const int64_t begin = first * TILE, end = std::min(last * TILE, n_);
    const int64_t* offsets = segments_.offsets;
    int64_t s = segments_.holding(begin), next = s, ahead = begin;
    for (int64_t t = first; t < last; ++t) {
      const int count = count_of(t, n_);
      for (; next < segments_.count && offsets[next] < t * TILE + count; ++next) {
        const bool inside = offsets[next] >= begin && offsets[next + 1] <= end;
        if (inside && length(next) > 0 && length(next) <= MANY) {
          sum_short(next);
          ahead = std::max(ahead, offsets[next + 1]);
        }
      }
      encode_tile(t, count, s, offered(std::max(ahead, (t + 1) * TILE)));
      ahead += TILE;
    }
  }

  // `next`: what to bring to the cache meanwhile.
  void encode_tile(int64_t t, int count, int64_t& s, Offered next) {
    const int64_t start = t * TILE;
    const Offered value = offered(start);
    uint32_t* words = words_ + t * LANES;
    if constexpr (!FEEDBACK) {
      pack_fetching([=](int i) { return sign_bit(value(i)); }, count, words, next);
    } else {
      float* left = left_ + start;
      while (segments_.offsets[s + 1] <= start) ++s;
      if (segments_.offsets[s + 1] >= start + count) {
        const float below = low(s), above = high_[s];
        const auto code = [=](int i) {
          const float v = value(i);
          left[i] = v - (v >= 0.0f ? above : below);
          return sign_bit(v);
        };
        pack_fetching(code, count, words, next);
        return;
      }
      GC_ALIGNED float buffer[TILE];
      float* kept = buffer;
      const auto code = [=](int i) {
        const float v = value(i);
        kept[i] = v;
        return sign_bit(v);
      };
      pack_fetching(code, count, words, next);
      for_parts(segments_, start, count, s, [=](int64_t part, int from, int to) {
        const float below = low(part), above = high_[part];
        GC_SIMD for (int i = from; i < to; ++i) left[i] = kept[i] - (kept[i] >= 0.0f ? above : below);
      });
    }
  }

  const Segments segments_;
  const int64_t n_;
  const float *x_, *residual_;
  uint32_t* words_;
  float *low_, *high_, *left_;
  const int threads_;
  int64_t ranges_ = 1;
  bool bad_ = false;
};

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
      const uint64_t upto = ((uint64_t)1 << (last + (l < more))) - 1, before = ((uint64_t)1 << (first + (l < skip))) - 1;
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

int64_t first_wrong(int64_t a, int64_t b) { return a && (!b || a < b) ? a : b; }

// ---- votes -----------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int VECTOR = 64;
#elif defined(__AVX2__)
constexpr int VECTOR = 32;
#else
constexpr int VECTOR = 16;
#endif
typedef uint32_t Words __attribute__((vector_size(VECTOR)));  // as many as a register holds

inline Words load_words(const uint32_t* from) {
  Words w;
  memcpy(&w, from, sizeof w);
  return w;
}

// [count >= least] for a count in bit planes: the comparison of numbers, from their lowest bit on.
template <class Plane>
inline Plane at_least(const Plane* planes, int number, uint32_t least) {
  Plane result = ~(planes[0] ^ planes[0]);
  for (int k = 0; k < number; ++k) result = (least >> k) & 1 ? planes[k] & result : planes[k] | result;
  return result;
}

// [number of set bits >= least] among fewer than 2^P ballots of one bit, for `count` words.
template <int P>
void vote_words(const uint32_t* const* ballots, int64_t number, uint32_t least, int64_t count, uint32_t* out) {
  constexpr int WIDTH = sizeof(Words) / sizeof(uint32_t);
  const auto vote = [=](auto get) {
    Words planes[P] = {};
    for (int64_t p = 0; p < number; ++p) {
      Words carry = get(p);
      GC_UNROLL
      for (int k = 0; k < P; ++k) {
        const Words next = planes[k] & carry;
        planes[k] ^= carry;
        carry = next;
      }
    }
    return at_least(planes, P, least);
  };
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    const Words won = vote([=](int64_t p) { return load_words(ballots[p] + i); });
    memcpy(out + i, &won, sizeof won);
  }
  if (i < count) {
    const size_t rest = (count - i) * sizeof(uint32_t);
    const Words won = vote([=](int64_t p) {
      Words w{};
      memcpy(&w, ballots[p] + i, rest);
      return w;
    });
    memcpy(out + i, &won, rest);
  }
}

struct Ballots {
  const uint32_t* const* words;
  const int64_t* counts;  // how many votes each one is worth
  const int32_t* bits;    // of a code
  int64_t number;
};

// The sum of votes of one tile, in bit planes of 32 lanes: each ballot counts sign + 1 times its count, or the sign's
// bit where all have 1 bit.
class Tally {
 public:
  uint32_t planes[32][LANES];

  explicit Tally(int used) : used_(used) {}

  void clear() { memset(planes, 0, used_ * sizeof *planes); }

  // Add `word` times `count` times 2^shift.
  void add(const uint32_t* word, int64_t count, int shift) {
    for (int from = shift; count; count >>= 1, ++from) {
      if (!(count & 1)) continue;
      GC_ALIGNED uint32_t carry[LANES];
      memcpy(carry, word, sizeof carry);
      for (int k = from; k < used_; ++k) {
        uint32_t* plane = planes[k];
        GC_SIMD for (int l = 0; l < LANES; ++l) {
          const uint32_t next = plane[l] & carry[l];
          plane[l] ^= carry[l];
          carry[l] = next;
        }
      }
    }
  }

  // [sum >= least] of each code.
  void at_least(uint32_t least, uint32_t* result) const {
    memset(result, 0xff, LANES * sizeof *result);
    for (int k = 0; k < used_; ++k) {
      const uint32_t *plane = planes[k], want = (least >> k) & 1 ? 0u : ~0u;
      GC_SIMD for (int l = 0; l < LANES; ++l) result[l] = (plane[l] & (result[l] | want)) | (result[l] & want);
    }
  }

 private:
  const int used_;
};

// Add all ballots' codes of the tile that begins at `tile`, of `lanes` lanes, to a tally.
void add_ballots(const Ballots& in, int64_t tile, int lanes, bool wide, Tally& tally) {
  GC_ALIGNED uint32_t low[LANES] = {}, high[LANES] = {};
  for (int64_t p = 0; p < in.number; ++p) {
    if (in.bits[p] == 1) {
      memcpy(low, in.words[p] + tile * LANES, lanes * sizeof *low);
      tally.add(low, in.counts[p], wide ? 1 : 0);
      continue;
    }
    const uint32_t *word = in.words[p] + tile * 2 * LANES, *after = word + lanes;
    GC_SIMD for (int l = 0; l < lanes; ++l) {
      low[l] = squeeze_even(word[l]) | squeeze_even(after[l]) << 16;
      high[l] = squeeze_even(word[l] >> 1) | squeeze_even(after[l] >> 1) << 16;
    }
    tally.add(low, in.counts[p], 0);
    tally.add(high, in.counts[p], 1);
  }
}

}  // namespace

// ---- what Python calls -----------------------------------------------------------------------------------------

// Codes of x, (n,): [x >= 0] in 1 bit, sign + 1 in 2.
GC_API int64_t gc_sign_pack(const float* x, int64_t n, int bits, uint32_t* out, int threads) {
  parallel(tiles_of(n), threads, [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      if (bits == 1) {
        pack_fetching([=](int i) { return sign_bit(part[i]); }, count_of(t, n), out + t * LANES,
                      Ahead{part + 2 * TILE});
      } else {
        pack_tile<2>([=](int i) { return sign_code(part[i]); }, count_of(t, n), out + t * 2 * LANES);
      }
    }
  });
  return 0;
}

// Codes of 2 bits, sign 0 below `factor` times the root mean square; `square`, (m,), are sums of squares.
GC_API int64_t gc_sign_pack_above(const float* x, const int64_t* table, int64_t m, const double* square, double factor,
                                  uint32_t* out, int threads) {
  const Segments segments(table, m);
  const int64_t n = segments.offsets[m];
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    auto spread = spread_values<1>(segments, first * TILE, [&](int64_t s, float* values) {
      values[0] = (float)(factor * sqrt(square[s] / (double)(segments.offsets[s + 1] - segments.offsets[s])));
    });
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      const int count = count_of(t, n);
      spread.tile(t * TILE, count);
      const float* limits = spread.row[0];
      pack_tile<2>([=](int i) { return sign_code_above(part[i], limits[i]); }, count, out + t * 2 * LANES);
    }
  });
  return 0;
}

// Signs as floats, (n,), from codes of 1 or 2 bits. Returns a `Wrong`.
GC_API int64_t gc_sign_decode(const uint32_t* words, int64_t n, int bits, float* out, int threads) {
  if (set_after_last(words, n, bits)) return AFTER_LAST;
  const bool stream = n >= STREAM_FROM;
  uint32_t wrong = 0;
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
    if (stream) end_stream();
#pragma omp atomic
    wrong |= both;
  });
  return wrong ? CODE_3 : NOTHING;
}

// Bits, and two values a segment (`low` null: `high` and its negative), to floats, (n,), written to `out`; with `total`
// the sum of it and of `times` times the values. Returns a `Wrong`, and then nothing is written.
GC_API int64_t gc_sign_values(const uint32_t* words, const int64_t* table, int64_t m, const float* low,
                              const float* high, const float* total, float times, float* out, int threads) {
  const Segments segments(table, m);
  const int64_t n = segments.offsets[m];
  if (set_after_last(words, n, 1)) return AFTER_LAST;
  int64_t wrong = NOTHING;
  parallel(m, threads, [&](int64_t first, int64_t last) {
    int64_t worst = NOTHING;
    for (int64_t s = first; s < last; ++s) {
      const float below = low ? low[s] : 0.0f, above = high[s];
      const int64_t start = segments.offsets[s], stop = segments.offsets[s + 1];
      if (!is_finite(below) || !is_finite(above)) worst = first_wrong(NOT_FINITE, worst);
      if (below > 0.0f || above < 0.0f) worst = first_wrong(WRONG_SIDE, worst);
      if (start == stop) {
        if (below != 0.0f || above != 0.0f) worst = first_wrong(OF_NOTHING, worst);
      } else if (low && (below != 0.0f || above != 0.0f)) {
        const Found found = classes_of(words, n, start, stop);
        if ((below != 0.0f && !found.zeros) || (above != 0.0f && !found.ones)) worst = first_wrong(OF_NOTHING, worst);
      }
    }
    if (worst) {
#pragma omp critical
      wrong = first_wrong(worst, wrong);
    }
  });
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
    if (stream) end_stream();
  });
  return NOTHING;
}

// Packed words of the vote over `number` ballots worth `workers` votes in all. In 1 bit: the majority, +1 in a tie, or
// a fair coin of the key (`toss`). In 2 bits: the majority's sign if it won by `quorum`, at most `workers`, votes.
// Returns a `Wrong`.
GC_API int64_t gc_sign_vote(const uint32_t* const* words, const int64_t* counts, const int32_t* bits, int64_t number,
                            int64_t workers, int64_t n, int width, int64_t quorum, int toss, uint64_t seed,
                            uint64_t offset, uint32_t step, uint32_t who, uint32_t* out, int threads) {
  const Ballots in{words, counts, bits, number};
  bool wide = false;
  for (int64_t p = 0; p < number; ++p) {
    wide |= bits[p] == 2;
    if (set_after_last(words[p], n, bits[p])) return AFTER_LAST;
  }
  // A sum T of signs' bits is above `win` for +1 and below `lose` for -1: 2 T - workers is the sum of signs, or, with
  // codes, T - workers. Both limits are above 0, so what lies after the last code stays 0.
  const auto least = [=](int64_t votes) { return (uint32_t)(wide ? workers + votes : (workers + votes + 1) / 2); };
  const uint32_t win = least(width == 2 ? quorum : toss ? 1 : 0), lose = width == 2 ? least(1 - quorum) : least(0);
  const int used = 32 - __builtin_clz((uint32_t)(wide ? 2 * workers : workers));
  const bool plain = !wide && width == 1 && !toss && workers == number && number < 64;
  const Key key{seed, offset, step, who};
  uint32_t wrong = 0;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    if (plain) {
      const int64_t start = first * LANES, count = words_of(std::min(last * TILE, n), 1) - start;
      const uint32_t* ballots[64];
      for (int64_t p = 0; p < number; ++p) ballots[p] = words[p] + start;
      with_bits(used, [&](auto planes) {
        constexpr int P = decltype(planes)::value;
        if constexpr (P <= 6) vote_words<P>(ballots, number, win, count, out + start);
      });
      return;
    }
    Tally tally(used);
    Draws draws(key, first);
    GC_ALIGNED uint32_t won[LANES], not_lost[LANES], coin[LANES] = {};
    uint32_t both = 0;
    for (int64_t t = first; t < last; ++t) {
      const int count = count_of(t, n), lanes = count == TILE ? LANES : (count + LANES - 1) / LANES;
      for (int64_t p = 0; p < number; ++p) {
        if (bits[p] == 2) both |= any_code_3(words[p] + t * 2 * LANES, 2 * lanes);
      }
      tally.clear();
      add_ballots(in, t, lanes, wide, tally);
      tally.at_least(win, won);
      tally.at_least(lose, not_lost);
      if (width == 2) {
        uint32_t *o = out + t * 2 * LANES, *after = o + lanes;
        for (int l = 0; l < lanes; ++l) {
          const uint32_t tie = not_lost[l] & ~won[l];
          o[l] = spread_even(tie) | spread_even(won[l]) << 1;
          after[l] = spread_even(tie >> 16) | spread_even(won[l] >> 16) << 1;
        }
        continue;
      }
      if (toss) {
        const uint32_t* draw = draws.tile();
        pack_tile<1>([=](int i) { return (uint32_t)(draw[i] < 1u << 23); }, count, coin);
      }
      for (int l = 0; l < lanes; ++l) out[t * LANES + l] = won[l] | (not_lost[l] & coin[l]);
    }
#pragma omp atomic
    wrong |= both;
  });
  return wrong ? CODE_3 : NOTHING;
}

// Bits of x, (n,), or of x + residual leaving in `left`, which may be `residual`, what is lost; and the mean `low` of
// the negative and `high` of the other elements of each segment (`low` null: `high` the mean magnitude). Returns a
// `Wrong` where these are not finite.
GC_API int64_t gc_sign_encode(const float* x, const float* residual, const int64_t* table, int64_t m, uint32_t* words,
                              float* low, float* high, float* left, int threads) {
  const auto run = [=](auto encoder) { return encoder.run(); };
  if (low && residual) return run(Encoder<2, true>(x, residual, table, m, words, low, high, left, threads));
  if (low) return run(Encoder<2, false>(x, residual, table, m, words, low, high, left, threads));
  if (residual) return run(Encoder<1, true>(x, residual, table, m, words, low, high, left, threads));
  return run(Encoder<1, false>(x, residual, table, m, words, low, high, left, threads));
}
