// Exact selection of the largest elements of segments, of equal ones the first; and of those that reach a limit.
//
// A long segment is read once: a sample gives a threshold that slightly more than k elements reach, and these
// candidates are collected. Bisection locates the k-th largest among them: for each new bound it counts the candidates
// that reach it. If the threshold is wrong, for example because most elements are equal, histograms of the segment with
// increasingly fine bins locate the k-th largest, in a number of passes that does not depend on the values. The keys of
// a short segment fit in first-level cache, where the bisection counts them.
#include <algorithm>
#include <type_traits>

#include "selection.hpp"

using namespace gc;

namespace {

constexpr int CHUNK = 4096;       // elements that are looked at in one go
constexpr int SHORT = CHUNK;      // elements of a segment, at most, whose k-th largest is found by bisection alone
constexpr int GROUP = 4;          // indices that are written at once
constexpr int SAMPLE = 32768;     // elements of a sample, at most
constexpr int REST = 256;         // candidates between the bounds at which these are copied and searched by themselves
constexpr int NEAR = 8;           // elements of a sample that may be left between the bounds of a rank in it
constexpr int BINS = 2048;
constexpr int32_t LEAST = -0x7fffffff - 1, MOST = 0x7fffffff;  // of keys
constexpr int64_t PART = 1ll << 31;  // elements whose indices have 32 bits

// ---- where the elements come from --------------------------------------------------------------------------------

struct Floats {
  using Order = ByMagnitude;
  static constexpr int EASE = 2;  // how many of them are as much work as one word
  const uint32_t* x;

  const uint32_t* read(int64_t start, int, uint32_t*) const { return x + start; }
};

// Words of the blocks [first, first + blocks), 4 per block; `blocks` is a multiple of 16.
void random_blocks(const Key& key, uint64_t first, int blocks, uint32_t* out) {
  const uint32_t low = (uint32_t)first, high = (uint32_t)(first >> 32 << 8) | WORD_KIND;
  if (low + (uint32_t)blocks < low) {  // the counter's high word changes on the way
    for (int b = 0; b < blocks; ++b) {
      const Block block = key_block(key, first + b, WORD_KIND);
      memcpy(out + 4 * b, &block, sizeof block);
    }
    return;
  }
  // Such an order of blocks in the vectors that pairs of words, interleaved within 128 bits, come out as they go to
  // memory.
#if defined(__AVX512F__)
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int b = 0; b < blocks; b += 32) {
    __m512i x[4], y[4], z[4], w[4];
    for (int h = 0; h < 4; ++h) {
      x[h] = _mm512_add_epi64(_mm512_set1_epi64((int64_t)low + b + 8 * h), order);
      y[h] = every(high);
    }
    philox_blocks(key, x, y, z, w);
    for (int h = 0; h < 4; ++h) {
      const __m512i xy = _mm512_mask_mov_epi32(x[h], 0xaaaa, _mm512_slli_epi64(y[h], 32));
      const __m512i zw = _mm512_mask_mov_epi32(z[h], 0xaaaa, _mm512_slli_epi64(w[h], 32));
      _mm512_storeu_si512(out + 4 * b + 32 * h, _mm512_unpacklo_epi64(xy, zw));
      _mm512_storeu_si512(out + 4 * b + 32 * h + 16, _mm512_unpackhi_epi64(xy, zw));
    }
  }
#elif defined(__AVX2__)
  const __m256i order = _mm256_setr_epi64x(0, 2, 1, 3);
  for (int b = 0; b < blocks; b += 8) {
    __m256i x[2], y[2], z[2], w[2];
    for (int h = 0; h < 2; ++h) {
      x[h] = _mm256_add_epi64(_mm256_set1_epi64x((int64_t)low + b + 4 * h), order);
      y[h] = every(high);
    }
    philox_blocks(key, x, y, z, w);
    for (int h = 0; h < 2; ++h) {
      const __m256i xy = _mm256_blend_epi32(x[h], _mm256_slli_epi64(y[h], 32), 0xaa);
      const __m256i zw = _mm256_blend_epi32(z[h], _mm256_slli_epi64(w[h], 32), 0xaa);
      _mm256_storeu_si256((__m256i*)(out + 4 * b + 16 * h), _mm256_unpacklo_epi64(xy, zw));
      _mm256_storeu_si256((__m256i*)(out + 4 * b + 16 * h + 8), _mm256_unpackhi_epi64(xy, zw));
    }
  }
#else
  const uint32_t k0 = (uint32_t)key.seed, k1 = (uint32_t)(key.seed >> 32);
  GC_SIMD for (int b = 0; b < blocks; ++b) {
    const Block block = philox(Block{low + (uint32_t)b, high, key.step, key.who}, k0, k1);
    out[4 * b] = block.x;
    out[4 * b + 1] = block.y;
    out[4 * b + 2] = block.z;
    out[4 * b + 3] = block.w;
  }
#endif
}

