// Levels of a norm (QSGD) on a GPU: one warp per tile of 1024 elements, eight rows of 32 at a time.
//
// level_norms:  the largest magnitude or 2-norm of segments; reads 4 bytes per element.
// level_encode: code k or k + 1 with sign, (k / levels) * norm <= |x|; reads 4, writes bits / 8 bytes per element.
// level_codes:  the same as int32; reads 4, writes 4.
// level_decode: (code / levels) * norm; reads bits / 8, writes 4; with `onto` reads 4 more.
// level_mean:   the sum of count * value over payloads, divided; reads bits / 8 per payload, writes 4.
//
// Estimated, not measured: 1e8 elements at 4.3 TB/s and 4 bits take 0.093 ms for norms, 0.105 ms to encode, 0.105
// ms to decode, 0.198 ms to decode onto others and 0.186 ms for the mean of 8.
//
// A group of 256 elements in at most two segments is processed without branches: all loads are issued before the first
// value is used. Shorter segments are processed row by row, as is a group with a wrong guess of a level, about one in
// 2^13 / levels.
#include "means.cuh"

using namespace gc;

namespace {

constexpr int BAD_NORMS = 1, BAD_CODES = 2;  // values of the error flag

// What the codes of a segment are drawn with.
struct Drawn {
  float divisor, guess;

  __device__ __forceinline__ Drawn(float norm, float levels)
      : divisor(level_divisor(norm)), guess(level_guess24(divisor, levels)) {}
};

struct Levels {
  float top, reciprocal;

  __device__ __forceinline__ explicit Levels(int32_t levels) : top((float)levels), reciprocal(1.0f / top) {}

  __device__ __forceinline__ float value(float code, float norm) const {
    return level_ratio(code, top, reciprocal) * norm;
  }

  __device__ __forceinline__ int32_t exact(float x, const Drawn& by, uint32_t draw) const {
    return level_code(x, by.divisor, by.guess, top, reciprocal, draw);
  }

  // The code of x. With GUESSED it counts for nothing where `wrong` becomes true: there the guess is too high.
  template <bool GUESSED>
  __device__ __forceinline__ int32_t code(float x, float divisor, float guess, uint32_t draw, bool& wrong) const {
    if (!GUESSED) return level_code(x, divisor, guess, top, reciprocal, draw);
    const int32_t k = (int32_t)(magnitude(x) * 0x1p-24f * guess);
    const float below = value((float)k, divisor), above = value((float)k + 1.0f, divisor);
    wrong |= !(below <= magnitude(x));
    return level_drawn(x, k, below, above, draw);
  }
};

// ---- where codes go and come from: `j` is the row in the tile, `i` the element ---------------------------------

// Words of codes; COUNT of them, of at most 32 bits together, are handed on at once.
template <int COUNT>
struct Packer {
  BitWriter writer;
  int32_t bits, levels;
  uint32_t chunk = 0;

  __device__ __forceinline__ Packer(uint32_t* out, const WarpTile& at, int32_t width, int32_t top)
      : writer(out + at.words(width), at.lanes, COUNT * width), bits(width), levels(top) {}

  __device__ __forceinline__ void put(int j, int, int32_t code) { word(j, (uint32_t)(code + levels)); }
  __device__ __forceinline__ void skip(int j) { word(j, 0u); }

 private:
  __device__ __forceinline__ void word(int j, uint32_t code) {
    chunk |= code << (j % COUNT * bits);
    if (j % COUNT == COUNT - 1) {
      writer.put(chunk);
      chunk = 0;
    }
  }
};

struct Storer {
  int32_t* __restrict__ out;

  __device__ __forceinline__ void put(int, int i, int32_t code) { out[i] = code; }
  __device__ __forceinline__ void skip(int) {}
};

template <int COUNT>
struct Unpacker {
  const uint32_t* __restrict__ in;
  int32_t stride, bits, levels;
  int left = 0;
  uint64_t held = 0;
  uint32_t chunk = 0;

  __device__ __forceinline__ Unpacker(const uint32_t* words, const WarpTile& at, int32_t width, int32_t top)
      : in(words + at.words(width)), stride(at.lanes), bits(width), levels(top) {}

  __device__ __forceinline__ int32_t get(int j, int) {
    if (j % COUNT == 0) {
      if (left < COUNT * bits) {
        held |= (uint64_t)*in << left;
        in += stride;
        left += 32;
      }
      chunk = (uint32_t)held;
      held >>= COUNT * bits;
      left -= COUNT * bits;
    }
    return (int32_t)(chunk >> (j % COUNT * bits) & ((1u << bits) - 1u)) - levels;
  }
};

struct Loader {
  const int32_t* __restrict__ in;

