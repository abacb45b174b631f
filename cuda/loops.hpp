// What the CPU loops share: threads over tiles, values of segments, draws, packing. Included by *.cpp only.
//
// A loop works through tiles of 1024 elements. What differs between elements, such as the scale of a segment or a
// random draw, is laid out for one tile in first-level cache, so a tile's loop knows neither segments nor offsets and
// is vectorised by the compiler; the same source serves every instruction set. Rows are read in address order, and
// loops over rows stay rolled: unrolled, the loads of a tile defeat the prefetcher.
#pragma once
#include <stddef.h>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__SSE2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc's own header, for values that are meant to be undefined
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "common.cuh"

// Every function that Python calls: what it returns is 0, or what its comment says.
#define GC_API extern "C" __attribute__((visibility("default")))
#define GC_SIMD _Pragma("omp simd")
#define GC_ROLLED _Pragma("GCC unroll 1")
#define GC_ALIGNED alignas(64)

namespace gc {

constexpr int64_t GRAIN = 16;  // tiles that are worth a thread

inline int64_t tiles_of(int64_t n) { return (n + TILE - 1) / TILE; }

// Codes of `bits` bits: the words that the first `n` take.
inline int64_t words_of(int64_t n, int bits) {
  return bits * (n / TILE * LANES + (n % TILE + LANES - 1) / LANES);
}

// Call f(first, last) for ranges of tiles that cover n elements, on up to `threads` threads.
template <class F>
void parallel(int64_t tiles, int threads, F f) {
#if defined(_OPENMP)
  const int64_t useful = tiles / GRAIN;
  if (threads > useful) threads = (int)useful;
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    {
      const int64_t rank = omp_get_thread_num(), size = omp_get_num_threads();
      const int64_t first = tiles * rank / size, last = tiles * (rank + 1) / size;
      if (first < last) f(first, last);
    }
    return;
  }
#endif
  if (tiles > 0) f((int64_t)0, tiles);
}

// ---- segments --------------------------------------------------------------------------------------------------

// `gcbench.compressor.Segments.table`: where segments begin, and how many tiles (of their own) lie before each.
struct Segments {
  const int64_t* offsets;
  const int64_t* tiles;
  int64_t count;

  Segments(const int64_t* table, int64_t m) : offsets(table), tiles(table + m + 1), count(m) {}

  // The last segment that begins at or before `element`: the one that holds it, as empty ones end there too.
  int64_t holding(int64_t element) const { return last_not_above(offsets, element); }
  int64_t of_tile(int64_t tile) const { return last_not_above(tiles, tile); }

 private:
  int64_t last_not_above(const int64_t* edges, int64_t value) const {
    int64_t low = 0, high = count;  // edges[low] <= value < edges[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (edges[middle] <= value ? low : high) = middle;
    }
    return low;
  }
};

// K values of each segment, repeated for the elements of one tile after the other. `value` is called with a segment
// and an array of K floats, which it fills.
template <int K, class F>
struct Spread {
  GC_ALIGNED float row[K][TILE];

  Spread(const Segments& segments, int64_t first_element, F value)
      : segments_(segments), value_(value), at_(segments.holding(first_element)) {}

  // Lay out the elements [start, start + count); starts increase.
  void tile(int64_t start, int count) {
    const int64_t* offsets = segments_.offsets;
    while (offsets[at_ + 1] <= start) ++at_;
    if (offsets[at_ + 1] >= start + count) {
      if (whole_ != at_) fill(0, TILE);
      whole_ = at_;
      return;
    }
    for (int done = 0;; ++at_) {
      const int64_t end = offsets[at_ + 1] - start;
      fill(done, (int)(end < count ? end : count));
      if (end >= count) return;
      done = (int)end;
    }
  }

 private:
  void fill(int begin, int end) {
    float values[K];
    value_(at_, values);
    for (int k = 0; k < K; ++k) {
      GC_SIMD for (int i = begin; i < end; ++i) row[k][i] = values[k];
    }
  }

  const Segments& segments_;
  F value_;
  int64_t at_, whole_ = -1;
};

template <int K, class F>
Spread<K, F> spread_values(const Segments& segments, int64_t first_element, F value) {
  return Spread<K, F>(segments, first_element, value);
}

// ---- reading ahead ---------------------------------------------------------------------------------------------

// A tile is a page of memory, beyond which no hardware fetches ahead. These ask for the tile after the next of what is
// read, so many lines (of 16 floats) at a time as work lies between: a processor follows few requests at once. What is
// beyond the end of a tensor is not read by that.
template <int LINES>
static inline void ask_lines(const float* tile, int first) {
  GC_UNROLL
  for (int k = first; k < first + LINES; ++k) __builtin_prefetch(tile + 2 * TILE + 16 * k, 0, 2);
}

