// Codes to words and back, and whole tensors of draws, on the CPU. Packing reads a code's own size and writes B / 8
// bytes per element; drawing writes 4.
#include "called.hpp"

using namespace gc;

namespace {

template <int B>
void pack_lanes(const uint32_t* codes, int lanes, uint32_t* out) {
  GC_SIMD for (int l = 0; l < lanes; ++l) {
    uint32_t words[B] = {};
    GC_UNROLL
    for (int j = 0; j < 32; ++j) {
      const int k = j * B / 32, shift = j * B % 32;
      const uint32_t code = codes[j * lanes + l];
      words[k] |= code << shift;
      if (shift + B > 32) words[k + 1] |= code >> (32 - shift);
    }
    for (int k = 0; k < B; ++k) out[k * lanes + l] = words[k];
  }
}

template <int B>
void unpack_codes_of(const uint32_t* words, int lanes, uint32_t* codes) {
  GC_SIMD for (int l = 0; l < lanes; ++l) {
    GC_UNROLL
    for (int j = 0; j < 32; ++j) {
      const int k = j * B / 32, shift = j * B % 32;
      uint32_t code = words[k * lanes + l] >> shift;
      if (shift + B > 32) code |= words[(k + 1) * lanes + l] << (32 - shift);
      codes[j * lanes + l] = code & ((1u << B) - 1);
    }
  }
}

}  // namespace

void gc::pack_codes(int bits, const uint32_t* codes, int lanes, uint32_t* out) {
  with_bits(bits, [=](auto b) { pack_lanes<decltype(b)::value>(codes, lanes, out); });
}

void gc::unpack_codes(int bits, const uint32_t* words, int lanes, uint32_t* codes) {
  with_bits(bits, [=](auto b) { unpack_codes_of<decltype(b)::value>(words, lanes, codes); });
}

namespace {

template <class T>
void pack_all(const T* codes, int64_t n, int bits, uint32_t* out, int threads) {
  parallel(tiles_of(n), threads, [=](int64_t first, int64_t last) {
    GC_ALIGNED uint32_t tile[TILE];
    for (int64_t t = first; t < last; ++t) {
      const T* part = codes + t * TILE;
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE), lanes = (count + LANES - 1) / LANES;
      if (sizeof(T) == sizeof *tile && count == TILE) {
        ask_ahead((const float*)part);
        pack_codes(bits, (const uint32_t*)part, lanes, out + t * bits * LANES);
        continue;
      }
      GC_SIMD for (int i = 0; i < count; ++i) tile[i] = (uint32_t)part[i];
      for (int i = count; i < LANES * lanes; ++i) tile[i] = 0;
      pack_codes(bits, tile, lanes, out + t * bits * LANES);
    }
  });
}

}  // namespace

// Pack n codes of `size` bytes each, non-negative integers below 2^bits.
int64_t gc_pack(const void* codes, int size, int64_t n, int bits, uint32_t* out, int threads) {
  switch (size) {
    case 1: pack_all((const uint8_t*)codes, n, bits, out, threads); break;
    case 2: pack_all((const uint16_t*)codes, n, bits, out, threads); break;
    case 4: pack_all((const uint32_t*)codes, n, bits, out, threads); break;
    default: pack_all((const uint64_t*)codes, n, bits, out, threads);
  }
  return 0;
}
GC_CALLED(gc_pack)

// Unpack n codes from each of `rows` stretches of words.
int64_t gc_unpack(const uint32_t* words, int64_t rows, int64_t n, int bits, int32_t* out, int threads) {
  const bool stream = n >= STREAM_FROM;
  for (int64_t row = 0; row < rows; ++row, words += words_of(n, bits), out += n) {
    parallel(tiles_of(n), threads, [=](int64_t first, int64_t last) {
      GC_ALIGNED uint32_t tile[TILE];
      for (int64_t t = first; t < last; ++t) {
        const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
        unpack_codes(bits, words + t * bits * LANES, (count + LANES - 1) / LANES, tile);
        write_tile((uint32_t*)out + t * TILE, tile, count, stream);
      }
    });
  }
  return 0;
}
GC_CALLED(gc_unpack)

// The draws of n elements: 24 bits each; mirrored for negative elements of x, if it is not null, where they are
// correlated.
int64_t gc_draws24(const Key& key, const float* x, int64_t n, int32_t* out, int threads) {
  const bool stream = n >= STREAM_FROM;
  parallel(tiles_of(n), threads, [=](int64_t first, int64_t last) {
    Draws draws(key, first);
    for (int64_t t = first; t < last; ++t) {
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      const uint32_t* draw = x ? draws.tile_for(x + t * TILE, count) : draws.tile();
      write_tile((uint32_t*)out + t * TILE, draw, count, stream);
    }
  });
  return 0;
}
GC_CALLED(gc_draws24)
