// Elias omega streams on the CPU: the dense and the sparse form of QSGD, one after the other by nature.
//
// Bit i of a stream is bit 31 - i % 32 of word i / 32, so a code's most significant bit comes first.
#include <stdlib.h>

#include "python.hpp"

using namespace gc;

namespace {

// ---- writing ---------------------------------------------------------------------------------------------------

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

class Writer {
 public:
  explicit Writer(uint32_t* out) : begin_(out), out_(out) {}

  void put(Code code) {
    if (code.length > 32) {
      put_short(code.bits >> 32, code.length - 32);
      code = {code.bits & 0xffffffffu, 32};
    }
    put_short(code.bits, code.length);
  }

  // Fill the last word up with zeros and return how many there are.
  int64_t finish() {
    if (count_) *out_++ = (uint32_t)(held_ << (32 - count_));
    return out_ - begin_;
  }

 private:
  void put_short(uint64_t bits, int length) {
    held_ = held_ << length | bits;
    count_ += length;
    if (count_ >= 32) {
      count_ -= 32;
      *out_++ = (uint32_t)(held_ >> count_);
    }
  }

  uint32_t *begin_, *out_;
  uint64_t held_ = 0;  // the lowest `count_` bits, below 32 between calls, are still to be written
  int count_ = 0;
};

// Omega codes of small numbers, so that most are looked up.
class Table {
 public:
  Table() {
    for (uint32_t k = 1; k < SIZE; ++k) codes_[k] = omega(k);
  }
  Code operator()(uint32_t k) const { return k < SIZE ? codes_[k] : omega(k); }

 private:
  static constexpr uint32_t SIZE = 256;
  Code codes_[SIZE];
};

const Table& table() {
  static const Table made;
  return made;
}

inline uint32_t size_of(int32_t code) { return code < 0 ? 0u - (uint32_t)code : (uint32_t)code; }

// ---- reading ---------------------------------------------------------------------------------------------------

struct Stream {
  const uint32_t* words;
  int64_t count;

  int64_t bits() const { return 32 * count; }
  uint64_t word(int64_t i) const { return i < count ? words[i] : 0; }

  // The 64 bits from `place` on; beyond the end there are zeros.
  uint64_t window(int64_t place) const {
    const int64_t i = place >> 5;
    const int shift = (int)(place & 31);
    const uint64_t high = word(i) << 32 | word(i + 1);
    return shift ? high << shift | word(i + 2) >> (32 - shift) : high;
  }
};

constexpr uint64_t NOTHING = (uint64_t)1 << 32;  // above all numbers that are coded

// The number that the omega code at the window's beginning stands for, NOTHING if there is none, and its length.
inline uint64_t scan(uint64_t window, int& length) {
  uint64_t value = 1;
  length = 1;
  for (int group = 0; group < 4 && (window >> 63) && value < 32; ++group) {
    const int width = (int)value + 1;
    value = window >> (64 - width);
    length += width;
    window <<= width;
  }
  return window >> 63 ? NOTHING : value;
}

// Codes of at most 11 bits by their first 11 bits.
class Prefixes {
 public:
  Prefixes() {
    for (uint32_t prefix = 0; prefix < SIZE; ++prefix) {
      int length;
      const uint64_t value = scan((uint64_t)prefix << 53, length);
      entries_[prefix] = length <= 11 && value != NOTHING ? Entry{(uint16_t)value, (uint16_t)length} : Entry{0, 0};
    }
  }
  uint64_t read(uint64_t window, int& length) const {
    const Entry entry = entries_[window >> 53];
    length = entry.length;
    return length ? entry.value : scan(window, length);
  }

 private:
  static constexpr uint32_t SIZE = 1u << 11;
  struct Entry {
    uint16_t value, length;
  };
  Entry entries_[SIZE];
};

const Prefixes& prefixes() {
  static const Prefixes made;
  return made;
}

// What is wrong with a stream, with the numbers that say where.
enum Fault { FINE, EARLY, TOO_LARGE, END, PADDING, INDEX };

int64_t check_end(const Stream& stream, int64_t end, int64_t* info) {
  info[0] = end;
  const int64_t bits = stream.bits();
  if (!(end <= bits && bits < end + 32)) return END;
  if (end < bits && (stream.words[stream.count - 1] & ((1u << (bits - end)) - 1))) return PADDING;
  return FINE;
}

}  // namespace

