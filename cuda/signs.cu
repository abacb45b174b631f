// Signs on a GPU: packing, values, votes, and 1-bit codes with the means of their classes.
//
// Bytes per element, and what they take at 4.3 TB/s for 1e8 elements (estimated):
//   packing       [x >= 0] or sign + 1: reads 4, writes 1/8 or 1/4                                  0.096 ms
//   decoding      the reverse; onto a total 4 more; the check that no class is empty reads 1/8 more  0.099 ms
//   mean of 8     the sum of values over payloads, each times its count, divided: reads 1/8 each,
//                 writes 4                                                                           0.116 ms
//   vote of 8     majority in the packed domain: reads 1/8 a ballot, writes 1/8                     0.026 ms
//   encoding      bits and means (sums in float64 by halving, as statistics.cpp says): reads 4,
//                 writes 1/4 (the words twice: zeros, then bits)                                     0.099 ms
//   with feedback V = x + residual, bits and means of V, residual = V - V^: reads 8, writes 4 1/4    0.285 ms
//                 where segments are short, and reads 8 more where they are not                      0.471 ms
//
// Encoding: a warp has at most 1024 elements of one segment in registers, lane k those with an index k modulo 32, so
// that its bits lie in one word, or in two. The warps of a segment of up to 8192 elements are in one block: their
// sums are added in shared memory, and nothing is read twice. Longer ones take three launches: sums and bits, means,
// what is lost. A plan, made once for all steps, says which warp has what, so the number of launches is constant.
#include "means.cuh"
#include "sign.cuh"

using namespace gc;

namespace {

constexpr uint32_t ALL = 0xffffffffu;
constexpr int WARPS = 8;        // of a block, and so the tiles of a short segment
constexpr int MEAN_WARPS = 16;  // of a block that sums the tiles of a long one
constexpr int MOST = 64;        // ballots of one launch

// The faults of a payload, by the numbers of `gcbench.ops.sign.WRONG`; of several the least is reported.
enum Wrong : int32_t { AFTER_LAST = 1, CODE_3, NOT_FINITE, WRONG_SIDE, OF_NOTHING };

// The last of `count` entries of `edges` that is at most `value`, by a warp: 32 places at once.
__device__ __forceinline__ int64_t warp_last_not_above(const int64_t* __restrict__ edges, int64_t count,
                                                       int64_t value, int lane) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t step = (high - low + LANES - 1) / LANES, place = low + lane * step;
    const uint32_t below = __ballot_sync(ALL, place < high && edges[place] <= value);
    low += (31 - __clz((int)below)) * step;
    high = high - low < step ? high : low + step;
  }
  return low;
}

// How many rows of a lane of a tile hold codes.
__device__ __forceinline__ int rows_of(const WarpTile& at) {
  return at.whole() ? 32 : (at.count - at.lane + at.lanes - 1) / at.lanes;
}

// The bits of `word` that belong to the row `rows` or to one after it.
__device__ __forceinline__ uint32_t beyond(uint32_t word, int rows) { return rows < 32 ? word >> rows : 0u; }

// ---- packing ---------------------------------------------------------------------------------------------------

// Pack code(i, part[i]), B bits each, of this lane of a tile.
template <int B, class Code>
__device__ __forceinline__ void pack_lane(const float* __restrict__ part, const WarpTile& at,
                                          uint32_t* __restrict__ out, Code code) {
  constexpr int ROWS = 32 / B;
  uint32_t* words = out + at.words(B);
  if (at.whole()) {
    float values[32];
    GC_UNROLL
    for (int j = 0; j < 32; ++j) values[j] = part[j * LANES + at.lane];
    GC_UNROLL
    for (int k = 0; k < B; ++k) {
      uint32_t word = 0;
      GC_UNROLL
      for (int j = 0; j < ROWS; ++j) {
        word |= code((ROWS * k + j) * LANES + at.lane, values[ROWS * k + j]) << (j * B);
      }
      words[k * LANES] = word;
    }
  } else {
#pragma unroll 1
    for (int k = 0; k < B; ++k) {
      uint32_t word = 0;
#pragma unroll 1
      for (int j = 0; j < ROWS; ++j) {
        const int i = (ROWS * k + j) * at.lanes + at.lane;
        if (i < at.count) word |= code(i, part[i]) << (j * B);
      }
      words[k * at.lanes] = word;
    }
  }
}

// ---- encoding --------------------------------------------------------------------------------------------------

// The error of reconstructing x from the values of the two classes.
__device__ __forceinline__ float lost(float x, float below, float above) { return x - (x >= 0.0f ? above : below); }