constexpr int SPARE = 160;  // words that `read` writes beyond those that were requested, at most

struct Words {
  using Order = ByWord;
  static constexpr int EASE = 1;
  Key key;

  const uint32_t* read(int64_t start, int count, uint32_t* scratch) const {
    const uint64_t element = key.offset + (uint64_t)start;
    const int skip = (int)(element % 4);
    random_blocks(key, element / 4, ((count + skip + 3) / 4 + 31) / 32 * 32, scratch);
    return scratch + skip;
  }
};

// ---- comparing ----------------------------------------------------------------------------------------------------

// Bit i: whether element i of 32 reaches `limit`.
template <class Order>
uint32_t reaching(const uint32_t* raw, int32_t limit) {
#if defined(__AVX512F__)
  const __m512i t = _mm512_set1_epi32(limit);
  const auto half = [=](const uint32_t* p) -> uint32_t {
    const __m512i u = _mm512_loadu_si512(p);
    const __m512i key = std::is_same<Order, ByMagnitude>::value
                            ? _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff))
                            : _mm512_xor_si512(u, _mm512_set1_epi32((int)0x80000000));
    return _mm512_cmpge_epi32_mask(key, t);
  };
  return half(raw) | half(raw + 16) << 16;
#elif defined(__AVX2__)
  const __m256i t = _mm256_set1_epi32(limit);
  const auto below = [=](const uint32_t* p) {
    const __m256i u = _mm256_loadu_si256((const __m256i*)p);
    const __m256i key = std::is_same<Order, ByMagnitude>::value
                            ? _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff))
                            : _mm256_xor_si256(u, _mm256_set1_epi32((int)0x80000000));
    return _mm256_cmpgt_epi32(t, key);
  };
  const __m256i low = _mm256_packs_epi32(below(raw), below(raw + 8));
  const __m256i high = _mm256_packs_epi32(below(raw + 16), below(raw + 24));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // halves of vectors were packed apart
  return ~(uint32_t)_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#elif defined(__SSE2__)
  const __m128i t = _mm_set1_epi32(limit);
  const auto below = [=](const uint32_t* p) {
    const __m128i u = _mm_loadu_si128((const __m128i*)p);
    const __m128i key = std::is_same<Order, ByMagnitude>::value
                            ? _mm_and_si128(u, _mm_set1_epi32(0x7fffffff))
                            : _mm_xor_si128(u, _mm_set1_epi32((int)0x80000000));
    return _mm_cmpgt_epi32(t, key);
  };
  const auto half = [=](const uint32_t* p) -> uint32_t {
    const __m128i low = _mm_packs_epi32(below(p), below(p + 4)), high = _mm_packs_epi32(below(p + 8), below(p + 12));
    return (uint32_t)_mm_movemask_epi8(_mm_packs_epi16(low, high));
  };
  return ~(half(raw) | half(raw + 16) << 16);
#else
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= (uint32_t)(Order::key(raw[i]) >= limit) << i;
  return mask;
#endif
}

// Write the indices of those of `count` elements that reach `limit`, in their order, and return how many there are;
// up to GROUP numbers are written after them. Branch prediction fails for them, so there are few branches: 64
// elements get one group of indices, and further ones only where that is too small.
template <class Order>
int indices_reaching(const uint32_t* raw, int count, int32_t limit, uint32_t* out) {
  const uint32_t* const begin = out;
  int i = 0;
  GC_ROLLED for (; i + 64 <= count; i += 64) {
    ask_lines<4>((const float*)raw + i - TILE, 0);  // one tile ahead
    uint64_t mask = reaching<Order>(raw + i, limit) | (uint64_t)reaching<Order>(raw + i + 32, limit) << 32;
    uint32_t* group = out;
    out += __builtin_popcountll(mask);
    do {
      GC_UNROLL
      for (int j = 0; j < GROUP; ++j) {
        group[j] = (uint32_t)(i + __builtin_ctzll(mask | 1ull << 63));
        mask &= mask - 1;
      }
      group += GROUP;
    } while (mask);
  }
  for (; i < count; ++i) {
    *out = (uint32_t)i;
    out += Order::key(raw[i]) >= limit;
  }
  return (int)(out - begin);
}

