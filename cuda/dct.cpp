// Cosine transforms of chunks, and back: `gcbench.ops.dct`. Reads 4 bytes and writes 4 per element.
//
// c_k = sum_i C[k, i] x_i for a column of n elements. If n is even, C[k, n - 1 - i] is C[k, i] for even k and -C[k, i]
// for odd k. So odd coefficients are sums of n / 2 products of the differences x_i - x_n-1-i, and even ones the
// transform of the n / 2 sums, until n is odd. Terms are added in order, the first i (or k) first.
#include <algorithm>
#include <memory>

#include "called.hpp"

using namespace gc;

namespace {

constexpr int LONGEST = 256;  // elements of a column
constexpr int ROWS = 64;      // rows at a time, where chunks have one row

// One tensor's chunks, as `gcbench.ops.dct` lists them: `down` x `across` of `height` x `width` elements, from `start`;
// where the matrices for either length begin in the array of all.
struct Chunks {
  int64_t start, down, height, across, width, tall, wide;

  bool flat() const { return height == 1; }
  int64_t rows() const { return down * across; }  // of a flat tensor
  int64_t units() const { return flat() ? (rows() + ROWS - 1) / ROWS : rows(); }
};

int padded(int64_t n) { return (int)((n + WIDTH - 1) / WIDTH * WIDTH); }

// out[r * step] = sum_t c[t * results + r] in[t], for COUNT of them.
template <int COUNT>
inline void some_products(const float* c, const VecF* in, int terms, int results, VecF* out, int step) {
  VecF sums[COUNT];
  GC_UNROLL
  for (int r = 0; r < COUNT; ++r) sums[r] = in[0] * c[r];
  GC_ROLLED for (int t = 1; t < terms; ++t) {
    c += results;
    GC_UNROLL
    for (int r = 0; r < COUNT; ++r) sums[r] += in[t] * c[r];
  }
  GC_UNROLL
  for (int r = 0; r < COUNT; ++r) out[r * step] = sums[r];
}

// The same for as many results as terms. Returns where the next matrix begins.
inline const float* products(const float* c, const VecF* in, int terms, VecF* out, int step) {
  int r = 0;
  for (; r + 8 <= terms; r += 8) some_products<8>(c + r, in, terms, terms, out + r * step, step);
  for (; r + 4 <= terms; r += 4) some_products<4>(c + r, in, terms, terms, out + r * step, step);
  for (; r < terms; ++r) some_products<1>(c + r, in, terms, terms, out + r * step, step);
  return c + terms * terms;
}

// The coefficients `out` of n vectors x, which are overwritten. c has the matrix of each level, the largest first.
void forward(const float* c, int n, VecF* x, VecF* out) {
  VecF differences[LONGEST / 2];
  int m = n, step = 1;
  for (; m % 2 == 0; m /= 2, step *= 2) {
    for (int i = 0; i < m / 2; ++i) {
      differences[i] = x[i] - x[m - 1 - i];
      x[i] = x[i] + x[m - 1 - i];
    }
    c = products(c, differences, m / 2, out + step, 2 * step);
  }
  products(c, x, m, out, step);
}

// The n vectors `out` with the coefficients x. c has the matrix of each level, the smallest first.
void inverse(const float* c, int n, const VecF* x, VecF* out) {
  VecF terms[LONGEST], odd[LONGEST / 2];
  int m = n, step = 1;
  for (; m % 2 == 0; m /= 2) step *= 2;
  for (int k = 0; k < m; ++k) terms[k] = x[k * step];
  c = products(c, terms, m, out, 1);
  for (; m < n; m *= 2) {
    step /= 2;
    for (int k = 0; k < m; ++k) terms[k] = x[(2 * k + 1) * step];
    c = products(c, terms, m, odd, 1);
    for (int i = 0; i < m; ++i) {
      out[2 * m - 1 - i] = out[i] - odd[i];
      out[i] = out[i] + odd[i];
    }
  }
}

// Transform the columns of n rows of `stride` elements, a multiple of WIDTH.
template <bool BACK>
void columns(const float* c, int n, float* rows, int stride) {
  VecF in[LONGEST], out[LONGEST];
  for (int j = 0; j < stride; j += WIDTH) {
    for (int i = 0; i < n; ++i) in[i] = load_vector<VecF>(rows + i * stride + j);
    BACK ? inverse(c, n, in, out) : forward(c, n, in, out);
    for (int i = 0; i < n; ++i) memcpy(rows + i * stride + j, out + i, sizeof(VecF));
  }
}

template <int FIRST, int... LANE>
inline VecF interleaved(VecF a, VecF b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (FIRST + LANE / 2 + LANE % 2 * WIDTH)...);
#else
  return __builtin_shuffle(a, b, VecI{(FIRST + LANE / 2 + LANE % 2 * WIDTH)...});
#endif
}

