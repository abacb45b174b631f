// Elias omega streams are read; omega_write.cpp has their order of bits.
//
// Where a code begins is known only when those before it are read. So a stream is read at several places at once, by each
// thread too, whose beginnings are guesses, and what turns out to be right is kept.
#include <cstdlib>

#include "teams.hpp"

using namespace gc;

namespace {

constexpr int NEAR = 33;  // bits that two neighbouring words hold from any place in the first on

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

  // The NEAR bits from `place` on, then others or zeros. There are 64.
  uint64_t near(int64_t place) const {
    uint64_t pair;
    memcpy(&pair, words + (place >> 5), sizeof pair);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    pair = pair << 32 | pair >> 32;
#endif
    return pair << (place & 31);
  }
};

constexpr uint64_t NOTHING = (uint64_t)1 << 32;  // above all numbers that are coded

// An omega code: its number, which is wrong if no zero ends it.
struct Found {
  uint64_t value;
  int length;
  bool wrong;
};

// Where the last group of digits is in codes that begin with 12 bits. Only a number below 32 is the width, less one, of
// another group, and such numbers end by bit 10.
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
      const int length = before + width + 1;
      entries_[prefix] = {(uint8_t)before, (uint8_t)width, (uint8_t)length, width == 0};
      if (width > 5) continue;
      omega_[prefix] = {(int16_t)value, (int16_t)length};
      const int size = (int)value - 1, whole = length + (size > 0);
      const bool negative = size && (prefix >> (BITS - whole) & 1);
      if (whole <= BITS) dense_[prefix] = {(int16_t)(negative ? -size : size), (int16_t)whole};
    }
  }

  // A short code, or 0 bits: of omega's, and of the dense form's with their sign.
  struct Short {
    int16_t value, length;
  };
  Short omega(uint64_t window) const { return omega_[window >> (64 - BITS)]; }
  Short dense(uint64_t window) const { return dense_[window >> (64 - BITS)]; }

  // The code that the window begins with. As many of its bits must be known as the code is long.
  Found operator()(uint64_t window) const {
    const Entry entry = entries_[window >> (64 - BITS)];
    const uint64_t digits = window << entry.before;
    return {(digits >> 1 >> (63 - entry.width)) | entry.one, entry.length, digits << entry.width >> 63 != 0};
  }

  // The same for who does not ask whether it is wrong, and waits for each code: short ones come sooner.
  uint64_t read(uint64_t window, int& length) const {
    const Short code = omega(window);
    length = code.length;
    if (length) return (uint64_t)code.value;
    const Found found = (*this)(window);
    length = found.length;
    return found.wrong ? NOTHING : found.value;
  }

 private:
  static constexpr int BITS = 12;
  struct Entry {
    uint8_t before, width, length;
    bool one;  // the code of 1, which has no digits
  };
  Entry entries_[1 << BITS];
  Short omega_[1 << BITS] = {}, dense_[1 << BITS] = {};
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

constexpr int FEW = 15;  // levels whose codes are mostly short ones

// Both forms as those who read ahead see them. A record is kept in few bytes; what does not fit is `bad`, and so is what
// is not allowed: it is then read, and told, by who reads one record after the other. With SHORT, short codes are looked
// up whole: twice as fast if nearly all are, and slower if not.
template <bool SHORT>
struct Dense {
  using Record = int16_t;
  static constexpr int LONGEST = 44, SHORTEST = 1;  // bits of a record

  const Prefixes& known;
  const uint64_t top;  // the largest number whose code is a record's

  Dense(const Prefixes& prefixes, int levels) : known(prefixes), top(std::min(levels, INT16_MAX) + 1) {}

  // Read the record at a place behind which there are 64 bits, and return its length. A number whose digits are not
  // all in the window is above `top`.
  int read(const Stream& stream, int64_t place, Record& record, bool& bad) const {
    const uint64_t window = stream.near(place);
    if (SHORT) {
      const Prefixes::Short code = known.dense(window);
      if (__builtin_expect(code.length != 0, 1)) {
        record = code.value;
        bad |= (uint64_t)std::abs((int)code.value) >= top;
        return code.length;
      }
    }
    const Found found = known(window);
    const int64_t size = (int64_t)found.value - 1, has_sign = size != 0;
    const int64_t sign = -(int64_t)(window >> (63 - found.length) & (uint64_t)has_sign);
    bad |= found.wrong | (found.value > top);
    record = (int16_t)((size ^ sign) - sign);
    return found.length + (int)has_sign;
  }

