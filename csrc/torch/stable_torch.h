// PyTorch's memory, GEMM and stream through its stable ABI, for calls of operators.
#pragma once

#include <optional>
#include <string>

#include "call/torch.h"
#include "torch/arguments.h"

namespace epigemm::binding {

// A tensor in the form that csrc/call reads. False if there are no kernels for its type or device.
bool read(const TensorView& tensor, call::Tensor* read);

class StableTorch final : public call::Torch {
 public:
  // For a linear call; `weight` and `bias` are null if there is none, or for an elementwise call. `out` gets the
  // result.
  StableTorch(const TensorView& x, const TensorView* weight, const TensorView* bias, const TensorView& out);

  bool result(call::Tensor* result) override;
  void* workspace(int64_t bytes) override;
  bool gemm(call::Gemm gemm, int bias, call::Tensor* result) override;
  bool stream(void** stream) override;
  void raise(const char* message) override;

  // The text given to `raise`. Empty if PyTorch failed: the stable ABI passes neither type nor text of its errors.
  const std::string& message() const { return message_; }

 private:
  struct Delete {
    void operator()(AtenTensorOpaque* handle) const { aoti_torch_delete_tensor_object(handle); }
  };
  using Handle = std::unique_ptr<AtenTensorOpaque, Delete>;

  static Handle matrix_of(const TensorView& tensor, int64_t rows, int64_t columns, int64_t row_stride,
                          int64_t column_stride);
  Handle rows_of(const TensorView& tensor) const;
  static AOTITorchError addmm_relu(AtenTensorHandle bias, Handle rows, Handle transposed, Handle out);

  const TensorView &x_, &out_;
  const TensorView *weight_, *bias_;
  std::optional<CurrentDevice> device_;
  Handle workspace_;
  std::string message_;
};

}  // namespace epigemm::binding
