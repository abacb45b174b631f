// CUDA C++ on the CPU, for tests only: runs the kernels of an unmodified .cu file one block at a time.
//
// Each CUDA thread of a kernel with collectives is a fiber that runs until a collective (a barrier, a shuffle, a vote),
// in ascending or descending order of the threads, so a run is deterministic, and a barrier that is missing shows in one
// of the two orders. Kernels without collectives run thread after thread on one stack. Shared memory holds garbage at the
// start of each block. A block whose threads wait at different places is reported.
//
// It finds wrong indices, tails, packing and barriers. It cannot find races within one fiber's stretch, effects of the
// memory model, or anything of performance. One launch at a time, in one thread.
#pragma once

#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

// Static shared memory lies in a section of its own, which can be filled with garbage.
extern "C" char __start_cusim_shared[] __attribute__((weak));
extern "C" char __stop_cusim_shared[] __attribute__((weak));

namespace cusim {

constexpr uint64_t GARBAGE = 0xA5A5A5A5A5A5A5A5u;
constexpr size_t STACK = (64 << 10) + 9 * 64;  // no power of two: tops of stacks in one set of the cache are slow
constexpr size_t MAX_SHARED = 48 << 10;

enum class At { RUNNING, WARP, BLOCK, DONE };

struct Fiber {
  ucontext_t start;
  jmp_buf here;
  bool started = false;
  At at = At::RUNNING;
  uint3 tid;
  // Of a collective of the warp: its mask, what this lane brings and wants, what it gets.
  unsigned mask = 0;
  int kind = 0;
  uint64_t brought = 0;
  unsigned came = 0;
  uint64_t votes[32];
};

// Lanes of a warp, a bit each.
struct Warp {
  unsigned waiting = 0, absent = 0;  // at a collective of the warp; ended, or never there
};

struct Sim {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  unsigned alive = 0, at_barrier = 0;
  std::vector<char> stacks;
  std::vector<uint64_t> dynamic;
  jmp_buf scheduler;
  unsigned current = 0;
  bool collective = false;
  std::string error;
  void (*run)(void**) = nullptr;
  void** args = nullptr;
  unsigned progress = 0;
  unsigned sums[3] = {0, 0, 1};  // of the values brought to the last barrier: how many are true, any, all
};
inline Sim sim;

[[noreturn]] inline void to_scheduler() { _longjmp(sim.scheduler, 1); }

[[noreturn]] inline void fail(const std::string& what) {
  sim.error = what + " (block " + std::to_string(blockIdx.x) + "," + std::to_string(blockIdx.y) + "," +
              std::to_string(blockIdx.z) + " thread " + std::to_string(threadIdx.x) + "," + std::to_string(threadIdx.y) +
              "," + std::to_string(threadIdx.z) + ")";
  to_scheduler();
}

inline Fiber& me() {
  if (!sim.collective) fail("a collective in a kernel that was taken for one without: cusim.py did not see it");
  return sim.fibers[sim.current];
}
inline unsigned lane_of(const Fiber& fiber) { return (unsigned)(&fiber - sim.fibers.data()) % 32; }

inline void wait(Fiber& fiber) {
  if (!_setjmp(fiber.here)) to_scheduler();
}

// ---- barriers ----------------------------------------------------------------------------------------------------

// Let the block go on if every thread that has not ended waits at the block's barrier.
inline void release_block() {
  if (!sim.at_barrier || sim.at_barrier < sim.alive) return;
  unsigned count = 0;
  for (Fiber& fiber : sim.fibers) {  // beyond the block's threads all are DONE
    if (fiber.at != At::BLOCK) continue;
    count += fiber.brought != 0;
    fiber.at = At::RUNNING;
  }
  sim.sums[0] = count, sim.sums[1] = count > 0, sim.sums[2] = count == sim.at_barrier;
  sim.progress += sim.at_barrier;
  sim.at_barrier = 0;
}

// Let the lanes of `first`'s collective go on if all that its mask names, and have not ended, are there.
inline void release_warp(unsigned first) {
  Fiber* const lanes = &sim.fibers[first / 32 * 32];
  Warp& warp = sim.warps[first / 32];
  const unsigned mask = sim.fibers[first].mask, there = warp.waiting & mask;
  if ((there | (warp.absent & mask)) != mask) return;
  uint64_t values[32];
  for (unsigned l = 0; l < 32; ++l) {
    values[l] = GARBAGE;
    if (!(there >> l & 1)) continue;
    if (lanes[l].mask != mask) return;  // not here yet, but at a collective of other lanes
    if (lanes[l].kind != sim.fibers[first].kind) fail("lanes of one warp wait at different collectives");
    values[l] = lanes[l].brought;
  }
  for (unsigned l = 0; l < 32; ++l) {
    if (!(there >> l & 1)) continue;
    memcpy(lanes[l].votes, values, sizeof values);
    lanes[l].came = there;
    lanes[l].at = At::RUNNING;
    ++sim.progress;
  }
  warp.waiting &= ~there;
}

// Bring `value` to the lanes of `mask` and wait for theirs; returns which lanes came, votes has their values.
inline unsigned gather(unsigned mask, int kind, uint64_t value) {
  Fiber& fiber = me();
  if (!(mask >> lane_of(fiber) & 1)) fail("a collective whose mask leaves out the lane that calls it");
  fiber.mask = mask, fiber.kind = kind, fiber.brought = value;
  fiber.at = At::WARP;
  sim.warps[sim.current / 32].waiting |= 1u << lane_of(fiber);
  release_warp(sim.current);
  if (fiber.at == At::WARP) wait(fiber);
  return fiber.came;
}

inline unsigned block_barrier(bool value, int which) {
  Fiber& fiber = me();
  fiber.brought = value;
  fiber.at = At::BLOCK;
  ++sim.at_barrier;
  release_block();
  if (fiber.at == At::BLOCK) wait(fiber);
  return sim.sums[which];
}

template <class T>
T shuffle(unsigned mask, T value, unsigned source) {
  static_assert(sizeof(T) <= 8, "shuffles move at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  gather(mask, 1, bits);
  T result;
  memcpy(&result, &me().votes[source & 31], sizeof result);
  return result;
}

// ---- running -----------------------------------------------------------------------------------------------------

// A fiber's life: a thread of one block after another, since making a fiber is slow.
inline void body() {
  for (;;) {
    sim.run(sim.args);
    Fiber& fiber = sim.fibers[sim.current];
    fiber.at = At::DONE;
    ++sim.progress;
    wait(fiber);
  }
}

inline void poison() {
  if (__start_cusim_shared) memset(__start_cusim_shared, 0xA5, (size_t)(__stop_cusim_shared - __start_cusim_shared));
  for (uint64_t& word : sim.dynamic) word = GARBAGE;
}

inline bool run_serial(unsigned threads, bool reverse) {
  for (volatile unsigned k = 0; k < threads; k = k + 1) {
    const unsigned t = reverse ? threads - 1 - k : k;
    threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
    if (_setjmp(sim.scheduler)) return false;
    sim.run(sim.args);
  }
  return true;
}

inline bool run_fibers(unsigned threads, bool reverse) {
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = sim.fibers[t];
    fiber.at = At::RUNNING;
    fiber.tid = {t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
  }
  sim.warps.assign((threads + 31) / 32, Warp{});
  if (threads % 32) sim.warps.back().absent = ~0u << threads % 32;
  sim.alive = threads, sim.at_barrier = 0;
  while (sim.alive) {
    const volatile unsigned before = sim.progress;
    for (volatile unsigned k = 0; k < threads; k = k + 1) {
      const unsigned t = reverse ? threads - 1 - k : k;
      Fiber& fiber = sim.fibers[t];
      if (fiber.at != At::RUNNING) continue;
      sim.current = t;
      threadIdx = fiber.tid;
      if (!_setjmp(sim.scheduler)) {
        if (fiber.started) _longjmp(fiber.here, 1);
        fiber.started = true;
        getcontext(&fiber.start);
        fiber.start.uc_stack.ss_sp = sim.stacks.data() + (size_t)t * STACK;
        fiber.start.uc_stack.ss_size = STACK;
        fiber.start.uc_link = nullptr;
        makecontext(&fiber.start, body, 0);
        setcontext(&fiber.start);
      }
      if (!sim.error.empty()) return false;
      Fiber& after = sim.fibers[sim.current];
      if (after.at != At::DONE) continue;
      --sim.alive;
      // Those that wait need wait no longer for this one.
      release_block();
      if (_setjmp(sim.scheduler)) return false;
      Warp& warp = sim.warps[sim.current / 32];
      warp.absent |= 1u << lane_of(after);
      for (unsigned l = 0; l < 32; ++l)
        if (warp.waiting >> l & 1) release_warp(sim.current / 32 * 32 + l);
    }
    if (sim.progress == before && sim.alive) {
      std::string places;
      for (unsigned t = 0; t < threads && places.size() < 200; ++t)
        if (sim.fibers[t].at == At::WARP || sim.fibers[t].at == At::BLOCK)
          places += " " + std::to_string(t) + (sim.fibers[t].at == At::WARP ? ":warp" : ":block");
      sim.error = "threads wait for one another at different barriers:" + places;
      return false;
    }
  }
  return true;
}

inline const char* launch(dim3 grid, dim3 block, unsigned shared, bool collective, bool reverse, void (*run)(void**),
                          void** args) {
  const unsigned threads = block.x * block.y * block.z;
  gridDim = grid, blockDim = block;
  sim.error.clear();
  sim.collective = collective;
  sim.run = run, sim.args = args;
  sim.dynamic.resize((shared + 7) / 8);
  if (collective && sim.fibers.size() < threads) {
    sim.fibers.assign(threads, Fiber{});
    sim.stacks.resize(threads * STACK);
  }
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        poison();
        if (collective ? run_fibers(threads, reverse) : run_serial(threads, reverse)) continue;
        sim.fibers.clear();  // those that were stopped midway
        return sim.error.c_str();
      }
  return nullptr;
}

inline void* dynamic_shared() { return sim.dynamic.data(); }

// A kernel by name, called with cuLaunchKernel's array of the addresses of its arguments.
struct Entry {
  const char* name;
  bool collective;
  void (*run)(void**);
  std::vector<size_t> sizes;
};

template <auto K>
struct Call;
template <class... A, void (*K)(A...)>
struct Call<K> {
  template <size_t... I>
  static void with(void** args, std::index_sequence<I...>) {
    K(*(std::remove_const_t<std::remove_reference_t<A>>*)args[I]...);
  }
  static void run(void** args) { with(args, std::index_sequence_for<A...>{}); }
  static std::vector<size_t> sizes() { return {sizeof(A)...}; }
};

inline const char* launch_by_name(const std::vector<Entry>& table, const char* name, const unsigned* shape, unsigned shared,
                                  bool reverse, void** args, const size_t* sizes, unsigned count) {
  for (const Entry& entry : table) {
    if (strcmp(entry.name, name)) continue;
    bool fits = entry.sizes.size() == count;
    for (unsigned i = 0; fits && i < count; ++i) fits = entry.sizes[i] == sizes[i];
    if (!fits) {
      sim.error = "arguments of the sizes";
      for (unsigned i = 0; i < count; ++i) sim.error += " " + std::to_string(sizes[i]);
      sim.error += " given, the kernel has";
      for (size_t size : entry.sizes) sim.error += " " + std::to_string(size);
      return sim.error.c_str();
    }
    return launch(dim3{shape[0], shape[1], shape[2]}, dim3{shape[3], shape[4], shape[5]}, shared, entry.collective,
                  reverse, entry.run, args);
  }
  sim.error = "no such kernel";
  return sim.error.c_str();
}

template <class To, class From>
To bits(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}

// Conversion to an integer as CUDA does it: limited to the range, NaN is 0 (0x8000... for 64 bits).
template <class I, class F>
I to_int(F x) {
  if (x != x) return sizeof(I) == 8 ? (I)((uint64_t)1 << 63) : 0;
  const I low = std::is_signed_v<I> ? (I)((uint64_t)1 << (8 * sizeof(I) - 1)) : 0;
  const I high = (I) ~(std::is_signed_v<I> ? (uint64_t)1 << (8 * sizeof(I) - 1) : 0);
  const F beyond = ldexp((F)1, 8 * sizeof(I) - std::is_signed_v<I>);
  return x >= beyond ? high : x < (F)low ? low : (I)x;
}

}  // namespace cusim