// At most 1024 elements of one segment, from `start` on: row j of this lane is element start + first + 32 j, whose
// index is `lane` modulo 32.
struct Part {
  int64_t start;
  int count, lane, first, rows;
  uint32_t mask;  // of the rows that there are

  __device__ __forceinline__ Part(int64_t at, int64_t stop) : start(at) {
    count = stop - at < TILE ? (int)(stop - at) : TILE;
    lane = (int)(threadIdx.x % LANES);
    first = (lane - (int)(at % LANES)) & 31;
    rows = (count - first + LANES - 1) / LANES;
    mask = rows < 32 ? (1u << rows) - 1u : ALL;
  }

  __device__ __forceinline__ bool has(int j) const { return j < rows; }
  __device__ __forceinline__ int64_t element(int j) const { return start + first + j * LANES; }

  // x, or x + residual, zeros where there is no element.
  __device__ __forceinline__ void load(const float* x, const float* residual, float (&values)[32]) const {
    GC_UNROLL
    for (int j = 0; j < 32; ++j) values[j] = has(j) ? x[element(j)] : 0.0f;
    if (!residual) return;
    GC_UNROLL
    for (int j = 0; j < 32; ++j) values[j] += has(j) ? residual[element(j)] : 0.0f;
  }

  // [value >= 0] of this lane's elements, row j as bit j.
  __device__ __forceinline__ uint32_t signs(const float (&values)[32]) const {
    uint32_t bits = 0;
    GC_UNROLL
    for (int j = 0; j < 32; ++j) bits |= sign_bit(values[j]) << j;
    return bits & mask;
  }

  // Set them in `words`, which hold zeros.
  __device__ __forceinline__ void put(uint32_t bits, uint32_t* words, int64_t n) const {
    const int64_t full = n - n % TILE;
    if (start + count > full) {  // the last, short tile has its own number of lanes
      const int lanes = ((int)(n - full) + LANES - 1) / LANES;
      for (uint32_t left = bits; left; left &= left - 1) {
        const int j = __ffs((int)left) - 1;
        if (element(j) < full) continue;
        const int i = (int)(element(j) - full);
        atomicOr(words + full / LANES + i % lanes, 1u << (i / lanes));
        bits &= ~(1u << j);
      }
    }
    const int64_t row = element(0) / LANES;
    const int shift = (int)(row % 32);
    uint32_t* word = words + row / 32 * LANES + lane;
    if (shift == 0 && count == TILE) {
      *word = bits;
      return;
    }
    const uint32_t here = bits << shift, next = shift ? bits >> (32 - shift) : 0u;
    if (here) atomicOr(word, here);
    if (next) atomicOr(word + LANES, next);
  }

  __device__ __forceinline__ void put_lost(const float (&values)[32], float below, float above, float* left) const {
    GC_UNROLL
    for (int j = 0; j < 32; ++j) {
      if (has(j)) left[element(j)] = lost(values[j], below, above);
    }
  }
};

// Two sums at once, so that no more than a few terms are held as float64.
struct Pair {
  double low, high;
  __device__ __forceinline__ Pair operator+(const Pair& other) const { return {low + other.low, high + other.high}; }
};

// load(J) + load(J + STEP) + load(J + 2 STEP) + ... below N by halving: j is added to by j + N / 2, then N / 4, ...
template <int J, int STEP, int N, class Load>
__device__ __forceinline__ auto rows_sum(Load load) {
  if constexpr (STEP == N) {
    return load(J);
  } else {
    return rows_sum<J, 2 * STEP, N>(load) + rows_sum<J + STEP, 2 * STEP, N>(load);
  }
}

// Sum the lanes' values by halving, where the lane `turn` is the first; all lanes have the result.
__device__ __forceinline__ double lanes_sum(double sum, int lane, int turn) {
  const int first = (lane - turn) & 31;
  GC_UNROLL
  for (int half = 16; half >= 1; half /= 2) sum += __shfl_sync(ALL, sum, ((first ^ half) + turn) & 31);
  return sum;
}

// What is summed: the negative and the positive elements and, exactly, the number of bits 1; or all magnitudes.
template <bool CLASSES>
struct Sums {
  static constexpr int NUMBER = CLASSES ? 3 : 1;
  double total[NUMBER];

