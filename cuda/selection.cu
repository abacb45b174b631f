// Selection of the largest of each segment on a GPU, exact, of equal ones the first; positions as bits; scatter, gather.
//
// One warp processes a segment of up to 1024 elements, one block up to 8192: ranks (|x| as an integer, or a random word)
// are read once and stay in registers, where interval halving and counting locate the k-th largest. All longer segments
// take eight launches:
//   start      a sample of 8192 gives a limit that somewhat more than k reach (for random words k and n give it)
//   mark       candidates, who reach it, as bits and counts of chunks of 8192; the last block adds the counts up
//   collect    their elements and positions, in order
//   histogram  three times 2048 bins, each time of one bin before, find the k-th largest among them
//   count      how many of a chunk lie above it, and equal it; the last block adds these up
//   write      those above, and the first of the equal ones
// Where the sample misleads (most elements are equal, say) or more than a third is kept, the last five launches read the
// segment itself instead of candidates: 20 bytes per element more, whatever the values. Random words are made where they
// are looked at, and never written. Sums are of integers, so that no order of blocks shows in the result.
//
// Bytes per element, 1 % kept: mark 4 + 1/8, collect 1/8 + 0.5 (sectors of 32 bytes) + 0.2, the rest 0.9 for candidates,
// 0.12 written: 5.9. At 1e8 elements and 4.3 TB/s 0.137 ms, and 8 launches of some 3 us (estimated).
// Random words: Philox for each once, 0.25 block an element: bound by instructions, not by memory.
// set_bits, count_bits, write_bits: n / 8 bytes, and 8 bytes per position: 0.005 ms at 1e8 and 1 % (estimated).
// scatter: writes 4 bytes per element once, reads 12 per value: 0.096 ms (estimated); gather: 12 and a sector per value.
//
// A position out of range or order causes a trap, like torch's indexing on a GPU, because raising an error would
// synchronize the device. Flags check payloads' positions before.
#include "selection.cuh"
#include "sparse.cuh"
#include "tiles.cuh"

using namespace gc;

namespace {

constexpr int WARPS = 8, THREADS = WARPS * LANES;
constexpr int CHUNK = WARPS * TILE;
constexpr int BINS = 2048, BIN_BITS = 11;
constexpr int SPAN_BITS = 32 * TILE;  // bits of a bitmap that a block has
constexpr uint32_t EACH = 0xffffffffu;
constexpr int MOST = 64;
enum { AFTER_LAST = 1, WRONG_NUMBER = 2, AFTER_LAST_LOW = 3, NOT_INCREASING = 4, WRONG_SEGMENT = 5 };

__device__ __forceinline__ int lane_here() { return (int)(threadIdx.x % LANES); }
__device__ __forceinline__ int warp_here() { return (int)(threadIdx.x / LANES); }
__device__ __forceinline__ uint32_t lanes_below() { return (1u << lane_here()) - 1u; }

// ---- where elements come from ------------------------------------------------------------------------------------

struct Source {
  const uint32_t* x;  // floats
  Key key;            // or random words
};

// Elements start + 32 j + lane of a tile of `count`, none of them beyond `rows` rows; zeros beyond the count.
__device__ __forceinline__ void load_rows(const uint32_t* __restrict__ x, int count, int rows, uint32_t (&raw)[32]) {
  GC_UNROLL
  for (int g = 0; g < 32; g += 8) {
    if (g < rows) {
      GC_UNROLL
      for (int j = g; j < g + 8; ++j) {
        const int i = j * LANES + lane_here();
        raw[j] = i < count ? x[i] : 0u;
      }
    } else {
      GC_UNROLL
      for (int j = g; j < g + 8; ++j) raw[j] = 0u;
    }
  }
}

template <class Order>
struct Reader;

template <>
struct Reader<ByMagnitude> {
  static constexpr bool SAMPLED = true;

  static __device__ __forceinline__ uint32_t at(const Source& in, int64_t i) { return in.x[i]; }
  static __device__ __forceinline__ void load(const Source& in, int64_t start, int count, int rows, uint32_t (&raw)[32]) {
    load_rows(in.x + start, count, rows, raw);
  }
};

template <>
struct Reader<ByWord> {
  static constexpr bool SAMPLED = false;

  static __device__ __forceinline__ uint32_t at(const Source& in, int64_t i) {
    const uint64_t element = in.key.offset + (uint64_t)i;
    const Block block = key_block(in.key, element / 4, WORD_KIND);
    const int word = (int)(element % 4);
    return word == 0 ? block.x : word == 1 ? block.y : word == 2 ? block.z : block.w;
  }