// Write the dense form of n codes; `out` has room for the longest. Returns the number of words, or -1 if a code is
// not in [-levels, levels].
GC_API int64_t gc_omega_dense_write(const int32_t* codes, int64_t n, int levels, uint32_t* out) {
  const Table& known = table();
  Writer writer(out);
  for (int64_t i = 0; i < n; ++i) {
    const int32_t code = codes[i];
    const uint32_t size = size_of(code);
    if (size > (uint32_t)levels) return -1;
    const Code found = known(size + 1);
    const int signed_ = size != 0;
    writer.put({found.bits << signed_ | (uint64_t)(code < 0), found.length + signed_});
  }
  return writer.finish();
}
GC_CALLED(gc_omega_dense_write)

// The same for the sparse form, which begins with the number of nonzeros + 1.
GC_API int64_t gc_omega_sparse_write(const int32_t* codes, int64_t n, int levels, uint32_t* out) {
  int64_t nonzeros = 0;
  uint32_t top = 0;
#pragma omp simd reduction(+ : nonzeros) reduction(max : top)
  for (int64_t i = 0; i < n; ++i) {
    nonzeros += codes[i] != 0;
    top = size_of(codes[i]) > top ? size_of(codes[i]) : top;
  }
  if (top > (uint32_t)levels) return -1;
  const Table& known = table();
  Writer writer(out);
  writer.put(omega((uint32_t)(nonzeros + 1)));
  int64_t before = -1;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t code = codes[i];
    if (!code) continue;
    writer.put(known((uint32_t)(i - before)));
    const Code size = known(size_of(code));
    writer.put({(uint64_t)(code < 0) << size.length | size.bits, size.length + 1});
    before = i;
  }
  return writer.finish();
}
GC_CALLED(gc_omega_sparse_write)

// Read n codes in [-levels, levels] of the dense form. Returns a Fault, with its numbers in info[0] and info[1].
GC_API int64_t gc_omega_dense_read(const uint32_t* words, int64_t count, int64_t n, int levels, int32_t* out,
                                   int64_t* info) {
  const Prefixes& known = prefixes();
  const Stream stream{words, count};
  const uint64_t top = (uint64_t)levels + 1;
  const int64_t bits = stream.bits();
  int64_t place = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (place >= bits) {
      info[0] = n - i;
      return EARLY;
    }
    const uint64_t window = stream.window(place);
    int length;
    const uint64_t value = known.read(window, length);
    if (value > top) {
      info[0] = (int64_t)top;
      return TOO_LARGE;
    }
    const int32_t size = (int32_t)value - 1, signed_ = size != 0;
    const int32_t sign = -(int32_t)((window >> (63 - length)) & (uint64_t)signed_);
    out[i] = (size ^ sign) - sign;
    place += length + signed_;
  }
  return check_end(stream, place, info);
}
GC_CALLED(gc_omega_dense_read)

// The same for the sparse form; `out` is all zeros before.
GC_API int64_t gc_omega_sparse_read(const uint32_t* words, int64_t count, int64_t n, int levels, int32_t* out,
                                    int64_t* info) {
  const Prefixes& known = prefixes();
  const Stream stream{words, count};
  const int64_t bits = stream.bits();
  int length;
  const uint64_t head = scan(stream.window(0), length);
  if (head > (uint64_t)n + 1) {
    info[0] = n + 1;
    return TOO_LARGE;
  }
  const int64_t records = (int64_t)head - 1;
  int64_t place = length, index = -1;
  info[1] = records;
  for (int64_t i = 0; i < records; ++i) {
    if (place >= bits) {
      info[0] = records - i;
      return EARLY;
    }
    const uint64_t gap = known.read(stream.window(place), length);
    if (gap > (uint64_t)n) {
      info[0] = n;
      return TOO_LARGE;
    }
    place += length;
    const uint64_t window = stream.window(place);
    const bool negative = window >> 63;
    const uint64_t size = known.read(window << 1, length);
    if (size > (uint64_t)levels) {
      info[0] = levels;
      return TOO_LARGE;
    }
    place += 1 + length;
    index += (int64_t)gap;
    if (index < n) out[index] = negative ? -(int32_t)size : (int32_t)size;
  }
  const int64_t fault = check_end(stream, place, info);
  if (fault) return fault;
  info[0] = index;
  return records && index >= n ? INDEX : FINE;
}
GC_CALLED(gc_omega_sparse_read)
