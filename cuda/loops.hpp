// Shared code of the CPU loops: threads over tiles, values of segments, draws, packing. Included by *.cpp only.
//
// A loop processes tiles of 1024 elements. Values that differ between elements, such as the scale of a segment or a
// random draw, are expanded for one tile in first-level cache, so the inner loop is independent of segments and offsets
// and the compiler vectorizes it, for every instruction set. Rows are read in address order, and loops over rows stay
// rolled: unrolled, the loads of a tile defeat the prefetcher.
#pragma once
#include <stddef.h>

#include <memory>
#include <new>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__SSE2__)
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // gcc's own header, for values that are meant to be undefined
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
#endif

#include "common.cuh"

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

// The fence that non-temporal stores need before another thread reads.
static inline void end_stream() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Call f(first, last) for ranges of `tiles` tiles, of which LEAST are worth a thread, on up to `threads` threads. f may
// use non-temporal stores, and may throw std::bad_alloc.
template <int64_t LEAST = GRAIN, class F>
void parallel(int64_t tiles, int threads, F f) {
#if defined(_OPENMP)
  const int64_t useful = tiles / LEAST;
  if (threads > useful) threads = (int)useful;
  if (threads > 1) {
    bool failed = false;
#pragma omp parallel num_threads(threads)
    {
      const int64_t rank = omp_get_thread_num(), size = omp_get_num_threads();
      const int64_t first = tiles * rank / size, last = tiles * (rank + 1) / size;
      try {
        if (first < last) f(first, last);
      } catch (const std::bad_alloc&) {
#pragma omp atomic write
        failed = true;
      }
      end_stream();
    }
    if (failed) throw std::bad_alloc();
    return;
  }
#endif
  if (tiles > 0) f((int64_t)0, tiles);
  end_stream();
}

// Keep the least of the error numbers that threads report; 0 means success.
inline void report(int64_t& error, int64_t number) {
  if (!number) return;
#pragma omp critical
  if (!error || number < error) error = number;
}

// ---- segments --------------------------------------------------------------------------------------------------

// `gcbench.core.compressor.Segments`: where segments begin, and how many tiles (of their own) lie before each.
struct Segments {
  const int64_t* offsets;
  const int64_t* tiles;
  int64_t count;

  int64_t numel() const { return offsets[count]; }
  int64_t length(int64_t s) const { return offsets[s + 1] - offsets[s]; }
  int64_t longest() const {
    int64_t most = 0;
    for (int64_t s = 0; s < count; ++s) most = length(s) > most ? length(s) : most;
    return most;
  }

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

// Call f(segment, begin, end) for the parts of a tile of `count` elements; `s` holds its first, then its last one.
template <class F>
inline void for_parts(const Segments& segments, int64_t start, int count, int64_t& s, F f) {
  while (segments.offsets[s + 1] <= start) ++s;
  for (int begin = 0;; ++s) {
    const int64_t stop = segments.offsets[s + 1] - start;
    const int end = (int)(stop < count ? stop : count);
    if (begin < end) f(s, begin, end);
    if (stop >= count) return;
    begin = end;
  }
}

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

// Software prefetch: a tile is a page of memory, and hardware prefetchers stop at the end of a page. These functions
// prefetch the tile after the next one, some lines (of 16 floats) at a time, spread over the work on the current tile,
// as a processor handles few outstanding requests. A prefetch beyond the end of a tensor reads nothing.
template <int LINES>
static inline void ask_lines(const float* tile, int first) {
  GC_UNROLL
  for (int k = first; k < first + LINES; ++k) __builtin_prefetch(tile + 2 * TILE + 16 * k, 0, 2);
}

static inline void ask_ahead(const float* tile) { ask_lines<TILE / 16>(tile, 0); }

constexpr int64_t APART = 1 << 16;  // elements from which on it pays to read at several places in turn

// Call f(i) for multiples i of STEP, at four places of the array in turn, as memory is read faster so than at one. The
// order must not matter to f. Returns how many of the first of the `n` elements, of which there are many, are done.
template <int STEP, class F>
static inline int64_t from_four(int64_t n, F f) {
  const int64_t part = n / (4 * STEP) * STEP;
  GC_ROLLED for (int64_t i = 0; i < part; i += STEP) {
    GC_UNROLL
    for (int place = 0; place < 4; ++place) f(place * part + i);
  }
  return 4 * part;
}

// ---- random numbers --------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
typedef __m512i Blocks;
static inline Blocks every(uint64_t value) { return _mm512_set1_epi64((int64_t)value); }
// The high halves of `product`, xor a xor b.
static inline Blocks mixed(Blocks product, Blocks a, Blocks b) {
  return _mm512_ternarylogic_epi64(_mm512_srli_epi64(product, 32), a, b, 0x96);
}
static inline Blocks product(Blocks a, Blocks b) { return _mm512_mul_epu32(a, b); }
#elif defined(__AVX2__)
typedef __m256i Blocks;
static inline Blocks every(uint64_t value) { return _mm256_set1_epi64x((int64_t)value); }
static inline Blocks mixed(Blocks product, Blocks a, Blocks b) {
  return _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(product, 32), a), b);
}
static inline Blocks product(Blocks a, Blocks b) { return _mm256_mul_epu32(a, b); }
#endif
#if defined(__AVX2__)
constexpr int AT_ONCE = sizeof(Blocks) / 16;  // vectors that keep the multipliers busy and fit in registers

