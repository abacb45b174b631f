// The mean of several payloads of levels (QSGD) on the CPU, in one pass: reads bits / 8 a payload, writes 4 bytes an
// element.

#include <type_traits>

#include "levels.hpp"

using namespace gc;

namespace {

constexpr int64_t BAD_NORMS = 1, BAD_CODES = 2;

// Payloads of a mean: words and norms of each, and how many workers it is for.
struct Payloads {
  const uint32_t* const* words;
  const float* const* norms;
  const float* counts;
  int number;
};

// What codes stand for next to one norm, times a count.
struct Scale {
  int levels;
  float top, reciprocal;
  GC_ALIGNED float ratios[16];  // of the first codes

  explicit Scale(int number) : levels(number), top((float)number), reciprocal(1.0f / top) {
    for (int code = 0; code < 16; ++code) ratios[code] = level_ratio((float)(code - levels), top, reciprocal);
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
constexpr int PARTS = LANES / WIDTH;  // vectors in a row

// What codes of B bits that fill words have, some at a time, in each word at once.
template <int B>
class Fields {
 public:
  explicit Fields(int levels) : top_(ONES * 2 * levels), room_(ONES * ((1u << B) - 1 - 2 * levels)) {}

  void see(VecU word) {
    // What is added reaches the highest bit of a field, or not, and no other field.
    const VecU other = word ^ top_;
    above_ |= ((word & REST) + room_) & word;
    within_ &= (((word & REST) + REST) | word) & (((other & REST) + REST) | other);
  }

  Seen seen() const {
    const VecU found = (above_ & HIGH) | (~within_ & HIGH) >> 1;
    uint64_t parts[WIDTH / 2], any = 0;
    memcpy(parts, &found, sizeof parts);
    for (int k = 0; k < WIDTH / 2; ++k) any |= parts[k];
    const uint32_t both = (uint32_t)(any | any >> 32);
    return {(both & HIGH) != 0, (both & HIGH >> 1) != 0};
  }

 private:
  static constexpr uint32_t ONES = ~0u / ((1u << B) - 1), HIGH = ONES << (B - 1), REST = ~HIGH;
  const uint32_t top_, room_;
  VecU above_ = {}, within_ = ~VecU{};  // in the highest bits of fields: above 2 levels, and neither 0 nor 2 levels
};

// Values of codes of up to 4 bits next to one norm, looked up in registers.
class Table {
 public:
  Table(const Scale& scale, float norm, float times) {
    for (int k = 0; k < SIZE; ++k) values_[k] = load_vector<VecF>(scale.ratios + k * WIDTH) * norm * times;
  }

  // The values of the codes that begin at bit `from`.
  template <int B>
  VecF of(VecU word, int from) const {
    if constexpr (B < 4) return looked_up(values_[0], (VecI)(word >> from & ((1u << B) - 1)));
    const VecF low = looked_up(values_[0], (VecI)(word >> from));
#if defined(__AVX512F__)
    return low;
#else
    const VecF high = looked_up(values_[1], (VecI)(word >> from));
    return (VecF)_mm256_blendv_ps((__m256)low, (__m256)high, (__m256)(word << (28 - from)));  // by a code's bit 3
#endif
  }

 private:
  static constexpr int SIZE = 16 / WIDTH;
  VecF values_[SIZE];
};

// The same of wider codes.
class Quotient {
 public:
  Quotient(const Scale& scale, float norm, float times)
      : levels_(VecI{} + scale.levels), top_(VecF{} + scale.top), reciprocal_(VecF{} + scale.reciprocal),
        norm_(VecF{} + norm), times_(VecF{} + times) {}

  template <int B>
  VecF of(VecU word, int from) const {
    const VecI code = (VecI)(word >> from & ((1u << B) - 1)) - levels_;
    return level_ratios(__builtin_convertvector(code, VecF), top_, reciprocal_) * norm_ * times_;
  }

 private:
  const VecI levels_;
  const VecF top_, reciprocal_, norm_, times_;
};

// Add what the codes of the words `first` to `last` - 1 of each lane of a whole tile stand for. The norm is not 0.
template <int B, class Values>
Seen add_words(const uint32_t* words, int first, int last, const Scale& scale, float norm, float times, float* sums) {
  constexpr int ROWS = 32 / B;
  const Values values(scale, norm, times);
  Fields<B> fields(scale.levels);
  GC_ROLLED for (int k = first; k < last; ++k) {
    GC_ROLLED for (int v = 0; v < PARTS; ++v) {
      const VecU word = load_vector<VecU>(words + k * LANES + v * WIDTH);
      fields.see(word);
      float* place = sums + k * ROWS * LANES + v * WIDTH;
      GC_UNROLL
      for (int row = 0; row < ROWS; ++row) {
        const VecF sum = load_vector<VecF>(place + row * LANES) + values.template of<B>(word, row * B);
        memcpy(place + row * LANES, &sum, sizeof sum);
      }
    }
  }
  return fields.seen();
}
#endif

// Add payload p's elements of the tile at `start` to `sums`; report(segment, what was seen) is called for each part.
template <int B, class Report>
void add_payload(const Payloads& in, int p, const Segments& segments, int64_t start, int count, int64_t s,
                 const Scale& scale, float* sums, Report report) {
  GC_ALIGNED uint32_t codes[TILE];
  const uint32_t* words = in.words[p] + start / TILE * B * LANES;
  const float times = in.counts[p];
  bool unpacked = false;
  for_parts(segments, start, count, s, [&](int64_t part, int begin, int end) {
    const float norm = in.norms[p][part];
#if defined(__AVX2__)
    if constexpr (32 % B == 0) {
      constexpr int SPAN = 32 / B * LANES;  // elements whose codes fill words
      if (count == TILE && begin % SPAN == 0 && end % SPAN == 0 && norm != 0) {
        using Values = std::conditional_t<(B <= 4), Table, Quotient>;
        report(part, add_words<B, Values>(words, begin / SPAN, end / SPAN, scale, norm, times, sums));
        return;
      }
    }
#endif
    if (!unpacked) {
      uint32_t* to = codes;
      unpack_tile<B>(words, count, [=](int i, uint32_t code) { to[i] = code; });
      unpacked = true;
    }
    report(part, add_codes(codes + begin, end - begin, scale, norm, times, sums + begin));
  });
}

bool good_norms(const float* norms, int64_t m, float least) {
  bool good = true;
  for (int64_t s = 0; s < m; ++s) good &= level_norm_sent(norms[s], least);
  return good;
}

}  // namespace

// The sum over `number` payloads of (code / levels) * norm, each times its count, divided by `divisor`, from code +
// levels in `bits` bits. `exact`: norms are the largest magnitudes. Returns 1 if norms, 2 if codes are what no encoder
// sends.
GC_API int64_t gc_level_mean(const uint32_t* const* words, const float* const* norms, const float* counts, int number,
                             float divisor, int bits, int exact, int levels, int64_t n, const int64_t* table, int64_t m,
                             float* out, int threads) try {
  const Segments segments(table, m);
  const Payloads in{words, norms, counts, number};
  const Scale scale(levels);
  for (int p = 0; p < number; ++p) {
    if (!good_norms(norms[p], m, TINY * scale.top)) return BAD_NORMS;
  }
  // Which segments of which payloads have the highest level, as those of largest magnitudes have.
  std::unique_ptr<uint8_t[]> marks(exact ? new uint8_t[number * m]() : nullptr);
  uint8_t* reached = marks.get();
  const bool stream = streams(out, n);
  bool bad = false;
  parallel(tiles_of(n), threads, [=, &segments, &in, &scale, &bad](int64_t first, int64_t last) {
    GC_ALIGNED float sums[TILE];
    float* tile = sums;
    bool wrong = false;
    int64_t s = segments.holding(first * TILE);
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE;
      const int count = (int)(n - start < TILE ? n - start : TILE);
      while (segments.offsets[s + 1] <= start) ++s;
      GC_SIMD for (int i = 0; i < TILE; ++i) tile[i] = -0.0f;  // which adds nothing
      with_bits(bits, [&](auto b) {
        for (int p = 0; p < number; ++p) {
          const auto report = [&](int64_t part, Seen seen) {
            wrong |= seen.wrong;
            if (seen.end && exact) __atomic_store_n(reached + p * m + part, 1, __ATOMIC_RELAXED);
          };
          add_payload<decltype(b)::value>(in, p, segments, start, count, s, scale, tile, report);
        }
      });
      divide_tile(tile, count, divisor);
      write_tile(out + start, tile, count, stream);
    }
    if (stream) end_stream();
    if (wrong) __atomic_store_n(&bad, true, __ATOMIC_RELAXED);
  });
  for (int p = 0; exact && p < number; ++p) {
    for (int64_t s = 0; s < m; ++s) bad |= norms[p][s] != 0 && !reached[p * m + s];
  }
  return bad ? BAD_CODES : 0;
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}
GC_CALLED(gc_level_mean)