  __device__ __forceinline__ int32_t get(int, int i) { return in[i]; }
};

// Codes of payloads in one tile, as floats; COUNT of a lane in a row, which begin at a multiple of COUNT, have at most
// 32 bits together.
template <int COUNT>
struct Fields {
  const SegmentSummands& in;
  const WarpTile& at;
  int32_t bits;
  float levels;

  __device__ __forceinline__ float one(int p, int j, int) const { return number(word(p, j, 1)); }

  __device__ __forceinline__ void group(int p, int row, float (&into)[GROUP]) const {
    uint32_t chunks[GROUP / COUNT];
    GC_UNROLL
    for (int k = 0; k < GROUP / COUNT; ++k) chunks[k] = word(p, row + k * COUNT, COUNT);
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) into[j] = number(chunks[j / COUNT] >> (j % COUNT * bits));
  }

 private:
  __device__ __forceinline__ float number(uint32_t low) const {
    return small_number(low & ((1u << bits) - 1u), levels);
  }

  // The bits from row j on, of `count` rows at least.
  __device__ __forceinline__ uint32_t word(int p, int j, int count) const {
    const int from = j * bits, shift = from % 32;
    const uint32_t* words = (const uint32_t*)in.parts[p] + at.words(bits) + from / 32 * at.lanes;
    const uint32_t low = words[0] >> shift;
    return shift + count * bits > 32 ? low | words[at.lanes] << (32 - shift) : low;
  }
};

// ---- tiles -----------------------------------------------------------------------------------------------------

template <bool GUESSED, class Sink>
__device__ __forceinline__ void encode(const float* __restrict__ x, const int64_t* __restrict__ offsets, int64_t m,
                                       const float* __restrict__ norms, int32_t levels, const Key& key,
                                       const WarpTile& at, Sink sink) {
  const Levels scale(levels);
  const float* part = x + at.start;
  const uint64_t first = key.offset + (uint64_t)at.start;
  Cursor cursor(offsets, m, at.start);
  Drawn own(norms[cursor.at], scale.top);
  if (!at.whole()) {
#pragma unroll 1
    for (int j = 0; j < 32; ++j) {
      const int i = j * at.lanes + at.lane;
      if (i < at.count) {
        if (cursor.move(i)) own = Drawn(norms[cursor.at], scale.top);
        sink.put(j, i, scale.exact(part[i], own, draw_of(key, first + i)));
      } else {
        sink.skip(j);
      }
    }
    return;
  }
  GroupDraws group{key};
  bool fresh = true;
#pragma unroll 1
  for (int row = 0; row < 32; row += GROUP) {
    const int begin = row * LANES, end = begin + SPAN;
    float values[GROUP];
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) values[j] = part[begin + j * LANES + at.lane];
    if (cursor.move(begin)) own = Drawn(norms[cursor.at], scale.top);
    Cursor next = cursor;
    Drawn other = own;
    if (next.end < end) {
      next.move(next.end);
      other = Drawn(norms[next.at], scale.top);
    }
    bool wrong = next.end < end || first % SPAN != 0;
    if (!wrong) {
      int32_t codes[GROUP];
      group.load(first + begin + at.lane, fresh);
      GC_UNROLL
      for (int j = 0; j < GROUP; ++j) {
        const bool before = begin + j * LANES + at.lane < cursor.end;
        const float divisor = before ? own.divisor : other.divisor, guess = before ? own.guess : other.guess;
        codes[j] = scale.code<GUESSED>(values[j], divisor, guess, group.draw(j), wrong);
      }
      if (!wrong) {
        GC_UNROLL
        for (int j = 0; j < GROUP; ++j) sink.put(row + j, begin + j * LANES + at.lane, codes[j]);
        cursor = next;
        own = other;
      }
    }
    fresh = wrong;
    if (wrong) {
      LaneDraws draws(key, first + begin + at.lane);
#pragma unroll 1
      for (int j = row; j < row + GROUP; ++j) {
        const int i = j * LANES + at.lane;
        if (cursor.move(i)) own = Drawn(norms[cursor.at], scale.top);
        sink.put(j, i, scale.exact(part[i], own, draws.next()));
      }
    }
  }
}

