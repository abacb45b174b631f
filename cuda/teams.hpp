// Threads that work through the parts of one problem, and meet on the way.
#pragma once
#include <algorithm>

#include "called.hpp"

namespace gc {

// Call f(part) for 0 <= part < parts, on `threads` threads. f must not throw: allocate before the call.
template <class F>
static inline void each_part(int parts, int threads, F f) {
#if defined(_OPENMP)
  if (threads > 1 && parts > 1) {
#pragma omp parallel for schedule(static, 1) num_threads(threads)
    for (int p = 0; p < parts; ++p) f(p);
    return;
  }
#endif
  for (int p = 0; p < parts; ++p) f(p);
}

// The threads of one region.
struct Team {
  int rank, size;

  // Call f(part) for the parts of this thread.
  template <class F>
  void each(int parts, F f) const {
    for (int p = rank; p < parts; p += size) f(p);
  }

  // Wait for the others: what they have written before can be read then.
  void meet() const {
#if defined(_OPENMP)
    if (size > 1) {
#pragma omp barrier
    }
#endif
  }
};

// Call f(team) on `threads` threads. f must not throw: allocate before the call.
template <class F>
static inline void together(int threads, F f) {
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    f(Team{omp_get_thread_num(), omp_get_num_threads()});
    return;
  }
#endif
  f(Team{0, 1});
}

// As many of `threads` as have `least` tiles each; one at least.
static inline int worth(int64_t tiles, int64_t least, int threads) {
  return (int)std::max<int64_t>(1, std::min<int64_t>(threads, tiles / least));
}

// Of n elements, where threads meet a dozen times.
static inline int useful_threads(int64_t n, int threads) { return worth(n / TILE, 2 * GRAIN, threads); }

}  // namespace gc
