// epigemm::_split_rows_out and _split_linear_out: fp32 tensors -> fp16 slices -> GEMM -> range check.
#include "gemm/planner/planner.h"
#include "gemm/sm90_fp16x3/kernels.h"
#include "gemm/sm90_fp16x3/layout.h"
#include "gemm/sm90_fp16x3/split_rows.h"
#include "torch/linear.h"
#include "torch/plans.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#endif

namespace epigemm::binding {
namespace {

using sm90_fp16x3::SplitMatrix;
using sm90_fp16x3::StridedMatrix;

StridedMatrix strided(const TensorView& tensor, const char* argument) {
  check(tensor.dim() == 2, argument, " has shape ", Shape{tensor}, ", expected 2 dimensions");
  check(element_of(tensor, argument) == ElementType::Float32, argument, " must be float32");
  return {static_cast<const float*>(tensor.data()), tensor.size(0), tensor.size(1), tensor.stride(0), tensor.stride(1)};
}

// Bytes for slices. Sections are laid out from an address that is aligned for all of them.
void* buffer_of(const TensorView& buffer, int64_t bytes, const char* argument) {
  check(buffer.dtype() == aoti_torch_dtype_uint8() && buffer.dim() == 1 && buffer.is_contiguous(), argument,
        " must be a contiguous one-dimensional uint8 tensor");
  check(buffer.size(0) >= bytes, argument, " has ", buffer.size(0), " bytes, expected at least ", bytes);
  check(reinterpret_cast<uintptr_t>(buffer.data()) % sm90_fp16x3::kBufferAlignment == 0, argument,
        " must start at a multiple of ", sm90_fp16x3::kBufferAlignment, " bytes");
  return buffer.mutable_data();
}

void check_same_device(const TensorView& tensor, const TensorView& x, const char* argument) {
  check(tensor.is_beside(x), argument, " is on another device");
}

void split_rows_out(const TensorView& matrix, int64_t slices, const TensorView& pack) {
  check(slices == 1 || slices == 2, "slices must be 1 or 2, got ", slices);
  const StridedMatrix rows = strided(matrix, "matrix");
  const int count = static_cast<int>(slices);
  check_same_device(pack, matrix, "pack");
  void* buffer = buffer_of(pack, sm90_fp16x3::split_bytes(rows.rows, rows.columns, count), "pack");
  if (!matrix.is_cuda()) {
    sm90_fp16x3::split_rows_cpu(rows, count, buffer);
    return;
  }
#if EPIGEMM_WITH_CUDA
  const int device = matrix.device();
  const CurrentDevice guard(device);
  const char* const refused = sm90_fp16x3::split_rows_cuda(rows, count, buffer, device, current_stream(device));
  check(!refused, "the rows could not be split: ", refused ? refused : "");
#else
  check(false, "epigemm was built without CUDA");
#endif
}

#if EPIGEMM_WITH_CUDA

Arithmetic slices_arithmetic(const Name& name) {
  const Arithmetic arithmetic = arithmetic_named(name);
  check(arithmetic == Arithmetic::Split || arithmetic == Arithmetic::Scaled, "arithmetic must be split or scaled, got ",
        name.text());
  return arithmetic;
}

// The kernels store whole 16 bytes: what is left of the last four columns is written too, so it must be the caller's.
Matrix output_matrix(const TensorView& out, int64_t rows, int64_t columns) {
  const int64_t width = sm90_fp16x3::round_up_to(columns, 4);
  check(out.dim() == 2 && out.size(0) == rows && out.size(1) == width, "out has shape ", Shape{out}, ", expected [",
        rows, ", ", width, "]: N rounded up to 16 bytes");
  check(element_of(out, "out") == ElementType::Float32, "out must be float32");
  const int64_t row_stride = rows > 1 ? out.stride(0) : width;
  check(out.stride(1) == 1 && row_stride % 4 == 0 && row_stride >= width &&
            reinterpret_cast<uintptr_t>(out.data()) % 16 == 0,
        "out must be row-major, its rows and its start at multiples of 16 bytes");
  return {out.mutable_data(), ElementType::Float32, row_stride};
}

// `is_packed`: the weight's slices are there already.
Problem make_problem(const Name& epilogue_name, const TensorView& x, const TensorView& weight,
                     const std::optional<TensorView>& bias, const List<TensorView>& operands,
                     const List<double>& scalars, Arithmetic arithmetic, bool is_packed, const TensorView& out) {
  const EpilogueInfo& epilogue = epilogue_named(epilogue_name);
  const StridedMatrix x_rows = strided(x, "x"), weight_rows = strided(weight, "weight");
  check(x_rows.columns == weight_rows.columns, "x has shape ", Shape{x}, " and weight ", Shape{weight},
        ": the last dimensions must agree");
  check(x.is_cuda(), "x must be on a CUDA device");
  check_same_device(weight, x, "weight");
  check_same_device(out, x, "out");
  Problem problem;
  problem.epilogue = epilogue.id;
  problem.arithmetic = arithmetic;
  problem.m = x_rows.rows;
  problem.n = weight_rows.rows;
  problem.k = x_rows.columns;
  problem.x = {const_cast<float*>(x_rows.data), ElementType::Float32, x_rows.row_stride, x_rows.column_stride};
  problem.weight = {const_cast<float*>(weight_rows.data), ElementType::Float32, weight_rows.row_stride,
                    weight_rows.column_stride};
  problem.out = output_matrix(out, problem.m, problem.n);
  fill_operands(epilogue, x, problem.n, bias, operands, scalars, problem.operands);
  for (int i = 1; i < epilogue.operand_count; ++i) {
    const OperandValue& value = problem.operands[i - 1];
    check(epilogue.operands[i].kind != OperandKind::PerColumn || !value.data || value.stride == 1 || problem.n == 1,
          epilogue.operands[i].name, " must be contiguous");
  }
  problem.has_bias = problem.operands[0].data != nullptr;
  problem.is_packed = is_packed;
  problem.device = cuda::device(x.device());
  return problem;
}

// A forced plan may run where the split is not the more accurate product: that is how its limit is measured. A plan
// that is not forced is the fastest of the kernels on slices, whatever the fallback takes: the caller has decided.
Plan plan_on_slices(const Problem& problem, const std::vector<int64_t>& forced) {
  const std::string why_not = forced.empty() ? why_not_accurate(problem) : why_not_covered(problem);
  check(why_not.empty(), why_not);
  if (!forced.empty()) {
    const Plan plan = forced_plan(problem, forced);
    const std::string reason = why_not_planned(problem, plan);
    check(reason.empty(), "plan: ", reason);
    return plan;
  }
  const std::optional<measured::Choice> found = find_measured(problem);
  return found ? found->plan : rank_candidates(problem).front().plan;
}

void split_linear_out(const Name& epilogue, const TensorView& x, const TensorView& weight,
                      const std::optional<TensorView>& pack, const TensorView& workspace,
                      const std::optional<TensorView>& bias, const List<TensorView>& operands,
                      const List<double>& scalars, const Name& arithmetic_name, const List<int64_t>& plan_numbers,
                      const TensorView& out) {
  const Arithmetic arithmetic = slices_arithmetic(arithmetic_name);
  Problem problem = make_problem(epilogue, x, weight, bias, operands, scalars, arithmetic, pack.has_value(), out);
  const Plan plan = plan_on_slices(problem, plan_numbers.values);
  const int slices = sm90_fp16x3::slices_of(arithmetic);
  const int64_t x_bytes = sm90_fp16x3::split_bytes(problem.m, problem.k, slices);
  const int64_t weight_bytes = sm90_fp16x3::split_bytes(problem.n, problem.k, slices);
  check_same_device(workspace, x, "workspace");
  problem.workspace = buffer_of(workspace, x_bytes + (pack ? 0 : weight_bytes), "workspace");
  if (pack) {
    check_same_device(*pack, x, "pack");
    problem.packed_weight = buffer_of(*pack, weight_bytes, "pack");
  }
  launch_fused(problem, plan);
}

#endif

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_split_rows_out", TORCH_BOX(&epigemm::binding::split_rows_out));
}

#if EPIGEMM_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_split_linear_out", TORCH_BOX(&epigemm::binding::split_linear_out));
}
#endif