// Input of the check of segments: the codes' largest magnitude must fit the norm.
struct Judge {
  int32_t levels;
  uint8_t* __restrict__ reached;  // null, or where segments are marked that have the highest level
  int32_t* __restrict__ bad;

  __device__ __forceinline__ void tell(int64_t segment, float norm, uint32_t most) const {
    if (most > (norm > 0 ? (uint32_t)levels : 0u)) atomicMin(bad, BAD_CODES);
    if (reached && most == (uint32_t)levels) reached[segment] = 1;
  }
};

template <class Source>
__device__ __forceinline__ void decode(Source source, const int64_t* __restrict__ offsets, int64_t m,
                                       const float* __restrict__ norms, const Judge& judge, const WarpTile& at,
                                       const float* onto, float count, float* out) {
  const Levels scale(judge.levels);
  Cursor cursor(offsets, m, at.start);
  float norm = norms[cursor.at];
  uint32_t most = 0;
  const auto larger = [](uint32_t top, int32_t code) {
    const uint32_t size = code < 0 ? 0u - (uint32_t)code : (uint32_t)code;
    return size > top ? size : top;
  };
  const auto walk = [&](int from, int to) {
#pragma unroll 1
    for (int j = from; j < to; ++j) {
      const int i = j * at.lanes + at.lane;
      if (i >= at.count) break;
      const int32_t code = source.get(j, i);
      const int64_t before = cursor.at;
      if (cursor.move(i)) {
        judge.tell(before, norm, most);
        norm = norms[cursor.at];
        most = 0;
      }
      most = larger(most, code);
      const float value = scale.value((float)code, norm);
      out[at.start + i] = onto ? onto[at.start + i] + value * count : value;
    }
  };
  if (!at.whole()) {
    walk(0, 32);
    judge.tell(cursor.at, norm, most);
    return;
  }
#pragma unroll 1
  for (int row = 0; row < 32; row += GROUP) {
    const int begin = row * LANES, end = begin + SPAN;
    const int64_t before = cursor.at;
    if (cursor.move(begin)) {
      judge.tell(before, norm, most);
      norm = norms[cursor.at];
      most = 0;
    }
    Cursor next = cursor;
    if (next.end < end) next.move(next.end);
    if (next.end < end) {
      walk(row, row + GROUP);
      continue;
    }
    float base[GROUP];  // `out` may be `onto`, so that no load can pass a store
    if (onto) {
      GC_UNROLL
      for (int j = 0; j < GROUP; ++j) base[j] = onto[at.start + begin + j * LANES + at.lane];
    }
    const float other = norms[next.at];
    uint32_t behind = 0;
    GC_UNROLL
    for (int j = 0; j < GROUP; ++j) {
      const int i = begin + j * LANES + at.lane;
      const bool within = i < cursor.end;
      const int32_t code = source.get(row + j, i);
      most = larger(most, within ? code : 0);
      behind = larger(behind, within ? 0 : code);
      const float value = scale.value((float)code, within ? norm : other);
      out[at.start + i] = onto ? base[j] + value * count : value;
    }
    if (next.at != cursor.at) {
      judge.tell(cursor.at, norm, most);
      cursor = next;
      norm = other;
      most = behind;
    }
  }
  judge.tell(cursor.at, norm, most);
}

__device__ __forceinline__ float sent_norm(float norm, int32_t levels) {
  return norm < TINY * (float)levels ? 0.0f : norm;
}

}  // namespace

// One warp per segment of up to 1024 elements: its largest magnitude, 0 below TINY * levels.
extern "C" __global__ void __launch_bounds__(256)
    level_norms(const float* __restrict__ x, const int64_t* __restrict__ offsets, const int64_t m,
                const int32_t levels, float* __restrict__ norms) {
  const int64_t s = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  const int lane = (int)(threadIdx.x % LANES);
  if (s >= m) return;  // uniform in the warp
  const float top = float_of(warp_largest(x + offsets[s], offsets[s + 1] - offsets[s], lane));
  if (lane == 0) norms[s] = sent_norm(top, levels);
}

// Norms from sums of squares, or with `squares` null from the largest magnitudes that are there, in place.
extern "C" __global__ void __launch_bounds__(256)
    level_finish(const double* __restrict__ squares, const int64_t m, const int32_t levels,
                 float* __restrict__ norms) {
  const int64_t s = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (s >= m) return;
  if (squares) {
    // Every rounding keeps the order, so the root is never below the largest element.
    const double root = sqrt(squares[s]);
    const bool beyond = root > (double)FLOAT_MAX && root < (double)float_of(0x7f800000u);
    norms[s] = sent_norm(beyond ? FLOAT_MAX : (float)root, levels);
  } else {
    norms[s] = sent_norm(norms[s], levels);
  }
}