  // A lane makes whole blocks, and rows are read from what the warp has made.
  static __device__ __forceinline__ void load(const Source& in, int64_t start, int count, int rows, uint32_t (&raw)[32]) {
    __shared__ __align__(16) uint32_t made[WARPS][TILE + 4];
    uint32_t* own = made[warp_here()];
    const uint64_t element = in.key.offset + (uint64_t)start;
    const int skip = (int)(element % 4), blocks = count > 0 ? (skip + count + 3) / 4 : 0;
#pragma unroll 1
    for (int b = lane_here(); b < blocks; b += LANES) {
      const Block block = key_block(in.key, element / 4 + b, WORD_KIND);
      *(uint4*)(own + 4 * b) = make_uint4(block.x, block.y, block.z, block.w);
    }
    __syncwarp();
    load_rows(own + skip, count, rows, raw);
    __syncwarp();
  }
};

// ---- sums of blocks ----------------------------------------------------------------------------------------------

template <int TEAM>
__device__ __forceinline__ int team_sum(int value) {
  value = __reduce_add_sync(EACH, value);
  if constexpr (TEAM == 1) {
    return value;
  } else {
    __shared__ int sums[TEAM];
    if (lane_here() == 0) sums[warp_here()] = value;
    __syncthreads();
    int total = 0;
    GC_UNROLL
    for (int w = 0; w < TEAM; ++w) total += sums[w];
    __syncthreads();
    return total;
  }
}

// The largest of all lanes' `top`, and the least in `least`.
template <int TEAM>
__device__ __forceinline__ uint32_t team_range(uint32_t top, uint32_t* least) {
  *least = __reduce_min_sync(EACH, top);
  top = __reduce_max_sync(EACH, top);
  if constexpr (TEAM > 1) {
    __shared__ uint32_t most[TEAM], fewest[TEAM];
    if (lane_here() == 0) {
      most[warp_here()] = top;
      fewest[warp_here()] = *least;
    }
    __syncthreads();
    GC_UNROLL
    for (int w = 0; w < TEAM; ++w) {
      top = most[w] > top ? most[w] : top;
      *least = fewest[w] < *least ? fewest[w] : *least;
    }
    __syncthreads();
  }
  return top;
}

// The sum of `value` of the warps before this one, `value` being one for a warp.
template <int TEAM>
__device__ __forceinline__ int warps_before(int value) {
  if constexpr (TEAM == 1) {
    return 0;
  } else {
    __shared__ int sums[TEAM];
    if (lane_here() == 0) sums[warp_here()] = value;
    __syncthreads();
    int before = 0;
    GC_UNROLL
    for (int w = 0; w < TEAM; ++w) before += w < warp_here() ? sums[w] : 0;
    __syncthreads();
    return before;
  }
}

// The sum of `value` of the threads before this one of a block, and of all.
__device__ __forceinline__ int64_t threads_before(int64_t value, int64_t* total) {
  __shared__ int64_t sums[WARPS];
  int64_t here = value;
  GC_UNROLL
  for (int step = 1; step < LANES; step *= 2) {
    const int64_t other = __shfl_up_sync(EACH, here, step);
    if (lane_here() >= step) here += other;
  }
  if (lane_here() == LANES - 1) sums[warp_here()] = here;
  __syncthreads();
  int64_t before = 0, all = 0;
  GC_UNROLL
  for (int w = 0; w < WARPS; ++w) {
    before += w < warp_here() ? sums[w] : 0;
    all += sums[w];
  }
  __syncthreads();
  *total = all;
  return before + here - value;
}

// Whether this block is the last of `blocks` that come here: it then sees what the others have written. The ticket goes
// from 0 back to 0.
__device__ __forceinline__ bool is_last(uint32_t* ticket, int64_t blocks) {
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, 1u) == (uint32_t)(blocks - 1);
    if (last) *ticket = 0;
  }
  __syncthreads();
  __threadfence();
  return last;
}

// Replace counts that other blocks have written by the sums of those before; returns the sum of all. By a whole block.
__device__ int64_t add_up(int64_t* counts, int64_t number) {
  constexpr int OWN = 8;
  volatile int64_t* fresh = counts;
  int64_t before = 0;
#pragma unroll 1
  for (int64_t begin = 0; begin < number; begin += OWN * THREADS) {
    const int64_t first = begin + OWN * (int64_t)threadIdx.x;
    int64_t own[OWN], sum = 0, total;
    GC_UNROLL
    for (int q = 0; q < OWN; ++q) {
      own[q] = first + q < number ? fresh[first + q] : 0;
      sum += own[q];
    }
    int64_t here = before + threads_before(sum, &total);
    GC_UNROLL
    for (int q = 0; q < OWN; ++q) {
      if (first + q < number) fresh[first + q] = here;
      here += own[q];
    }
    before += total;
  }
  return before;
}

// ---- a team's own elements ---------------------------------------------------------------------------------------

// Kept are the ranks above `rank`, and of those equal to it the first `room`.
struct Limit {
  uint32_t rank;
  int64_t room;
};

// The sum of f over a lane's elements, of which those beyond the count give 0.
template <class F>
__device__ __forceinline__ int count_rows(const uint32_t (&raw)[32], int rows, F f) {
  int found = 0;
  GC_UNROLL
  for (int g = 0; g < 32; g += 8) {
    if (g < rows) {
      GC_UNROLL
      for (int j = g; j < g + 8; ++j) found += (int)f(raw[j], j * LANES + lane_here());
    }
  }
  return found;
}

