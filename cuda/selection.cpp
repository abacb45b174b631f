// Selection of the largest elements of segments, exact, of equal ones the first; positions as bits; scatter and gather.
//
// A long segment is read once: a sample gives a threshold that a few more than k elements reach, these are collected,
// and the k-th largest is found among them by histograms of ever finer bins. Where the sample misleads, as it does if
// most elements are equal, the histograms are taken over the segment itself: a fixed number of passes, whatever the
// values. A short segment's keys lie in first-level cache, where its threshold is found by counting.
#include <memory>
#include <type_traits>

#include "loops.hpp"
#include "selection.cuh"

using namespace gc;

namespace {

constexpr int SHORT = 8192;       // elements of a segment whose threshold is found by counting
constexpr int CHUNK = 4096;       // elements that are looked at in one go
constexpr int BINS = 2048;
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
  const int64_t useful = n / (GRAIN * TILE);
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

// ---- comparing -----------------------------------------------------------------------------------------------------

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
  uint32_t below = 0;
  const __m256i t = _mm256_set1_epi32(limit);
  GC_UNROLL
  for (int i = 0; i < 32; i += 8) {
    const __m256i u = _mm256_loadu_si256((const __m256i*)(raw + i));
    const __m256i key = std::is_same<Order, ByMagnitude>::value
                            ? _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff))
                            : _mm256_xor_si256(u, _mm256_set1_epi32((int)0x80000000));
    below |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(t, key))) << i;
  }
  return ~below;
#elif defined(__SSE2__)
  uint32_t below = 0;
  const __m128i t = _mm_set1_epi32(limit);
  GC_UNROLL
  for (int i = 0; i < 32; i += 4) {
    const __m128i u = _mm_loadu_si128((const __m128i*)(raw + i));
    const __m128i key = std::is_same<Order, ByMagnitude>::value
                            ? _mm_and_si128(u, _mm_set1_epi32(0x7fffffff))
                            : _mm_xor_si128(u, _mm_set1_epi32((int)0x80000000));
    below |= (uint32_t)_mm_movemask_ps(_mm_castsi128_ps(_mm_cmpgt_epi32(t, key))) << i;
  }
  return ~below;
#else
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= (uint32_t)(Order::key(raw[i]) >= limit) << i;
  return mask;
#endif
}

// Call f(i) for those of `count` elements that reach `limit`, in their order.
template <class Order, class F>
inline __attribute__((always_inline)) void each_reaching(const uint32_t* raw, int count, int32_t limit, F f) {
  int i = 0;
  GC_ROLLED for (; i + 64 <= count; i += 64) {
    uint64_t mask = reaching<Order>(raw + i, limit) | (uint64_t)reaching<Order>(raw + i + 32, limit) << 32;
    for (; mask; mask &= mask - 1) f(i + __builtin_ctzll(mask));
  }
  for (; i < count; ++i) {
    if (Order::key(raw[i]) >= limit) f(i);
  }
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

// ---- thresholds ----------------------------------------------------------------------------------------------------

// Kept are the keys above `key`, and of those equal to it the first `room`.
struct Limit {
  int32_t key;
  int64_t room;
};

// The k-th largest key; `each(part, f)` calls f(raw, count) for the elements of a part, as often as it is asked.
template <class Order, class Each>
Limit kth(int64_t k, int parts, int threads, Each each) {
  uint32_t low = 0, high = 0xffffffffu;  // of keys with their sign bit flipped: unsigned ones
  int shift = 21;                        // 32 = 11 + 11 + 10 bits
  std::unique_ptr<uint32_t[]> counts(new uint32_t[(size_t)parts * BINS]);
  for (;;) {
    each_part(parts, threads, [&](int p) {
      uint32_t* count = counts.get() + (size_t)p * BINS;
      memset(count, 0, BINS * sizeof *count);
      each(p, [=](const uint32_t* raw, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
          const uint32_t place = ((uint32_t)Order::key(raw[i]) ^ 0x80000000u) - low;
          if (place <= high - low) ++count[place >> shift];
        }
      });
    });
    int bin = BINS;
    for (int64_t here = 0;;) {
      --bin;
      here = 0;
      for (int p = 0; p < parts; ++p) here += counts[(size_t)p * BINS + bin];
      if (here >= k || bin == 0) break;
      k -= here;
    }
    low += (uint32_t)bin << shift;
    if (shift == 0) return Limit{(int32_t)(low ^ 0x80000000u), k};
    high = low + ((1u << shift) - 1);
    shift = shift > 10 ? 10 : 0;
  }
}