  // By how many codes a record moves on more than one.
  static int64_t skipped(const Record&) { return 0; }
};

template <bool SHORT>
struct Sparse {
  struct Record {
    int32_t gap;
    int16_t code;
  };
  static constexpr int LONGEST = 87, SHORTEST = 3;

  const Prefixes& known;
  const uint64_t top;

  Sparse(const Prefixes& prefixes, int levels) : known(prefixes), top(std::min(levels, INT16_MAX)) {}

  int read(const Stream& stream, int64_t place, Record& record, bool& bad) const {
    const uint64_t window = stream.near(place);
    if (SHORT) {
      const Prefixes::Short gap = known.omega(window);
      const uint64_t rest = window << gap.length;
      const Prefixes::Short size = known.omega(rest << 1);
      if (__builtin_expect(gap.length && size.length, 1)) {
        record = {gap.value, (int16_t)(rest >> 63 ? -size.value : size.value)};
        bad |= (uint64_t)size.value > top;
        return gap.length + 1 + size.length;
      }
    }
    Found gap = known(window);
    uint64_t rest = window << gap.length;
    Found size = known(rest << 1);
    if (__builtin_expect(gap.length + 1 + size.length > NEAR, 0)) {
      gap = known(stream.window(place));
      rest = stream.window(place + gap.length);
      size = known(rest << 1);
    }
    bad |= gap.wrong | size.wrong | (gap.value > INT32_MAX) | (size.value > top);
    const int64_t magnitude = (int64_t)size.value;
    record = {(int32_t)gap.value, (int16_t)(rest >> 63 ? -magnitude : magnitude)};
    return gap.length + 1 + size.length;
  }

  static int64_t skipped(const Record& record) { return (int64_t)record.gap - 1; }
};

// Where a reader is: bits, records and codes that are behind it.
struct Progress {
  int64_t place, records, codes;
};

// A stretch of a stream that is read before it is known where its first record begins. `first` is where it does, if those
// are right that were read since some bits before: readers that begin at different bits soon meet. It ends with the
// record that reaches `limit`.
template <class Form>
struct Part {
  using Record = typename Form::Record;
  int64_t first, place, limit, codes;
  Record *records, *next, *end;
  bool bad;

  // Records that can be read without looking where their end and room are.
  int64_t sure() const { return std::min((limit - place) / Form::LONGEST, (int64_t)(end - next)); }
};

constexpr int PLACES = 4;          // of a thread at once: reading waits for the length of each record
constexpr int64_t STRETCH = 1024;  // bits of a part at least
constexpr int64_t MEETING = 512;   // bits in which readers are expected to meet
constexpr int64_t WORTH = 16384;   // bits that are worth another thread
constexpr int64_t ROUND = 131072;  // bits of a part at most: its records stay in cache until they are put

template <class Form>
void read_part(const Form& form, const Stream& stream, Part<Form>& part) {
  while (part.place < part.limit && part.next < part.end) {
    part.place += form.read(stream, part.place, *part.next++, part.bad);
  }
}

// Read PLACES parts, a record of each in turn.
template <class Form>
void read_parts(const Form& form, const Stream& stream, Part<Form>* parts) {
  for (;;) {
    int64_t place[PLACES], sure = INT64_MAX;
    typename Form::Record* next[PLACES];
    bool bad[PLACES] = {};
    for (int k = 0; k < PLACES; ++k) {
      sure = std::min(sure, parts[k].sure());
      place[k] = parts[k].place;
      next[k] = parts[k].next;
    }
    if (sure <= 0) break;
    for (int64_t i = 0; i < sure; ++i) {
#pragma GCC unroll 8
      for (int k = 0; k < PLACES; ++k) place[k] += form.read(stream, place[k], next[k][i], bad[k]);
    }
    for (int k = 0; k < PLACES; ++k) {
      parts[k].place = place[k];
      parts[k].next += sure;
      parts[k].bad |= bad[k];
    }
  }
  for (int k = 0; k < PLACES; ++k) {
    read_part(form, stream, parts[k]);
    parts[k].codes = parts[k].next - parts[k].records;
    for (const auto* record = parts[k].records; record < parts[k].next; ++record) {
      parts[k].codes += Form::skipped(*record);
    }
  }
}