template <class Order>
int64_t count_from(const uint32_t* raw, int64_t count, int32_t limit) {
  int64_t found = 0;
  for (int64_t start = 0; start < count; start += 1 << 20) {
    const int stop = (int)(count - start < 1 << 20 ? count - start : 1 << 20);
    const uint32_t* part = raw + start;
    int here = 0;
#pragma omp simd reduction(+ : here)
    for (int i = 0; i < stop; ++i) here += Order::key(part[i]) >= limit;
    found += here;
  }
  return found;
}

// ---- thresholds ---------------------------------------------------------------------------------------------------

// Kept are the keys above `key`, and of those equal to it the first `room`.
struct Limit {
  int32_t key;
  int64_t room;
};

// The k-th largest key, which is not below `low` and not above `high`; `each(part, f)` calls f(raw, count) for the
// elements of a part, as often as it is asked.
template <class Order, class Each>
Limit kth_of_many(int64_t k, int32_t low_key, int32_t high_key, int parts, int threads, Each each) {
  std::unique_ptr<uint32_t[]> counts(new uint32_t[(size_t)parts * BINS]);
  uint32_t low = (uint32_t)low_key, width = (uint32_t)high_key - low;  // keys modulo 2^32
  for (;;) {
    int shift = 0;
    while (width >> shift >= BINS) ++shift;
    each_part(parts, threads, [&](int p) {
      uint32_t* count = counts.get() + (size_t)p * BINS;
      memset(count, 0, BINS * sizeof *count);
      each(p, [=](const uint32_t* raw, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
          const uint32_t place = (uint32_t)Order::key(raw[i]) - low;
          if (place <= width) ++count[place >> shift];
        }
      });
    });
    uint32_t bin = (width >> shift) + 1;
    for (int64_t here = 0;;) {
      --bin;
      here = 0;
      for (int p = 0; p < parts; ++p) here += counts[(size_t)p * BINS + bin];
      if (here >= k || bin == 0) break;
      k -= here;
    }
    low += bin << shift;
    if (shift == 0) return Limit{(int32_t)low, k};
    width = (1u << shift) - 1;
  }
}

template <class Order>
int reach(const uint32_t* raw, int n, int32_t limit) {
  int found = 0;
#pragma omp simd reduction(+ : found)
  for (int i = 0; i < n; ++i) found += Order::key(raw[i]) >= limit;
  return found;
}

// Bounds of the k-th largest key: `at_low` keys, at least k, are at least `low`; `beyond`, fewer than k, are above
// `high`. Or `beyond` is k; `low` and `high` are then equal, and the k keys above them are the k largest.
struct Bounds {
  int32_t low, high;
  int64_t at_low, beyond;

  int64_t between() const { return at_low - beyond; }
};

// Narrow bounds, starting near `guess`, until at most `enough` keys are between them or they are equal.
// `reaching(key)` returns how many keys are at least `key`.
template <class F>
Bounds narrowed(Bounds b, int64_t k, int32_t guess, int64_t enough, F reaching) {
  uint32_t step = 1u << 18;
  bool over = false, under = false, halve = false;
  while (b.low < b.high && b.between() > enough) {
    const uint32_t width = (uint32_t)b.high - (uint32_t)b.low;
    const int64_t before = b.between();
    int32_t middle = (int32_t)((uint32_t)b.low + width / 2 + 1);
    if (over && under) {
      if (!halve) {  // interpolate, as if keys were uniform, a little to the side on which the bound is farther away
        const int64_t below = b.at_low - k, margin = below > k - b.beyond ? -enough / 4 : enough / 4;
        const double share = (double)std::max<int64_t>(below + margin, 0) / (double)(before + 1);
        middle = (int32_t)((uint32_t)b.low + 1 + (uint32_t)(width * share));
      }
    } else if (guess > b.low && guess <= b.high) {  // no bound is near yet
      middle = guess;
    }
    const int64_t found = reaching(middle);
    if (found == k) return Bounds{middle - 1, middle - 1, found, found};
    if (found > k) {
      b.low = middle;
      b.at_low = found;
      under = true;
      guess = step < (uint32_t)b.high - (uint32_t)b.low ? (int32_t)((uint32_t)b.low + step) : b.low;
    } else {
      b.high = middle - 1;
      b.beyond = found;
      over = true;
      guess = step < (uint32_t)b.high - (uint32_t)b.low ? (int32_t)((uint32_t)b.high - step) : b.low;
    }
    step = step < 1u << 28 ? 4 * step : 0xffffffffu;
    halve = !halve && 2 * b.between() > before;  // bisect after a poor interpolation: this ends for all keys
  }
  return b;
}

