// The mean of several payloads of levels (QSGD) on the CPU, in one pass: reads bits / 8 per payload, writes 4 bytes per
// element.

#include <type_traits>

#include "levels.hpp"

using namespace gc;

namespace {

constexpr int64_t BAD_NORMS = 1, BAD_CODES = 2;

// Payloads of a mean: words and norms of each, and the number of workers.
struct Payloads {
  const uint32_t* const* words;
  const float* const* norms;
  const float* counts;
  int number;
};

// What codes stand for next to one norm, times a count.
struct Scale {
  static constexpr int KEPT = 32;
  int levels;
  float top, reciprocal;
  GC_ALIGNED float ratios[KEPT];  // of the codes of `bits` bits, one time after the other

  Scale(int number, int bits) : levels(number), top((float)number), reciprocal(1.0f / top) {
    for (int i = 0; i < KEPT; ++i) {
      ratios[i] = level_ratio((float)((i & ((1 << bits) - 1)) - levels), top, reciprocal);
    }
  }
};

// What the codes of one payload have in a part of a segment: one that no encoder sends there, one of the highest level.
struct Seen {
  bool wrong, end;
};

// Add what `codes` stand for to `sums`.
Seen add_codes(const uint32_t* codes, int count, const Scale& scale, float norm, float times, float* sums) {
  const uint32_t middle = (uint32_t)scale.levels;
  uint32_t low = middle, high = middle;
  const float top = scale.top, reciprocal = scale.reciprocal;
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int i = 0; i < count; ++i) {
    const uint32_t code = codes[i];
    sums[i] += level_ratio((float)(int32_t)(code - middle), top, reciprocal) * norm * times;
    low = code < low ? code : low;
    high = code > high ? code : high;
  }
  if (norm == 0) return {low != high, false};
  return {high > 2 * middle, low == 0 || high == 2 * middle};
}

#if defined(__AVX2__)
// Divides sums by the number of workers, as divide_tile does.
struct Divisor {
  float value, factor;
  bool power;  // of two

  explicit Divisor(float number) : value(number), factor(1.0f / number), power((bits_of(number) & 0x7fffffu) == 0) {}

  VecF quotient(VecF sum) const { return power ? sum * factor : sum / value; }
};

constexpr int PARTS = LANES / WIDTH;  // vectors in a row
constexpr int TOGETHER = 16;          // payloads that are added in registers

// Whether v has one of these bits.
bool any_of(VecU v, uint32_t bits) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)v, _mm512_set1_epi32((int)bits)) != 0;
#else
  return !_mm256_testz_si256((__m256i)v, _mm256_set1_epi32((int)bits));
#endif
}

// Values of codes next to one norm, looked up in registers.
template <int B>
class Table {
 public:
  void set(const Scale& scale, float norm, float times) {
    for (int k = 0; k < SIZE; ++k) values_[k] = load_vector<VecF>(scale.ratios + k * WIDTH) * norm * times;
  }

  // The values of the codes that begin at bit `from`. What lies above them does not count.
  VecF of(const Scale&, VecU word, int from) const {
    const VecI index = (VecI)(word >> from);
    if constexpr (SIZE == 1) return looked_up(values_[0], index);
#if defined(__AVX512F__)
    return (VecF)_mm512_permutex2var_ps((__m512)values_[0], (__m512i)index, (__m512)values_[SIZE - 1]);
#else
    const VecF low = looked_up(values_[0], index), high = looked_up(values_[SIZE - 1], index);
    return (VecF)_mm256_blendv_ps((__m256)low, (__m256)high, (__m256)(word << (28 - from)));  // by a code's bit 3
#endif
  }

 private:
  static constexpr int SIZE = (1 << B) <= WIDTH ? 1 : 2;
  static_assert((1 << B) <= 2 * WIDTH);
  VecF values_[SIZE];
};

// The same of wider codes.
template <int B>
class Quotient {
 public:
  void set(const Scale&, float norm, float times) {
    norm_ = norm;
    times_ = times;
  }

  VecF of(const Scale& scale, VecU word, int from) const {
    const VecI code = (VecI)(word >> from & ((1u << B) - 1)) - scale.levels;
    const VecF top = VecF{} + scale.top, reciprocal = VecF{} + scale.reciprocal;
    return level_ratios(__builtin_convertvector(code, VecF), top, reciprocal) * norm_ * times_;
  }

 private:
  float norm_, times_;
};

