// 1-bit codes on the CPU, and the means of their classes.
//
// Encoding reads 4 bytes per element and writes 1/8; with error feedback it reads 8 and writes 4 1/8 where segments are
// short, and reads and writes 4 more where they are not.
#include <algorithm>
#include <vector>

#include "signs.hpp"

using namespace gc;

namespace {

constexpr int64_t MANY = 1 << 15;  // elements of a segment that is too long to be read again from a cache
constexpr int64_t LEAD = 384;      // distance of the prefetch from the sums, in elements; with more, lines are evicted
constexpr int64_t PIECES = 8;      // with at most this many segments, a tile is encoded row by row

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

// The sums of W elements, a power of two, prefetching LINES lines from `next` on for each 64. `eighth(k)`: where the
// k-th eighth of them lies. `lesser` and `greater` are below_zero and above_zero in one instruction, of which the
// compiler would make two; like those they return the second argument if it is a NaN.
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

// The sums of `count` elements, padded with zeros to W. Zeros change at most the sign of a zero sum, which a mean
// drops. Only the eighth in which the elements end is copied.
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

// The values that stand for the bits of each segment: the means `low` and `high` of the classes; or (K = 1) the mean
// magnitude `high`, and its negative.
template <int K>
struct Values {
  float *low, *high;
  bool bad = false;  // one of them is not finite

  float below(int64_t s) const { return K == 2 ? low[s] : -high[s]; }

  // Of `count` elements, of which `ones` have bit 1 (K = 2).
  void set(int64_t s, int64_t count, const Sums<K>& sums, int64_t ones) {
    if constexpr (K == 2) {
      low[s] = class_mean(sums.total[0], (double)(count - ones));
      high[s] = class_mean(sums.total[1], (double)ones);
      if (!is_finite(low[s])) bad = true;
    } else {
      high[s] = class_mean(sums.total[0], (double)count);
    }
    if (!is_finite(high[s])) bad = true;
  }
};

int64_t ones_of(const float* x, int count) {
  int32_t ones = 0;
#pragma omp simd reduction(+ : ones)
  for (int i = 0; i < count; ++i) ones += (int32_t)sign_bit(x[i]);
  return ones;
}

// ---- encoding --------------------------------------------------------------------------------------------------

// Encode x. The bits do not depend on the values, so each tile of a segment is summed while it is in the cache for
// packing, by the thread that packs its first element. Returns NOT_FINITE if a mean is not finite.
template <int K>
int64_t encode_alone(const float* x, const Segments& segments, uint32_t* words, Values<K> values, int threads) {
  const int64_t n = segments.numel(), parts = segments.tiles[segments.count];
  // Of segments of more than one tile.
  std::unique_ptr<double[]> all_sums(new double[K * parts]);
  std::unique_ptr<int64_t[]> all_ones(new int64_t[parts]);
  double* sums = all_sums.get();
  int64_t* ones = all_ones.get();
  parallel(tiles_of(n), threads, [=, &segments, &values](int64_t first, int64_t last) {
    const int64_t *offsets = segments.offsets, *tiles = segments.tiles;
    int64_t s = segments.holding(first * TILE), part = tiles[s] + tiles_of(first * TILE - offsets[s]);
    int64_t ahead = first * TILE;  // the first element not yet prefetched; sums and packing prefetch a half each
    for (int64_t t = first; t < last; ++t) {
      const int count = count_of(t, n);
      const float* here = x + t * TILE;
      for (; part < parts; ++part) {
        while (tiles[s + 1] <= part) ++s;
        const int64_t start = offsets[s] + (part - tiles[s]) * TILE, left = offsets[s + 1] - start;
        if (start >= t * TILE + count) break;
        const int some = (int)std::min<int64_t>(left, TILE);
        const int64_t positive = K == 2 ? ones_of(x + start, some) : 0;
        ahead = std::max(ahead, start + some + TILE);
        const Sums<K> got = tile_sums<K, 2>(x + start, some, Ahead{x + ahead});
        ahead += some / 2;
        if (tiles[s + 1] - tiles[s] == 1) {
          values.set(s, left, got, positive);
        } else {
          for (int k = 0; k < K; ++k) sums[k * parts + part] = got.total[k];
          ones[part] = positive;
        }
      }
      pack_asking<1>([=](int i) { return sign_bit(here[i]); }, count, words + t * LANES, Ahead{x + ahead});
      ahead += TILE / 2;
    }
  });
  for (int64_t s = 0; s < segments.count; ++s) {
    const int64_t first = segments.tiles[s], last = segments.tiles[s + 1];
    if (last - first == 1) continue;
    Sums<K> all{};
    for (int k = 0; k < K && first < last; ++k) all.total[k] = halve_all(sums + k * parts + first, last - first);
    int64_t positive = 0;
    for (int64_t part = first; part < last; ++part) positive += ones[part];
    values.set(s, segments.length(s), all, positive);
  }
  return values.bad ? NOT_FINITE : NOTHING;
}

// Encode x + residual, and write the error, x + residual minus its decoding, to `left`. The pass that sums x + residual
// stores it in `left`, so that the encoding pass reads one array.
//
// A segment inside the range of one thread is summed when the thread reaches its first tile, and encoded from the
// cache; long ones, and those that cross ranges, are summed before.
template <int K>
class FeedbackEncoder {
 public:
  FeedbackEncoder(const float* x, const float* residual, const Segments& segments, uint32_t* words, Values<K> values,
                  float* left, int threads)
      : segments_(segments), n_(segments.numel()), x_(x), residual_(residual), words_(words),
        values_(values), left_(left), threads_(threads) {}

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
    return values_.bad ? NOT_FINITE : NOTHING;
  }