// Read a stream's records at several places at once, in rounds, as far as all is well; who calls goes on where this ends.
// At most `records` more are taken, of `codes` more codes. put(part, before) takes those of a part, `before` it.
template <class Form, class Put>
Progress read_ahead(const Form& form, const Stream& stream, const Progress from, int64_t records, int64_t codes,
                    int threads, Put put) {
  const int64_t end = stream.bits() - 64, stretch = end - from.place;
  if (stretch < PLACES * STRETCH) return from;
  const int team = (int)std::max<int64_t>(1, std::min<int64_t>(threads, stretch / WORTH)), parts = team * PLACES;
  const int64_t rounds = (stretch + parts * ROUND - 1) / (parts * ROUND), each = stretch / rounds;
  const int64_t room = std::min(records, (each / parts + 1) / Form::SHORTEST + Form::LONGEST);
  std::unique_ptr<Part<Form>[]> all(new (std::nothrow) Part<Form>[parts]);
  std::unique_ptr<typename Form::Record[]> kept(new (std::nothrow) typename Form::Record[parts * room]);
  if (!all || !kept) return from;
  Progress result = from;
  together(team, [&](const Team& own) {
    Progress now = from;  // the same in all threads
    bool well = true;
    while (well && end - now.place >= parts * STRETCH && now.records < from.records + records) {
      const int64_t start = now.place, length = std::min(each, end - start);
      const auto edge = [=](int p) { return start + length * p / parts; };
      // As many threads as were asked for may not have come.
      for (int group = own.rank; group < team; group += own.size) {
        Part<Form>* part = all.get() + group * PLACES;
        for (int k = 0; k < PLACES; ++k) {
          const int p = group * PLACES + k;
          int64_t place = p ? edge(p) - MEETING : start;
          while (place < edge(p)) {
            typename Form::Record ignored;
            bool bad = false;
            place += form.read(stream, place, ignored, bad);
          }
          typename Form::Record* free = kept.get() + p * room;
          part[k] = {place, place, edge(p + 1), 0, free, free, free + room, false};
        }
        read_parts(form, stream, part);
      }
      own.meet();
      for (int p = 0; p < parts && all[p].first == now.place; ++p) {
        const Part<Form>& part = all[p];
        const Progress after{part.place, now.records + (part.next - part.records), now.codes + part.codes};
        well = !part.bad && after.records - from.records <= records && after.codes - from.codes <= codes;
        if (!well) break;
        if (p / PLACES % own.size == own.rank) put(part, now);
        now = after;
      }
      own.meet();
    }
    if (own.rank == 0) result = now;
  });
  return result;
}

}  // namespace

// Read n codes in [-levels, levels] of the dense form. Returns a Fault, with its numbers in info[0] and info[1].
GC_API int64_t gc_omega_dense_read(const uint32_t* words, int64_t count, int64_t n, int levels, int32_t* out,
                                   int64_t* info, int threads) {
  const Prefixes& known = prefixes();
  const Stream stream{words, count};
  const uint64_t top = (uint64_t)levels + 1;
  const int64_t bits = stream.bits();
  const auto put = [=](const auto& part, const Progress& before) {
    int32_t* to = out + before.codes;
    const int64_t number = part.next - part.records;
    GC_SIMD for (int64_t i = 0; i < number; ++i) to[i] = part.records[i];
  };
  const auto read = [&](const auto& form) { return read_ahead(form, stream, {0, 0, 0}, n, n, threads, put); };
  const Progress ahead = levels > FEW ? read(Dense<false>(known, levels)) : read(Dense<true>(known, levels));
  int64_t place = ahead.place;
  for (int64_t i = ahead.records; i < n; ++i) {
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
                                    int64_t* info, int threads) {
  const Prefixes& known = prefixes();
  const Stream stream{words, count};
  const int64_t bits = stream.bits();
  int length;
  const uint64_t head = known.read(stream.window(0), length);
  if (head > (uint64_t)n + 1) {
    info[0] = n + 1;
    return TOO_LARGE;
  }
  const int64_t records = (int64_t)head - 1;
  info[1] = records;
  const auto put = [=](const auto& part, const Progress& before) {
    int64_t index = before.codes - 1;
    for (const auto* record = part.records; record < part.next; ++record) {
      index += record->gap;
      out[index] = record->code;
    }
  };
  const auto read = [&](const auto& form) {
    return read_ahead(form, stream, {length, 0, 0}, records, n, threads, put);
  };
  const Progress ahead = levels > FEW ? read(Sparse<false>(known, levels)) : read(Sparse<true>(known, levels));
  int64_t place = ahead.place, index = ahead.codes - 1;
  for (int64_t i = ahead.records; i < records; ++i) {
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
