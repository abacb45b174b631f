// Functions that Python calls: GC_CALLED(name) after a function lists it, with its address and the types of its
// arguments, in the text that `gc_functions` (library.cpp) gives to Python, which calls it by ctypes.
//
// A function takes numbers, pointers and references to structures. It returns 0, or the int64 that its comment states;
// Python raises MemoryError where it throws std::bad_alloc. A pointer is written as '*' and its element's letter, a
// number as its letter: those of Python's array and struct modules; a pointer to pointers is "*P", a reference "*B".
#pragma once
#include <string>
#include <type_traits>

#include "loops.hpp"

namespace gc {

template <class T>
constexpr char letter() {
  using Plain = std::remove_cv_t<T>;
  if (std::is_pointer_v<Plain>) return 'P';
  if (std::is_void_v<Plain> || std::is_class_v<Plain>) return 'B';
  if (std::is_same_v<Plain, float>) return 'f';
  if (std::is_same_v<Plain, double>) return 'd';
  constexpr char known[2][9] = {"BH_I___Q", "bh_i___q"};
  if constexpr (std::is_integral_v<Plain>) return known[std::is_signed_v<Plain>][sizeof(Plain) - 1];
  return '?';
}

// Returned where F throws std::bad_alloc; `gcbench.ops.native.NO_MEMORY`, which Python turns into MemoryError.
constexpr int64_t NO_MEMORY = INT64_MIN;

// `call` is F as Python calls it, without exceptions; `letters` are the types of F's arguments.
template <auto F>
struct Called;

template <class... Types, int64_t (*F)(Types...)>
struct Called<F> {
  static int64_t call(Types... arguments) try {
    return F(arguments...);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }

  static std::string letters() {
    std::string all;
    ((all += ' ', all += std::is_pointer_v<Types> || std::is_reference_v<Types> ? "*" : "",
      all += letter<std::remove_pointer_t<std::remove_reference_t<Types>>>()),
     ...);
    return all;
  }
};

// The text of all functions: a line each, its name, its address and its arguments.
inline std::string& functions() {
  static std::string all;
  return all;
}

struct Listed {
  Listed(const std::string& name, int64_t address, const std::string& letters) {
    functions() += name + ' ' + std::to_string(address) + letters + '\n';
  }
};

}  // namespace gc

#define GC_CALLED(name) \
  static const gc::Listed name##_listed(#name, (int64_t)&gc::Called<name>::call, gc::Called<name>::letters());
