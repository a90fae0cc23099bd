#include "call/operands.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <string>

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#include "elementwise/launch.h"
#include "open/slots.h"
#endif

namespace epigemm::call {
namespace {

ElementType compute_element(ElementType element) {
  return element == ElementType::Float64 ? ElementType::Float64 : ElementType::Float32;
}

bool column_value(const Tensor& vector, const Extent& extent, OperandValue* value) {
  if (extent.group_count > 0) {
    *value = {vector.data, 1, 0};
    return vector.dim == 2 && vector.sizes[0] == extent.group_count && vector.sizes[1] == extent.columns &&
           vector.is_contiguous();
  }
  *value = {vector.data, vector.dim == 1 ? vector.strides[0] : 0, 0};
  return vector.is_vector_of(extent.columns);
}

// How many consecutive rows of x a row of a tensor is for: 1 if it has x's leading sizes, more if it has 1 in place of
// the last ones of these and shares rows; 0 if it has other sizes.
int64_t rows_each_of(const Tensor& tensor, const Tensor& x, bool shares_rows) {
  if (tensor.dim != x.dim) return 0;
  int leading = x.dim - 1;
  if (std::equal(tensor.sizes, tensor.sizes + leading, x.sizes)) return 1;
  if (!shares_rows) return 0;
  int64_t rows = 1;
  for (; leading > 0 && tensor.sizes[leading - 1] == 1; --leading) rows *= x.sizes[leading - 1];
  return std::equal(tensor.sizes, tensor.sizes + leading, x.sizes) ? std::max<int64_t>(rows, 1) : 0;
}

// Whether a tensor has x's leading sizes (rows_each_of) and then `columns`, and is one matrix.
bool matrix_value(const Tensor& tensor, const Extent& extent, int64_t columns, bool shares_rows, OperandValue* value) {
  const int64_t each = rows_each_of(tensor, extent.x, shares_rows);
  Matrix matrix;
  if (each == 0 || tensor.sizes[tensor.dim - 1] != columns) return false;
  if (!as_matrix(tensor, extent.rows / each, columns, &matrix)) return false;
  *value = {tensor.data, matrix.row_stride, 0, each};
  return true;
}

bool tensor_value(const Operand& operand, const Tensor& tensor, const Extent& extent, OperandValue* value) {
  const KindTraits traits = traits_of(operand.kind);
  if (traits.by_row) {  // without by_column: a column of the result
    const int64_t columns = traits.by_column ? extent.columns : 1;
    if (!matrix_value(tensor, extent, columns, operand.shares_rows, value)) return false;
    if (!traits.by_column && extent.rows == 1) value->stride = 1;
    return true;
  }
  if (traits.by_column) return column_value(tensor, extent, value);
  *value = {tensor.data, 0, 0};
  return tensor.dim == 0;
}

constexpr int kMostDevices = 64;
std::array<std::atomic<bool>, kMostDevices> ready_devices{};

}  // namespace

bool fill_operands(const EpilogueInfo& epilogue, const GivenOperands& given, const Extent& extent,
                   OperandValue* values) {
  const Tensor& x = extent.x;
  if (given.count != epilogue.operand_count - 1) return false;
  for (int i = 0; i < given.count; ++i) {
    const Operand& operand = epilogue.operands[i + 1];
    const GivenOperand& from = given.values[i];
    const bool is_product = extent.is_pair && i + 1 == first_matrix(epilogue);
    const bool may_be_absent = is_product || i + 1 == epilogue.bias;
    const bool may_be_number = operand.kind == OperandKind::Scalar;
    values[i] = {nullptr, 0, from.number};
    if (is_product && from.tensor) return false;
    if (!from.tensor) {
      if (from.has_number ? !may_be_number : !may_be_absent) return false;
      continue;
    }
    const ElementType element =
        operand.element == OperandElement::Input ? extent.element : compute_element(extent.element);
    if (from.tensor->element != element || !from.tensor->is_beside(x)) return false;
    if (!tensor_value(operand, *from.tensor, extent, &values[i])) return false;
  }
  return true;
}

bool are_rows_countable(const Problem& problem) {
  const EpilogueInfo& epilogue = epilogue_info(problem.epilogue);
  const bool shares_rows = std::any_of(epilogue.operands, epilogue.operands + epilogue.operand_count,
                                       [](const Operand& operand) { return operand.shares_rows; });
  return !shares_rows || problem.m <= std::numeric_limits<int32_t>::max();
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

bool run_fold(const FoldVectors& fold, const Tensor& x, int64_t columns, void* workspace, Torch& torch, void* stream,
              OperandValue* values) {
  FoldProblem problem;
  FoldVector* const targets[] = {&problem.bias,     &problem.scale, &problem.mean,
                                 &problem.variance, &problem.gamma, &problem.beta};
  for (int i = 0; i < kFoldVectors; ++i) {
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
  problem.device = x.device;
  const char* const refused = fold_cuda(problem);
  if (refused) torch.raise((std::string("the kernel of the fold could not be launched: ") + refused).c_str());
  return !refused;
#else
  torch.raise(kNoCuda);
  return false;
#endif
}

bool is_launched(const char* refused, Torch& torch) {
  if (refused) torch.raise((std::string("the kernel could not be launched: ") + refused).c_str());
  return !refused;
}

bool run_elementwise(const Problem& problem, const KernelForms& kernel, const Matrix& x, const Matrix& out,
                     Torch& torch, void* stream) {
#if EPIGEMM_WITH_CUDA
  const SlotOperands operands = open::by_slot<double>(epilogue_info(problem.epilogue), problem.operands);
  return is_launched(
      cuda::launch_elementwise(
          {x.element, problem.m, problem.n, x.data, x.row_stride, out.data, out.row_stride, operands, stream}, kernel),
      torch);
#else
  (void)problem, (void)kernel, (void)x, (void)out, (void)stream;
  return is_launched(kNoCuda, torch);
#endif
}

bool is_apart(const Tensor& out, const Tensor& x, const GivenOperands& operands, bool may_be_x) {
  for (int i = 0; i < operands.count; ++i) {
    const Tensor* other = operands.values[i].tensor;
    if (other && !are_apart(out, *other)) return false;
  }
  for (int i = 0; operands.fold && i < kFoldVectors; ++i) {
    const Tensor* other = operands.fold->vectors[i];
    if (other && !are_apart(out, *other)) return false;
  }
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