// The k-th largest of few keys: bounds are moved together by counting, from near `guess`.
Limit kth_short(const int32_t* keys, int n, int k, int32_t guess) {
  int32_t low = keys[0], high = keys[0];  // at least k keys reach `low`, fewer than k go beyond `high`
#pragma omp simd reduction(min : low) reduction(max : high)
  for (int i = 0; i < n; ++i) {
    low = keys[i] < low ? keys[i] : low;
    high = keys[i] > high ? keys[i] : high;
  }
  const auto reach = [=](int32_t limit) {
    int found = 0;
#pragma omp simd reduction(+ : found)
    for (int i = 0; i < n; ++i) found += keys[i] >= limit;
    return found;
  };
  uint32_t step = 1u << 18;
  bool over = false, under = false;
  while (low < high) {
    const uint32_t width = (uint32_t)high - (uint32_t)low;
    int32_t middle = (int32_t)((uint32_t)low + width / 2 + 1);
    if (!(over && under)) {  // no bound is near yet
      if (guess > low && guess <= high) middle = guess;
    }
    const int found = reach(middle);
    if (found == k) return Limit{middle - 1, 0};  // above the smallest key, so there is one below
    if (found > k) {
      low = middle;
      under = true;
      guess = step < (uint32_t)high - (uint32_t)low ? (int32_t)((uint32_t)low + step) : low;
    } else {
      high = middle - 1;
      over = true;
      guess = step < (uint32_t)high - (uint32_t)low ? (int32_t)((uint32_t)high - step) : low;
    }
    step = step < 1u << 28 ? 4 * step : 0xffffffffu;
  }
  int above = 0;
#pragma omp simd reduction(+ : above)
  for (int i = 0; i < n; ++i) above += keys[i] > low;
  return Limit{low, k - above};
}

// A key that somewhat more than k of n elements reach, probably.
int32_t sampled_limit(const Floats& source, int64_t start, int64_t n, int64_t k) {
  const int64_t wanted = n / 64, size = wanted < 1024 ? 1024 : wanted < 32768 ? wanted : 32768, stride = n / size;
  std::unique_ptr<uint32_t[]> sample(new uint32_t[size]);
  for (int64_t i = 0; i < size; ++i) {
    sample[i] = source.x[start + i * stride + (uint32_t)i * 2654435761u % (uint64_t)stride];
  }
  const double share = (double)k / (double)n * (double)size;
  const int64_t rank = (int64_t)(share + 5 * __builtin_sqrt(share)) + 8;
  if (rank >= size) return -0x7fffffff - 1;
  return kth<ByMagnitude>(rank, 1, 1, [&](int, auto f) { f(sample.get(), size); }).key;
}

int32_t sampled_limit(const Words&, int64_t, int64_t n, int64_t k) {
  const double share = ((double)k + 6 * __builtin_sqrt((double)k) + 16) / (double)n;
  return share >= 1 ? -0x7fffffff - 1 : (int32_t)((int64_t)((1 - share) * 0x1p32) - (1ll << 31));
}

// ---- selection -----------------------------------------------------------------------------------------------------

// Where the kept elements go: positions, and unless null their values.
struct Kept {
  int64_t* positions;
  uint32_t* values;

  Kept from(int64_t index) const { return Kept{positions + index, values ? values + index : nullptr}; }
};

