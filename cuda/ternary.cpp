// Ternary codes on the CPU. Encoding reads 4 and writes 1/4 bytes per element, decoding the reverse.
#include <type_traits>

#include "ternary.cuh"
#include "called.hpp"

using namespace gc;

// Codes of x, (n,), with the clipping threshold `limit` (null: none) and the scale of each segment.
int64_t gc_ternary_encode(const float* x, int64_t n, const Segments& segments, const float* limit, const float* scale,
                          const Key& key, uint32_t* out, int threads) {
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    auto spread = spread_values<2>(segments, first * TILE, [=](int64_t s, float* values) {
      values[0] = limit ? limit[s] : __builtin_inff();
      values[1] = ternary_step(scale[s]);
    });
    Draws draws(key, first);
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      spread.tile(t * TILE, count);
      const uint32_t* draw = draws.tile_for(part, count, part, false);
      const float *limits = spread.row[0], *steps = spread.row[1];
      pack_tile<2>(
          [=](int i) { return ternary_code(part[i], limits[i], steps[i], draw[i]); }, count,
          out + t * 2 * LANES, part);
    }
  });
  return 0;
}
GC_CALLED(gc_ternary_encode)

namespace {

// Add the codes of one tile of a payload to `sums`, and return the largest.
uint32_t add_codes(const uint32_t* words, int bits, int count, int32_t* sums) {
  GC_ALIGNED uint32_t codes[TILE];
  unpack_codes(bits, words, (count + LANES - 1) / LANES, codes);
  uint32_t top = 0;
#pragma omp simd reduction(max : top)
  for (int i = 0; i < count; ++i) {
    sums[i] += (int32_t)codes[i];
    top = codes[i] > top ? codes[i] : top;
  }
  return top;
}

// Rows of sums that fit in registers, a field of four, and vectors in a row.
constexpr int FIELDS = WIDTH / 4, PARTS = LANES / WIDTH;

// Payloads of one worker each, 2 bits per code: fields are added within words, four to a word, and put(i, sums) is called
// for each WIDTH codes. At most 127 payloads, so that no byte overflows. Returns whether a code 3 is among them.
template <class Put>
inline bool add_pairs(const uint32_t* const* words, int payloads, int64_t place, Put put) {
  VecU bad = {};
  GC_ROLLED for (int k = 0; k < 2; ++k) {
    GC_ROLLED for (int from = 0; from < 4; from += FIELDS) {
      VecU field[FIELDS][PARTS] = {};
      GC_ROLLED for (int p = 0; p < payloads; ++p) {
        const uint32_t* word = words[p] + place + k * LANES;
        if (from == 0) {
          __builtin_prefetch(word + 8 * LANES);
          __builtin_prefetch(word + 8 * LANES + 16);
        }
        GC_UNROLL
        for (int v = 0; v < PARTS; ++v) {
          const VecU w = load_vector<VecU>(word + v * WIDTH);
          bad |= w & (w >> 1) & 0x55555555u;
          GC_UNROLL
          for (int f = 0; f < FIELDS; ++f) field[f][v] += (w >> (2 * (from + f))) & 0x03030303u;
        }
      }
      GC_ROLLED for (int j = 0; j < 16; j += 4) {
        GC_UNROLL
        for (int f = 0; f < FIELDS; ++f) {
          const int row = 16 * k + j + from + f;
          GC_UNROLL
          for (int v = 0; v < PARTS; ++v) {
            put(row * LANES + v * WIDTH, (VecI)((field[f][v] >> (2 * j)) & 0xffu));
          }
        }
      }
    }
  }
  uint32_t any = 0;
  for (int i = 0; i < WIDTH; ++i) any |= bad[i];
  return any != 0;
}

struct Payloads {
  const uint32_t* const* words;
  const int32_t* bits;   // of a code
  const int32_t* tops;   // the largest code that is allowed: twice the number of workers
  int64_t number;
};

// Sums of all payloads' codes for the tile at `start`; returns 1 + the first payload with a code above its top.
int64_t add_all(const Payloads& in, int64_t start, int count, int32_t* sums) {
  memset(sums, 0, TILE * sizeof *sums);
  for (int64_t p = 0; p < in.number;) {
    int64_t next = p;
    while (count == TILE && next < in.number && next < p + 127 && in.bits[next] == 2 && in.tops[next] == 2) ++next;
    if (next > p) {
      const int64_t place = start / TILE * 2 * LANES;
      const auto put = [=](int i, VecI sum) {
        const VecI all = load_vector<VecI>(sums + i) + sum;
        memcpy(sums + i, &all, sizeof all);
      };
      if (add_pairs(in.words + p, (int)(next - p), place, put)) {
        for (int64_t q = p; q < next; ++q) {
          GC_ALIGNED int32_t scratch[TILE] = {};
          if (add_codes(in.words[q] + place, 2, count, scratch) > 2) return q + 1;
        }
      }
      p = next;
      continue;
    }
    const int bits = in.bits[p];
    const uint32_t top = add_codes(in.words[p] + start / TILE * bits * LANES, bits, count, sums);
    if (top > (uint32_t)in.tops[p]) return p + 1;
    ++p;
  }
  return 0;
}

}  // namespace

