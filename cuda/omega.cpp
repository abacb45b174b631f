// Streams of Elias omega codes, QSGD's dense and sparse form: written and read one code after the other, by one thread.
//
// Bit i of a stream is bit 31 - i % 32 of word i / 32, so a code's most significant bit comes first. The code of k >= 1: a
// final 0; while k > 1, the digits of k in front of it, and k becomes their number less one.
#include "called.hpp"

using namespace gc;

namespace {

struct Code {
  uint64_t bits;
  int length;  // up to 43, for 2^31
};

Code omega(uint32_t k) {
  Code code{0, 1};
  while (k > 1) {
    const int width = 32 - __builtin_clz(k);
    code.bits |= (uint64_t)k << code.length;
    code.length += width;
    k = (uint32_t)width - 1;
  }
  return code;
}

inline uint32_t size_of(int32_t code) { return code < 0 ? 0u - (uint32_t)code : (uint32_t)code; }

// Omega codes of small numbers, which most are.
constexpr uint32_t SMALL = 256;

struct Table {
  Code of[SMALL];

  Table() {
    for (uint32_t k = 1; k < SMALL; ++k) of[k] = omega(k);
  }
  Code operator()(uint32_t k) const { return k < SMALL ? of[k] : omega(k); }
};

const Table& table() {
  static const Table made;
  return made;
}

class Writer {
 public:
  explicit Writer(uint32_t* out) : begin_(out), out_(out) {}

  // The word that is not full yet is written, too, as whether it is full is hard to foretell.
  void put(Code code) {
    if (code.length > 32) {
      put({code.bits >> 32, code.length - 32});
      code = {code.bits & 0xffffffffu, 32};
    }
    held_ = held_ << code.length | code.bits;
    count_ += code.length;
    const int full = count_ >= 32;
    *out_ = (uint32_t)(held_ >> ((count_ - 32) & 63));
    out_ += full;
    count_ -= 32 * full;
  }

  // Fill the last word up with zeros, and return how many there are.
  int64_t finish() {
    if (count_) *out_++ = (uint32_t)(held_ << (32 - count_));
    return out_ - begin_;
  }

 private:
  uint32_t *begin_, *out_;
  uint64_t held_ = 0;  // the lowest `count_` bits, below 32 between calls, are still to be written
  int count_ = 0;
};

// ---- reading -----------------------------------------------------------------------------------------------------------

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

constexpr uint64_t NOTHING = (uint64_t)1 << 32;  // the value of bits that are not a code: above all coded numbers

struct Found {
  uint64_t value;
  int length;
};

// For each value of a code's first 12 bits, where its last group of digits is. A group that is followed by another is
// the width, less one, of that other group, hence below 32; such groups end by bit 10.
class Prefixes {
 public:
  Prefixes() {
    for (uint32_t prefix = 0; prefix < 1u << BITS; ++prefix) {
      uint64_t value = 1;
      int before = 0, width = 0;
      for (uint64_t rest = (uint64_t)prefix << (64 - BITS); rest >> 63 && value < 32; rest <<= width) {
        before += width;
        width = (int)value + 1;
        value = width > 5 ? 32 : rest >> (64 - width);
      }
      entries_[prefix] = {(uint8_t)before, (uint8_t)width, width == 0};
    }
  }

  // The code that the window begins with.
  Found operator()(uint64_t window) const {
    const Entry entry = entries_[window >> (64 - BITS)];
    const uint64_t digits = window << entry.before;
    const bool ends = !(digits << entry.width >> 63);
    const uint64_t value = (digits >> 1 >> (63 - entry.width)) | entry.one;
    return {ends ? value : NOTHING, entry.before + entry.width + 1};
  }

 private:
  static constexpr int BITS = 12;
  struct Entry {
    uint8_t before, width;
    bool one;  // the code of 1, which has no digits
  };
  Entry entries_[1 << BITS];
};

const Prefixes& prefixes() {
  static const Prefixes made;
  return made;
}

// The fault of a stream: info[0] and info[1] say where.
enum Fault { FINE, EARLY, TOO_LARGE, END, PADDING, INDEX };

int64_t fault(Fault found, int64_t where, int64_t* info) {
  info[0] = where;
  return found;
}

int64_t check_end(const Stream& stream, int64_t end, int64_t* info) {
  const int64_t bits = stream.bits();
  if (!(end <= bits && bits < end + 32)) return fault(END, end, info);
  const bool padded = end < bits && (stream.words[stream.count - 1] & ((1u << (bits - end)) - 1));
  return fault(padded ? PADDING : FINE, end, info);
}

}  // namespace