// Philox of the blocks whose words 0 and 1 are x and y, with the other two from the key. A word lies in the low half
// of 64 bits, whose high half holds leftovers, before as after.
static inline void philox_blocks(const Key& key, Blocks (&x)[AT_ONCE], Blocks (&y)[AT_ONCE], Blocks (&z)[AT_ONCE],
                                 Blocks (&w)[AT_ONCE]) {
  const Blocks m0 = every(PHILOX_M0), m1 = every(PHILOX_M1);
  for (int h = 0; h < AT_ONCE; ++h) {
    z[h] = every(key.step);
    w[h] = every(key.who);
  }
  uint32_t a = (uint32_t)key.seed, b = (uint32_t)(key.seed >> 32);
  GC_UNROLL
  for (int round = 0; round < 10; ++round) {
    const Blocks ka = every(a), kb = every(b);
    GC_UNROLL
    for (int h = 0; h < AT_ONCE; ++h) {
      const Blocks p0 = product(x[h], m0), p1 = product(z[h], m1);
      x[h] = mixed(p1, y[h], ka);
      z[h] = mixed(p0, w[h], kb);
      y[h] = p1;
      w[h] = p0;
    }
    a += PHILOX_W0;
    b += PHILOX_W1;
  }
}
#endif

// out[(4 q + i) * 32 + l] = word i of block q of drawing lane l of the tile `tile`, q = 0 and 1. `reading` is the
// tile that the caller reads next, or null: half of the tile after the next is prefetched meanwhile.
static inline void philox_tile(const Key& key, uint64_t tile, uint32_t* out, const float* reading) {
  const uint64_t lane = tile * LANES;
  const uint32_t low = (uint32_t)lane, high = (uint32_t)(lane >> 32 << 8);
#if defined(__AVX512F__)
  // Even and odd lanes apart.
  const __m512i count = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int q = 0; q < 2; ++q) {
    if (reading) ask_lines<16>(reading, 16 * q);
    __m512i x[4], y[4], z[4], w[4];
    for (int h = 0; h < 4; ++h) {
      const __m512i lanes = _mm512_add_epi32(_mm512_set1_epi32((int)(low + h / 2 * 16)), count);
      x[h] = h % 2 ? _mm512_srli_epi64(lanes, 32) : lanes;
      y[h] = every(high | q);
    }
    philox_blocks(key, x, y, z, w);
    for (int h = 0; h < 4; h += 2) {
      const __m512i* words[4] = {x + h, y + h, z + h, w + h};
      for (int i = 0; i < 4; ++i) {
        const __m512i odd = _mm512_slli_epi64(words[i][1], 32);
        _mm512_store_si512(out + (4 * q + i) * LANES + 8 * h, _mm512_mask_mov_epi32(words[i][0], 0xaaaa, odd));
      }
    }
  }
