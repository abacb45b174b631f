// Positions of kept elements as bits, and what is done with them: scatter and gather.
#include "selection.hpp"

using namespace gc;

namespace {

constexpr int64_t FEW_TILES = 4;  // of positions that are worth a thread: each is looked up alone

// The first index in [0, count) whose at(index), which does not decrease, is `value` or more; or count.
template <class F>
int64_t first_from(int64_t count, int64_t value, F at) {
  int64_t low = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    if (at(low + half) < value) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

// Set the bits at(0) < at(1) < ... of n in the tiles [first, last), all others there not. Returns how many there are, or
// -1 if they do not increase or are not below n. A bit that is out of order may be found in no tiles, so the caller adds
// the numbers up.
template <class F>
int64_t set_bits_in(int64_t first, int64_t last, int64_t total, int64_t n, uint32_t* words, F at) {
  const int64_t end = std::min(last * LANES, words_of(n, 1));
  memset(words + first * LANES, 0, (end - first * LANES) * sizeof *words);
  const int64_t begin = first * TILE, stop = last * TILE < n ? last * TILE : n;
  const bool whole = n % TILE == 0 || last < tiles_of(n);
  const int64_t full = whole ? stop : n / TILE * TILE;  // where tiles end that have all their lanes
  const int64_t from = begin ? first_from(total, begin, at) : 0;
  int64_t before = begin - 1, j = from;
  for (; j < total; ++j) {
    const int64_t bit = at(j);
    if (bit <= before || bit >= n) return -1;
    if (bit >= stop) break;
    before = bit;
    if (bit < full) {
      const uint64_t place = (uint64_t)bit;  // whose divisions are shifts
      words[(place / TILE * LANES) + place % LANES] |= 1u << (place / LANES % LANES);
    } else {
      const int lanes = tile_lanes(full, n), i = (int)(bit - full);
      words[full / TILE * LANES + bit_word(i, lanes)] |= 1u << bit_shift(i, lanes);
    }
  }
  return j - from;
}

// rows[j], bit l = words[l], bit j.
inline void transpose_bits(const uint32_t* words, uint32_t* rows) {
#if defined(__AVX512F__)
  const __m512i a = _mm512_loadu_si512(words), b = _mm512_loadu_si512(words + 16);
  __m512i bit = _mm512_set1_epi32(1);
  GC_ROLLED for (int j = 0; j < 32; ++j) {
    rows[j] = _mm512_test_epi32_mask(a, bit) | (uint32_t)_mm512_test_epi32_mask(b, bit) << 16;
    bit = _mm512_slli_epi32(bit, 1);
  }
#else
  memcpy(rows, words, LANES * sizeof *rows);
  uint32_t mask = 0x0000ffffu;
  for (int j = 16; j; j >>= 1, mask ^= mask << j) {
    for (int k = 0; k < 32; k = ((k | j) + 1) & ~j) {
      const uint32_t swap = ((rows[k] >> j) ^ rows[k | j]) & mask;
      rows[k] ^= swap << j;
      rows[k | j] ^= swap;
    }
  }
#endif
}

// Write where the bits of a bitmap of n are set, if exactly `total` are; returns 1 if one is set from n on, 2 + 8 times
// their number if it is another.
int64_t find_bits(const uint32_t* words, int64_t n, int64_t total, int64_t* positions, int threads) {
  const int64_t tiles = tiles_of(n), full = n / TILE;
  const int parts = useful_threads(n, threads);
  std::unique_ptr<int64_t[]> sums(new int64_t[parts]);
  GC_ALIGNED uint32_t tail[TILE / 32] = {};  // the last, shorter tile: bit i in the order of bits
  if (full < tiles) {
    const int lanes = tile_lanes(full * TILE, n), rest = (int)(n - full * TILE);
    for (int i = 0; i < lanes * LANES; ++i) {
      const uint32_t bit = words[full * LANES + bit_word(i, lanes)] >> bit_shift(i, lanes) & 1;
      if (bit && i >= rest) return 1;
      tail[i / 32] |= bit << i % 32;
    }
  }
  const auto edge = [=](int p) { return full * p / parts; };
  each_part(parts, parts, [&](int p) {
    int64_t sum = 0;
    for (int64_t i = edge(p) * LANES; i < edge(p + 1) * LANES; i += 2) {
      uint64_t pair;
      memcpy(&pair, words + i, sizeof pair);
      sum += __builtin_popcountll(pair);
    }
    sums[p] = sum;
  });
  int64_t before = 0;
  for (int p = 0; p < parts; ++p) {
    const int64_t own = sums[p];
    sums[p] = before;
    before += own;
  }
  int64_t found = before;
  for (uint32_t word : tail) found += __builtin_popcount(word);
  if (found != total) return 2 + 8 * found;
  const auto write = [](const uint32_t* rows, int64_t start, int64_t* out) {
    for (int j = 0; j < 32; j += 2) {
      uint64_t pair = rows[j] | (uint64_t)rows[j + 1] << 32;
      for (; pair; pair &= pair - 1) *out++ = start + 32 * j + __builtin_ctzll(pair);
    }
    return out;
  };
  each_part(parts, parts, [&](int p) {
    int64_t* out = positions + sums[p];
    for (int64_t t = edge(p); t < edge(p + 1); ++t) {
      GC_ALIGNED uint32_t rows[32];
      transpose_bits(words + t * LANES, rows);
      out = write(rows, t * TILE, out);
    }
  });
  write(tail, full * TILE, positions + before);
  return 0;
}

// Add the low bits: positions[j] = (bit j - j) * 2^low + j + code j. Returns 1 if a code after the last is not zero.
template <int B>
int64_t add_low_bits(const uint32_t* words, int64_t total, int64_t* positions, int threads) {
  int64_t bad = 0;
  parallel(tiles_of(total), threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int count = (int)(total - t * TILE < TILE ? total - t * TILE : TILE);
      GC_ALIGNED uint32_t codes[TILE];
      unpack_tile<B>(words + t * B * LANES, count, [&](int i, uint32_t code) { codes[i] = code; });
      int64_t* part = positions + t * TILE;
      GC_SIMD for (int i = 0; i < count; ++i) {
        const int64_t j = t * TILE + i;
        part[i] = ((part[i] - j) << B) + j + codes[i];
      }
      for (int i = count; i < tile_lanes(t * TILE, total) * LANES; ++i) report(bad, codes[i] ? 1 : 0);
    }
  });
  return bad;
}

