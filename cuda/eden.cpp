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

// Signs of the bucket's elements. Tiles T = 4 k ... 4 k + 3 share the draws of tile k; bit 2 (T % 4) + j of a draw is
// the sign of rotation j.
class Signs {
 public:
  explicit Signs(const Key& key) : key_(key) {}

  // out = x with the signs of rotation j; x has the elements from `start` on. `out` may be x.
  void flip(const float* x, int64_t start, int64_t n, int j, float* out) {
    for (int64_t done = 0; done < n;) {
      const int64_t count = std::min<int64_t>(TILE - (key_.offset + start + done) % TILE, n - done);
      const Flipped flipped = signed_tile(x + done, start + done, j);
      GC_SIMD for (int i = 0; i < (int)count; ++i) out[done + i] = flipped.one(i);
      done += count;
    }
  }

  // out = H x with the signs of rotation j; `clean`: see `rotate`.
  void rotate(const float* x, int64_t start, int64_t n, int j, bool clean, float* out) {
    const bool whole = (key_.offset + start) % TILE + n <= TILE;
    if (!whole) flip(x, start, n, j, out);
    const auto turn = [&](auto from) { clean ? gc::rotate(from, n, out) : rotate_any(from, n, out); };
    whole ? turn(signed_tile(x, start, j)) : turn(Plain{out});
  }

 private:
  // The elements of x, which begin at `start`, up to the end of the tile.
  Flipped signed_tile(const float* x, int64_t start, int j) {
    const uint64_t at = key_.offset + start, tile = at / TILE;
    const int which = tile / SHARING % 2;
    if (tile / SHARING != drawn_[which]) draw_tile(key_, drawn_[which] = tile / SHARING, draws_[which]);
    return {x, draws_[which] + at % TILE, 31 - 2 * (int)(tile % SHARING) - j};
  }

  static constexpr int SHARING = 4;
  GC_ALIGNED uint32_t draws_[2][TILE];  // of two tiles that follow, as a block may need both for each rotation
  uint64_t drawn_[2] = {~(uint64_t)0, ~(uint64_t)0};
  const Key& key_;
};

// The sum of f(0) ... f(n - 1) in the order of `gcbench.ops.statistics._row_moments`, where that of a tile has the type
// of f's values; `tiles` has room for one value per tile.
template <class F>
double ordered_sum(F f, int64_t n, double* tiles) {
  GC_ALIGNED decltype(f(n)) v[TILE];
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
  float* z;
  uint32_t* codes;

  explicit Room(int64_t longest) : tiles(new double[tiles_of(longest) + 1]) {
    const int64_t apart = (longest + LINE - 1) / LINE * LINE + 5 * LINE;
    memory.reset(new float[2 * apart + TILE + LINE]);
    z = memory.get() + (-(uintptr_t)memory.get() / sizeof(float)) % LINE;
    codes = (uint32_t*)(z + apart);  // of one segment, and what is left of the tile before it
  }
};

// Elements of a table of N.
template <int N>
inline VecF look_up(const float* table, VecI index) {
#if defined(__AVX512F__)
  const __m512 first = _mm512_loadu_ps(table);
  if constexpr (N <= WIDTH) return (VecF)_mm512_permutexvar_ps((__m512i)index, first);
  return (VecF)_mm512_permutex2var_ps(first, (__m512i)index, _mm512_loadu_ps(table + WIDTH));
#elif defined(__AVX2__)
  if constexpr (N > 2 * WIDTH) return (VecF)_mm256_i32gather_ps(table, (__m256i)index, 4);
  const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), (__m256i)index);
  if constexpr (N <= WIDTH) return (VecF)low;
  const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + WIDTH), (__m256i)index);
  return (VecF)_mm256_blendv_ps(low, high, (__m256)(index << 28));
#else
  VecF result;
  for (int l = 0; l < WIDTH; ++l) result[l] = table[index[l]];
  return result;
#endif
}

// Whole vectors are coded and decoded: up to WIDTH - 1 elements beyond the last.
template <int BITS>
struct Code {
  static constexpr int WIDE = BITS, SIZE = 1 << BITS, ROOM = SIZE + WIDTH;
  float centroids[ROOM] = {}, edges[ROOM] = {};  // edges lie halfway between two centroids

  explicit Code(const float* positive) {
    for (int k = 0; k < SIZE; ++k) centroids[k] = k < SIZE / 2 ? -positive[SIZE / 2 - 1 - k] : positive[k - SIZE / 2];
    for (int k = 0; k + 1 < SIZE; ++k) edges[k] = (centroids[k] + centroids[k + 1]) / 2;
  }

  // Codes of the nearest centroids of y = z * factor, of ties the lower; y times its centroid replaces z. `reading`:
  // the input at the same place; what lies two tiles ahead is prefetched.
  void quantize(float* z, float factor, int64_t n, uint32_t* codes, const float* reading) const {
    const Code table = *this;  // which no store changes
    GC_ROLLED for (int64_t i = 0; i < n; i += WIDTH) {
      ask_lines<1>(reading + i, 0);
      const VecF y = load_vector<VecF>(z + i) * factor;
      VecI k = {};
      GC_UNROLL
      for (int half = SIZE / 2; half; half /= 2) k = y > look_up<SIZE>(table.edges + half - 1, k) ? k + half : k;
      const VecF product = look_up<SIZE>(table.centroids, k) * y;
      memcpy(z + i, &product, sizeof product);
      memcpy(codes + i, &k, sizeof k);
    }
  }

