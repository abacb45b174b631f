// Range floats (Wang et al. 2020): see gcbench.ops.rangefloat. A grid is (base, P): the first step and how many codes
// are positive.
#pragma once
#include "common.cuh"

namespace gc {

// What encoding takes from a grid.
struct RangeCoder {
  int32_t first;               // half a step, less the steps below code 1: added to a magnitude's bits
  int32_t positive, negative;  // codes of each sign
  int32_t skipped;             // what the codes of negative values begin after, or 0 if there are none
  float nearest;               // half of the smallest magnitude, from which on a code is not 0
};

struct RangeFormat {
  int bits, mantissa;

  GC_HD uint32_t codes() const { return (1u << bits) - 1; }
  GC_HD int32_t top() const { return 255 << mantissa; }  // the step of infinity
  GC_HD int32_t base(int32_t grid) const { return grid >> bits; }
  GC_HD int32_t positive(int32_t grid) const { return grid & (int32_t)codes(); }

  // The step of a magnitude, at most the largest finite one; `magnitude` are the bits of a float without its sign.
  GC_HD int32_t step(uint32_t magnitude) const {
    const int32_t step = (int32_t)(magnitude + (1u << (22 - mantissa))) >> (23 - mantissa);
    return step < top() - 1 ? step : top() - 1;
  }

  // The bits of the float of a step; of infinity where it is not finite.
  GC_HD uint32_t value(int32_t step) const {
    return (uint32_t)(step < top() ? step : top()) << (23 - mantissa);
  }

  // The grid of a group, whose largest and least value have the magnitudes `up` and `down`: 0 if of the other sign.
  GC_HD int32_t grid(uint32_t up, uint32_t down) const {
    const int32_t a = step(up) + 1, b = step(down) + 1, all = (int32_t)codes();
    const int32_t one = (a > b ? a : b) - all, both = (a + b - all + 1) >> 1;
    int32_t base = one > both ? one : both;
    base = base < 1 ? 1 : base;
    int32_t positive = a - base;
    positive = positive < 0 ? 0 : positive > all ? all : positive;
    return (int32_t)((uint32_t)base << bits | (uint32_t)positive);
  }

  // Whether `grid` can have returned it.
  GC_HD bool valid(int32_t grid) const { return base(grid) >= 1 && base(grid) + positive(grid) <= top(); }

  GC_HD RangeCoder coder(int32_t base, int32_t positive) const {
    // Magnitudes that round to infinity get the last finite step, which the grid's largest code may be beyond.
    const int32_t rest = (int32_t)codes() - positive, room = top() - base, negative = rest < room ? rest : room;
    const int32_t first = (1 << (22 - mantissa)) - (int32_t)((uint32_t)(base - 1) << (23 - mantissa));
    return RangeCoder{first, positive, negative, negative > 0 ? positive : 0, float_of(value(base)) * 0.5f};
  }

  // The code of the float with the bits `x`.
  GC_HD uint32_t encode(uint32_t x, const RangeCoder& coder) const {
    const uint32_t size = x & 0x7fffffffu;
    const int32_t sign = (int32_t)x >> 31;  // all ones or none
    const int32_t top = coder.positive ^ ((coder.positive ^ coder.negative) & sign);
    int32_t code = (int32_t)(size + (uint32_t)coder.first) >> (23 - mantissa);
    code = code > 1 ? code : 1;
    code = code < top ? code : top;
    code += coder.skipped & sign;
    return (uint32_t)code & -(uint32_t)(float_of(size) >= coder.nearest);
  }

  // The bits of the float of a code.
  GC_HD uint32_t decode(uint32_t code, int32_t base, int32_t positive) const {
    const int32_t own = (int32_t)code, negative = own > positive;
    const uint32_t size = value(own - (negative ? positive : 0) + base - 1);
    return (own == 0 ? 0u : size) | (uint32_t)negative << 31;
  }
};

}  // namespace gc
