// Block floating point on the CPU: `gcbench.ops.blockfloat`.
//
// Encoding expands each block's scale for one tile and divides by it, or multiplies by the inverse of a power of two,
// which gives the same bits; decoding multiplies. Bytes per element: encoding reads 4, or 8 where a scale needs the
// whole tensor first, and writes 1 or 1/2; decoding reads that and writes 4.
#include "blocks.hpp"
#include "called.hpp"
#include "smallfloat.hpp"

using namespace gc;

namespace {

constexpr float INFINITE = __builtin_inff();
constexpr float NV_TOP = 448.0f, NV_UNIT = NV_TOP * 6.0f;
constexpr int NV = 16, MX = 2 * NV;  // elements of a block

inline bool sent(float top) { return top >= TINY && top <= FLOAT_MAX; }

// ---- largest magnitudes ----------------------------------------------------------------------------------------

// Halve the lanes that belong to each block: in a first half of the result for the blocks of a, in the other for b's.
template <int H, int... LANE>
inline VecI halved(VecI a, VecI b, std::integer_sequence<int, LANE...>) {
  constexpr auto from = [](int l) { return l % (WIDTH / 2) / H * 2 * H + l % H + l / (WIDTH / 2) * WIDTH; };
#if defined(__clang__)
  const VecI low = __builtin_shufflevector(a, b, from(LANE)...), high = __builtin_shufflevector(a, b, from(LANE) + H...);
#else
  const VecI low = __builtin_shuffle(a, b, VecI{from(LANE)...}), high = __builtin_shuffle(a, b, VecI{from(LANE) + H...});
#endif
  return low > high ? low : high;
}

// Bits of the largest magnitudes of COUNT blocks, WIDTH / COUNT lanes each, of which the largest counts.
template <int COUNT>
inline VecI largest_of(const float* x) {
  if constexpr (COUNT == 1) {
    VecI top = {};
    for (int i = 0; i < NV; i += WIDTH) {
      const VecI size = load_vector<VecI>(x + i) & 0x7fffffff;
      top = size > top ? size : top;
    }
    return top;
  } else {
    const VecI a = largest_of<COUNT / 2>(x), b = largest_of<COUNT / 2>(x + COUNT / 2 * NV);
    return halved<WIDTH / COUNT>(a, b, std::make_integer_sequence<int, WIDTH>());
  }
}

inline float largest_block(const float* x) {
  return float_of((uint32_t)most_lane<WIDTH / 2>(largest_of<1>(x), std::make_integer_sequence<int, WIDTH>()));
}

// Largest magnitudes of blocks of NV elements.
inline void largest_blocks(const float* x, int blocks, float* tops) {
  int b = 0;
  GC_ROLLED for (; b + WIDTH <= blocks; b += WIDTH) {
    const VecI size = largest_of<WIDTH>(x + b * NV);
    memcpy(tops + b, &size, sizeof size);
  }
  for (; b < blocks; ++b) tops[b] = largest_block(x + b * NV);
}

// ---- scales that are powers of two -----------------------------------------------------------------------------

// The exponent of the largest value of E.
template <class E>
constexpr int exponent_of() {
  return (int)((E::REBASE + (E::TOP << E::SHIFT)) >> 23) - 127;
}

inline float power(uint32_t byte) { return float_of(byte << 23); }  // 0 for 0

// The inverse scales of elements in blocks that are segments, one tile after the other, and the blocks' scales. `tile`
// returns whether any scale is 0; its inverse is then `UNSENT`.
template <class E>
struct PowerScales {
  const float* x;
  const Segments& segments;
  const float* tops;  // of each segment, or null: then they are computed here
  uint8_t* scales;
  int64_t first, at, known = -1;
  float inverse = 0;

  static constexpr float UNSENT = 0;
  static float scaled(float x, float inverse) { return x * inverse; }

  PowerScales(const float* x, const Segments& segments, const float* tops, uint8_t* scales, int64_t first_tile)
      : x(x), segments(segments), tops(tops), scales(scales), first(first_tile * TILE), at(segments.holding(first)) {}

  static uint32_t byte_of(float top) { return sent(top) ? (bits_of(top) >> 23) - exponent_of<E>() : 0; }

  // Whether the segments of a tile are blocks of MX elements.
  bool regular(int64_t start, int count) {
    while (segments.offsets[at + 1] <= start) ++at;
    if (tops || count % MX || segments.count - at < count / MX) return false;
    int64_t other = 0;
    for (int b = 0; b <= count / MX; ++b) other |= segments.offsets[at + b] ^ (start + b * MX);
    return !other;
  }

