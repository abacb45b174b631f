// Shared by selection.cpp and positions.cpp: the segments of a selection, what elements are ordered by, and where bits
// of a bitmap lie.
#pragma once
#include "teams.hpp"

namespace gc {

struct Run {  // gcbench.ops.selection.KeptRun
  int64_t start, rows, length, keep;
};

// Orders as |x|; NaN above infinity.
struct ByMagnitude {
  GC_HD static int32_t key(uint32_t raw) { return (int32_t)(raw & 0x7fffffffu); }
};

// Orders random words as unsigned integers.
struct ByWord {
  GC_HD static int32_t key(uint32_t raw) { return (int32_t)(raw ^ 0x80000000u); }
};

constexpr uint32_t WORD_KIND = 2;  // of Philox blocks whose words are taken whole: element e has word e % 4 of e / 4

// The lanes of the tile that begins at code `start` of n: fewer than 32 in a last, shorter one.
inline int tile_lanes(int64_t start, int64_t n) {
  return n - start >= TILE ? LANES : (int)((n - start + LANES - 1) / LANES);
}

// The word of bit `i` of a bitmap's tile with `lanes` lanes, and the place of the bit there.
inline int bit_word(int i, int lanes) { return i % lanes; }
inline int bit_shift(int i, int lanes) { return i / lanes; }

}  // namespace gc
