// Selection of the largest elements of segments, exact, of equal ones the first; positions as bits; scatter and gather.
//
// A long segment is read once: a sample gives a threshold that a few more than k elements reach, these are collected,
// and the k-th largest is found among them by histograms of ever finer bins. Where the sample misleads, as it does if
// most elements are equal, the histograms are taken over the segment itself: a fixed number of passes, whatever the
// values. A short segment's keys lie in first-level cache, where its threshold is found by counting.
#include <algorithm>
#include <type_traits>

#include "python.hpp"
#include "selection.cuh"

using namespace gc;

namespace {

constexpr int CHUNK = 4096;       // elements that are looked at in one go
constexpr int SHORT = CHUNK;      // elements of a segment whose threshold is found by counting
constexpr int GROUP = 4;          // indices that are written at once
constexpr int SAMPLE = 32768;     // elements of a sample, at most
constexpr int FEW = 1 << 19;      // elements that a cache holds, so that counting them again costs little
constexpr int BINS = 2048;
constexpr int32_t LEAST = -0x7fffffff - 1, MOST = 0x7fffffff;  // of keys
constexpr int64_t PART = 1ll << 31;  // elements whose indices have 32 bits

struct Run {  // gcbench.ops.selection.KeptRun
  int64_t start, rows, length, keep;
};

// Call f(part) for 0 <= part < parts, on `threads` threads.
template <class F>
void each_part(int parts, int threads, F f) {
#if defined(_OPENMP)
  if (threads > 1 && parts > 1) {
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int p = 0; p < parts; ++p) f(p);
    return;
  }
#endif
  for (int p = 0; p < parts; ++p) f(p);
}

int useful_threads(int64_t n, int threads) {
  const int64_t useful = n / (2 * GRAIN * TILE);  // threads meet four times
  return useful < threads ? (useful > 1 ? (int)useful : 1) : threads;
}

// The first index in [0, count) whose at(index), which does not decrease, is `value` or more; or count.
template <class F>
int64_t first_from(int64_t count, int64_t value, F at) {
  int64_t low = 0;
  while (count > 0) {
    const int64_t half = count / 2;
    if (at(low + half) < value) {
      low += half + 1;
      count -= half + 1;
    } else {
      count = half;
    }
  }
  return low;
}

// ---- where the elements come from --------------------------------------------------------------------------------

struct Floats {
  using Order = ByMagnitude;
  const uint32_t* x;

  const uint32_t* read(int64_t start, int, uint32_t*) const { return x + start; }
};

// Words of the blocks [first, first + blocks), 4 a block; `blocks` is a multiple of 16.
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

constexpr int SPARE = 160;  // words that `read` writes beyond those that were asked for, at most

