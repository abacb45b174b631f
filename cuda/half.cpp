// The 16-bit floating-point formats on the CPU. Encoding reads 4 and writes 2 bytes per element; a mean reads 2 per
// payload and writes 4.
#include <type_traits>

#include "half.hpp"
#include "called.hpp"

using namespace gc;

namespace {

#if defined(__AVX512F__)
typedef __m256i Codes;   // of WIDTH elements
typedef __m512i Codes2;  // of twice as many
#elif defined(__AVX2__) && defined(__F16C__)
typedef __m128i Codes;
typedef __m256i Codes2;
#else
typedef uint16_t Codes __attribute__((vector_size(2 * WIDTH)));
typedef uint16_t Codes2 __attribute__((vector_size(4 * WIDTH)));
#endif

// `values_at` is half_value of WIDTH codes; `rounded` gives the float16 codes of clipped floats. The minimum and
// maximum instructions in `clipped_to` return their second operand if one is a NaN.
#if defined(__AVX512F__)
template <bool BRAIN>
inline VecF values_at(const uint16_t* codes) {
  const Codes h = load_vector<Codes>(codes);
  return BRAIN ? (VecF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16) : (VecF)_mm512_cvtph_ps(h);
}

inline VecF clipped_to(VecF x, float largest) {
  return (VecF)_mm512_min_ps(_mm512_set1_ps(largest), _mm512_max_ps(_mm512_set1_ps(-largest), (__m512)x));
}

inline Codes rounded(VecF x) { return _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT); }
inline Codes lower(VecU codes) { return _mm512_cvtepi32_epi16((__m512i)codes); }
inline Codes2 joined(Codes low, Codes high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
#elif defined(__AVX2__) && defined(__F16C__)
template <bool BRAIN>
inline VecF values_at(const uint16_t* codes) {
  const Codes h = load_vector<Codes>(codes);
  return BRAIN ? (VecF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16) : (VecF)_mm256_cvtph_ps(h);
}

inline VecF clipped_to(VecF x, float largest) {
  return (VecF)_mm256_min_ps(_mm256_set1_ps(largest), _mm256_max_ps(_mm256_set1_ps(-largest), (__m256)x));
}

inline Codes rounded(VecF x) { return _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT); }
inline Codes lower(VecU codes) {
  return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)codes), _mm256_extracti128_si256((__m256i)codes, 1));
}
inline Codes2 joined(Codes low, Codes high) { return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1); }
#else
template <bool BRAIN>
inline VecF values_at(const uint16_t* codes) {
  const VecI code = __builtin_convertvector(load_vector<Codes>(codes), VecI);
  if (BRAIN) return (VecF)(code << 16);
  const VecI sign = code << 16 & INT32_MIN, size = (code & 0x7fff) << 13, exponent = code & 0x7c00;
  const VecI denormal = (VecI)((VecF)(size + 0x38800000) - 0x1p-14f);
  const VecI up = exponent == 0x7c00 ? VecI{} + 0x70000000 : VecI{} + 0x38000000;
  const VecI value = exponent == 0 ? denormal : size + up;
  return (VecF)(value | sign);
}

inline VecF clipped_to(VecF x, float largest) {
  const VecI size = (VecI)x & 0x7fffffff, top = VecI{} + (int32_t)bits_of(largest);
  const VecI clipped = size < top || size > (int32_t)INFINITE ? size : top;
  return (VecF)(clipped | ((VecI)x & INT32_MIN));
}

inline Codes lower(VecU codes) {
#if defined(__SSE2__)
  const VecI wide = (VecI)codes << 16 >> 16;  // what is packed is taken for signed
  const __m128i packed = _mm_packs_epi32((__m128i)wide, (__m128i)wide);
  return load_vector<Codes>(&packed);
#else
  return __builtin_convertvector(codes, Codes);
#endif
}

inline Codes rounded(VecF x) {  // half_code of what is clipped
  const VecI size = (VecI)x & 0x7fffffff, sign = (VecI)x >> 16 & 0x8000;
  const VecI denormal = (VecI)((VecF)size + 0.5f) - 0x3f000000;
  const VecI even = (size + 0xfff + (size >> 13 & 1) - 0x38000000) >> 13;
  const VecI nan = (size >> 13 & 0x3ff) | 0x7e00;
  return lower((VecU)((size > (int32_t)INFINITE ? nan : size < 0x38800000 ? denormal : even) | sign));
}

inline Codes2 joined(Codes low, Codes high) {
  Codes2 both;
  memcpy(&both, &low, sizeof low);
  memcpy((char*)&both + sizeof low, &high, sizeof high);
  return both;
}
#endif

// half_code of WIDTH elements.
template <bool BRAIN>
inline Codes codes_of(VecF x) {
  if constexpr (BRAIN) {
    const VecI bits = (VecI)clipped_to(x, 0x1.fep127f), size = bits & 0x7fffffff;
    const VecI even = bits + 0x7fff + (bits >> 16 & 1);
    return lower((VecU)(size > (int32_t)INFINITE ? bits | 0x400000 : even) >> 16);
  } else {
    return rounded(clipped_to(x, 65504.0f));
  }
}

inline void put_codes(uint16_t* out, Codes2 codes, bool stream) {
#if defined(__SSE2__)
  if (stream) {
#if defined(__AVX512F__)
    _mm512_stream_si512((__m512i*)out, codes);
#elif defined(__AVX2__)
    _mm256_stream_si256((__m256i*)out, codes);
#else
    _mm_stream_si128((__m128i*)out, (__m128i)codes);
#endif
    return;
  }
#endif
  (void)stream;
  memcpy(out, &codes, sizeof codes);
}