static inline void ask_ahead(const float* tile) { ask_lines<TILE / 16>(tile, 0); }

// ---- random numbers --------------------------------------------------------------------------------------------

// out[(4 q + i) * 32 + l] = word i of block q of drawing lane l of the tile `tile`, q = 0 and 1. `reading` is the tile
// that the caller reads next, or null: half of the one after the next is asked for meanwhile.
static inline void philox_tile(const Key& key, uint64_t tile, uint32_t* out, const float* reading) {
  const uint64_t lane = tile * LANES;
  const uint32_t low = (uint32_t)lane, high = (uint32_t)(lane >> 32 << 8);
  const uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
#if defined(__AVX512F__)
  // Even and odd lanes apart, each in the low halves of 64-bit lanes, whose high halves hold leftovers.
  const __m512i m0 = _mm512_set1_epi64(PHILOX_M0), m1 = _mm512_set1_epi64(PHILOX_M1);
  const __m512i step = _mm512_set1_epi64(key.step), who = _mm512_set1_epi64(key.who);
  const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int q = 0; q < 2; ++q) {
    if (reading) ask_lines<16>(reading, 16 * q);
    __m512i x[4], y[4], z[4], w[4];
    for (int h = 0; h < 4; h += 2) {
      x[h] = _mm512_add_epi32(_mm512_set1_epi32((int)(low + 8 * h)), count);
      x[h + 1] = _mm512_srli_epi64(x[h], 32);
    }
    for (int h = 0; h < 4; ++h) {
      y[h] = _mm512_set1_epi64(high | q);
      z[h] = step;
      w[h] = who;
    }
    uint32_t a = k0, b = k1;
    GC_UNROLL
    for (int round = 0; round < 10; ++round) {
      const __m512i ka = _mm512_set1_epi64(a), kb = _mm512_set1_epi64(b);
      GC_UNROLL
      for (int h = 0; h < 4; ++h) {
        const __m512i p0 = _mm512_mul_epu32(x[h], m0), p1 = _mm512_mul_epu32(z[h], m1);
        x[h] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p1, 32), y[h], ka, 0x96);
        z[h] = _mm512_ternarylogic_epi64(_mm512_srli_epi64(p0, 32), w[h], kb, 0x96);
        y[h] = p1;
        w[h] = p0;
      }
      a += PHILOX_W0;
      b += PHILOX_W1;
    }
    for (int h = 0; h < 4; h += 2) {
      const __m512i* words[4] = {x + h, y + h, z + h, w + h};
      for (int i = 0; i < 4; ++i) {
        const __m512i odd = _mm512_slli_epi64(words[i][1], 32);
        _mm512_store_si512(out + (4 * q + i) * LANES + 8 * h, _mm512_mask_mov_epi32(words[i][0], 0xaaaa, odd));
      }
    }
  }
#elif defined(__AVX2__)
  const __m256i m0 = _mm256_set1_epi64x(PHILOX_M0), m1 = _mm256_set1_epi64x(PHILOX_M1);
  const __m256i step = _mm256_set1_epi64x(key.step), who = _mm256_set1_epi64x(key.who);
  const __m256i count = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int q = 0; q < 2; ++q) {
    for (int l = 0; l < LANES; l += 8) {
      if (reading) ask_lines<4>(reading, 16 * q + l / 2);
      __m256i x[2], y[2], z[2], w[2];
      x[0] = _mm256_add_epi32(_mm256_set1_epi32((int)(low + l)), count);
      x[1] = _mm256_srli_epi64(x[0], 32);
      for (int h = 0; h < 2; ++h) {
        y[h] = _mm256_set1_epi64x(high | q);
        z[h] = step;
        w[h] = who;
      }
      uint32_t a = k0, b = k1;
      GC_UNROLL
      for (int round = 0; round < 10; ++round) {
        const __m256i ka = _mm256_set1_epi64x(a), kb = _mm256_set1_epi64x(b);
        GC_UNROLL
        for (int h = 0; h < 2; ++h) {
          const __m256i p0 = _mm256_mul_epu32(x[h], m0), p1 = _mm256_mul_epu32(z[h], m1);
          x[h] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), y[h]), ka);
          z[h] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), w[h]), kb);
          y[h] = p1;
          w[h] = p0;
        }
        a += PHILOX_W0;
        b += PHILOX_W1;
      }
      const __m256i* words[4] = {x, y, z, w};
      for (int i = 0; i < 4; ++i) {
        const __m256i odd = _mm256_slli_epi64(words[i][1], 32);
        _mm256_store_si256((__m256i*)(out + (4 * q + i) * LANES + l), _mm256_blend_epi32(words[i][0], odd, 0xaa));
      }
    }
  }
