// epigemm::_column_moments_out: the mean and the biased variance of each column of a stored matrix.
#include "torch/arguments.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#include "reduce/column_moments.h"

namespace epigemm::binding {
namespace {

bool is_compute(const TensorView& tensor, ElementType matrix, const char* argument) {
  const ElementType wide = matrix == ElementType::Float64 ? ElementType::Float64 : ElementType::Float32;
  return tensor.is_contiguous() && element_of(tensor, argument) == wide;
}

MomentMerge merge_of(const TensorView& matrix, ElementType element, const void* blocks, const TensorView& out) {
  MomentMerge merge;
  merge.blocks = blocks;
  merge.element = element;
  merge.rows = matrix.size(0);
  merge.columns = matrix.size(1);
  merge.moments = out.mutable_data();
  return merge;
}

// `blocks`: memory for [ceil(M / 64), N, 2] numbers; `out`: [2, N], mean and variance, or absent: the blocks are
// not merged then. Both are fp32 (fp64 of fp64).
void column_moments_out(const TensorView& matrix, const TensorView& blocks, const std::optional<TensorView>& out) {
  const ElementType element = element_of(matrix, "matrix");
  call::Tensor view = view_of(matrix, element, const_cast<void*>(matrix.data()));
  Matrix rows;
  check(matrix.dim() == 2 && call::as_matrix(view, matrix.size(0), matrix.size(1), &rows), "matrix has shape ",
        Shape{matrix}, "; accepted are matrices whose rows have no gaps between their elements");
  check(!out || (is_compute(*out, element, "out") && out->dim() == 2 && out->size(0) == kMomentsOfColumn &&
                 out->size(1) == matrix.size(1)),
        "out has shape ", Shape{out ? *out : matrix}, "; accepted is [", kMomentsOfColumn, ", ", matrix.size(1),
        "], contiguous, in fp32 (fp64 of fp64)");
  const int64_t needed = 2 * moment_blocks(matrix.size(0), kMomentRows) * matrix.size(1);
  check(is_compute(blocks, element, "blocks") && blocks.numel() >= needed, "blocks has ", blocks.numel(),
        " numbers; accepted are at least ", needed, ", contiguous, in fp32 (fp64 of fp64)");
  check((!out || out->is_beside(matrix)) && blocks.is_beside(matrix), "matrix, blocks and out must be on one device");
  constexpr int kDependentCapability = 90;
  const int device = matrix.device();
  const CurrentDevice guard(device);
  const MomentStream on{device, cuda::device(device).capability >= kDependentCapability, current_stream(device)};
  void* const memory = blocks.mutable_data();
  const MomentMatrix of{rows.data, element, rows.row_stride, matrix.size(0), matrix.size(1)};
  const char* refused = block_moments_cuda(of, memory, on);
  if (out && !refused) refused = merge_moments_cuda(merge_of(matrix, element, memory, *out), on);
  check(!refused, "the kernel could not be launched: ", refused ? refused : "");
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_column_moments_out", TORCH_BOX(&epigemm::binding::column_moments_out));
}
#endif
