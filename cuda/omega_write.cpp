// Elias omega streams are written: the dense and the sparse form of QSGD. Each thread writes a stream of its own, and
// these are put together then.
//
// Bit i of a stream is bit 31 - i % 32 of word i / 32, so a code's most significant bit comes first.
#include "teams.hpp"

using namespace gc;

namespace {

constexpr int HEADER = 43;  // bits of the longest omega code

struct Code {
  uint64_t bits;
  int length;  // up to 43, for 2^31
};

inline int digits(uint32_t k) { return 32 - __builtin_clz(k); }

// The Elias omega code of k >= 1.
inline Code omega(uint32_t k) {
  Code code{0, 1};
  while (k > 1) {
    const int width = digits(k);
    code.bits |= (uint64_t)k << code.length;
    code.length += width;
    k = (uint32_t)width - 1;
  }
  return code;
}

inline uint32_t size_of(int32_t code) { return code < 0 ? 0u - (uint32_t)code : (uint32_t)code; }

// A code of the dense form: Elias(|code| + 1), and a sign unless it is zero.
inline Code dense_code(int32_t code) {
  const Code found = omega(size_of(code) + 1);
  return code ? Code{found.bits << 1 | (uint64_t)(code < 0), found.length + 1} : found;
}

// The end of a record of the sparse form: a sign, and Elias(|code|).
inline Code signed_size(int32_t code) {
  const Code found = omega(size_of(code));
  return {(uint64_t)(code < 0) << found.length | found.bits, found.length + 1};
}

class Writer {
 public:
  explicit Writer(uint32_t* out) : begin_(out), out_(out) {}

  // At most 32 bits. The word that is not full yet is written, too, as whether it is full is hard to foretell.
  void put(uint64_t bits, int length) {
    held_ = held_ << length | bits;
    count_ += length;
    const int full = count_ >= 32;
    *out_ = (uint32_t)(held_ >> ((count_ - 32) & 63));
    out_ += full;
    count_ -= 32 * full;
  }

  void put(Code code) {
    if (code.length > 32) {
      put(code.bits >> 32, code.length - 32);
      code = {code.bits & 0xffffffffu, 32};
    }
    put(code.bits, code.length);
  }

  // Fill the last word up with zeros and return how many bits there are without them.
  int64_t finish() {
    if (count_) *out_ = (uint32_t)(held_ << (32 - count_));
    return 32 * (out_ - begin_) + count_;
  }

 private:
  uint32_t *begin_, *out_;
  uint64_t held_ = 0;  // the lowest `count_` bits, below 32 between calls, are still to be written
  int count_ = 0;
};

// Codes of small numbers, which are looked up: of both forms, at code + SMALL, and of distances.
constexpr int SMALL = 128;

struct Short {
  uint32_t bits, length;
};

struct Tables {
  Short dense[2 * SMALL], ends[2 * SMALL], gaps[2 * SMALL];

  Tables() {
    const auto shortened = [](Code code) { return Short{(uint32_t)code.bits, (uint32_t)code.length}; };
    for (int i = 0; i < 2 * SMALL; ++i) {
      dense[i] = shortened(dense_code(i - SMALL));
      ends[i] = i == SMALL ? Short{0, 0} : shortened(signed_size(i - SMALL));
      gaps[i] = i ? shortened(omega((uint32_t)i)) : Short{0, 0};
    }
  }
};

const Tables& tables() {
  static const Tables made;
  return made;
}

// Ask for a line of what comes later, once a line: codes that lie in memory are written three times as fast so.
inline void ask_at_line(const int32_t* codes, int64_t i) {
  if (i % 16 == 0) ask_lines<1>((const float*)codes + i, 0);
}

// Write the dense codes of n numbers below SMALL in magnitude, GROUP of which together take 32 bits at most. Returns the
// bits, or -1 if a number is not in [-levels, levels].
template <int GROUP>
int64_t write_small(const int32_t* codes, int64_t n, int levels, uint32_t* out) {
  const Short* known = tables().dense + SMALL;
  Writer writer(out);
  const auto wrong = [=](int32_t code) { return (uint32_t)code + (uint32_t)levels > 2u * (uint32_t)levels; };
  int64_t i = 0;
  for (; i + GROUP <= n; i += GROUP) {
    ask_at_line(codes, i);
    bool bad = false;
    for (int j = 0; j < GROUP; ++j) bad |= wrong(codes[i + j]);
    if (bad) return -1;
    Short all = known[codes[i]];
    for (int j = 1; j < GROUP; ++j) {
      const Short next = known[codes[i + j]];
      all = {all.bits << next.length | next.bits, all.length + next.length};
    }
    writer.put(all.bits, (int)all.length);
  }
  for (; i < n; ++i) {
    if (wrong(codes[i])) return -1;
    writer.put(known[codes[i]].bits, (int)known[codes[i]].length);
  }
  return writer.finish();
}

int64_t write_dense(const int32_t* codes, int64_t n, int levels, uint32_t* out) {
  if (levels < 15) return write_small<4>(codes, n, levels, out);
  if (levels < SMALL) return write_small<2>(codes, n, levels, out);
  const Short* known = tables().dense + SMALL;
  Writer writer(out);
  for (int64_t i = 0; i < n; ++i) {
    ask_at_line(codes, i);
    if (size_of(codes[i]) > (uint32_t)levels) return -1;
    if (size_of(codes[i]) < SMALL) {
      writer.put(known[codes[i]].bits, (int)known[codes[i]].length);
    } else {
      writer.put(dense_code(codes[i]));
    }
  }
  return writer.finish();
}

// Bit j: whether codes[j] is not zero, for 64 of them.
inline uint64_t nonzero_mask(const int32_t* codes) {
  GC_ALIGNED uint8_t flags[64];
  GC_SIMD for (int j = 0; j < 64; ++j) flags[j] = codes[j] != 0;
  uint64_t mask = 0;
  for (int j = 0; j < 8; ++j) {
    uint64_t eight;
    memcpy(&eight, flags + 8 * j, sizeof eight);
    mask |= (eight * 0x0102040810204080ull) >> 56 << 8 * j;
  }
  return mask;
}

// Write the records of the sparse form of codes[first] to codes[last - 1]; the first one's distance is from `before`. All
// are known to be allowed. Returns the bits.
int64_t write_sparse(const int32_t* codes, int64_t first, int64_t last, int64_t before, Writer writer) {
  const Tables& known = tables();
  const auto put = [&](int64_t i) {
    const uint64_t gap = (uint64_t)(i - before);
    const int32_t code = codes[i];
    before = i;
    if (gap < 2 * SMALL && size_of(code) < SMALL) {  // at most 14 and 14 bits
      const Short a = known.gaps[gap], b = known.ends[code + SMALL];
      writer.put((uint64_t)a.bits << b.length | b.bits, (int)(a.length + b.length));
    } else {
      writer.put(omega((uint32_t)gap));
      writer.put(signed_size(code));
    }
  };
  int64_t i = first;
  for (; i + 64 <= last; i += 64) {
    for (uint64_t mask = nonzero_mask(codes + i); mask; mask &= mask - 1) put(i + __builtin_ctzll(mask));
  }
  for (; i < last; ++i) {
    if (codes[i]) put(i);
  }
  return writer.finish();
}

// Append a stream of `bits` bits, that begins a word, to one that ends at bit `at`, whose last word zeros fill up. It may
// lie in the same words, behind that one.
void append(uint32_t* words, int64_t at, const uint32_t* from, int64_t bits) {
  const int64_t count = (bits + 31) / 32;
  const int shift = (int)(at & 31);
  uint32_t* out = words + (at >> 5);
  if (!shift) {
    memmove(out, from, count * sizeof *out);
    return;
  }
  uint32_t held = *out;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t word = from[i];
    out[i] = held | word >> shift;
    held = word << (32 - shift);
  }
  if (shift + bits > 32 * count) out[count] = held;
}

