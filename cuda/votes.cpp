// Votes on the CPU, of packed signs: the packed words alone are read and written.
#include <algorithm>

#include "signs.hpp"

using namespace gc;

namespace {

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
  const auto vote = [=](auto get) {
    VecU planes[P] = {};
    for (int64_t p = 0; p < number; ++p) {
      VecU carry = get(p);
      GC_UNROLL
      for (int k = 0; k < P; ++k) {
        const VecU next = planes[k] & carry;
        planes[k] ^= carry;
        carry = next;
      }
    }
    return at_least(planes, P, least);
  };
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    const VecU won = vote([=](int64_t p) { return load_vector<VecU>(ballots[p] + i); });
    memcpy(out + i, &won, sizeof won);
  }
  if (i < count) {
    const size_t rest = (count - i) * sizeof(uint32_t);
    const VecU won = vote([=](int64_t p) {
      VecU w{};
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

// Packed words of the vote over `number` ballots worth `workers` votes in all. In 1 bit: the majority, +1 in a tie,
// or a fair coin of the key (`toss`). In 2 bits: the majority's sign if it won by `quorum`, at most `workers`, votes.
// Returns a `Wrong`.
int64_t gc_sign_vote(const uint32_t* const* words, const int64_t* counts, const int32_t* bits, int64_t number,
                     int64_t workers, int64_t n, int width, int64_t quorum, int toss, const Key& key, uint32_t* out,
                     int threads) {
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
  int64_t wrong = NOTHING;
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
    report(wrong, both ? CODE_3 : NOTHING);
  });
  return wrong;
}
GC_CALLED(gc_sign_vote)
