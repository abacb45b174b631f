// What the CUDA kernels share: one warp per tile, segments under its elements, draws, streams of bits. For *.cu only.
#pragma once
#include "common.cuh"

namespace gc {

// The tile of 1024 codes that a warp works on, one lane of 32 rows a thread: row j of lane l is element
// j * lanes + l.
struct WarpTile {
  int64_t tile, start;  // `start` is the tile's first element
  int count, lanes, lane;

  __device__ __forceinline__ explicit WarpTile(int64_t n) {
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    tile = thread / LANES;
    lane = (int)(thread % LANES);
    start = tile * TILE;
    count = n - start < TILE ? (int)(n - start) : TILE;  // 0 or less beyond the end
    lanes = count == TILE ? LANES : (count + LANES - 1) / LANES;
  }

  __device__ __forceinline__ bool active() const { return count > 0 && lane < lanes; }
  __device__ __forceinline__ bool whole() const { return count == TILE; }
  // Where word 0 of this lane is, for codes of `bits` bits; word k lies k * lanes further on.
  __device__ __forceinline__ int64_t words(int bits) const { return tile * LANES * bits + lane; }
};

// The last of `count` entries of `edges` that is at most `value`; the first one is.
__device__ __forceinline__ int64_t last_not_above(const int64_t* __restrict__ edges, int64_t count, int64_t value) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (edges[middle] <= value) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The segment under one element of a tile after the other, in increasing order.
struct Cursor {
  const int64_t* __restrict__ offsets;
  int64_t start, at;
  int end;  // where segment `at` ends, counted from the tile's first element, at most TILE

  __device__ __forceinline__ Cursor(const int64_t* __restrict__ edges, int64_t m, int64_t tile_start)
      : offsets(edges), start(tile_start), at(last_not_above(edges, m, tile_start)) {
    find_end();
  }

  // Move to the segment of element i of the tile; true if it is another one.
  __device__ __forceinline__ bool move(int i) {
    if (i < end) return false;
    while (offsets[at + 1] <= start + i) ++at;
    find_end();
    return true;
  }

 private:
  __device__ __forceinline__ void find_end() {
    const int64_t left = offsets[at + 1] - start;
    end = left < TILE ? (int)left : TILE;
  }
};

// The draws of a lane's 32 rows in a whole tile that starts at element `first` of the bucket.
struct LaneDraws {
  const Key& key;
  uint64_t lane;  // drawing lane of row 0
  int row;        // its row there
  Block block;

  __device__ __forceinline__ LaneDraws(const Key& k, uint64_t first)
      : key(k), lane(first / TILE * LANES + first % LANES) {
    row = (int)(first % TILE) / LANES;
    load();
  }

  // The draw of the next row.
  __device__ __forceinline__ uint32_t next() {
    const int byte = row % 16, word = byte / 4;
    const uint32_t a = word == 0 ? block.x : word == 1 ? block.y : word == 2 ? block.z : block.w;
    const uint32_t b = word == 0 ? block.y : word == 1 ? block.z : word == 2 ? block.w : block.x;
    const uint32_t draw = __funnelshift_l(b, a, 8 * (byte % 4)) >> 8;
    if (++row % 16 == 0) {
      if (row == 32) {
        row = 0;
        lane += LANES;
      }
      load();
    }
    return draw;
  }

 private:
  __device__ __forceinline__ void load() { block = key_block(key, lane, (uint32_t)row / 16); }
};

// Call f(j, draw) for the 32 rows of a lane of a whole tile that starts at element `first` of the bucket.
template <class F>
__device__ __forceinline__ void for_draws(const Key& key, uint64_t first, int lane, F f) {
  if (first % TILE == 0) {
    GC_UNROLL
    for (int q = 0; q < 2; ++q) {
      const Block block = key_block(key, first / TILE * LANES + lane, q);
      const uint32_t words[5] = {block.x, block.y, block.z, block.w, block.x};
      GC_UNROLL
      for (int j = 0; j < 16; ++j) f(16 * q + j, window24(words[j / 4], words[j / 4 + 1], j % 4));
    }
  } else {
    LaneDraws draws(key, first + lane);
#pragma unroll 1
    for (int j = 0; j < 32; ++j) f(j, draws.next());
  }
}

// The draw of one element of the bucket, wherever it is.
__device__ __forceinline__ uint32_t draw_of(const Key& key, uint64_t element) {
  LaneDraws draws(key, element);
  return draws.next();
}

// The draws of a lane for SPAN elements in a row, of which it has every 32nd, where these begin at a multiple of SPAN
// of the bucket: all are of one block, which serves the next SPAN elements too if its first half was used.
constexpr int GROUP = 8, SPAN = GROUP * LANES;

struct GroupDraws {
  const Key& key;
  Block block;

  // For elements `first` + 32 j of the bucket; `fresh`: the group before this one was not loaded.
  __device__ __forceinline__ void load(uint64_t first, bool fresh) {
    const int row = (int)(first % TILE) / LANES;
    if (fresh || row % 16 == 0) block = key_block(key, first / TILE * LANES + first % LANES, (uint32_t)row / 16);
    if (row % 16 != 0) block = Block{block.z, block.w, block.x, block.y};
  }

  __device__ __forceinline__ uint32_t draw(int j) const {
    return j < 4 ? window24(block.x, block.y, j) : window24(block.y, block.z, j - 4);
  }
};

constexpr int MOST_SUMMANDS = 64;

// Bits of the largest magnitude of x[0 ... count), in all lanes of a warp: they order as magnitudes do, and NaN is
// above all of them.
__device__ __forceinline__ uint32_t warp_largest(const float* __restrict__ x, int64_t count, int lane) {
  uint32_t top = 0;
#pragma unroll 1
  for (int64_t begin = 0; begin < count; begin += SPAN) {
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) {
      const int64_t i = begin + j * LANES + lane;
      const uint32_t u = i < count ? bits_of(x[i]) & 0x7fffffffu : 0u;
      top = u > top ? u : top;
    }
  }
  GC_UNROLL
  for (int half = 16; half >= 1; half /= 2) {
    const uint32_t u = __shfl_xor_sync(0xffffffffu, top, half);
    top = u > top ? u : top;
  }
  return top;
}

// Codes of `bits` bits of one lane, in order, into its words, which lie `stride` apart.
struct BitWriter {
  uint32_t* __restrict__ out;
  int stride, bits, filled = 0;
  uint64_t held = 0;

  __device__ __forceinline__ BitWriter(uint32_t* __restrict__ words, int lanes, int width)
      : out(words), stride(lanes), bits(width) {}

  __device__ __forceinline__ void put(uint32_t code) {
    held |= (uint64_t)code << filled;
    filled += bits;
    if (filled >= 32) {
      *out = (uint32_t)held;
      out += stride;
      held >>= 32;
      filled -= 32;
    }
  }
};

struct BitReader {
  const uint32_t* __restrict__ in;
  int stride, bits, left = 0;
  uint64_t held = 0;

  __device__ __forceinline__ BitReader(const uint32_t* __restrict__ words, int lanes, int width)
      : in(words), stride(lanes), bits(width) {}

  __device__ __forceinline__ uint32_t get() {
    if (left < bits) {
      held |= (uint64_t)*in << left;
      in += stride;
      left += 32;
    }
    const uint32_t code = (uint32_t)held & ((1u << bits) - 1u);
    held >>= bits;
    left -= bits;
    return code;
  }
};

}  // namespace gc
