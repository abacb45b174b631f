// Shared by codecs of blocks with one scale each: the largest magnitude of a block, the loops that encode and decode
// blocks by it, and the check of scales.
#pragma once
#include <utility>

#include "loops.hpp"

namespace gc {

constexpr int64_t SHORT = 16 * TILE;  // elements of a block that the cache keeps between its two passes

constexpr int STEP = 64;  // elements for which lines are asked at once
constexpr int HALF = STEP / 2;

// The largest lane.
template <int H, int... LANE>
inline int32_t most_lane(VecI v, std::integer_sequence<int, LANE...> lanes) {
  if constexpr (H == 0) {
    return v[0];
  } else {
#if defined(__clang__)
    const VecI other = __builtin_shufflevector(v, v, (LANE ^ H)...);
#else
    const VecI other = __builtin_shuffle(v, VecI{(LANE ^ H)...});
#endif
    return most_lane<H / 2>(other > v ? other : v, lanes);
  }
}

// Looking for the largest magnitude and encoding ask for one half each of what lies two tiles ahead.
inline float largest(const float* x, int64_t n) {
  VecI tops = {};
  int64_t i = 0;
  GC_ROLLED for (; i + STEP <= n; i += STEP) {
    ask_lines<HALF / 16>(x + i + HALF, 0);
    GC_UNROLL
    for (int k = 0; k < STEP; k += WIDTH) {
      const VecI size = load_vector<VecI>(x + i + k) & 0x7fffffff;
      tops = size > tops ? size : tops;
    }
  }
  GC_ROLLED for (; i + WIDTH <= n; i += WIDTH) {
    const VecI size = load_vector<VecI>(x + i) & 0x7fffffff;
    tops = size > tops ? size : tops;
  }
  // Bits of magnitudes order as these do, and NaN above all.
  int32_t top = most_lane<WIDTH / 2>(tops, std::make_integer_sequence<int, WIDTH>());
  for (; i < n; ++i) {
    const int32_t size = (int32_t)(bits_of(x[i]) & 0x7fffffffu);
    top = size > top ? size : top;
  }
  return float_of((uint32_t)top);
}

// Whether the cache keeps every block between its two passes.
inline bool all_short(const Segments& segments) { return segments.longest() <= SHORT; }

// Codes of x, (n,), and the scale of each block: its largest magnitude, or 0 if that is below TINY.
// `encode_part(x, top, count, codes)` encodes a part of a block whose largest magnitude is `top`.
template <class Code, class F>
inline void encode_blocks(const float* x, int64_t n, const Segments& segments, Code* codes, float* scales, int threads,
                          F encode_part) {
  const int64_t m = segments.count;
  const bool twice = !all_short(segments);
  if (twice) gc_segment_absmax(x, segments, scales, threads);
  parallel(tiles_of(n), threads, [=, &segments](int64_t first, int64_t last) {
    int64_t at = segments.holding(first * TILE), known = -1;
    float top = 0;  // of block `known`
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE;
      const int count = (int)(n - start < TILE ? n - start : TILE);
      for_parts(segments, start, count, at, [&](int64_t s, int begin, int end) {
        if (s != known) {  // where threads share a block, each finds its largest magnitude
          const int64_t from = segments.offsets[s];
          top = twice ? scales[s] : largest(x + from, segments.offsets[s + 1] - from);
          if (from >= first * TILE) scales[s] = top;
          known = s;
        }
        encode_part(x + start + begin, top, end - begin, codes + start + begin);
      });
    }
  });
  for (int64_t s = 0; s < m; ++s) {
    if (scales[s] < TINY || !segments.length(s)) scales[s] = 0;
  }
}

// Whether these scales are valid: 0, or finite and at least TINY.
inline bool good_scales(const float* scales, int64_t m) {
  uint32_t wrong = 0;
#pragma omp simd reduction(| : wrong)
  for (int64_t s = 0; s < m; ++s) {
    const float scale = scales[s];
    wrong |= !((scale == 0) | ((scale >= TINY) & (scale <= FLOAT_MAX)));
  }
  return !wrong;
}

// Values of codes times their block's scale. `size(code)` is above `most` where no encoder sends the code, and 0 where
// the code stands for 0. Returns 1 if a scale is invalid, 2 if a code is, 3 if there are codes other than 0 in a block
// whose scale is 0.
template <class Code, class Size, class Value>
inline int64_t decode_blocks(const Code* codes, const float* scales, int64_t n, const Segments& segments, float* out,
                             int threads, int32_t most, Size size, Value value) {
  if (!good_scales(scales, segments.count)) return 1;
  const bool stream = n >= STREAM_FROM;
  int64_t bad = 0;
  parallel(tiles_of(n), threads, [=, &segments, &bad](int64_t first, int64_t last) {
    GC_ALIGNED float values[TILE];
    int32_t top = 0, coded = 0;
    int64_t at = segments.holding(first * TILE);
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE;
      const int count = (int)(n - start < TILE ? n - start : TILE);
      for_parts(segments, start, count, at, [&](int64_t s, int begin, int end) {
        const Code* part = codes + start;
        const float scale = scales[s];
        int32_t here = 0;
#pragma omp simd reduction(max : here)
        for (int i = begin; i < end; ++i) {
          const int32_t own = size(part[i]);
          here = own > here ? own : here;
        }
        GC_SIMD for (int i = begin; i < end; ++i) values[i] = value(part[i]) * scale;
        top = here > top ? here : top;
        coded |= scale == 0 ? here : 0;
      });
      write_tile(out + start, values, count, stream);
    }
    report(bad, top > most ? 2 : coded ? 3 : 0);
  });
  return bad;
}

}  // namespace gc
