#include "python/torch.h"

#include "python/plain.h"
#include "python/state.h"

namespace epigemm::python {
namespace {

// Clears an out-of-memory error (torch.OutOfMemoryError is a RuntimeError). Other errors, such as KeyboardInterrupt,
// stay set for the caller.
void forget_shortage() {
  if (PyErr_ExceptionMatches(PyExc_RuntimeError) || PyErr_ExceptionMatches(PyExc_MemoryError)) PyErr_Clear();
}

}  // namespace

PythonTorch::PythonTorch(const Arguments& given, const call::Tensor& x_view, int64_t columns, bool raises_shortage)
    : x_(given.x),
      weight_(given.weight),
      transposed_(given.transposed),
      vectors_(given.vectors),
      out_(given.out),
      dtype_(given.dtype),
      x_view_(x_view),
      columns_(columns),
      raises_shortage_(raises_shortage) {}

PythonTorch::~PythonTorch() {
  if (previous_device_ < 0) return;
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  const Object device(PyLong_FromLong(previous_device_));
  const Object done = call(state.exchange_device, device.get());
  PyErr_Restore(type, value, traceback);
}

// {"dtype": ..., "device": ...} as of x.
Object PythonTorch::keywords(PyObject* dtype) const {
  Object found(PyDict_New());
  const Object device(PyObject_GetAttr(x_, state.device));
  const Object own_dtype = dtype ? Object::borrowed(dtype) : Object(PyObject_GetAttr(x_, state.dtype));
  if (!found || !device || !own_dtype || PyDict_SetItem(found.get(), state.dtype, own_dtype.get()) != 0 ||
      PyDict_SetItem(found.get(), state.device, device.get()) != 0) {
    return Object();
  }
  return found;
}

Object PythonTorch::new_result() const {
  if (!weight_ && !transposed_) return call(state.empty_like, x_);
  const Object sizes(PyTuple_New(x_view_.dim));
  const Object named = keywords(dtype_);
  if (!sizes || !named) return Object();
  for (int axis = 0; axis < x_view_.dim; ++axis) {
    const int64_t size = axis + 1 < x_view_.dim ? x_view_.sizes[axis] : columns_;
    PyTuple_SetItem(sizes.get(), axis, PyLong_FromLongLong(size));
  }
  return Object(PyObject_Call(state.empty, sizes.get(), named.get()));
}

bool PythonTorch::result(call::Tensor* result) {
  if (!result_) result_ = out_ == Py_None ? new_result() : Object::borrowed(out_);
  if (!result_) return false;
  if (view_of(result_.get(), result)) return true;
  raise("the result could not be read");
  return false;
}

void* PythonTorch::workspace(int64_t bytes) {
  const Object sizes(Py_BuildValue("(L)", static_cast<long long>(bytes)));
  const Object named = keywords(state.uint8);
  if (sizes && named) workspace_ = Object(PyObject_Call(state.empty, sizes.get(), named.get()));
  DLTensor view;
  if (!workspace_ || state.exchange->dltensor_from_py_object_no_sync(workspace_.get(), &view) != 0) {
    if (!raises_shortage_) forget_shortage();
    return nullptr;
  }
  return static_cast<char*>(view.data) + view.byte_offset;
}

// All leading axes as the rows of a matrix; of a contiguous tensor that is a view.
Object PythonTorch::as_rows(PyObject* tensor, int64_t columns) const {
  if (x_view_.dim == 2) return Object::borrowed(tensor);
  const Object any(PyLong_FromLong(-1)), last(PyLong_FromLongLong(columns));
  return any && last ? call_method(tensor, state.reshape, any.get(), last.get()) : Object();
}

Object PythonTorch::gemm_into_out(call::Gemm gemm, PyObject* bias, PyObject* transposed) const {
  const Object named(PyDict_New());
  const Object rows = as_rows(x_, x_view_.sizes[x_view_.dim - 1]);
  const Object out = as_rows(out_, columns_);
  if (!named || !rows || !out || PyDict_SetItem(named.get(), state.out, out.get()) != 0) return Object();
  if (gemm == call::Gemm::Product) {
    const Object given(PyTuple_Pack(2, rows.get(), transposed));
    return Object(given ? PyObject_Call(state.mm, given.get(), named.get()) : nullptr);
  }
  const Object given(PyTuple_Pack(3, bias, rows.get(), transposed));
  if (!given) return Object();
  if (gemm == call::Gemm::WithBias) return Object(PyObject_Call(state.addmm, given.get(), named.get()));
  if (PyDict_SetItem(named.get(), state.use_gelu, Py_False) != 0) return Object();
  return Object(PyObject_Call(state.addmm_activation_out, given.get(), named.get()));
}

Object PythonTorch::gemm_of(call::Gemm gemm, PyObject* bias, PyObject* rows, PyObject* transposed) const {
  if (gemm == call::Gemm::WithBias) return call(state.linear, rows, weight_, bias);
  if (gemm == call::Gemm::Product) return call(state.mm, rows, transposed);
  return call(state.addmm_activation, bias, rows, transposed);
}

bool PythonTorch::gemm(call::Gemm gemm, int bias_place, call::Tensor* result) {
  PyObject* const bias = gemm == call::Gemm::Product ? Py_None : PyTuple_GetItem(vectors_, bias_place);
  if (!bias) return false;
  const bool is_matrix = x_view_.dim == 2;
  const bool takes_weight = gemm == call::Gemm::WithBias && out_ == Py_None;
  const Object transposed = takes_weight  ? Object::borrowed(Py_None)
                            : transposed_ ? Object::borrowed(transposed_)
                                          : call_method(weight_, state.transpose);
  if (!transposed) return false;
  if (out_ != Py_None) {
    if (!gemm_into_out(gemm, bias, transposed.get())) return false;
    result_ = Object::borrowed(out_);
    return view_of(out_, result);
  }
  const Object rows = as_rows(x_, x_view_.sizes[x_view_.dim - 1]);
  if (!rows) return false;
  result_ = gemm_of(gemm, bias, rows.get(), transposed.get());
  call::Tensor flat;
  if (!result_) return false;
  if (!view_of(result_.get(), &flat) || !flat.is_contiguous()) {
    result_ = call_method(result_.get(), state.contiguous);
    if (!result_) return false;
  }
  if (!is_matrix) {  // no view, which could not be written in place later
    const Object sizes(PyTuple_New(x_view_.dim));
    for (int axis = 0; sizes && axis < x_view_.dim; ++axis) {
      const int64_t size = axis + 1 < x_view_.dim ? x_view_.sizes[axis] : columns_;
      PyTuple_SetItem(sizes.get(), axis, PyLong_FromLongLong(size));
    }
    if (sizes) result_ = call(state.unsafe_view, result_.get(), sizes.get());
  }
  return result_ && view_of(result_.get(), result);
}

bool PythonTorch::enter_device() {
  const Object current = call(state.get_device);
  if (!current) return false;
  if (PyLong_AsLong(current.get()) == x_view_.device) return true;
  const Object own(PyLong_FromLong(x_view_.device));
  const Object previous = call(state.exchange_device, own.get());
  if (!previous) return false;
  previous_device_ = static_cast<int>(PyLong_AsLong(previous.get()));
  return true;
}

bool PythonTorch::stream(void** stream) {
  if (!enter_device() || state.exchange->current_work_stream(kDLCUDA, x_view_.device, stream) != 0) {
    if (PyErr_ExceptionMatches(PyExc_RuntimeError)) PyErr_Clear();  // no stream: not a call for these kernels
    return false;
  }
  return true;
}

void PythonTorch::raise(const char* message) { PyErr_SetString(PyExc_RuntimeError, message); }

PyObject* reason(call::Answer answer) { return PyLong_FromLong(static_cast<long>(answer)); }

PyObject* PythonTorch::finish(call::Answer answer) {
  if (answer == call::Answer::Raised || PyErr_Occurred()) return nullptr;
  if (answer != call::Answer::Done) return reason(answer);
  if (out_ != Py_None && !call(state.mark_written, out_)) return nullptr;
  return result_.release();
}

}  // namespace epigemm::python