#else
  for (int q = 0; q < 2; ++q) {
    if (reading) ask_lines<16>(reading, 16 * q);
    GC_SIMD for (int l = 0; l < LANES; ++l) {
      const Block b = philox(Block{low + l, high | q, key.step, key.who}, k0, k1);
      uint32_t* o = out + 4 * q * LANES + l;
      o[0] = b.x;
      o[LANES] = b.y;
      o[2 * LANES] = b.z;
      o[3 * LANES] = b.w;
    }
  }
#endif
}

// The draws of drawing tile `tile`, in the order of its elements; `reading` as above, and the other half.
static inline void draw_tile(const Key& key, uint64_t tile, uint32_t* out, const float* reading = nullptr) {
  GC_ALIGNED uint32_t words[8 * LANES];
  philox_tile(key, tile, words, reading);
  for (int q = 0; q < 2; ++q) {
    GC_ROLLED for (int i = 0; i < 4; ++i) {
      const uint32_t *word = words + (4 * q + i) * LANES, *after = words + (4 * q + ((i + 1) & 3)) * LANES;
      uint32_t* o = out + (16 * q + 4 * i) * LANES;
      if (reading) ask_lines<4>(reading, 32 + 4 * (4 * q + i));
      GC_SIMD for (int l = 0; l < LANES; ++l) {
        o[l] = window24(word[l], after[l], 0);
        o[LANES + l] = window24(word[l], after[l], 1);
        o[2 * LANES + l] = window24(word[l], after[l], 2);
        o[3 * LANES + l] = window24(word[l], after[l], 3);
      }
    }
  }
}

// The draws of one tile of the tensor at hand after the other, wherever in the bucket it begins.
class Draws {
 public:
  Draws(const Key& key, int64_t first_tile)
      : key_(key), next_(key.offset / TILE + first_tile), skew_(key.offset % TILE) {
    if (skew_) draw_tile(key_, next_++, buffer_ + TILE);
  }

  // The 1024 draws of the next tile. `reading` is what they are for, if that comes from memory: see ask_lines.
  const uint32_t* tile(const float* reading = nullptr) {
    if (skew_) memcpy(buffer_, buffer_ + TILE, sizeof buffer_ / 2);
    draw_tile(key_, next_++, skew_ ? buffer_ + TILE : buffer_, reading);
    return buffer_ + skew_;
  }

 private:
  GC_ALIGNED uint32_t buffer_[2 * TILE];
  const Key& key_;
  uint64_t next_;
  int skew_;
};

// ---- packing ---------------------------------------------------------------------------------------------------

// Pack codes[row * lanes + lane], `lanes` lanes of 32 rows, of 1 to 16 bits; and back. In packing.cpp.
void pack_codes(int bits, const uint32_t* codes, int lanes, uint32_t* out);
void unpack_codes(int bits, const uint32_t* words, int lanes, uint32_t* codes);

// Pack the codes code(0) ... code(1023), below 2^B, of a whole tile.
template <int B, class F>
static inline void pack_whole(F code, uint32_t* out) {
  if constexpr (32 % B == 0) {
    constexpr int ROWS = 32 / B;
    GC_ROLLED for (int k = 0; k < B; ++k) {
      GC_ALIGNED uint32_t words[LANES] = {};
      GC_ROLLED for (int j = 0; j < ROWS; ++j) {
        const int i = (k * ROWS + j) * LANES;
        GC_SIMD for (int l = 0; l < LANES; ++l) words[l] = (words[l] >> B) | (code(i + l) << (32 - B));
      }
      memcpy(out + k * LANES, words, sizeof words);
    }
  } else {
    GC_ALIGNED uint32_t codes[TILE];
    GC_SIMD for (int i = 0; i < TILE; ++i) codes[i] = code(i);
    pack_codes(B, codes, LANES, out);
  }
}

// Pack code(0) ... code(count - 1) of a last tile that is shorter than 1024, and zeros up to whole lanes.
template <int B, class F>
static inline void pack_rest(F code, int count, uint32_t* out) {
  uint32_t codes[TILE];
  const int lanes = (count + LANES - 1) / LANES;
  for (int i = 0; i < count; ++i) codes[i] = code(i);
  for (int i = count; i < LANES * lanes; ++i) codes[i] = 0;
  pack_codes(B, codes, lanes, out);
}

template <int B, class F>
static inline void pack_tile(F code, int count, uint32_t* out) {
  if (count == TILE) {
    pack_whole<B>(code, out);
  } else {
    pack_rest<B>(code, count, out);
  }
}