  bool tile(int64_t start, int count, float* inverses) {
    bool zeros = false;
    if (regular(start, count)) {
      GC_ALIGNED float top[TILE / NV];
      largest_blocks(x + start, count / NV, top);
      for (int b = 0; b < count / MX; ++b, ++at) {
        const uint32_t left = bits_of(top[2 * b]), right = bits_of(top[2 * b + 1]);  // of NaN: above all others
        const uint32_t byte = byte_of(float_of(left > right ? left : right));
        scales[at] = (uint8_t)byte;
        zeros |= !byte;
        const float inverse = byte ? power(254 - byte) : UNSENT;
        GC_SIMD for (int i = 0; i < MX; ++i) inverses[b * MX + i] = inverse;
      }
      --at;
      return zeros;
    }
    for_parts(segments, start, count, at, [&](int64_t s, int begin, int end) {
      if (s != known) {  // where threads share a block, each finds its largest magnitude
        const int64_t from = segments.offsets[s];
        const float top = tops ? tops[s] : largest(x + from, segments.offsets[s + 1] - from);
        const uint32_t byte = byte_of(top);
        if (from >= first) scales[s] = (uint8_t)byte;
        inverse = byte ? power(254 - byte) : UNSENT;
        known = s;
      }
      zeros |= inverse == UNSENT;
      GC_SIMD for (int i = begin; i < end; ++i) inverses[i] = inverse;
    });
    return zeros;
  }
};

// ---- scales that are e4m3 --------------------------------------------------------------------------------------

inline int64_t blocks_of(int64_t elements) { return (elements + NV - 1) / NV; }

// Call f(segment, number of its first block, begin, end) for the parts of one tile after the other.
struct BlockNumbers {
  const Segments& segments;
  int64_t at, counted = 0, base = 0;  // blocks in the first `counted` segments

  BlockNumbers(const Segments& segments, int64_t first_tile)
      : segments(segments), at(segments.holding(first_tile * TILE)) {}

  template <class F>
  void parts(int64_t start, int count, F f) {
    for_parts(segments, start, count, at, [&](int64_t s, int begin, int end) {
      for (; counted < s; ++counted) base += blocks_of(segments.offsets[counted + 1] - segments.offsets[counted]);
      f(s, base, begin, end);
    });
  }
};

// Repeat each scale for its block's elements, but the first `skip`, of which the first block has more.
inline void spread_blocks(const float* scales, int skip, int count, float* values) {
  int i = skip ? (NV - skip < count ? NV - skip : count) : 0;
  for (int k = 0; k < i; ++k) values[k] = *scales;
  scales += skip > 0;
  GC_ROLLED for (; i + NV <= count; i += NV, ++scales) {
    GC_SIMD for (int k = 0; k < NV; ++k) values[i + k] = *scales;
  }
  for (; i < count; ++i) values[i] = *scales;
}

// The divisors of elements in blocks of `NV`.
struct SharedScales {
  const float *x, *tops;
  uint8_t* scales;
  BlockNumbers numbers;

  static constexpr float UNSENT = INFINITE;
  static float scaled(float x, float divisor) { return x / divisor; }

  SharedScales(const float* x, const Segments& segments, const float* tops, uint8_t* scales, int64_t first_tile)
      : x(x), tops(tops), scales(scales), numbers(segments, first_tile) {}