// Bounds of the k-th largest of n keys, at most `enough` keys apart, where a cache holds them.
template <class Order>
Bounds bounds_of(const uint32_t* raw, int n, int64_t k, int32_t guess, int64_t enough) {
  int32_t low = Order::key(raw[0]), high = low;
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int i = 0; i < n; ++i) {
    const int32_t key = Order::key(raw[i]);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  return narrowed(Bounds{low, high, n, 0}, k, guess, enough, [=](int32_t key) { return reach<Order>(raw, n, key); });
}

// The k-th largest of n keys that a cache holds.
template <class Order>
Limit kth_of_few(const uint32_t* raw, int n, int64_t k, int32_t guess) {
  const Bounds found = bounds_of<Order>(raw, n, k, guess, 0);
  return Limit{found.low, k - found.beyond};
}

// How to find a key that probably somewhat more than k of n elements reach. Without a sample (size 0) it is `key`, and
// the k-th largest is near `guess`. Otherwise it is the key of rank `rank` in a sample of `size` elements, one of each
// `stride`, and the k-th largest is near the one of rank `middle`. `room`: candidates for which memory is allocated.
struct Plan {
  int64_t size, stride, rank, middle, room;
  int32_t key, guess;
};

Plan planned(const Floats&, int64_t n, int64_t k) {
  int64_t size = n / 64 < 1024 ? 1024 : n / 64 < 4096 ? n / 64 : n / 2048 < 4096 ? 4096 : n / 2048;
  size = size < SAMPLE ? size : SAMPLE;
  const int64_t stride = n / size;
  const double share = (double)k / (double)n * (double)size;
  const int64_t rank = (int64_t)(share + 5 * __builtin_sqrt(share)) + 8;
  if (rank >= size) return {0, 0, 0, 0, n, LEAST, LEAST};
  return {size, stride, rank, std::max<int64_t>((int64_t)share, 1), 2 * (rank + 8) * stride, LEAST, LEAST};
}

Plan planned(const Words&, int64_t n, int64_t k) {
  const auto key_of = [=](double number) {
    return (int32_t)((int64_t)((1 - number / (double)n) * 0x1p32) - (1ll << 31));
  };
  const double wanted = (double)k + 6 * __builtin_sqrt((double)k) + 16;
  if (wanted >= (double)n) return {0, 0, 0, 0, n, LEAST, LEAST};
  return {0, 0, 0, 0, 2 * (int64_t)wanted, key_of(wanted), key_of((double)k)};
}

// Take elements [first, last) of the sample of those from x on.
void take(const uint32_t* x, const Plan& plan, int64_t first, int64_t last, uint32_t* sample) {
  x += first * plan.stride;
  for (int64_t i = first; i < last; ++i, x += plan.stride) {
    sample[i] = x[(uint64_t)((uint32_t)i * 2654435761u) * (uint64_t)plan.stride >> 32];
  }
}

// ---- selection ----------------------------------------------------------------------------------------------------

// Where the kept elements go: positions, and unless null their values.
struct Kept {
  int64_t* positions;
  uint32_t* values;

  Kept from(int64_t index) const { return Kept{positions + index, values ? values + index : nullptr}; }
};

// Write those of `count` elements, at most CHUNK, that reach `limit`: element i is number where(i).
template <class Order, class Where>
void emit_reaching(const uint32_t* raw, int count, int32_t limit, Kept& out, Where where) {
  uint32_t indices[CHUNK + GROUP];
  const int found = indices_reaching<Order>(raw, count, limit, indices);
  int64_t* positions = out.positions;
  GC_SIMD for (int j = 0; j < found; ++j) positions[j] = where(indices[j]);
  if (out.values) {
    uint32_t* values = out.values;
    for (int j = 0; j < found; ++j) values[j] = raw[indices[j]];
  }
  out = out.from(found);
}

// Write those of `count` elements that are within the limit, and count them off.
template <class Order, class Where>
void emit(const uint32_t* raw, int count, Limit& limit, Kept& out, Where where) {
  int cut = 0;  // from here on, ties are left out
  if (limit.room) {
    const int32_t bound = limit.key;
    int ties = 0;
#pragma omp simd reduction(+ : ties)
    for (int i = 0; i < count; ++i) ties += Order::key(raw[i]) == bound;
    cut = count;
    if (ties > limit.room) {
      for (ties = cut = 0; ties < limit.room; ++cut) ties += Order::key(raw[cut]) == bound;
    }
    limit.room -= ties;
    emit_reaching<Order>(raw, cut, bound, out, where);
  }
  if (cut == count || limit.key == MOST) return;
  const auto moved = [=](uint32_t i) { return where(i + (uint32_t)cut); };
  emit_reaching<Order>(raw + cut, count - cut, limit.key + 1, out, moved);
}