// Write those of `count` elements, which begin at element `start`, that are within the limit, and count them off.
template <class Order>
void emit(const uint32_t* raw, int count, int64_t start, Limit& limit, Kept& out) {
  int64_t* positions = out.positions;
  uint32_t* values = out.values;
  int64_t done = 0, room = limit.room;
  const int32_t bound = limit.key;
  if (room == 0) {  // `bound` is not the largest of all integers: there are keys above it
    each_reaching<Order>(raw, count, bound + 1, [&](int i) {
      positions[done] = start + i;
      if (values) values[done] = raw[i];
      ++done;
    });
  } else {
    each_reaching<Order>(raw, count, bound, [&](int i) {
      const bool tie = Order::key(raw[i]) == bound;
      if (tie && room == 0) return;
      room -= tie;
      positions[done] = start + i;
      if (values) values[done] = raw[i];
      ++done;
    });
  }
  limit.room = room;
  out = out.from(done);
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
  GC_ALIGNED int32_t keys[SHORT];
  const uint32_t* raw = source.read(start, n, scratch);
  GC_SIMD for (int i = 0; i < n; ++i) keys[i] = Order::key(raw[i]);
  Limit limit = kth_short(keys, n, k, guess);
  const int32_t found = limit.key;
  emit<Order>(raw, n, start, limit, out);
  return found;
}