// (sum of codes - count) * (scale / count), (n,), from `number` payloads. Returns 0, or 1 + the index of the first
// payload that has a code above its top, or -1 if a scale is negative or not finite.
int64_t gc_ternary_mean(const uint32_t* const* words, const int32_t* bits, const int32_t* tops, int64_t number,
                        int64_t workers, const float* scale, int64_t n, const Segments& segments, float* out,
                        int threads) {
  for (int64_t s = 0; s < segments.count; ++s) {
    if (!(scale[s] >= 0 && scale[s] <= FLOAT_MAX)) return -1;
  }
  const Payloads in{words, bits, tops, number};
  const bool stream = streams(out, n);
  bool pairs = number <= 127;
  for (int64_t p = 0; p < number; ++p) pairs &= bits[p] == 2 && tops[p] == 2;
  int64_t bad = 0;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    auto spread = spread_values<1>(segments, first * TILE, [=](int64_t s, float* values) {
      values[0] = ternary_unit(scale[s], (float)workers);
    });
    GC_ALIGNED float tile[TILE];
    GC_ALIGNED int32_t sums[TILE];
    int64_t wrong = 0;
    for (int64_t t = first; t < last && !wrong; ++t) {
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      spread.tile(t * TILE, count);
      const float* units = spread.row[0];
      if (pairs && count == TILE) {
        float* place = out + t * TILE;
        const int32_t all = (int32_t)workers;
        const auto add = [=](auto streamed) {
          return add_pairs(words, (int)number, t * 2 * LANES, [=](int i, VecI sum) {
            put_vector(place + i, __builtin_convertvector(sum - all, VecF) * load_vector<VecF>(units + i), streamed);
          });
        };
        const bool bad_code = stream ? add(std::true_type()) : add(std::false_type());
        if (!bad_code) continue;
      }
      wrong = add_all(in, t * TILE, count, sums);
      GC_SIMD for (int i = 0; i < count; ++i) tile[i] = (float)(sums[i] - (int32_t)workers) * units[i];
      write_tile(out + t * TILE, tile, count, stream);
    }
    report(bad, wrong);
  });
  return bad;
}
GC_CALLED(gc_ternary_mean)

// The sums of all payloads' codes in `width` bits each. Returns as gc_ternary_mean.
int64_t gc_ternary_merge(const uint32_t* const* words, const int32_t* bits, const int32_t* tops, int64_t number,
                         int64_t n, int width, uint32_t* out, int threads) {
  const Payloads in{words, bits, tops, number};
  int64_t bad = 0;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    GC_ALIGNED int32_t sums[TILE];
    int64_t wrong = 0;
    for (int64_t t = first; t < last && !wrong; ++t) {
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      wrong = add_all(in, t * TILE, count, sums);
      const int lanes = (count + LANES - 1) / LANES;
      for (int i = count; i < LANES * lanes; ++i) sums[i] = 0;
      pack_codes(width, (const uint32_t*)sums, lanes, out + t * width * LANES);
    }
    report(bad, wrong);
  });
  return bad;
}
GC_CALLED(gc_ternary_merge)
