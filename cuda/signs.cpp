// Signs on the CPU: packing, values, votes, and 1-bit codes with the means of their classes.
//
// Bytes an element: packing reads 4 and writes 1/8 or 1/4; decoding the reverse; a vote reads the packed words alone;
// encoding with error feedback reads 8 and writes 4 1/8 where segments are short, and reads and writes 4 more where
// they are not.
#include <math.h>

#include <algorithm>
#include <vector>

#include "sign.cuh"
#include "python.hpp"

using namespace gc;

namespace {

// What is wrong with a payload: the numbers of `gcbench.ops.sign.WRONG`, the one to report first being the least.
enum Wrong : int64_t { NOTHING, AFTER_LAST, CODE_3, NOT_FINITE, WRONG_SIDE, OF_NOTHING };

constexpr int LINE = 16;           // floats that memory hands over at once
constexpr int64_t MANY = 1 << 15;  // elements of a segment that are not read again from a cache
constexpr int64_t LEAD = 384;      // elements from what is summed to what is asked for; more leave the cache
constexpr int64_t PIECES = 8;      // segments in a tile that are worth to be encoded row by row

inline int count_of(int64_t tile, int64_t n) { return (int)(n - tile * TILE < TILE ? n - tile * TILE : TILE); }

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

// Add the bits code(first) ... code(last - 1), whole rows, to the words of a tile, above those that are there. With
// each row LINES lines are asked for.
template <int LINES, class F, class Load>
inline void pack_rows(F code, int first, int last, uint32_t* words, Load next) {
  GC_ROLLED for (int i = first; i < last; i += LANES) {
    GC_UNROLL
    for (int k = 0; k < LINES; ++k) next.ask((i / LANES * LINES + k) * LINE);
    GC_SIMD for (int l = 0; l < LANES; ++l) words[l] = (words[l] >> 1) | (code(i + l) << 31);
  }
}

// As pack_tile<1>, asking for LINES lines from `next` on with each row of 32 elements.
template <int LINES, class F, class Load>
inline void pack_asking(F code, int count, uint32_t* out, Load next) {
  if (count < TILE) return pack_rest<1>(code, count, out);
  GC_ALIGNED uint32_t words[LANES] = {};
  pack_rows<LINES>(code, 0, TILE, words, next);
  memcpy(out, words, sizeof words);
}

// What to ask for of one array.
struct Ahead {
  const float* x;
  void ask(int64_t i) const { __builtin_prefetch(x + i); }
};

// ---- class sums ------------------------------------------------------------------------------------------------

// Sums of K classes: the negative and the positive elements, or (K = 1) all magnitudes.
template <int K>
struct Sums {
  double total[K];
};

#if defined(__AVX512F__)
typedef __m512d Doubles;  // as many as a register holds
inline Doubles doubles_at(const float* x) { return _mm512_cvtps_pd(_mm256_loadu_ps(x)); }
inline Doubles lesser(Doubles a, Doubles b) { return _mm512_min_pd(a, b); }
inline Doubles greater(Doubles a, Doubles b) { return _mm512_max_pd(a, b); }
#elif defined(__AVX2__)
typedef __m256d Doubles;
inline Doubles doubles_at(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
inline Doubles lesser(Doubles a, Doubles b) { return _mm256_min_pd(a, b); }
inline Doubles greater(Doubles a, Doubles b) { return _mm256_max_pd(a, b); }
#else
typedef double Doubles __attribute__((vector_size(16)));
inline Doubles doubles_at(const float* x) { return Doubles{x[0], x[1]}; }
inline Doubles lesser(Doubles a, Doubles b) { return a < b ? a : b; }
inline Doubles greater(Doubles a, Doubles b) { return a > b ? a : b; }
#endif

typedef int64_t Longs __attribute__((vector_size(sizeof(Doubles))));
inline Doubles magnitudes(Doubles v) { return (Doubles)((Longs)v & INT64_MAX); }

// The sums of W elements, a power of two, asking for LINES lines from `next` on for each 64. `eighth(k)`: where the
// k-th eighth of them lies. The compiler makes two instructions of below_zero and above_zero; there is one, which
// like them has the second argument where that is a NaN.
template <int K, int W, int LINES, class Eighth, class Load>
inline Sums<K> row_sums(Eighth eighth, Load next) {
  constexpr int PART = W / 8, STEP = 8, WIDTH = sizeof(Doubles) / sizeof(double);
  GC_ALIGNED double first[PART], second[PART];
  GC_ROLLED for (int start = 0; start < PART; start += STEP) {
    GC_UNROLL
    for (int k = 0; k < LINES; ++k) next.ask((start / STEP * LINES + k) * LINE);
    GC_UNROLL
    for (int i = start; i < start + STEP; i += WIDTH) {
      Doubles v[8];
      GC_UNROLL
      for (int k = 0; k < 8; ++k) v[k] = doubles_at(eighth(k) + i);
      const auto add = [&](double* out, auto part) {
        const Doubles a = part(v[0]) + part(v[4]), b = part(v[2]) + part(v[6]);
        const Doubles c = part(v[1]) + part(v[5]), d = part(v[3]) + part(v[7]);
        const Doubles all = (a + b) + (c + d);
        memcpy(out + i, &all, sizeof all);
      };
      const Doubles zero{};
      if constexpr (K == 2) {
        add(first, [=](Doubles u) { return lesser(zero, u); });
        add(second, [=](Doubles u) { return greater(zero, u); });
      } else {
        add(first, [](Doubles u) { return magnitudes(u); });
      }
    }
  }
  if constexpr (K == 2) {
    return {{halve(first, PART), halve(second, PART)}};
  } else {
    return {{halve(first, PART)}};
  }
}

// The sums of `count` elements: with zeros up to W, which change no more than the sign of a zero sum, and means have
// none. Only the eighth that they end in is copied.
template <int K, int W, int LINES, class Load>
inline Sums<K> padded_sums(const float* x, int count, Load next) {
  constexpr int PART = W / 8;
  GC_ALIGNED float last[PART] = {};
  static const float zeros[PART] = {};
  const float* eighths[8];
  const int whole = count / PART;
  for (int k = 0; k < 8; ++k) eighths[k] = k < whole ? x + k * PART : k == whole ? last : zeros;
  memcpy(last, x + whole * PART, count % PART * sizeof *x);
  const float* const* of = eighths;
  return row_sums<K, W, LINES>([=](int k) { return of[k]; }, next);
}

template <int K, int LINES, class Load>
inline Sums<K> tile_sums(const float* x, int count, Load next) {
  if (count == TILE) return row_sums<K, TILE, LINES>([=](int k) { return x + k * (TILE / 8); }, next);
  switch (width_of(count)) {
    case TILE:
      return padded_sums<K, TILE, LINES>(x, count, next);
    case TILE / 2:
      return padded_sums<K, TILE / 2, LINES>(x, count, next);
    case TILE / 4:
      return padded_sums<K, TILE / 4, LINES>(x, count, next);
    case TILE / 8:
      return padded_sums<K, TILE / 8, LINES>(x, count, next);
  }
  return padded_sums<K, TILE / 16, LINES>(x, count, next);  // the least that row_sums takes
}

// ---- encoding --------------------------------------------------------------------------------------------------

// Encode x, or x + residual (FEEDBACK) leaving what is lost in `left`: bits, and the values that stand for them in
// each segment. K = 2: the means `low` and `high` of the classes; K = 1: the mean magnitude `high`, and its negative.
// What sums x + residual writes it to `left`, so that encoding reads one array.
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
  struct Inputs {  // from an element on
    const float *x, *residual;
    void ask(int64_t i) const {
      __builtin_prefetch(x + i);
      if constexpr (FEEDBACK) __builtin_prefetch(residual + i);
    }
  };

  Inputs inputs(int64_t start) const { return {x_ + start, FEEDBACK ? residual_ + start : nullptr}; }
  int64_t length(int64_t s) const { return segments_.offsets[s + 1] - segments_.offsets[s]; }
  int64_t edge(int64_t range) const { return std::min(tiles_of(n_) * range / ranges_ * TILE, n_); }
  float low(int64_t s) const { return K == 2 ? low_[s] : -high_[s]; }
  const float* offered() const { return FEEDBACK ? left_ : x_; }  // what is encoded

  void set(int64_t s, const Sums<K>& sums, int64_t ones) {
    const int64_t count = length(s);
    if constexpr (K == 2) {
      low_[s] = class_mean(sums.total[0], (double)(count - ones));
      high_[s] = class_mean(sums.total[1], (double)ones);
      if (!is_finite(low_[s]) || !is_finite(high_[s])) bad_ = true;
    } else {
      high_[s] = class_mean(sums.total[0], (double)count);
      if (!is_finite(high_[s])) bad_ = true;
    }
  }

  // Write to `left` what is offered of [start, start + count), and count the bits that are 1 (K = 2).
  int32_t offer(int64_t start, int count) const {
    const float *x = x_ + start, *residual = FEEDBACK ? residual_ + start : nullptr;
    float* left = FEEDBACK ? left_ + start : nullptr;
    int32_t ones = 0;
#pragma omp simd reduction(+ : ones)
    for (int i = 0; i < count; ++i) {
      float v = x[i];
      if constexpr (FEEDBACK) {
        v += residual[i];
        left[i] = v;
      }
      if constexpr (K == 2) ones += (int32_t)sign_bit(v);
    }
    return ones;
  }

  // Offer a tile of a segment, and return its sums. For each 64 elements LINES lines are asked for, from `ahead` on.
  template <int LINES>
  Sums<K> sums_of_tile(int64_t s, int64_t tile, int64_t ahead, int64_t& ones) const {
    const int64_t start = segments_.offsets[s] + tile * TILE;
    const int count = (int)std::min<int64_t>(segments_.offsets[s + 1] - start, TILE);
    ones = offer(start, count);
    return tile_sums<K, LINES>(offered() + start, count, inputs(ahead));
  }

  // Sum the segments that no range sums on its way: long ones, those that cross ranges, and empty ones.
  void sum_apart() {
    std::vector<int64_t> apart, before{0};  // segments, and the tiles before each
    int64_t range = 0;
    for (int64_t s = 0; s < segments_.count; ++s) {
      const int64_t start = segments_.offsets[s], stop = segments_.offsets[s + 1];
      if (start == stop) {
        set(s, Sums<K>{}, 0);
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
    std::vector<int64_t> ones(tiles);
    parallel(tiles, threads_, [&](int64_t first, int64_t last) {
      size_t a = std::upper_bound(before.begin(), before.end(), first) - before.begin() - 1;
      for (int64_t t = first; t < last; ++t) {
        while (before[a + 1] <= t) ++a;
        const int64_t ahead = segments_.offsets[apart[a]] + (t - before[a] + 2) * TILE;
        const Sums<K> got = sums_of_tile<4>(apart[a], t - before[a], ahead, ones[t]);
        for (int k = 0; k < K; ++k) totals[k * tiles + t] = got.total[k];
      }
    });
    for (size_t a = 0; a < apart.size(); ++a) {
      Sums<K> all{};
      for (int k = 0; k < K; ++k) {
        all.total[k] = halve_all(totals.data() + k * tiles + before[a], before[a + 1] - before[a]);
      }
      int64_t positive = 0;
      for (int64_t t = before[a]; t < before[a + 1]; ++t) positive += ones[t];
      set(apart[a], all, positive);
    }
  }

  // `ahead`: the first element that has not been asked for. Sums and codes ask for one half each of what they work
  // through, so that memory has as much time as both take.
  void sum_short(int64_t s, int64_t& ahead) {
    const int64_t tiles = tiles_of(length(s));
    double totals[K][MANY / TILE];
    int64_t ones = 0;
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t start = segments_.offsets[s] + t * TILE, stop = std::min(start + TILE, segments_.offsets[s + 1]);
      ahead = std::max(ahead, stop + LEAD);
      int64_t more;
      const Sums<K> got = sums_of_tile<2>(s, t, ahead, more);
      ahead += (stop - start) / 2;
      for (int k = 0; k < K; ++k) totals[k][t] = got.total[k];
      ones += more;
    }
    Sums<K> all{};
    for (int k = 0; k < K; ++k) all.total[k] = halve_all(totals[k], tiles);
    set(s, all, ones);
  }

  void encode(int64_t first, int64_t last) {
    if (first == last) return;
    const int64_t begin = first * TILE, end = std::min(last * TILE, n_);
    const int64_t* offsets = segments_.offsets;
    int64_t s = segments_.holding(begin), next = s, ahead = begin;
    for (int64_t t = first; t < last; ++t) {
      const int count = count_of(t, n_);
      bool summed = false;  // a segment that begins in this tile
      for (; next < segments_.count && offsets[next] < t * TILE + count; ++next) {
        const bool inside = offsets[next] >= begin && offsets[next + 1] <= end;
        if (inside && length(next) > 0 && length(next) <= MANY) {
          sum_short(next, ahead);
          summed = true;
        }
      }
      if (summed || ahead > (t + 1) * TILE) {
        encode_tile<1>(t, count, s, inputs(ahead));
        ahead += TILE / 2;
      } else {
        encode_tile<2>(t, count, s, Ahead{offered() + (t + 2) * TILE});
      }
    }
  }

  // `next`: what to ask for meanwhile.
  template <int LINES, class Load>
  void encode_tile(int64_t t, int count, int64_t& s, Load next) {
    const int64_t start = t * TILE;
    const float* value = offered() + start;
    uint32_t* words = words_ + t * LANES;
    if constexpr (!FEEDBACK) {
      pack_asking<LINES>([=](int i) { return sign_bit(value[i]); }, count, words, next);
    } else {
      float* left = left_ + start;
      while (segments_.offsets[s + 1] <= start) ++s;
      const auto code_in = [=](int64_t part) {
        return [=, below = low(part), above = high_[part]](int i) {
          const float v = left[i];
          left[i] = v - (v >= 0.0f ? above : below);
          return sign_bit(v);
        };
      };
      if (segments_.offsets[s + 1] >= start + count) {
        pack_asking<LINES>(code_in(s), count, words, next);
      } else if (count == TILE && segments_.offsets[std::min(s + PIECES, segments_.count)] < start + TILE) {
        pack_many<LINES>(start, s, words, next);
      } else if (count == TILE) {
        pack_parts<LINES>(start, s, code_in, words, next);
      } else {
        pack_asking<LINES>([=](int i) { return sign_bit(left[i]); }, count, words, next);
        for_parts(segments_, start, count, s, [=](int64_t part, int from, int to) {
          const auto code = code_in(part);
          GC_SIMD for (int i = from; i < to; ++i) code(i);
        });
      }
    }
  }

  // Pack a whole tile of many segments, with the values laid out.
  template <int LINES, class Load>
  void pack_many(int64_t start, int64_t& s, uint32_t* out, Load next) {
    GC_ALIGNED float below[TILE + LANES], above[TILE + LANES];
    for_parts(segments_, start, TILE, s, [&](int64_t part, int from, int to) {
      const float least = low(part), most = high_[part];
      GC_ROLLED for (int i = from; i < to; i += LANES) {  // the next segment overwrites what is too much
        GC_SIMD for (int l = 0; l < LANES; ++l) {
          below[i + l] = least;
          above[i + l] = most;
        }
      }
    });
    float* left = left_ + start;
    const float *lows = below, *highs = above;
    const auto code = [=](int i) {
      const float v = left[i];
      left[i] = v - (v >= 0.0f ? highs[i] : lows[i]);
      return sign_bit(v);
    };
    pack_asking<LINES>(code, TILE, out, next);
  }

  // Pack a whole tile of several segments: rows inside one of them as such, others with the values laid out.
  template <int LINES, class Code, class Load>
  void pack_parts(int64_t start, int64_t& s, Code code_in, uint32_t* out, Load next) {
    GC_ALIGNED uint32_t words[LANES] = {};
    GC_ALIGNED float below[LANES], above[LANES];
    for_parts(segments_, start, TILE, s, [&](int64_t part, int from, int to) {
      const auto lay_out = [&](int begin, int end) {
        for (int i = begin; i < end; ++i) {
          below[i % LANES] = low(part);
          above[i % LANES] = high_[part];
        }
      };
      const int first = (from + LANES - 1) / LANES * LANES, last = to / LANES * LANES;
      if (from < first) {
        lay_out(from, std::min(first, to));
        if (to < first) return;
        float* left = left_ + start + first - LANES;
        const float *lows = below, *highs = above;
        const auto code = [=](int i) {
          const int l = i - (first - LANES);
          const float v = left[l];
          left[l] = v - (v >= 0.0f ? highs[l] : lows[l]);
          return sign_bit(v);
        };
        pack_rows<LINES>(code, first - LANES, first, words, next);
      }
      pack_rows<LINES>(code_in(part), first, last, words, next);
      lay_out(std::max(first, last), to);
    });
    memcpy(out, words, sizeof words);
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

// What is wrong with bits and values (`low` null: `high` and its negative), a `Wrong`.
int64_t wrong_values(const uint32_t* words, const Segments& segments, const float* low, const float* high,
                     int threads) {
  const int64_t n = segments.offsets[segments.count];
  if (set_after_last(words, n, 1)) return AFTER_LAST;
  int64_t wrong = NOTHING;
  parallel(segments.count, threads, [&](int64_t first, int64_t last) {
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
  return wrong;
}

// ---- means -----------------------------------------------------------------------------------------------------

// Payloads of a mean: bits, values as gc_sign_values takes them, and how many workers each is for.
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
  for (int k = 0; k < ROWS * PARTS; ++k) sum[k / PARTS][k % PARTS] = -VecF{};  // -0 adds nothing
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
GC_API int64_t gc_sign_pack(const float* x, int64_t n, int bits, uint32_t* out, int threads) {
  parallel(tiles_of(n), threads, [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      if (bits == 1) {
        pack_asking<2>([=](int i) { return sign_bit(part[i]); }, count_of(t, n), out + t * LANES,
                       Ahead{part + 2 * TILE});
      } else {
        pack_tile<2>([=](int i) { return sign_code(part[i]); }, count_of(t, n), out + t * 2 * LANES);
      }
    }
  });
  return 0;
}
GC_CALLED(gc_sign_pack)

// Codes of 2 bits, sign 0 below `factor` times the root mean square; `square`, (m,), are sums of squares.
GC_API int64_t gc_sign_pack_above(const float* x, const int64_t* table, int64_t m, const double* square,
                                  double factor, uint32_t* out, int threads) {
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
GC_CALLED(gc_sign_pack_above)

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
GC_CALLED(gc_sign_decode)

// Bits, and two values a segment (`low` null: `high` and its negative), to floats, (n,), written to `out`; with
// `total` the sum of it and of `times` times the values. Returns a `Wrong`, and then nothing is written.
GC_API int64_t gc_sign_values(const uint32_t* words, const int64_t* table, int64_t m, const float* low,
                              const float* high, const float* total, float times, float* out, int threads) {
  const Segments segments(table, m);
  const int64_t n = segments.offsets[m], wrong = wrong_values(words, segments, low, high, threads);
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
GC_CALLED(gc_sign_values)

// Packed words of the vote over `number` ballots worth `workers` votes in all. In 1 bit: the majority, +1 in a tie,
// or a fair coin of the key (`toss`). In 2 bits: the majority's sign if it won by `quorum`, at most `workers`, votes.
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
GC_CALLED(gc_sign_vote)

// Bits of x, (n,), or of x + residual leaving in `left`, which may be `residual`, what is lost; and the mean `low` of
// the negative and `high` of the other elements of each segment (`low` null: `high` the mean magnitude). Returns a
// `Wrong` where these are not finite.
GC_API int64_t gc_sign_encode(const float* x, const float* residual, const int64_t* table, int64_t m, uint32_t* words,
                              float* low, float* high, float* left, int threads) try {
  const auto run = [=](auto encoder) { return encoder.run(); };
  if (low && residual) return run(Encoder<2, true>(x, residual, table, m, words, low, high, left, threads));
  if (low) return run(Encoder<2, false>(x, residual, table, m, words, low, high, left, threads));
  if (residual) return run(Encoder<1, true>(x, residual, table, m, words, low, high, left, threads));
  return run(Encoder<1, false>(x, residual, table, m, words, low, high, left, threads));
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}
GC_CALLED(gc_sign_encode)

// The mean over `number` payloads of what bits and values stand for, each times its count, divided by `divisor`: see
// gc_sign_values. Returns a `Wrong`, of the first payload that is.
GC_API int64_t gc_sign_mean(const uint32_t* const* words, const float* const* low, const float* const* high,
                            const float* counts, int number, float divisor, const int64_t* table, int64_t m,
                            float* out, int threads) {
  const Segments segments(table, m);
  const int64_t n = segments.offsets[m];
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
      if (count == TILE && segments.offsets[std::min(s + FEW, m)] >= start + count) {
        for_parts(segments, start, count, s, [&](int64_t part, int begin, int end) {
          add_part(in, t * LANES, part, begin, end, sums);
        });
      } else {
        add_tile(in, segments, start, count, s, sums);
      }
      divide_tile(sums, count, divisor);
      write_tile(out + start, sums, count, stream);
    }
    if (stream) end_stream();
  });
  return NOTHING;
}
GC_CALLED(gc_sign_mean)
