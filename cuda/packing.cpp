// Codes to words and back, and whole tensors of draws, on the CPU. Packing reads a code's own size and writes B / 8
// bytes an element; drawing writes 4.
#include "loops.hpp"

using namespace gc;

namespace {

template <class T>
void pack_all(const T* codes, int64_t n, int bits, uint32_t* out, int threads) {
  with_bits(bits, [&](auto b) {
    constexpr int B = decltype(b)::value;
    parallel(tiles_of(n), threads, [=](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; ++t) {
        const T* part = codes + t * TILE;
        const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
        pack_tile<B>([=](int i) { return (uint32_t)part[i]; }, count, out + t * B * LANES);
      }
    });
  });
}

}  // namespace

// Pack n codes of `size` bytes each, non-negative integers below 2^bits.
GC_API int64_t gc_pack(const void* codes, int size, int64_t n, int bits, uint32_t* out, int threads) {
  switch (size) {
    case 1: pack_all((const uint8_t*)codes, n, bits, out, threads); break;
    case 2: pack_all((const uint16_t*)codes, n, bits, out, threads); break;
    case 4: pack_all((const uint32_t*)codes, n, bits, out, threads); break;
    default: pack_all((const uint64_t*)codes, n, bits, out, threads);
  }
  return 0;
}

// Unpack n codes from each of `rows` stretches of words.
GC_API int64_t gc_unpack(const uint32_t* words, int64_t rows, int64_t n, int bits, int32_t* out, int threads) {
  with_bits(bits, [&](auto b) {
    constexpr int B = decltype(b)::value;
    for (int64_t row = 0; row < rows; ++row, words += words_of(n, B), out += n) {
      parallel(tiles_of(n), threads, [=](int64_t first, int64_t last) {
        GC_ALIGNED uint32_t tile[TILE];
        for (int64_t t = first; t < last; ++t) {
          const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
          uint32_t* to = tile;
          unpack_tile<B>(words + t * B * LANES, count, [=](int i, uint32_t code) { to[i] = code; });
          memcpy(out + t * TILE, tile, count * sizeof *out);
        }
      });
    }
  });
  return 0;
}

// The draws of n elements: 24 bits each.
GC_API int64_t gc_draws24(uint64_t seed, uint64_t offset, uint32_t step, uint32_t who, int64_t n, int32_t* out,
                          int threads) {
  const Key key{seed, offset, step, who};
  parallel(tiles_of(n), threads, [=](int64_t first, int64_t last) {
    Draws draws(key, first);
    for (int64_t t = first; t < last; ++t) {
      const int64_t count = n - t * TILE < TILE ? n - t * TILE : TILE;
      memcpy(out + t * TILE, draws.tile(), count * sizeof *out);
    }
  });
  return 0;
}
