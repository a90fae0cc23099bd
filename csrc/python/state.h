// PyTorch's types, functions and names that the entry uses. Set once, by init().
#pragma once

#include <ATen/dlpack.h>

#include "call/functions.h"

#include "python/object.h"

namespace epigemm::python {

struct State {
  const DLPackExchangeAPI* exchange = nullptr;
  const call::Functions* functions = nullptr;
  // Members of the module's dictionary of PyTorch's functions, in the order of kMembers.
  PyObject *tensor_type, *parameter_type, *dtype_type;
  PyObject *is_grad_enabled, *interpreter, *dispatch_modes, *has_function_mode, *tracing_state, *forward_ad;
  PyObject *any_autocast, *is_profiling;
  PyObject *empty, *empty_like, *linear, *mm, *addmm, *addmm_activation, *addmm_activation_out, *unsafe_view;
  PyObject *mark_written, *get_device, *exchange_device, *uint8;
  PyObject *invariance, *is_deterministic, *is_inference, *autocast_dtype, *get_device_of, *numel_of;
  // PyTorch's fp32 setting for CUDA: a function, its arguments, and the setting that counts while a call has switched
  // it.
  PyObject *fp32_setting, *fp32_of_cuda, *fp32_callers;
  // Interned names.
  PyObject *requires_grad, *is_neg, *transpose, *reshape, *contiguous, *dtype, *device, *out, *current_level, *use_gelu,
      *training, *active, *enabled, *default_group, *cuda;
};

extern State state;

// Fills the state from {name: object}. False after a Python error.
bool fill_state(PyObject* capsule, PyObject* functions_address, PyObject* members);

}  // namespace epigemm::python