template <class Source>
void select_all(const Source& source, int64_t start, int64_t n, const Kept& out) {
  for (int64_t i = 0; i < n; ++i) out.positions[i] = start + i;
  if (out.values) memcpy(out.values, source.read(start, 0, nullptr), n * sizeof *out.values);
}
template <>
void select_all(const Words&, int64_t start, int64_t n, const Kept& out) {
  for (int64_t i = 0; i < n; ++i) out.positions[i] = start + i;
}

// Returns the limit's key, near which that of the next segment may lie.
template <class Source>
int32_t select_short(const Source& source, int64_t start, int n, int k, int32_t guess, Kept out) {
  using Order = typename Source::Order;
  GC_ALIGNED uint32_t scratch[SHORT + SPARE];
  const uint32_t* raw = source.read(start, n, scratch);
  Limit limit = kth_of_few<Order>(raw, n, k, guess);
  const int32_t found = limit.key;
  emit<Order>(raw, n, limit, out, [=](uint32_t i) { return start + i; });
  return found;
}

// Those elements of one part of a segment that reach a threshold: where, from the part's beginning, and their bits.
struct Candidates {
  uint32_t *index, *raw;  // room + CHUNK each
  int64_t room, count;

  bool full() const { return count > room; }
};

// One part of a segment, alone in its lines of memory.
struct alignas(64) Part {
  int64_t first, last;  // elements
  Candidates found;
  int64_t number[2];  // what has been counted, in turns
  int64_t above, ties;
};

// Call f(at, raw, count) for chunks of the elements [first, last) of the segment at `start`, while that returns true.
template <class Source, class F>
void each_chunk(const Source& source, int64_t start, int64_t first, int64_t last, F f) {
  GC_ALIGNED uint32_t scratch[CHUNK + SPARE];
  for (int64_t at = first; at < last; at += CHUNK) {
    const int count = (int)(last - at < CHUNK ? last - at : CHUNK);
    if (!f(at, source.read(start + at, count, scratch), count)) return;
  }
}

template <class Source>
void collect(const Source& source, int64_t start, int64_t first, int64_t last, int32_t threshold, Candidates& to) {
  each_chunk(source, start, first, last, [&](int64_t at, const uint32_t* raw, int count) {
    uint32_t indices[CHUNK + GROUP];
    const int found = indices_reaching<typename Source::Order>(raw, count, threshold, indices);
    uint32_t *index = to.index + to.count, *raws = to.raw + to.count;
    const uint32_t base = (uint32_t)(at - first);
    for (int j = 0; j < found; ++j) {
      index[j] = base + indices[j];
      raws[j] = raw[indices[j]];
    }
    to.count += found;
    return !to.full();
  });
}

// Write the keys within bounds of which there are `room` at most, and return how many there are.
template <class Order>
int within(const Candidates& of, const Bounds& bounds, uint32_t* out) {
  int found = 0;
  int64_t i = 0;
  const auto reached = [=](int64_t from, int32_t key) { return reaching<Order>(of.raw + from, key); };
  for (; i + 32 <= of.count; i += 32) {
    uint32_t mask = reached(i, bounds.low);
    if (mask && bounds.high != MOST) mask &= ~reached(i, bounds.high + 1);
    for (; mask; mask &= mask - 1) out[found++] = of.raw[i + __builtin_ctz(mask)];
  }
  for (; i < of.count; ++i) {
    const int32_t key = Order::key(of.raw[i]);
    if (key >= bounds.low && key <= bounds.high) out[found++] = of.raw[i];
  }
  return found;
}

// The k-th largest of the `total` candidates of all parts, which reach `low`; every thread returns it.
template <class Order>
Limit kth_of_parts(Part* part, int parts, const Team& team, int64_t total, int64_t k, int32_t low, int32_t guess,
                   uint32_t* rest) {
  int turn = 0;
  const auto sum = [&](auto count) {  // counts in turns: who is ahead writes others than those that are read
    turn = 1 - turn;
    team.each(parts, [&](int p) { part[p].number[turn] = count(p, part[p].found); });
    team.meet();
    int64_t all = 0;
    for (int p = 0; p < parts; ++p) all += part[p].number[turn];
    return all;
  };
  const Bounds bounds = narrowed(Bounds{low, MOST, total, 0}, k, guess, REST, [&](int32_t key) {
    return sum([=](int, const Candidates& of) { return count_from<Order>(of.raw, of.count, key); });
  });
  if (bounds.low == bounds.high) return Limit{bounds.low, k - bounds.beyond};
  sum([=](int p, const Candidates& of) { return within<Order>(of, bounds, rest + p * REST); });
  uint32_t all[REST];
  int count = 0;
  for (int p = 0; p < parts; ++p) {
    memcpy(all + count, rest + p * REST, part[p].number[turn] * sizeof *all);
    count += (int)part[p].number[turn];
  }
  return kth_of_few<Order>(all, count, k - bounds.beyond, LEAST);
}

