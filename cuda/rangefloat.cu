// Range floats on a GPU: see gcbench.ops.rangefloat.
//
// range_peaks:  the largest and the least value of each group; reads 4 bytes per value. A warp up to 8192 values of one
//               group, one atomic maximum each where a group has more: maxima of integers depend on no order.
// range_encode: the groups' grids, codes and their packing, one warp per tile of 1024; reads 4, writes bits / 8 bytes.
// range_unpack: reads bits / 8, writes 4 bytes per value; one flag says invalid input.
// For 1e8 values of 10 bits at 4.3 TB/s (estimated): 8 + 1.25 bytes, 0.215 ms to pack; 5.25 bytes,
// 0.122 ms to unpack.
#include "rangefloat.cuh"
#include "tiles.cuh"

using namespace gc;

namespace {

constexpr int PART = 8192;  // values of a group that a warp looks at
enum { BAD_GRID = 1, AFTER_LAST = 2, NOT_FINITE = 3 };

}  // namespace

// `table`, (2, m + 1): where groups begin, and how many parts lie before each. `peaks`, (m, 2), are zeros where a
// group has more than one part.
extern "C" __global__ void __launch_bounds__(256)
    range_peaks(const uint32_t* __restrict__ values, const int64_t* __restrict__ table, const int64_t m,
                uint32_t* peaks) {
  const int64_t* parts = table + m + 1;
  const int64_t part = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const int lane = (int)(threadIdx.x % LANES);
  if (part >= parts[m]) return;  // uniform in the warp
  const int64_t g = last_not_above(parts, m, part), start = table[g] + (part - parts[g]) * PART;
  const int64_t left = table[g + 1] - start;
  const int count = left < PART ? (int)left : PART;
  const uint32_t* own = values + start;
  int32_t up = 0, down = 0;  // as integers, floats of the other sign are below 0
#pragma unroll 1
  for (int begin = 0; begin < count; begin += 8 * LANES) {
    GC_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int i = begin + j * LANES + lane;
      const uint32_t raw = i < count ? own[i] : 0u;
      const int32_t here = (int32_t)raw, other = (int32_t)(raw ^ 0x80000000u);
      up = here > up ? here : up;
      down = other > down ? other : down;
    }
  }
  up = __reduce_max_sync(0xffffffffu, up);
  down = __reduce_max_sync(0xffffffffu, down);
  if (lane != 0) return;
  if (parts[g + 1] - parts[g] == 1) {
    peaks[2 * g] = (uint32_t)up;
    peaks[2 * g + 1] = (uint32_t)down;
  } else {
    atomicMax(peaks + 2 * g, (uint32_t)up);
    atomicMax(peaks + 2 * g + 1, (uint32_t)down);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    range_encode(const uint32_t* __restrict__ values, const int64_t n, const int64_t* __restrict__ offsets,
                 const int64_t m, const uint32_t* __restrict__ peaks, const int32_t bits, const int32_t mantissa,
                 int32_t* __restrict__ grids, uint32_t* __restrict__ out) {
  const WarpTile at(n);
  if (!at.active()) return;
  const RangeFormat form{bits, mantissa};
  Cursor cursor(offsets, m, at.start);
  RangeCoder coder;
  // The grid of the group that element i is in, which the lane provides that has the group's first element.
  const auto enter = [&](int i) {
    const int32_t own = form.grid(peaks[2 * cursor.at], peaks[2 * cursor.at + 1]);
    if (offsets[cursor.at] == at.start + i) grids[cursor.at] = own;
    coder = form.coder(form.base(own), form.positive(own));
  };
  cursor.move(at.lane);
  enter(at.lane);
  const uint32_t* part = values + at.start;
  BitWriter writer(out + at.words(bits), at.lanes, bits);
#pragma unroll 1
  for (int begin = 0; begin < 32; begin += 8) {
    uint32_t raw[8];
    GC_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int i = (begin + j) * at.lanes + at.lane;
      raw[j] = i < at.count ? part[i] : 0u;
    }
    GC_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int i = (begin + j) * at.lanes + at.lane;
      uint32_t code = 0;
      if (i < at.count) {
        if (cursor.move(i)) enter(i);
        code = form.encode(raw[j], coder);
      }
      writer.put(code);
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    range_unpack(const uint32_t* __restrict__ words, const int32_t* __restrict__ grids, const int64_t n,
                 const int64_t* __restrict__ offsets, const int64_t m, const int32_t bits, const int32_t mantissa,
                 uint32_t* __restrict__ out, int32_t* bad) {
  const WarpTile at(n);
  if (!at.active()) return;
  const RangeFormat form{bits, mantissa};
  Cursor cursor(offsets, m, at.start);
  int32_t base, positive;
  bool wrong = false, infinite = false;
  const auto enter = [&] {  // each group has a first element, so each grid is looked at
    const int32_t own = grids[cursor.at];
    wrong |= !form.valid(own);
    base = form.base(own);
    positive = form.positive(own);
  };
  cursor.move(at.lane);
  enter();
  uint32_t* part = out + at.start;
  uint32_t after = 0;
  BitReader reader(words + at.words(bits), at.lanes, bits);
  GC_UNROLL
  for (int j = 0; j < 32; ++j) {
    const int i = j * at.lanes + at.lane;
    const uint32_t code = reader.get();
    if (i < at.count) {
      if (cursor.move(i)) enter();
      const uint32_t value = form.decode(code, base, positive);
      infinite |= (value & 0x7fffffffu) >= 0x7f800000u;
      part[i] = value;
    } else {
      after |= code;
    }
  }
  if (wrong) {
    atomicMin(bad, (int32_t)BAD_GRID);
  } else if (after) {
    atomicMin(bad, (int32_t)AFTER_LAST);
  } else if (infinite) {
    atomicMin(bad, (int32_t)NOT_FINITE);
  }
}
