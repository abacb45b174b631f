// Levels of a norm (QSGD) on the CPU. Encoding reads 4 and writes bits / 8 bytes per element, decoding the reverse.
#include <math.h>

#include <type_traits>

#include "levels.hpp"

using namespace gc;

int64_t gc_segment_statistics(const float* x, const Segments& segments, float* absmax, double* sum, double* square,
                              int threads);

// Norms of segments, (m,): the 2-norm if `two`, else the largest magnitude; 0 below TINY * levels.
int64_t gc_level_norms(const float* x, const Segments& segments, int two, int levels, float* norms, int threads) {
  if (two) {
    std::unique_ptr<double[]> squares(new double[segments.count]);
    gc_segment_statistics(x, segments, nullptr, nullptr, squares.get(), threads);
    for (int64_t s = 0; s < segments.count; ++s) {
      // Every rounding keeps the order, so the root is never below the largest element.
      const double root = sqrt(squares[s]);
      norms[s] = (float)(root > FLOAT_MAX && root < __builtin_inf() ? FLOAT_MAX : root);
    }
  } else {
    gc_segment_absmax(x, segments, norms, threads);
  }
  const float least = TINY * (float)levels;
  for (int64_t s = 0; s < segments.count; ++s) norms[s] = norms[s] < least ? 0.0f : norms[s];
  return 0;
}
GC_CALLED(gc_level_norms)

namespace {

// Above this a tile of 1024 has too often an element that is guessed wrong: levels * 2^-21 of all are.
constexpr int GUESSED_LEVELS = 512;

#if defined(__AVX2__)
constexpr int TABLE_LEVELS = WIDTH - 1;

// What codes are drawn with in one segment of few levels, looked up in registers: what each level stands for, and
// the distance to the next one, times 2^-24.
class LevelTable {
 public:
  explicit LevelTable(int levels) : levels_((float)levels) {
    float ratio[WIDTH + 1];
    for (int k = 0; k <= WIDTH; ++k) ratio[k] = (float)k / levels_;
    memcpy(&ratio_, ratio, sizeof ratio_);
    memcpy(&next_, ratio + 1, sizeof next_);
  }

  // False where guesses may be above `levels`, for which there is no room, and in a segment that is not finite.
  bool set(float divisor) {
    guess = level_guess(divisor, levels_);
    value = ratio_ * divisor;
    gap = (next_ * divisor - value) * 0x1p-24f;
    return divisor < 0x1p100f;
  }

  VecF value = {}, gap = {};
  float guess = 0;

 private:
  float levels_;
  VecF ratio_, next_;
};

// As level_code_guessed, for `count` elements, a multiple of WIDTH. Returns whether a guess was wrong.
bool table_codes(const LevelTable& table, const float* x, const uint32_t* draw, int count, int32_t* codes) {
  const VecF value = table.value, gap = table.gap;
  const float guess = table.guess;
  VecI wrong = {};
  GC_ROLLED for (int i = 0; i < count; i += WIDTH) {
    VecI bits, drawn;
    memcpy(&bits, x + i, sizeof bits);
    memcpy(&drawn, draw + i, sizeof drawn);
    const VecF size = (VecF)(bits & 0x7fffffff);
    const VecI k = __builtin_convertvector(size * guess, VecI);
    const VecF below = looked_up(value, k);
    wrong |= below > size;
    const VecF half = __builtin_convertvector(drawn, VecF) + 0.5f;
    const VecI code = k - (half * looked_up(gap, k) <= size - below), sign = bits >> 31;
    const VecI result = (code ^ sign) - sign;
    memcpy(codes + i, &result, sizeof result);
  }
  int32_t any = 0;
  for (int i = 0; i < WIDTH; ++i) any |= wrong[i];
  return any;
}

// Codes of one whole tile after the other by tables, where segments begin at multiples of WIDTH.
template <class Norm>
class ByTable {
 public:
  ByTable(const Segments& segments, Norm& norm, int levels, int64_t first_element)
      : segments_(segments), norm_(norm), levels_(levels), at_(segments.holding(first_element)), table_(levels) {}