// ---- the language ------------------------------------------------------------------------------------------------

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static __attribute__((section("cusim_shared")))
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define CUSIM_VECTOR(T, N)                                                   \
  struct alignas(2 * sizeof(T)) N##2 { T x, y; };                            \
  struct N##3 { T x, y, z; };                                                \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) N##4 { T x, y, z, w; }; \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }                       \
  inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }               \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
#define CUSIM_UINT3 uint3
#define uint3 cusim_uint3
CUSIM_VECTOR(float, float)
CUSIM_VECTOR(double, double)
CUSIM_VECTOR(int, int)
CUSIM_VECTOR(unsigned, uint)
CUSIM_VECTOR(signed char, char)
CUSIM_VECTOR(unsigned char, uchar)
CUSIM_VECTOR(short, short)
CUSIM_VECTOR(unsigned short, ushort)
CUSIM_VECTOR(long long, longlong)
CUSIM_VECTOR(unsigned long long, ulonglong)
#undef uint3

// ---- collectives -------------------------------------------------------------------------------------------------

inline void __syncthreads() { cusim::block_barrier(false, 0); }
inline int __syncthreads_count(int p) { return (int)cusim::block_barrier(p, 0); }
inline int __syncthreads_or(int p) { return (int)cusim::block_barrier(p, 1); }
inline int __syncthreads_and(int p) { return (int)cusim::block_barrier(p, 2); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cusim::gather(mask, 2, 0); }