#elif defined(__AVX2__)
  const __m256i count = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  for (int q = 0; q < 2; ++q) {
    for (int l = 0; l < LANES; l += 8) {
      if (reading) ask_lines<4>(reading, 16 * q + l / 2);
      const __m256i lanes = _mm256_add_epi32(_mm256_set1_epi32((int)(low + l)), count);
      __m256i x[2] = {lanes, _mm256_srli_epi64(lanes, 32)}, y[2] = {every(high | q), every(high | q)}, z[2], w[2];
      philox_blocks(key, x, y, z, w);
      const __m256i* words[4] = {x, y, z, w};
      for (int i = 0; i < 4; ++i) {
        const __m256i odd = _mm256_slli_epi64(words[i][1], 32);
        _mm256_store_si256((__m256i*)(out + (4 * q + i) * LANES + l), _mm256_blend_epi32(words[i][0], odd, 0xaa));
      }
    }
  }
#else
  const uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
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

// The draws of drawing tile `tile`, in the order of its elements; `reading` as above, and if `both` the other half.
static inline void draw_tile(const Key& key, uint64_t tile, uint32_t* out, const float* reading = nullptr,
                             bool both = true) {
  GC_ALIGNED uint32_t words[8 * LANES];
  philox_tile(key, tile, words, reading);
  for (int q = 0; q < 2; ++q) {
    GC_ROLLED for (int i = 0; i < 4; ++i) {
      const uint32_t *word = words + (4 * q + i) * LANES, *after = words + (4 * q + ((i + 1) & 3)) * LANES;
      uint32_t* o = out + (16 * q + 4 * i) * LANES;
      if (reading && both) ask_lines<4>(reading, 32 + 4 * (4 * q + i));
      GC_SIMD for (int l = 0; l < LANES; ++l) {
        const uint32_t w = word[l], a = after[l];  // window24, with as few shifts as there can be
        o[l] = w >> 8;
        o[LANES + l] = w & 0xffffffu;
        o[2 * LANES + l] = (w << 8 & 0xffff00u) | a >> 24;
        o[3 * LANES + l] = (w << 16 & 0xff0000u) | a >> 16;
      }
    }
  }
}

// A register's elements.
#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

typedef uint32_t VecU __attribute__((vector_size(4 * WIDTH)));
typedef int32_t VecI __attribute__((vector_size(4 * WIDTH)));
typedef float VecF __attribute__((vector_size(4 * WIDTH)));

template <class V, class T>
static inline V load_vector(const T* from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

#if defined(__AVX512F__)
inline VecU or_and(VecU a, VecU b, VecU c) {
  return (VecU)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0xf8);
}
inline VecU xor_and(VecU a, VecU b, VecU c) {
  return (VecU)_mm512_ternarylogic_epi32((__m512i)a, (__m512i)b, (__m512i)c, 0x78);
}
#else
inline VecU or_and(VecU a, VecU b, VecU c) { return a | (b & c); }
inline VecU xor_and(VecU a, VecU b, VecU c) { return a ^ (b & c); }
#endif

// Turns independent draws into correlated ones (`gcbench.ops.random`), for tiles in increasing order.
class Correlation {
 public:
  explicit Correlation(const Key& key)
      : shared_{key.seed, 0, key.step, SHARED << 24 | key.who >> 24, 1},
        workers_(key.workers ? key.workers : 1),
        rank_((key.who & 0xffffffu) % workers_),
        width_((1u << 24) / workers_) {}

  bool active() const { return workers_ > 1; }

