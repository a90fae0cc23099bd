// epigemm::_split_rows_out: writes the fp16 slices of an fp32 matrix, for the pack of a weight.
#include "gemm/fp16_slices/layout.h"
#include "gemm/fp16_slices/split_rows.h"
#include "torch/arguments.h"

#if EPIGEMM_WITH_CUDA
namespace epigemm::binding {
namespace {

using fp16_slices::StridedMatrix;

StridedMatrix strided(const TensorView& tensor, const char* argument) {
  check(tensor.dim() == 2, argument, " has shape ", Shape{tensor}, ", expected 2 dimensions");
  check(element_of(tensor, argument) == ElementType::Float32, argument, " must be float32");
  return {static_cast<const float*>(tensor.data()), tensor.size(0), tensor.size(1), tensor.stride(0), tensor.stride(1)};
}

// The memory of a buffer for slices, whose address has to be aligned for all sections.
void* buffer_of(const TensorView& buffer, int64_t bytes, const char* argument) {
  check(buffer.dtype() == aoti_torch_dtype_uint8() && buffer.dim() == 1 && buffer.is_contiguous(), argument,
        " must be a contiguous one-dimensional uint8 tensor");
  check(buffer.size(0) >= bytes, argument, " has ", buffer.size(0), " bytes, expected at least ", bytes);
  check(reinterpret_cast<uintptr_t>(buffer.data()) % fp16_slices::kBufferAlignment == 0, argument,
        " must start at a multiple of ", fp16_slices::kBufferAlignment, " bytes");
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
  void* buffer = buffer_of(pack, fp16_slices::split_bytes(rows.rows, rows.columns, count), "pack");
  const int device = matrix.device();
  const CurrentDevice guard(device);
  const char* const refused = fp16_slices::split_rows_cuda(rows, count, buffer, device, current_stream(device));
  check(!refused, "the rows could not be split: ", refused ? refused : "");
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) { m.impl("_split_rows_out", TORCH_BOX(&epigemm::binding::split_rows_out)); }
#endif
