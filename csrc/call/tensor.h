// A tensor as calls read it: each property is read once, by either binding (csrc/python, csrc/torch).
#pragma once

#include "gemm/problem.h"

namespace epigemm::call {

enum class DeviceKind { CPU, CUDA };

struct Tensor {
  void* data = nullptr;
  ElementType element = ElementType::Float32;
  DeviceKind device_kind = DeviceKind::CPU;
  int device = 0;
  int dim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;  // elements

  bool is_cuda() const { return device_kind == DeviceKind::CUDA; }
  bool is_beside(const Tensor& other) const { return device_kind == other.device_kind && device == other.device; }
  int64_t numel() const;
  bool is_contiguous() const;
  bool is_dense() const;  // contiguous in some order of its axes
  bool is_vector_of(int64_t length) const { return dim == 1 && sizes[0] == length; }
  bool has_sizes_of(const Tensor& other) const;
};

// Whether two tensors are known to share no byte, from the ranges that they span.
bool are_apart(const Tensor& a, const Tensor& b);

// All leading axes as the rows of one row-major matrix, without a copy. False where no single row stride reaches them.
bool as_matrix(const Tensor& tensor, int64_t rows, int64_t columns, Matrix* matrix);

// The same, with any stride from column to column.
bool as_strided(const Tensor& tensor, int64_t rows, int64_t columns, Matrix* matrix);

}  // namespace epigemm::call
