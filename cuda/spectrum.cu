// Operations around a Fourier transform on a GPU, which is cuFFT's: segments scaled by powers of two and back, energies of
// bins, sums of sparse spectra. One warp per tile of 1024 floats inside one segment, as in statistics.cu; one block per chunk of
// 4096 bins of a sum. Segments may lie as rows of another buffer, in any order: `gcbench.ops.spectrum.Rows`.
//
// spectrum_scaled:   out = x / unit, or that as fp16, with the unit of the segment's largest magnitude, which
//   statistics.cu finds; reads 4, and 4 for the largest, writes 4 bytes per element and zeros after a row.
// spectrum_unscaled: out = X unit, energy = |X|^2; reads 4, writes 6 bytes a float, of which a bin has two.
// spectrum_restored: out = x unit, within the finite floats; reads 4, writes 4 bytes per element.
// spectrum_mean:     the sum of weight * value over sparse spectra, in their order; writes 8 bytes per bin once, reads 16 a
//   value, and 8 to check its place.
//
// Estimated, not measured: 1e8 elements at 4.3 TB/s take 0.279, 0.233 and 0.186 ms, and 5e7 bins of 8 spectra that
// keep 15 % 0.428 ms. Launches: 3, 1, 1, and 1 for 64 spectra, whatever the segments.
#include "half.cuh"
#include "sparse.cuh"
#include "tiles.cuh"

using namespace gc;

namespace {

constexpr int THREADS = 256;
constexpr int CHUNK = 4096;  // bins of a block of spectrum_mean

// The tile that a warp has. `table`: Segments.table, (2, m + 1); `rows`: null, or where segments begin in another buffer
// and how long they are there, (2, m).
struct SegmentTile {
  int64_t segment = 0, start = 0, place = 0;  // `start`: the first element; `place`: where it is in the rows
  int64_t number = 0, tiles = 1;              // which tile of how many of the segment
  int count = 0, lane;                        // elements: 0 beyond the last tile, for a whole warp

  __device__ __forceinline__ SegmentTile(const int64_t* __restrict__ table, int64_t m, const int64_t* __restrict__ rows) {
    const int64_t *offsets = table, *before = table + m + 1;
    const int64_t tile = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    lane = (int)(threadIdx.x % LANES);
    if (tile >= before[m]) return;
    segment = last_not_above(before, m, tile);
    number = tile - before[segment];
    tiles = before[segment + 1] - before[segment];
    start = offsets[segment] + number * TILE;
    place = rows ? rows[segment] + number * TILE : start;
    const int64_t left = offsets[segment + 1] - start;
    count = left < TILE ? (int)left : TILE;
  }
};

// Call use(i, value) for elements i of a tile of `count`, by all lanes and with zeros beyond it; eight loads are under way
// before the first is used, as what is written may be what is read.
template <class F>
__device__ __forceinline__ void for_groups(const float* from, int count, int lane, F use) {
#pragma unroll 1
  for (int begin = 0; begin < count; begin += SPAN) {
    float values[GROUP];
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) {
      const int i = begin + j * LANES + lane;
      values[j] = i < count ? from[i] : 0.0f;
    }
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) use(begin + j * LANES + lane, values[j]);
  }
}

// The power of two below a magnitude, in [2^-110, 2^126], over `peak`, a power of two: it and its reciprocal are exact.
__device__ __forceinline__ float unit_of(float largest, float peak) {
  const float power = float_of(bits_of(largest) & INFINITE);  // of NaN, infinity
  return (power < 0x1p-110f ? 0x1p-110f : power > 0x1p126f ? 0x1p126f : power) / peak;
}

// Round to fp16 and back; what is scaled does not overflow it, and infinities and NaN stay.
__device__ __forceinline__ float to_half(float x) {
  return (bits_of(x) & INFINITE) == INFINITE ? x : half_value<false>(half_code<false>(x));
}

// Sparse spectra of one launch.
struct Spectra {
  const float* values[MOST_SUMMANDS];  // two a bin
  const int64_t* bins[MOST_SUMMANDS];  // increasing
  int64_t kept[MOST_SUMMANDS];
  float weights[MOST_SUMMANDS];
  int32_t number;
};

}  // namespace

