// Functions that Python calls: GC_CALLED(name) after a C function lists it, with the types of its arguments, in the text that
// `gc_functions` (library.cpp) gives to Python, which calls it by ctypes and converts by these types.
//
// A function takes numbers and pointers and returns an int64. A pointer is written as '*' and its element's letter, a
// number as its letter: those of Python's array and struct modules; a pointer to pointers is "*P".
#pragma once
#include <string>
#include <type_traits>

#include "loops.hpp"

namespace gc {

template <class T>
constexpr char letter() {
  using Plain = std::remove_cv_t<T>;
  if (std::is_pointer_v<Plain>) return 'P';
  if (std::is_void_v<Plain>) return 'B';
  if (std::is_same_v<Plain, float>) return 'f';
  if (std::is_same_v<Plain, double>) return 'd';
  constexpr char known[2][9] = {"BH_I___Q", "bh_i___q"};
  if constexpr (std::is_integral_v<Plain>) return known[std::is_signed_v<Plain>][sizeof(Plain) - 1];
  return '?';
}

template <class... Types>
std::string letters(int64_t (*)(Types...)) {
  std::string all;
  ((all += ' ', all += std::is_pointer_v<Types> ? "*" : "", all += letter<std::conditional_t<std::is_pointer_v<Types>,
                                                                         std::remove_pointer_t<Types>, Types>>()),
   ...);
  return all;
}

// The text of all functions: a line each, its name and its arguments.
inline std::string& functions() {
  static std::string all;
  return all;
}

struct Listed {
  explicit Listed(const std::string& line) { functions() += line + "\n"; }
};

}  // namespace gc

#define GC_CALLED(name) static const gc::Listed name##_listed(#name + gc::letters(name));
