// The operators' schemas. The public operators are implemented in Python (epigemm/operators/registration.py), with
// autograd, fake kernels and allocation. Those with a leading underscore are implemented in C++ and called only below
// autograd: they handle neither gradients nor version counters.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(epigemm, m) {
  m.def(
      "linear(str epilogue, Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, float[] scalars, str precision,"
      " bool uses_pack=True, bool strict=False, bool invariant=False, Tensor? x_scale=None, Tensor? weight_scale=None,"
      " ScalarType? out_dtype=None, Tensor? out_scale=None) -> Tensor");
  m.def(
      "linear_in_blocks(str epilogue, Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, float[] scalars,"
      " str precision, bool uses_pack, bool strict, bool invariant, Tensor x_scale, Tensor weight_scale)"
      " -> (Tensor, Tensor)");
  m.def(
      "linear_with_product(str epilogue, Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, float[] scalars,"
      " str precision, bool uses_pack=True, bool strict=False, bool invariant=False) -> (Tensor, Tensor)");
  m.def(
      "linear_out(str epilogue, Tensor x, Tensor weight, Tensor? bias, Tensor[] operands, float[] scalars, str "
      "precision,"
      " Tensor(a!) out, bool uses_pack=True, bool strict=False, bool invariant=False, Tensor? x_scale=None,"
      " Tensor? weight_scale=None, ScalarType? out_dtype=None, Tensor? out_scale=None) -> ()");
  m.def("elementwise(str epilogue, Tensor x, Tensor? bias, Tensor[] operands, float[] scalars) -> Tensor");
  m.def(
      "elementwise_out(str epilogue, Tensor x, Tensor? bias, Tensor[] operands, float[] scalars, Tensor(a!) out) -> "
      "()");
  m.def(
      "fold_batch_norm(Tensor like, Tensor? bias, Tensor? scale, Tensor? running_mean, Tensor? running_var,"
      " Tensor? bn_weight, Tensor? bn_bias, float eps) -> Tensor");

  m.def(
      "_derivative_out(str epilogue, Tensor grad, Tensor x, Tensor? bias, Tensor[]? operands, float[]? scalars,"
      " Tensor(a!)? out, Tensor(b!)? sums, int[]? slots, Tensor(c!)[]? outs) -> int");
  m.def(
      "_fold_batch_norm_out(Tensor? bias, Tensor? scale, Tensor? running_mean, Tensor? running_var, Tensor? bn_weight,"
      " Tensor? bn_bias, float eps, Tensor(a!) out) -> ()");
  m.def(
      "_batch_norm_out(Tensor u, Tensor(a!) mean, Tensor(b!) variance, Tensor? scale, Tensor? weight, Tensor? bias,"
      " float eps, bool relu, Tensor(c!)? running_mean, Tensor(d!)? running_var, Tensor? tracked, float momentum,"
      " Tensor(e!) out, Tensor? blocks=None, int block_rows=0, Tensor(f!)? counted=None) -> ()");
  m.def(
      "_batch_norm_backward_out(Tensor grad, Tensor u, Tensor mean, Tensor variance, Tensor? scale, Tensor? weight,"
      " Tensor? bias, float eps, bool relu, Tensor(a!)? grad_u, Tensor(b!)? grad_scale, Tensor(c!)? grad_weight,"
      " Tensor(d!)? grad_bias, Tensor(e!)? grad_shift, Tensor(f!) workspace) -> ()");
  m.def(
      "_plan(str epilogue, int m, int n, int k, int[]? strides, int alignment, str dtype, str arithmetic, bool packed,"
      " bool tf32_allowed, bool has_bias, bool invariant, bool any_family, int[]? gpu, int device) -> str");
  m.def(
      "_dry_linear(str epilogue, Tensor x, Tensor weight, Tensor? bias, Tensor[]? operands, float[]? scalars,"
      " Tensor? out, int fp32, int circumstances, int slices, bool strict, bool invariant, int[]? gpu, int[]? plan, "
      "bool tried, Tensor? weight2=None, bool moments=False, Tensor? x_scale=None, Tensor? weight_scale=None,"
      " int result=0, Tensor? out_scale=None, Tensor? group_ends=None) -> str");
  m.def("_column_moments_out(Tensor matrix, Tensor(a!) blocks, Tensor(b!)? out) -> ()");
  m.def("_quantise_out(Tensor x, Tensor(a!) out, Tensor(b!) scales) -> ()");
  m.def("_split_rows_out(Tensor matrix, int slices, Tensor(a!) pack) -> ()");
  m.def(
      "_into(int epilogue, int digest, Tensor x, Tensor? weight, Tensor? operand0, Tensor? operand1,"
      " Tensor?[]? others, float number, int options, Tensor(a!) out, Tensor(b!)? stored) -> ()");
  m.def(
      "_cold(int epilogue, int digest, Tensor x, Tensor? weight, Tensor? operand0, Tensor? operand1,"
      " Tensor?[]? others, float number, int options, Tensor(a!) out, Tensor(b!)? stored) -> Tensor?");
  m.def("_addmm_relu(Tensor bias, Tensor a, Tensor b, Tensor(a!) out) -> ()");
  m.def("_look_in_python() -> ()");
  m.def(
      "_register_epilogue(str name, str operand_names, int[]? kinds, int[]? forms, int bias, str primitives,"
      " bool has_short_forms, bool has_store=False) -> int");
  m.def("_add_kernel(str epilogue, int capability, str kernel, Tensor cubin) -> ()");
  m.def("_missing_elementwise(str epilogue, Tensor x, int kind) -> str");
  m.def("_load_measured(int device, str epilogues, int[] rows) -> ()");
  m.def("_call_functions() -> int");
  m.def("_set_ready(int device) -> ()");
  m.def("_build_info() -> str");
  m.def("_registry() -> str");
  m.def("_cuda_status(int device) -> str");
}
