// What CPU loops and CUDA kernels share: bits of floats, the random generator, tiles.
//
// Everything here and in the other *.cuh files is a function of one element, or of one lane of a tile, and is
// included by both sides; `gcbench.ops` has the definitions that it must equal bit for bit.
//
// Rules that keep bytes equal on every compiler and machine: integers where possible; no library function of
// mathematics and no approximate division; floating-point contraction off on both sides; sums in a stated order.
#pragma once

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define GC_HD __host__ __device__ __forceinline__
#define GC_UNROLL _Pragma("unroll")
#else
#define GC_HD inline __attribute__((always_inline))
#define GC_UNROLL _Pragma("GCC unroll 64")
#endif

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#include <string.h>
#endif

namespace gc {

constexpr int LANES = 32;   // codes beside one another: a warp, or the lanes of vector registers
constexpr int TILE = 1024;  // codes of one packing and drawing tile: 32 rows of 32 lanes
constexpr float TINY = 0x1p-100f;  // a scale below it counts as zero
constexpr float FLOAT_MAX = 0x1.fffffep127f;
// Standard deviation, relative to the largest magnitude, up to which values count as equal: rounding gives 2^-23.
constexpr float EVEN = 0x1p-22f;

// ---- bits of floats --------------------------------------------------------------------------------------------

GC_HD uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
#endif
}

GC_HD float float_of(uint32_t u) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(u);
#else
  float x;
  memcpy(&x, &u, 4);
  return x;
#endif
}

GC_HD float magnitude(float x) { return float_of(bits_of(x) & 0x7fffffffu); }
GC_HD uint32_t is_negative(float x) { return bits_of(x) >> 31; }  // 1 for -0.0 too

// ---- random numbers --------------------------------------------------------------------------------------------

// The address of a stream, as `gcbench.core.compressor.Key` has it; `who` is stream << 24 | rank.
struct Key {
  uint64_t seed;
  uint64_t offset;  // index in the bucket of the first element at hand
  uint32_t step;
  uint32_t who;
  uint32_t workers;  // whose draws are correlated; 0 or 1: independent. Only the CPU's draws know it
};

struct Block {
  uint32_t x, y, z, w;
};

constexpr uint32_t PHILOX_M0 = 0xD2511F53u, PHILOX_M1 = 0xCD9E8D57u;
constexpr uint32_t PHILOX_W0 = 0x9E3779B9u, PHILOX_W1 = 0xBB67AE85u;

// Philox4x32-10 (Salmon et al., SC 2011).
GC_HD Block philox(Block c, uint32_t k0, uint32_t k1) {
  GC_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = (uint64_t)PHILOX_M0 * c.x, p1 = (uint64_t)PHILOX_M1 * c.z;
    c = Block{(uint32_t)(p1 >> 32) ^ c.y ^ k0, (uint32_t)p1, (uint32_t)(p0 >> 32) ^ c.w ^ k1, (uint32_t)p0};
    k0 += PHILOX_W0;
    k1 += PHILOX_W1;
  }
  return c;
}

// Block number `index` of the kind `kind`: 0 and 1 are the halves of a drawing lane, 2 is for whole words.
GC_HD Block key_block(const Key& key, uint64_t index, uint32_t kind) {
  const Block counter{(uint32_t)index, (uint32_t)(index >> 32 << 8) | kind, key.step, key.who};
  return philox(counter, (uint32_t)key.seed, (uint32_t)(key.seed >> 32));
}

// The 24 bits that start at byte `row` of the 16 bytes (word, after, ...) of a block, cyclic: `row` is 0 to 3, `word`
// the word of that byte and `after` the next one.
GC_HD uint32_t window24(uint32_t word, uint32_t after, int row) {
  const int shift = 8 * row;
  return (shift ? (word << shift) | (after >> (32 - shift)) : word) >> 8;
}

// u + 1/2, u an integer below 2^24, in float32: halves above 2^23 are rounded to even.
GC_HD float draw_half(uint32_t u) { return (float)(int32_t)u + 0.5f; }

}  // namespace gc
