// Natural compression on the CPU: the sign and the 8 bits of a float's exponent, 9 bits per code; code << 23 is the
// float. Encoding reads 4 and writes 9/8 bytes per element; a mean reads 9/8 per payload and writes 4.
#include "called.hpp"

using namespace gc;

namespace {

constexpr int B = 9;                   // bits per code
constexpr int ROWS = 8;                // of codes that are added in registers
constexpr uint32_t TOP = 0xff800000u;  // where a float has sign and exponent

constexpr int AHEAD = 2 * B * LANES;   // words from what is read to what is prefetched: two tiles

// The code of x: the next exponent iff draw < 2 fraction, the fraction as the 23 bits that it has in the float. Twice
// the fraction, and what the draw lacks of 2^24 - 1, carry into the exponent exactly then. Zeros and denormals have
// nothing that could carry, and neither has 2^127, which stands for all that is above.
GC_HD uint32_t natural_code(float x, uint32_t draw) {
  constexpr uint32_t MOST = 0xfe000000u, LEAST = 0x01000000u;  // 2^127 and 2^-126, one bit further up
  const uint32_t size = bits_of(x) << 1;
  const uint32_t kept = size < LEAST ? 0u : size < MOST ? size : MOST;
  const uint32_t exponent = (kept + (0xffffffu - draw)) >> 24;
  return exponent | (x <= -0x1p-126f ? 0x100u : 0u);  // a NaN has no sign
}

GC_HD float natural_value(uint32_t code) { return float_of(code << 23); }

// Whether no encoder sends this code: infinity, NaN or a negative zero.
GC_HD bool natural_wrong(uint32_t code) { return (code & 0xffu) == 0xffu || code == 0x100u; }

struct Payloads {
  const uint32_t* const* words;
  const float* counts;
  int number;
};

// Where a value is infinite or -0.
#if defined(__AVX512DQ__)
typedef __mmask16 Where;
inline Where stands_for_nothing(VecF value) { return _mm512_fpclass_ps_mask((__m512)value, 0x04 | 0x08 | 0x10); }
inline bool any(Where where) { return where != 0; }
#else
typedef VecI Where;
inline Where stands_for_nothing(VecF value) {
  const VecI bits = (VecI)value;
  return (bits == INT32_MIN) | ((bits & INT32_MAX) == 0x7f800000);
}
inline bool any(Where where) {
  int32_t all = 0;
  for (int l = 0; l < WIDTH; ++l) all |= where[l];
  return all != 0;
}
#endif

// Rows FIRST to FIRST + 7 of WIDTH lanes of a whole tile, from `lane` on, whose words begin at `place`: the sums of
// what the codes of all payloads stand for, times their counts, to `sums`. `bad` is set where a code is
// invalid.
template <int FIRST>
inline void add_rows(const Payloads& in, int64_t place, int lane, float* sums, Where& bad) {
  constexpr int BIT = FIRST * B, WORD = BIT / 32, WORDS = ((FIRST + ROWS) * B - 1) / 32 - WORD + 1;
  VecF sum[ROWS];
  GC_UNROLL
  for (int j = 0; j < ROWS; ++j) sum[j] = -VecF{};  // -0 is the neutral element
  Where wrong = bad;
  GC_ROLLED for (int p = 0; p < in.number; ++p) {
    const uint32_t* from = in.words[p] + place + WORD * LANES + lane;
    const float times = in.counts[p];
    VecU word[WORDS];
    GC_UNROLL
    for (int k = 0; k < WORDS; ++k) {
      word[k] = load_vector<VecU>(from + k * LANES);
      __builtin_prefetch(from + k * LANES + AHEAD);
    }
    GC_UNROLL
    for (int j = 0; j < ROWS; ++j) {
      const int bit = BIT % 32 + j * B, k = bit / 32, shift = bit % 32;
      VecU code;  // in the highest bits, where it is a float
      if (shift <= 32 - B) {
        code = word[k] << (32 - B - shift);
      } else {
        code = (word[k] >> (shift + B - 32)) | (word[k + 1] << (64 - B - shift));
      }
      code &= TOP;
      wrong |= stands_for_nothing((VecF)code);
      sum[j] += (VecF)code * times;
    }
  }
  bad = wrong;
  GC_UNROLL
  for (int j = 0; j < ROWS; ++j) memcpy(sums + (FIRST + j) * LANES + lane, &sum[j], sizeof sum[j]);
}

// The same for a whole tile.
bool add_tile(const Payloads& in, int64_t place, float* sums) {
  Where bad = {};
  GC_ROLLED for (int lane = 0; lane < LANES; lane += WIDTH) add_rows<0>(in, place, lane, sums, bad);
  GC_ROLLED for (int lane = 0; lane < LANES; lane += WIDTH) add_rows<8>(in, place, lane, sums, bad);
  GC_ROLLED for (int lane = 0; lane < LANES; lane += WIDTH) add_rows<16>(in, place, lane, sums, bad);
  GC_ROLLED for (int lane = 0; lane < LANES; lane += WIDTH) add_rows<24>(in, place, lane, sums, bad);
  return any(bad);
}

// And for a last tile that is shorter.
bool add_rest(const Payloads& in, int64_t place, int count, float* sums) {
  bool bad = false;
  for (int i = 0; i < count; ++i) sums[i] = -0.0f;
  for (int p = 0; p < in.number; ++p) {
    uint32_t codes[TILE];
    unpack_codes(B, in.words[p] + place, (count + LANES - 1) / LANES, codes);
    for (int i = 0; i < count; ++i) {
      bad |= natural_wrong(codes[i]);
      sums[i] += natural_value(codes[i]) * in.counts[p];
    }
  }
  return bad;
}

}  // namespace

// Codes of x, (n,).
int64_t gc_natural_encode(const float* x, int64_t n, const Key& key, uint32_t* out, int threads) {
  parallel(tiles_of(n), threads, [=, &key](int64_t first, int64_t last) {
    Draws draws(key, first);
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      const uint32_t* draw = draws.tile_for(part, count, part);
      pack_tile<B>([=](int i) { return natural_code(part[i], draw[i]); }, count, out + t * B * LANES);
    }
  });
  return 0;
}
GC_CALLED(gc_natural_encode)

// The sum of the decoded values of `number` payloads, each times its count, divided by `divisor`. Returns 1 if
// a code is invalid.
int64_t gc_natural_mean(const uint32_t* const* words, const float* counts, int number, float divisor, int64_t n,
                        float* out, int threads) {
  const Payloads in{words, counts, number};
  const bool stream = streams(out, n);
  int64_t bad = 0;
  parallel(tiles_of(n), threads, [=, &in, &bad](int64_t first, int64_t last) {
    GC_ALIGNED float sums[TILE];
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE, place = t * B * LANES;
      const int count = (int)(n - start < TILE ? n - start : TILE);
      if (count == TILE ? add_tile(in, place, sums) : add_rest(in, place, count, sums)) return report(bad, 1);
      divide_tile(sums, count, divisor);
      write_tile(out + start, sums, count, stream);
    }
  });
  return bad;
}
GC_CALLED(gc_natural_mean)
