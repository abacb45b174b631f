// Selection of the largest: what elements are ordered by, and where bits of a bitmap lie.
#pragma once
#include "common.cuh"

namespace gc {

// Orders as |x|; NaN above infinity.
struct ByMagnitude {
  static constexpr uint32_t TOP = 0x7fffffffu;  // the largest rank
  GC_HD static int32_t key(uint32_t raw) { return (int32_t)(raw & 0x7fffffffu); }
  GC_HD static uint32_t rank(uint32_t raw) { return raw & 0x7fffffffu; }  // the same order, unsigned
};

// Orders random words as unsigned integers.
struct ByWord {
  static constexpr uint32_t TOP = 0xffffffffu;
  GC_HD static int32_t key(uint32_t raw) { return (int32_t)(raw ^ 0x80000000u); }
  GC_HD static uint32_t rank(uint32_t raw) { return raw; }
};

constexpr uint32_t WORD_KIND = 2;  // of Philox blocks whose words are taken whole: element e has word e % 4 of e / 4

// The lanes of the tile that begins at code `start` of n: fewer than 32 in a last, shorter one.
GC_HD int tile_lanes(int64_t start, int64_t n) {
  return n - start >= TILE ? LANES : (int)((n - start + LANES - 1) / LANES);
}

// The word of bit `i` of a bitmap's tile with `lanes` lanes, and the place of the bit there.
GC_HD int bit_word(int i, int lanes) { return i % lanes; }
GC_HD int bit_shift(int i, int lanes) { return i / lanes; }

// Code j of n codes of `bits` bits.
GC_HD uint32_t code_at(const uint32_t* words, int64_t j, int64_t n, int bits) {
  const int64_t tile = j / TILE;
  const int lanes = tile_lanes(tile * TILE, n), i = (int)(j % TILE), bit = i / lanes * bits, shift = bit % 32;
  const uint32_t* word = words + tile * LANES * bits + bit / 32 * lanes + i % lanes;
  uint64_t pair = *word;
  if (shift + bits > 32) pair |= (uint64_t)word[lanes] << 32;
  return (uint32_t)(pair >> shift) & ((1u << bits) - 1);
}

}  // namespace gc
