// A tensor argument of an operator. Every accessor of torch::stable::Tensor is a call into torch, and a handful of such
// calls take as long as an operator. So each property is read once, when the argument is passed.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <ostream>
#include <utility>
#include <vector>

#include "torch/check.h"

namespace epigemm::binding {

class TensorView {
 public:
  // Takes the handle over.
  explicit TensorView(AtenTensorHandle handle) : handle_(handle) {
    check_code(aoti_torch_get_dim(handle, &dim_));
    check_code(aoti_torch_get_sizes(handle, &sizes_));
    check_code(aoti_torch_get_strides(handle, &strides_));
    check_code(aoti_torch_get_dtype(handle, &dtype_));
    check_code(aoti_torch_get_device_type(handle, &device_type_));
    check_code(aoti_torch_get_device_index(handle, &device_));
    check_code(torch_get_const_data_ptr(handle, &data_));
  }

  int64_t dim() const { return dim_; }
  int64_t size(int64_t axis) const { return sizes_[axis]; }
  int64_t stride(int64_t axis) const { return strides_[axis]; }
  const int64_t* sizes() const { return sizes_; }
  const int64_t* strides() const { return strides_; }
  int32_t dtype() const { return dtype_; }  // one of the aoti_torch_dtype_...()
  bool is_cuda() const { return device_type_ == aoti_torch_device_type_cuda(); }
  bool is_cpu() const { return device_type_ == aoti_torch_device_type_cpu(); }
  int32_t device() const { return device_; }
  const void* data() const { return data_; }
  AtenTensorHandle handle() const { return handle_.get(); }  // stays this view's

  // Of a tensor that is written: one that shares its memory until then gets its own now.
  void* mutable_data() const {
    void* data = nullptr;
    check_code(torch_get_mutable_data_ptr(handle_.get(), &data));
    return data;
  }

  bool is_beside(const TensorView& other) const {
    return device_type_ == other.device_type_ && device_ == other.device_;
  }

  int64_t numel() const {
    int64_t product = 1;
    for (int64_t axis = 0; axis < dim_; ++axis) product *= sizes_[axis];
    return product;
  }

  bool is_contiguous() const {
    if (numel() == 0) return true;
    int64_t expected = 1;
    for (int64_t axis = dim_ - 1; axis >= 0; --axis) {
      if (sizes_[axis] != 1 && strides_[axis] != expected) return false;
      expected *= sizes_[axis];
    }
    return true;
  }

 private:
  struct Delete {
    void operator()(AtenTensorOpaque* handle) const { aoti_torch_delete_tensor_object(handle); }
  };

  std::unique_ptr<AtenTensorOpaque, Delete> handle_;
  int64_t dim_ = 0;
  int64_t* sizes_ = nullptr;
  int64_t* strides_ = nullptr;
  int32_t dtype_ = 0, device_type_ = 0, device_ = 0;
  const void* data_ = nullptr;
};

// A `Tensor[]?`, `float[]?` or `int[]?` argument. None means an empty list, because passing an empty list takes a third
// of a microsecond.
template <class Element>
struct List {
  std::vector<Element> values;
};

// A tensor's shape, written into a message as "[2, 3]".
struct Shape {
  const TensorView& tensor;
};

inline std::ostream& operator<<(std::ostream& stream, const Shape& shape) {
  stream << "[";
  for (int64_t axis = 0; axis < shape.tensor.dim(); ++axis) stream << (axis ? ", " : "") << shape.tensor.size(axis);
  return stream << "]";
}

}  // namespace epigemm::binding

template <>
struct torch::stable::detail::ToImpl<epigemm::binding::TensorView> {
  static epigemm::binding::TensorView call(StableIValue value, uint64_t, bool) {
    return epigemm::binding::TensorView(torch::stable::detail::to<AtenTensorHandle>(value));
  }
};

// The general one would copy the view.
template <>
struct torch::stable::detail::ToImpl<std::optional<epigemm::binding::TensorView>> {
  static std::optional<epigemm::binding::TensorView> call(StableIValue value, uint64_t version, bool is_internal) {
    const auto handle = ToImpl<std::optional<AtenTensorHandle>>::call(value, version, is_internal);
    if (!handle) return std::nullopt;
    return std::optional<epigemm::binding::TensorView>(std::in_place, *handle);
  }
};

template <class Element>
struct torch::stable::detail::ToImpl<epigemm::binding::List<Element>> {
  static epigemm::binding::List<Element> call(StableIValue value, uint64_t version, bool is_internal) {
    const auto list = ToImpl<std::optional<StableListHandle>>::call(value, version, is_internal);
    if (!list) return {};
    return {torch::stable::detail::to<std::vector<Element>>(torch::stable::detail::from(*list))};
  }
};
