// Shared by the families of signs: the faults of a payload, and packing with prefetch.
#pragma once
#include "called.hpp"
#include "sign.cuh"

namespace gc {

// The faults of a payload, by the numbers of `gcbench.ops.sign.WRONG`; of several the least is reported.
enum Wrong : int64_t { NOTHING, AFTER_LAST, CODE_3, NOT_FINITE, WRONG_SIDE, OF_NOTHING };

constexpr int LINE = 16;  // floats of a cache line

inline int count_of(int64_t tile, int64_t n) { return (int)(n - tile * TILE < TILE ? n - tile * TILE : TILE); }

// Whether a bit is set after the last of n codes.
inline bool set_after_last(const uint32_t* words, int64_t n, int bits) {
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
inline uint32_t any_code_3(const uint32_t* words, int64_t number) {
  uint32_t both = 0;
#pragma omp simd reduction(| : both)
  for (int64_t i = 0; i < number; ++i) both |= words[i] & (words[i] >> 1) & 0x55555555u;
  return both;
}

// Shift the bits code(first) ... code(last - 1), whole rows, into the words of a tile, above the bits that are there.
// With each row LINES lines are prefetched.
template <int LINES, class F, class Load>
inline void pack_rows(F code, int first, int last, uint32_t* words, Load next) {
  GC_ROLLED for (int i = first; i < last; i += LANES) {
    GC_UNROLL
    for (int k = 0; k < LINES; ++k) next.ask((i / LANES * LINES + k) * LINE);
    GC_SIMD for (int l = 0; l < LANES; ++l) words[l] = (words[l] >> 1) | (code(i + l) << 31);
  }
}

// As pack_tile<1>, prefetching LINES lines from `next` on with each row of 32 elements.
template <int LINES, class F, class Load>
inline void pack_asking(F code, int count, uint32_t* out, Load next) {
  if (count < TILE) return pack_rest<1>(code, count, out);
  GC_ALIGNED uint32_t words[LANES] = {};
  pack_rows<LINES>(code, 0, TILE, words, next);
  memcpy(out, words, sizeof words);
}

// Prefetches one array.
struct Ahead {
  const float* x;
  void ask(int64_t i) const { __builtin_prefetch(x + i); }
};

}  // namespace gc