// The k largest of one long segment: its candidates are collected by a threshold, and the limit is found among them.
template <class Source>
class Long {
 public:
  using Order = typename Source::Order;

  Long(const Source& source, int64_t start, int64_t n, int64_t k, int threads, const Kept& out)
      : source_(source), start_(start), k_(k), threads_(useful_threads(n / Source::EASE, threads)),
        parts_(std::max(threads_, (int)((n + PART - 1) / PART))), out_(out), plan_(planned(source, n, k)) {
    const auto edge = [=](int p) { return p == parts_ ? n : n / CHUNK * p / parts_ * CHUNK; };
    const auto room = [&](int p) { return std::min(edge(p + 1) - edge(p), plan_.room); };
    int64_t all = 0;
    for (int p = 0; p < parts_; ++p) all += 2 * (room(p) + CHUNK);
    memory_.reset(new uint32_t[all]);  // one piece, which an allocator is likelier to keep mapped
    sample_.reset(new uint32_t[plan_.size]);
    rest_.reset(new uint32_t[parts_ * REST]);
    part_.reset(new Part[parts_]);
    uint32_t* next = memory_.get();
    for (int p = 0; p < parts_; ++p) {
      const int64_t size = room(p) + CHUNK;
      part_[p] = Part{edge(p), edge(p + 1), {next, next + size, room(p), 0}, {}, 0, 0};
      next += 2 * size;
    }
  }

  void run() {
    bool done = false;
    together(threads_, [&](const Team& team) {
      if (by_candidates(team) && team.rank == 0) done = true;
    });
    if (!done) by_histograms();
  }

 private:
  // Returns, to every thread, whether the candidates were enough, and not too many for their memory.
  bool by_candidates(const Team& team) {
    int32_t key = plan_.key, guess = plan_.guess;
    if constexpr (std::is_same<Source, Floats>::value) {  // words need no sample
      if (plan_.size) {
        const int64_t size = plan_.size;
        const auto edge = [=](int rank) { return size * rank / team.size; };
        take(source_.x + start_, plan_, edge(team.rank), edge(team.rank + 1), sample_.get());
        team.meet();
        const auto near = [&](int64_t rank, int32_t from) {
          return bounds_of<Order>(sample_.get(), (int)size, rank, from, NEAR).low;
        };
        key = near(plan_.rank, LEAST);
        if (plan_.rank * plan_.stride > SHORT) guess = near(plan_.middle, key);
      }
    }
    team.each(parts_, [&](int p) { collect(source_, start_, part_[p].first, part_[p].last, key, part_[p].found); });
    team.meet();
    int64_t total = 0;
    for (int p = 0; p < parts_; ++p) {
      if (part_[p].found.full()) return false;
      total += part_[p].found.count;
    }
    if (total < k_) return false;
    const Limit limit = parts_ == 1 && total <= SHORT
                            ? kth_of_few<Order>(part_[0].found.raw, (int)total, k_, guess)
                            : kth_of_parts<Order>(part_.get(), parts_, team, total, k_, key, guess, rest_.get());
    const auto each = [&](int p, auto f) { f(part_[p].found.raw, part_[p].found.count); };
    write(team, limit, each, [&](int p, Limit own, Kept here) {
      const Candidates& found = part_[p].found;
      const int64_t base = start_ + part_[p].first;
      for (int64_t i = 0; i < found.count; i += CHUNK) {
        const int count = (int)(found.count - i < CHUNK ? found.count - i : CHUNK);
        const uint32_t* index = found.index + i;
        emit<Order>(found.raw + i, count, own, here, [=](uint32_t j) { return base + index[j]; });
      }
    });
    return true;
  }

  // The histograms are those of all elements.
  void by_histograms() {
    const auto each = [&](int p, auto f) {
      each_chunk(source_, start_, part_[p].first, part_[p].last, [&](int64_t, const uint32_t* raw, int count) {
        f(raw, count);
        return true;
      });
    };
    const Limit limit = kth_of_many<Order>(k_, LEAST, MOST, parts_, threads_, each);
    together(threads_, [&](const Team& team) {
      write(team, limit, each, [&](int p, Limit own, Kept here) {
        each_chunk(source_, start_, part_[p].first, part_[p].last, [&](int64_t at, const uint32_t* raw, int count) {
          const int64_t base = start_ + at;
          emit<Order>(raw, count, own, here, [=](uint32_t i) { return base + i; });
          return true;
        });
      });
    });
  }