  // Whether `codes` holds the codes now; if not, they are to be found in another way.
  bool tile(const float* x, int64_t start, const uint32_t* draw, int32_t* codes) {
    if (levels_ > TABLE_LEVELS) return false;
    const int64_t* offsets = segments_.offsets;
    while (offsets[at_ + 1] <= start) ++at_;
    int64_t s = at_;
    for (int done = 0; done < TILE; ++s) {
      const int64_t end = offsets[s + 1] - start;
      const int stop = (int)(end < TILE ? end : TILE);
      if (stop % WIDTH) return false;
      if (stop == done) continue;
      if (s != set_) usable_ = table_.set(level_divisor(norm_(s)));
      set_ = s;
      if (!usable_ || table_codes(table_, x + done, draw + done, stop - done, codes + done)) return false;
      done = stop;
    }
    return true;
  }

 private:
  const Segments& segments_;
  Norm& norm_;
  int levels_;
  int64_t at_, set_ = -1;
  bool usable_ = false;
  LevelTable table_;
};
#else
template <class Norm>
struct ByTable {
  ByTable(const Segments&, Norm&, int, int64_t) {}
  bool tile(const float*, int64_t, const uint32_t*, int32_t*) { return false; }
};
#endif

uint32_t largest(const float* values, int64_t count) {
  uint32_t top = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t u = bits_of(values[i]) & 0x7fffffffu;
    top = u > top ? u : top;
  }
  return top;
}

// The norms of segments, where they are known.
struct Known {
  const float* norms;
  float operator()(int64_t s) const { return norms[s]; }
};

// The largest magnitudes of segments, found when they are requested, which is right before their elements are read
// for the codes, and kept in `norms`. A segment that begins in another thread's tiles is kept by that one.
struct Found {
  const float* x;
  const Segments& segments;
  float least;
  int64_t first_element;
  float* norms;
  float operator()(int64_t s) const {
    const int64_t start = segments.offsets[s];
    const float top = float_of(largest(x + start, segments.offsets[s + 1] - start)), norm = top < least ? 0.0f : top;
    if (start >= first_element) norms[s] = norm;
    return norm;
  }
};

// Call put(tile, codes of the tile, count) for the codes of x, in any order and from any thread. `norm_from(i)`: what
// gives the norms of segments, asked in their order from the one that holds element i.
template <class NormFrom, class Put>
void for_codes(const float* x, int64_t n, const Segments& segments, NormFrom norm_from, int levels, const Key& key,
               int threads, Put put) {
  const float top = (float)levels, reciprocal = 1.0f / top;
  parallel(tiles_of(n), threads, [=, &segments, &key](int64_t first, int64_t last) {
    auto norm = norm_from(first * TILE);
    auto spread = spread_values<2>(segments, first * TILE, [=](int64_t s, float* values) {
      values[0] = level_divisor(norm(s));
      values[1] = level_guess(values[0], top);
    });
    ByTable tables(segments, norm, levels, first * TILE);
    Draws draws(key, first);
    GC_ALIGNED int32_t codes[TILE];
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      const uint32_t* draw = draws.tile_for(part, count, part);
      if (count < TILE || !tables.tile(part, t * TILE, draw, codes)) {
        spread.tile(t * TILE, count);
        const float *divisor = spread.row[0], *guess = spread.row[1];
        uint32_t any = (uint32_t)(levels > GUESSED_LEVELS);
        if (!any) {
#pragma omp simd reduction(| : any)
          for (int i = 0; i < count; ++i) {
            uint32_t wrong;
            codes[i] = level_code_guessed(part[i], divisor[i], guess[i], top, reciprocal, draw[i], wrong);
            any |= wrong;
          }
        }
        if (any) {
          GC_SIMD for (int i = 0; i < count; ++i) {
            codes[i] = level_code(part[i], divisor[i], level_guess24(divisor[i], top), top, reciprocal, draw[i]);
          }
        }
      }
      put(t, codes, count);
    }
  });
}

}  // namespace