struct Words {
  using Order = ByWord;
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
// up to GROUP numbers are written after them. Nobody foresees which elements reach it, so there are few branches: 64
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

// The k-th largest of n keys that a cache holds: bounds are moved together by counting, from near `guess`.
template <class Order>
Limit kth_of_few(const uint32_t* raw, int n, int k, int32_t guess) {
  int32_t low = Order::key(raw[0]), high = low;
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int i = 0; i < n; ++i) {
    const int32_t key = Order::key(raw[i]);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  int at_low = n, beyond = 0;  // keys that reach `low`, at least k, and that go beyond `high`, fewer
  uint32_t step = 1u << 18;
  bool over = false, under = false, halve = false;
  while (low < high) {
    const uint32_t width = (uint32_t)high - (uint32_t)low;
    int32_t middle = (int32_t)((uint32_t)low + width / 2 + 1);
    if (over && under) {  // as if keys were spread evenly, in turn with halving, which ends whatever the keys are
      const double share = (double)(at_low - k) / (at_low - beyond + 1);
      if (!halve) middle = (int32_t)((uint32_t)low + 1 + (uint32_t)(width * share));
      halve = !halve;
    } else if (guess > low && guess <= high) {  // no bound is near yet
      middle = guess;
    }
    const int found = reach<Order>(raw, n, middle);
    if (found == k) return Limit{middle - 1, 0};  // above the smallest key, so there is one below
    if (found > k) {
      low = middle;
      at_low = found;
      under = true;
      guess = step < (uint32_t)high - (uint32_t)low ? (int32_t)((uint32_t)low + step) : low;
    } else {
      high = middle - 1;
      beyond = found;
      over = true;
      guess = step < (uint32_t)high - (uint32_t)low ? (int32_t)((uint32_t)high - step) : low;
    }
    step = step < 1u << 28 ? 4 * step : 0xffffffffu;
  }
  return Limit{low, k - beyond};
}

// A key that somewhat more than k of n elements reach, probably, and how many of them there is to be room for.
struct Sampled {
  int32_t key;
  int64_t room;
};

Sampled sampled_limit(const Floats& source, int64_t start, int64_t n, int64_t k) {
  int64_t size = n / 64 < 1024 ? 1024 : n / 64 < 4096 ? n / 64 : n / 2048 < 4096 ? 4096 : n / 2048;
  size = size < SAMPLE ? size : SAMPLE;
  const int64_t stride = n / size;
  std::unique_ptr<uint32_t[]> sample(new uint32_t[size]);
  const uint32_t* x = source.x + start;
  for (int64_t i = 0; i < size; ++i, x += stride) {
    sample[i] = x[(uint64_t)((uint32_t)i * 2654435761u) * (uint64_t)stride >> 32];
  }
  const double share = (double)k / (double)n * (double)size;
  const int64_t rank = (int64_t)(share + 5 * __builtin_sqrt(share)) + 8;
  if (rank >= size) return {LEAST, n};
  return {kth_of_few<ByMagnitude>(sample.get(), (int)size, (int)rank, 0).key, 2 * (rank + 8) * stride};
}

Sampled sampled_limit(const Words&, int64_t, int64_t n, int64_t k) {
  const double wanted = (double)k + 6 * __builtin_sqrt((double)k) + 16, share = wanted / (double)n;
  if (share >= 1) return {LEAST, n};
  return {(int32_t)((int64_t)((1 - share) * 0x1p32) - (1ll << 31)), 2 * (int64_t)wanted};
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

template <class Order>
int32_t largest_key(const Candidates& of, int32_t top) {
  const uint32_t* raw = of.raw;
#pragma omp simd reduction(max : top)
  for (int64_t i = 0; i < of.count; ++i) top = Order::key(raw[i]) > top ? Order::key(raw[i]) : top;
  return top;
}

template <class Source>
void select_long(const Source& source, int64_t start, int64_t n, int64_t k, int threads, const Kept& out) {
  using Order = typename Source::Order;
  threads = useful_threads(n, threads);
  const int parts = threads > (n + PART - 1) / PART ? threads : (int)((n + PART - 1) / PART);
  const auto edge = [=](int p) { return p == parts ? n : n / CHUNK * p / parts * CHUNK; };

  const Sampled sampled = sampled_limit(source, start, n, k);
  const auto room = [=](int p) { return std::min(edge(p + 1) - edge(p), sampled.room); };
  int64_t all = 0;
  for (int p = 0; p < parts; ++p) all += 2 * (room(p) + CHUNK);
  std::unique_ptr<Candidates[]> found(new Candidates[parts]);
  std::unique_ptr<uint32_t[]> memory(new uint32_t[all]);  // one piece, which an allocator is likelier to keep mapped
  uint32_t* next = memory.get();
  for (int p = 0; p < parts; ++p) {
    found[p] = Candidates{next, next + room(p) + CHUNK, room(p), 0};
    next += 2 * (room(p) + CHUNK);
  }
  each_part(parts, threads, [&](int p) { collect(source, start, edge(p), edge(p + 1), sampled.key, found[p]); });
  int64_t total = 0;
  bool collected = true;
  for (int p = 0; p < parts; ++p) {
    total += found[p].count;
    collected &= !found[p].full();
  }
  collected &= total >= k;

  // What is left to look at: the candidates, or all.
  const auto each = [&](int p, auto f) {
    if (collected) {
      f(found[p].raw, found[p].count);
    } else {
      each_chunk(source, start, edge(p), edge(p + 1), [&](int64_t, const uint32_t* raw, int count) {
        f(raw, count);
        return true;
      });
    }
  };
  Limit limit;
  if (collected && parts == 1 && total <= FEW) {
    limit = kth_of_few<Order>(found[0].raw, (int)total, (int)k, LEAST);
  } else {
    int32_t low = LEAST, high = MOST;
    if (collected) {
      low = high = sampled.key;
      for (int p = 0; p < parts; ++p) high = largest_key<Order>(found[p], high);
    }
    limit = kth_of_many<Order>(k, low, high, parts, threads, each);
  }

  // Ties go to the first parts; so where each part's output begins depends on those before it.
  std::unique_ptr<int64_t[]> above(new int64_t[2 * parts]);
  int64_t* ties = above.get() + parts;
  each_part(parts, threads, [&](int p) {
    int64_t reached = 0, beyond = 0;
    each(p, [&](const uint32_t* raw, int64_t count) {
      reached += count_from<Order>(raw, count, limit.key);
      beyond += limit.key == MOST ? 0 : count_from<Order>(raw, count, limit.key + 1);
    });
    above[p] = beyond;
    ties[p] = reached - beyond;
  });
  std::unique_ptr<int64_t[]> begin(new int64_t[parts]);
  int64_t written = 0, left = limit.room;
  for (int p = 0; p < parts; ++p) {
    begin[p] = written;
    ties[p] = std::min(ties[p], left);
    left -= ties[p];
    written += above[p] + ties[p];
  }
  each_part(parts, threads, [&](int p) {
    Kept here = out.from(begin[p]);
    Limit own{limit.key, ties[p]};
    if (!collected) {
      each_chunk(source, start, edge(p), edge(p + 1), [&](int64_t at, const uint32_t* raw, int count) {
        emit<Order>(raw, count, own, here, [=](uint32_t i) { return start + at + i; });
        return true;
      });
      return;
    }
    const uint32_t *index = found[p].index, *raw = found[p].raw;
    const int64_t base = start + edge(p);
    for (int64_t i = 0; i < found[p].count; i += CHUNK) {
      const int count = (int)(found[p].count - i < CHUNK ? found[p].count - i : CHUNK);
      emit<Order>(raw + i, count, own, here, [=](uint32_t j) { return base + index[i + j]; });
    }
  });
}

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
        select_long(source, start, length, keep, own_threads, here);
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

// ---- bitmaps ------------------------------------------------------------------------------------------------------

// Set the bits at(0) < at(1) < ... of n, all others not. Returns 1 if they do not increase or are not below n.
template <class F>
int64_t set_bits(int64_t total, int64_t n, uint32_t* words, int threads, F at) {
  int64_t bad = 0;
  const int64_t words_in_all = words_of(n, 1);
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    const int64_t end = last * LANES < words_in_all ? last * LANES : words_in_all;
    memset(words + first * LANES, 0, (end - first * LANES) * sizeof *words);
    const int64_t begin = first * TILE, stop = last * TILE < n ? last * TILE : n;
    const bool whole = n % TILE == 0 || last < tiles_of(n);
    const int64_t full = whole ? stop : n / TILE * TILE;  // where tiles end that have all their lanes
    int64_t before = begin - 1;
    for (int64_t j = begin ? first_from(total, begin, at) : 0; j < total; ++j) {
      const int64_t bit = at(j);
      if (bit <= before || bit >= n) {
#pragma omp atomic write
        bad = 1;
        return;
      }
      if (bit >= stop) return;
      before = bit;
      if (bit < full) {
        words[(bit / TILE * LANES) + bit % LANES] |= 1u << (bit / LANES % LANES);
      } else {
        const int lanes = tile_lanes(full, n), i = (int)(bit - full);
        words[full / TILE * LANES + bit_word(i, lanes)] |= 1u << bit_shift(i, lanes);
      }
    }
  });
  return bad;
}

