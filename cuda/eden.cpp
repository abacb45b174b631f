// Blocks rotated at random, and their elements as centroids of N(0, 1), on the CPU: `gcbench.ops.eden`.
//
// A block is rotated, quantized and packed in the first-level cache. Bytes per element: encoding reads 4 and writes
// b / 8, decoding reads b / 8 and writes 4.
#include <memory>

#include "blocks.hpp"
#include "called.hpp"
#include "hadamard.hpp"

using namespace gc;

namespace {

constexpr int WORD_BITS = 24;
constexpr float INFINITE = __builtin_inff();

inline Key key_of(const int32_t* address) {
  const uint64_t seed = (uint64_t)address[1] << WORD_BITS | (uint32_t)address[0];
  return Key{seed, (uint64_t)address[3] << WORD_BITS | (uint32_t)address[2], 0, 0, 1};
}

// The draws of one segment after the other; bit j of a draw is the sign of rotation j.
class Signs {
 public:
  // `x`: the input that is read along with the draws, or null.
  Signs(const Key& key, int64_t first_tile, const float* x) : draws_(key, first_tile), tile_(first_tile - 1), x_(x) {}

  void of(int64_t start, int64_t stop, uint32_t* signs) {
    for (int64_t i = start; i < stop;) {
      while (tile_ < i / TILE) {
        ++tile_;
        current_ = draws_.tile(x_ ? x_ + tile_ * TILE : nullptr);
      }
      const int64_t end = (tile_ + 1) * TILE < stop ? (tile_ + 1) * TILE : stop;
      memcpy(signs + (i - start), current_ + i % TILE, (end - i) * sizeof *signs);
      i = end;
    }
  }

 private:
  Draws draws_;
  int64_t tile_;
  const float* x_;
  const uint32_t* current_ = nullptr;
};

inline void flip(const float* x, const uint32_t* signs, int j, int64_t n, float* out) {
  GC_SIMD for (int64_t i = 0; i < n; ++i) out[i] = float_of(bits_of(x[i]) ^ signs[i] >> j << 31);
}

// The sum of f(0) ... f(n - 1) in the order of `gcbench.ops.statistics._row_moments`; `tiles` has room for one value
// per tile.
template <class F>
double ordered_sum(F f, int64_t n, double* tiles) {
  GC_ALIGNED double v[TILE];
  int64_t count = 0;
  for (int64_t start = 0; start < n; start += TILE) {
    if (n - start >= TILE) {
      constexpr int PART = TILE / 4;
      GC_SIMD for (int i = 0; i < PART; ++i) {
        const int64_t k = start + i;
        v[i] = (f(k) + f(k + 2 * PART)) + (f(k + PART) + f(k + 3 * PART));
      }
      tiles[count++] = halve(v, PART);
    } else {
      const int width = n < TILE ? width_of(n) : TILE, some = (int)(n - start);
      GC_SIMD for (int i = 0; i < some; ++i) v[i] = f(start + i);
      for (int i = some; i < width; ++i) v[i] = 0;
      tiles[count++] = halve(v, width);
    }
  }
  return count ? halve_all(tiles, count) : 0;
}

// Memory for segments of up to `longest` elements. Arrays begin with lines of the cache, and none a multiple of 4 KB
// after another, where stores to one delay loads of the other.
struct Room {
  static constexpr int64_t LINE = 16;
  std::unique_ptr<float[]> memory;
  std::unique_ptr<double[]> tiles;
  float *z = nullptr, *nearest = nullptr;
  uint32_t *signs = nullptr, *codes = nullptr;