  // Write what is within the limit: `each(part, f)` calls f(raw, count) for what is left of a part, and
  // `emit_part(part, own, here)` writes what of it is within its own limit. Ties go to the first parts; so where the
  // output of a part begins depends on those before it.
  template <class Each, class Emit>
  void write(const Team& team, const Limit& limit, Each each, Emit emit_part) {
    if (parts_ > 1) {
      team.each(parts_, [&](int p) {
        int64_t reached = 0, beyond = 0;
        each(p, [&](const uint32_t* raw, int64_t count) {
          reached += count_from<Order>(raw, count, limit.key);
          beyond += limit.key == MOST ? 0 : count_from<Order>(raw, count, limit.key + 1);
        });
        part_[p].above = beyond;
        part_[p].ties = reached - beyond;
      });
      team.meet();
    }
    int64_t written = 0, left = limit.room;
    for (int p = 0; p < parts_; ++p) {
      const int64_t ties = parts_ > 1 ? std::min(part_[p].ties, left) : left;
      if (p % team.size == team.rank) emit_part(p, Limit{limit.key, ties}, out_.from(written));
      written += part_[p].above + ties;
      left -= ties;
    }
  }

  const Source& source_;
  const int64_t start_, k_;
  const int threads_, parts_;
  const Kept out_;
  const Plan plan_;
  std::unique_ptr<uint32_t[]> memory_, sample_, rest_;
  std::unique_ptr<Part[]> part_;
};

template <class Source>
void select(const Source& source, const Run* runs, int64_t count, int threads, Kept out) {
  for (const Run* run = runs; run < runs + count; ++run) {
    const int64_t length = run->length, keep = run->keep;
    const auto one = [&, run](int64_t row, int own_threads, int32_t guess) -> int32_t {
      const int64_t start = run->start + row * length;
      const Kept here = out.from(row * keep);
      if (keep == length) {
        select_all(source, start, length, here);
      } else if (length <= SHORT) {
        return select_short(source, start, (int)length, (int)keep, guess, here);
      } else {
        Long<Source>(source, start, length, keep, own_threads, here).run();
      }
      return guess;
    };
    if (keep > 0) {
      if (length > SHORT) {
        for (int64_t row = 0; row < run->rows; ++row) one(row, threads, 0);
      } else {
        const int parts = useful_threads(run->rows * length, threads);
        each_part(parts, parts, [&](int p) {
          int32_t guess = 0;
          const int64_t last = run->rows * (p + 1) / parts;
          for (int64_t row = run->rows * p / parts; row < last; ++row) guess = one(row, 1, guess);
        });
      }
    }
    out = out.from(run->rows * keep);
  }
}

// ---- elements that reach a limit ----------------------------------------------------------------------------------

constexpr uint32_t INFINITE = 0x7f800000u;  // bits; those of NaN are above it, without the sign

struct Counted {
  int64_t above;  // elements whose keys reach the limit
  int32_t top;    // the largest key
};

// Of n elements, read once.
Counted count_and_top(const uint32_t* raw, int64_t n, int32_t limit) {
  constexpr int STEP = 64;
  constexpr int64_t PIECE = 1 << 24;  // elements whose counts fit in 32 bits
  Counted all{0, 0};
  for (int64_t start = 0; start < n; start += PIECE) {
    const int64_t stop = n - start < PIECE ? n : start + PIECE;
    VecI tops = {}, counts = {};
    int64_t i = start;
    GC_ROLLED for (; i + STEP <= stop; i += STEP) {
      ask_lines<STEP / 16>((const float*)raw + i - TILE, 0);
      GC_UNROLL
      for (int k = 0; k < STEP; k += WIDTH) {
        const VecI key = load_vector<VecI>(raw + i + k) & 0x7fffffff;
        tops = key > tops ? key : tops;
        counts -= key >= limit;
      }
    }
    for (int l = 0; l < WIDTH; ++l) {
      all.above += counts[l];
      all.top = tops[l] > all.top ? tops[l] : all.top;
    }
    for (; i < stop; ++i) {
      const int32_t key = ByMagnitude::key(raw[i]);
      all.above += key >= limit;
      all.top = key > all.top ? key : all.top;
    }
  }
  return all;
}