// rows[j], bit l = words[l], bit j.
inline void transpose_bits(const uint32_t* words, uint32_t* rows) {
#if defined(__AVX512F__)
  const __m512i a = _mm512_loadu_si512(words), b = _mm512_loadu_si512(words + 16);
  __m512i bit = _mm512_set1_epi32(1);
  GC_ROLLED for (int j = 0; j < 32; ++j) {
    rows[j] = _mm512_test_epi32_mask(a, bit) | (uint32_t)_mm512_test_epi32_mask(b, bit) << 16;
    bit = _mm512_slli_epi32(bit, 1);
  }
#else
  memcpy(rows, words, LANES * sizeof *rows);
  uint32_t mask = 0x0000ffffu;
  for (int j = 16; j; j >>= 1, mask ^= mask << j) {
    for (int k = 0; k < 32; k = ((k | j) + 1) & ~j) {
      const uint32_t swap = ((rows[k] >> j) ^ rows[k | j]) & mask;
      rows[k] ^= swap << j;
      rows[k | j] ^= swap;
    }
  }
#endif
}

// Write where the bits of a bitmap of n are set, if exactly `total` are; returns 1 if one is set from n on, 2 if the
// number, which is written to `count`, is another.
int64_t find_bits(const uint32_t* words, int64_t n, int64_t total, int64_t* positions, int64_t* count, int threads) {
  const int64_t tiles = tiles_of(n), full = n / TILE;
  const int parts = useful_threads(n, threads);
  std::unique_ptr<int64_t[]> sums(new int64_t[parts]);
  GC_ALIGNED uint32_t tail[TILE / 32] = {};  // the last, shorter tile: bit i in the order of bits
  if (full < tiles) {
    const int lanes = tile_lanes(full * TILE, n), rest = (int)(n - full * TILE);
    for (int i = 0; i < lanes * LANES; ++i) {
      const uint32_t bit = words[full * LANES + bit_word(i, lanes)] >> bit_shift(i, lanes) & 1;
      if (bit && i >= rest) return 1;
      tail[i / 32] |= bit << i % 32;
    }
  }
  const auto edge = [=](int p) { return full * p / parts; };
  each_part(parts, parts, [&](int p) {
    int64_t sum = 0;
    for (int64_t i = edge(p) * LANES; i < edge(p + 1) * LANES; i += 2) {
      uint64_t pair;
      memcpy(&pair, words + i, sizeof pair);
      sum += __builtin_popcountll(pair);
    }
    sums[p] = sum;
  });
  int64_t before = 0;
  for (int p = 0; p < parts; ++p) {
    const int64_t own = sums[p];
    sums[p] = before;
    before += own;
  }
  int64_t found = before;
  for (uint32_t word : tail) found += __builtin_popcount(word);
  if (found != total) {
    *count = found;
    return 2;
  }
  const auto write = [](const uint32_t* rows, int64_t start, int64_t* out) {
    for (int j = 0; j < 32; j += 2) {
      uint64_t pair = rows[j] | (uint64_t)rows[j + 1] << 32;
      for (; pair; pair &= pair - 1) *out++ = start + 32 * j + __builtin_ctzll(pair);
    }
    return out;
  };
  each_part(parts, parts, [&](int p) {
    int64_t* out = positions + sums[p];
    for (int64_t t = edge(p); t < edge(p + 1); ++t) {
      GC_ALIGNED uint32_t rows[32];
      transpose_bits(words + t * LANES, rows);
      out = write(rows, t * TILE, out);
    }
  });
  write(tail, full * TILE, positions + before);
  return 0;
}