// Which codes words have, by what a table says of each half byte, which codes fill.
template <int B>
class Flags {
 public:
  void see(VecU word, const Flags& rule) {
    seen_ |= shuffled(rule.seen_, word & 0x0f0f0f0fu) | shuffled(rule.seen_, word >> 4 & 0x0f0f0f0fu);
  }

  void set_rule(int levels) {
    uint8_t flags[sizeof seen_];
    for (int i = 0; i < (int)sizeof flags; ++i) {
      flags[i] = 0;
      for (int from = 0; from < 4; from += B) {
        const int code = i >> from & ((1 << B) - 1);
        flags[i] |= (code > 2 * levels ? ABOVE : 0) | (code == 0 || code == 2 * levels ? END : 0) |
                    (code != levels ? OTHER : 0);
      }
    }
    memcpy(&seen_, flags, sizeof seen_);
  }

  void clear(int) { seen_ = VecU{}; }

  Seen seen(int, float norm) const {
    if (norm == 0) return {any_of(seen_, OTHER * BYTES), false};
    return {any_of(seen_, ABOVE * BYTES), any_of(seen_, END * BYTES)};
  }

 private:
  static constexpr uint32_t ABOVE = 1, END = 2, OTHER = 4 /* than the one of 0 */, BYTES = 0x01010101u;

  static VecU shuffled(VecU table, VecU index) {
#if defined(__AVX512F__)
    return (VecU)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#else
    return (VecU)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#endif
  }

  VecU seen_;
};

// The least and the largest code in words, for wider ones.
template <int B>
class Range {
  using Code = std::conditional_t<B == 8, uint8_t, uint16_t>;
  typedef Code Codes __attribute__((vector_size(4 * WIDTH)));

 public:
  void see(VecU word, const Range&) {
    const Codes codes = (Codes)word;
    low_ = codes < low_ ? codes : low_;
    high_ = codes > high_ ? codes : high_;
  }

  void set_rule(int) {}
  void clear(int levels) { low_ = high_ = Codes{} + (Code)levels; }

  Seen seen(int levels, float norm) const {
    const Codes middle = Codes{} + (Code)levels, top = middle + middle;
    if (norm == 0) return {any_of((VecU)((low_ != middle) | (high_ != middle)), ~0u), false};
    return {any_of((VecU)(high_ > top), ~0u), any_of((VecU)((low_ == 0) | (high_ == top)), ~0u)};
  }

 private:
  Codes low_, high_;
};

// Adds codes that fill words, of several payloads, for parts of whole tiles, some rows at a time: sums stay in registers
// from the first payload to the last.
template <int B>
class Adder {
  static constexpr int ROWS = 32 / B;
  using Values = std::conditional_t<(1 << B) <= 2 * WIDTH, Table<B>, Quotient<B>>;
  using Met = std::conditional_t<B <= 4, Flags<B>, Range<B>>;

 public:
  Adder(const Scale& scale, const Divisor& divisor, bool stream)
      : scale_(scale), divisor_(divisor), stream_(stream), middle_((~0u / mask(B)) * (uint32_t)scale.levels) {
    rule_.set_rule(scale.levels);
  }

  // Add the elements from `begin` to `end` - 1 of a tile, a part of a segment, of payloads whose words of this tile and
  // norms of the segment are words[p] and norms[p], at most TOGETHER. `first`: no others were before. `out`: where the
  // means of the tile go if no others follow, else null. What was seen of each is put into `seen`.
  void add(int number, const uint32_t* const* words, const float* norms, const float* times, int begin, int end,
           bool first, float* out, Seen* seen) {
    number_ = number;
    words_ = words;
    first_ = first;
    out_ = out;
    for (int p = 0; p < number; ++p) {
      values_[p].set(scale_, norms[p], times[p]);
      met_[p].clear(scale_.levels);
    }
    int row = begin / LANES;
    const int last = end / LANES;
    if (begin % LANES) {
      add_rows<1, true>(row, begin % LANES, last > row ? LANES : end % LANES);
      ++row;
    }
    while (row < last) {
      const int inside = ROWS - row % ROWS, left = last - row;
      row += add_some<(ROWS < 8 ? ROWS : 8)>(row, inside < left ? inside : left);
    }
    if (row == last && end % LANES) add_rows<1, true>(row, 0, end % LANES);
    for (int p = 0; p < number; ++p) seen[p] = met_[p].seen(scale_.levels, norms[p]);
  }

 private:
  static constexpr uint32_t mask(int bits) { return bits == 32 ? ~0u : (1u << bits) - 1; }

