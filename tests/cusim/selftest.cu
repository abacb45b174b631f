// What the shim must do, one kernel a feature; valid CUDA, which the tests compile as such.
#include "common.cuh"

constexpr uint32_t ALL = 0xffffffffu;

extern "C" __global__ void index(int64_t* out, const int64_t n) {
  const int64_t i = (((int64_t)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * blockDim.x * blockDim.y *
                        blockDim.z +
                    (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  if (i < n) out[i] += i;
}

struct Mixed {
  int8_t small;
  double wide;
  int32_t last;
};

extern "C" __global__ void arguments(double* out, const int32_t a, const int64_t b, const uint32_t c, const uint64_t d,
                                     const float e, const double f, const Mixed m, const float* null) {
  out[0] = a, out[1] = b, out[2] = c, out[3] = d, out[4] = e, out[5] = f;
  out[6] = m.small, out[7] = m.wide, out[8] = m.last, out[9] = null == nullptr;
}

// A block's sum by halving in shared memory, one array in a template, one dynamic.
template <int N>
__device__ int64_t tree(int64_t value) {
  __shared__ int64_t rows[N];
  rows[threadIdx.x] = value;
  for (int half = N / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) rows[threadIdx.x] += rows[threadIdx.x + half];
  }
  __syncthreads();
  return rows[0];
}

extern "C" __global__ void sums(const int32_t* x, int64_t* out) {
  const int64_t total = tree<128>(x[blockIdx.x * blockDim.x + threadIdx.x]);
  if (threadIdx.x == 5) out[blockIdx.x] = total;
}

extern "C" __global__ void reversed(const int32_t* x, int32_t* out) {
  extern __shared__ int32_t row[];
  const int i = threadIdx.x, n = blockDim.x;
  row[i] = x[blockIdx.x * n + i];
  __syncthreads();
  out[blockIdx.x * n + i] = row[n - 1 - i];
}

extern "C" __global__ void reversed_without_barrier(const int32_t* x, int32_t* out) {
  extern __shared__ int32_t row[];
  const int i = threadIdx.x, n = blockDim.x;
  row[i] = x[i];
  out[i] = row[n - 1 - i];
  __syncthreads();
}

extern "C" __global__ void garbage(uint32_t* out) {
  __shared__ uint32_t stale[32];
  out[blockIdx.x * 32 + threadIdx.x] = stale[threadIdx.x];
  __syncthreads();
  stale[threadIdx.x] = 1;
}

extern "C" __global__ void shuffles(const int64_t* x, int64_t* out) {
  const int i = threadIdx.x;
  const int64_t v = x[i];
  out[i] = __shfl_xor_sync(ALL, v, 5);
  out[64 + i] = __shfl_down_sync(ALL, v, 3);
  out[128 + i] = __shfl_up_sync(ALL, v, 3);
  out[192 + i] = __shfl_sync(ALL, v, (i * 7) & 31);
  out[256 + i] = __shfl_down_sync(ALL, v, 3, 8);
  out[320 + i] = __shfl_xor_sync(ALL, v, 2, 8);
  out[384 + i] = __shfl_sync(ALL, v, 1, 8);
}

extern "C" __global__ void votes(const int32_t* x, uint32_t* out) {
  const int i = threadIdx.x;
  out[i] = __ballot_sync(ALL, x[i] & 1);
  out[64 + i] = __any_sync(ALL, x[i] == 7) | __all_sync(ALL, x[i] < 32) << 1;
  out[128 + i] = __match_any_sync(ALL, x[i] % 3);
  out[192 + i] = __syncthreads_count(x[i] & 1);
  out[256 + i] = (uint32_t)(__syncthreads_or(x[i] == 40) | __syncthreads_and(x[i] < 40) << 1);
}

// Half of each warp leaves before the other votes; and each quarter shuffles by itself.
extern "C" __global__ void partial(uint32_t* out) {
  const int i = threadIdx.x;
  const uint32_t quarter = 0xffu << (i & 24);
  uint32_t v = i;
  for (int d = 4; d; d /= 2) v += __shfl_xor_sync(quarter, v, d);
  out[i] = v;
  __syncwarp();
  if (i & 16) return;
  out[64 + i] = __ballot_sync(0x0000ffffu, i & 1);
  __syncthreads();
  out[128 + i] = __ballot_sync(ALL, 1);
}

extern "C" __global__ void atomics(const uint32_t* x, uint32_t* out, uint64_t* wide) {
  const uint32_t v = x[blockIdx.x * blockDim.x + threadIdx.x];
  atomicAdd(&out[0], v);
  atomicMax(&out[1], v);
  atomicMin(&out[2], v);
  atomicOr(&out[3], v);
  atomicCAS(&out[4], 0u, v + 1);
  atomicAdd((unsigned long long*)wide, (unsigned long long)v << 20);
  atomicMax((unsigned long long*)wide + 1, (unsigned long long)v << 32);
}

extern "C" __global__ void bits(const uint32_t* x, uint32_t* out, const int32_t n) {
  const int i = threadIdx.x;
  const uint32_t v = x[i];
  out[i] = __popc(v);
  out[n + i] = __ffs(v);
  out[2 * n + i] = __clz(v);
  out[3 * n + i] = __brev(v);
  out[4 * n + i] = __funnelshift_r(v, ~v, i);
  out[5 * n + i] = __funnelshift_l(v, ~v, i);
  out[6 * n + i] = __umulhi(v, 0x9E3779B9u);
  out[7 * n + i] = __byte_perm(v, ~v, 0x2604);
  out[8 * n + i] = min(v, 1000u) + max((int)v, -5);
}

extern "C" __global__ void floats(const float* x, const float* y, float* out, int32_t* whole, const int32_t n) {
  const int i = threadIdx.x;
  out[i] = __fmaf_rn(x[i], y[i], 1.0f);
  out[n + i] = __fdiv_rn(x[i], y[i]);
  out[2 * n + i] = __fsqrt_rn(fabsf(x[i]));
  out[3 * n + i] = (float)__dadd_rn((double)x[i], __dmul_rn(y[i], 3.0));
  out[4 * n + i] = fminf(x[i], y[i]);
  whole[i] = __float2int_rn(x[i]);
  whole[n + i] = __float_as_int(__ldg(&y[i]));
}

extern "C" __global__ void deadlock() {
  if (threadIdx.x % 32)
    __syncwarp();
  else
    __syncthreads();
}

extern "C" __global__ void wrong_mask() { __syncwarp(0xfffffffeu); }

extern "C" __global__ void trap(const int32_t block) {
  if (blockIdx.x == block) __trap();
}

#define MADE(NAME, VALUE) \
  extern "C" __global__ void NAME(int32_t* out) { out[0] = VALUE; }
MADE(made_one, 1)
MADE(made_two, 2)