// Whether positions increase (else 3) and each segment has its own (else 4).
int64_t check_positions(const int64_t* positions, int64_t total, const Run* runs, int64_t count) {
  bool rising = true;
  for (int64_t start = 0; start + 1 < total; start += TILE) {
    const int64_t stop = start + TILE < total - 1 ? start + TILE : total - 1;
    int falls = 0;
#pragma omp simd reduction(| : falls)
    for (int64_t i = start; i < stop; ++i) falls |= positions[i + 1] <= positions[i];
    rising &= !falls;
  }
  if (!rising) return 3;
  const int64_t* own = positions;
  for (const Run* run = runs; run < runs + count; ++run) {
    if (run->keep == 0) continue;
    for (int64_t row = 0; row < run->rows; ++row, own += run->keep) {
      const int64_t start = run->start + row * run->length;
      if (own[0] < start || own[run->keep - 1] >= start + run->length) return 4;
    }
  }
  return 0;
}

}  // namespace

// Positions as a bitmap of n bits. Returns 1 if they do not increase or are not below n.
int64_t gc_pack_bitmap(const int64_t* positions, int64_t total, int64_t n, uint32_t* words, int threads) {
  int64_t bad = 0, all = 0;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    const int64_t set = set_bits_in(first, last, total, n, words, [=](int64_t j) { return positions[j]; });
    report(bad, set < 0);
#pragma omp atomic
    all += set;
  });
  return bad || all != total;
}
GC_CALLED(gc_pack_bitmap)