// Codes of x, (n,), in [-levels, levels].
int64_t gc_level_codes(const float* x, int64_t n, const Segments& segments, const float* norms, int levels,
                       const Key& key, int32_t* out, int threads) {
  const bool stream = n >= STREAM_FROM;
  for_codes(x, n, segments, [=](int64_t) { return Known{norms}; }, levels, key, threads,
            [=](int64_t t, const int32_t* codes, int count) {
              write_tile(out + t * TILE, codes, count, stream);
            });
  return 0;
}
GC_CALLED(gc_level_codes)

namespace {

template <class NormFrom>
void encode(const float* x, int64_t n, const Segments& segments, NormFrom norm_from, int levels, int bits,
            const Key& key, uint32_t* out, int threads) {
  for_codes(x, n, segments, norm_from, levels, key, threads, [=](int64_t t, const int32_t* codes, int count) {
    with_bits(bits, [=](auto b) {
      constexpr int B = decltype(b)::value;
      pack_tile<B>([=](int i) { return (uint32_t)(codes[i] + levels); }, count, out + t * B * LANES);
    });
  });
}

}  // namespace

// Code + levels in `bits` bits each.
int64_t gc_level_encode(const float* x, int64_t n, const Segments& segments, const float* norms, int levels, int bits,
                        const Key& key, uint32_t* out, int threads) {
  encode(x, n, segments, [=](int64_t) { return Known{norms}; }, levels, bits, key, out, threads);
  return 0;
}
GC_CALLED(gc_level_encode)

// The same by the largest magnitudes, which are written to `norms`, (m,). Short segments are read from memory once.
int64_t gc_level_encode_max(const float* x, int64_t n, const Segments& segments, int levels, int bits, const Key& key,
                            float* norms, uint32_t* out, int threads) {
  constexpr int64_t SHORT = 8 * TILE;
  const float least = TINY * (float)levels;
  if (segments.longest() <= SHORT) {
    for (int64_t s = 0; s < segments.count; ++s) norms[s] = 0;  // `Found` does not set those of empty segments
    const auto found = [=, &segments](int64_t first) { return Found{x, segments, least, first, norms}; };
    encode(x, n, segments, found, levels, bits, key, out, threads);
  } else {
    gc_level_norms(x, segments, 0, levels, norms, threads);
    encode(x, n, segments, [=](int64_t) { return Known{norms}; }, levels, bits, key, out, threads);
  }
  return 0;
}
GC_CALLED(gc_level_encode_max)

namespace {

// Whether segments reach what their norms say: decoded, the largest magnitude is the norm itself (`exact`), or at
// most that. A segment that several threads share is judged when all are done.
struct Judge {
  const Segments& segments;
  const float* norms;
  bool exact;
  struct Edge {
    int64_t segment;
    uint32_t top;
  };
  Edge* edges;  // two for each thread, at most
  int used = 0;
  bool bad = false;

  bool good(int64_t s, uint32_t top) const {
    const uint32_t norm = bits_of(norms[s]) & 0x7fffffffu;  // as integers, bits order as magnitudes do
    return exact ? top == norm : top <= norm;
  }

  void share(int64_t s, uint32_t top) {
    for (int e = 0; e < used; ++e) {
      if (edges[e].segment == s) {
        edges[e].top = top > edges[e].top ? top : edges[e].top;
        return;
      }
    }
    edges[used++] = {s, top};
  }

  bool all_good() const {
    bool fine = !bad;
    for (int e = 0; e < used; ++e) fine &= good(edges[e].segment, edges[e].top);
    return fine;
  }
};

// One thread's walk over the segments of its tiles.
class Walk {
 public:
  Walk(Judge& judge, int64_t first_element)
      : judge_(judge), first_(first_element), at_(judge.segments.holding(first_element)) {}