  bool tile(int64_t start, int count, float* divisors) {
    bool zeros = false;
    numbers.parts(start, count, [&](int64_t s, int64_t base, int begin, int end) {
      constexpr int MOST = TILE / NV + 2;
      GC_ALIGNED float scale[MOST];
      uint32_t bytes[MOST];
      const int64_t segment = numbers.segments.offsets[s], length = numbers.segments.offsets[s + 1] - segment;
      const int64_t from = start + begin - segment, to = start + end - segment, first = from / NV;
      const int blocks = (int)(blocks_of(to) - first);
      const float *part = x + segment + first * NV, top = tops[s], unit = top / NV_UNIT;
      const int whole = (int)((to < length - length % NV ? blocks : length / NV - first));
      largest_blocks(part, whole, scale);
      if (whole < blocks) {
        float rest[NV] = {};
        memcpy(rest, part + whole * NV, length % NV * sizeof *rest);
        scale[whole] = largest_block(rest);
      }
      GC_SIMD for (int b = 0; b < blocks; ++b) {
        const uint32_t nearest = E4M3::nearest(E4M3::saturated(scale[b] / top * NV_TOP)), byte = nearest ? nearest : 1;
        bytes[b] = top > 0 ? byte : 0;
        scale[b] = top > 0 ? E4M3::value(byte) * unit : INFINITE;
      }
      for (int b = 0; b < blocks; ++b) {
        if ((first + b) * NV >= from || !first) scales[base + first + b] = (uint8_t)bytes[b];
      }
      zeros |= top == 0;
      spread_blocks(scale, (int)(from % NV), end - begin, divisors + begin);
    });
    return zeros;
  }
};

// ---- elements --------------------------------------------------------------------------------------------------

// Codes of x over its scale. A code of zero has no sign.
template <class E, class Scales>
void encode(const float* x, int64_t n, const Key* key, uint8_t* out, int threads, const Scales& make) {
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    auto scales = make(first);
    const Key none{};
    Draws draws(key ? *key : none, first);
    GC_ALIGNED float by[TILE], cleared[TILE];
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      if (scales.tile(t * TILE, count, by)) {
        GC_SIMD for (int i = 0; i < count; ++i) cleared[i] = by[i] != scales.UNSENT ? part[i] : 0;
        part = cleared;
      }
      const auto write = [&](auto code) {
        const auto signed_code = [&](int i) {
          const float y = scales.scaled(part[i], by[i]);
          const uint32_t size = code(E::saturated(y), i);
          return size | (size ? is_negative(y) << (E::BITS - 1) : 0);
        };
        if constexpr (E::BITS == 8) {
          uint8_t* codes = out + t * TILE;
          GC_SIMD for (int i = 0; i < count; ++i) codes[i] = (uint8_t)signed_code(i);
        } else {
          pack_tile<E::BITS>(signed_code, count, (uint32_t*)out + t * E::BITS * LANES);
        }
      };
      if (key) {
        const uint32_t* draw = draws.tile();
        write([=](uint32_t size, int i) { return E::stochastic(size, draw[i]); });
      } else {
        write([](uint32_t size, int) { return E::nearest(size); });
      }
    }
  });
}

// Values of codes times their scales. `scales.tile(start, count, row)` lays out the scales of a tile's elements, and
// returns whether any is 0.
// Returns 2 if a code is not a number, 3 if there are codes other than zero in a block whose scale is 0.
template <class E, class Scales>
int64_t decode(const uint8_t* in, int64_t n, float* out, int threads, const Scales& make) {
  const bool stream = n >= STREAM_FROM;
  int64_t bad = 0;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    auto scales = make(first);
    GC_ALIGNED float values[TILE], row[TILE] = {};
    int32_t most = 0, coded = 0;  // codes without their signs
    for (int64_t t = first; t < last; ++t) {
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      const bool zeros = scales.tile(t * TILE, count, row);
      if constexpr (E::BITS == 8) {
        const uint8_t* codes = in + t * TILE;
#pragma omp simd reduction(max : most)
        for (int i = 0; i < count; ++i) {
          const int32_t size = codes[i] & E::SIZE;
          most = size > most ? size : most;
          values[i] = E::value(codes[i]) * row[i];
        }
        for (int i = 0; zeros && i < count; ++i) coded |= row[i] == 0 ? codes[i] & E::SIZE : 0;
      } else {
        const uint32_t* words = (const uint32_t*)in + t * E::BITS * LANES;
        unpack_tile<E::BITS>(words, count, [&](int i, uint32_t code) {
          const float value = E::value(code) * row[i], high = value > FLOAT_MAX ? FLOAT_MAX : value;
          values[i] = high < -FLOAT_MAX ? -FLOAT_MAX : high;
        });
        if (zeros) {
          GC_ALIGNED uint32_t codes[TILE];
          unpack_tile<E::BITS>(words, count, [&](int i, uint32_t code) { codes[i] = code & E::SIZE; });
          for (int i = 0; i < count; ++i) coded |= row[i] == 0 ? codes[i] : 0;
        }
      }
      write_tile(out + t * TILE, values, count, stream);
    }
    report(bad, most > (int32_t)E::TOP ? 2 : coded ? 3 : 0);
  });
  return bad;
}

template <class E>
int64_t mx_encode(const float* x, int64_t n, const Segments& segments, const Key* key, uint8_t* words, uint8_t* scales,
                  int threads) {
  std::unique_ptr<float[]> tops;
  if (!all_short(segments)) {
    tops.reset(new float[segments.count]);
    gc_segment_absmax(x, segments, tops.get(), threads);
  }
  for (int64_t s = 0; s < segments.count; ++s) {
    if (!segments.length(s)) scales[s] = 0;
  }
  encode<E>(x, n, key, words, threads,
            [&](int64_t first) { return PowerScales<E>(x, segments, tops.get(), scales, first); });
  return 0;
}