// The k-th largest of a team's elements, k at least 1.
template <class Order, int TEAM>
__device__ __forceinline__ Limit kth(const uint32_t (&raw)[32], int rows, int k) {
  uint32_t top = 0, low;
  GC_UNROLL
  for (int j = 0; j < 32; ++j) top = Order::rank(raw[j]) > top ? Order::rank(raw[j]) : top;
  // At least k reach `low`, fewer than k go beyond `high`. Each lane has an element that reaches the least of their tops.
  uint32_t high = team_range<TEAM>(top, &low);
  if (k > TEAM * LANES) low = 0;
#pragma unroll 1
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2 + 1;
    const int found =
        team_sum<TEAM>(count_rows(raw, rows, [=](uint32_t own, int) { return Order::rank(own) >= middle; }));
    if (found == k) return Limit{middle - 1, 0};
    if (found > k) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return Limit{low, k - team_sum<TEAM>(count_rows(raw, rows, [=](uint32_t own, int) { return Order::rank(own) > low; }))};
}

// How many of a lane's elements lie above a rank, and 2^16 times how many equal it.
template <class Order>
__device__ __forceinline__ int count_both(const uint32_t (&raw)[32], int count, int rows, uint32_t limit) {
  return count_rows(raw, rows, [=](uint32_t own, int i) {
    const uint32_t rank = Order::rank(own);
    return rank > limit ? 1 : rank == limit && i < count ? 1 << 16 : 0;
  });
}

// Call write(place, i, raw) for those of a team's elements that are kept, in their order. Before the team's first one
// lie `above` elements above the limit and `ties` equal to it. The rows are used up.
template <class Order, int TEAM, class Write>
__device__ __forceinline__ void emit(uint32_t (&raw)[32], int count, int rows, const Limit& limit, int64_t above,
                                     int64_t ties, Write write) {
  if constexpr (TEAM > 1) {
    const int both = warps_before<TEAM>(__reduce_add_sync(EACH, count_both<Order>(raw, count, rows, limit.rank)));
    above += both & 0xffff;
    ties += both >> 16;
  }
  // From here on the rest of the room and what was found are a tile's: numbers of 32 bits.
  const int64_t rest = limit.room - ties, to = above + (rest > 0 ? ties : limit.room);
  const int room = rest < 0 ? 0 : rest < TILE ? (int)rest : TILE;
  int over_here = 0, even_here = 0;
#pragma unroll 1
  for (int g = 0; g < rows; g += 8) {
    GC_UNROLL
    for (int j = 0; j < 8; ++j) {
      const int i = (g + j) * LANES + lane_here();
      const uint32_t rank = Order::rank(raw[j]);
      const bool over = rank > limit.rank, even = rank == limit.rank && i < count;
      const uint32_t all_over = __ballot_sync(EACH, over), all_even = __ballot_sync(EACH, even);
      if (all_over | all_even) {
        const int equal = even_here + __popc(all_even & lanes_below());
        if (over || (even && equal < room)) {
          write(to + (over_here + __popc(all_over & lanes_below()) + (equal < room ? equal : room)), i, raw[j]);
        }
        over_here += __popc(all_over);
        even_here += __popc(all_even);
      }
    }
    GC_UNROLL
    for (int j = 0; j < 24; ++j) raw[j] = raw[j + 8];  // so that rows have fixed registers in a loop that is small
  }
}

// The segment `which[team]`, or `team`, of `table`, (4, m): where each starts, its elements, k, where the kept ones go.
template <class Order, int TEAM>
__device__ __forceinline__ void select_short(const Source& in, const int64_t* __restrict__ table, int64_t m,
                                             const int64_t* __restrict__ which, int64_t number,
                                             int64_t* __restrict__ positions, uint32_t* __restrict__ values) {
  const int64_t team = TEAM > 1 ? blockIdx.x : ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
  if (team >= number) return;  // uniform in the warp
  const int64_t s = which ? which[team] : team, length = table[m + s], place = table[3 * m + s];
  const int skip = TEAM > 1 ? warp_here() * TILE : 0, keep = (int)table[2 * m + s];
  const int64_t start = table[s] + skip;
  const int left = (int)length - skip, count = left < 0 ? 0 : left < TILE ? left : TILE;
  const int rows = (count + LANES - 1) / LANES;
  uint32_t raw[32];
  Reader<Order>::load(in, start, count, rows, raw);
  const Limit limit = keep == (int)length ? Limit{0, length} : kth<Order, TEAM>(raw, rows, keep);
  emit<Order, TEAM>(raw, count, rows, limit, 0, 0, [&](int64_t at, int i, uint32_t own) {
    positions[place + at] = start + i;
    if (values) values[place + at] = own;
  });
}

// ---- long segments -----------------------------------------------------------------------------------------------

