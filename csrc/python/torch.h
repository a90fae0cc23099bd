// PyTorch's memory and GEMM through its Python functions: exactly what a user's own call would get.
#pragma once

#include "call/torch.h"
#include "python/object.h"

namespace epigemm::python {

// An answer other than a result, as Python gets it: `Reason` in entry.py.
PyObject* reason(call::Answer answer);

// A call's tensors. `weight` or its transpose, the other null; both null: an elementwise call. `vectors`: a tuple that
// holds the bias, where a GEMM may add one. `out`: None where there is none.
struct Arguments {
  PyObject *x, *weight, *transposed, *vectors, *out;
};

class PythonTorch final : public call::Torch {
 public:
  // `raises_shortage`: the call ends in the error where there is no memory for a workspace.
  PythonTorch(const Arguments& given, const call::Tensor& x_view, int64_t columns, bool raises_shortage = false);
  ~PythonTorch();

  bool result(call::Tensor* result) override;
  void* workspace(int64_t bytes) override;
  bool gemm(call::Gemm gemm, int bias, call::Tensor* result) override;
  bool stream(void** stream) override;
  void run_on_cpu(const ElementwiseProblem& problem) override;
  void run_derivative_on_cpu(const DerivativeProblem& problem) override;
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

  PyObject *x_, *weight_, *transposed_, *vectors_, *out_;
  const call::Tensor& x_view_;
  int64_t columns_;
  bool raises_shortage_;
  int previous_device_ = -1;  // to go back to
  Object result_, workspace_;
};

}  // namespace epigemm::python