template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  const unsigned lane = cusim::lane_of(cusim::me());
  return cusim::shuffle(mask, v, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int other, int width = 32) {
  const unsigned lane = cusim::lane_of(cusim::me()), from = lane ^ other;
  return cusim::shuffle(mask, v, (from & ~(width - 1)) > (lane & ~(width - 1)) ? lane : from);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
  const unsigned lane = cusim::lane_of(cusim::me());
  return cusim::shuffle(mask, v, (lane & (width - 1)) + by < (unsigned)width ? lane + by : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
  const unsigned lane = cusim::lane_of(cusim::me());
  return cusim::shuffle(mask, v, (lane & (width - 1)) >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned mask, int p) {
  const unsigned there = cusim::gather(mask, 3, p != 0);
  unsigned result = 0;
  for (unsigned l = 0; l < 32; ++l)
    if (there >> l & 1) result |= (unsigned)cusim::me().votes[l] << l;
  return result;
}
inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, !p) == 0; }
template <class T>
unsigned __match_any_sync(unsigned mask, T v) {
  uint64_t bits = 0;
  memcpy(&bits, &v, sizeof v);
  const unsigned there = cusim::gather(mask, 4, bits);
  unsigned result = 0;
  for (unsigned l = 0; l < 32; ++l)
    if (there >> l & 1 && cusim::me().votes[l] == bits) result |= 1u << l;
  return result;
}
namespace cusim {
template <class T, class F>
T reduce(unsigned mask, T v, F f) {
  const unsigned there = gather(mask, 5, (uint64_t)(uint32_t)v);
  T result = v;
  for (unsigned l = 0; l < 32; ++l)
    if (there >> l & 1 && l != lane_of(me())) result = f(result, (T)(uint32_t)me().votes[l]);
  return result;
}
}  // namespace cusim
#define CUSIM_REDUCE(T)                                                                                                \
  inline T __reduce_add_sync(unsigned m, T v) { return (T)cusim::reduce(m, (unsigned)v, [](unsigned a, unsigned b) { return a + b; }); } \
  inline T __reduce_min_sync(unsigned m, T v) { return cusim::reduce(m, v, [](T a, T b) { return a < b ? a : b; }); }   \
  inline T __reduce_max_sync(unsigned m, T v) { return cusim::reduce(m, v, [](T a, T b) { return a > b ? a : b; }); }