  // The draws of tile `tile`, which `draws` has independently; mirrored where x, if it is not null, is negative.
  void apply(uint64_t tile, uint32_t* draws, const float* x) {
    if (tile / PERIOD != at_) philox_tile(shared_, at_ = tile / PERIOD, words_, nullptr);
    const uint32_t *first = words_ + tile % PERIOD * LANES, *increment = words_ + (tile + 1) % PERIOD * LANES;
    VecU place[LANES / WIDTH], by[LANES / WIDTH];
    memcpy(place, first, sizeof place);
    memcpy(by, increment, sizeof by);
    const uint32_t n = workers_, strata = 0x1000000u - width_, high = width_ >> 12, low = width_ & 0xfffu;
    const int shift = __builtin_ctz(n);
    const bool even = (n & (n - 1)) == 0;  // then `strata` has the bits of a stratum's number
    for (int v = 0; even && v < LANES / WIDTH; ++v) place[v] += rank_ * width_;
    GC_ROLLED for (uint32_t* row = draws; row < draws + TILE; row += LANES) {
      GC_UNROLL
      for (int v = 0; v < LANES / WIDTH; ++v) {
        VecU u = load_vector<VecU>(row + v * WIDTH);
        if (even) {
          u = or_and(u >> shift, place[v], VecU{} + strata);
        } else {  // products of 48 bits, shifted right by 24, from those of their halves
          const VecU y = place[v] & 0xffffffu, s = ((y >> 12) * n + ((y & 0xfffu) * n >> 12)) >> 12, k = s + rank_;
          const VecU more = u >> 12, less = u & 0xfffu;
          const VecU within = more * high + ((more * low + less * high + (less * low >> 12)) >> 12);
          u = (k < n ? k : k - n) * width_ + within;
        }
        if (x) u = xor_and(u, (VecU)(load_vector<VecI>(x + (row - draws) + v * WIDTH) >> 31), VecU{} + 0xffffffu);
        memcpy(row + v * WIDTH, &u, sizeof u);
        place[v] += by[v];
      }
    }
  }

 private:
  static constexpr uint32_t SHARED = 7;  // gcbench.core.purposes
  static constexpr uint64_t PERIOD = 8;  // tiles that share the words of one
  GC_ALIGNED uint32_t words_[PERIOD * LANES];
  const Key shared_;
  const uint32_t workers_, rank_, width_;
  uint64_t at_ = ~(uint64_t)0;
};

// The draws of one tile of the tensor at hand after the other, wherever in the bucket it begins.
class Draws {
 public:
  Draws(const Key& key, int64_t first_tile)
      : key_(key), correlation_(key), next_(key.offset / TILE + first_tile), skew_(key.offset % TILE) {
    if (skew_) draw(buffer_ + TILE, nullptr, nullptr, true);
  }

  // The 1024 draws of the next tile. `reading` is the tile of the input that they are for, or null; the tile after the
  // next is prefetched (see ask_lines), of which only the first half unless `both`: the caller then prefetches the
  // second half while its own loop runs.
  const uint32_t* tile(const float* reading = nullptr, bool both = true) {
    if (skew_) memcpy(buffer_, buffer_ + TILE, sizeof buffer_ / 2);
    draw(skew_ ? buffer_ + TILE : buffer_, nullptr, reading, both);
    return buffer_ + skew_;
  }

  // As tile, the draws for `count` elements of x, where correlated ones are mirrored for those that are negative:
  // codecs round magnitudes.
  const uint32_t* tile_for(const float* x, int count, const float* reading = nullptr, bool both = true) {
    if (!skew_ && count == TILE) {
      draw(buffer_, x, reading, both);
      return buffer_;
    }
    tile(reading, both);
    if (correlation_.active()) {
      uint32_t* draws = buffer_ + skew_;
      GC_SIMD for (int i = 0; i < count; ++i) draws[i] ^= (0u - is_negative(x[i])) & 0xffffffu;
    }
    return buffer_ + skew_;
  }

 private:
  void draw(uint32_t* out, const float* x, const float* reading, bool both) {
    draw_tile(key_, next_, out, reading, both);
    if (correlation_.active()) correlation_.apply(next_, out, x);
    ++next_;
  }

  GC_ALIGNED uint32_t buffer_[2 * TILE];
  const Key& key_;
  Correlation correlation_;
  uint64_t next_;
  int skew_;
};

// ---- packing ---------------------------------------------------------------------------------------------------

// Pack codes[row * lanes + lane], `lanes` lanes of 32 rows, of 1 to 16 bits; and back. In packing.cpp.
void pack_codes(int bits, const uint32_t* codes, int lanes, uint32_t* out);
void unpack_codes(int bits, const uint32_t* words, int lanes, uint32_t* codes);