// Add the low bits: positions[j] = (bit j - j) * 2^low + j + code j. Returns 1 if a code after the last is not zero.
template <int B>
int64_t add_low_bits(const uint32_t* words, int64_t total, int64_t* positions, int threads) {
  int64_t bad = 0;
  parallel(tiles_of(total), threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int count = (int)(total - t * TILE < TILE ? total - t * TILE : TILE);
      GC_ALIGNED uint32_t codes[TILE];
      unpack_tile<B>(words + t * B * LANES, count, [&](int i, uint32_t code) { codes[i] = code; });
      int64_t* part = positions + t * TILE;
      GC_SIMD for (int i = 0; i < count; ++i) {
        const int64_t j = t * TILE + i;
        part[i] = ((part[i] - j) << B) + j + codes[i];
      }
      for (int i = count; i < tile_lanes(t * TILE, total) * LANES; ++i) {
        if (codes[i]) {
#pragma omp atomic write
          bad = 1;
        }
      }
    }
  });
  return bad;
}

// Whether positions increase (else 3) and each segment has its own (else 4).
int64_t check_positions(const int64_t* positions, int64_t total, const Run* runs, int64_t count) {
  bool rising = true;
  for (int64_t start = 0; start + 1 < total; start += TILE) {
    const int64_t stop = start + TILE < total - 1 ? start + TILE : total - 1;
    int falls = 0;
#pragma omp simd reduction(| : falls)
    for (int64_t i = start; i < stop; ++i) falls |= positions[i + 1] <= positions[i];
    rising &= !falls;
  }
  if (!rising) return 3;
  const int64_t* own = positions;
  for (const Run* run = runs; run < runs + count; ++run) {
    if (run->keep == 0) continue;
    for (int64_t row = 0; row < run->rows; ++row, own += run->keep) {
      const int64_t start = run->start + row * run->length;
      if (own[0] < start || own[run->keep - 1] >= start + run->length) return 4;
    }
  }
  return 0;
}

}  // namespace