  __device__ __forceinline__ void of(const float (&values)[32], uint32_t bits, const Part& part) {
    const int turn = (int)(part.start % LANES);
    if constexpr (CLASSES) {
      const Pair rows = rows_sum<0, 1, 32>([&](int j) {
        const double value = values[j];
        return Pair{below_zero(value), above_zero(value)};
      });
      total[0] = lanes_sum(rows.low, part.lane, turn);
      total[1] = lanes_sum(rows.high, part.lane, turn);
      total[2] = (double)__reduce_add_sync(ALL, (uint32_t)__popc(bits));
    } else {
      total[0] = rows_sum<0, 1, 32>([&](int j) { return (double)magnitude(values[j]); });
      total[0] = lanes_sum(total[0], part.lane, turn);
    }
  }

  __device__ __forceinline__ float above(int64_t length) const {
    return class_mean(total[CLASSES ? 1 : 0], CLASSES ? total[NUMBER - 1] : (double)length);
  }
  __device__ __forceinline__ float below(int64_t length) const {
    return CLASSES ? class_mean(total[0], (double)length - total[NUMBER - 1]) : -above(length);
  }
};

template <bool CLASSES>
__device__ __forceinline__ void put_means(int64_t s, float below, float above, float* low, float* high,
                                          int32_t* bad) {
  if (CLASSES) low[s] = below;
  high[s] = above;
  if (!is_finite(below) || !is_finite(above)) atomicMin(bad, (int32_t)NOT_FINITE);
}

// `plan`: 8 s + t for each warp, the t-th tile of segment s; a warp without one has minus the tiles of its
// neighbours' segments, which are as many in all of a block.
template <bool CLASSES>
__device__ __forceinline__ void encode_short(const float* x, const float* residual,
                                             const int64_t* __restrict__ offsets, const int64_t* __restrict__ plan,
                                             int64_t n, uint32_t* words, float* low, float* high, float* left,
                                             int32_t* bad) {
  constexpr int NUMBER = Sums<CLASSES>::NUMBER;
  __shared__ double shared[NUMBER][WARPS];
  const int warp = threadIdx.x / LANES;
  const int64_t entry = plan[(int64_t)blockIdx.x * WARPS + warp], s = entry < 0 ? 0 : entry / WARPS;
  const int t = entry < 0 ? 0 : (int)(entry % WARPS);
  const int64_t begin = offsets[s], length = offsets[s + 1] - begin;
  const int tiles = entry < 0 ? (int)-entry : (int)((length + TILE - 1) / TILE);
  const Part part(begin + t * TILE, entry < 0 ? begin : begin + length);
  float values[32];
  part.load(x, residual, values);
  const uint32_t bits = part.signs(values);
  if (entry >= 0) part.put(bits, words, n);
  Sums<CLASSES> sums;
  sums.of(values, bits, part);
  if (tiles > 1) {
    GC_UNROLL
    for (int k = 0; k < NUMBER; ++k) {
      if (part.lane == 0) shared[k][warp] = sums.total[k];
    }
    __syncthreads();
    GC_UNROLL
    for (int k = 0; k < NUMBER; ++k) {
      const double* parts = shared[k] + (entry < 0 ? 0 : warp - t);
      sums.total[k] = rows_sum<0, 1, WARPS>([&](int j) { return j < tiles ? parts[j] : 0.0; });
    }
  }
  if (entry < 0) return;
  const float above = sums.above(length), below = sums.below(length);
  if (t == 0 && part.lane == 0) put_means<CLASSES>(s, below, above, low, high, bad);
  if (left) part.put_lost(values, below, above, left);
}

// `tiles`, (2, number): the segment of each tile of the long ones, and its first element. `sums`: (NUMBER, stride).
template <bool CLASSES>
__device__ __forceinline__ void sum_long(const float* x, const float* residual, const int64_t* __restrict__ offsets,
                                         const int64_t* __restrict__ tiles, int64_t number, int64_t n,
                                         uint32_t* words, double* __restrict__ sums, int64_t stride) {
  const int64_t tile = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  if (tile >= number) return;  // uniform in the warp
  const Part part(tiles[number + tile], offsets[tiles[tile] + 1]);
  float values[32];
  part.load(x, residual, values);
  const uint32_t bits = part.signs(values);
  part.put(bits, words, n);
  Sums<CLASSES> got;
  got.of(values, bits, part);
  GC_UNROLL
  for (int k = 0; k < Sums<CLASSES>::NUMBER; ++k) {
    if (part.lane == k) sums[k * stride + tile] = got.total[k];
  }
}