// Three blocks an SM leave a thread the registers that it needs.
extern "C" __global__ void __launch_bounds__(256, 3)
    level_codes(const float* __restrict__ x, const int64_t n, const int64_t* __restrict__ offsets, const int64_t m,
                const float* __restrict__ norms, const int32_t levels, const Key key, int32_t* __restrict__ out) {
  const WarpTile at(n);
  if (at.active()) encode<false>(x, offsets, m, norms, levels, key, at, Storer{out + at.start});
}

// level_encode_<codes of one put>: codes + levels in `bits` bits, as many codes at once as fit 32. Above 127 levels
// too many are guessed wrong.
#define GC_ENCODE(COUNT)                                                                                           \
  extern "C" __global__ void __launch_bounds__(256)                                                                \
      level_encode_##COUNT(const float* __restrict__ x, const int64_t n, const int64_t* __restrict__ offsets,      \
                           const int64_t m, const float* __restrict__ norms, const int32_t levels,                 \
                           const int32_t bits, const Key key, uint32_t* __restrict__ out) {                        \
    const WarpTile at(n);                                                                                          \
    const Packer<COUNT> packer(out, at, bits, levels);                                                             \
    if (at.active()) encode<(COUNT > 2)>(x, offsets, m, norms, levels, key, at, packer);                           \
  }

GC_ENCODE(8)
GC_ENCODE(4)
GC_ENCODE(2)

// The same way back, from words or int32 codes. `out` may be `onto`, which may be null.
#define GC_DECODE(COUNT, SOURCE)                                                                                   \
  extern "C" __global__ void __launch_bounds__(256)                                                                \
      level_decode_##COUNT(const uint32_t* __restrict__ words, const int64_t n,                                    \
                           const int64_t* __restrict__ offsets, const int64_t m, const float* __restrict__ norms,  \
                           const int32_t levels, const int32_t bits, const float* onto, const float count,         \
                           float* out, uint8_t* __restrict__ reached, int32_t* __restrict__ bad) {                 \
    const WarpTile at(n);                                                                                          \
    if (at.active()) decode(SOURCE, offsets, m, norms, Judge{levels, reached, bad}, at, onto, count, out);         \
  }

GC_DECODE(8, Unpacker<8>(words, at, bits, levels))
GC_DECODE(4, Unpacker<4>(words, at, bits, levels))
GC_DECODE(2, Unpacker<2>(words, at, bits, levels))
GC_DECODE(1, Loader{(const int32_t*)words + at.start})

// The same of several payloads, added. `before`: null, or the sum of the payloads before, which may be `out`.
#define GC_MEAN(COUNT)                                                                                             \
  extern "C" __global__ void __launch_bounds__(256)                                                                \
      level_mean_##COUNT(const SegmentSummands in, const int64_t n, const int64_t* __restrict__ offsets,           \
                         const int64_t m, const int32_t levels, const int32_t bits, const float* before,           \
                         const float divisor, float* out, uint8_t* __restrict__ reached,                           \
                         int32_t* __restrict__ bad) {                                                              \
    const WarpTile at(n);                                                                                          \
    const LevelCheck judge{(float)levels, true, m, reached, bad};                                                  \
    level_mean_tile(Fields<COUNT>{in, at, bits, judge.top}, in, offsets, judge, at, before, divisor, out);         \
  }

GC_MEAN(8)
GC_MEAN(4)
GC_MEAN(2)

// The norms of payloads; with `reached`, (payloads, m), each that is not 0 must be marked there.
extern "C" __global__ void __launch_bounds__(256)
    level_check(const SegmentSummands in, const int64_t m, const int32_t levels, const uint8_t* __restrict__ reached,
                int32_t* __restrict__ bad) {
  const int64_t s = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (s >= m) return;
#pragma unroll 1
  for (int p = 0; p < in.number; ++p) {
    const float norm = in.high[p][s];
    if (!level_norm_sent(norm, TINY * (float)levels)) {
      atomicMin(bad, BAD_NORMS);
    } else if (reached && norm != 0 && !reached[p * m + s]) {
      atomicMin(bad, BAD_CODES);
    }
  }
}
