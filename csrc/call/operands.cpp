#include "call/operands.h"

#include <array>
#include <atomic>
#include <cstring>
#include <limits>
#include <string>

#include "elementwise/problem.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#include "elementwise/launch.h"
#endif

namespace epigemm::call {
namespace {

ElementType compute_element(ElementType element) {
  return element == ElementType::Float64 ? ElementType::Float64 : ElementType::Float32;
}

bool vector_value(const Tensor& vector, ElementType element, const Tensor& x, int64_t columns, OperandValue* value) {
  *value = {vector.data, vector.dim == 1 ? vector.strides[0] : 0, 0};
  return vector.is_vector_of(columns) && vector.element == element && vector.is_beside(x);
}

constexpr int kMostDevices = 64;
std::array<std::atomic<bool>, kMostDevices> ready_devices{};

}  // namespace

bool fill_operands(const EpilogueInfo& epilogue, const Operands& given, const Tensor& x, int64_t columns,
                   OperandValue* values) {
  int next_vector = 0;
  bool takes_bias = false, takes_scalar = false;
  for (int i = 1; i < epilogue.operand_count; ++i) {
    const Operand& operand = epilogue.operands[i];
    OperandValue* value = &values[i - 1];
    const ElementType element = operand.element == OperandElement::Input ? x.element : compute_element(x.element);
    if (std::strcmp(operand.name, "bias") == 0) {
      takes_bias = true;
      if (given.bias && !vector_value(*given.bias, element, x, columns, value)) return false;
    } else if (operand.kind == OperandKind::Scalar) {
      takes_scalar = true;
      if (!given.scalar && !given.has_number) return false;
      value->value = given.number;
      if (!given.scalar) continue;
      if (given.scalar->dim != 0 || given.scalar->element != element || !given.scalar->is_beside(x)) return false;
      value->data = given.scalar->data;
    } else {
      const Tensor* vector = given.vectors ? given.vectors[next_vector++] : nullptr;
      if (!vector || !vector_value(*vector, element, x, columns, value)) return false;
    }
  }
  return (takes_bias || !given.bias) && (takes_scalar || (!given.scalar && !given.has_number));
}

bool fold_fits(const FoldVectors& fold, const Tensor& x, int64_t columns) {
  bool is_any = false;
  const Tensor* const bias = fold.vectors[0];  // the layer's own: as without the fold
  if (bias && bias->element != x.element) return false;
  for (const Tensor* vector : fold.vectors) {
    if (!vector) continue;
    is_any = true;
    if (!vector->is_vector_of(columns) || !vector->is_beside(x)) return false;
    if (vector->element != x.element && vector->element != compute_element(x.element)) return false;
  }
  return is_any && fold.eps >= 0 && fold.eps < std::numeric_limits<double>::infinity();
}

int64_t fold_bytes(const Tensor& x, int64_t columns) { return 2 * columns * element_bytes(compute_element(x.element)); }

void run_fold(const FoldVectors& fold, const Tensor& x, int64_t columns, void* workspace, void* stream,
              OperandValue* values) {
  FoldProblem problem;
  FoldVector* const targets[] = {&problem.bias,     &problem.scale, &problem.mean,
                                 &problem.variance, &problem.gamma, &problem.beta};
  for (int i = 0; i < 6; ++i) {
    if (const Tensor* vector = fold.vectors[i]) *targets[i] = {vector->data, vector->strides[0], vector->element};
  }
  problem.eps = fold.eps;
  problem.columns = columns;
  problem.element = compute_element(x.element);
  problem.multiplier = workspace;
  problem.offset = static_cast<char*>(workspace) + columns * element_bytes(problem.element);
  problem.stream = stream;
  values[0] = {problem.multiplier, 1, 0};
  values[1] = {problem.offset, 1, 0};
#if EPIGEMM_WITH_CUDA
  if (x.is_cuda()) {
    fold_cuda(problem);
    return;
  }
#endif
  fold_cpu(problem);
}

bool run_elementwise(ElementwiseProblem& problem, const Tensor& x, Torch& torch, void* stream) {
  simplify(problem);
#if EPIGEMM_WITH_CUDA
  if (x.is_cuda()) {
    problem.multiprocessors = cuda::device(x.device).multiprocessors;
    problem.stream = stream;
    cuda::launch(problem);
    const std::string error = cuda::last_error();
    if (!error.empty()) torch.raise(("the kernel could not be launched: " + error).c_str());
    return error.empty();
  }
#endif
  (void)x, (void)stream;
  torch.run_on_cpu(problem);
  return true;
}

bool is_apart(const Tensor& out, const Tensor& x, bool may_be_x) {
  if (are_apart(out, x)) return true;
  return may_be_x && out.data == x.data && out.element == x.element && out.is_contiguous() && x.is_contiguous();
}

bool is_ready(const Tensor& x) {
  return !x.is_cuda() || (x.device >= 0 && x.device < kMostDevices && ready_devices[x.device].load());
}

void set_ready(int device) {
  if (device >= 0 && device < kMostDevices) ready_devices[device].store(true);
}

}  // namespace epigemm::call
