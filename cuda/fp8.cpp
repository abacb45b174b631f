// Blocks of e4m3 floats on the CPU: `gcbench.ops.fp8`.
//
// c = e4m3(448 (x / a)), a the block's largest magnitude; x' = (c / 448) a. Bytes per element: encoding reads 4, or 8
// where a block is longer than SHORT, and writes 1; decoding reads 1 and writes 4.
#include "blocks.hpp"
#include "levels.cuh"
#include "called.hpp"
#include "smallfloat.hpp"

using namespace gc;

namespace {

constexpr float LARGEST = 448;

inline uint32_t fp8_code(float y) { return E4M3::nearest(E4M3::saturated(y)) | is_negative(y) << 7; }

// c / 448 of a code, if it is a number. Its magnitude is k 2^e with k at most 15, so `level_ratio` divides it by
// 448 = 7 * 2^6 as it divides k by 7; the sign comes last, as level_ratio loses that of -0.
inline float fp8_share(uint32_t code) {
  const float value = E4M3::value(code & 0x7fu);
  return float_of(bits_of(level_ratio(value, LARGEST, 1.0f / LARGEST)) | (code & 0x80u) << 24);
}

// The codes of a part of a block whose largest magnitude is `top`. Where that counts as zero or is not finite, codes
// are zeros with the sign of x; of infinity and NaN without it.
inline void encode_part(const float* x, float top, int count, uint8_t* codes) {
  if (top >= TINY && top <= FLOAT_MAX) {
    GC_SIMD for (int i = 0; i < count; ++i) codes[i] = (uint8_t)fp8_code(x[i] / top * LARGEST);
  } else {
    GC_SIMD for (int i = 0; i < count; ++i) codes[i] = magnitude(x[i]) <= FLOAT_MAX ? is_negative(x[i]) << 7 : 0;
  }
}

}  // namespace

// Codes of x, (n,), and the scale of each block: its largest magnitude, or 0 if that is below TINY.
int64_t gc_fp8_encode(const float* x, int64_t n, const Segments& segments, uint8_t* codes, float* scales, int threads) {
  const auto part = [](const float* x, float top, int count, uint8_t* out) { encode_part(x, top, count, out); };
  encode_blocks(x, n, segments, codes, scales, threads, part);
  return 0;
}
GC_CALLED(gc_fp8_encode)

// (c / 448) a. Returns as decode_blocks.
int64_t gc_fp8_decode(const uint8_t* codes, const float* scales, int64_t n, const Segments& segments, float* out,
                      int threads) {
  const auto size = [](uint32_t code) { return (int32_t)(code & 0x7fu); };
  const auto share = [](uint32_t code) { return fp8_share(code); };
  return decode_blocks(codes, scales, n, segments, out, threads, E4M3::TOP, size, share);
}
GC_CALLED(gc_fp8_decode)
