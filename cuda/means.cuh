// What the means of payloads share whose codes need a value of their segment, or two. Included by *.cu only.
#pragma once
#include "levels.cuh"
#include "tiles.cuh"

namespace gc {

// Payloads of one launch: codes, what they stand for in each segment, and the number of workers of which it is the mean.
struct SegmentSummands {
  const void* parts[MOST_SUMMANDS];
  const float* high[MOST_SUMMANDS];
  const float* low[MOST_SUMMANDS];  // null where one value per segment is all
  float counts[MOST_SUMMANDS];
  int32_t number;
};

// A whole number below 2^23, less `below`: faster than a conversion.
__device__ __forceinline__ float small_number(uint32_t number, float below) {
  return float_of(0x4b000000u | number) - (0x1p23f + below);
}

// Checks segments of a mean of levels: sets `bad` to 2 if the largest magnitude of the codes does not match the norm.
struct LevelCheck {
  float top;
  bool zeros;                     // whether a value of 0 allows no other code than 0
  int64_t m;
  uint8_t* __restrict__ reached;  // null, or (payloads, m): where segments are marked that have the highest level
  int32_t* __restrict__ bad;

  __device__ __forceinline__ void tell(int p, int64_t segment, float value, float most) const {
    if (most > (zeros && !(value > 0) ? 0.0f : top)) atomicMin(bad, 2);
    if (reached && most == top) reached[p * m + segment] = 1;
  }
};

// The sum over payloads of (code / top) * value of the segment, each times its count, divided, for the elements of one
// tile. `codes.group(p, row, into)` loads those of eight rows of payload p in a whole tile, `codes.one(p, j, i)` that of
// row j, element i. `before`: null, or the sum of the payloads before, which may be `out`.
//
// A group of 256 elements that no more than two segments share has its loads under way before the first is used.
template <class Codes>
__device__ __forceinline__ void level_mean_tile(const Codes& codes, const SegmentSummands& in,
                                                const int64_t* __restrict__ offsets, const LevelCheck& judge,
                                                const WarpTile& at, const float* before, float divisor, float* out) {
  if (!at.active()) return;
  const float top = judge.top, reciprocal = 1.0f / top;
  Cursor cursor(offsets, judge.m, at.start);
  const auto walk = [&](int from, int to) {
#pragma unroll 1
    for (int j = from; j < to; ++j) {
      const int i = j * at.lanes + at.lane;
      if (i >= at.count) break;
      cursor.move(i);
      float sum = before ? before[at.start + i] : -0.0f;  // the neutral element
#pragma unroll 1
      for (int p = 0; p < in.number; ++p) {
        const float code = codes.one(p, j, i), value = in.high[p][cursor.at];
        judge.tell(p, cursor.at, value, magnitude(code));
        sum += level_ratio(code, top, reciprocal) * value * in.counts[p];
      }
      out[at.start + i] = sum / divisor;
    }
  };
  if (!at.whole()) {
    walk(0, 32);
    return;
  }
#pragma unroll 1
  for (int row = 0; row < 32; row += GROUP) {
    const int begin = row * LANES, end = begin + SPAN;
    cursor.move(begin);
    Cursor next = cursor;
    if (next.end < end) next.move(next.end);
    if (next.end < end) {
      walk(row, row + GROUP);
      continue;
    }
    const int64_t first = at.start + begin + at.lane;
    const int split = cursor.end - begin - at.lane;  // where the second segment begins, counted from this lane
    float sums[GROUP];
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) sums[j] = before ? before[first + j * LANES] : -0.0f;
#pragma unroll 1
    for (int p = 0; p < in.number; ++p) {
      float part[GROUP];
      codes.group(p, row, part);
      const float own = in.high[p][cursor.at], other = in.high[p][next.at], times = in.counts[p];
      float most = 0.0f, behind = 0.0f;
      GC_UNROLL
      for (int j = 0; j < GROUP; ++j) {
        const bool within = j * LANES < split;
        const float size = magnitude(part[j]);
        most = within && size > most ? size : most;
        behind = !within && size > behind ? size : behind;
        sums[j] += level_ratio(part[j], top, reciprocal) * (within ? own : other) * times;
      }
      judge.tell(p, cursor.at, own, most);
      if (next.at != cursor.at) judge.tell(p, next.at, other, behind);
    }
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) out[first + j * LANES] = sums[j] / divisor;
    cursor = next;
  }
}

}  // namespace gc
