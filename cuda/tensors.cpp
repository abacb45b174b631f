// Where the elements of Python's tensors lie. Torch is asked in C, by the functions that DLPack has it export: some
// 50 ns a tensor, where reading its attributes in Python takes 350.
#include "loops.hpp"

// What is used of Python's stable ABI, which needs no Python.h; the process that loads this library has it.
#pragma GCC visibility push(default)
extern "C" {
struct PyObject;
PyObject* PyBytes_FromStringAndSize(const char* bytes, intptr_t size);
char* PyBytes_AsString(PyObject* bytes);
PyObject* PyDict_GetItemWithError(PyObject* dict, PyObject* key);
void PyErr_Clear();
long long PyLong_AsLongLong(PyObject* number);
PyObject* PyTuple_GetItem(PyObject* tuple, intptr_t index);
PyObject* PyTuple_New(intptr_t size);
int PyTuple_SetItem(PyObject* tuple, intptr_t index, PyObject* item);  // takes the reference
intptr_t PyTuple_Size(PyObject* tuple);
void Py_DecRef(PyObject* object);
}
#pragma GCC visibility pop

namespace {

// What is used of dlpack.h, version 1.3 (github.com/dmlc/dlpack), as it stays within major version 1.
struct View {  // DLTensor
  void* data;
  int32_t device_type, device_id;
  int32_t dimensions;
  uint8_t kind, bits;
  uint16_t lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};

struct Header {  // DLPackExchangeAPIHeader
  uint32_t major, minor;
  const Header* older;
};

struct Exchange {  // DLPackExchangeAPI
  Header header;
  void *allocate, *to_managed, *from_managed;
  // dltensor_from_py_object_no_sync: nothing is allocated or counted. 0, or a Python exception is set. May be null.
  int (*view)(PyObject* tensor, View* view);
  void* stream;
};

constexpr int32_t CPU = 1;

// Whether a view is what `address` of gcbench/ops/cpu/library.py takes, in one dimension.
bool fits(const View& view, long long dtype, long long numel) {
  return view.device_type == CPU && view.dimensions == 1 && view.shape[0] == numel && view.strides &&
         view.strides[0] == 1 && (view.kind | view.bits << 8 | view.lanes << 16) == dtype;
}

// Return bytes that hold the addresses of one column's tensors; null if one does not fit, or with an exception set.
PyObject* column_addresses(const Exchange* exchange, PyObject* column, PyObject* dtypes) {
  PyObject *tensors = PyTuple_GetItem(column, 0), *name = PyTuple_GetItem(column, 1);
  PyObject *dtype = name ? PyDict_GetItemWithError(dtypes, name) : nullptr, *lengths = PyTuple_GetItem(column, 2);
  if (!tensors || !dtype || !lengths) return nullptr;
  const intptr_t number = PyTuple_Size(tensors) == PyTuple_Size(lengths) ? PyTuple_Size(tensors) : -1;
  const long long wanted = PyLong_AsLongLong(dtype);
  PyObject* made = number < 0 ? nullptr : PyBytes_FromStringAndSize(nullptr, 8 * number);
  if (!made) return nullptr;
  char* out = PyBytes_AsString(made);
  for (intptr_t i = 0; i < number; ++i) {
    PyObject *tensor = PyTuple_GetItem(tensors, i), *length = PyTuple_GetItem(lengths, i);
    View view;
    if (exchange->view(tensor, &view) || !fits(view, wanted, PyLong_AsLongLong(length))) {
      Py_DecRef(made);
      return nullptr;
    }
    const int64_t place = reinterpret_cast<int64_t>(view.data) + static_cast<int64_t>(view.byte_offset);
    memcpy(out + 8 * i, &place, 8);
  }
  return made;
}

}  // namespace

// Return a tuple of bytes: for each column, the addresses of its tensors. It is empty if a tensor is not of one
// dimension, contiguous, on the CPU, of its column's dtype and length, or if torch cannot be asked or describe it. The
// interpreter's lock is held.
//
// `exchange`: what torch.Tensor's `__dlpack_c_exchange_api__` holds, or null. `columns`: a tuple of tuples: a tuple of
// tensors, their dtype, a tuple of their lengths. `dtypes`: a dict of dtypes to DLPack's kind, bits and lanes, lowest byte first.
GC_API PyObject* gc_tensor_addresses(const void* exchange, PyObject* columns, PyObject* dtypes) {
  const Header* found = static_cast<const Header*>(exchange);
  while (found && found->major != 1) found = found->older;
  const Exchange* usable = reinterpret_cast<const Exchange*>(found);
  const intptr_t number = usable && usable->view ? PyTuple_Size(columns) : 0;
  PyObject* made = PyTuple_New(number);
  for (intptr_t k = 0; made && k < number; ++k) {
    PyObject* addresses = column_addresses(usable, PyTuple_GetItem(columns, k), dtypes);
    if (!addresses) {
      PyErr_Clear();  // the caller finds what is wrong, and says it in its own words
      Py_DecRef(made);
      return PyTuple_New(0);
    }
    PyTuple_SetItem(made, k, addresses);
  }
  return made;
}