// The least key that a limit allows, as zeros are never selected.
int32_t key_of_limit(float limit) { return limit > 0 ? (int32_t)bits_of(limit) : 1; }

}  // namespace

// The k of largest |x| of each segment: positions, and values unless null. `runs` are (start, rows, length, keep).
int64_t gc_largest_elements(const float* x, const int64_t* runs, int64_t count, int64_t* positions, float* values,
                            int threads) {
  const Floats source{(const uint32_t*)x};
  select(source, (const Run*)runs, count, threads, Kept{positions, (uint32_t*)values});
  return 0;
}
GC_CALLED(gc_largest_elements)

// The k largest random words of each segment.
int64_t gc_random_positions(const Key& key, const int64_t* runs, int64_t count, int64_t* positions, int threads) {
  const Words source{key};
  select(source, (const Run*)runs, count, threads, Kept{positions, nullptr});
  return 0;
}
GC_CALLED(gc_random_positions)

// The limit of each segment, (m,): `bound`, or the largest magnitude where that is less or NaN. Returns how many elements
// reach them; zeros do not, and nothing reaches NaN.
int64_t gc_limits(const float* x, const Segments& segments, float bound, float* limits, int threads) {
  const uint32_t* raw = (const uint32_t*)x;
  const int32_t least = key_of_limit(bound);
  int32_t* tops = (int32_t*)limits;
  for (int64_t s = 0; s < segments.count; ++s) tops[s] = 0;
  int64_t total = 0;
  parallel(segments.tiles[segments.count], threads, [&](int64_t first, int64_t last) {
    int64_t number = 0;
    for (int64_t t = first, s = segments.of_tile(first); t < last;) {
      while (segments.tiles[s + 1] <= t) ++s;
      const int64_t end = std::min(segments.tiles[s + 1], last);
      const int64_t start = segments.offsets[s] + (t - segments.tiles[s]) * TILE;
      const int64_t stop = std::min(segments.offsets[s] + (end - segments.tiles[s]) * TILE, segments.offsets[s + 1]);
      const Counted found = count_and_top(raw + start, stop - start, least);
      number += found.above;
#pragma omp critical
      tops[s] = found.top > tops[s] ? found.top : tops[s];
      t = end;
    }
#pragma omp atomic
    total += number;
  });
  for (int64_t s = 0; s < segments.count; ++s) {
    const int32_t top = tops[s];
    const int64_t start = segments.offsets[s], length = segments.offsets[s + 1] - start;
    if (top > (int32_t)INFINITE) {
      total -= count_from<ByMagnitude>(raw + start, length, least);
    } else if (top >= least) {
      limits[s] = bound;
    } else if (top > 0) {
      total += count_from<ByMagnitude>(raw + start, length, top);
    }
  }
  return total;
}
GC_CALLED(gc_limits)

// Positions and values of the elements that reach the limit of their segment, as gc_limits counts them.
int64_t gc_reaching(const float* x, const Segments& segments, const float* limits, int64_t* positions, float* values,
                    int threads) {
  const int64_t tiles = tiles_of(segments.numel());
  const uint32_t* raw = (const uint32_t*)x;
  const int size = worth(tiles, 2 * GRAIN, threads);
  std::unique_ptr<int64_t[]> counts(new int64_t[size]);
  together(size, [&](const Team& team) {
    const int64_t last = tiles * (team.rank + 1) / team.size;
    const auto each = [&](auto f) {  // f(start, count, key) for parts of segments
      const int64_t n = segments.numel();
      int64_t t = tiles * team.rank / team.size, s = segments.holding(t * TILE);
      for (; t < last; ++t) {
        const int64_t start = t * TILE;
        const int count = (int)(n - start < TILE ? n - start : TILE);
        for_parts(segments, start, count, s, [&](int64_t s, int begin, int end) {
          if (limits[s] == limits[s]) f(start + begin, end - begin, key_of_limit(limits[s]));
        });
      }
    };
    int64_t before = 0;
    if (team.size > 1) {
      int64_t number = 0;
      each([&](int64_t start, int count, int32_t key) { number += reach<ByMagnitude>(raw + start, count, key); });
      counts[team.rank] = number;
      team.meet();
      for (int p = 0; p < team.rank; ++p) before += counts[p];
    }
    Kept out = Kept{positions, (uint32_t*)values}.from(before);
    each([&](int64_t start, int count, int32_t key) {
      emit_reaching<ByMagnitude>(raw + start, count, key, out, [=](uint32_t i) { return start + i; });
    });
  });
  return 0;
}
GC_CALLED(gc_reaching)