// One block per long segment: `segments`, (2, longs), has the segment's index and the number of its first tile. The sums of
// its tiles are added by halving until one is left; they are the first `number` entries of each row of `sums`, and the
// others are scratch.
template <bool CLASSES>
__device__ __forceinline__ void mean_long(const int64_t* __restrict__ offsets, const int64_t* __restrict__ segments,
                                          double* sums, int64_t number, int64_t stride, float* low, float* high,
                                          int32_t* bad) {
  constexpr int NUMBER = Sums<CLASSES>::NUMBER;
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const int64_t s = segments[blockIdx.x], first = segments[gridDim.x + blockIdx.x];
  const int64_t length = offsets[s + 1] - offsets[s];
  double *values = sums + first, *other = sums + number + first;
  for (int64_t left = (length + TILE - 1) / TILE; left > 1;) {
    const int64_t rows = (left + TILE - 1) / TILE;
    for (int64_t r = warp; r < NUMBER * rows; r += MEAN_WARPS) {
      const int64_t k = r / rows, row = r % rows;
      const double* from = values + k * stride + row * TILE;
      const int64_t count = left - row * TILE;
      const double sum = rows_sum<0, 1, 32>([&](int j) {
        const int i = j * LANES + lane;
        return i < count ? from[i] : 0.0;
      });
      const double all = lanes_sum(sum, lane, 0);
      if (lane == 0) other[k * stride + row] = all;
    }
    __syncthreads();
    double* swap = values;
    values = other;
    other = swap;
    left = rows;
  }
  if (threadIdx.x != 0) return;
  Sums<CLASSES> got;
  GC_UNROLL
  for (int k = 0; k < NUMBER; ++k) got.total[k] = values[k * stride];
  put_means<CLASSES>(s, got.below(length), got.above(length), low, high, bad);
}

// ---- decoding --------------------------------------------------------------------------------------------------

// Set in `found`, (m,), which bits the segments of a warp's tile have, s being the first of them.
__device__ __forceinline__ void mark_classes(const uint32_t* __restrict__ words, const WarpTile& at,
                                             const int64_t* __restrict__ offsets, int64_t m, int64_t s,
                                             int32_t* found) {
  const uint32_t word = at.active() ? words[at.words(1)] : 0u;
  const auto before = [&](int i) {  // rows of this lane before element i of the tile
    const int rows = i / at.lanes + (at.lane < i % at.lanes);
    return !at.active() ? 0u : rows < 32 ? (1u << rows) - 1u : ALL;
  };
  uint32_t done = 0;
  for (; s < m; ++s) {
    const int64_t stop = offsets[s + 1] - at.start;
    const uint32_t upto = before(stop < at.count ? (int)stop : at.count), mask = upto & ~done;
    done = upto;
    const bool zeros = __any_sync(ALL, (~word & mask) != 0u), ones = __any_sync(ALL, (word & mask) != 0u);
    const int32_t has = (zeros ? 1 : 0) | (ones ? 2 : 0);
    if (at.lane == 0 && has) {
      const volatile int32_t* known = found + s;  // most warps of a long segment find it said
      if (has & ~*known) atomicOr(found + s, has);
    }
    if (stop >= at.count) return;
  }
}

// What the bits of payload p stand for in segment s, times its count.
struct Values {
  float below, above;

  __device__ __forceinline__ Values(const SegmentSummands& in, int p, int64_t s) {
    above = in.high[p][s] * in.counts[p];
    below = in.low[p] ? in.low[p][s] * in.counts[p] : -above;
  }
};

// The mean of ROWS rows of a whole tile, from `row` on, all in segment s.
template <int ROWS>
__device__ __forceinline__ void mean_rows(const SegmentSummands& in, const WarpTile& at, int row, int64_t s,
                                          const float* before, float divisor, float* out) {
  const int64_t first = at.start + row * LANES + at.lane;
  float sums[ROWS];
  GC_UNROLL
  for (int j = 0; j < ROWS; ++j) sums[j] = before ? before[first + j * LANES] : -0.0f;  // the neutral element
#pragma unroll 1
  for (int p = 0; p < in.number; ++p) {
    const uint32_t word = ((const uint32_t*)in.parts[p])[at.words(1)] >> row;
    const Values values(in, p, s);
    GC_UNROLL
    for (int j = 0; j < ROWS; ++j) sums[j] += word >> j & 1u ? values.above : values.below;
  }
  GC_UNROLL
  for (int j = 0; j < ROWS; ++j) out[first + j * LANES] = sums[j] / divisor;
}

// ---- votes -----------------------------------------------------------------------------------------------------

// The ballots of one launch: words of each, how many votes it is worth, and the bits of a code.
struct Ballots {
  const uint32_t* words[MOST];
  int32_t counts[MOST];
  int32_t bits[MOST];
  int32_t number;
};