  // The centroids of codes times `scale`.
  void decode(const uint32_t* codes, float scale, int64_t n, float* values) const {
    const Code table = *this;
    GC_ROLLED for (int64_t i = 0; i < n; i += WIDTH) {
      const VecF c = look_up<SIZE>(table.centroids, load_vector<VecI>(codes + i)) * scale;
      memcpy(values + i, &c, sizeof c);
    }
  }

  // Codes of the segment that z holds, and its scale.
  float encode(float* z, int64_t n, double square, bool least, uint32_t* codes, double* tiles,
               const float* reading) const {
    double factor = square > 0 ? std::sqrt((double)n / square) : 0;
    factor = factor > (double)FLOAT_MAX ? (double)FLOAT_MAX : factor;
    quantize(z, (float)factor, n, codes, reading);
    const double along = ordered_sum([=](int64_t i) { return z[i]; }, n, tiles);
    double exact = square * factor / along;
    if (least) {
      decode(codes, 1.0f, n, z);
      exact = along / ordered_sum([=](int64_t i) { return (double)z[i] * z[i]; }, n, tiles) / factor;
    }
    const float scale = (float)(!(square > 0) ? 0.0 : exact > (double)FLOAT_MAX ? (double)FLOAT_MAX : exact);
    if (!(scale < TINY)) return scale;
    for (int64_t i = 0; i < n; ++i) codes[i] = SIZE / 2 - 1;
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

}  // namespace

// Packed codes of each rotated segment, and its scale. The address is that of the signs.
int64_t gc_eden_encode(const float* x, int64_t n, const Segments& segments, const int32_t* address, int bits,
                       const float* positive, int rotations, int least, uint32_t* words, float* scales, int threads) {
  const int64_t longest = segments.longest();
  const Key key = key_of(address);
  if (longest > GRAIN * TILE) threads = 1;  // each thread rotates all of the segments that its tiles meet
  for (int64_t s = 0; s < segments.count; ++s) {
    if (!segments.length(s)) scales[s] = 0;
  }
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    Room room(longest);
    with_code(bits, positive, [&](const auto& code) {
      constexpr int B = std::decay_t<decltype(code)>::WIDE;
      int64_t s = segments.holding(first * TILE), base = segments.offsets[s], done = base;
      Signs signs(key);
      for (int64_t start = first * TILE; start < last * TILE && start < n; start += TILE) {
        const int count = (int)(n - start < TILE ? n - start : TILE);
        for (; done < start + count; ++s) {
          if (base < start && start <= done) {
            memmove(room.codes, room.codes + (start - base), (done - start) * sizeof *room.codes);
            base = start;
          }
          const int64_t length = segments.offsets[s + 1] - done;
          double square = 0;
          for (bool clean : {false, true}) {
            for (int j = 0; j < rotations; ++j) {
              signs.rotate(j ? room.z : x + done, done, length, j, clean, room.z);
            }
            square = ordered_sum([&](int64_t i) { return (double)room.z[i] * room.z[i]; }, length, room.tiles.get());
            if (square < INFINITE) break;  // else there is NaN or infinity, maybe since an earlier rotation
          }
          const float scale = code.encode(room.z, length, square, least, room.codes + (done - base),
                                          room.tiles.get(), x + done);
          if (length && done >= first * TILE) scales[s] = scale;
          done += length;
        }
        const uint32_t* tile = room.codes + (start - base);
        pack_tile<B>([=](int i) { return tile[i]; }, count, words + start / TILE * B * LANES);
      }
    });
  });
  return 0;
}
GC_CALLED(gc_eden_encode)

// The inverse rotation of centroids times scales. Returns 1 if a scale is invalid, 3 if the address is, 2 if there are
// codes other than those of zeros in a segment whose scale is 0.
int64_t gc_eden_decode(const uint32_t* words, const float* scales, const int32_t* address, int64_t n,
                       const Segments& segments, int bits, const float* positive, int rotations, float* out,
                       int threads) {
  if (!good_scales(scales, segments.count)) return 1;
  for (int k = 0; k < 4; ++k) {
    if (address[k] < 0 || address[k] >> WORD_BITS) return 3;
  }
  const int64_t longest = segments.longest();
  const Key key = key_of(address);
  const bool stream = n >= STREAM_FROM;
  int64_t bad = 0;
  for_segments(segments, threads, [&](int64_t from, int64_t to) {
    if (from == to) return;
    Room room(longest);
    with_code(bits, positive, [&](const auto code) {
      GC_ALIGNED uint32_t codes[TILE + WIDTH] = {};
      int64_t unpacked = -1;  // the tile whose codes these are
      const uint32_t zero = (1u << (bits - 1)) - 1;
      Signs signs(key);
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
            unpacked = tile;
          }
          const int begin = (int)(i - first), end = (int)std::min<int64_t>(stop - first, TILE);
          if (scale == 0) {
            for (int k = begin; k < end; ++k) any |= codes[k] ^ zero;
          }
          code.decode(codes + begin, scale, end - begin, room.z + (i - start));
          i = first + end;
        }
        const bool large = scale > FLOAT_MAX / 8 / (float)(length + 1);  // sums may be beyond float32
        for (int j = rotations; j-- > 0;) {
          large ? rotate(Plain{room.z}, length, room.z) : rotate_any(Plain{room.z}, length, room.z);
          signs.flip(room.z, start, length, j, room.z);
        }
        for (int64_t i = 0; i < length; i += TILE) {
          write_tile(out + start + i, room.z + i, (int)std::min<int64_t>(length - i, TILE), stream);
        }
      }
      report(bad, any ? 2 : 0);
    });
  });
  return bad;
}
GC_CALLED(gc_eden_decode)