// Write the dense form of n codes: Elias(|code| + 1), and a sign (1: negative) unless it is zero. `out` has room for the
// longest codes and a word. Returns the number of words, or -1 if a code is not in [-levels, levels].
int64_t gc_omega_dense_write(const int32_t* codes, int64_t n, int levels, uint32_t* out) {
  const Table& known = table();
  Writer writer(out);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t size = size_of(codes[i]);
    if (size > (uint32_t)levels) return -1;
    const Code code = known(size + 1);
    writer.put(size ? Code{code.bits << 1 | (uint64_t)(codes[i] < 0), code.length + 1} : code);
  }
  return writer.finish();
}
GC_CALLED(gc_omega_dense_write)

// The same for the sparse form: Elias(1 + nonzeros), and for each of them Elias(distance), a sign, Elias(|code|).
int64_t gc_omega_sparse_write(const int32_t* codes, int64_t n, int levels, uint32_t* out) {
  const Table& known = table();
  int64_t nonzeros = 0;
  uint32_t top = 0;
#pragma omp simd reduction(+ : nonzeros) reduction(max : top)
  for (int64_t i = 0; i < n; ++i) {
    nonzeros += codes[i] != 0;
    top = size_of(codes[i]) > top ? size_of(codes[i]) : top;
  }
  if (top > (uint32_t)levels) return -1;
  Writer writer(out);
  writer.put(known((uint32_t)(nonzeros + 1)));
  for (int64_t i = 0, before = -1; i < n; ++i) {
    if (!codes[i]) continue;
    const Code code = known(size_of(codes[i]));
    writer.put(known((uint32_t)(i - before)));
    writer.put({(uint64_t)(codes[i] < 0) << code.length | code.bits, code.length + 1});
    before = i;
  }
  return writer.finish();
}
GC_CALLED(gc_omega_sparse_write)

// Read n codes in [-levels, levels] of the dense form. Returns a Fault.
int64_t gc_omega_dense_read(const uint32_t* words, int64_t count, int64_t n, int levels, int32_t* out, int64_t* info) {
  const Prefixes& known = prefixes();
  const Stream stream{words, count};
  const uint64_t top = (uint64_t)levels + 1;
  const int64_t bits = stream.bits();
  int64_t place = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (place >= bits) return fault(EARLY, n - i, info);
    const uint64_t window = stream.window(place);
    const Found found = known(window);
    if (found.value > top) return fault(TOO_LARGE, (int64_t)top, info);
    const int32_t size = (int32_t)found.value - 1, is_signed = size != 0;
    const int32_t sign = -(int32_t)((window >> (63 - found.length)) & (uint64_t)is_signed);
    out[i] = (size ^ sign) - sign;
    place += found.length + is_signed;
  }
  return check_end(stream, place, info);
}
GC_CALLED(gc_omega_dense_read)

// The same for the sparse form; `out` is all zeros before.
int64_t gc_omega_sparse_read(const uint32_t* words, int64_t count, int64_t n, int levels, int32_t* out, int64_t* info) {
  const Prefixes& known = prefixes();
  const Stream stream{words, count};
  const int64_t bits = stream.bits();
  const Found head = known(stream.window(0));
  if (head.value > (uint64_t)n + 1) return fault(TOO_LARGE, n + 1, info);
  const int64_t records = (int64_t)head.value - 1;
  info[1] = records;
  int64_t place = head.length, index = -1;
  for (int64_t i = 0; i < records; ++i) {
    if (place >= bits) return fault(EARLY, records - i, info);
    const Found gap = known(stream.window(place));
    if (gap.value > (uint64_t)n) return fault(TOO_LARGE, n, info);
    place += gap.length;
    const uint64_t window = stream.window(place);
    const Found size = known(window << 1);
    if (size.value > (uint64_t)levels) return fault(TOO_LARGE, levels, info);
    place += 1 + size.length;
    index += (int64_t)gap.value;
    if (index < n) out[index] = window >> 63 ? -(int32_t)size.value : (int32_t)size.value;
  }
  const int64_t found = check_end(stream, place, info);
  if (found) return found;
  return records && index >= n ? fault(INDEX, index, info) : (int64_t)FINE;
}
GC_CALLED(gc_omega_sparse_read)