// [count >= least] for a count in bit planes: the comparison of numbers, from their lowest bit on.
template <int P>
__device__ __forceinline__ uint32_t at_least(const uint32_t (&planes)[P], uint32_t least) {
  uint32_t result = ALL;
  GC_UNROLL
  for (int k = 0; k < P; ++k) result = (least >> k) & 1u ? planes[k] & result : planes[k] | result;
  return result;
}

// [number of set bits >= least] among fewer than 2^P ballots of one bit, for word i.
template <int P>
__device__ __forceinline__ uint32_t majority(const Ballots& in, int64_t i, uint32_t least) {
  uint32_t planes[P] = {};
#pragma unroll 8
  for (int p = 0; p < in.number; ++p) {
    uint32_t carry = in.words[p][i];
    GC_UNROLL
    for (int k = 0; k < P; ++k) {
      const uint32_t next = planes[k] & carry;
      planes[k] ^= carry;
      carry = next;
    }
  }
  return at_least(planes, least);
}

// Add `word` times `weight` to a count in bit planes that stays below 2^used.
template <int P>
__device__ __forceinline__ void add_votes(uint32_t (&planes)[P], int used, uint32_t word, uint32_t weight) {
  uint32_t carry = 0;
  GC_UNROLL
  for (int k = 0; k < P; ++k) {
    if (k < used) {
      const uint32_t a = planes[k], b = (weight >> k) & 1u ? word : 0u;
      planes[k] = a ^ b ^ carry;
      carry = (a & b) | (carry & (a ^ b));
    }
  }
}

}  // namespace

// Codes of x, (n,): [x >= 0] in 1 bit.
extern "C" __global__ void __launch_bounds__(256)
    sign_pack_1(const float* __restrict__ x, const int64_t n, uint32_t* __restrict__ out) {
  const WarpTile at(n);
  if (at.active()) pack_lane<1>(x + at.start, at, out, [](int, float value) { return sign_bit(value); });
}

// sign + 1 in 2 bits.
extern "C" __global__ void __launch_bounds__(256)
    sign_pack_2(const float* __restrict__ x, const int64_t n, uint32_t* __restrict__ out) {
  const WarpTile at(n);
  if (at.active()) pack_lane<2>(x + at.start, at, out, [](int, float value) { return sign_code(value); });
}

// What is sign 0: below `factor` times the root mean square; `square`, (m,), are sums of squares.
extern "C" __global__ void __launch_bounds__(256)
    sign_limits(const int64_t* __restrict__ offsets, const int64_t m, const double* __restrict__ square,
                const double factor, float* __restrict__ limit) {
  const int64_t s = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (s < m) limit[s] = (float)(factor * sqrt(square[s] / (double)(offsets[s + 1] - offsets[s])));
}

// Codes of 2 bits, sign 0 below the limit, (m,).
extern "C" __global__ void __launch_bounds__(256, 4)
    sign_pack_above(const float* __restrict__ x, const int64_t n, const int64_t* __restrict__ offsets,
                    const int64_t m, const float* __restrict__ limit, uint32_t* __restrict__ out) {
  const WarpTile at(n);
  if (at.count <= 0) return;
  const int64_t s = warp_last_not_above(offsets, m, at.start, (int)(threadIdx.x % LANES));
  if (!at.active()) return;
  Cursor cursor(offsets + s, 1, at.start);
  float least = limit[s];
  pack_lane<2>(x + at.start, at, out, [&](int i, float value) {
    if (cursor.move(i)) least = limit[s + cursor.at];
    return sign_code_above(value, least);
  });
}

// Signs as floats, (n,), from codes of 1 or 2 bits.
extern "C" __global__ void __launch_bounds__(256)
    sign_decode(const uint32_t* __restrict__ words, const int64_t n, const int32_t bits, float* __restrict__ out,
                int32_t* bad) {
  const WarpTile at(n);
  if (!at.active()) return;
  const int rows = rows_of(at);
  const uint32_t* word = words + at.words(bits);
  float* part = out + at.start + at.lane;
  if (bits == 1) {
    const uint32_t minus = ~word[0];
    if (beyond(~minus, rows)) atomicMin(bad, (int32_t)AFTER_LAST);
    GC_UNROLL
    for (int j = 0; j < 32; ++j) {
      if (j < rows) part[j * at.lanes] = float_of((minus << (31 - j) & 0x80000000u) | 0x3f800000u);
    }
    return;
  }
  const uint32_t pair[2] = {word[0], word[at.lanes]};
  GC_UNROLL
  for (int k = 0; k < 2; ++k) {
    const int used = rows - 16 * k;
    if (used < 16 && pair[k] >> (used < 0 ? 0 : 2 * used)) atomicMin(bad, (int32_t)AFTER_LAST);
    if (pair[k] & (pair[k] >> 1) & 0x55555555u) atomicMin(bad, (int32_t)CODE_3);
    GC_UNROLL
    for (int j = 0; j < 16; ++j) {
      if (j < used) part[(16 * k + j) * at.lanes] = (float)((int32_t)(pair[k] >> (2 * j) & 3u) - 1);
    }
  }
}

