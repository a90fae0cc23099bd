// epigemm::_derivative_out, _fold_batch_norm_out and _quantise_out.
#include "call/decide.h"
#include "call/elementwise.h"
#include "elementwise/fold.h"
#include "elementwise/quantise.h"
#include "torch/stable_torch.h"

#if EPIGEMM_WITH_CUDA
namespace epigemm::binding {
namespace {

FoldProblem make_fold(const std::optional<TensorView>& bias, const std::optional<TensorView>& scale,
                      const std::optional<TensorView>& running_mean, const std::optional<TensorView>& running_var,
                      const std::optional<TensorView>& bn_weight, const std::optional<TensorView>& bn_bias, double eps,
                      const TensorView& out) {
  check(out.dim() == 2 && out.size(0) == 2 && out.is_contiguous(), "out must be contiguous of shape [2, N], got ",
        Shape{out});
  FoldProblem problem;
  problem.element = element_of(out, "out");
  check(problem.element == ElementType::Float32 || problem.element == ElementType::Float64,
        "out must be float32 or float64");
  problem.bias = vector_of(bias, out.size(1), out, "bias");
  problem.scale = vector_of(scale, out.size(1), out, "scale");
  problem.mean = vector_of(running_mean, out.size(1), out, "running_mean");
  problem.variance = vector_of(running_var, out.size(1), out, "running_var");
  problem.gamma = vector_of(bn_weight, out.size(1), out, "bn_weight");
  problem.beta = vector_of(bn_bias, out.size(1), out, "bn_bias");
  problem.eps = eps;
  problem.columns = out.size(1);
  problem.multiplier = out.mutable_data();
  problem.offset = static_cast<char*>(problem.multiplier) + problem.columns * element_bytes(problem.element);
  return problem;
}

bool read_optional(const std::optional<TensorView>& given, call::Tensor* storage, const call::Tensor** pointer) {
  if (!given) return true;
  *pointer = storage;
  return read(*given, storage);
}

// call::derivative, with given results: `out` by x, `outs` by the operands of `slots`. Returns the call::Answer.
int64_t derivative_out(const Name& epilogue_name, const TensorView& grad, const TensorView& x,
                       const std::optional<TensorView>& bias, const List<TensorView>& operands,
                       const List<double>& scalars, const std::optional<TensorView>& out,
                       const std::optional<TensorView>& sums, const List<int64_t>& slots,
                       const List<TensorView>& outs) {
  const EpilogueInfo& epilogue = epilogue_named(epilogue_name);
  call::Tensor of_grad, of_x, of_sums, of_slots[open::kSlots], storage[kMaxOperands];
  call::DerivativeCall derivative;
  derivative.epilogue = epilogue.id;
  derivative.grad = &of_grad;
  derivative.x = &of_x;
  derivative.has_result = out.has_value();
  bool is_read = read(grad, &of_grad) && read(x, &of_x) && read_optional(sums, &of_sums, &derivative.sums);
  const auto read_operand = [&](const TensorView& tensor, const char*, call::Tensor* to) {
    is_read = read(tensor, to) && is_read;
  };
  is_read = read_operands(epilogue, bias, operands, scalars, /*is_pair=*/false, read_operand, storage,
                          &derivative.operands) &&
            is_read;
  check(slots.values.size() == outs.values.size(), "slots, outs: accepted are as many each");
  for (std::size_t i = 0; i < slots.values.size(); ++i) {
    const int64_t slot = slots.values[i];
    check(slot >= 0 && slot < open::kSlots, "slots: there is no slot ", slot);
    is_read = read(outs.values[i], &of_slots[slot]) && is_read;
    derivative.of_slot[slot] = &of_slots[slot];
  }
  if (!is_read) return static_cast<int64_t>(call::Answer::DoesNotFit);
  StableTorch torch(x, nullptr, nullptr, out ? *out : x);
  const call::Answer answer = call::derivative(derivative, torch);
  check(answer != call::Answer::Raised, torch.message());
  return static_cast<int64_t>(answer);
}

void fold_batch_norm_out(const std::optional<TensorView>& bias, const std::optional<TensorView>& scale,
                         const std::optional<TensorView>& running_mean, const std::optional<TensorView>& running_var,
                         const std::optional<TensorView>& bn_weight, const std::optional<TensorView>& bn_bias,
                         double eps, const TensorView& out) {
  FoldProblem problem = make_fold(bias, scale, running_mean, running_var, bn_weight, bn_bias, eps, out);
  const int device = out.device();
  const CurrentDevice guard(device);
  problem.device = device;
  problem.stream = current_stream(device);
  const char* const refused = fold_cuda(problem);
  check(!refused, "the kernel could not be launched: ", refused ? refused : "");
}

// x [M, K] in e4m3. `scales`: [1, M], or [ceil(K / 128), M] for each 128 columns of a row.
void quantise_out(const TensorView& x, const TensorView& out, const TensorView& scales) {
  constexpr int64_t kBlock = 128, kRowElements = 16;
  const ElementType element = element_of(x, "x");
  const int64_t rows = x.size(0), columns = x.size(1), blocks = scales.size(0);
  const int64_t row_bytes = (rows > 1 ? x.stride(0) : columns) * element_bytes(element);
  check(element != ElementType::Float64 && columns % kRowElements == 0 && x.stride(1) == 1 &&
            call::alignment_of(x.data()) >= kRowElements && row_bytes % kRowElements == 0,
        "x: accepted are rows in fp32, fp16 or bf16 of whole 16 elements, at multiples of 16 bytes");
  check(out.is_contiguous() && element_of_product(out, "out") == ElementType::Float8E4M3 && out.size(0) == rows &&
            out.size(1) == columns,
        "out has shape ", Shape{out}, "; accepted is x's, contiguous, in float8_e4m3fn");
  check(scales.is_contiguous() && element_of(scales, "scales") == ElementType::Float32 && scales.size(1) == rows &&
            (blocks == 1 || blocks == (columns + kBlock - 1) / kBlock),
        "scales has shape ", Shape{scales}, "; accepted is [1, M] or [ceil(K / 128), M], contiguous, in fp32");
  check(out.is_beside(x) && scales.is_beside(x), "x, out and scales must be on one device");
  Quantised problem;
  problem.x = x.data(), problem.element = element;
  problem.row_stride = x.stride(0), problem.rows = rows, problem.columns = columns;
  problem.out = out.mutable_data(), problem.scales = static_cast<float*>(scales.mutable_data());
  problem.is_in_blocks = blocks > 1;
  const int device = x.device();
  const CurrentDevice guard(device);
  const char* const refused = quantise_cuda(problem, device, current_stream(device));
  check(!refused, "the kernel could not be launched: ", refused ? refused : "");
}

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_derivative_out", TORCH_BOX(&epigemm::binding::derivative_out));
  m.impl("_fold_batch_norm_out", TORCH_BOX(&epigemm::binding::fold_batch_norm_out));
  m.impl("_quantise_out", TORCH_BOX(&epigemm::binding::quantise_out));
}
#endif
