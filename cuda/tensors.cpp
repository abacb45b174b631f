// Where the elements of Python's tensors lie. Torch is asked in C, by the functions
// that DLPack has it export: some 50 ns a tensor, where reading its attributes in Python takes 350.
#include "python.hpp"

using namespace gc;

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

// The table, or an older one that it leads to, of the version that is known here; null if none is, or cannot describe
// a tensor.
const Exchange* usable(const void* table) {
  const Header* found = static_cast<const Header*>(table);
  while (found && found->major != 1) found = found->older;
  const Exchange* exchange = reinterpret_cast<const Exchange*>(found);
  return exchange && exchange->view ? exchange : nullptr;
}

// Whether a view is of contiguous elements on the CPU, as many and of the type that are wanted.
bool fits(const View& view, long long dtype, long long numel) {
  if (view.device_type != CPU || (view.kind | view.bits << 8 | view.lanes << 16) != dtype || !view.strides) return false;
  long long found = 1;
  for (int32_t d = view.dimensions; d-- > 0; found *= view.shape[d]) {
    if (view.shape[d] != 1 && view.strides[d] != found && found != 0) return false;
  }
  return found == numel;
}

// Torch's functions, DLPack's numbers for its dtypes, and what serves where C cannot; the interpreter's lock guards them.
// All are null before `gc_tensors_ask`.
struct Torch {
  const Exchange* known = nullptr;
  PyObject *dtypes = nullptr, *otherwise = nullptr;

  // DLPack's number for a dtype; -1 for another object.
  long long number_of(PyObject* dtype) const {
    PyObject* number = dtype ? PyDict_GetItemWithError(dtypes, dtype) : nullptr;
    return number ? PyLong_AsLongLong(number) : -1;
  }

  // Write where a tensor's elements lie; false if they do not fit.
  bool place(PyObject* tensor, long long dtype, long long numel, int dimensions, void* out) const {
    View view;
    if (known->view(tensor, &view) || (dimensions && view.dimensions != dimensions)) return false;
    if (!fits(view, dtype, numel)) return false;
    const int64_t place = reinterpret_cast<int64_t>(view.data) + static_cast<int64_t>(view.byte_offset);
    memcpy(out, &place, sizeof place);
    return true;
  }
};

// A reference that is given back.
struct Held {
  PyObject* object;

  explicit Held(PyObject* given) : object(given) {}
  Held(const Held&) = delete;
  ~Held() {
    if (object) Py_DecRef(object);
  }
  PyObject* release() { return std::exchange(object, nullptr); }
};

Torch torch;

// Return bytes that hold the addresses of one column's tensors; null if one does not fit, or with an exception set.
PyObject* column_addresses(PyObject* column, int dimensions) {
  PyObject *tensors = PyTuple_GetItem(column, 0), *lengths = PyTuple_GetItem(column, 2);
  const long long dtype = torch.number_of(PyTuple_GetItem(column, 1));
  if (!tensors || dtype < 0 || !lengths) return nullptr;
  const intptr_t number = PyTuple_Size(tensors) == PyTuple_Size(lengths) ? PyTuple_Size(tensors) : -1;
  Held made(number < 0 ? nullptr : PyBytes_FromStringAndSize(nullptr, 8 * number));
  if (!made.object) return nullptr;
  char* out = PyBytes_AsString(made.object);
  for (intptr_t i = 0; i < number; ++i) {
    const long long length = PyLong_AsLongLong(PyTuple_GetItem(lengths, i));
    if (!torch.place(PyTuple_GetItem(tensors, i), dtype, length, dimensions, out + 8 * i)) return nullptr;
  }
  return made.release();
}

constexpr int PARTS = 4;

// The arrays that payloads of up to PARTS tensors each become, for a mean.
class Columns {
 public:
  // `layout`: a tuple of tuples: dtype and length of each tensor of a payload.
  Columns(PyObject* layout, intptr_t number) : number_(number) {
    const intptr_t size = PyTuple_Size(layout);
    if (size > PARTS || number < 1) return;
    for (; parts_ < size; ++parts_) {
      PyObject* part = PyTuple_GetItem(layout, parts_);
      dtypes_[parts_] = torch.number_of(PyTuple_GetItem(part, 0));
      lengths_[parts_] = PyLong_AsLongLong(PyTuple_GetItem(part, 1));
    }
    made_.object = PyTuple_New(parts_ + 3);
    for (int k = 0; made_.object && k <= parts_; ++k) {
      PyObject* bytes = PyBytes_FromStringAndSize(nullptr, (k < parts_ ? 8 : 4) * number);
      if (!bytes) return;
      arrays_[k] = PyBytes_AsString(bytes);
      PyTuple_SetItem(made_.object, k, bytes);
    }
    good_ = made_.object;
  }

