// Blockwise 8-bit codes on a GPU.
//
// int8_blocks: largest magnitude and codes of blocks of up to 1024 elements, one warp per block; reads 4, writes 1 byte
//   per element, because the second pass reads the cache.
// int8_encode, int8_scales: blocks of any length after statistics.cu, one warp per 1024 elements; reads 4 + 4, writes 1.
// int8_decode: (code / 127) * scale; reads 1, writes 4; with `onto` reads 4 more.
// int8_mean: the sum of count * value over payloads, divided; reads 1 per payload, writes 4.
//
// Estimated, not measured: 1e8 elements at 4.3 TB/s take 0.116 ms in short blocks, 0.209 ms in long ones, 0.116
// ms to decode, 0.209 ms to decode onto others and 0.279 ms for the mean of 8.
#include "int8.cuh"
#include "means.cuh"

using namespace gc;

namespace {

constexpr int BAD_SCALE = 1, BAD_CODE = 2;  // values of the error flag

__device__ __forceinline__ int8_t code_of(float x, float divisor, bool stochastic, uint32_t draw) {
  return (int8_t)(stochastic ? int8_stochastic(x, divisor, draw) : int8_nearest(x, divisor));
}

__device__ __forceinline__ void check_scale(float scale, int32_t* bad) {
  if (!(scale == 0 || (scale >= TINY && scale <= FLOAT_MAX))) atomicMin(bad, BAD_SCALE);
}

// The codes of payloads in one tile, as floats.
struct Codes {
  const SegmentSummands& in;
  const WarpTile& at;

  __device__ __forceinline__ static float number(int8_t code) {
    return small_number((uint8_t)code ^ 0x80u, 128.0f);
  }

  __device__ __forceinline__ float one(int p, int, int i) const {
    return number(((const int8_t*)in.parts[p])[at.start + i]);
  }

  __device__ __forceinline__ void group(int p, int row, float (&into)[GROUP]) const {
    const int8_t* codes = (const int8_t*)in.parts[p] + at.start + row * LANES + at.lane;
    int8_t part[GROUP];
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) part[j] = codes[j * LANES];
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) into[j] = number(part[j]);
  }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    int8_blocks(const float* __restrict__ x, const int64_t* __restrict__ offsets, const int64_t m,
                const int32_t stochastic, const Key key, int8_t* __restrict__ codes, float* __restrict__ scales) {
  const int64_t s = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const int lane = (int)(threadIdx.x % LANES);
  if (s >= m) return;  // uniform in the warp
  const int64_t start = offsets[s];
  const int count = (int)(offsets[s + 1] - start);
  const float* part = x + start;
  int8_t* out = codes + start;
  const float top = float_of(warp_largest(part, count, lane)), divisor = int8_divisor(top);
  if (lane == 0) scales[s] = int8_scale(top);
  const uint64_t first = key.offset + (uint64_t)start;
  GroupDraws group{key};
  if (stochastic && first % SPAN != 0) {
    LaneDraws draws(key, first + lane);
#pragma unroll 1
    for (int i = lane; i < count; i += LANES) out[i] = code_of(part[i], divisor, true, draws.next());
    return;
  }
#pragma unroll 1
  for (int begin = 0; begin < count; begin += SPAN) {
    if (stochastic) {
      group.load(first + begin + lane, begin == 0);
      GC_UNROLL
      for (int j = 0; j < GROUP; ++j) {
        const int i = begin + j * LANES + lane;
        if (i < count) out[i] = code_of(part[i], divisor, true, group.draw(j));
      }
    } else {
      GC_UNROLL
      for (int j = 0; j < GROUP; ++j) {
        const int i = begin + j * LANES + lane;
        if (i < count) out[i] = code_of(part[i], divisor, false, 0);
      }
    }
  }
}

