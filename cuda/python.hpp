// What Python calls, without Python.h and without ctypes: a C function whose types of arguments say how they are read.
//
// GC_CALLED(name) after a function makes it one of what `gc_functions` (library.cpp) gives to Python: it takes as many
// arguments, ints, floats, addresses (an int, bytes, or None), and returns an int. Meanwhile the interpreter's lock is
// released, unless objects are taken or returned. ctypes takes a microsecond more, and six when its code has left
// the caches.
#pragma once
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "loops.hpp"

// What is used of Python's stable ABI; the process that loads this library has it.
#pragma GCC visibility push(default)
extern "C" {
struct PyObject;
struct PyMethodDef {
  const char* name;
  PyObject* (*function)(PyObject* self, PyObject* const* arguments, intptr_t number);
  int flags;
  const char* text;
};
extern PyObject _Py_NoneStruct, PyBytes_Type, PyTuple_Type;
extern PyObject *PyExc_MemoryError, *PyExc_OverflowError, *PyExc_TypeError;
char* PyBytes_AsString(PyObject* bytes);
PyObject* PyBytes_FromStringAndSize(const char* bytes, intptr_t size);
PyObject* PyCFunction_NewEx(PyMethodDef* method, PyObject* self, PyObject* module);
PyObject* PyDict_GetItemWithError(PyObject* dict, PyObject* key);
PyObject* PyDict_New();
int PyDict_SetItemString(PyObject* dict, const char* key, PyObject* value);  // does not take the reference
void PyErr_Clear();
PyObject* PyErr_Format(PyObject* exception, const char* format, ...);
PyObject* PyErr_Occurred();
void PyEval_RestoreThread(void* state);
void* PyEval_SaveThread();
double PyFloat_AsDouble(PyObject* number);
long long PyLong_AsLongLong(PyObject* number);
unsigned long long PyLong_AsUnsignedLongLong(PyObject* number);
void* PyLong_AsVoidPtr(PyObject* number);
PyObject* PyLong_FromLongLong(long long number);
PyObject* PyObject_CallFunctionObjArgs(PyObject* function, ...);
PyObject* PyObject_Type(PyObject* object);
PyObject* PySequence_GetItem(PyObject* sequence, intptr_t index);  // a new reference
intptr_t PySequence_Size(PyObject* sequence);
PyObject* PyTuple_GetItem(PyObject* tuple, intptr_t index);
PyObject* PyTuple_New(intptr_t size);
int PyTuple_SetItem(PyObject* tuple, intptr_t index, PyObject* item);  // takes the reference
intptr_t PyTuple_Size(PyObject* tuple);
void Py_DecRef(PyObject* object);
void Py_IncRef(PyObject* object);
}
#pragma GCC visibility pop

namespace gc {

// Read an argument; false with an exception set if it is none of that type.
inline bool read(PyObject* given, PyObject*& out) {
  out = given;
  return true;
}

template <class T>
bool read(PyObject* given, T*& out) {
  out = nullptr;
  if (given == &_Py_NoneStruct) return true;
  PyObject* type = PyObject_Type(given);
  Py_DecRef(type);
  out = static_cast<T*>(type == &PyBytes_Type ? PyBytes_AsString(given) : PyLong_AsVoidPtr(given));
  return out || !PyErr_Occurred();
}

template <class T>
std::enable_if_t<std::is_integral_v<T>, bool> read(PyObject* given, T& out) {
  if constexpr (std::is_signed_v<T>) {
    const long long value = PyLong_AsLongLong(given);
    out = static_cast<T>(value);
    if (value != out) PyErr_Format(PyExc_OverflowError, "%lld does not fit %d bits", value, 8 * (int)sizeof out);
    return value == out && (value != -1 || !PyErr_Occurred());
  } else {
    const unsigned long long value = PyLong_AsUnsignedLongLong(given);
    out = static_cast<T>(value);
    if (~value == 0 && PyErr_Occurred()) return false;
    if (value != out) PyErr_Format(PyExc_OverflowError, "%llu does not fit %d bits", value, 8 * (int)sizeof out);
    return value == out;
  }
}

template <class T>
std::enable_if_t<std::is_floating_point_v<T>, bool> read(PyObject* given, T& out) {
  const double value = PyFloat_AsDouble(given);
  out = static_cast<T>(value);
  return value != -1 || !PyErr_Occurred();
}

constexpr int FASTCALL = 0x80;  // METH_FASTCALL

// The C function F as a function of Python.
template <auto F>
struct Called;

template <class R, class... Types, R (*F)(Types...)>
struct Called<F> {
  static PyObject* call(PyObject*, PyObject* const* given, intptr_t number) {
    if (number != sizeof...(Types)) {
      return PyErr_Format(PyExc_TypeError, "%s takes %d arguments, %d were given", method.name, (int)sizeof...(Types),
                          (int)number);
    }
    return spread(given, std::index_sequence_for<Types...>());
  }

  static inline PyMethodDef method{nullptr, call, FASTCALL, nullptr};

 private:
  template <size_t... I>
  static PyObject* spread(PyObject* const* given, std::index_sequence<I...>) {
    std::tuple<Types...> values;
    if (!(read(given[I], std::get<I>(values)) && ...)) return nullptr;
    if constexpr (std::is_same_v<R, PyObject*>) {
      return std::apply(F, values);
    } else {
      void* state = PyEval_SaveThread();
      const int64_t result = std::apply(F, values);
      PyEval_RestoreThread(state);
      if (result != NO_MEMORY) return PyLong_FromLongLong(result);
      return PyErr_Format(PyExc_MemoryError,
                          "%s finds no memory for what it keeps meanwhile: free some, or pass smaller tensors",
                          method.name);
    }
  }
};

// All functions of the library, each leads to the next.
struct Function {
  static inline Function* last = nullptr;
  PyMethodDef& method;
  Function* const next;

  Function(PyMethodDef& known, const char* name) : method(known), next(last) {
    method.name = name;
    last = this;
  }
};

}  // namespace gc

#define GC_CALLED(name) static gc::Function name##_called(gc::Called<name>::method, #name);