// Pack the codes code(0) ... code(1023), below 2^B, of a whole tile. If B divides 32, the second half for `reading`
// (see philox_tile) is prefetched unless it is null, a line with each row.
template <int B, class F>
static inline void pack_whole(F code, uint32_t* out, const float* reading = nullptr) {
  if constexpr (32 % B == 0) {
    constexpr int ROWS = 32 / B;
    GC_ROLLED for (int k = 0; k < B; ++k) {
      GC_ALIGNED uint32_t words[LANES] = {};
      GC_ROLLED for (int j = 0; j < ROWS; ++j) {
        const int i = (k * ROWS + j) * LANES;
        if (reading) ask_lines<1>(reading, 32 + k * ROWS + j);
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
static inline void pack_tile(F code, int count, uint32_t* out, const float* reading = nullptr) {
  if (count == TILE) {
    pack_whole<B>(code, out, reading);
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
template <class T>
static inline T halve(T* v, int width) {
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

// Sum as `gcbench.ops.statistics._row_moments` sums the sums of tiles; `values` is overwritten.
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

constexpr int64_t STREAM_FROM = 1 << 22;  // elements from which on an output is too large to stay in a cache

// Whether an output of n elements is written by non-temporal stores, which bypass the caches and need not read the
// lines first.
//
// Other stores wait in the store buffer behind non-temporal ones. So a loop that uses them keeps its sums in registers,
// and writes vectors straight to the output, lines in the order of their addresses.
static inline bool streams(const float* out, int64_t n) { return n >= STREAM_FROM && ((uintptr_t)out & 63) == 0; }

static inline void put_vector(float* out, VecF v, bool stream) {
#if defined(__SSE2__)
  if (stream) {
#if defined(__AVX512F__)
    _mm512_stream_ps(out, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(out, (__m256)v);
#else
    _mm_stream_ps(out, (__m128)v);
#endif
    return;
  }
#endif
  (void)stream;
  memcpy(out, &v, sizeof v);
}

// Write `count` floats or integers; if `stream`, whole lines past the caches.
template <class T>
static inline void write_tile(T* out, const T* tile, int count, bool stream) {
  static_assert(sizeof(T) == sizeof(float), "elements of 4 bytes");
  constexpr int LINE = 16;
  int i = 0;
  if (stream) {
    const int head = (int)(-(uintptr_t)out / sizeof(T) % LINE);  // elements to the first line that begins here
    i = head < count ? head : count;
    memcpy(out, tile, i * sizeof *out);
    GC_ROLLED for (; i + LINE <= count; i += LINE) {
      GC_UNROLL
      for (int k = 0; k < LINE; k += WIDTH) put_vector((float*)(out + i + k), load_vector<VecF>(tile + i + k), true);
    }
  }
  memcpy(out + i, tile + i, (count - i) * sizeof *out);
}

// Divide a tile's sums by the number of workers. A product with the reciprocal of a power of two is the quotient.
static inline void divide_tile(float* tile, int count, float divisor) {
  if ((bits_of(divisor) & 0x7fffffu) == 0) {
    const float factor = 1.0f / divisor;
    GC_SIMD for (int i = 0; i < count; ++i) tile[i] *= factor;
  } else {
    GC_SIMD for (int i = 0; i < count; ++i) tile[i] /= divisor;
  }
}

// Write `number` lines of 64 bytes by non-temporal stores, to and from addresses that are multiples of 64.
static inline void stream_lines(uint32_t* out, const uint32_t* from, int number) {
#if defined(__SSE2__)
  for (int i = 0; i < 16 * number; i += 16) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i*)(out + i), _mm512_load_si512((const __m512i*)(from + i)));
#else
    for (int k = 0; k < 16; k += 4) {
      _mm_stream_si128((__m128i*)(out + i + k), _mm_load_si128((const __m128i*)(from + i + k)));
    }
#endif
  }
#else
  memcpy(out, from, 64 * number);
#endif
}

}  // namespace gc

// The largest magnitude of each segment, (m,). In statistics.cpp.
int64_t gc_segment_absmax(const float* x, const gc::Segments& segments, float* absmax, int threads);