// Call put(i, code i) for the codes of B bits in `lanes` lanes.
template <int B, class F>
static inline void unpack_lanes(const uint32_t* words, int lanes, F put) {
  constexpr uint32_t MASK = (1u << B) - 1;
  if constexpr (32 % B == 0) {
    constexpr int ROWS = 32 / B;
    GC_ROLLED for (int k = 0; k < B; ++k) {
      GC_ALIGNED uint32_t word[LANES];
      memcpy(word, words + k * lanes, lanes * sizeof *word);
      GC_ROLLED for (int j = 0; j < ROWS; ++j) {
        const int i = (k * ROWS + j) * lanes;
        GC_SIMD for (int l = 0; l < lanes; ++l) {
          put(i + l, word[l] & MASK);
          word[l] >>= B;
        }
      }
    }
  } else {
    GC_ALIGNED uint32_t codes[TILE];
    unpack_codes(B, words, lanes, codes);
    GC_SIMD for (int i = 0; i < 32 * lanes; ++i) put(i, codes[i]);
  }
}

// Call put(i, code i) for all codes that have room in a tile of `count`: whole lanes, i may reach beyond the count.
template <int B, class F>
static inline void unpack_tile(const uint32_t* words, int count, F put) {
  if (count == TILE) {
    unpack_lanes<B>(words, LANES, put);
  } else {
    unpack_lanes<B>(words, (count + LANES - 1) / LANES, put);
  }
}

// f(std::integral_constant-like tag) for a width that is known at run time: 1 to 16 bits.
template <int B>
struct Bits {
  static constexpr int value = B;
};

template <class F>
static inline void with_bits(int bits, F f) {
  switch (bits) {
#define GC_CASE(B) \
  case B:          \
    return f(Bits<B>());
    GC_CASE(1) GC_CASE(2) GC_CASE(3) GC_CASE(4) GC_CASE(5) GC_CASE(6) GC_CASE(7) GC_CASE(8)
    GC_CASE(9) GC_CASE(10) GC_CASE(11) GC_CASE(12) GC_CASE(13) GC_CASE(14) GC_CASE(15) GC_CASE(16)
#undef GC_CASE
  }
}

// ---- sums in a fixed order --------------------------------------------------------------------------------------

// Halve `width` (a power of two) values until one is left: i + width / 2 is added to i, two levels at a time.
static inline double halve(double* v, int width) {
  for (; width >= 32; width /= 4) {
    const int q = width / 4;
    GC_SIMD for (int i = 0; i < q; ++i) v[i] = (v[i] + v[i + 2 * q]) + (v[i + q] + v[i + 3 * q]);
  }
  if (width == 16) {
    GC_SIMD for (int i = 0; i < 8; ++i) v[i] += v[i + 8];
    width = 8;
  }
  if (width == 8) return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
  if (width == 4) return (v[0] + v[2]) + (v[1] + v[3]);
  return width == 2 ? v[0] + v[1] : v[0];
}

static inline int width_of(int64_t n) {
  if (n > TILE / 2) return TILE;
  int width = 1;
  while (width < n) width *= 2;
  return width;
}

// Sum as `gcbench.ops.reference._row_moments` sums the sums of tiles; `values` is overwritten.
static inline double halve_all(double* values, int64_t n) {
  while (n > 1) {
    GC_ALIGNED double row[TILE];
    const int width = width_of(n);
    int64_t rows = 0;
    for (int64_t start = 0; start < n; start += width) {
      for (int i = 0; i < width; ++i) row[i] = start + i < n ? values[start + i] : 0.0;
      values[rows++] = halve(row, width);
    }
    n = rows;
  }
  return values[0];
}

// ---- writing ---------------------------------------------------------------------------------------------------

constexpr int64_t STREAM_FROM = 1 << 22;  // elements of an output that no cache would keep for its reader

// Write one tile of floats, past the caches if `stream` and the address allows it: that saves reading it first.
static inline void write_tile(float* out, const float* tile, int count, bool stream) {
#if defined(__SSE2__)
  if (stream && count == TILE && ((uintptr_t)out & 63) == 0) {
    for (int i = 0; i < TILE; i += 16) {
#if defined(__AVX512F__)
      _mm512_stream_ps(out + i, _mm512_load_ps(tile + i));
#elif defined(__AVX2__)
      for (int k = 0; k < 16; k += 8) _mm256_stream_ps(out + i + k, _mm256_load_ps(tile + i + k));
#else
      for (int k = 0; k < 16; k += 4) _mm_stream_ps(out + i + k, _mm_load_ps(tile + i + k));
#endif
    }
    return;
  }
#endif
  memcpy(out, tile, count * sizeof *out);
}

// What streamed stores need before another thread reads.
static inline void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace gc
