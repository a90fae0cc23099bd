#include "torch/stable_torch.h"

#include <dlfcn.h>

namespace epigemm::binding {
namespace {

// PyTorch's GEMMs with an `out`, by the C functions that its compiled programs call. Not through the dispatcher,
// because the stable ABI cannot pass the Scalar arguments of addmm, and looking up an operator by name takes longer.
struct Gemms {
  AOTITorchError (*addmm_out)(AtenTensorHandle out, AtenTensorHandle bias, AtenTensorHandle a, AtenTensorHandle b,
                              double beta, double alpha) = nullptr;
  AOTITorchError (*mm_out)(AtenTensorHandle out, AtenTensorHandle a, AtenTensorHandle b) = nullptr;
};

// Looked up at run time, as in `current_stream`, because those for CUDA are in a library that CPU builds lack.
Gemms find_gemms(const char* library_name, const char* addmm_out, const char* mm_out) {
  Gemms gemms;
  void* const library = dlopen(library_name, RTLD_NOLOAD | RTLD_LAZY);
  if (!library) return gemms;
  gemms.addmm_out = reinterpret_cast<decltype(gemms.addmm_out)>(dlsym(library, addmm_out));
  gemms.mm_out = reinterpret_cast<decltype(gemms.mm_out)>(dlsym(library, mm_out));
  return gemms;
}

const Gemms& gemms_for(const TensorView& x) {
  if (x.is_cuda()) {
    static const Gemms cuda = find_gemms("libtorch_cuda.so", "aoti_torch_cuda_addmm_out", "aoti_torch_cuda_mm_out");
    return cuda;
  }
  static const Gemms cpu = find_gemms("libtorch_cpu.so", "aoti_torch_cpu_addmm_out", "aoti_torch_cpu_mm_out");
  return cpu;
}

bool element_of(const TensorView& tensor, ElementType* element) {
  static const std::pair<int32_t, ElementType> known[] = {{aoti_torch_dtype_float32(), ElementType::Float32},
                                                          {aoti_torch_dtype_bfloat16(), ElementType::BFloat16},
                                                          {aoti_torch_dtype_float16(), ElementType::Float16},
                                                          {aoti_torch_dtype_float64(), ElementType::Float64}};
  for (const auto& [dtype, value] : known) {
    if (tensor.dtype() != dtype) continue;
    *element = value;
    return true;
  }
  return false;
}

}  // namespace

bool read(const TensorView& tensor, call::Tensor* read) {
  if (!element_of(tensor, &read->element)) return false;
  if (tensor.is_cuda()) {
    read->device_kind = call::DeviceKind::CUDA;
    read->device = tensor.device();
  } else if (tensor.is_cpu()) {
    read->device_kind = call::DeviceKind::CPU;
    read->device = 0;
  } else {
    return false;
  }
  read->data = const_cast<void*>(tensor.data());  // the kernels write to `out` alone
  read->dim = static_cast<int>(tensor.dim());
  read->sizes = tensor.sizes();
  read->strides = tensor.strides();
  return read->data || tensor.numel() == 0;
}

StableTorch::StableTorch(const TensorView& x, const TensorView* weight, const TensorView* bias, const TensorView& out)
    : x_(x), out_(out), weight_(weight), bias_(bias) {}

bool StableTorch::result(call::Tensor* result) {
  const bool is_read = read(out_, result);
  result->data = out_.mutable_data();
  return is_read;
}

void* StableTorch::workspace(int64_t bytes) {
  constexpr int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  void* data = nullptr;
  const int32_t device_type = x_.is_cuda() ? aoti_torch_device_type_cuda() : aoti_torch_device_type_cpu();
  if (aoti_torch_empty_strided(1, &bytes, &stride, aoti_torch_dtype_uint8(), device_type, x_.device(), &handle) !=
      AOTI_TORCH_SUCCESS) {
    return nullptr;
  }
  workspace_.reset(handle);
  check_code(torch_get_mutable_data_ptr(handle, &data));
  return data;
}

// The same memory as a matrix.
StableTorch::Handle StableTorch::matrix_of(const TensorView& tensor, int64_t rows, int64_t columns, int64_t row_stride,
                                           int64_t column_stride) {
  const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
  AtenTensorHandle handle = nullptr;
  check_code(aoti_torch__reinterpret_tensor(tensor.handle(), 2, sizes, strides, 0, &handle));
  return Handle(handle);
}

// All leading axes as the rows of a matrix; null if that would need a copy.
StableTorch::Handle StableTorch::rows_of(const TensorView& tensor) const {
  call::Tensor view;
  if (!read(tensor, &view)) return nullptr;
  const int64_t columns = view.sizes[view.dim - 1], rows = columns == 0 ? 0 : view.numel() / columns;
  if (view.dim == 2) return matrix_of(tensor, rows, columns, view.strides[0], view.strides[1]);
  Matrix matrix;
  if (!call::as_matrix(view, rows, columns, &matrix)) return nullptr;
  return matrix_of(tensor, rows, columns, rows > 1 ? matrix.row_stride : columns, 1);
}

// By Python (operators/graphs.py): PyTorch has no C function for a GEMM with a ReLU that writes to `out`.
AOTITorchError StableTorch::addmm_relu(AtenTensorHandle bias, Handle rows, Handle transposed, Handle out) {
  AtenTensorHandle owned = nullptr;
  check_code(aoti_torch_new_tensor_handle(bias, &owned));
  StableIValue stack[] = {torch::stable::detail::from(owned), torch::stable::detail::from(rows.release()),
                          torch::stable::detail::from(transposed.release()),
                          torch::stable::detail::from(out.release())};
  return torch_call_dispatcher("epigemm::_addmm_relu", "", stack, TORCH_ABI_VERSION);
}

bool StableTorch::gemm(call::Gemm gemm, int, call::Tensor* result) {
  const Gemms& gemms = gemms_for(x_);
  if (!gemms.addmm_out || !gemms.mm_out) return false;
  const int64_t n = weight_->size(0), k = weight_->size(1);
  Handle rows = rows_of(x_), out = rows_of(out_);
  if (!rows || !out) return false;
  Handle transposed = matrix_of(*weight_, k, n, weight_->stride(1), weight_->stride(0));
  const AOTITorchError code = gemm == call::Gemm::WithBiasAndReLU
                                  ? addmm_relu(bias_->handle(), std::move(rows), std::move(transposed), std::move(out))
                              : gemm == call::Gemm::WithBias
                                  ? gemms.addmm_out(out.get(), bias_->handle(), rows.get(), transposed.get(), 1, 1)
                                  : gemms.mm_out(out.get(), rows.get(), transposed.get());
  return code == AOTI_TORCH_SUCCESS && this->result(result);
}

bool StableTorch::stream(void** stream) {
  device_.emplace(x_.device());
  *stream = current_stream(x_.device());
  return true;
}

void StableTorch::raise(const char* message) { message_ = message; }

}  // namespace epigemm::binding