struct State {  // of one of them
  int64_t left;   // of [low, high] this is the rank, from the top, that is looked for
  int64_t room;   // see Limit
  int64_t total;  // candidates
  uint32_t low, high, shift, limit;
  uint32_t peak, ticket;
  int32_t candidates, done;  // whether candidates are looked at; whether limit and room are final
};

struct Long {
  const int64_t* table;  // (7, number + 1): see the enumeration
  int64_t number;
  State* states;
  unsigned long long* bins;  // (number, BINS)
  int64_t* counts;           // (2, chunks)
  uint32_t* bits;            // (chunks, THREADS): word i, bit j is element 32 i + j
  int64_t* places;           // positions of candidates
  uint32_t* raws;            // and their elements
  int64_t* positions;
  uint32_t* values;  // or null
};
enum { START, LENGTH, KEEP, PLACE, CHUNKS, CANDIDATES, GUESS };  // with the sums before: CHUNKS, CANDIDATES

struct Segment {
  int64_t s, length, keep, first, chunks, base, room;  // `base` and `room` are the candidates'
  State* state;

  __device__ __forceinline__ Segment(const Long& in, int64_t segment) : s(segment) {
    const int64_t wide = in.number + 1;
    const int64_t* own = in.table + s;
    length = own[LENGTH * wide];
    keep = own[KEEP * wide];
    first = own[CHUNKS * wide];
    chunks = own[CHUNKS * wide + 1] - first;
    base = own[CANDIDATES * wide];
    room = own[CANDIDATES * wide + 1] - base;
    state = in.states + s;
  }

  // Blocks that look at what there is to look at.
  __device__ __forceinline__ int64_t parts() const {
    return state->candidates ? (state->total + CHUNK - 1) / CHUNK : chunks;
  }
};

__device__ __forceinline__ int64_t chunks_of(const Long& in) { return in.table[CHUNKS * (in.number + 1) + in.number]; }

// A chunk: of a segment or of its candidates.
struct Chunk : Segment {
  int64_t chunk, own, start;  // its number, that within the segment, its first element of the flat tensor

  __device__ __forceinline__ Chunk(const Long& in, int64_t number)
      : Segment(in, last_not_above(in.table + CHUNKS * (in.number + 1), in.number, number)), chunk(number) {
    own = number - first;
    start = in.table[s] + own * CHUNK;
  }

  // Of `total` elements those that this warp has in its tile.
  __device__ __forceinline__ int count(int64_t total) const {
    const int64_t left = total - own * CHUNK - warp_here() * TILE;
    return left < 0 ? 0 : left < TILE ? (int)left : TILE;
  }
};

// Call f(chunk) for the chunks that a block of a small grid has, of those that there is something to look at in.
template <class F>
__device__ __forceinline__ void each_chunk(const Long& in, F f) {
  const int64_t chunks = chunks_of(in);
#pragma unroll 1
  for (int64_t number = blockIdx.x; number < chunks;) {
    const Chunk at(in, number);
    if (at.own < at.parts()) {
      f(at);
      number += gridDim.x;
    } else {  // on to the next segment
      number += (at.first + at.chunks - number + gridDim.x - 1) / gridDim.x * gridDim.x;
    }
  }
}

__device__ __forceinline__ void look_between(State* state, uint32_t low, uint32_t high, int64_t left) {
  const int used = 32 - __clz((int)(high - low));
  state->low = low;
  state->high = high;
  state->shift = used > BIN_BITS ? used - BIN_BITS : 0;
  state->left = left;
}

template <class Order>
__device__ __forceinline__ void start_long(const Source& in, const Long& all) {
  const Segment own(all, blockIdx.x);
  const int64_t begin = all.table[own.s], guess = all.table[GUESS * (all.number + 1) + own.s];
  for (int i = threadIdx.x; i < BINS; i += THREADS) all.bins[own.s * BINS + i] = 0;
  uint32_t limit = (uint32_t)guess;
  if (Reader<Order>::SAMPLED && own.room > 0) {
    uint32_t raw[32];
    GC_UNROLL
    for (int j = 0; j < 32; ++j) {  // one of each of as many parts as there are samples
      const uint32_t i = (uint32_t)(j * THREADS) + threadIdx.x;
      const int64_t from = i * own.length / CHUNK, to = (i + 1) * own.length / CHUNK;
      raw[j] = Reader<Order>::at(in, begin + from + (int64_t)(i * 2654435761u % (uint64_t)(to - from)));
    }
    const Limit found = kth<Order, WARPS>(raw, 32, (int)guess);
    limit = found.rank + (found.room == 0);
  }
  if (threadIdx.x != 0) return;
  State* state = own.state;
  const bool whole = own.keep == own.length;
  look_between(state, 0, Order::TOP, own.keep);
  state->room = whole ? own.length : 0;
  state->total = 0;
  state->limit = whole ? 0 : limit;
  state->peak = Reader<Order>::SAMPLED && own.room > 0 ? 0 : Order::TOP;
  state->ticket = 0;
  state->candidates = 0;
  state->done = whole;
}