// Which bits segments have: 1 in `found`, (m,), for a bit 0 and 2 for a bit 1.
extern "C" __global__ void __launch_bounds__(256)
    sign_classes(const uint32_t* __restrict__ words, const int64_t n, const int64_t* __restrict__ offsets,
                 const int64_t m, int32_t* found) {
  const WarpTile at(n);
  if (at.count <= 0) return;
  const int lane = (int)(threadIdx.x % LANES);
  mark_classes(words, at, offsets, m, warp_last_not_above(offsets, m, at.start, lane), found);
}

// Whether the values of payloads may stand for their bits; `found`, (payloads, m), is for those that have two.
extern "C" __global__ void __launch_bounds__(256)
    sign_check(const SegmentSummands in, const int64_t n, const int64_t* __restrict__ offsets, const int64_t m,
               const int32_t* __restrict__ found, int32_t* bad) {
  const int64_t s = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int rest = (int)(n % TILE), lanes = (rest + LANES - 1) / LANES;
#pragma unroll 1
  for (int p = 0; p < in.number; ++p) {
    const uint32_t* words = (const uint32_t*)in.parts[p];
    if (s < lanes && beyond(words[n / TILE * LANES + s], (rest - (int)s + lanes - 1) / lanes)) {
      atomicMin(bad, (int32_t)AFTER_LAST);
    }
    if (s >= m) continue;
    const float* low = in.low[p];
    const float below = low ? low[s] : 0.0f, above = in.high[p][s];
    if (!is_finite(below) || !is_finite(above)) atomicMin(bad, (int32_t)NOT_FINITE);
    if (below > 0.0f || above < 0.0f) atomicMin(bad, (int32_t)WRONG_SIDE);
    const int32_t has = low ? found[p * m + s] : offsets[s] < offsets[s + 1] ? 3 : 0;
    if ((below != 0.0f && !(has & 1)) || (above != 0.0f && !(has & 2))) atomicMin(bad, (int32_t)OF_NOTHING);
  }
}

// Bits, and two values per segment (`low` null: `high` and its negative), to floats, (n,), written to `out`, which may
// be `total`; with `total` the sum of it and of `times` times the values. Nothing is written where a check failed.
extern "C" __global__ void __launch_bounds__(256, 4)
    sign_values(const uint32_t* __restrict__ words, const int64_t n, const int64_t* __restrict__ offsets,
                const int64_t m, const float* __restrict__ low, const float* __restrict__ high, const float* total,
                const float times, float* out, const int32_t* __restrict__ bad) {
  const WarpTile at(n);
  if (at.count <= 0 || *bad < OF_NOTHING + 1) return;
  const int64_t s = warp_last_not_above(offsets, m, at.start, (int)(threadIdx.x % LANES));
  if (!at.active()) return;
  Cursor cursor(offsets + s, 1, at.start);
  const uint32_t word = words[at.words(1)];
  const float* before = total + at.start;
  float* part = out + at.start;
  float above = high[s] * times, below = low ? low[s] * times : -above;
  if (at.whole() && cursor.end == TILE) {
    float values[32];
    GC_UNROLL
    for (int j = 0; j < 32; ++j) values[j] = total ? before[j * LANES + at.lane] : 0.0f;
    GC_UNROLL
    for (int j = 0; j < 32; ++j) {
      const float value = word >> j & 1u ? above : below;
      part[j * LANES + at.lane] = total ? values[j] + value : value;
    }
    return;
  }
  const int rows = rows_of(at);
#pragma unroll 4
  for (int j = 0; j < rows; ++j) {
    const int i = j * at.lanes + at.lane;
    if (cursor.move(i)) {
      above = high[s + cursor.at] * times;
      below = low ? low[s + cursor.at] * times : -above;
    }
    const float value = word >> j & 1u ? above : below;
    part[i] = total ? before[i] + value : value;
  }
}

