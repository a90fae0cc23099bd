// epigemm::_batch_norm_out and _batch_norm_backward_out, on CUDA.
#include "elementwise/batch_norm.h"

#include "reduce/column_moments.h"
#include "torch/arguments.h"

#if EPIGEMM_WITH_CUDA
namespace epigemm::binding {
namespace {

ElementType compute_of(ElementType element) {
  return element == ElementType::Float64 ? ElementType::Float64 : ElementType::Float32;
}

// A matrix like u.
const void* matrix_of(const TensorView& matrix, const TensorView& u, const char* argument) {
  check(matrix.dim() == 2 && matrix.size(0) == u.size(0) && matrix.size(1) == u.size(1) && matrix.is_contiguous(),
        argument, " must be contiguous of shape ", Shape{u}, ", got ", Shape{matrix});
  check(matrix.dtype() == u.dtype(), argument, " must have u's dtype");
  check(matrix.is_beside(u), argument, " must be on u's device");
  return matrix.data();
}

void* written_matrix_of(const TensorView& matrix, const TensorView& u, const char* argument) {
  matrix_of(matrix, u, argument);
  return matrix.mutable_data();
}

const void* moment_of(const TensorView& moment, const TensorView& u, ElementType element, const char* argument) {
  check(moment.dim() == 1 && moment.size(0) == u.size(1) && moment.is_contiguous(), argument,
        " must be contiguous of shape [", u.size(1), "], got ", Shape{moment});
  check(element_of(moment, argument) == compute_of(element), argument, " must have the arithmetic's dtype");
  check(moment.is_beside(u), argument, " must be on u's device");
  return moment.data();
}

WrittenVector written_vector_of(const std::optional<TensorView>& vector, const TensorView& u, const char* argument) {
  const FoldVector read = vector_of(vector, u.size(1), u, argument);
  if (!vector) return {};
  return {vector->mutable_data(), read.stride, read.element};
}

struct Vectors {
  const std::optional<TensorView>&scale, &weight, &bias;
};

void fill(BatchNorm& problem, const TensorView& u, const TensorView& mean, const TensorView& variance,
          const Vectors& vectors, double eps, bool relu) {
  check(u.dim() == 2, "u has shape ", Shape{u}, ", expected 2 dimensions");
  problem.element = element_of(u, "u");
  problem.rows = u.size(0);
  problem.columns = u.size(1);
  check(problem.rows > 1 && problem.columns > 0, "u has shape ", Shape{u}, ", expected 2 rows or more, and columns");
  problem.u = matrix_of(u, u, "u");
  problem.mean = moment_of(mean, u, problem.element, "mean");
  problem.variance = moment_of(variance, u, problem.element, "variance");
  problem.scale = vector_of(vectors.scale, problem.columns, u, "scale");
  problem.gamma = vector_of(vectors.weight, problem.columns, u, "weight");
  problem.beta = vector_of(vectors.bias, problem.columns, u, "bias");
  problem.eps = eps;
  problem.relu = relu;
  problem.device = u.device();
  problem.stream = current_stream(u.device());
}

void check_launched(const char* refused) {
  check(!refused, "the kernel could not be launched: ", refused ? refused : "");
}

// `blocks`: moments of blocks of `block_rows` rows, the last of which may be shorter.
void check_blocks(const TensorView& blocks, const TensorView& u, ElementType element, int64_t block_rows) {
  const int64_t count = block_rows > 0 ? (u.size(0) + block_rows - 1) / block_rows : 0;
  check(count > 0 && count <= kMostMergedBehind, "block_rows is ", block_rows, ", of ", u.size(0),
        " rows; accepted are 1 to ", kMostMergedBehind, " blocks");
  check(blocks.dim() == 3 && blocks.size(0) >= count && blocks.size(1) == u.size(1) && blocks.size(2) == 2 &&
            blocks.is_contiguous() && blocks.is_beside(u) && element_of(blocks, "blocks") == compute_of(element),
        "blocks must be contiguous of shape [", count, ", ", u.size(1), ", 2], of the arithmetic's dtype, got ",
        Shape{blocks});
}

void check_count(const std::optional<TensorView>& count, const TensorView& u, const char* argument) {
  check(!count || (count->dtype() == aoti_torch_dtype_int64() && count->numel() == 1 && count->is_beside(u)), argument,
        " must be one int64 on u's device");
}

void batch_norm_out(const TensorView& u, const TensorView& mean, const TensorView& variance,
                    const std::optional<TensorView>& scale, const std::optional<TensorView>& weight,
                    const std::optional<TensorView>& bias, double eps, bool relu,
                    const std::optional<TensorView>& running_mean, const std::optional<TensorView>& running_var,
                    const std::optional<TensorView>& tracked, double momentum, const TensorView& out,
                    const std::optional<TensorView>& blocks, int64_t block_rows,
                    const std::optional<TensorView>& counted) {
  const CurrentDevice guard(u.device());
  BatchNormForward problem;
  fill(problem, u, mean, variance, {scale, weight, bias}, eps, relu);
  problem.y = written_matrix_of(out, u, "out");
  problem.running_mean = written_vector_of(running_mean, u, "running_mean");
  problem.running_variance = written_vector_of(running_var, u, "running_var");
  problem.momentum = momentum;
  check_count(tracked, u, "tracked");
  check_count(counted, u, "counted");
  if (tracked) problem.tracked = static_cast<const int64_t*>(tracked->data());
  if (counted) problem.counted = static_cast<int64_t*>(counted->mutable_data());
  if (blocks) {
    check_blocks(*blocks, u, problem.element, block_rows);
    problem.blocks = blocks->data();
    problem.block_rows = static_cast<int>(block_rows);
    problem.merged_mean = mean.mutable_data();
    problem.merged_variance = variance.mutable_data();
  }
  check_launched(batch_norm_forward_cuda(problem));
}

void batch_norm_backward_out(const TensorView& grad, const TensorView& u, const TensorView& mean,
                             const TensorView& variance, const std::optional<TensorView>& scale,
                             const std::optional<TensorView>& weight, const std::optional<TensorView>& bias, double eps,
                             bool relu, const std::optional<TensorView>& grad_u,
                             const std::optional<TensorView>& grad_scale, const std::optional<TensorView>& grad_weight,
                             const std::optional<TensorView>& grad_bias, const std::optional<TensorView>& grad_shift,
                             const TensorView& workspace) {
  const CurrentDevice guard(u.device());
  BatchNormBackward problem;
  fill(problem, u, mean, variance, {scale, weight, bias}, eps, relu);
  problem.grad = matrix_of(grad, u, "grad");
  problem.grad_u = grad_u ? written_matrix_of(*grad_u, u, "grad_u") : nullptr;
  problem.grad_scale = written_vector_of(grad_scale, u, "grad_scale");
  problem.grad_gamma = written_vector_of(grad_weight, u, "grad_weight");
  problem.grad_beta = written_vector_of(grad_bias, u, "grad_bias");
  problem.grad_bias = written_vector_of(grad_shift, u, "grad_shift");
  check(workspace.dim() == 2 && workspace.size(0) >= 5 && workspace.size(1) == problem.columns &&
            workspace.is_contiguous() && workspace.is_beside(u) &&
            element_of(workspace, "workspace") == compute_of(problem.element),
        "workspace must be contiguous of shape [2 * chunks + 3, N], of the arithmetic's dtype, got ", Shape{workspace});
  problem.workspace = workspace.mutable_data();
  problem.chunks = (workspace.size(0) - 3) / 2;
  check_launched(batch_norm_backward_cuda(problem));
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_batch_norm_out", TORCH_BOX(&epigemm::binding::batch_norm_out));
  m.impl("_batch_norm_backward_out", TORCH_BOX(&epigemm::binding::batch_norm_backward_out));
}
#endif
