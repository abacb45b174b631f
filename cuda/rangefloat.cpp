// Range floats (Wang et al. 2020) on the CPU: see gcbench.ops.rangefloat. A grid is (base, P): the first step and how many
// codes are positive. Packing reads 8 bytes per element, for the range and for the codes, and writes bits / 8.
#include "called.hpp"

using namespace gc;

namespace {

constexpr int RANGE_BITS = 16;  // of the widest code
constexpr int LEAD = 512;       // distance of the prefetch from the packing, in values
constexpr int FAR = 2 * LEAD;   // and from the search for the range, which is faster

// What encoding takes from a grid.
struct RangeCoder {
  int32_t first;               // half a step, less the steps below code 1: added to a magnitude's bits
  int32_t positive, negative;  // codes of each sign
  int32_t skipped;             // what the codes of negative values begin after, or 0 if there are none
  float nearest;               // half of the smallest magnitude, from which on a code is not 0
};

struct RangeFormat {
  int bits, mantissa;

  GC_HD uint32_t codes() const { return (1u << bits) - 1; }
  GC_HD int32_t top() const { return 255 << mantissa; }  // the step of infinity
  GC_HD int32_t base(int32_t grid) const { return grid >> bits; }
  GC_HD int32_t positive(int32_t grid) const { return grid & (int32_t)codes(); }

  // The step of a magnitude, at most the largest finite one; `magnitude` are the bits of a float without its sign.
  GC_HD int32_t step(uint32_t magnitude) const {
    const int32_t step = (int32_t)(magnitude + (1u << (22 - mantissa))) >> (23 - mantissa);
    return step < top() - 1 ? step : top() - 1;
  }

  // The bits of the float of a step; of infinity where it is not finite.
  GC_HD uint32_t value(int32_t step) const {
    return (uint32_t)(step < top() ? step : top()) << (23 - mantissa);
  }

  // The grid of a group, whose largest and least value have the magnitudes `up` and `down`: 0 if of the other sign.
  GC_HD int32_t grid(uint32_t up, uint32_t down) const {
    const int32_t a = step(up) + 1, b = step(down) + 1, all = (int32_t)codes();
    const int32_t one = (a > b ? a : b) - all, both = (a + b - all + 1) >> 1;
    int32_t base = one > both ? one : both;
    base = base < 1 ? 1 : base;
    int32_t positive = a - base;
    positive = positive < 0 ? 0 : positive > all ? all : positive;
    return (int32_t)((uint32_t)base << bits | (uint32_t)positive);
  }

  // Whether `grid` can have returned it.
  GC_HD bool valid(int32_t grid) const { return base(grid) >= 1 && base(grid) + positive(grid) <= top(); }

  GC_HD RangeCoder coder(int32_t base, int32_t positive) const {
    // Magnitudes that round to infinity get the last finite step, which the grid's largest code may be beyond.
    const int32_t rest = (int32_t)codes() - positive, room = top() - base, negative = rest < room ? rest : room;
    const int32_t first = (1 << (22 - mantissa)) - (int32_t)((uint32_t)(base - 1) << (23 - mantissa));
    return RangeCoder{first, positive, negative, negative > 0 ? positive : 0, float_of(value(base)) * 0.5f};
  }

  // The code of the float with the bits `x`.
  GC_HD uint32_t encode(uint32_t x, const RangeCoder& coder) const {
    const uint32_t size = x & 0x7fffffffu;
    const int32_t sign = (int32_t)x >> 31;  // all ones or none
    const int32_t top = coder.positive ^ ((coder.positive ^ coder.negative) & sign);
    int32_t code = (int32_t)(size + (uint32_t)coder.first) >> (23 - mantissa);
    code = code > 1 ? code : 1;
    code = code < top ? code : top;
    code += coder.skipped & sign;
    return (uint32_t)code & -(uint32_t)(float_of(size) >= coder.nearest);
  }

  // The bits of the float of a code.
  GC_HD uint32_t decode(uint32_t code, int32_t base, int32_t positive) const {
    const int32_t own = (int32_t)code, negative = own > positive;
    const uint32_t size = value(own - (negative ? positive : 0) + base - 1);
    return (own == 0 ? 0u : size) | (uint32_t)negative << 31;
  }
};

struct GroupRun {  // adjacent groups of one length
  int64_t rows, length;
};

// The groups of consecutive values, from the one that holds a given value on.
class Groups {
 public:
  Groups(const GroupRun* runs, int64_t value) : run_(runs) {
    int64_t start = 0;
    while (start + run_->rows * run_->length <= value) {
      start += run_->rows * run_->length;
      index_ += run_->rows;
      ++run_;
    }
    row_ = (value - start) / run_->length;
    index_ += row_;
    end_ = start + (row_ + 1) * run_->length;
  }