template <class Order>
__device__ __forceinline__ void mark_chunk(const Source& in, const Long& all) {
  const Chunk at(all, blockIdx.x);
  if (at.room == 0) return;
  const int count = at.count(at.length), rows = (count + LANES - 1) / LANES;
  const uint32_t limit = at.state->limit;
  uint32_t raw[32], mine = 0, peak = 0;
  Reader<Order>::load(in, at.start + warp_here() * TILE, count, rows, raw);
  GC_UNROLL
  for (int j = 0; j < 32; ++j) {
    const uint32_t rank = Order::rank(raw[j]);
    const uint32_t reached = __ballot_sync(EACH, rank >= limit && j * LANES + lane_here() < count);
    if (j == lane_here()) mine = reached;
    peak = rank > peak ? rank : peak;
  }
  all.bits[(int64_t)blockIdx.x * THREADS + threadIdx.x] = mine;
  if (Reader<Order>::SAMPLED) {
    peak = __reduce_max_sync(EACH, peak);
    if (lane_here() == 0) atomicMax(&at.state->peak, peak);
  }
  const int found = team_sum<WARPS>(__popc(mine));
  if (threadIdx.x == 0) all.counts[blockIdx.x] = found;
  if (!is_last(&at.state->ticket, at.chunks)) return;
  const int64_t total = add_up(all.counts + at.first, at.chunks);
  if (threadIdx.x != 0) return;
  const bool enough = total >= at.keep && total <= at.room;
  const uint32_t high = *(volatile uint32_t*)&at.state->peak;
  at.state->total = total;
  at.state->candidates = enough;
  look_between(at.state, enough ? limit : 0, high, at.keep);
}

// One warp per chunk, eight words per lane.
template <class Order>
__device__ __forceinline__ void collect_chunk(const Source& in, const Long& all) {
  const int64_t number = (int64_t)blockIdx.x * WARPS + warp_here();
  if (number >= chunks_of(all)) return;  // uniform in the warp
  const Chunk at(all, number);
  if (!at.state->candidates) return;
  const uint4* words = (const uint4*)(all.bits + number * THREADS) + 2 * lane_here();
  const uint4 one = words[0], two = words[1];
  const uint32_t marks[8] = {one.x, one.y, one.z, one.w, two.x, two.y, two.z, two.w};
  int own = 0;
  GC_UNROLL
  for (int q = 0; q < 8; ++q) own += __popc(marks[q]);
  int before = own;
  GC_UNROLL
  for (int step = 1; step < LANES; step *= 2) {
    const int other = __shfl_up_sync(EACH, before, step);
    if (lane_here() >= step) before += other;
  }
  int64_t place = at.base + all.counts[number] + before - own;
  GC_UNROLL
  for (int q = 0; q < 8; ++q) {
    for (uint32_t left = marks[q]; left; left &= left - 1, ++place) {
      const int64_t i = at.start + (lane_here() * 8 + q) * 32 + __ffs((int)left) - 1;
      all.places[place] = i;
      all.raws[place] = Reader<Order>::at(in, i);
    }
  }
}

// What this warp has of a chunk of candidates, or of the segment.
template <class Order>
__device__ __forceinline__ int load_chunk(const Source& in, const Long& all, const Chunk& at, uint32_t (&raw)[32]) {
  const int64_t skip = at.own * CHUNK + warp_here() * TILE;
  if (at.state->candidates) {
    const int count = at.count(at.state->total);
    load_rows(all.raws + at.base + skip, count, 32, raw);
    return count;
  }
  const int count = at.count(at.length);
  Reader<Order>::load(in, at.start + warp_here() * TILE, count, 32, raw);
  return count;
}

// Find the bin that holds the rank that is looked for; the bins are zeros then.
__device__ __forceinline__ void pick_bin(unsigned long long* bins, State* state) {
  constexpr int OWN = BINS / THREADS;
  const int64_t left = state->left;
  const uint32_t low = state->low, high = state->high, shift = state->shift;
  int64_t counts[OWN], sum = 0, total;
  const int first = (THREADS - 1 - (int)threadIdx.x) * OWN;  // from the top
  GC_UNROLL
  for (int q = 0; q < OWN; ++q) {
    counts[q] = (int64_t)atomicExch(bins + first + q, 0ull);
    sum += counts[q];
  }
  int64_t above = threads_before(sum, &total);  // its barriers: all have read the state
  if (above >= left || above + sum < left) return;
  int bin = -1;
  int64_t here = 0;
  GC_UNROLL
  for (int q = OWN - 1; q >= 0; --q) {
    if (bin < 0) {
      if (above + counts[q] >= left) {
        bin = first + q;
        here = counts[q];
      } else {
        above += counts[q];
      }
    }
  }
  const uint32_t from = low + ((uint32_t)bin << shift), most = from + ((1u << shift) - 1u);
  if (shift == 0) {
    state->limit = from;
    state->room = left - above;
    state->done = 1;
  } else if (above + here == left) {  // all of the bin, which is not at 0: else all of the segment would be kept
    state->limit = from - 1;
    state->room = 0;
    state->done = 1;
  } else {
    look_between(state, from, most < high ? most : high, left - above);
  }
}

