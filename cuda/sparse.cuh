// Shared by the kernels that add sparse tensors: the search for a block's first position, and the check of the order of
// positions. Included by *.cu only.
#pragma once
#include "common.cuh"

namespace gc {

// The first index in [0, count) whose at(index), which does not decrease, is `value` or more; or count. By a whole warp,
// 32 places at a time.
template <class At>
__device__ __forceinline__ int64_t warp_first_from(int64_t count, int64_t value, At at) {
  int64_t low = 0;
#pragma unroll 1
  while (count > 0) {
    const int64_t step = (count + LANES - 1) / LANES, i = (int64_t)(threadIdx.x % LANES) * step;
    const int below = __popc(__ballot_sync(0xffffffffu, i < count && at(low + i) < value));
    if (below == 0) break;
    const int64_t past = (below - 1) * step + 1;
    low += past;
    count = step - 1 < count - past ? step - 1 : count - past;
  }
  return low;
}

// Trap unless positions increase and are in [0, n); each block checks its share.
__device__ __forceinline__ void check_order(const int64_t* __restrict__ positions, int64_t total, int64_t n) {
  for (int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; j < total; j += (int64_t)gridDim.x * blockDim.x) {
    if (positions[j] < 0 || positions[j] >= n || (j > 0 && positions[j] <= positions[j - 1])) __trap();
  }
}

}  // namespace gc
