// Blocks of 8-bit numbers with 128 levels on the CPU: `gcbench.ops.u8bit`.
//
// |c| is the nearest of the levels to |x| / a, a the block's largest magnitude; x' = sign(c) level[|c|] a. Bytes per
// element: encoding reads 4, or 8 where a block is longer than SHORT, and writes 1; decoding reads 1 and writes 4. The
// look-ups read 64 KiB of `steps`, but 4 KiB suffice for numbers between 2^-8 and 1.
#include "blocks.hpp"
#include "called.hpp"

using namespace gc;

namespace {

constexpr int TOP_CODE = 127;

// The codes of a part of a block whose largest magnitude is `top`; zeros if that counts as zero or is not finite.
inline void encode_part(const float* x, float top, int count, const int32_t* steps, int8_t* codes) {
  if (!(top >= TINY && top <= FLOAT_MAX)) {
    memset(codes, 0, count);
    return;
  }
  const auto code = [=](float value) {
    const uint32_t share = bits_of(magnitude(value) / top);
    const int32_t size = (steps[share >> 16] + (int32_t)(share & 0xffffu)) >> 16;
    return (int8_t)(is_negative(value) ? -size : size);
  };
  int i = 0;
  GC_ROLLED for (; i + STEP <= count; i += STEP) {
    ask_lines<HALF / 16>(x + i, 0);
    GC_SIMD for (int k = i; k < i + STEP; ++k) codes[k] = code(x[k]);
  }
  GC_SIMD for (int k = i; k < count; ++k) codes[k] = code(x[k]);
}

}  // namespace

// Codes of x, (n,), and the scale of each block: its largest magnitude, or 0 if that is below TINY.
int64_t gc_u8bit_encode(const float* x, int64_t n, const Segments& segments, const int32_t* steps, int8_t* codes,
                        float* scales, int threads) {
  const auto part = [=](const float* x, float top, int count, int8_t* out) { encode_part(x, top, count, steps, out); };
  encode_blocks(x, n, segments, codes, scales, threads, part);
  return 0;
}
GC_CALLED(gc_u8bit_encode)

// values[c + 128] a, `values` those of the codes -128 to 127. Returns as decode_blocks.
int64_t gc_u8bit_decode(const int8_t* codes, const float* scales, int64_t n, const Segments& segments,
                        const float* values, float* out, int threads) {
  const auto size = [](int32_t code) { return code < 0 ? -code : code; };
  const auto value = [=](int32_t code) { return values[code + TOP_CODE + 1]; };
  return decode_blocks(codes, scales, n, segments, out, threads, TOP_CODE, size, value);
}
GC_CALLED(gc_u8bit_decode)