template <class Order>
__device__ __forceinline__ void histogram_chunk(const Source& in, const Long& all, const Chunk& at) {
  __shared__ uint32_t counts[BINS];
  if (at.state->done) return;
  const uint32_t low = at.state->low, high = at.state->high, shift = at.state->shift;
  for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = 0;
  __syncthreads();
  uint32_t raw[32];
  const int count = load_chunk<Order>(in, all, at, raw);
  uint32_t held = 0, number = 0;  // a bin and what came to it without another between
  GC_UNROLL
  for (int j = 0; j < 32; ++j) {
    const uint32_t rank = Order::rank(raw[j]);
    if (j * LANES + lane_here() < count && rank >= low && rank <= high) {
      const uint32_t bin = (rank - low) >> shift;
      if (bin != held) {
        if (number) atomicAdd(counts + held, number);
        held = bin;
        number = 0;
      }
      ++number;
    }
  }
  if (number) atomicAdd(counts + held, number);
  __syncthreads();
  unsigned long long* bins = all.bins + at.s * BINS;
  for (int i = threadIdx.x; i < BINS; i += THREADS) {
    if (counts[i]) atomicAdd(bins + i, (unsigned long long)counts[i]);
  }
  if (is_last(&at.state->ticket, at.parts())) pick_bin(bins, at.state);
}

template <class Order>
__device__ __forceinline__ void count_chunk(const Source& in, const Long& all, const Chunk& at) {
  uint32_t raw[32];
  const int count = load_chunk<Order>(in, all, at, raw);
  const uint32_t limit = at.state->limit;
  const int both = team_sum<WARPS>(count_both<Order>(raw, count, 32, limit));
  int64_t* even = all.counts + chunks_of(all);
  if (threadIdx.x == 0) {
    all.counts[at.chunk] = both & 0xffff;
    even[at.chunk] = both >> 16;
  }
  const int64_t parts = at.parts();
  if (!is_last(&at.state->ticket, parts)) return;
  add_up(all.counts + at.first, parts);
  add_up(even + at.first, parts);
}

template <class Order>
__device__ __forceinline__ void write_chunk(const Source& in, const Long& all, const Chunk& at) {
  const int64_t* even = all.counts + chunks_of(all);
  const int64_t place = all.table[PLACE * (all.number + 1) + at.s];
  uint32_t raw[32];
  const int count = load_chunk<Order>(in, all, at, raw);
  const Limit limit{at.state->limit, at.state->room};
  const int64_t* places = at.state->candidates ? all.places + at.base + at.own * CHUNK + warp_here() * TILE : nullptr;
  const int64_t start = at.start + warp_here() * TILE;
  emit<Order, WARPS>(raw, count, 32, limit, all.counts[at.chunk], even[at.chunk],
                     [&](int64_t to, int i, uint32_t own) {
                       all.positions[place + to] = places ? places[i] : start + i;
                       if (all.values) all.values[place + to] = own;
                     });
}

}  // namespace

#define GC_SELECTION(NAME, ORDER)                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                       \
      NAME##_warps(const Source in, const int64_t* __restrict__ table, const int64_t m,                          \
                   const int64_t* __restrict__ which, const int64_t number, int64_t* __restrict__ positions,     \
                   uint32_t* __restrict__ values) {                                                              \
    select_short<ORDER, 1>(in, table, m, which, number, positions, values);                                      \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2)                                                       \
      NAME##_blocks(const Source in, const int64_t* __restrict__ table, const int64_t m,                         \
                    const int64_t* __restrict__ which, const int64_t number, int64_t* __restrict__ positions,    \
                    uint32_t* __restrict__ values) {                                                             \
    select_short<ORDER, WARPS>(in, table, m, which, number, positions, values);                                  \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME##_start(const Source in, const Long all) {       \
    start_long<ORDER>(in, all);                                                                                  \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME##_mark(const Source in, const Long all) {        \
    mark_chunk<ORDER>(in, all);                                                                                  \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME##_collect(const Source in, const Long all) {     \
    collect_chunk<ORDER>(in, all);                                                                               \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME##_histogram(const Source in, const Long all) {   \
    each_chunk(all, [&](const Chunk& at) { histogram_chunk<ORDER>(in, all, at); });                              \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME##_count(const Source in, const Long all) {       \
    each_chunk(all, [&](const Chunk& at) { count_chunk<ORDER>(in, all, at); });                                  \
  }                                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 2) NAME##_write(const Source in, const Long all) {       \
    each_chunk(all, [&](const Chunk& at) { write_chunk<ORDER>(in, all, at); });                                  \
  }

GC_SELECTION(largest, ByMagnitude)
GC_SELECTION(random, ByWord)

// ---- bitmaps -----------------------------------------------------------------------------------------------------

