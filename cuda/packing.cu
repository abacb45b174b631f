// Codes to words and back on a GPU, 1 to 16 bits each: one warp per tile of 1024. Packing reads a code's own size and
// writes B / 8 bytes per element, unpacking reads B / 8 and writes 4.
#include "tiles.cuh"

using namespace gc;

namespace {

template <class T>
__device__ __forceinline__ void pack(const T* __restrict__ codes, int64_t n, int bits, uint32_t* __restrict__ out) {
  const WarpTile at(n);
  if (!at.active()) return;
  BitWriter writer(out + at.words(bits), at.lanes, bits);
  GC_UNROLL
  for (int j = 0; j < 32; ++j) {
    const int i = j * at.lanes + at.lane;
    writer.put(i < at.count ? (uint32_t)codes[at.start + i] : 0u);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    pack_8(const uint8_t* __restrict__ codes, const int64_t n, const int32_t bits, uint32_t* __restrict__ out) {
  pack(codes, n, bits, out);
}

extern "C" __global__ void __launch_bounds__(256)
    pack_32(const uint32_t* __restrict__ codes, const int64_t n, const int32_t bits, uint32_t* __restrict__ out) {
  pack(codes, n, bits, out);
}

extern "C" __global__ void __launch_bounds__(256)
    pack_64(const uint64_t* __restrict__ codes, const int64_t n, const int32_t bits, uint32_t* __restrict__ out) {
  pack(codes, n, bits, out);
}

// From each of gridDim.y stretches of `size` words, n codes.
extern "C" __global__ void __launch_bounds__(256)
    unpack(const uint32_t* __restrict__ words, const int64_t size, const int64_t n, const int32_t bits,
           int32_t* __restrict__ out) {
  const WarpTile at(n);
  if (!at.active()) return;
  const int64_t row = blockIdx.y;
  BitReader reader(words + row * size + at.words(bits), at.lanes, bits);
  GC_UNROLL
  for (int j = 0; j < 32; ++j) {
    const int i = j * at.lanes + at.lane;
    const uint32_t code = reader.get();
    if (i < at.count) out[row * n + at.start + i] = (int32_t)code;
  }
}
