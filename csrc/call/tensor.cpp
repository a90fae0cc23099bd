#include "call/tensor.h"

#include <algorithm>

namespace epigemm::call {

int64_t Tensor::numel() const {
  int64_t product = 1;
  for (int axis = 0; axis < dim; ++axis) product *= sizes[axis];
  return product;
}

bool Tensor::is_contiguous() const {
  int64_t expected = 1;
  for (int axis = dim - 1; axis >= 0; --axis) {
    if (sizes[axis] == 0) return true;
    if (sizes[axis] != 1 && strides[axis] != expected) return false;
    expected *= sizes[axis];
  }
  return true;
}

bool Tensor::is_dense() const {
  if (numel() == 0) return true;
  int64_t expected = 1;
  uint64_t found = 0;  // a bit for each axis
  for (int step = 0; step < dim; ++step) {
    for (int axis = dim - 1; axis >= 0; --axis) {
      if ((found >> axis & 1) || (sizes[axis] != 1 && strides[axis] != expected)) continue;
      found |= uint64_t(1) << axis;
      expected *= sizes[axis];
      break;
    }
  }
  return found == (uint64_t(1) << dim) - 1;
}

bool Tensor::has_sizes_of(const Tensor& other) const {
  return dim == other.dim && std::equal(sizes, sizes + dim, other.sizes);
}

namespace {

// One past the last byte. Strides of a tensor are never negative.
const char* end_of(const Tensor& tensor) {
  int64_t last = 0;
  for (int axis = 0; axis < tensor.dim; ++axis) {
    if (tensor.sizes[axis] == 0) return static_cast<const char*>(tensor.data);
    last += (tensor.sizes[axis] - 1) * tensor.strides[axis];
  }
  return static_cast<const char*>(tensor.data) + (last + 1) * element_bytes(tensor.element);
}

}  // namespace

bool are_apart(const Tensor& a, const Tensor& b) { return end_of(a) <= b.data || end_of(b) <= a.data; }

bool as_strided(const Tensor& tensor, int64_t rows, int64_t columns, Matrix* matrix) {
  const int last = tensor.dim - 1;
  // With one row the row stride is never used. Any value that the hardware accepts will do.
  const int64_t any_stride = (columns + 15) / 16 * 16;
  *matrix = {tensor.data, tensor.element, any_stride, columns > 1 ? tensor.strides[last] : 1};
  if (rows <= 1) return true;
  int64_t expected = -1;
  for (int axis = last - 1; axis >= 0; --axis) {
    if (tensor.sizes[axis] == 1) continue;
    if (expected < 0) {
      matrix->row_stride = tensor.strides[axis];
    } else if (tensor.strides[axis] != expected) {
      return false;
    }
    expected = tensor.strides[axis] * tensor.sizes[axis];
  }
  return true;
}

bool as_matrix(const Tensor& tensor, int64_t rows, int64_t columns, Matrix* matrix) {
  return as_strided(tensor, rows, columns, matrix) && matrix->column_stride == 1;
}

}  // namespace epigemm::call