// Low bits of Elias and Fano's coding: bits of position j - j. One warp per tile of 1024 positions.
extern "C" __global__ void __launch_bounds__(256)
    pack_low_bits(const int64_t* __restrict__ positions, const int64_t total, const int32_t low,
                  uint32_t* __restrict__ words) {
  const WarpTile at(total);
  if (!at.active()) return;
  BitWriter writer(words + at.words(low), at.lanes, low);
  GC_UNROLL
  for (int j = 0; j < 32; ++j) {
    const int i = j * at.lanes + at.lane;
    uint32_t code = 0;
    if (i < at.count) code = (uint32_t)(positions[at.start + i] - (at.start + i)) & ((1u << low) - 1u);
    writer.put(code);
  }
}

// A bitmap of `bits` bits with those set that positions below n, without their `low` low bits, stand for; with 0 low
// bits these are the positions. A block 32 tiles, whose words lie in shared memory.
extern "C" __global__ void __launch_bounds__(THREADS)
    set_bits(const int64_t* __restrict__ positions, const int64_t total, const int64_t n, const int32_t low,
             const int64_t bits, uint32_t* __restrict__ words) {
  __shared__ uint32_t held[SPAN_BITS / 32];
  const auto at = [=](int64_t j) { return ((positions[j] - j) >> low) + j; };
  const int64_t start = (int64_t)blockIdx.x * SPAN_BITS, left = bits - start;
  const int64_t stop = left < SPAN_BITS ? bits : start + SPAN_BITS;
  for (int i = threadIdx.x; i < SPAN_BITS / 32; i += THREADS) held[i] = 0;
  __syncthreads();
  check_order(positions, total, n);
#pragma unroll 1
  for (int64_t j = warp_first_from(total, start, at) + threadIdx.x; j < total; j += THREADS) {
    const int64_t bit = at(j);
    if (bit < start || bit >= stop) break;
    const int tile = (int)(bit - start) / TILE, i = (int)(bit - start) % TILE;
    const int lanes = tile_lanes(start + tile * TILE, bits);
    atomicOr(held + tile * LANES + bit_word(i, lanes), 1u << bit_shift(i, lanes));
  }
  __syncthreads();
  const int whole = (int)((stop - start) / TILE), rest = (int)((stop - start) % TILE);
  const int own = whole * LANES + (rest + LANES - 1) / LANES;
  for (int i = threadIdx.x; i < own; i += THREADS) words[(int64_t)blockIdx.x * (SPAN_BITS / 32) + i] = held[i];
}

namespace {

constexpr int WARP_TILES = SPAN_BITS / TILE / WARPS;

// The words of the tiles that a warp has in a bitmap of n bits, 0 beyond; *after is set if a bit is set from n on.
__device__ __forceinline__ void load_bits(const uint32_t* __restrict__ words, int64_t n, uint32_t (&held)[WARP_TILES],
                                          bool* after) {
  GC_UNROLL
  for (int q = 0; q < WARP_TILES; ++q) {
    const int64_t tile = (int64_t)blockIdx.x * (SPAN_BITS / TILE) + warp_here() * WARP_TILES + q, start = tile * TILE;
    const int lanes = start < n ? tile_lanes(start, n) : 0;
    held[q] = lane_here() < lanes ? words[tile * LANES + lane_here()] : 0u;
    if (lane_here() < lanes && n - start < TILE) {
      const int rows = ((int)(n - start) - lane_here() + lanes - 1) / lanes;  // whose bits stand for something
      const uint32_t used = rows < 32 ? (1u << rows) - 1u : EACH;
      *after |= (held[q] & ~used) != 0;
      held[q] &= used;
    }
  }
}

}  // namespace

// How many bits of a bitmap of n are set before each block's 32 tiles, and at last in all.
extern "C" __global__ void __launch_bounds__(THREADS)
    count_bits(const uint32_t* __restrict__ words, const int64_t n, const int64_t total, int64_t* counts,
               uint32_t* ticket, int32_t* bad) {
  uint32_t held[WARP_TILES];
  bool after = false;
  load_bits(words, n, held, &after);
  if (after) atomicMin(bad, (int32_t)AFTER_LAST);
  int own = 0;
  GC_UNROLL
  for (int q = 0; q < WARP_TILES; ++q) own += __popc(held[q]);
  own = team_sum<WARPS>(own);
  if (threadIdx.x == 0) counts[blockIdx.x] = own;
  if (!is_last(ticket, gridDim.x)) return;
  const int64_t found = add_up(counts, gridDim.x);
  if (threadIdx.x != 0) return;
  counts[gridDim.x] = found;
  if (found != total) atomicMin(bad, (int32_t)WRONG_NUMBER);
}

