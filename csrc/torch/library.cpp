// The operators' schemas. The public ones are implemented in Python (epigemm/registration.py), where autograd, fake
// kernels and allocation live; those with a leading underscore are the kernels underneath, called below
// autograd alone: they know neither gradients nor version counters.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(epigemm, m) {
  m.def(
      "linear(str epilogue, Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, float[] scalars, str precision,"
      " str pack='find', bool strict=False, bool invariant=False) -> Tensor");
  m.def(
      "linear_out(str epilogue, Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, float[] scalars, str "
      "precision,"
      " Tensor(a!) out, str pack='find', bool strict=False, bool invariant=False) -> ()");
  m.def("elementwise(str epilogue, Tensor x, Tensor? bias, Tensor[] operands, float[] scalars) -> Tensor");
  m.def(
      "elementwise_out(str epilogue, Tensor x, Tensor? bias, Tensor[] operands, float[] scalars, Tensor(a!) out) -> "
      "()");
  m.def(
      "fold_batch_norm(Tensor like, Tensor? bias, Tensor? scale, Tensor? running_mean, Tensor? running_var,"
      " Tensor? bn_weight, Tensor? bn_bias, float eps) -> Tensor");

  m.def(
      "_fused_linear_out(str epilogue, Tensor x, Tensor weight, Tensor? bias, Tensor[]? operands, float[]? scalars,"
      " str arithmetic, int[]? plan, Tensor(a!) out) -> bool");
  m.def(
      "_elementwise_out(str epilogue, Tensor x, Tensor? bias, Tensor[]? operands, float[]? scalars, Tensor(a!) out) -> "
      "()");
  m.def(
      "_derivative_out(str epilogue, Tensor grad, Tensor x, Tensor? bias, Tensor[]? operands, float[]? scalars,"
      " Tensor(a!) out) -> ()");
  m.def(
      "_fold_batch_norm_out(Tensor? bias, Tensor? scale, Tensor? running_mean, Tensor? running_var, Tensor? bn_weight,"
      " Tensor? bn_bias, float eps, Tensor(a!) out) -> ()");
  m.def(
      "_plan_linear(str epilogue, int m, int n, int k, int x_row_stride, int weight_row_stride, int out_row_stride,"
      " int alignment, str dtype, str arithmetic, int capability, int multiprocessors,"
      " bool has_bias=True, int device=-1) -> str");
  m.def(
      "_plan_linear_invariant(str epilogue, int m, int n, int k, str dtype, str arithmetic, int capability,"
      " int multiprocessors) -> str");
  m.def(
      "_explain_linear(str epilogue, Tensor x, Tensor weight, Tensor? bias, Tensor[]? operands, float[]? scalars,"
      " str arithmetic, Tensor out) -> str");
  m.def("_split_rows_out(Tensor matrix, int pieces, Tensor(a!) pack) -> ()");
  m.def(
      "_split_linear_out(str epilogue, Tensor x, Tensor weight, Tensor? pack, Tensor(b!) workspace, Tensor? bias,"
      " Tensor[]? operands, float[]? scalars, str arithmetic, int[]? plan, Tensor(a!) out) -> ()");
  m.def(
      "_plan_split(str epilogue, int m, int n, int k, bool packed, str arithmetic, bool tf32_allowed, int capability,"
      " int multiprocessors, bool has_bias=True, int device=-1) -> str");
  m.def(
      "_plan_split_invariant(str epilogue, int m, int n, int k, bool packed, str arithmetic, int capability,"
      " int multiprocessors) -> str");
  m.def(
      "_fp32_linear_out(str epilogue, Tensor x, Tensor weight, Tensor? bias, Tensor[]? operands, float[]? scalars,"
      " Tensor(a!) out) -> ()");
  m.def("_load_tuned(int device, int[] rows, bool shipped) -> ()");
  m.def("_clear_tuned(int device) -> ()");
  m.def("_tuned_bucket(int m) -> int");
  m.def("_build_info() -> str");
  m.def("_registry() -> str");
  m.def("_cuda_status(int device) -> str");
}