template <class Source>
void select_long(const Source& source, int64_t start, int64_t n, int64_t k, int threads, const Kept& out) {
  using Order = typename Source::Order;
  threads = useful_threads(n, threads);
  const int parts = threads > (n + PART - 1) / PART ? threads : (int)((n + PART - 1) / PART);
  const auto edge = [=](int p) { return p == parts ? n : n / CHUNK * p / parts * CHUNK; };

  struct Part {
    std::unique_ptr<uint32_t[]> index, raw;  // of the candidates, from the part's beginning
    int64_t count = 0;
    bool full = false;
  };
  std::unique_ptr<Part[]> found(new Part[parts]);
  const int64_t most = 2 * k + k / 2 + 4096;
  const int32_t threshold = sampled_limit(source, start, n, k);
  each_part(parts, threads, [&](int p) {
    Part& part = found[p];
    const int64_t first = edge(p), last = edge(p + 1), size = last - first < most ? last - first : most;
    part.index.reset(new uint32_t[size + CHUNK]);
    part.raw.reset(new uint32_t[size + CHUNK]);
    uint32_t *index = part.index.get(), *raws = part.raw.get();
    GC_ALIGNED uint32_t scratch[CHUNK + SPARE];
    int64_t count = 0;
    for (int64_t at = first; at < last && !part.full; at += CHUNK) {
      const int here = (int)(last - at < CHUNK ? last - at : CHUNK);
      const uint32_t* raw = source.read(start + at, here, scratch);
      const uint32_t base = (uint32_t)(at - first);
      each_reaching<Order>(raw, here, threshold, [&](int i) {
        index[count] = base + (uint32_t)i;
        raws[count] = raw[i];
        ++count;
      });
      part.full = count > size;
    }
    part.count = count;
  });
  int64_t total = 0;
  bool collected = true;
  for (int p = 0; p < parts; ++p) {
    total += found[p].count;
    collected &= !found[p].full;
  }
  collected &= total >= k;

  // What is left to look at: the candidates, or all.
  const auto each = [&](int p, auto f) {
    if (collected) {
      f(found[p].raw.get(), found[p].count);
      return;
    }
    GC_ALIGNED uint32_t scratch[CHUNK + SPARE];
    for (int64_t at = edge(p); at < edge(p + 1); at += CHUNK) {
      const int64_t here = edge(p + 1) - at < CHUNK ? edge(p + 1) - at : CHUNK;
      f(source.read(start + at, (int)here, scratch), here);
    }
  };
  const Limit limit = kth<Order>(k, parts, threads, each);

  // Ties go to the first parts; so where each part's output begins depends on those before it.
  std::unique_ptr<int64_t[]> above(new int64_t[2 * parts]);
  int64_t* ties = above.get() + parts;
  each_part(parts, threads, [&](int p) {
    int64_t reached = 0, beyond = 0;
    each(p, [&](const uint32_t* raw, int64_t count) {
      reached += count_from<Order>(raw, count, limit.key);
      beyond += limit.key == 0x7fffffff ? 0 : count_from<Order>(raw, count, limit.key + 1);
    });
    above[p] = beyond;
    ties[p] = reached - beyond;
  });
  std::unique_ptr<int64_t[]> begin(new int64_t[parts]);
  int64_t written = 0, room = limit.room;
  for (int p = 0; p < parts; ++p) {
    begin[p] = written;
    ties[p] = ties[p] < room ? ties[p] : room;
    room -= ties[p];
    written += above[p] + ties[p];
  }
  each_part(parts, threads, [&](int p) {
    Kept here = out.from(begin[p]);
    Limit own{limit.key, ties[p]};
    if (!collected) {
      GC_ALIGNED uint32_t scratch[CHUNK + SPARE];
      for (int64_t at = edge(p); at < edge(p + 1); at += CHUNK) {
        const int count = (int)(edge(p + 1) - at < CHUNK ? edge(p + 1) - at : CHUNK);
        emit<Order>(source.read(start + at, count, scratch), count, start + at, own, here);
      }
      return;
    }
    const uint32_t *index = found[p].index.get(), *raw = found[p].raw.get();
    const int64_t base = start + edge(p), size = above[p] + ties[p];
    int64_t done = 0, left = own.room;
    for (int64_t i = 0; done < size; ++i) {  // no branches: what is not kept is written over
      const int32_t key = Order::key(raw[i]);
      const bool tie = key == own.key && left > 0;
      here.positions[done] = base + index[i];
      if (here.values) here.values[done] = raw[i];
      left -= tie;
      done += key > own.key || tie;
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

// ---- bitmaps -------------------------------------------------------------------------------------------------------

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
                                   float* values, int threads) {
  const Floats source{(const uint32_t*)x};
  select(source, (const Run*)runs, count, threads, Kept{positions, (uint32_t*)values});
  return 0;
}

// The k largest random words of each segment.
GC_API int64_t gc_random_positions(uint64_t seed, uint64_t offset, uint32_t step, uint32_t who, const int64_t* runs,
                                   int64_t count, int64_t* positions, int threads) {
  const Words source{Key{seed, offset, step, who}};
  select(source, (const Run*)runs, count, threads, Kept{positions, nullptr});
  return 0;
}

// Positions as a bitmap of n bits. Returns 1 if they do not increase or are not below n.
GC_API int64_t gc_pack_bitmap(const int64_t* positions, int64_t total, int64_t n, uint32_t* words, int threads) {
  return set_bits(total, n, words, threads, [=](int64_t j) { return positions[j]; });
}

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

// Positions from a bitmap of n bits. Returns 0, or 1: a bit is set from n on, 2: `number` bits are set, not `total`,
// 3: they do not increase, 4: a segment has not its own k.
GC_API int64_t gc_unpack_bitmap(const uint32_t* words, int64_t n, const int64_t* runs, int64_t count, int64_t total,
                                int64_t* positions, int64_t* number, int threads) {
  const int64_t bad = find_bits(words, n, total, positions, number, threads);
  return bad ? bad : check_positions(positions, total, (const Run*)runs, count);
}

// Positions from the coding of Elias and Fano. Returns as gc_unpack_bitmap, or 5: a low code after the last.
GC_API int64_t gc_unpack_gaps(const uint32_t* low_words, const uint32_t* high_words, int low, int64_t n,
                              const int64_t* runs, int64_t count, int64_t total, int64_t* positions, int64_t* number,
                              int threads) {
  int64_t bad = find_bits(high_words, total + ((n - total) >> low), total, positions, number, threads);
  if (bad) return bad;
  if (low) {
    with_bits(low, [&](auto b) { bad = add_low_bits<decltype(b)::value>(low_words, total, positions, threads); });
    if (bad) return 5;
  }
  return check_positions(positions, total, (const Run*)runs, count);
}

// Positions of 32 bits. Returns as gc_unpack_bitmap.
GC_API int64_t gc_unpack_int32(const int32_t* indices, const int64_t* runs, int64_t count, int64_t total,
                               int64_t* positions, int threads) {
  (void)threads;
  GC_SIMD for (int64_t i = 0; i < total; ++i) positions[i] = indices[i];
  return check_positions(positions, total, (const Run*)runs, count);
}

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

// The sum of `number` sparse tensors of n elements, in their order, divided by `divisor`: tensor p has totals[p] values
// at increasing positions. Returns as gc_scatter.
GC_API int64_t gc_scatter_mean(const float* const* values, const int64_t* const* positions, const int64_t* totals,
                               int64_t number, float divisor, float* out, int64_t n, int threads) {
  int64_t bad = 0;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    GC_ALIGNED float row[TILE] = {};
    uint64_t touched[TILE / 64] = {};
    std::unique_ptr<int64_t[]> at(new int64_t[number]);
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