  explicit Room(int64_t longest) : tiles(new (std::nothrow) double[tiles_of(longest) + 1]) {
    const int64_t apart = (longest + LINE - 1) / LINE * LINE + 5 * LINE;
    memory.reset(new (std::nothrow) float[4 * apart + TILE + LINE]);
    if (!memory) return;
    z = memory.get() + (-(uintptr_t)memory.get() / sizeof(float)) % LINE;
    nearest = z + apart;
    signs = (uint32_t*)(nearest + apart);
    codes = signs + apart;  // of one segment, and what is left of the tile before it
  }
  explicit operator bool() const { return memory && tiles; }
};

// Elements of a table that fits a register.
inline VecI look_up(VecI table, VecI index) {
#if defined(__AVX512F__)
  return (VecI)_mm512_permutexvar_epi32((__m512i)index, (__m512i)table);
#elif defined(__AVX2__)
  return (VecI)_mm256_permutevar8x32_epi32((__m256i)table, (__m256i)index);
#else
  VecI result;
  for (int l = 0; l < WIDTH; ++l) result[l] = table[index[l] & (WIDTH - 1)];
  return result;
#endif
}

template <int BITS>
struct Code {
  static constexpr int WIDE = BITS, HALF = 1 << (BITS - 1);
  float centroid[HALF];
  int32_t edge[HALF];  // bits of what lies halfway between two

  explicit Code(const float* positive) {
    memcpy(centroid, positive, sizeof centroid);
    for (int k = 0; k + 1 < HALF; ++k) edge[k] = (int32_t)bits_of((positive[k] + positive[k + 1]) / 2);
  }

  // The nearest centroids of z * factor, which replaces z; of ties the lower.
  void quantize(float* z, float factor, int64_t n, uint32_t* codes, float* nearest) const {
    const Code table = *this;  // which no store changes
    int64_t i = 0;
    if constexpr (HALF <= WIDTH) {
      VecI edges = {}, centroids = {};
      for (int e = 0; e < HALF; ++e) {
        edges[e] = e + 1 < HALF ? edge[e] : 0;
        centroids[e] = (int32_t)bits_of(centroid[e]);
      }
      GC_ROLLED for (; i + WIDTH <= n; i += WIDTH) {
        const VecF y = load_vector<VecF>(z + i) * factor;
        const VecI low = (VecI)y <= 0, size = ((VecI)y & 0x7fffffff) - low;
        VecI k = {};
        GC_UNROLL
        for (int half = HALF / 2; half; half /= 2) k -= (size > look_up(edges, k + (half - 1))) * half;
        const VecF c = (VecF)(look_up(centroids, k) ^ (low & INT32_MIN));
        const VecI number = (k ^ low) + HALF;
        memcpy(z + i, &y, sizeof y);
        memcpy(codes + i, &number, sizeof number);
        memcpy(nearest + i, &c, sizeof c);
      }
    }
    GC_SIMD for (int64_t j = i; j < n; ++j) {
      const float y = z[j] * factor;
      const int32_t bits = (int32_t)bits_of(y), low = bits <= 0, size = (bits & 0x7fffffff) + low;
      int32_t k = 0;
      float c = table.centroid[0];
      GC_UNROLL
      for (int e = 0; e + 1 < HALF; ++e) {
        k += size > table.edge[e];
        c = size > table.edge[e] ? table.centroid[e + 1] : c;
      }
      c = low ? -c : c;
      z[j] = y;
      codes[j] = (uint32_t)(low ? HALF - 1 - k : HALF + k);
      nearest[j] = c;
    }
  }

  // The centroids of the codes of a tile.
  void decode(const uint32_t* codes, float* values) const {
    if constexpr (HALF <= WIDTH) {
      VecI centroids = {};
      for (int e = 0; e < HALF; ++e) centroids[e] = (int32_t)bits_of(centroid[e]);
      GC_ROLLED for (int i = 0; i < TILE; i += WIDTH) {
        const VecI k = load_vector<VecI>(codes + i) - HALF, low = k < 0;
        const VecI c = look_up(centroids, k ^ low) ^ (low & INT32_MIN);
        memcpy(values + i, &c, sizeof c);
      }
    } else {
      const Code table = *this;
      GC_SIMD for (int i = 0; i < TILE; ++i) values[i] = table.value(codes[i]);
    }
  }