  // `largest(i, j)`: the bits of the largest magnitude of the decoded elements i to j - 1 of the tile.
  template <class Largest>
  void tile(int64_t start, int count, Largest largest) {
    const int64_t* offsets = judge_.segments.offsets;
    for (int done = 0; done < count;) {
      const int64_t end = offsets[at_ + 1] - start;
      const int stop = (int)(end < count ? end : count);
      const uint32_t top = largest(done, stop);
      top_ = top > top_ ? top : top_;
      if (end > count) return;
      if (offsets[at_] < first_) {
#pragma omp critical
        judge_.share(at_, top_);
      } else {
        bad_ |= !judge_.good(at_, top_);
      }
      ++at_;
      top_ = 0;
      done = stop;
    }
  }

  void end(int64_t last_element) {
#pragma omp critical
    {
      if (at_ < judge_.segments.count && judge_.segments.offsets[at_] < last_element) judge_.share(at_, top_);
      judge_.bad |= bad_;
    }
  }

 private:
  Judge& judge_;
  int64_t first_, at_;
  uint32_t top_ = 0;
  bool bad_ = false;
};

// What a segment's codes are multiplied with. Of norm 0 all codes are zero, or it is refused: next to 1 (with the
// norm's sign) others show.
float decoding_norm(float norm) { return norm == 0 ? float_of(bits_of(norm) | 0x3f800000u) : norm; }

#if defined(__AVX2__)
constexpr int PARTS = LANES / WIDTH;  // vectors in a row

// The norms of the 32 rows of one whole tile after the other, where segments begin at multiples of LANES.
class RowNorms {
 public:
  RowNorms(const Segments& segments, const float* norms, int64_t first_element)
      : segments_(segments), norms_(norms), at_(segments.holding(first_element)) {}

  float row[LANES];

  // Whether `row` holds them now.
  bool tile(int64_t start) {
    const int64_t* offsets = segments_.offsets;
    while (offsets[at_ + 1] <= start) ++at_;
    if (at_ == whole_ && offsets[at_ + 1] >= start + TILE) return true;
    whole_ = -1;
    int64_t s = at_;
    for (int done = 0; done < LANES; ++s) {
      const int64_t end = offsets[s + 1] - start;
      if (end < TILE && end % LANES) return false;
      const int stop = end < TILE ? (int)end / LANES : LANES;
      const float norm = decoding_norm(norms_[s]);
      if (stop - done == LANES) whole_ = s;
      while (done < stop) row[done++] = norm;
    }
    return true;
  }

 private:
  const Segments& segments_;
  const float* norms_;
  int64_t at_, whole_ = -1;
};

// Call put(i, values) for each WIDTH values of a whole tile; `tops` are bits of the largest magnitudes in each row.
template <int B, class Put>
inline void decode_rows(const uint32_t* words, int levels, const float* norms, VecI* tops, Put put) {
  const VecF top = VecF{} + (float)levels, reciprocal = 1.0f / top;
  GC_ROLLED for (int k = 0; k < B; ++k) {
    VecU word[PARTS];
    GC_UNROLL
    for (int v = 0; v < PARTS; ++v) word[v] = load_vector<VecU>(words + k * LANES + v * WIDTH);
    GC_ROLLED for (int row = k * (32 / B); row < (k + 1) * (32 / B); ++row) {
      const float norm = norms[row];
      VecI most = {};
      GC_UNROLL
      for (int v = 0; v < PARTS; ++v) {
        const VecI code = (VecI)(word[v] & ((1u << B) - 1)) - levels;
        const VecF value = level_ratios(__builtin_convertvector(code, VecF), top, reciprocal) * norm;
        const VecI size = (VecI)value & 0x7fffffff;
        most = size > most ? size : most;
        word[v] >>= B;
        put(row * LANES + v * WIDTH, value);
      }
      tops[row] = most;
    }
  }
}
#endif

}  // namespace

