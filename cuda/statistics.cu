// Largest magnitude, sum and sum of squares of segments on a GPU, in one pass: 4 bytes per element.
//
// tile_statistics: one warp per tile of 1024 elements inside one segment; float64 sums by halving, as statistics.cpp says.
// segment_statistics: a block a segment; tiles' sums by halving, and what follows from them. Two launches in all.
#include "tiles.cuh"

using namespace gc;

namespace {

constexpr int WARPS = 8;  // of a block of segment_statistics

// Sum load(i, i / 32) for i = 0 ... width - 1, width a power of two up to 1024, by halving; the result is in lane 0.
// Beyond the width stands -0.0, which changes no sum, not even -0.0, so that all widths take the same steps.
template <class Load>
__device__ __forceinline__ double halve(Load load, int width, int lane) {
  double row[16];
  GC_UNROLL
  for (int j = 0; j < 16; ++j) {
    const int i = j * LANES + lane, k = i + TILE / 2;
    row[j] = (i < width ? load(i, j) : -0.0) + (k < width ? load(k, j + 16) : -0.0);
  }
  GC_UNROLL
  for (int half = 8; half >= 1; half /= 2) {
    GC_UNROLL
    for (int j = 0; j < 8; ++j) {
      if (j < half) row[j] += row[j + half];
    }
  }
  double sum = row[0];
  GC_UNROLL
  for (int half = 16; half >= 1; half /= 2) sum += __shfl_down_sync(0xffffffffu, sum, half);
  return sum;
}

__device__ __forceinline__ int width_of(int64_t count) {
  if (count > TILE / 2) return TILE;
  int width = 1;
  while (width < count) width *= 2;
  return width;
}

// Sum values[0 ... n) as halves of tiles of 1024, again and again, by all warps of a block; `other` has room for n / 1024
// + 1. The result is valid in thread 0.
__device__ double halve_all(double* values, double* other, int64_t n) {
  const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
  while (n > 1) {
    const int width = width_of(n);
    const int64_t rows = (n + width - 1) / width;
    for (int64_t r = warp; r < rows; r += WARPS) {
      const double* from = values + r * width;
      const int64_t count = n - r * width;
      const double sum = halve([&](int i, int) { return i < count ? from[i] : 0.0; }, width, lane);
      if (lane == 0) other[r] = sum;
    }
    __syncthreads();
    double* swap = values;
    values = other;
    other = swap;
    n = rows;
  }
  return n ? values[0] : 0.0;
}

}  // namespace

// `table`: Segments.table, (2, m + 1). Outputs have one entry a tile; `sums` and `squares` may be null.
extern "C" __global__ void __launch_bounds__(256)
    tile_statistics(const float* __restrict__ x, const int64_t* __restrict__ table, const int64_t m,
                    uint32_t* __restrict__ tops, double* __restrict__ sums, double* __restrict__ squares) {
  const int64_t* offsets = table;
  const int64_t* tiles = table + m + 1;
  const int64_t tile = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const int lane = (int)(threadIdx.x % LANES);
  if (tile >= tiles[m]) return;  // uniform in the warp
  const int64_t s = last_not_above(tiles, m, tile);
  const int64_t start = offsets[s] + (tile - tiles[s]) * TILE, left = offsets[s + 1] - start;
  const int count = left < TILE ? (int)left : TILE, width = tiles[s + 1] - tiles[s] > 1 ? TILE : width_of(count);
  float values[32];
  uint32_t top = 0;
  GC_UNROLL
  for (int j = 0; j < 32; ++j) {
    const int i = j * LANES + lane;
    values[j] = i < count ? x[start + i] : 0.0f;
    const uint32_t u = bits_of(values[j]) & 0x7fffffffu;
    top = u > top ? u : top;
  }
  GC_UNROLL
  for (int half = 16; half >= 1; half /= 2) {
    const uint32_t u = __shfl_down_sync(0xffffffffu, top, half);
    top = u > top ? u : top;
  }
  if (lane == 0) tops[tile] = top;
  if (sums) {
    const double sum = halve([&](int, int j) { return (double)values[j]; }, width, lane);
    const double square = halve(
        [&](int, int j) {
          const double v = values[j];
          return v * v;
        },
        width, lane);
    if (lane == 0) {
      sums[tile] = sum;
      squares[tile] = square;
    }
  }
}

// The statistics of segments from those of their tiles; each output, (m,), may be null. `sums` and `squares` are
// overwritten. `limit` and `scale` are those of `ops.ternary.scales`: with clip 0 the scale alone; at_limit: the limit
// as scale. Where all values are equal nothing is clipped.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    segment_statistics(const int64_t* __restrict__ table, const int64_t m, const uint32_t* __restrict__ tops,
                       double* sums, double* squares, float* __restrict__ absmax, double* __restrict__ sum,
                       double* __restrict__ square, const float clip, const int32_t at_limit, float* __restrict__ limit,
                       float* __restrict__ scale) {
  __shared__ uint32_t largest[WARPS];
  const int64_t s = blockIdx.x, first = table[m + 1 + s], number = table[m + 1 + s + 1] - first;
  const int64_t all = table[2 * m + 1];
  uint32_t top = 0;
  for (int64_t t = threadIdx.x; t < number; t += blockDim.x) top = tops[first + t] > top ? tops[first + t] : top;
  GC_UNROLL
  for (int half = 16; half >= 1; half /= 2) {
    const uint32_t u = __shfl_down_sync(0xffffffffu, top, half);
    top = u > top ? u : top;
  }
  if (threadIdx.x % LANES == 0) largest[threadIdx.x / LANES] = top;
  __syncthreads();
  double total = 0.0, energy = 0.0;
  if (sums) {
    total = halve_all(sums + first, sums + all + first, number);
    energy = halve_all(squares + first, squares + all + first, number);
  }
  if (threadIdx.x != 0) return;
  for (int w = 1; w < WARPS; ++w) top = largest[w] > top ? largest[w] : top;
  const float most = float_of(top);
  if (absmax) absmax[s] = most;
  if (sum) sum[s] = total;
  if (square) square[s] = energy;
  if (!scale) return;
  if (clip == 0.0f) {
    scale[s] = most;
    return;
  }
  const int64_t length = table[s + 1] - table[s];
  const double count = length > 0 ? (double)length : 1.0, mean = total / count;
  const double spread = energy / count - mean * mean;
  const float sigma = (float)sqrt(spread < 0.0 ? 0.0 : spread);
  const bool even = sigma <= most * EVEN;
  float bound = even ? FLOAT_MAX : sigma * clip;
  if (bound > FLOAT_MAX) bound = FLOAT_MAX;
  if (at_limit) {
    scale[s] = even ? most : bound;
  } else {
    limit[s] = bound;
    scale[s] = most < bound || most != most ? most : bound;
  }
}