  // Add R rows if there is room in their words, else fewer.
  template <int R>
  int add_some(int row, int room) {
    if constexpr (R > 1) {
      if (room < R) return add_some<(R > 2 ? R - 2 : 1)>(row, room);
    }
    add_rows<R, false>(row, 0, LANES);
    return R;
  }

  // Add R rows, within words; if EDGE, the lanes `from` to `to` - 1 alone.
  template <int R, bool EDGE>
  void add_rows(int first, int from, int to) {
    const int place = first / ROWS * LANES, shift = first % ROWS * B;
    GC_ROLLED for (int v = 0; v < PARTS; ++v) {
      const int at = first * LANES + v * WIDTH;
      VecI inside = {};
      if constexpr (EDGE) {
        for (int l = 0; l < WIDTH; ++l) inside[l] = v * WIDTH + l >= from && v * WIDTH + l < to ? -1 : 0;
      }
      VecF sum[R];
      GC_UNROLL
      for (int r = 0; r < R; ++r) {  // -0.0 is the neutral element
        sum[r] = first_ && from == 0 ? VecF{} - 0.0f : load_vector<VecF>(sums_ + at + r * LANES);
      }
      GC_ROLLED for (int p = 0; p < number_; ++p) {
        const uint32_t* own = words_[p] + place + v * WIDTH;
        if (shift == 0) __builtin_prefetch(own + AHEAD);
        VecU word = load_vector<VecU>(own);
        if constexpr (R < ROWS) word = word >> shift;
        met_[p].see(counted<R, EDGE>(word, inside), rule_);
        GC_UNROLL
        for (int r = 0; r < R; ++r) {
          const VecF more = sum[r] + values_[p].of(scale_, word, r * B);
          sum[r] = EDGE ? inside ? more : sum[r] : more;
        }
      }
      GC_UNROLL
      for (int r = 0; r < R; ++r) keep(at + r * LANES, sum[r], out_ && to == LANES);
    }
  }

  // The codes of R rows that count, and the middle code for the others.
  template <int R, bool EDGE>
  VecU counted(VecU word, VecI inside) const {
    if constexpr (R < ROWS) word = (word & mask(R * B)) | (middle_ & ~mask(R * B));
    if constexpr (EDGE) word = inside ? word : VecU{} + middle_;
    return word;
  }

  // Keep the sums of elements from `at` on, or write the means of these and of the others of their line.
  void keep(int at, VecF sum, bool complete) {
    constexpr int LINE = 16;
    if (complete && (at + WIDTH) % LINE == 0) {
      for (int i = at + WIDTH - LINE; i < at; i += WIDTH) {
        put_vector(out_ + i, divisor_.quotient(load_vector<VecF>(sums_ + i)), stream_);
      }
      put_vector(out_ + at, divisor_.quotient(sum), stream_);
    } else {
      memcpy(sums_ + at, &sum, sizeof sum);
    }
  }

  static constexpr int AHEAD = 16 * LANES;
  const Scale& scale_;
  const Divisor& divisor_;  // a copy here costs a fifth of the time: stores might change it
  const bool stream_;
  const uint32_t middle_;
  bool first_ = true;
  float* out_ = nullptr;
  int number_ = 0;
  const uint32_t* const* words_ = nullptr;
  Met rule_, met_[TOGETHER];
  Values values_[TOGETHER];
  GC_ALIGNED float sums_[TILE];
};
#endif

// Adds the payloads of a mean, a tile at a time. `report(payload, segment, what was seen)` is called for each part.
template <int B, class Report>
class Tiles {
 public:
  Tiles(const Payloads& in, const Segments& segments, const Scale& scale, float divisor, bool stream, Report report)
      : in_(in), segments_(segments), scale_(scale), divisor_(divisor), stream_(stream), report_(report) {}

  // Write the mean of the tile at `start`, at which segment s does not end, to `out`.
  void mean(int64_t start, int count, int64_t s, float* out) {
#if defined(__AVX2__)
    if constexpr (WHOLE) {
      if (count == TILE) return mean_of_whole(start, s, out);
    }
#endif
    GC_ALIGNED float tile[TILE];
    float* sums = tile;
    GC_SIMD for (int i = 0; i < TILE; ++i) sums[i] = -0.0f;  // the neutral element
    for (int p = 0; p < in_.number; ++p) {
      GC_ALIGNED uint32_t codes[TILE];
      unpack_tile<B>(words(p, start), count, [to = codes](int i, uint32_t code) { to[i] = code; });
      int64_t first = s;
      for_parts(segments_, start, count, first, [&](int64_t part, int begin, int end) {
        const float norm = in_.norms[p][part], times = in_.counts[p];
        report_(p, part, add_codes(codes + begin, end - begin, scale_, norm, times, sums + begin));
      });
    }
    divide_tile(sums, count, divisor_);
    write_tile(out, sums, count, stream_);
  }