  // Add a payload: tensors, some of them in tuples, then its number of workers. False if it does not fit.
  bool add(intptr_t i, PyObject* payload) {
    const intptr_t last = PyTuple_Size(payload) - 1;
    int part = 0;
    for (intptr_t k = 0; k < last; ++k) {
      if (!add_part(i, PyTuple_GetItem(payload, k), part)) return false;
    }
    if (last < 0 || part != parts_) return false;
    const long long count = PyLong_AsLongLong(PyTuple_GetItem(payload, last));
    const float weight = (float)count;
    memcpy(arrays_[parts_] + 4 * i, &weight, 4);
    total_ += count;
    return count != -1 || !PyErr_Occurred();
  }

  // The arrays of addresses, that of the counts as floats, their number and sum; null with an exception set.
  PyObject* finished() {
    PyObject *number = PyLong_FromLongLong(number_), *total = PyLong_FromLongLong(total_);
    const bool kept = number && total;
    PyTuple_SetItem(made_.object, parts_ + 1, number);
    PyTuple_SetItem(made_.object, parts_ + 2, total);
    return kept ? made_.release() : nullptr;
  }

  bool good() const { return good_; }

 private:
  bool add_part(intptr_t i, PyObject* object, int& part) {
    Held type(PyObject_Type(object));
    if (type.object != &PyTuple_Type) {
      const int k = part++;
      return k < parts_ && torch.place(object, dtypes_[k], lengths_[k], 1, arrays_[k] + 8 * i);
    }
    const intptr_t size = PyTuple_Size(object);
    for (intptr_t k = 0; k < size; ++k) {
      if (!add_part(i, PyTuple_GetItem(object, k), part)) return false;
    }
    return true;
  }

  const intptr_t number_;
  int parts_ = 0;
  long long dtypes_[PARTS], lengths_[PARTS], total_ = 0;
  char* arrays_[PARTS + 1];
  Held made_{nullptr};
  bool good_ = false;
};

// The caller finds what is wrong, and says it in its own words.
PyObject* nothing() {
  PyErr_Clear();
  return PyTuple_New(0);
}

}  // namespace

// Ask torch about tensors by this table from here on.
//
// `exchange`: what torch.Tensor's `__dlpack_c_exchange_api__` holds, or null. `dtypes`: a dict of dtypes to DLPack's kind,
// bits and lanes, lowest byte first. `otherwise`: serves `gc_tensor_address` where C cannot.
GC_API PyObject* gc_tensors_ask(const void* exchange, PyObject* dtypes, PyObject* otherwise) {
  Held before(torch.dtypes), another(torch.otherwise);
  Py_IncRef(dtypes);
  Py_IncRef(otherwise);
  torch = {usable(exchange), dtypes, otherwise};
  return PyLong_FromLongLong(torch.known != nullptr);
}
GC_CALLED(gc_tensors_ask)

// Return where a tensor's elements lie; or what `otherwise` returns, if they are not on the CPU, contiguous, of this dtype
// and as many, or if torch cannot be asked.
GC_API PyObject* gc_tensor_address(PyObject* tensor, PyObject* dtype, PyObject* numel) {
  int64_t place = 0;
  if (torch.known && torch.place(tensor, torch.number_of(dtype), PyLong_AsLongLong(numel), 0, &place)) {
    return PyLong_FromLongLong(place);
  }
  PyErr_Clear();
  return PyObject_CallFunctionObjArgs(torch.otherwise, tensor, dtype, numel, nullptr);
}
GC_CALLED(gc_tensor_address)

// Return a tuple of bytes: for each column, the addresses of its tensors. It is empty if one does not fit, as
// `gc_tensor_address` has it.
//
// `columns`: a tuple of tuples: a tuple of tensors, their dtype, a tuple of their lengths. `dimensions`: which they must
// have; 0 if any.
GC_API PyObject* gc_tensor_addresses(PyObject* columns, int dimensions) {
  const intptr_t number = torch.known ? PyTuple_Size(columns) : 0;
  Held made(PyTuple_New(number));
  for (intptr_t k = 0; made.object && k < number; ++k) {
    PyObject* addresses = column_addresses(PyTuple_GetItem(columns, k), dimensions);
    if (!addresses) return nothing();
    PyTuple_SetItem(made.object, k, addresses);
  }
  return made.release();
}
GC_CALLED(gc_tensor_addresses)

// Return what a mean of payloads takes: for each tensor of a payload the bytes that hold its addresses in all, then those
// of their numbers of workers as float32, the number of payloads, and the sum of workers. The tuple is empty if there is no
// payload, or one is not of contiguous tensors of one dimension and an int.
//
// `payloads`: a sequence of tuples: tensors, some of them in tuples, and a number of workers. `layout`: a tuple of
// tuples: dtype and length of each tensor.
GC_API PyObject* gc_tensor_columns(PyObject* payloads, PyObject* layout) {
  const intptr_t number = torch.known ? PySequence_Size(payloads) : 0;
  Columns columns(layout, number);
  for (intptr_t i = 0; columns.good() && i < number; ++i) {
    Held payload(PySequence_GetItem(payloads, i));
    if (!payload.object || !columns.add(i, payload.object)) return nothing();
  }
  return columns.good() ? columns.finished() : nothing();
}
GC_CALLED(gc_tensor_columns)