// The first threads write the units, (m,), of `largest`, (m,). A segment whose largest is below `tiny` becomes zeros.
extern "C" __global__ void __launch_bounds__(THREADS)
    spectrum_scaled(const float* __restrict__ x, const int64_t* __restrict__ table, const int64_t m,
                    const float* __restrict__ largest, const float peak, const float tiny, const int32_t half,
                    const int64_t* __restrict__ rows, float* __restrict__ unit, float* __restrict__ out) {
  const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (int64_t s = thread; s < m; s += (int64_t)gridDim.x * blockDim.x) unit[s] = unit_of(largest[s], peak);
  const SegmentTile at(table, m, rows);
  if (at.count == 0) return;
  const float top = largest[at.segment], by = 1.0f / unit_of(top, peak);
  const bool zero = top < tiny;
  float* to = out + at.place;
  for_groups(x + at.start, at.count, at.lane, [&](int i, float value) {
    const float scaled = value * by;
    if (i < at.count) to[i] = zero ? 0.0f : half ? to_half(scaled) : scaled;
  });
  if (!rows) return;
  // Each tile writes its share of the zeros after the row.
  const int64_t length = table[at.segment + 1] - table[at.segment], spare = rows[m + at.segment] - length;
  const int64_t share = (spare + at.tiles - 1) / at.tiles, stop = (at.number + 1) * share;
  float* after = out + rows[at.segment] + length;
  for (int64_t i = at.number * share + at.lane; i < stop && i < spare; i += LANES) after[i] = 0.0f;
}

// `table` counts floats, two a bin. `out` may be `bins` if there are no `rows`.
extern "C" __global__ void __launch_bounds__(THREADS)
    spectrum_unscaled(const float* bins, const float* __restrict__ unit, const int64_t* __restrict__ table,
                      const int64_t m, const int64_t* __restrict__ rows, float* out, float* __restrict__ energy) {
  const SegmentTile at(table, m, rows);
  if (at.count == 0) return;
  const float by = unit[at.segment];
  float *to = out + at.start, *size = energy + at.start / 2;
  for_groups(bins + at.place, at.count, at.lane, [&](int i, float value) {
    const float square = value * value, next = __shfl_down_sync(0xffffffffu, square, 1);
    if (i >= at.count) return;
    to[i] = value * by;
    if (i % 2 == 0) size[i / 2] = square + next;
  });
}

// `out` may be `x` if there are no `rows`. NaN stays.
extern "C" __global__ void __launch_bounds__(THREADS)
    spectrum_restored(const float* x, const float* __restrict__ unit, const int64_t* __restrict__ table,
                      const int64_t m, const int64_t* __restrict__ rows, float* out) {
  const SegmentTile at(table, m, rows);
  if (at.count == 0) return;
  const float by = unit[at.segment];
  float* to = out + at.start;
  for_groups(x + at.place, at.count, at.lane, [&](int i, float value) {
    const float restored = value * by;
    if (i < at.count) to[i] = restored > FLOAT_MAX ? FLOAT_MAX : restored < -FLOAT_MAX ? -FLOAT_MAX : restored;
  });
}

// The sum for n bins, two floats each; `onto`: added to what `out` has. Bins out of range or order end it with a trap.
extern "C" __global__ void __launch_bounds__(THREADS)
    spectrum_mean(const Spectra in, const int64_t n, const int32_t onto, float* __restrict__ out) {
  __shared__ float row[2 * CHUNK];
  __shared__ int64_t from[MOST_SUMMANDS];
  const int64_t start = (int64_t)blockIdx.x * CHUNK, left = n - start;
  const int count = left < CHUNK ? (int)left : CHUNK;
  for (int i = threadIdx.x; i < 2 * count; i += THREADS) row[i] = onto ? out[2 * start + i] : 0.0f;
#pragma unroll 1
  for (int p = threadIdx.x / LANES; p < in.number; p += THREADS / LANES) {
    const int64_t* bins = in.bins[p];
    const int64_t first = warp_first_from(in.kept[p], start, [=](int64_t j) { return bins[j]; });
    if (threadIdx.x % LANES == 0) from[p] = first;
  }
  __syncthreads();
#pragma unroll 1
  for (int p = 0; p < in.number; ++p) {
    const int64_t* __restrict__ bins = in.bins[p];
    const float* __restrict__ values = in.values[p];
    const float weight = in.weights[p];
    check_order(bins, in.kept[p], n);
#pragma unroll 1
    for (int64_t i = 2 * from[p] + threadIdx.x; i < 2 * in.kept[p]; i += THREADS) {  // of real and imaginary parts
      const int64_t bin = bins[i / 2] - start;
      if (bin < 0 || bin >= count) break;
      row[2 * bin + i % 2] += values[i] * weight;
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < 2 * count; i += THREADS) out[2 * start + i] = row[i];
}
