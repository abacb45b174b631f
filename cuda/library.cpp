// What the loader asks of the library: which processor this is, and from which sources it was built.
#include "python.hpp"

// 0: any processor; 1: AVX2 and FMA; 2: AVX-512 (F, BW, DQ, VL, CD). As GCC's x86-64, x86-64-v3 and x86-64-v4.
GC_API int64_t gc_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512cd");
  return avx2 ? (avx512 ? 2 : 1) : 0;
#else
  return 0;
#endif
}

GC_API const char* gc_sources() { return GC_SOURCES; }

// Return a dict of names to all that is GC_CALLED; null with an exception set. Called once, with the interpreter's lock.
GC_API PyObject* gc_functions() {
  PyObject* made = PyDict_New();
  for (const gc::Function* known = gc::Function::last; made && known; known = known->next) {
    PyObject* function = PyCFunction_NewEx(&known->method, nullptr, nullptr);
    if (function && !PyDict_SetItemString(made, known->method.name, function)) {
      Py_DecRef(function);
      continue;
    }
    if (function) Py_DecRef(function);
    Py_DecRef(made);
    return nullptr;
  }
  return made;
}