// Positions in the coding of Elias and Fano with `low` low bits. Returns as gc_pack_bitmap.
int64_t gc_pack_gaps(const int64_t* positions, int64_t total, int64_t n, int low, uint32_t* low_words,
                     uint32_t* high_words, int threads) {
  if (total && (positions[0] < 0 || positions[total - 1] >= n)) return 1;
  const int64_t bits = total + ((n - total) >> low), tiles = tiles_of(total);
  int64_t bad = 0, all = 0;
  // A thread's low and high bits come from nearly the same positions, which it reads once from memory.
  together(worth(tiles, FEW_TILES, threads), [&](const Team& team) {
    const auto edge = [&](int64_t number, int rank) { return number * rank / team.size; };
    const auto high = [=](int64_t j) { return ((positions[j] - j) >> low) + j; };
    with_bits(low, [&](auto b) {
      constexpr int B = decltype(b)::value;
      for (int64_t t = edge(tiles, team.rank); t < edge(tiles, team.rank + 1); ++t) {
        const int count = (int)(total - t * TILE < TILE ? total - t * TILE : TILE);
        const int64_t base = t * TILE, *part = positions + base;
        int falls = 0;  // which high bits do not show
#pragma omp simd reduction(| : falls)
        for (int i = t ? 0 : 1; i < count; ++i) falls |= part[i] <= part[i - 1];
        report(bad, falls);
        pack_tile<B>([=](int i) { return (uint32_t)(part[i] - base - i) & ((1u << B) - 1); }, count,
                     low_words + t * B * LANES);
      }
    });
    const int64_t first = edge(tiles_of(bits), team.rank), last = edge(tiles_of(bits), team.rank + 1);
    const int64_t set = first < last ? set_bits_in(first, last, total, bits, high_words, high) : 0;
    report(bad, set < 0);
#pragma omp atomic
    all += set;
  });
  return bad || all != total;
}
GC_CALLED(gc_pack_gaps)

// Positions from a bitmap of n bits. Returns 0, or 1: a bit is set from n on, 2 + 8 k: k bits are set, not `total`,
// 3: they do not increase, 4: a segment has not its own k.
int64_t gc_unpack_bitmap(const uint32_t* words, int64_t n, const int64_t* runs, int64_t count, int64_t total,
                         int64_t* positions, int threads) {
  const int64_t bad = find_bits(words, n, total, positions, threads);
  return bad ? bad : check_positions(positions, total, (const Run*)runs, count);
}
GC_CALLED(gc_unpack_bitmap)

// Positions from the coding of Elias and Fano. Returns as gc_unpack_bitmap, or 5: a low code after the last.
int64_t gc_unpack_gaps(const uint32_t* low_words, const uint32_t* high_words, int low, int64_t n, const int64_t* runs,
                       int64_t count, int64_t total, int64_t* positions, int threads) {
  int64_t bad = find_bits(high_words, total + ((n - total) >> low), total, positions, threads);
  if (bad) return bad;
  if (low) {
    with_bits(low, [&](auto b) { bad = add_low_bits<decltype(b)::value>(low_words, total, positions, threads); });
    if (bad) return 5;
  }
  return check_positions(positions, total, (const Run*)runs, count);
}
GC_CALLED(gc_unpack_gaps)

// Positions of 32 bits. Returns as gc_unpack_bitmap.
int64_t gc_unpack_int32(const int32_t* indices, const int64_t* runs, int64_t count, int64_t total, int64_t* positions,
                        int threads) {
  (void)threads;
  GC_SIMD for (int64_t i = 0; i < total; ++i) positions[i] = indices[i];
  return check_positions(positions, total, (const Run*)runs, count);
}
GC_CALLED(gc_unpack_int32)