CUSIM_REDUCE(int)
CUSIM_REDUCE(unsigned)
inline unsigned __reduce_or_sync(unsigned m, unsigned v) { return cusim::reduce(m, v, [](unsigned a, unsigned b) { return a | b; }); }
inline unsigned __reduce_and_sync(unsigned m, unsigned v) { return cusim::reduce(m, v, [](unsigned a, unsigned b) { return a & b; }); }
inline unsigned __reduce_xor_sync(unsigned m, unsigned v) { return cusim::reduce(m, v, [](unsigned a, unsigned b) { return a ^ b; }); }

inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
[[noreturn]] inline void __trap() { cusim::fail("__trap"); }

// ---- atomics: nothing runs at the same time -----------------------------------------------------------------------

#define CUSIM_ATOMIC(NAME, RESULT)                             \
  template <class T>                                           \
  T NAME(T* p, std::common_type_t<T> v) {                      \
    const T old = *p;                                          \
    *p = (T)(RESULT);                                          \
    return old;                                                \
  }
CUSIM_ATOMIC(atomicAdd, old + v)
CUSIM_ATOMIC(atomicSub, old - v)
CUSIM_ATOMIC(atomicExch, v)
CUSIM_ATOMIC(atomicMin, v < old ? v : old)
CUSIM_ATOMIC(atomicMax, v > old ? v : old)
CUSIM_ATOMIC(atomicAnd, old& v)
CUSIM_ATOMIC(atomicOr, old | v)
CUSIM_ATOMIC(atomicXor, old ^ v)
CUSIM_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
template <class T>
T atomicCAS(T* p, std::common_type_t<T> compare, std::common_type_t<T> v) {
  const T old = *p;
  if (old == compare) *p = v;
  return old;
}

