#include "python/state.h"

namespace epigemm::python {

State state;

namespace {

struct Member {
  const char* name;
  PyObject* State::* target;
};

constexpr Member kMembers[] = {
    {"Tensor", &State::tensor_type},
    {"Parameter", &State::parameter_type},
    {"dtype_type", &State::dtype_type},
    {"is_grad_enabled", &State::is_grad_enabled},
    {"interpreter", &State::interpreter},
    {"dispatch_modes", &State::dispatch_modes},
    {"has_function_mode", &State::has_function_mode},
    {"tracing_state", &State::tracing_state},
    {"forward_ad", &State::forward_ad},
    {"any_autocast", &State::any_autocast},
    {"is_profiling", &State::is_profiling},
    {"empty", &State::empty},
    {"empty_like", &State::empty_like},
    {"linear", &State::linear},
    {"mm", &State::mm},
    {"addmm", &State::addmm},
    {"addmm_activation", &State::addmm_activation},
    {"addmm_activation_out", &State::addmm_activation_out},
    {"unsafe_view", &State::unsafe_view},
    {"mark_written", &State::mark_written},
    {"get_device", &State::get_device},
    {"exchange_device", &State::exchange_device},
    {"uint8", &State::uint8},
    {"invariance", &State::invariance},
    {"is_deterministic", &State::is_deterministic},
    {"is_inference", &State::is_inference},
    {"get_device_of", &State::get_device_of},
    {"numel_of", &State::numel_of},
    {"autocast_dtype", &State::autocast_dtype},
    {"fp32_setting", &State::fp32_setting},
    {"fp32_of_cuda", &State::fp32_of_cuda},
    {"fp32_callers", &State::fp32_callers},
};

constexpr Member kNames[] = {
    {"requires_grad", &State::requires_grad},
    {"is_neg", &State::is_neg},
    {"t", &State::transpose},
    {"reshape", &State::reshape},
    {"contiguous", &State::contiguous},
    {"dtype", &State::dtype},
    {"device", &State::device},
    {"out", &State::out},
    {"_current_level", &State::current_level},
    {"use_gelu", &State::use_gelu},
    {"training", &State::training},
    {"active", &State::active},
    {"enabled", &State::enabled},

    {"_default_pg", &State::default_group},
    {"cuda", &State::cuda},
};

}  // namespace

bool fill_state(PyObject* capsule, PyObject* functions_address, PyObject* members) {
  State filled;
  filled.exchange = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  if (!filled.exchange) return false;
  filled.functions = static_cast<const call::Functions*>(PyLong_AsVoidPtr(functions_address));
  if (PyErr_Occurred()) return false;
  if (!filled.functions || filled.exchange->header.version.major != DLPACK_MAJOR_VERSION ||
      !filled.exchange->dltensor_from_py_object_no_sync || !filled.exchange->current_work_stream) {
    PyErr_SetString(PyExc_ImportError, "the exchange API of torch.Tensor has another version");
    return false;
  }
  for (const Member& member : kMembers) {
    filled.*member.target = PyMapping_GetItemString(members, member.name);
    if (!(filled.*member.target)) return false;
  }
  for (const Member& name : kNames) {
    filled.*name.target = PyUnicode_InternFromString(name.name);
    if (!(filled.*name.target)) return false;
  }
  state = filled;
  return true;
}

}  // namespace epigemm::python