// Zeros with values at increasing positions, n in all. Returns 1 if they do not increase or are not below n.
int64_t gc_scatter(const float* values, const int64_t* positions, int64_t total, float* out, int64_t n, int threads) {
  int64_t bad = 0, placed = 0;
  if (total && (positions[0] < 0 || positions[total - 1] >= n)) return 1;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    GC_ALIGNED float row[TILE] = {};
    const int64_t begin = first_from(total, first * TILE, [=](int64_t i) { return positions[i]; });
    int64_t j = begin;
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE, stop = start + TILE < n ? start + TILE : n, from = j;
      int64_t before = start - 1;
      for (; j < total && positions[j] < stop; ++j) {
        if (positions[j] <= before) return report(bad, 1);
        before = positions[j];
        row[before - start] = values[j];
      }
      write_tile(out + start, row, (int)(stop - start), n >= STREAM_FROM);
      for (int64_t i = from; i < j; ++i) row[positions[i] - start] = 0;
    }
#pragma omp atomic
    placed += j - begin;
  });
  return bad || placed != total;  // no thread has positions that are out of order
}
GC_CALLED(gc_scatter)

// The sum of `number` sparse tensors of n elements, in their order, divided by `divisor`: tensor p has totals[p] values
// at increasing positions. Returns as gc_scatter.
int64_t gc_scatter_mean(const float* const* values, const int64_t* const* positions, const int64_t* totals,
                        int64_t number, float divisor, float* out, int64_t n, int threads) {
  int64_t bad = 0, left = 0;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    GC_ALIGNED float row[TILE] = {};
    uint64_t touched[TILE / 64] = {};
    std::unique_ptr<int64_t[]> at(new int64_t[number]);
    int64_t placed = 0;
    for (int64_t p = 0; p < number; ++p) {
      const int64_t* own = positions[p];
      at[p] = first ? first_from(totals[p], first * TILE, [=](int64_t i) { return own[i]; }) : 0;
    }
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE, stop = start + TILE < n ? start + TILE : n;
      for (int64_t p = 0; p < number; ++p) {
        int64_t before = start - 1, j = at[p];
        for (; j < totals[p] && positions[p][j] < stop; ++j) {
          if (positions[p][j] <= before) return report(bad, 1);
          before = positions[p][j];
          const int i = (int)(before - start);
          row[i] += values[p][j];
          touched[i / 64] |= 1ull << i % 64;
        }
        placed += j - at[p];
        at[p] = j;
      }
      for (int k = 0; k < TILE / 64; ++k) {
        for (uint64_t mask = touched[k]; mask; mask &= mask - 1) row[64 * k + __builtin_ctzll(mask)] /= divisor;
      }
      write_tile(out + start, row, (int)(stop - start), n >= STREAM_FROM);
      for (int k = 0; k < TILE / 64; ++k) {
        for (; touched[k]; touched[k] &= touched[k] - 1) row[64 * k + __builtin_ctzll(touched[k])] = 0;
      }
    }
#pragma omp atomic
    left -= placed;
  });
  for (int64_t p = 0; p < number; ++p) left += totals[p];
  return bad || left;
}
GC_CALLED(gc_scatter_mean)

constexpr int64_t AHEAD = 64;  // positions from what is read to what is prefetched

// The elements of x, (n,), at `positions`. Returns 1 if one of these is not in [0, n).
int64_t gc_gather(const float* x, int64_t n, const int64_t* positions, int64_t total, float* out, int threads) {
  int64_t bad = 0;
  parallel<FEW_TILES>(tiles_of(total), threads, [&](int64_t first, int64_t last) {
    const int64_t stop = last * TILE < total ? last * TILE : total;
    for (int64_t j = first * TILE; j < stop; ++j) {
      if ((uint64_t)positions[j] >= (uint64_t)n) return report(bad, 1);
      // Each lies in a line of its own, mostly. Values that are not positions may be prefetched, too.
      if (j + AHEAD < stop) __builtin_prefetch((const void*)((uintptr_t)x + sizeof *x * (uintptr_t)positions[j + AHEAD]));
      out[j] = x[positions[j]];
    }
  });
  return bad;
}
GC_CALLED(gc_gather)