 private:
  const uint32_t* words(int p, int64_t start) const { return in_.words[p] + start / TILE * B * LANES; }

#if defined(__AVX2__)
  void mean_of_whole(int64_t start, int64_t s, float* out) {
    const uint32_t* at[TOGETHER];
    float norms[TOGETHER];
    Seen seen[TOGETHER];
    for (int first = 0, number; first < in_.number; first += number) {
      number = in_.number - first < TOGETHER ? in_.number - first : TOGETHER;
      for (int p = 0; p < number; ++p) at[p] = words(first + p, start);
      int64_t here = s;
      for_parts(segments_, start, TILE, here, [&](int64_t part, int begin, int end) {
        for (int p = 0; p < number; ++p) norms[p] = in_.norms[first + p][part];
        adder_.add(number, at, norms, in_.counts + first, begin, end, first == 0,
                   first + number == in_.number ? out : nullptr, seen);
        for (int p = 0; p < number; ++p) report_(first + p, part, seen[p]);
      });
    }
  }
#endif

  const Payloads& in_;
  const Segments& segments_;
  const Scale& scale_;
  const float divisor_;
  const bool stream_;
  Report report_;
#if defined(__AVX2__)
  static constexpr bool WHOLE = 32 % B == 0;  // codes fill words
  const Divisor by_{divisor_};
  Adder<WHOLE ? B : 4> adder_{scale_, by_, stream_};  // of other widths none is used
#endif
};

// Whether each of m segments whose norm is not 0 has its mark.
bool all_marked(const float* norms, const uint8_t* marks, int64_t m) {
  uint32_t wrong = 0;
#pragma omp simd reduction(| : wrong)
  for (int64_t s = 0; s < m; ++s) wrong |= (norms[s] != 0) & !marks[s];
  return !wrong;
}

}  // namespace

// The sum over `number` payloads of (code / levels) * norm, each times its count, divided by `divisor`, from code +
// levels in `bits` bits. `exact`: norms are the largest magnitudes. Returns 1 if norms, 2 if codes are what no encoder
// sends.
int64_t gc_level_mean(const uint32_t* const* words, const float* const* norms, const float* counts, int number,
                      float divisor, int bits, int exact, int levels, int64_t n, const Segments& segments, float* out,
                      int threads) {
  const Payloads in{words, norms, counts, number};
  const Scale scale(levels, bits);
  for (int p = 0; p < number; ++p) {
    if (!norms_sent(norms[p], segments.count, TINY * scale.top)) return BAD_NORMS;
  }
  // Which segments of which payloads have the highest level, as those of largest magnitudes have.
  std::unique_ptr<uint8_t[]> marks(exact ? new uint8_t[number * segments.count]() : nullptr);
  uint8_t* reached = marks.get();
  const bool stream = streams(out, n);
  int64_t bad = 0;
  parallel(tiles_of(n), threads, [=, &segments, &in, &scale, &bad](int64_t first, int64_t last) {
    bool wrong = false;
    const auto note = [=, &wrong](int p, int64_t part, Seen seen) {
      wrong |= seen.wrong;
      // Without a branch, as that would be taken at random where segments lie across tiles.
      uint8_t unused, *mark = seen.end && exact ? reached + p * segments.count + part : &unused;
      __atomic_store_n(mark, 1, __ATOMIC_RELAXED);
    };
    with_bits(bits, [&](auto b) {
      Tiles<decltype(b)::value, decltype(note)> tiles(in, segments, scale, divisor, stream, note);
      int64_t s = segments.holding(first * TILE);
      for (int64_t t = first; t < last; ++t) {
        const int64_t start = t * TILE;
        while (segments.offsets[s + 1] <= start) ++s;
        tiles.mean(start, (int)(n - start < TILE ? n - start : TILE), s, out + start);
      }
    });
    report(bad, wrong ? BAD_CODES : 0);
  });
  for (int p = 0; exact && p < number; ++p) {
    if (!all_marked(norms[p], reached + p * segments.count, segments.count)) return BAD_CODES;
  }
  return bad;
}
GC_CALLED(gc_level_mean)