  float value(uint32_t code) const {
    const int32_t k = (int32_t)code - HALF, size = k < 0 ? -1 - k : k;
    float c = centroid[0];
    GC_UNROLL
    for (int e = 1; e < HALF; ++e) c = size == e ? centroid[e] : c;
    return k < 0 ? -c : c;
  }

  // Codes of the segment that z holds, and its scale.
  float encode(float* z, int64_t n, double square, bool least, uint32_t* codes, float* nearest, double* tiles) const {
    double factor = square > 0 ? std::sqrt((double)n / square) : 0;
    factor = factor > (double)FLOAT_MAX ? (double)FLOAT_MAX : factor;
    quantize(z, (float)factor, n, codes, nearest);
    const double along = ordered_sum([=](int64_t i) { return (double)(nearest[i] * z[i]); }, n, tiles);
    const float* squared = least ? nearest : z;
    const double size = ordered_sum([=](int64_t i) { return (double)squared[i] * squared[i]; }, n, tiles);
    const double exact = square > 0 ? (least ? along / size : size / along) / factor : 0;
    const float scale = (float)(exact > (double)FLOAT_MAX ? (double)FLOAT_MAX : exact);
    if (!(scale < TINY)) return scale;
    for (int64_t i = 0; i < n; ++i) codes[i] = HALF - 1;
    return 0;
  }
};

template <class F>
void with_code(int bits, const float* positive, F f) {
  switch (bits) {
    case 1: return f(Code<1>(positive));
    case 2: return f(Code<2>(positive));
    case 3: return f(Code<3>(positive));
    case 4: return f(Code<4>(positive));
    case 5: return f(Code<5>(positive));
  }
}

int64_t longest_of(const Segments& segments) {
  int64_t longest = 0;
  for (int64_t s = 0; s < segments.count; ++s) {
    longest = std::max(longest, segments.offsets[s + 1] - segments.offsets[s]);
  }
  return longest;
}

}  // namespace

// Packed codes of each rotated segment, and its scale. The address is that of the signs.
GC_API int64_t gc_eden_encode(const float* x, int64_t n, const int64_t* table, int64_t m, const int32_t* address,
                              int bits, const float* positive, int rotations, int least, uint32_t* words,
                              float* scales, int threads) {
  const Segments segments(table, m);
  const int64_t longest = longest_of(segments);
  const Key key = key_of(address);
  if (longest > GRAIN * TILE) threads = 1;  // each thread rotates all of the segments that its tiles meet
  for (int64_t s = 0; s < m; ++s) {
    if (segments.offsets[s] == segments.offsets[s + 1]) scales[s] = 0;
  }
  bool failed = false;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    Room room(longest);
    if (!room) {
#pragma omp atomic write
      failed = true;
      return;
    }
    with_code(bits, positive, [&](const auto& code) {
      constexpr int B = std::decay_t<decltype(code)>::WIDE;
      int64_t s = segments.holding(first * TILE), base = segments.offsets[s], done = base;
      Signs signs(key, done / TILE, x);
      for (int64_t start = first * TILE; start < last * TILE && start < n; start += TILE) {
        const int count = (int)(n - start < TILE ? n - start : TILE);
        for (; done < start + count; ++s) {
          if (base < start && start <= done) {
            memmove(room.codes, room.codes + (start - base), (done - start) * sizeof *room.codes);
            base = start;
          }
          const int64_t length = segments.offsets[s + 1] - done;
          signs.of(done, done + length, room.signs);
          double square = 0;
          for (bool clean : {false, true}) {
            for (int j = 0; j < rotations; ++j) {
              flip(j ? room.z : x + done, room.signs, j, length, room.z);
              (clean ? rotate : rotate_any)(room.z, length, room.z);
            }
            square = ordered_sum([&](int64_t i) { return (double)room.z[i] * room.z[i]; }, length, room.tiles.get());
            if (square < INFINITE) break;  // else there is NaN or infinity, maybe since an earlier rotation
          }
          const float scale = code.encode(room.z, length, square, least, room.codes + (done - base), room.nearest,
                                          room.tiles.get());
          if (length && done >= first * TILE) scales[s] = scale;
          done += length;
        }
        const uint32_t* tile = room.codes + (start - base);
        pack_tile<B>([=](int i) { return tile[i]; }, count, words + start / TILE * B * LANES);
      }
    });
  });
  return failed ? NO_MEMORY : 0;
}
GC_CALLED(gc_eden_encode)