// The mean of what bits and values of payloads stand for; `found`, (payloads, m), null where there is one value a
// segment. `before`: null, or the sum of the payloads before, which may be `out`. The tile of a long segment is taken
// whole, of a shorter one eight rows at a time, and where segments meet one row.
extern "C" __global__ void __launch_bounds__(256, 4)
    sign_mean(const SegmentSummands in, const int64_t n, const int64_t* __restrict__ offsets, const int64_t m,
              int32_t* found, const float* before, const float divisor, float* out) {
  const WarpTile at(n);
  if (at.count <= 0) return;
  const int64_t s = warp_last_not_above(offsets, m, at.start, at.lane);
  if (found) {
#pragma unroll 1
    for (int p = 0; p < in.number; ++p) {
      mark_classes((const uint32_t*)in.parts[p], at, offsets, m, s, found + p * m);
    }
  }
  if (!at.active()) return;
  Cursor cursor(offsets + s, 1, at.start);
  if (at.whole() && cursor.end == TILE) {
    mean_rows<32>(in, at, 0, s, before, divisor, out);
    return;
  }
#pragma unroll 1
  for (int row = 0; row < 32; row += GROUP) {
    const int begin = row * at.lanes, end = begin + GROUP * at.lanes;
    if (at.whole()) cursor.move(begin);
    if (at.whole() && cursor.end >= end) {
      mean_rows<GROUP>(in, at, row, s + cursor.at, before, divisor, out);
      continue;
    }
#pragma unroll 1
    for (int i = begin + at.lane; i < end && i < at.count; i += at.lanes) {
      cursor.move(i);
      float sum = before ? before[at.start + i] : -0.0f;
#pragma unroll 1
      for (int p = 0; p < in.number; ++p) {
        const uint32_t word = ((const uint32_t*)in.parts[p])[at.words(1)];
        const Values values(in, p, s + cursor.at);
        sum += word >> (i / at.lanes) & 1u ? values.above : values.below;
      }
      out[at.start + i] = sum / divisor;
    }
  }
}

// [votes >= least] of ballots of one bit and one vote each, fewer than 64: one thread per word.
extern "C" __global__ void __launch_bounds__(256)
    sign_majority(const Ballots in, const int64_t n, const int64_t count, const uint32_t least,
                  uint32_t* __restrict__ out, int32_t* bad) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, lane = i - n / TILE * LANES;
  if (i >= count) return;
  if (lane >= 0) {
    const int rest = (int)(n % TILE), lanes = (rest + LANES - 1) / LANES;
    const int rows = (rest - (int)lane + lanes - 1) / lanes;
    for (int p = 0; p < in.number; ++p) {
      if (beyond(in.words[p][i], rows)) atomicMin(bad, (int32_t)AFTER_LAST);
    }
  }
  uint32_t won;
  if (in.number < 4) {
    won = majority<2>(in, i, least);
  } else if (in.number < 8) {
    won = majority<3>(in, i, least);
  } else if (in.number < 16) {
    won = majority<4>(in, i, least);
  } else {
    won = majority<6>(in, i, least);
  }
  out[i] = won;
}