// `tops`: the blocks' largest magnitudes.
extern "C" __global__ void __launch_bounds__(256, 4)
    int8_encode(const float* __restrict__ x, const int64_t n, const int64_t* __restrict__ offsets, const int64_t m,
                const float* __restrict__ tops, const int32_t stochastic, const Key key, int8_t* __restrict__ codes) {
  const WarpTile at(n);
  if (at.count <= 0) return;
  Cursor cursor(offsets, m, at.start);
  float divisor = int8_divisor(tops[cursor.at]);
  const float* part = x + at.start;
  int8_t* out = codes + at.start;
  const uint64_t first = key.offset + (uint64_t)at.start;
  GroupDraws group{key};
  bool fresh = true;
#pragma unroll 1
  for (int begin = 0; begin < at.count; begin += SPAN) {
    const int end = begin + SPAN;
    if (cursor.move(begin)) divisor = int8_divisor(tops[cursor.at]);
    if (cursor.end >= end && (!stochastic || first % SPAN == 0)) {
      float values[GROUP];
      GC_UNROLL
      for (int j = 0; j < GROUP; ++j) values[j] = part[begin + j * LANES + at.lane];
      if (stochastic) {
        group.load(first + begin + at.lane, fresh);
        fresh = false;
        GC_UNROLL
        for (int j = 0; j < GROUP; ++j) {
          out[begin + j * LANES + at.lane] = code_of(values[j], divisor, true, group.draw(j));
        }
      } else {
        GC_UNROLL
        for (int j = 0; j < GROUP; ++j) out[begin + j * LANES + at.lane] = code_of(values[j], divisor, false, 0);
      }
    } else if (stochastic) {
      fresh = true;
      LaneDraws draws(key, first + begin + at.lane);
#pragma unroll 1
      for (int i = begin + at.lane; i < end && i < at.count; i += LANES) {
        if (cursor.move(i)) divisor = int8_divisor(tops[cursor.at]);
        out[i] = code_of(part[i], divisor, true, draws.next());
      }
    } else {
#pragma unroll 1
      for (int i = begin + at.lane; i < end && i < at.count; i += LANES) {
        if (cursor.move(i)) divisor = int8_divisor(tops[cursor.at]);
        out[i] = code_of(part[i], divisor, false, 0);
      }
    }
  }
}

// What is sent for largest magnitudes, in place.
extern "C" __global__ void __launch_bounds__(256) int8_scales(float* __restrict__ scales, const int64_t m) {
  const int64_t s = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (s < m) scales[s] = int8_scale(scales[s]);
}

// `out` may be `onto`, which may be null. The first threads look at the scales, blocks of no elements included.
extern "C" __global__ void __launch_bounds__(256)
    int8_decode(const int8_t* __restrict__ codes, const float* __restrict__ scales, const int64_t n,
                const int64_t* __restrict__ offsets, const int64_t m, const float* onto, const float count,
                float* out, int32_t* __restrict__ bad) {
  const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (int64_t s = thread; s < m; s += (int64_t)gridDim.x * blockDim.x) {
    check_scale(scales[s], bad);
  }
  const WarpTile at(n);
  if (at.count <= 0) return;
  const float top = (float)INT8_TOP, reciprocal = 1.0f / top;
  Cursor cursor(offsets, m, at.start);
  float scale = scales[cursor.at];
  int lowest = 0;
  const auto value = [&](int code, float by) {
    lowest = code < lowest ? code : lowest;
    return level_ratio((float)code, top, reciprocal) * by;
  };
#pragma unroll 1
  for (int begin = 0; begin < at.count; begin += SPAN) {
    const int end = begin + SPAN;
    if (cursor.move(begin)) scale = scales[cursor.at];
    Cursor next = cursor;
    if (end <= at.count && next.end < end) next.move(next.end);
    if (next.end >= end) {
      const float other = scales[next.at];
      float base[GROUP];  // `out` may be `onto`, so that no load can pass a store
      int8_t part[GROUP];
      GC_UNROLL
      for (int j = 0; j < GROUP; ++j) {
        const int64_t i = at.start + begin + j * LANES + at.lane;
        part[j] = codes[i];
        if (onto) base[j] = onto[i];
      }
      GC_UNROLL
      for (int j = 0; j < GROUP; ++j) {
        const int i = begin + j * LANES + at.lane;
        const float y = value(part[j], i < cursor.end ? scale : other);
        out[at.start + i] = onto ? base[j] + y * count : y;
      }
      cursor = next;
      scale = other;
    } else {
#pragma unroll 1
      for (int i = begin + at.lane; i < end && i < at.count; i += LANES) {
        if (cursor.move(i)) scale = scales[cursor.at];
        const float y = value(codes[at.start + i], scale);
        out[at.start + i] = onto ? onto[at.start + i] + y * count : y;
      }
    }
  }
  if (lowest < -INT8_TOP) atomicMin(bad, BAD_CODE);
}

// `before`: null, or the sum of the payloads before, which may be `out`. The first threads look at the scales.
extern "C" __global__ void __launch_bounds__(256)
    int8_mean(const SegmentSummands in, const int64_t n, const int64_t* __restrict__ offsets, const int64_t m,
              const float* before, const float divisor, float* out, int32_t* __restrict__ bad) {
  const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  for (int64_t s = thread; s < m; s += (int64_t)gridDim.x * blockDim.x) {
#pragma unroll 1
    for (int p = 0; p < in.number; ++p) check_scale(in.high[p][s], bad);
  }
  const WarpTile at(n);
  const LevelCheck judge{(float)INT8_TOP, false, m, nullptr, bad};
  level_mean_tile(Codes{in, at}, in, offsets, judge, at, before, divisor, out);
}