 private:
  struct Inputs {  // from an element on
    const float *x, *residual;
    void ask(int64_t i) const {
      __builtin_prefetch(x + i);
      __builtin_prefetch(residual + i);
    }
  };

  Inputs inputs(int64_t start) const { return {x_ + start, residual_ + start}; }
  int64_t edge(int64_t range) const { return std::min(tiles_of(n_) * range / ranges_ * TILE, n_); }

  // Write x + residual of [start, start + count) to `left`, and return the number of bits that are 1 (K = 2).
  int32_t offer(int64_t start, int count) const {
    const float *x = x_ + start, *residual = residual_ + start;
    float* left = left_ + start;
    int32_t ones = 0;
#pragma omp simd reduction(+ : ones)
    for (int i = 0; i < count; ++i) {
      const float v = x[i] + residual[i];
      left[i] = v;
      if constexpr (K == 2) ones += (int32_t)sign_bit(v);
    }
    return ones;
  }

  // Offer a tile of a segment, and return its sums. For each 64 elements LINES lines are requested, from `ahead` on.
  template <int LINES>
  Sums<K> sums_of_tile(int64_t s, int64_t tile, int64_t ahead, int64_t& ones) const {
    const int64_t start = segments_.offsets[s] + tile * TILE;
    const int count = (int)std::min<int64_t>(segments_.offsets[s + 1] - start, TILE);
    ones = offer(start, count);
    return tile_sums<K, LINES>(left_ + start, count, inputs(ahead));
  }

  // Sum the segments that no range sums on its way: long ones, those that cross ranges, and empty ones.
  void sum_apart() {
    std::vector<int64_t> apart, before{0};  // segments, and the tiles before each
    int64_t range = 0;
    for (int64_t s = 0; s < segments_.count; ++s) {
      const int64_t start = segments_.offsets[s], stop = segments_.offsets[s + 1];
      if (start == stop) {
        values_.set(s, 0, Sums<K>{}, 0);
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
      values_.set(apart[a], segments_.length(apart[a]), all, positive);
    }
  }

  // `ahead`: the first element that has not been requested. Sums and codes ask for one half each of what they work
  // through, so that memory has as much time as both take.
  void sum_short(int64_t s, int64_t& ahead) {
    const int64_t tiles = tiles_of(segments_.length(s));
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
    values_.set(s, segments_.length(s), all, ones);
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
        if (inside && segments_.length(next) > 0 && segments_.length(next) <= MANY) {
          sum_short(next, ahead);
          summed = true;
        }
      }
      if (summed || ahead > (t + 1) * TILE) {
        encode_tile<1>(t, count, s, inputs(ahead));
        ahead += TILE / 2;
      } else {
        encode_tile<2>(t, count, s, Ahead{left_ + (t + 2) * TILE});
      }
    }
  }

  // `next`: what to ask for meanwhile.
  template <int LINES, class Load>
  void encode_tile(int64_t t, int count, int64_t& s, Load next) {
    const int64_t start = t * TILE;
    uint32_t* words = words_ + t * LANES;
    float* left = left_ + start;
    while (segments_.offsets[s + 1] <= start) ++s;
    const auto code_in = [=](int64_t part) {
      return [=, below = values_.below(part), above = values_.high[part]](int i) {
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

  // Pack a whole tile of many segments, with the segments' values repeated for each element.
  template <int LINES, class Load>
  void pack_many(int64_t start, int64_t& s, uint32_t* out, Load next) {
    GC_ALIGNED float below[TILE + LANES], above[TILE + LANES];
    for_parts(segments_, start, TILE, s, [&](int64_t part, int from, int to) {
      const float least = values_.below(part), most = values_.high[part];
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

  // Pack a whole tile of several segments: rows inside one segment with its values, other rows with the values repeated
  // for each element.
  template <int LINES, class Code, class Load>
  void pack_parts(int64_t start, int64_t& s, Code code_in, uint32_t* out, Load next) {
    GC_ALIGNED uint32_t words[LANES] = {};
    GC_ALIGNED float below[LANES], above[LANES];
    for_parts(segments_, start, TILE, s, [&](int64_t part, int from, int to) {
      const auto lay_out = [&](int begin, int end) {
        for (int i = begin; i < end; ++i) {
          below[i % LANES] = values_.below(part);
          above[i % LANES] = values_.high[part];
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
  Values<K> values_;
  float* left_;
  const int threads_;
  int64_t ranges_ = 1;
};

}  // namespace

// Bits of x, (n,), and of each segment the mean `low` of the negative and `high` of the other elements (`low` null:
// `high` is the mean magnitude). With `residual` the same of x + residual, and its error, x + residual minus the
// decoding, in `left`, which may be `residual`. Returns a `Wrong` if a mean is not finite.
int64_t gc_sign_encode(const float* x, const float* residual, const Segments& segments, uint32_t* words, float* low,
                       float* high, float* left, int threads) {
  const auto run = [=, &segments](auto values) {
    if (!residual) return encode_alone(x, segments, words, values, threads);
    return FeedbackEncoder(x, residual, segments, words, values, left, threads).run();
  };
  return low ? run(Values<2>{low, high}) : run(Values<1>{nullptr, high});
}
GC_CALLED(gc_sign_encode)
