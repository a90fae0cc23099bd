// PyTorch's memory and GEMM through its Python functions, which a user's own call would use.
#pragma once

#include "call/torch.h"
#include "python/object.h"

namespace epigemm::python {

// An answer without a result, for Python: `Reason` in planning/reasons.py.
PyObject* reason(call::Answer answer);

// A call's tensors. One of `weight` and its transpose is null; both are null for an elementwise call. `vectors`: a
// tuple with the bias that a GEMM may add. `out`: may be None.
struct Arguments {
  PyObject *x, *weight, *transposed, *vectors, *out;
  PyObject* dtype = nullptr;  // of a new result; null: x's
};

class PythonTorch final : public call::Torch {
 public:
  // `raises_shortage`: without memory for a workspace the call raises the error.
  PythonTorch(const Arguments& given, const call::Tensor& x_view, int64_t columns, bool raises_shortage = false);
  ~PythonTorch();

  bool result(call::Tensor* result) override;
  void* workspace(int64_t bytes) override;
  bool gemm(call::Gemm gemm, int bias, call::Tensor* result) override;
  bool stream(void** stream) override;
  void raise(const char* message) override;

  // The call's return value: the result, the reason why there is none, or null after an error.
  PyObject* finish(call::Answer answer);

 private:
  Object new_result() const;
  Object keywords(PyObject* dtype) const;
  Object as_rows(PyObject* tensor, int64_t columns) const;
  Object gemm_into_out(call::Gemm gemm, PyObject* bias, PyObject* transposed) const;
  Object gemm_of(call::Gemm gemm, PyObject* bias, PyObject* rows, PyObject* transposed) const;
  bool enter_device();

  PyObject *x_, *weight_, *transposed_, *vectors_, *out_, *dtype_;
  const call::Tensor& x_view_;
  int64_t columns_;
  bool raises_shortage_;
  int previous_device_ = -1;  // to restore
  Object result_, workspace_;
};

}  // namespace epigemm::python