// Votes of any kind, of ballots of one launch: `kept`, (used, 32 tiles), has the sums of those before, unless
// `first`, and gets them, unless `out`, where the vote goes. A sum of `wide` ballots is of codes of 2 bits, else of
// bits; +1 has `win` and 0 has `lose` at least. In 1 bit a tie is +1 as `win` has it, or a fair coin of the key
// (`toss`).
extern "C" __global__ void __launch_bounds__(256)
    sign_vote(const Ballots in, const int64_t n, const int32_t used, const int32_t wide, const int32_t first,
              uint32_t* __restrict__ kept, const uint32_t win, const uint32_t lose, const int32_t width,
              const int32_t toss, const Key key, uint32_t* __restrict__ out, int32_t* bad) {
  constexpr int PLANES = 31;
  const WarpTile at(n);
  if (!at.active()) return;
  const int rows = rows_of(at);
  const int64_t here = at.words(1), stride = (n + TILE - 1) / TILE * LANES;
  uint32_t planes[PLANES];
  GC_UNROLL
  for (int k = 0; k < PLANES; ++k) planes[k] = k < used && !first ? kept[k * stride + here] : 0u;
#pragma unroll 1
  for (int p = 0; p < in.number; ++p) {
    const uint32_t* words = in.words[p] + at.words(in.bits[p]);
    const uint32_t weight = (uint32_t)in.counts[p];
    if (in.bits[p] == 1) {
      const uint32_t word = words[0];
      if (beyond(word, rows)) atomicMin(bad, (int32_t)AFTER_LAST);
      add_votes(planes, used, word, wide ? weight << 1 : weight);
      continue;
    }
    const uint32_t a = words[0], b = words[at.lanes];
    const uint32_t low = squeeze_even(a) | squeeze_even(b) << 16;
    const uint32_t high = squeeze_even(a >> 1) | squeeze_even(b >> 1) << 16;
    if (beyond(low | high, rows)) atomicMin(bad, (int32_t)AFTER_LAST);
    if (low & high) atomicMin(bad, (int32_t)CODE_3);
    add_votes(planes, used, low, weight);
    add_votes(planes, used, high, weight << 1);
  }
  if (!out) {
    GC_UNROLL
    for (int k = 0; k < PLANES; ++k) {
      if (k < used) kept[k * stride + here] = planes[k];
    }
    return;
  }
  const uint32_t won = at_least(planes, win), tie = at_least(planes, lose) & ~won;
  if (width == 2) {
    uint32_t* words = out + at.words(2);
    words[0] = spread_even(tie) | spread_even(won) << 1;
    words[at.lanes] = spread_even(tie >> 16) | spread_even(won >> 16) << 1;
    return;
  }
  uint32_t coin = 0;
  if (toss && tie) {
    const uint64_t begin = key.offset + (uint64_t)at.start;
    if (at.whole()) {
      for_draws(key, begin, at.lane, [&](int j, uint32_t draw) { coin |= (uint32_t)(draw < 1u << 23) << j; });
    } else {
#pragma unroll 1
      for (int j = 0; j < rows; ++j) {
        coin |= (uint32_t)(draw_of(key, begin + j * at.lanes + at.lane) < 1u << 23) << j;
      }
    }
  }
  out[here] = won | (tie & coin);
}

// Bits of x, (n,), or of x + residual (not null) leaving in `left` what is lost, and the means of each segment.
#define GC_SIGN_ENCODER(NAME, CLASSES)                                                                               \
  extern "C" __global__ void __launch_bounds__(32 * WARPS, 3)                                                        \
      NAME##_short(const float* x, const float* residual, const int64_t* __restrict__ offsets,                       \
                   const int64_t* __restrict__ plan, const int64_t n, uint32_t* words, float* low, float* high,      \
                   float* left, int32_t* bad) {                                                                      \
    encode_short<CLASSES>(x, residual, offsets, plan, n, words, low, high, left, bad);                               \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(256, 3)                                                               \
      NAME##_sums(const float* x, const float* residual, const int64_t* __restrict__ offsets,                        \
                  const int64_t* __restrict__ tiles, const int64_t number, const int64_t n, uint32_t* words,         \
                  double* __restrict__ sums, const int64_t stride) {                                                 \
    sum_long<CLASSES>(x, residual, offsets, tiles, number, n, words, sums, stride);                                  \
  }                                                                                                                  \
  extern "C" __global__ void __launch_bounds__(32 * MEAN_WARPS)                                                      \
      NAME##_means(const int64_t* __restrict__ offsets, const int64_t* __restrict__ segments, double* sums,          \
                   const int64_t number, const int64_t stride, float* low, float* high, int32_t* bad) {              \
    mean_long<CLASSES>(offsets, segments, sums, number, stride, low, high, bad);                                     \
  }

GC_SIGN_ENCODER(scaled, false)
GC_SIGN_ENCODER(class, true)

// The error of encoding x + residual in long segments, whose means are known by now; `low` may be null. Tiles go in
// falling order, as the last ones that were summed may still be in the cache.
extern "C" __global__ void __launch_bounds__(256)
    sign_lost(const float* x, const float* residual, const int64_t* __restrict__ offsets,
              const int64_t* __restrict__ tiles, const int64_t number, const float* __restrict__ low,
              const float* __restrict__ high, float* left) {
  constexpr int GROUP = 8;
  const int64_t tile = number - 1 - ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  if (tile < 0) return;
  const int64_t s = tiles[tile];
  const Part part(tiles[number + tile], offsets[s + 1]);
  const float above = high[s], below = low ? low[s] : -above;
#pragma unroll 1
  for (int from = 0; from < part.rows; from += GROUP) {
    float values[GROUP], more[GROUP];
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) {
      const bool has = part.has(from + j);
      values[j] = has ? x[part.element(from + j)] : 0.0f;
      more[j] = has ? residual[part.element(from + j)] : 0.0f;
    }
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) {
      if (part.has(from + j)) left[part.element(from + j)] = lost(values[j] + more[j], below, above);
    }
  }
}
