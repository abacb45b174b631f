// Ternary codes (TernGrad) on a GPU: one warp per tile of 1024 elements.
//
// ternary_encode: code = 1 + sign(x) [(u + 1/2) scale / 2^24 <= min(|x|, limit)]; reads 4, writes 1/4 bytes per element.
// ternary_mean:   (sum of codes - workers) * (scale / workers); reads 1/4 per payload of one worker, writes 4.
// ternary_merge:  sum of codes in `width` bits; reads 1/4 per payload, writes width / 8.
#include "ternary.cuh"
#include "tiles.cuh"

using namespace gc;

namespace {

constexpr int MOST = 64;

// Payloads of one call: the words of each, bits of a code, and the largest code that is allowed.
struct Payloads {
  const uint32_t* words[MOST];
  int32_t bits[MOST];
  int32_t tops[MOST];
  int32_t number;
};

// Add all payloads' codes of this lane to sums[32]; *bad becomes the least number of a payload with a code too large.
__device__ __forceinline__ void add_all(const Payloads& in, const WarpTile& at, int32_t (&sums)[32], int32_t* bad) {
  GC_UNROLL
  for (int j = 0; j < 32; ++j) sums[j] = 0;
#pragma unroll 1
  for (int p = 0; p < in.number; ++p) {
    const int bits = in.bits[p];
    const uint32_t* words = in.words[p] + at.words(bits);
    const int32_t top = in.tops[p];
    bool wrong = false;
    if (bits == 2) {
      GC_UNROLL
      for (int k = 0; k < 2; ++k) {
        const uint32_t word = words[k * at.lanes];
        GC_UNROLL
        for (int j = 0; j < 16; ++j) {
          const int32_t code = (int32_t)((word >> (2 * j)) & 3u);
          wrong |= code > top && (16 * k + j) * at.lanes + at.lane < at.count;
          sums[16 * k + j] += code;
        }
      }
    } else {
      BitReader reader(words, at.lanes, bits);
      GC_UNROLL
      for (int j = 0; j < 32; ++j) {
        const int32_t code = (int32_t)reader.get();
        wrong |= code > top && j * at.lanes + at.lane < at.count;
        sums[j] += code;
      }
    }
    if (wrong) atomicMin(bad, p);
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256)
    ternary_encode(const float* __restrict__ x, const int64_t n, const int64_t* __restrict__ offsets, const int64_t m,
                   const float* __restrict__ limit, const float* __restrict__ scale, const Key key,
                   uint32_t* __restrict__ out) {
  const WarpTile at(n);
  if (!at.active()) return;
  Cursor cursor(offsets, m, at.start);
  float step = ternary_step(scale[cursor.at]), bound = limit ? limit[cursor.at] : float_of(0x7f800000u);
  const float* part = x + at.start;
  uint32_t* words = out + at.words(2);
  const uint64_t first = key.offset + (uint64_t)at.start;
  const auto code = [&](int i, float value, uint32_t draw) {
    if (cursor.move(i)) {
      step = ternary_step(scale[cursor.at]);
      if (limit) bound = limit[cursor.at];
    }
    return ternary_code(value, bound, step, draw);
  };
  if (at.whole()) {
    BitWriter writer(words, LANES, 2);
    for_draws(key, first, at.lane, [&](int j, uint32_t draw) {
      const int i = j * LANES + at.lane;
      writer.put(code(i, part[i], draw));
    });
  } else {
#pragma unroll 1
    for (int k = 0; k < 2; ++k) {
      uint32_t word = 0;
#pragma unroll 1
      for (int j = 0; j < 16; ++j) {
        const int i = (16 * k + j) * at.lanes + at.lane;
        if (i < at.count) word |= code(i, part[i], draw_of(key, first + i)) << (2 * j);
      }
      words[k * at.lanes] = word;
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    ternary_mean(const Payloads in, const int32_t workers, const float* __restrict__ scale, const int64_t n,
                 const int64_t* __restrict__ offsets, const int64_t m, float* __restrict__ out, int32_t* bad) {
  const WarpTile at(n);
  if (!at.active()) return;
  int32_t sums[32];
  add_all(in, at, sums, bad);
  Cursor cursor(offsets, m, at.start);
  float unit = ternary_unit(scale[cursor.at], (float)workers);
  GC_UNROLL
  for (int j = 0; j < 32; ++j) {
    const int i = j * at.lanes + at.lane;
    if (i < at.count) {
      if (cursor.move(i)) unit = ternary_unit(scale[cursor.at], (float)workers);
      out[at.start + i] = (float)(sums[j] - workers) * unit;
    }
  }
}

extern "C" __global__ void __launch_bounds__(256)
    ternary_merge(const Payloads in, const int64_t n, const int32_t width, uint32_t* __restrict__ out, int32_t* bad) {
  const WarpTile at(n);
  if (!at.active()) return;
  int32_t sums[32];
  add_all(in, at, sums, bad);
  BitWriter writer(out + at.words(width), at.lanes, width);
  GC_UNROLL
  for (int j = 0; j < 32; ++j) writer.put(j * at.lanes + at.lane < at.count ? (uint32_t)sums[j] : 0u);
}