// The inverse rotation of centroids times scales. Returns 1 if a scale is invalid, 3 if the address is, 2 if there are
// codes other than those of zeros in a segment whose scale is 0.
GC_API int64_t gc_eden_decode(const uint32_t* words, const float* scales, const int32_t* address, int64_t n,
                              const int64_t* table, int64_t m, int bits, const float* positive, int rotations,
                              float* out, int threads) {
  const Segments segments(table, m);
  if (!good_scales(scales, m)) return 1;
  for (int k = 0; k < 4; ++k) {
    if (address[k] < 0 || address[k] >> WORD_BITS) return 3;
  }
  const int64_t longest = longest_of(segments);
  const Key key = key_of(address);
  const bool stream = n >= STREAM_FROM;
  bool failed = false, coded = false;
  for_segments(segments, threads, [&](int64_t from, int64_t to) {
    if (from == to) return;
    Room room(longest);
    if (!room) {
#pragma omp atomic write
      failed = true;
      return;
    }
    with_code(bits, positive, [&](const auto code) {
      GC_ALIGNED uint32_t codes[TILE] = {};
      GC_ALIGNED float values[TILE];
      int64_t unpacked = -1;  // the tile whose codes these are
      const uint32_t zero = (1u << (bits - 1)) - 1;
      Signs signs(key, segments.offsets[from] / TILE, nullptr);
      uint32_t any = 0;
      for (int64_t s = from; s < to; ++s) {
        const int64_t start = segments.offsets[s], stop = segments.offsets[s + 1], length = stop - start;
        const float scale = scales[s];
        for (int64_t i = start; i < stop;) {
          const int64_t tile = i / TILE, first = tile * TILE;
          if (tile != unpacked) {
            const int count = (int)(n - first < TILE ? n - first : TILE);
            constexpr int B = std::decay_t<decltype(code)>::WIDE;
            unpack_tile<B>(words + tile * B * LANES, count, [&](int k, uint32_t c) { codes[k] = c; });
            code.decode(codes, values);
            unpacked = tile;
          }
          const int begin = (int)(i - first), end = (int)std::min<int64_t>(stop - first, TILE);
          if (scale == 0) {
            for (int k = begin; k < end; ++k) any |= codes[k] ^ zero;
          }
          float* part = room.z + (i - start) - begin;
          GC_SIMD for (int k = begin; k < end; ++k) part[k] = values[k] * scale;
          i = first + end;
        }
        signs.of(start, stop, room.signs);
        const bool large = scale > FLOAT_MAX / 8 / (float)(length + 1);  // sums may be beyond float32
        for (int j = rotations; j-- > 0;) {
          (large ? rotate : rotate_any)(room.z, length, room.z);
          flip(room.z, room.signs, j, length, room.z);
        }
        for (int64_t i = 0; i < length; i += TILE) {
          write_tile(out + start + i, room.z + i, (int)std::min<int64_t>(length - i, TILE), stream);
        }
      }
      if (stream) end_stream();
      if (any) {
#pragma omp atomic write
        coded = true;
      }
    });
  });
  return failed ? NO_MEMORY : coded ? 2 : 0;
}
GC_CALLED(gc_eden_decode)