// (code / levels) * norm, times `count`, added to `onto` (null: not), from code + levels in `bits` bits, or with bits
// = 0 from int32 codes in [-levels, levels]. `exact`: norms are the largest magnitudes. Returns 1 if the norms, 2 if
// the codes are invalid input. `out` may be `onto`.
int64_t gc_level_decode(const uint32_t* words, int bits, const float* norms, int exact, int levels, int64_t n,
                        const Segments& segments, const float* onto, float count, float* out, int threads) {
  const float least = TINY * (float)levels;
  if (!norms_sent(norms, segments.count, least)) return 1;
  if (exact) {
    uint32_t wrong = 0;
#pragma omp simd reduction(| : wrong)
    for (int64_t s = 0; s < segments.count; ++s) wrong |= (norms[s] != 0) & (segments.length(s) == 0);
    if (wrong) return 2;
  }
  std::unique_ptr<Judge::Edge[]> edges(new Judge::Edge[2 * (threads + 1)]);
  Judge judge{segments, norms, exact != 0, edges.get()};
  const bool stream = streams(out, n) && onto != out;
  const float top = (float)levels, reciprocal = 1.0f / top;
  parallel(tiles_of(n), threads, [=, &segments, &judge](int64_t first, int64_t last) {
    auto spread = spread_values<1>(segments, first * TILE,
                                   [=](int64_t s, float* values) { values[0] = decoding_norm(norms[s]); });
#if defined(__AVX2__)
    RowNorms rows(segments, norms, first * TILE);
#endif
    Walk walk(judge, first * TILE);
    GC_ALIGNED float tile[TILE];
    float* values = tile;
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE;
      const int some = (int)(n - start < TILE ? n - start : TILE);
#if defined(__AVX2__)
      if (bits && 32 % bits == 0 && some == TILE && rows.tile(start)) {
        GC_ALIGNED VecI tops[LANES];
        float* place = out + start;
        const auto decode = [&](auto width, auto streamed) {
          constexpr int B = decltype(width)::value;
          if constexpr (32 % B == 0) {
            const uint32_t* from = words + t * B * LANES;
            if (onto) {
              const float* base = onto + start;
              decode_rows<B>(from, levels, rows.row, tops, [=](int i, VecF value) {
                put_vector(place + i, load_vector<VecF>(base + i) + value * count, streamed);
              });
            } else {
              decode_rows<B>(from, levels, rows.row, tops,
                             [=](int i, VecF value) { put_vector(place + i, value, streamed); });
            }
          }
        };
        with_bits(bits, [&](auto b) { stream ? decode(b, std::true_type()) : decode(b, std::false_type()); });
        walk.tile(start, some, [&](int i, int j) {
          VecI most = {};
          for (int row = i / LANES; row < j / LANES; ++row) most = tops[row] > most ? tops[row] : most;
          int32_t top = 0;
          for (int l = 0; l < WIDTH; ++l) top = most[l] > top ? most[l] : top;
          return (uint32_t)top;
        });
        continue;
      }
#endif
      spread.tile(start, some);
      const float* norm = spread.row[0];
      if (bits) {
        with_bits(bits, [=](auto b) {
          constexpr int B = decltype(b)::value;
          unpack_tile<B>(words + t * B * LANES, some, [=](int i, uint32_t code) {
            values[i] = level_ratio((float)((int32_t)code - levels), top, reciprocal) * norm[i];
          });
        });
      } else {
        const int32_t* codes = (const int32_t*)words + start;
        GC_SIMD for (int i = 0; i < some; ++i) {
          values[i] = level_ratio((float)codes[i], top, reciprocal) * norm[i];
        }
      }
      walk.tile(start, some, [=](int i, int j) { return largest(values + i, j - i); });
      if (onto) {
        const float* base = onto + start;
        GC_SIMD for (int i = 0; i < some; ++i) values[i] = base[i] + values[i] * count;
      }
      write_tile(out + start, values, some, stream);
    }
    walk.end(last * TILE < n ? last * TILE : n);
  });
  return judge.all_good() ? 0 : 2;
}
GC_CALLED(gc_level_decode)