template <bool BRAIN>
void encode(const float* x, int64_t n, uint16_t* out, int threads) {
  const bool stream = streams((const float*)out, n);
  parallel(tiles_of(n), threads, [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const float* part = x + t * TILE;
      uint16_t* codes = out + t * TILE;
      const int count = (int)(n - t * TILE < TILE ? n - t * TILE : TILE);
      const auto whole = [=](auto streamed) {
        GC_ROLLED for (int i = 0; i + 2 * WIDTH <= count; i += 2 * WIDTH) {
          ask_lines<WIDTH / 8>(part, i / 16);
          const VecF low = load_vector<VecF>(part + i), high = load_vector<VecF>(part + i + WIDTH);
          put_codes(codes + i, joined(codes_of<BRAIN>(low), codes_of<BRAIN>(high)), streamed);
        }
      };
      stream ? whole(std::true_type()) : whole(std::false_type());
      for (int i = count - count % (2 * WIDTH); i < count; ++i) codes[i] = (uint16_t)half_code<BRAIN>(part[i]);
    }
  });
}

constexpr int LINE = 32;         // codes of a cache line
constexpr int AHEAD = 2 * TILE;  // distance of the prefetch, in codes

struct Payloads {
  const uint16_t* const* codes;
  const float* counts;
  int number;
};

// The sum of what WIDTH codes of all payloads at element i stand for, times their counts: -0 is the neutral element.
template <bool BRAIN, int VECTORS>
inline void add_values(const Payloads& in, int64_t i, VecF (&sums)[VECTORS]) {
  GC_UNROLL
  for (int v = 0; v < VECTORS; ++v) sums[v] = -VecF{};
  GC_ROLLED for (int p = 0; p < in.number; ++p) {
    const uint16_t* codes = in.codes[p] + i;
    const float times = in.counts[p];
    GC_UNROLL
    for (int k = 0; k < VECTORS * WIDTH; k += LINE) __builtin_prefetch(codes + AHEAD + k);
    GC_UNROLL
    for (int v = 0; v < VECTORS; ++v) sums[v] += values_at<BRAIN>(codes + v * WIDTH) * times;
  }
}

template <bool BRAIN>
bool any_infinite(const Payloads& in, int64_t start, int count) {
  uint32_t any = 0;
  for (int p = 0; p < in.number; ++p) {
    const uint16_t* codes = in.codes[p] + start;
#pragma omp simd reduction(| : any)
    for (int i = 0; i < count; ++i) any |= (uint32_t)((codes[i] & HALF_EXPONENT<BRAIN>) == HALF_EXPONENT<BRAIN>);
  }
  return any;
}

template <bool BRAIN>
int64_t mean(const Payloads& in, float divisor, int64_t n, float* out, int threads) {
  constexpr int VECTORS = 4;
  const bool stream = streams(out, n), power = (bits_of(divisor) & 0x7fffffu) == 0;
  const float factor = power ? 1.0f / divisor : 1.0f;
  int64_t bad = 0;
  parallel(tiles_of(n), threads, [=, &in, &bad](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE;
      const int count = (int)(n - start < TILE ? n - start : TILE);
      float* values = out + start;
      VecI top = {};  // bits of the largest magnitude
      const auto whole = [=, &in, &top](auto streamed) {
        GC_ROLLED for (int i = 0; i + VECTORS * WIDTH <= count; i += VECTORS * WIDTH) {
          VecF sums[VECTORS];
          add_values<BRAIN>(in, start + i, sums);
          GC_UNROLL
          for (int v = 0; v < VECTORS; ++v) {
            const VecI size = (VecI)sums[v] & 0x7fffffff;
            top = size > top ? size : top;
            // A power of two's reciprocal is exact, and so the product with it is the quotient.
            put_vector(values + i + v * WIDTH, power ? sums[v] * factor : sums[v] / divisor, streamed);
          }
        }
      };
      stream ? whole(std::true_type()) : whole(std::false_type());
      uint32_t most = 0;
      for (int i = count - count % (VECTORS * WIDTH); i < count; ++i) {
        float sum = -0.0f;
        for (int p = 0; p < in.number; ++p) sum += half_value<BRAIN>(in.codes[p][start + i]) * in.counts[p];
        const uint32_t size = bits_of(sum) & 0x7fffffffu;
        most = size > most ? size : most;
        values[i] = sum / divisor;
      }
      for (int l = 0; l < WIDTH; ++l) most = (uint32_t)top[l] > most ? (uint32_t)top[l] : most;
      // A sum is not finite if one of its terms is not, or where it is too large.
      if (most >= INFINITE && any_infinite<BRAIN>(in, start, count)) return report(bad, 1);
    }
  });
  return bad;
}

}  // namespace

// Codes of x, (n,): bfloat16 if `brain`, else float16.
int64_t gc_half_encode(const float* x, int64_t n, int brain, uint16_t* out, int threads) {
  brain ? encode<true>(x, n, out, threads) : encode<false>(x, n, out, threads);
  return 0;
}
GC_CALLED(gc_half_encode)

// The sum of the decoded values of `number` payloads, each times its count, divided by `divisor`. Returns 1 if
// a code is not finite.
int64_t gc_half_mean(const uint16_t* const* codes, const float* counts, int number, float divisor, int64_t n, int brain,
                     float* out, int threads) {
  const Payloads in{codes, counts, number};
  return brain ? mean<true>(in, divisor, n, out, threads) : mean<false>(in, divisor, n, out, threads);
}
GC_CALLED(gc_half_mean)