  int64_t index() const { return index_; }
  int64_t end() const { return end_; }  // the first value that is not in it

  void next() {  // there is one, as long as there are values
    ++index_;
    if (++row_ == run_->rows) {
      row_ = 0;
      ++run_;
    }
    end_ += run_->length;
  }

 private:
  const GroupRun* run_;
  int64_t row_, end_, index_ = 0;
};

// Prefetch N values from `from` on.
template <int N>
inline void ask(const uint32_t* from) {
  GC_UNROLL
  for (int k = 0; k < N; k += 16) __builtin_prefetch(from + k);
}

// Encode and pack the whole tile `values`, row by row, so that the prefetch is spread over all of the work.
template <class F>
inline void pack_whole_tile(F code, const uint32_t* values, int bits, uint32_t* out, bool stream) {
  GC_ALIGNED uint32_t buffer[RANGE_BITS * LANES], row[LANES] = {};
  uint32_t* word = stream ? buffer : out;
  int shift = 0;  // of the next code in its word
  GC_ROLLED for (int i = 0; i < TILE; i += LANES) {
    ask<LANES>(values + i + LEAD);
    if (shift + bits < 32) {
      GC_SIMD for (int l = 0; l < LANES; ++l) row[l] |= code(i + l) << shift;
    } else {
      GC_SIMD for (int l = 0; l < LANES; ++l) {
        const uint32_t own = code(i + l);
        word[l] = row[l] | own << shift;
        row[l] = own >> (32 - shift);
      }
      word += LANES;
      shift -= 32;
    }
    shift += bits;
  }
  if (stream) stream_lines(out, buffer, bits * LANES / 16);
}

template <class F>
inline void pack_last(F code, int count, int bits, uint32_t* out) {
  uint32_t codes[TILE];
  const int lanes = (count + LANES - 1) / LANES;
  for (int i = 0; i < LANES * lanes; ++i) codes[i] = i < count ? code(i) : 0;
  pack_codes(bits, codes, lanes, out);
}

struct Peaks {  // bits of the magnitudes of the largest and the least value; 0 if of the other sign
  uint32_t up, down;
};

Peaks peaks_of(const uint32_t* x, int64_t n) {
  constexpr int STEP = 64;
  VecI highest = {};  // as signed integers, floats below 0 are below all others
  VecU lowest = {};   // as unsigned ones, above all others, the least on top
  const auto keep = [&highest, &lowest, x](int64_t from) {
    GC_UNROLL
    for (int k = 0; k < STEP; k += WIDTH) {
      const VecU here = load_vector<VecU>(x + from + k);
      highest = (VecI)here > highest ? (VecI)here : highest;
      lowest = here > lowest ? here : lowest;
    }
  };
  int64_t i = n < APART ? 0 : from_four<STEP>(n, keep);
  GC_ROLLED for (; i + STEP <= n; i += STEP) {
    ask<STEP>(x + i + FAR);
    keep(i);
  }
  int32_t up = 0;
  uint32_t down = 0x80000000u;
  for (int l = 0; l < WIDTH; ++l) {
    up = highest[l] > up ? highest[l] : up;
    down = lowest[l] > down ? lowest[l] : down;
  }
  for (; i < n; ++i) {
    up = (int32_t)x[i] > up ? (int32_t)x[i] : up;
    down = x[i] > down ? x[i] : down;
  }
  return {(uint32_t)up, down & 0x7fffffffu};
}

void raise_to(uint32_t* peak, uint32_t value) {
  uint32_t before = __atomic_load_n(peak, __ATOMIC_RELAXED);
  while (before < value &&
         !__atomic_compare_exchange_n(peak, &before, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

// For each tile of n values, call f(tile, count, base, positive): base(i) and positive(i) are of value i's grid, one
// for all where a tile lies within a group.
template <class F>
void each_tile(const GroupRun* runs, const RangeFormat form, const int32_t* grids, int64_t n, int threads, F f) {
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    GC_ALIGNED int32_t base[TILE], positive[TILE];
    Groups groups(runs, first * TILE);
    for (int64_t t = first; t < last; ++t) {
      const int64_t start = t * TILE;
      const int count = (int)(n - start < TILE ? n - start : TILE);
      while (groups.end() <= start) groups.next();
      if (groups.end() >= start + count) {
        const int32_t grid = grids[groups.index()];
        const int32_t own = form.base(grid), above = form.positive(grid);
        f(t, count, [own](int) { return own; }, [above](int) { return above; });
        continue;
      }
      for (int done = 0;; groups.next()) {
        const int32_t grid = grids[groups.index()], own = form.base(grid), above = form.positive(grid);
        const int stop = groups.end() - start < count ? (int)(groups.end() - start) : count;
        GC_SIMD for (int i = done; i < stop; ++i) {
          base[i] = own;
          positive[i] = above;
        }
        done = stop;
        if (stop == count) break;
      }
      for (int i = count; i < TILE; ++i) base[i] = positive[i] = 0;
      const int32_t *bases = base, *positives = positive;
      f(t, count, [bases](int i) { return bases[i]; }, [positives](int i) { return positives[i]; });
    }
  });
}

}  // namespace

// The grid of each group of values, (n,), and their packed codes. `runs` are (rows, length) of groups, none empty.
int64_t gc_range_pack(const float* values, int64_t n, const int64_t* runs, int64_t groups, int bits, int mantissa,
                      int32_t* grids, uint32_t* words, int threads) {
  const RangeFormat form{bits, mantissa};
  const GroupRun* all = (const GroupRun*)runs;
  const uint32_t* raw = (const uint32_t*)values;
  const bool stream = n >= STREAM_FROM && ((uintptr_t)words & 63) == 0;
  std::unique_ptr<uint32_t[]> all_peaks(new uint32_t[2 * groups]());
  uint32_t* peaks = all_peaks.get();
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    const int64_t stop = last * TILE < n ? last * TILE : n;
    Groups group(all, first * TILE);
    for (int64_t at = first * TILE; at < stop; group.next()) {
      const int64_t end = group.end() < stop ? group.end() : stop;
      const Peaks own = peaks_of(raw + at, end - at);
      raise_to(peaks + 2 * group.index(), own.up);
      raise_to(peaks + 2 * group.index() + 1, own.down);
      if (end == n) break;
      at = end;
    }
  });
  for (int64_t g = 0; g < groups; ++g) grids[g] = form.grid(peaks[2 * g], peaks[2 * g + 1]);
  each_tile(all, form, grids, n, threads, [=](int64_t t, int count, auto base, auto positive) {
    const uint32_t* part = raw + t * TILE;
    const RangeFormat own = form;
    const auto code = [=](int i) { return own.encode(part[i], own.coder(base(i), positive(i))); };
    uint32_t* out = words + t * bits * LANES;
    if (count == TILE) {
      pack_whole_tile(code, part, bits, out, stream);
    } else {
      pack_last(code, count, bits, out);
    }
  });
  return 0;
}
GC_CALLED(gc_range_pack)