// Each element's power of two, one tile after the other.
struct PowerRow {
  const Segments& segments;
  const uint8_t* scales;
  int64_t at;

  bool tile(int64_t start, int count, float* row) {
    bool zeros = false;
    for_parts(segments, start, count, at, [&](int64_t s, int begin, int end) {
      const float scale = power(scales[s]);
      zeros |= !scales[s];
      GC_SIMD for (int i = begin; i < end; ++i) row[i] = scale;
    });
    return zeros;
  }
};

template <class E>
int64_t mx_decode(const uint8_t* words, const uint8_t* scales, int64_t n, const Segments& segments, float* out,
                  int threads) {
  constexpr int LEAST = 27 - exponent_of<E>(), MOST = 254 - exponent_of<E>();
  uint32_t wrong = 0;
#pragma omp simd reduction(| : wrong)
  for (int64_t s = 0; s < segments.count; ++s) wrong |= scales[s] && (scales[s] < LEAST || scales[s] > MOST);
  if (wrong) return 1;
  return decode<E>(words, n, out, threads,
                   [&](int64_t first) { return PowerRow{segments, scales, segments.holding(first * TILE)}; });
}

// Each element's scale: its block's e4m3 value times its segment's unit.
struct SharedRow {
  const float* tops;
  const uint8_t* scales;
  BlockNumbers numbers;

  bool tile(int64_t start, int count, float* row) {
    bool zeros = false;
    numbers.parts(start, count, [&](int64_t s, int64_t base, int begin, int end) {
      float values[TILE / NV + 2];
      const int64_t segment = numbers.segments.offsets[s];
      const int64_t from = start + begin - segment, to = start + end - segment, first = from / NV;
      const int blocks = (int)(blocks_of(to) - first);
      const float unit = tops[s] / NV_UNIT;
      GC_SIMD for (int b = 0; b < blocks; ++b) values[b] = E4M3::value(scales[base + first + b]) * unit;
      zeros |= unit == 0;
      spread_blocks(values, (int)(from % NV), end - begin, row + begin);
    });
    return zeros;
  }
};

}  // namespace

// Codes of x over powers of two, of 8 or 4 `bits`, and the exponents of these, one for each segment.
int64_t gc_mx_encode(const float* x, int64_t n, const Segments& segments, int bits, int stochastic, const Key& key,
                     void* words, uint8_t* scales, int threads) {
  const auto encode = bits == 8 ? mx_encode<E4M3> : mx_encode<E2M1>;
  return encode(x, n, segments, stochastic ? &key : nullptr, (uint8_t*)words, scales, threads);
}
GC_CALLED(gc_mx_encode)

// Codes times their scales. Returns 1 if a scale is invalid, 2 if a code is NaN, 3 if there are codes other than zero
// in a block whose scale is 0.
int64_t gc_mx_decode(const void* words, const uint8_t* scales, int64_t n, const Segments& segments, int bits,
                     float* out, int threads) {
  const auto decode = bits == 8 ? mx_decode<E4M3> : mx_decode<E2M1>;
  return decode((const uint8_t*)words, scales, n, segments, out, threads);
}
GC_CALLED(gc_mx_decode)

// Codes of x over block scales, the e4m3 codes of these, and each segment's largest magnitude.
int64_t gc_nv_encode(const float* x, int64_t n, const Segments& segments, int stochastic, const Key& key,
                     uint32_t* words, uint8_t* scales, float* tops, int threads) {
  gc_segment_absmax(x, segments, tops, threads);
  for (int64_t s = 0; s < segments.count; ++s) tops[s] = sent(tops[s]) ? tops[s] : 0;
  encode<E2M1>(x, n, stochastic ? &key : nullptr, (uint8_t*)words, threads,
               [&](int64_t first) { return SharedScales(x, segments, tops, scales, first); });
  return 0;
}
GC_CALLED(gc_nv_encode)

// Codes times their scales. Returns as gc_mx_decode.
int64_t gc_nv_decode(const uint32_t* words, const uint8_t* scales, const float* tops, int64_t n,
                     const Segments& segments, float* out, int threads) {
  if (!good_scales(tops, segments.count)) return 1;
  for (int64_t s = 0, b = 0; s < segments.count; ++s) {
    const int64_t stop = b + blocks_of(segments.length(s));
    for (; b < stop; ++b) {
      if (scales[b] > E4M3::TOP || (scales[b] > 0) != (tops[s] > 0)) return 1;
    }
  }
  return decode<E2M1>((const uint8_t*)words, n, out, threads,
                      [&](int64_t first) { return SharedRow{tops, scales, BlockNumbers(segments, first)}; });
}
GC_CALLED(gc_nv_decode)