// ---- intrinsics --------------------------------------------------------------------------------------------------

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long x) {
  return (unsigned long long)__brev((unsigned)x) << 32 | __brev((unsigned)(x >> 32));
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) {
  return (unsigned)(((uint64_t)hi << 32 | lo) << (s & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
  return (unsigned)(((uint64_t)hi << 32 | lo) >> (s & 31));
}
inline unsigned __funnelshift_lc(unsigned lo, unsigned hi, unsigned s) {
  return s >= 32 ? lo : __funnelshift_l(lo, hi, s);
}
inline unsigned __funnelshift_rc(unsigned lo, unsigned hi, unsigned s) {
  return s >= 32 ? hi : __funnelshift_r(lo, hi, s);
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
  const uint64_t bytes = (uint64_t)b << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = s >> 4 * i & 15, byte = (unsigned)(bytes >> 8 * (pick & 7)) & 255;
    r |= (pick & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldca(const T* p) { return *p; }
template <class T> void __stcs(T* p, T v) { *p = v; }
template <class T> void __stcg(T* p, T v) { *p = v; }
template <class T> void __stwb(T* p, T v) { *p = v; }

inline unsigned __float_as_uint(float x) { return cusim::bits<unsigned>(x); }
inline int __float_as_int(float x) { return cusim::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cusim::bits<float>(x); }
inline float __int_as_float(int x) { return cusim::bits<float>(x); }
inline long long __double_as_longlong(double x) { return cusim::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cusim::bits<double>(x); }

inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __drcp_rn(double a) { return 1.0 / a; }
inline double __dsqrt_rn(double a) { return sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

inline int __float2int_rn(float x) { return cusim::to_int<int>(rintf(x)); }
inline int __float2int_rz(float x) { return cusim::to_int<int>(truncf(x)); }
inline int __float2int_rd(float x) { return cusim::to_int<int>(floorf(x)); }
inline int __float2int_ru(float x) { return cusim::to_int<int>(ceilf(x)); }
inline unsigned __float2uint_rn(float x) { return cusim::to_int<unsigned>(rintf(x)); }
inline unsigned __float2uint_rz(float x) { return cusim::to_int<unsigned>(truncf(x)); }
inline long long __float2ll_rn(float x) { return cusim::to_int<long long>(rintf(x)); }
inline long long __float2ll_rz(float x) { return cusim::to_int<long long>(truncf(x)); }
inline int __double2int_rn(double x) { return cusim::to_int<int>(rint(x)); }
inline int __double2int_rz(double x) { return cusim::to_int<int>(trunc(x)); }
inline long long __double2ll_rn(double x) { return cusim::to_int<long long>(rint(x)); }
inline long long __double2ll_rz(double x) { return cusim::to_int<long long>(trunc(x)); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __double2float_rn(double x) { return (float)x; }
inline double __int2double_rn(int x) { return x; }
inline double __ll2double_rn(long long x) { return (double)x; }

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return (T)fmin((T)a, (T)b);
  else return (T)b < (T)a ? (T)b : (T)a;
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  if constexpr (std::is_floating_point_v<T>) return (T)fmax((T)a, (T)b);
  else return (T)a < (T)b ? (T)b : (T)a;
}