constexpr int64_t WRITTEN = 8;  // tiles of codes that are worth a thread
constexpr int MOST = 64;        // threads
// Words of a part beyond its codes' bits: its ends fill no words, and the first distance may reach back to before it.
constexpr int SPARE = 3;

// Write the codes [0, n) by parts, on up to `threads` threads, one after the other. `write(first, last, out)` returns the
// bits of a part, or -1; `longest` is what a code takes at most, and `header` what the first part has before. Returns
// the words of all, or -1.
template <class Write>
int64_t write_parts(int64_t n, int64_t header, int longest, uint32_t* out, int threads, Write write) {
  const int parts = worth(tiles_of(n), WRITTEN, std::min(threads, MOST));
  const auto edge = [=](int p) { return n * p / parts; };
  // Where a part lies until it is known how long those before are: behind the longest that these can be.
  const auto room = [=](int p) { return p ? out + (header + longest * edge(p) + 31) / 32 + SPARE * p : out; };
  int64_t bits[MOST];
  each_part(parts, parts, [&](int p) { bits[p] = write(edge(p), edge(p + 1), room(p)); });
  int64_t at = bits[0];
  bool bad = at < 0;
  for (int p = 1; p < parts; ++p) {
    bad |= bits[p] < 0;
    if (bad) break;
    append(out, at, room(p), bits[p]);
    at += bits[p];
  }
  return bad ? -1 : (at + 31) / 32;
}

}  // namespace

// Write the dense form of n codes, of which each takes at most `longest` bits, on up to `threads` threads; `out` has room
// for that and SPARE words a thread. Returns the number of words, or -1 if a code is not in [-levels, levels].
GC_API int64_t gc_omega_dense_write(const int32_t* codes, int64_t n, int levels, int longest, uint32_t* out,
                                    int threads) {
  return write_parts(n, 0, longest, out, threads, [=](int64_t first, int64_t last, uint32_t* to) {
    return write_dense(codes + first, last - first, levels, to);
  });
}
GC_CALLED(gc_omega_dense_write)

// The same for the sparse form, which begins with the number of nonzeros + 1, in at most 43 bits.
GC_API int64_t gc_omega_sparse_write(const int32_t* codes, int64_t n, int levels, int longest, uint32_t* out,
                                     int threads) {
  int64_t nonzeros = 0;
  uint32_t top = 0;
  parallel(tiles_of(n), threads, [&](int64_t first, int64_t last) {
    int64_t found = 0;
    uint32_t largest = 0;
    for (int64_t t = first; t < last; ++t) {
      const int32_t* tile = codes + t * TILE;
      const int count = (int)std::min<int64_t>(TILE, n - t * TILE);
      int own = 0;
#pragma omp simd reduction(+ : own) reduction(max : largest)
      for (int i = 0; i < count; ++i) {
        own += tile[i] != 0;
        largest = size_of(tile[i]) > largest ? size_of(tile[i]) : largest;
      }
      found += own;
    }
#pragma omp critical(gc_omega)
    {
      nonzeros += found;
      top = std::max(top, largest);
    }
  });
  if (top > (uint32_t)levels) return -1;
  return write_parts(n, HEADER, longest, out, threads, [=](int64_t first, int64_t last, uint32_t* to) {
    Writer writer(to);
    if (!first) writer.put(omega((uint32_t)(nonzeros + 1)));
    int64_t before = first - 1;
    while (before >= 0 && !codes[before]) --before;
    return write_sparse(codes, first, last, before, writer);
  });
}
GC_CALLED(gc_omega_sparse_write)