// The values of packed codes, (n,). Returns 1 for an invalid grid, 2 for a code after the last, 3 if a
// value is not finite.
int64_t gc_range_unpack(const uint32_t* words, const int32_t* grids, int64_t groups, int64_t n, const int64_t* runs,
                        int bits, int mantissa, float* out, int threads) {
  const RangeFormat form{bits, mantissa};
  for (int64_t g = 0; g < groups; ++g) {
    if (!form.valid(grids[g])) return 1;
  }
  int64_t bad = 0;
  each_tile((const GroupRun*)runs, form, grids, n, threads,
            [&](int64_t t, int count, auto base, auto positive) {
              GC_ALIGNED uint32_t codes[TILE], values[TILE];
              with_bits(bits, [=, c = codes](auto b) {
                constexpr int B = decltype(b)::value;
                unpack_tile<B>(words + t * B * LANES, count, [=](int i, uint32_t code) { c[i] = code; });
              });
              const RangeFormat own = form;
              uint32_t beyond = 0;
#pragma omp simd reduction(| : beyond)
              for (int i = 0; i < count; ++i) {
                const uint32_t value = own.decode(codes[i], base(i), positive(i));
                values[i] = value;
                beyond |= (uint32_t)((value & 0x7fffffffu) >= 0x7f800000u);
              }
              uint32_t more = 0;
              for (int i = count; i < (count + LANES - 1) / LANES * LANES; ++i) more |= codes[i];
              report(bad, more ? 2 : beyond ? 3 : 0);
              write_tile(out + t * TILE, (const float*)values, count, n >= STREAM_FROM);
            });
  return bad;
}
GC_CALLED(gc_range_unpack)