// to[j][i] = from[i][j]; rows and columns are WIDTH times `down` and `across`.
void transpose(const float* from, int down, int stride, int across, float* to, int to_stride) {
  constexpr auto lanes = std::make_integer_sequence<int, WIDTH>();
  for (int i = 0; i < down * WIDTH; i += WIDTH) {
    for (int j = 0; j < across * WIDTH; j += WIDTH) {
      VecF rows[WIDTH], next[WIDTH];
      GC_UNROLL
      for (int k = 0; k < WIDTH; ++k) rows[k] = load_vector<VecF>(from + (i + k) * stride + j);
      GC_UNROLL
      for (int level = 1; level < WIDTH; level *= 2) {
        GC_UNROLL
        for (int k = 0; k < WIDTH / 2; ++k) {
          next[2 * k] = interleaved<0>(rows[k], rows[k + WIDTH / 2], lanes);
          next[2 * k + 1] = interleaved<WIDTH / 2>(rows[k], rows[k + WIDTH / 2], lanes);
        }
        GC_UNROLL
        for (int k = 0; k < WIDTH; ++k) rows[k] = next[k];
      }
      GC_UNROLL
      for (int k = 0; k < WIDTH; ++k) memcpy(to + (j + k) * to_stride + i, rows + k, sizeof(VecF));
    }
  }
}

// Copy rows; NaN becomes 0, and what is beyond float32 the largest float.
void put(const float* from, int rows, int stride, int width, float* to, int64_t to_stride) {
  for (int i = 0; i < rows; ++i, from += stride, to += to_stride) {
    GC_SIMD for (int j = 0; j < width; ++j) {
      const float v = from[j], high = v > FLOAT_MAX ? FLOAT_MAX : v, low = high < -FLOAT_MAX ? -FLOAT_MAX : high;
      to[j] = v == v ? low : 0.0f;
    }
  }
}

// Transform `rows` x `width` elements, row by row `from_stride` and `to_stride` apart: rows of more than one element,
// and, if `tall`, columns; the columns first if BACK. `memory` has room for twice LONGEST x LONGEST; what is there in
// the lanes that fill up vectors does not matter.
template <bool BACK>
void chunk(const float* from, int64_t from_stride, int rows, int width, const float* tall, const float* wide, float* to,
           int64_t to_stride, float* memory) {
  const int stride = padded(width), turned_stride = padded(rows);
  float *block = memory, *turned = memory + LONGEST * LONGEST;
  for (int i = 0; i < rows; ++i) memcpy(block + i * stride, from + i * from_stride, width * sizeof *from);
  if (BACK && tall) columns<BACK>(tall, rows, block, stride);
  if (width > 1) {
    transpose(block, turned_stride / WIDTH, stride, stride / WIDTH, turned, turned_stride);
    columns<BACK>(wide, width, turned, turned_stride);
    transpose(turned, stride / WIDTH, turned_stride, turned_stride / WIDTH, block, stride);
  }
  if (!BACK && tall) columns<BACK>(tall, rows, block, stride);
  put(block, rows, stride, width, to, to_stride);
}

template <bool BACK>
int64_t transform(const float* x, const int64_t* table, int64_t number, const float* matrices, float* out,
                  int threads) {
  const Chunks* all = (const Chunks*)table;
  int64_t units = 0;
  for (int64_t p = 0; p < number; ++p) units += all[p].units();
  parallel(units, threads, [&](int64_t first, int64_t last) {
    std::unique_ptr<float[]> memory(new float[2 * LONGEST * LONGEST]());
    int64_t before = 0;  // units of the tensors before
    for (const Chunks* t = all; t < all + number && before < last; before += t->units(), ++t) {
      const int64_t end = std::min(last - before, t->units());
      for (int64_t u = std::max<int64_t>(0, first - before); u < end; ++u) {
        const int64_t w = t->width, size = t->height * w;
        if (t->flat()) {
          const int rows = (int)std::min<int64_t>(ROWS, t->rows() - u * ROWS);
          const int64_t at = t->start + u * ROWS * w;
          chunk<BACK>(x + at, w, rows, (int)w, nullptr, matrices + t->wide, out + at, w, memory.get());
          continue;
        }
        // In the tensor, rows of a chunk are a row of chunks apart; coefficients lie chunk after chunk.
        const int64_t stride = t->across * w, spread = t->start + u / t->across * t->height * stride + u % t->across * w;
        const int64_t together = t->start + u * size;
        chunk<BACK>(x + (BACK ? together : spread), BACK ? w : stride, (int)t->height, (int)w, matrices + t->tall,
                    matrices + t->wide, out + (BACK ? spread : together), BACK ? stride : w, memory.get());
      }
    }
  });
  return 0;
}

}  // namespace

// Coefficients of `number` tensors, chunk after chunk; and back. `table` has a row of `Chunks` for each.
int64_t gc_dct_forward(const float* x, const int64_t* table, int64_t number, const float* matrices, float* out,
                       int threads) {
  return transform<false>(x, table, number, matrices, out, threads);
}
GC_CALLED(gc_dct_forward)

int64_t gc_dct_inverse(const float* x, const int64_t* table, int64_t number, const float* matrices, float* out,
                       int threads) {
  return transform<true>(x, table, number, matrices, out, threads);
}
GC_CALLED(gc_dct_inverse)
