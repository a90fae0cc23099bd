#include "python/plain.h"

#include "python/state.h"

namespace epigemm::python {
namespace {

// torch.autograd.forward_ad._current_level is -1 outside of dual levels.
bool has_no_dual_level() {
  const Object level(PyObject_GetAttr(state.forward_ad, state.current_level));
  const long number = level ? PyLong_AsLong(level.get()) : 0;
  const bool is_read = level && !PyErr_Occurred();
  PyErr_Clear();
  return is_read && number < 0;
}

bool element_of(const DLDataType& type, ElementType* element) {
  constexpr int kE4M3 = 10, kE5M2 = 12;  // kDLFloat8_e4m3fn, kDLFloat8_e5m2 since DLPack 1.1
  if (type.lanes != 1) return false;
  if (type.code == kDLBfloat && type.bits == 16) {
    *element = ElementType::BFloat16;
  } else if (type.code == kDLFloat && type.bits == 16) {
    *element = ElementType::Float16;
  } else if (type.code == kDLFloat && type.bits == 32) {
    *element = ElementType::Float32;
  } else if (type.code == kDLFloat && type.bits == 64) {
    *element = ElementType::Float64;
  } else if (type.code == kE4M3 && type.bits == 8) {
    *element = ElementType::Float8E4M3;
  } else if (type.code == kE5M2 && type.bits == 8) {
    *element = ElementType::Float8E5M2;
  } else if (type.code == kDLInt && type.bits == 32) {
    *element = ElementType::Int32;
  } else {
    return false;
  }
  return true;
}

bool is_false(const Object& answer) {
  if (!answer) PyErr_Clear();
  return answer.get() == Py_False;
}

}  // namespace

bool is_off(PyObject* function) {
  const Object found(PyObject_CallNoArgs(function));
  if (!found) {
    PyErr_Clear();
    return false;
  }
  const int is_true = found.get() == Py_None ? 0 : PyObject_IsTrue(found.get());
  if (is_true < 0) PyErr_Clear();
  return is_true == 0;
}

bool is_seen_by_nobody(bool* is_recording) {
  if (!is_off(state.interpreter) || !is_off(state.dispatch_modes) || !is_off(state.has_function_mode) ||
      !is_off(state.tracing_state) || !has_no_dual_level()) {
    return false;
  }
  *is_recording = !is_off(state.is_grad_enabled);
  return true;
}

bool is_plain_here(bool is_cast, bool* is_recording) {
  return (is_cast || is_off(state.any_autocast)) && is_off(state.is_profiling) && is_seen_by_nobody(is_recording);
}

bool view_of(PyObject* object, call::Tensor* tensor) {
  DLTensor view;
  if (state.exchange->dltensor_from_py_object_no_sync(object, &view) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!element_of(view.dtype, &tensor->element)) return false;
  if (view.device.device_type == kDLCUDA) {
    tensor->device_kind = call::DeviceKind::CUDA;
    tensor->device = view.device.device_id;
  } else if (view.device.device_type == kDLCPU) {
    tensor->device_kind = call::DeviceKind::CPU;
    tensor->device = 0;
  } else {
    return false;
  }
  tensor->data = static_cast<char*>(view.data) + view.byte_offset;
  tensor->dim = view.ndim;
  tensor->sizes = view.shape;
  tensor->strides = view.strides;
  // Not a tensor of zeros without memory, nor one without strides.
  return (view.data || tensor->numel() == 0) && (view.strides || view.ndim == 0);
}

bool Reader::read(PyObject* object, call::Tensor* tensor) {
  return read_any(object, tensor) && tensor->element != ElementType::Int32;
}

bool Reader::read_integers(PyObject* object, call::Tensor* storage, const call::Tensor** pointer) {
  if (object == Py_None) return true;
  *pointer = storage;
  return read_any(object, storage) && storage->element == ElementType::Int32;
}

bool Reader::read_any(PyObject* object, call::Tensor* tensor) {
  PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (!is_routed_ && type != state.tensor_type && type != state.parameter_type) return false;
  if (is_recording_ && !is_false(Object(PyObject_GetAttr(object, state.requires_grad)))) needs_gradient_ = true;
  if (!view_of(object, tensor)) return false;
  is_in_memory_ = is_in_memory_ && tensor->data;
  // The exchange API drops the bit of a lazily negated view.
  return is_false(call_method(object, state.is_neg));
}

bool Reader::read_optional(PyObject* object, call::Tensor* storage, const call::Tensor** pointer) {
  if (object == Py_None) return true;
  *pointer = storage;
  return read(object, storage);
}

bool Reader::read_operand(PyObject* object, call::Tensor* storage, call::GivenOperand* operand) {
  if (!PyFloat_CheckExact(object)) return read_optional(object, storage, &operand->tensor);
  operand->number = PyFloat_AsDouble(object);
  return operand->has_number = true;
}

call::Answer Reader::found(bool is_read) const {
  if (!is_read) return call::Answer::NotPlain;
  if (!needs_gradient_) return call::Answer::Done;
  // A tensor without memory may be the wrapper of a PyTorch transformation that has ended.
  return is_in_memory_ ? call::Answer::Recorded : call::Answer::NotPlain;
}

}  // namespace epigemm::python