// The k of largest |x| of each segment: positions, and values unless null. `runs` are (start, rows, length, keep).
GC_API int64_t gc_largest_elements(const float* x, const int64_t* runs, int64_t count, int64_t* positions,
                                   float* values, int threads) try {
  const Floats source{(const uint32_t*)x};
  select(source, (const Run*)runs, count, threads, Kept{positions, (uint32_t*)values});
  return 0;
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}
GC_CALLED(gc_largest_elements)

// The k largest random words of each segment.
GC_API int64_t gc_random_positions(uint64_t seed, uint64_t offset, uint32_t step, uint32_t who, const int64_t* runs,
                                   int64_t count, int64_t* positions, int threads) try {
  const Words source{Key{seed, offset, step, who}};
  select(source, (const Run*)runs, count, threads, Kept{positions, nullptr});
  return 0;
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}
GC_CALLED(gc_random_positions)

// Positions as a bitmap of n bits. Returns 1 if they do not increase or are not below n.
GC_API int64_t gc_pack_bitmap(const int64_t* positions, int64_t total, int64_t n, uint32_t* words, int threads) {
  return set_bits(total, n, words, threads, [=](int64_t j) { return positions[j]; });
}
GC_CALLED(gc_pack_bitmap)

// Positions in the coding of Elias and Fano with `low` low bits. Returns as gc_pack_bitmap.
GC_API int64_t gc_pack_gaps(const int64_t* positions, int64_t total, int64_t n, int low, uint32_t* low_words,
                            uint32_t* high_words, int threads) {
  if (total && (positions[0] < 0 || positions[total - 1] >= n)) return 1;
  if (low) {
    with_bits(low, [&](auto b) {
      constexpr int B = decltype(b)::value;
      parallel(tiles_of(total), threads, [&](int64_t first, int64_t last) {
        for (int64_t t = first; t < last; ++t) {
          const int count = (int)(total - t * TILE < TILE ? total - t * TILE : TILE);
          const int64_t base = t * TILE, *part = positions + base;
          pack_tile<B>([=](int i) { return (uint32_t)(part[i] - base - i) & ((1u << B) - 1); }, count,
                       low_words + t * B * LANES);
        }
      });
    });
  }
  return set_bits(total, total + ((n - total) >> low), high_words, threads,
                  [=](int64_t j) { return ((positions[j] - j) >> low) + j; });
}
GC_CALLED(gc_pack_gaps)

// Positions from a bitmap of n bits. Returns 0, or 1: a bit is set from n on, 2: `number` bits are set, not `total`,
// 3: they do not increase, 4: a segment has not its own k.
GC_API int64_t gc_unpack_bitmap(const uint32_t* words, int64_t n, const int64_t* runs, int64_t count, int64_t total,
                                int64_t* positions, int64_t* number, int threads) try {
  const int64_t bad = find_bits(words, n, total, positions, number, threads);
  return bad ? bad : check_positions(positions, total, (const Run*)runs, count);
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}
GC_CALLED(gc_unpack_bitmap)

// Positions from the coding of Elias and Fano. Returns as gc_unpack_bitmap, or 5: a low code after the last.
GC_API int64_t gc_unpack_gaps(const uint32_t* low_words, const uint32_t* high_words, int low, int64_t n,
                              const int64_t* runs, int64_t count, int64_t total, int64_t* positions, int64_t* number,
                              int threads) try {
  int64_t bad = find_bits(high_words, total + ((n - total) >> low), total, positions, number, threads);
  if (bad) return bad;
  if (low) {
    with_bits(low, [&](auto b) { bad = add_low_bits<decltype(b)::value>(low_words, total, positions, threads); });
    if (bad) return 5;
  }
  return check_positions(positions, total, (const Run*)runs, count);
} catch (const std::bad_alloc&) {
  return NO_MEMORY;
}
GC_CALLED(gc_unpack_gaps)