// The positions that a bitmap of n bits stands for, with `low` low bits of `codes`: at most `total`.
extern "C" __global__ void __launch_bounds__(THREADS)
    write_bits(const uint32_t* __restrict__ words, const int64_t n, const int64_t* __restrict__ counts,
               const uint32_t* __restrict__ codes, const int32_t low, const int64_t total,
               int64_t* __restrict__ positions, int32_t* bad) {
  uint32_t held[WARP_TILES];
  bool after = false;
  load_bits(words, n, held, &after);
  int own = 0;
  GC_UNROLL
  for (int q = 0; q < WARP_TILES; ++q) own += __popc(held[q]);
  int64_t before = counts[blockIdx.x] + warps_before<WARPS>(__reduce_add_sync(EACH, own));
  GC_UNROLL
  for (int q = 0; q < WARP_TILES; ++q) {
    if (!__any_sync(EACH, held[q] != 0)) continue;
    const int64_t start = ((int64_t)blockIdx.x * (SPAN_BITS / TILE) + warp_here() * WARP_TILES + q) * TILE;
    const int lanes = tile_lanes(start, n);
#pragma unroll 4
    for (int j = 0; j < 32; ++j) {
      const bool set = held[q] >> j & 1u;
      const uint32_t row = __ballot_sync(EACH, set);
      const int64_t place = before + __popc(row & lanes_below());
      before += __popc(row);
      if (!set || place >= total) continue;
      const int64_t bit = start + j * lanes + lane_here();
      positions[place] = low ? ((bit - place) << low) + place + code_at(codes, place, total, low) : bit;
    }
  }
  if (low && blockIdx.x == 0 && total % TILE) {  // codes after the last
    const int64_t first = total / TILE * TILE;
    const int held_codes = tile_lanes(first, total) * LANES;
    for (int i = (int)(total - first) + (int)threadIdx.x; i < held_codes; i += THREADS) {
      if (code_at(codes, first + i, total, low)) atomicMin(bad, (int32_t)AFTER_LAST_LOW);
    }
  }
}

// Check that positions increase and that each segment of `table`, (4, m), has its own; take them from `indices`, unless
// that is null. One thread per position and per segment.
extern "C" __global__ void __launch_bounds__(256)
    check_positions(const int32_t* __restrict__ indices, int64_t* positions, const int64_t total,
                    const int64_t* __restrict__ table, const int64_t m, int32_t* bad) {
  const int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  const auto at = [=](int64_t j) -> int64_t { return indices ? (int64_t)indices[j] : positions[j]; };
  if (i < total) {
    const int64_t own = at(i);
    if (i > 0 && at(i - 1) >= own) atomicMin(bad, (int32_t)NOT_INCREASING);
    if (indices) positions[i] = own;
  }
  if (i < m) {
    const int64_t start = table[i], stop = start + table[m + i], keep = table[2 * m + i], place = table[3 * m + i];
    if (at(place) < start || at(place + keep - 1) >= stop) atomicMin(bad, (int32_t)WRONG_SEGMENT);
  }
}

// ---- scatter and gather ------------------------------------------------------------------------------------------

namespace {

struct Sparse {
  const float* values[MOST];
  const int64_t* positions[MOST];
  int64_t totals[MOST];
  int32_t number;
};

enum { ADD = 1, ONTO = 2, DIVIDE = 4 };  // add values; to what there is, not to zeros; divide the sum

}  // namespace

// Zeros with values put there or added, n in all; one block per chunk of 8192, which it writes once.
extern "C" __global__ void __launch_bounds__(THREADS)
    scatter(const Sparse in, const int64_t n, const int32_t what, const float divisor, float* __restrict__ out) {
  __shared__ float row[CHUNK];
  __shared__ int64_t from[MOST];
  const int64_t start = (int64_t)blockIdx.x * CHUNK, left = n - start;
  const int count = left < CHUNK ? (int)left : CHUNK;
  for (int i = threadIdx.x; i < CHUNK; i += THREADS) row[i] = what & ONTO && i < count ? out[start + i] : 0.0f;
#pragma unroll 1
  for (int p = warp_here(); p < in.number; p += WARPS) {
    const int64_t* positions = in.positions[p];
    const int64_t first = warp_first_from(in.totals[p], start, [=](int64_t j) { return positions[j]; });
    if (lane_here() == 0) from[p] = first;
  }
  __syncthreads();
#pragma unroll 1
  for (int p = 0; p < in.number; ++p) {
    const int64_t* __restrict__ positions = in.positions[p];
    const float* __restrict__ values = in.values[p];
    check_order(positions, in.totals[p], n);
#pragma unroll 1
    for (int64_t j = from[p] + threadIdx.x; j < in.totals[p]; j += THREADS) {
      const int64_t at = positions[j] - start;
      if (at < 0 || at >= count) break;
      row[at] = what & ADD ? row[at] + values[j] : values[j];
    }
    __syncthreads();
  }
  for (int i = threadIdx.x; i < count; i += THREADS) {
    out[start + i] = what & DIVIDE ? __fdiv_rn(row[i], divisor) : row[i];
  }
}

extern "C" __global__ void __launch_bounds__(256)
    gather(const float* __restrict__ x, const int64_t n, const int64_t* __restrict__ positions, const int64_t total,
           float* __restrict__ out) {
  const int64_t j = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (j >= total) return;
  const int64_t at = positions[j];
  if (at < 0 || at >= n) __trap();
  out[j] = x[at];
}
