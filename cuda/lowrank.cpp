// Matrices of low rank on the CPU: `gcbench.ops.lowrank`. A product writes 4 bytes per element of the matrix; the
// orthonormalization of r vectors reads each element about 2 r times, from a cache.
#include <cmath>
#include <memory>

#include "called.hpp"

using namespace gc;

namespace {

constexpr int64_t STREAM_MATRIX_FROM = STREAM_FROM / 16;  // elements: one matrix of many, whose sum no cache holds

// The sum of a_i b_i in the order of `halve`; `terms` has room for `width` of them, a power of two.
double dot(const double* a, const double* b, int64_t n, double* terms, int64_t width) {
  GC_SIMD for (int64_t i = 0; i < n; ++i) terms[i] = a[i] * b[i];
  std::fill(terms + n, terms + width, 0.0);
  return halve(terms, (int)width);
}

}  // namespace

// out[i, j] = sum_k left[k, i] right[k, j], k = 0, 1 ..., limited to the finite floats, for `rank` vectors each.
int64_t gc_lowrank_product(const float* left, const float* right, int64_t rank, int64_t rows, int64_t columns,
                           float* out, int threads) {
  const int64_t across = tiles_of(columns);
  const bool stream = rows * columns >= STREAM_MATRIX_FROM;
  parallel(rows * across, threads, [=](int64_t first, int64_t last) {
    GC_ALIGNED float tile[TILE];
    for (int64_t t = first; t < last; ++t) {
      const int64_t i = t / across, start = t % across * TILE;
      const int count = (int)(columns - start < TILE ? columns - start : TILE);
      for (int64_t k = 0; k < rank; ++k) {
        const float factor = left[k * rows + i], *row = right + k * columns + start;
        if (k == 0) {
          GC_SIMD for (int j = 0; j < count; ++j) tile[j] = factor * row[j];
        } else {
          GC_SIMD for (int j = 0; j < count; ++j) tile[j] += factor * row[j];
        }
      }
      GC_SIMD for (int j = 0; j < count; ++j) {
        const float v = tile[j];
        tile[j] = v > FLOAT_MAX ? FLOAT_MAX : v < -FLOAT_MAX ? -FLOAT_MAX : v;
      }
      write_tile(out + i * columns + start, tile, count, stream);
    }
  });
  return 0;
}
GC_CALLED(gc_lowrank_product)

// Gram-Schmidt of r rows of n floats, in float64, projections subtracted twice. Returns 1 if at most `collapsed` of a
// row's squared norm is left, or it is not finite, or if a row is longer than what `halve` sums; `out` is then undefined.
int64_t gc_lowrank_orthonormalize(const float* vectors, int64_t r, int64_t n, double collapsed, float* out) {
  if (n > 1 << 30) return 1;
  int64_t width = 1;
  while (width < n) width *= 2;
  std::unique_ptr<double[]> memory(new double[r * n + width + r]);
  double *basis = memory.get(), *terms = basis + r * n, *shares = terms + width;
  for (int64_t j = 0; j < r; ++j) {
    double* row = basis + j * n;
    for (int64_t i = 0; i < n; ++i) row[i] = vectors[j * n + i];
    const double energy = dot(row, row, n, terms, width);
    double left = energy;
    for (int pass = 0; pass < 2 && j; ++pass) {
      for (int64_t k = 0; k < j; ++k) shares[k] = dot(basis + k * n, row, n, terms, width);
      for (int64_t k = 0; k < j; ++k) {
        const double *done = basis + k * n, share = shares[k];
        GC_SIMD for (int64_t i = 0; i < n; ++i) row[i] -= done[i] * share;
      }
      if (pass) left = dot(row, row, n, terms, width);
    }
    if (!(left > collapsed * energy)) return 1;
    const double norm = std::sqrt(left);
    GC_SIMD for (int64_t i = 0; i < n; ++i) {
      row[i] /= norm;
      out[j * n + i] = (float)row[i];
    }
  }
  return 0;
}
GC_CALLED(gc_lowrank_orthonormalize)
