// bfloat16 with coded exponents on the CPU: `gcbench.ops.lossless`. Exponents that follow in full have an order, so one
// thread does all. Bytes per element: encoding reads 2, or 4 of a float, and writes 11 / 8; decoding the other way.
#include <algorithm>

#include "blocks.hpp"
#include "called.hpp"
#include "half.hpp"

using namespace gc;

namespace {

constexpr int BITS = 3;
constexpr uint32_t ESCAPE = 7;
enum Fault { NEGATIVE = 1, COUNT = 2, CLOSE = 3, NO_TOP = 4, NOT_FINITE = 5 };  // FAULTS of the operation

inline uint32_t exponent_of(uint16_t value) { return value >> 7 & 0xffu; }

inline uint16_t code_of(uint16_t value) { return value; }
inline uint16_t code_of(float value) { return (uint16_t)half_code<true>(value); }

// The largest exponent of n values; that of floats is that of the largest, as rounding keeps their order.
inline uint32_t largest_exponent(const float* values, int64_t n) { return exponent_of(code_of(largest(values, n))); }

inline uint32_t largest_exponent(const uint16_t* values, int64_t n) {
  uint16_t top = 0;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < n; ++i) {
    const uint16_t size = values[i] & 0x7f80u;
    top = size > top ? size : top;
  }
  return top >> 7;
}

// Calls f(i) for the flags from `begin` to `end` that are 1, in order; the others are 0.
template <class F>
inline void each_escape(const uint8_t* flags, int begin, int end, F f) {
  for (int i = begin; i < end; i += 8) {
    uint64_t eight = 0;
    if (i + 8 <= end) {
      memcpy(&eight, flags + i, 8);
    } else {
      memcpy(&eight, flags + i, (size_t)(end - i));
    }
    for (; eight; eight &= eight - 1) f(i + __builtin_ctzll(eight) / 8);
  }
}

template <class T>
int64_t split(const T* values, int64_t n, const Segments& segments, uint8_t* fractions, uint32_t* words, uint8_t* tops,
              uint8_t* escaped) {
  int64_t at = 0, total = 0, current = -1;
  GC_ALIGNED uint8_t codes[TILE];
  GC_ALIGNED uint8_t escapes[TILE];
  GC_ALIGNED uint16_t part[TILE];
  std::fill_n(tops, segments.count, 0);
  for (int64_t start = 0; start < n; start += TILE) {
    const int count = (int)(n - start < TILE ? n - start : TILE);
    for_parts(segments, start, count, at, [&](int64_t s, int begin, int end) {
      if (s != current) {
        const int64_t from = segments.offsets[s];
        tops[s] = (uint8_t)largest_exponent(values + from, segments.offsets[s + 1] - from);
        current = s;
      }
      const uint16_t top = tops[s];
      GC_SIMD for (int i = begin; i < end; ++i) {
        part[i] = code_of(values[start + i]);
        const uint16_t below = (uint16_t)(top - (part[i] >> 7 & 0xffu));
        codes[i] = (uint8_t)(below < ESCAPE ? below : ESCAPE);
        escapes[i] = below >= ESCAPE;
        fractions[start + i] = (uint8_t)((part[i] >> 8 & 0x80u) | (part[i] & 0x7fu));
      }
    });
    each_escape(escapes, 0, count, [&](int i) { escaped[total++] = (uint8_t)exponent_of(part[i]); });
    pack_tile<BITS>([&](int i) { return (uint32_t)codes[i]; }, count, words + start / TILE * BITS * LANES);
  }
  return total;
}

inline void put(uint16_t& out, uint32_t code) { out = (uint16_t)code; }
inline void put(float& out, uint32_t code) { out = half_value<true>(code); }

template <class T>
int64_t join(const uint8_t* fractions, const uint32_t* words, const uint8_t* tops, const uint8_t* escaped,
             int64_t total, int64_t n, const Segments& segments, T* out) {
  int64_t at = 0, used = 0, current = -1;
  bool reached = true, lost = false, close = false;
  uint8_t negative = 0, infinite = 0;
  GC_ALIGNED uint8_t codes[TILE];
  GC_ALIGNED uint8_t escapes[TILE];
  GC_ALIGNED uint8_t exponents[TILE];
  for (int64_t start = 0; start < n; start += TILE) {
    const int count = (int)(n - start < TILE ? n - start : TILE);
    unpack_tile<BITS>(words + start / TILE * BITS * LANES, count,
                      [&](int i, uint32_t code) { codes[i] = (uint8_t)code; });
    for_parts(segments, start, count, at, [&](int64_t s, int begin, int end) {
      if (s != current) {
        lost |= !reached;
        reached = false;
        current = s;
      }
      const uint8_t top = tops[s];
      uint8_t zeros = 0, below = 0;
#pragma omp simd reduction(| : zeros, below)
      for (int i = begin; i < end; ++i) {
        zeros |= (uint8_t)(codes[i] == 0);
        below |= (uint8_t)((codes[i] > top) & (codes[i] < ESCAPE));
        escapes[i] = codes[i] == ESCAPE;
        exponents[i] = (uint8_t)(top - codes[i]);
      }
      reached |= zeros != 0;
      negative |= below;
      each_escape(escapes, begin, end, [&](int i) {
        const uint32_t exponent = used < total ? escaped[used] : 0;
        close |= exponent + ESCAPE > top;
        exponents[i] = (uint8_t)exponent;
        ++used;
      });
    });
#pragma omp simd reduction(| : infinite)
    for (int i = 0; i < count; ++i) {
      const uint32_t fraction = fractions[start + i], exponent = exponents[i];
      infinite |= (uint8_t)(exponent == 0xffu);
      put(out[start + i], (fraction & 0x80u) << 8 | exponent << 7 | (fraction & 0x7fu));
    }
  }
  lost |= !reached;
  if (negative || used != total) return negative ? NEGATIVE : COUNT;
  return close ? CLOSE : lost ? NO_TOP : infinite && sizeof(T) == sizeof(float) ? NOT_FINITE : 0;
}

}  // namespace

// Signs and fractions, packed codes, each segment's largest exponent, and the exponents that are escaped, for which
// there is room for n. `values`: floats if `single`, else bfloat16. Returns the number of the escaped.
int64_t gc_lossless_split(const void* values, int single, int64_t n, const Segments& segments, uint8_t* fractions,
                          uint32_t* words, uint8_t* tops, uint8_t* escaped) {
  return single ? split((const float*)values, n, segments, fractions, words, tops, escaped)
                : split((const uint16_t*)values, n, segments, fractions, words, tops, escaped);
}
GC_CALLED(gc_lossless_split)

// The values of these parts, floats if `single`, else bfloat16. Returns 0, or the first Fault.
int64_t gc_lossless_join(const uint8_t* fractions, const uint32_t* words, const uint8_t* tops, const uint8_t* escaped,
                         int64_t total, int single, int64_t n, const Segments& segments, void* out) {
  return single ? join(fractions, words, tops, escaped, total, n, segments, (float*)out)
                : join(fractions, words, tops, escaped, total, n, segments, (uint16_t*)out);
}
GC_CALLED(gc_lossless_join)
