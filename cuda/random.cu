// Random numbers as tensors: `ops.random.draws24`.
//
// out[i] = 24 bits of Philox4x32-10 for element key.offset + i. A block of 16 bytes serves 16 rows of a lane: row j
// takes the bits from byte j % 16 on. Writes 4 bytes per element, one block per 16 elements.
// Encoders do not use this kernel: they compute their draws in registers, by common.cuh.
#include "common.cuh"

// A thread has one half (16 rows) of one lane of one tile; `first` is the tile of element key.offset. Beside one
// another: the 32 lanes of a half, so that a warp writes 32 consecutive elements for each row.
extern "C" __global__ void __launch_bounds__(256)
    draws24(int32_t* __restrict__ out, const int64_t n, const int64_t halves, const gc::Key key) {
  const int64_t id = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t lane = id % gc::LANES, half = id / gc::LANES;
  if (half >= halves) return;
  const uint64_t tile = key.offset / gc::TILE + (uint64_t)half / 2;
  const gc::Block block = gc::key_block(key, tile * gc::LANES + lane, (uint32_t)half % 2);
  const uint32_t words[5] = {block.x, block.y, block.z, block.w, block.x};
  const int64_t start = (int64_t)(tile * gc::TILE - key.offset) + half % 2 * (gc::TILE / 2) + lane;
  GC_UNROLL
  for (int row = 0; row < 16; ++row) {
    const int64_t i = start + row * gc::LANES;
    if (i >= 0 && i < n) out[i] = (int32_t)gc::window24(words[row / 4], words[row / 4 + 1], row % 4);
  }
}
