// Natural compression on a GPU: one warp per tile of 1024 elements.
//
// natural_encode: the exponent, or with the probability of the fraction the next one, and the sign, in 9 bits; reads
//   4, writes 9/8 bytes per element.
// natural_mean:   the sum of count * value over payloads, divided; reads 9/8 per payload, writes 4.
//
// Estimated, not measured: 1e8 elements at 4.3 TB/s take 0.119 ms to encode, 0.119 ms to decode and 0.302 ms for
// the mean of 8.
#include "natural.cuh"
#include "tiles.cuh"

using namespace gc;

extern "C" __global__ void __launch_bounds__(256)
    natural_encode(const float* __restrict__ x, const int64_t n, const Key key, uint32_t* __restrict__ out) {
  const WarpTile at(n);
  if (!at.active()) return;
  const float* part = x + at.start;
  const uint64_t first = key.offset + (uint64_t)at.start;
  BitWriter writer(out + at.words(NATURAL_BITS), at.lanes, NATURAL_BITS);
  if (at.whole()) {
    for_draws(key, first, at.lane, [&](int j, uint32_t draw) {
      writer.put(natural_code(part[j * LANES + at.lane], draw));
    });
  } else {
#pragma unroll 1
    for (int j = 0; j < 32; ++j) {
      const int i = j * at.lanes + at.lane;
      writer.put(i < at.count ? natural_code(part[i], draw_of(key, first + i)) : 0u);
    }
  }
}

// `before`: null, or the sum of the payloads before, which may be `out`.
extern "C" __global__ void __launch_bounds__(256)
    natural_mean(const Summands in, const int64_t n, const float* before, const float divisor, float* out,
                 int32_t* __restrict__ bad) {
  const WarpTile at(n);
  if (!at.active()) return;
  const auto place = [&](int j) { return j * at.lanes + at.lane; };  // in the tile
  float sums[32];
  GC_UNROLL
  for (int j = 0; j < 32; ++j) {
    sums[j] = before && place(j) < at.count ? before[at.start + place(j)] : -0.0f;  // the neutral element
  }
  bool wrong = false;
#pragma unroll 1
  for (int p = 0; p < in.number; ++p) {
    const uint32_t* words = (const uint32_t*)in.parts[p] + at.words(NATURAL_BITS);
    const float times = in.counts[p];
    uint32_t word[NATURAL_BITS];
    GC_UNROLL
    for (int k = 0; k < NATURAL_BITS; ++k) word[k] = words[k * at.lanes];
    GC_UNROLL
    for (int j = 0; j < 32; ++j) {
      const int k = j * NATURAL_BITS / 32, shift = j * NATURAL_BITS % 32;
      uint32_t code = word[k] >> shift;
      if (shift + NATURAL_BITS > 32) code |= word[k + 1] << (32 - shift);
      code &= (1u << NATURAL_BITS) - 1u;
      wrong |= natural_wrong(code) && place(j) < at.count;
      sums[j] += natural_value(code) * times;
    }
  }
  if (wrong) atomicMin(bad, 1);
  GC_UNROLL
  for (int j = 0; j < 32; ++j) {
    if (place(j) < at.count) out[at.start + place(j)] = sums[j] / divisor;
  }
}