// Positions of 32 bits. Returns as gc_unpack_bitmap.
GC_API int64_t gc_unpack_int32(const int32_t* indices, const int64_t* runs, int64_t count, int64_t total,
                               int64_t* positions, int threads) {
  (void)threads;
  GC_SIMD for (int64_t i = 0; i < total; ++i) positions[i] = indices[i];
  return check_positions(positions, total, (const Run*)runs, count);
}
GC_CALLED(gc_unpack_int32)

// Zeros with values at increasing positions, n in all. Returns 1 if they do not increase or are not below n.
GC_API int64_t gc_scatter(const float* values, const int64_t* positions, int64_t total, float* out, int64_t n,
                          int threads) {
  int64_t bad = 0;
  if (total && (positions[0] < 0 || positions[total - 1] >= n)) return 1;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    GC_ALIGNED float row[TILE] = {};
    int64_t j = first_from(total, first * TILE, [=](int64_t i) { return positions[i]; });
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE, stop = start + TILE < n ? start + TILE : n, from = j;
      int64_t before = start - 1;
      for (; j < total && positions[j] < stop; ++j) {
        if (positions[j] <= before) {
#pragma omp atomic write
          bad = 1;
          return;
        }
        before = positions[j];
        row[before - start] = values[j];
      }
      write_tile(out + start, row, (int)(stop - start), n >= STREAM_FROM);
      for (int64_t i = from; i < j; ++i) row[positions[i] - start] = 0;
    }
    end_stream();
  });
  return bad;
}
GC_CALLED(gc_scatter)

// The sum of `number` sparse tensors of n elements, in their order, divided by `divisor`: tensor p has totals[p] values
// at increasing positions. Returns as gc_scatter.
GC_API int64_t gc_scatter_mean(const float* const* values, const int64_t* const* positions, const int64_t* totals,
                               int64_t number, float divisor, float* out, int64_t n, int threads) {
  int64_t bad = 0;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    GC_ALIGNED float row[TILE] = {};
    uint64_t touched[TILE / 64] = {};
    std::unique_ptr<int64_t[]> at(new (std::nothrow) int64_t[number]);
    if (!at) {
#pragma omp atomic write
      bad = NO_MEMORY;
      return;
    }
    for (int64_t p = 0; p < number; ++p) {
      const int64_t* own = positions[p];
      at[p] = first ? first_from(totals[p], first * TILE, [=](int64_t i) { return own[i]; }) : 0;
    }
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE, stop = start + TILE < n ? start + TILE : n;
      for (int64_t p = 0; p < number; ++p) {
        int64_t before = start - 1, j = at[p];
        for (; j < totals[p] && positions[p][j] < stop; ++j) {
          if (positions[p][j] <= before) {
#pragma omp atomic write
            bad = 1;
            return;
          }
          before = positions[p][j];
          const int i = (int)(before - start);
          row[i] += values[p][j];
          touched[i / 64] |= 1ull << i % 64;
        }
        at[p] = j;
      }
      for (int k = 0; k < TILE / 64; ++k) {
        for (uint64_t mask = touched[k]; mask; mask &= mask - 1) row[64 * k + __builtin_ctzll(mask)] /= divisor;
      }
      write_tile(out + start, row, (int)(stop - start), n >= STREAM_FROM);
      for (int k = 0; k < TILE / 64; ++k) {
        for (; touched[k]; touched[k] &= touched[k] - 1) row[64 * k + __builtin_ctzll(touched[k])] = 0;
      }
    }
    for (int64_t p = 0; p < number; ++p) {
      if (last == tiles_of(n) && at[p] < totals[p]) {
#pragma omp atomic write
        bad = 1;
      }
    }
    end_stream();
  });
  return bad;
}
GC_CALLED(gc_scatter_mean)

// The elements of x, (n,), at `positions`. Returns 1 if one of these is not in [0, n).
GC_API int64_t gc_gather(const float* x, int64_t n, const int64_t* positions, int64_t total, float* out, int threads) {
  int64_t bad = 0;
  parallel(tiles_of(total), threads, [&](int64_t first, int64_t last) {
    const int64_t stop = last * TILE < total ? last * TILE : total;
    for (int64_t j = first * TILE; j < stop; ++j) {
      if ((uint64_t)positions[j] >= (uint64_t)n) {
#pragma omp atomic write
        bad = 1;
        return;
      }
      out[j] = x[positions[j]];
    }
  });
  return bad;
}
GC_CALLED(gc_gather)
