#include "call/prepare.h"

#include <algorithm>
#include <limits>

#include "call/operands.h"
#include "gemm/grid.h"
#include "reduce/column_moments.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#endif

namespace epigemm::call {
namespace {

bool is_order_of_8_bits(const LinearCall& call) { return call.fp32_order >= kFirstOrderOf8Bits; }

// The first group's weight of `weights`, or the only one.
Tensor first_of(const Tensor& weights) {
  Tensor first = weights;
  if (weights.dim == 3) --first.dim, ++first.sizes, ++first.strides;
  return first;
}

bool groups_fit(const LinearCall& call) {
  const Tensor &x = *call.x, &weight = *call.weight;
  if (weight.dim == 2) return !call.group_ends;
  if (weight.dim != 3 || weight.sizes[0] == 0 || call.is_8_bits() || call.column_moments) return false;
  if (!call.group_ends) return x.dim == 3 && x.sizes[0] == weight.sizes[0];
  const Tensor& ends = *call.group_ends;
  return x.dim == 2 && ends.element == ElementType::Int32 && ends.is_vector_of(weight.sizes[0]) &&
         ends.is_contiguous() && ends.is_beside(x);
}

// Whether x and the weight have one type, or both 8 bits and scales.
bool types_fit(const LinearCall& call) {
  constexpr int64_t kRowElements = 16;
  const Tensor &x = *call.x, &weight = *call.weight;
  if (!call.is_8_bits()) return weight.element == x.element && !is_8_bits(x.element) && !is_order_of_8_bits(call);
  const bool are_8_bits = is_8_bits(x.element) && is_8_bits(weight.element) && is_order_of_8_bits(call);
  return are_8_bits && call.eight_bits.weight_scale && weight.sizes[1] % kRowElements == 0;
}

bool shapes_fit(const LinearCall& call) {
  if (call.x->dim < 1 || !groups_fit(call)) return false;
  const Tensor& x = *call.x;
  const Tensor weight = first_of(*call.weight);
  if (x.sizes[x.dim - 1] != weight.sizes[1]) return false;
  if (!types_fit(call) || !weight.is_beside(x)) return false;
  if (const Tensor* const other = call.weight2) {
    if (!other->has_sizes_of(*call.weight) || other->element != weight.element || !other->is_beside(x)) return false;
  }
  if (!call.out) return true;
  const Tensor& out = *call.out;
  if (out.dim != x.dim || out.element != call.result_element() || !out.is_beside(x)) return false;
  return std::equal(out.sizes, out.sizes + out.dim - 1, x.sizes) && out.sizes[out.dim - 1] == weight.sizes[0];
}

// Whether the caller's `out` is known to share no byte with an argument.
bool is_out_apart(const LinearCall& call) {
  if (!call.out || call.is_out_apart) return true;
  const EightBits& about = call.eight_bits;
  for (const Tensor* other :
       {call.weight2, about.x_scale, about.weight_scale, about.out_scale.tensor, call.group_ends}) {
    if (other && !are_apart(*call.out, *other)) return false;
  }
  return are_apart(*call.out, *call.weight) && is_apart(*call.out, *call.x, call.operands, /*may_be_x=*/false);
}

bool operands_fit(const LinearCall& call, const EpilogueInfo& epilogue, Problem* problem) {
  if (call.weight2 && first_matrix(epilogue) == 0) return false;
  // In 8 bits Python folds: the vectors have the result's type, which folds do not know.
  if (call.operands.fold)
    return !call.is_8_bits() && !problem->groups && fold_fits(*call.operands.fold, *call.x, problem->n);
  const Extent extent{*call.x, call.operand_element(), problem->m, problem->n, problem->is_pair, problem->groups.count};
  return fill_operands(epilogue, call.operands, extent, problem->operands);
}

constexpr int64_t kBlock = 128;

// `other`: the axis of torch's [M, 1] or [1, N] that has one number.
bool read_scale(const Tensor& scale, int64_t rows, int other, Scale* read) {
  *read = {static_cast<const float*>(scale.data), scale.dim > 0};
  const bool is_matrix = scale.dim == 2 && scale.sizes[other] == 1 && scale.sizes[1 - other] == rows;
  return scale.dim == 0 || ((is_matrix || scale.is_vector_of(rows)) && scale.is_contiguous());
}

// `rows`: of x, or blocks of the weight's.
bool read_scale_of_blocks(const Tensor& scale, int64_t rows, int64_t k, Scale* read) {
  if (scale.dim != 2 || scale.sizes[0] != rows || scale.sizes[1] != ceil_div(k, kBlock)) return false;
  constexpr int64_t kMost = int64_t{1} << 32;  // kernels count them in 32 bits
  if (rows * scale.strides[0] + scale.sizes[1] * scale.strides[1] >= kMost) return false;
  *read = {static_cast<const float*>(scale.data), /*is_of_rows=*/false, /*is_of_blocks=*/true, scale.strides[0],
           scale.strides[1]};
  return true;
}

// With at most 128 of K and one row of the weight, rows and blocks have the same scales.
bool scales_fit(const LinearCall& call, Problem* problem) {
  if (!call.is_8_bits()) return true;
  const Tensor &of_x = *call.eight_bits.x_scale, &of_weight = *call.eight_bits.weight_scale;
  for (const Tensor* const scale : {&of_x, &of_weight}) {
    if (scale->element != ElementType::Float32 || !scale->is_beside(*call.x)) return false;
  }
  const int64_t weights = call.weight2 ? 2 : 1;
  if (read_scale(of_x, problem->m, 1, &problem->x_scale) &&
      read_scale(of_weight, problem->n * weights, 0, &problem->weight_scale)) {
    return true;
  }
  return read_scale_of_blocks(of_x, problem->m, problem->k, &problem->x_scale) &&
         read_scale_of_blocks(of_weight, ceil_div(problem->n, kBlock) * weights, problem->k, &problem->weight_scale);
}

// Whether there is a scale of the result, or memory for those of its blocks, where the result has 8 bits.
bool read_out_scale(const LinearCall& call, Problem* problem) {
  const GivenOperand& given = call.eight_bits.out_scale;
  OutScale* const read = &problem->out_scale;
  if (!is_8_bits(call.result_element())) return given.is_absent();
  if (call.result_element() != ElementType::Float8E4M3 || given.is_absent()) return false;
  if (given.has_number) {
    read->value = static_cast<float>(given.number);
    return read->value > 0 && read->value < std::numeric_limits<float>::infinity();
  }
  const Tensor& scale = *given.tensor;
  if (scale.element != ElementType::Float32 || !scale.is_beside(*call.x)) return false;
  read->is_of_blocks = scale.dim > 0;
  if (!read->is_of_blocks) {
    read->data = static_cast<const float*>(scale.data);
    return true;
  }
  read->blocks = static_cast<float*>(scale.data);
  read->blocks_step = problem->m;
  return scale.dim == 2 && scale.sizes[0] == ceil_div(problem->n, kBlock) && scale.sizes[1] == problem->m &&
         scale.is_contiguous();
}

bool is_of_moments(const Tensor& tensor, const Tensor& x) {
  const bool is_double = x.element == ElementType::Float64;
  return tensor.is_contiguous() && tensor.element == (is_double ? ElementType::Float64 : ElementType::Float32) &&
         tensor.is_beside(x);
}

bool moments_fit(const LinearCall& call, int64_t n) {
  const Tensor *const moments = call.column_moments, *const blocks = call.column_blocks;
  if (!moments) return !blocks;
  const bool fits = moments->dim == 2 && moments->sizes[0] == kMomentsOfColumn && moments->sizes[1] == n &&
                    is_of_moments(*moments, *call.x) && call.x->is_cuda();
  return fits && (!blocks || (blocks->dim == 3 && blocks->sizes[1] == n && blocks->sizes[2] == 2 &&
                              is_of_moments(*blocks, *call.x)));
}

// Whether there is a tensor for the epilogue's second values where it has some, of the result's shape and layout.
bool stored_fits(const LinearCall& call, Problem* problem) {
  const bool has_store = epilogue_info(call.epilogue).has_store;
  if (!call.stored) return !has_store;
  const Tensor &stored = *call.stored, &x = *call.x;
  return has_store && !call.weight2 && stored.dim == x.dim && stored.element == call.result_element() &&
         stored.is_beside(x) && std::equal(stored.sizes, stored.sizes + stored.dim - 1, x.sizes) &&
         stored.sizes[stored.dim - 1] == problem->n && stored.is_contiguous() &&
         as_matrix(stored, problem->m, problem->n, &problem->stored);
}

// The second weight of a pair. False if its layout differs from the first one's: no kernel reads that.
bool read_weight2(const Tensor& weight2, Problem* problem) {
  Matrix matrix;
  as_strided(first_of(weight2), problem->n, problem->k, &matrix);
  problem->weight2 = weight2.data;
  problem->alignment = std::min(problem->alignment, alignment_of(weight2.data));
  const bool are_apart = problem->groups.count > 1;
  return matrix.row_stride == problem->weight.row_stride && matrix.column_stride == problem->weight.column_stride &&
         (!are_apart || weight2.strides[0] == problem->groups.weight_stride);
}

// Whether the result is a matrix. A new one is contiguous.
bool set_output(const Tensor* out, ElementType element, Problem* problem) {
  problem->out = {nullptr, element, problem->m > 1 ? problem->n : (problem->n + 15) / 16 * 16};
  return !out || as_matrix(*out, problem->m, problem->n, &problem->out);
}

bool has_bias(const LinearCall& call) {
  const int place = epilogue_info(call.epilogue).bias;
  return place > 0 && call.operands.values[place - 1].tensor;
}

}  // namespace

Answer prepare(const LinearCall& call, Prepared* prepared) {
  Problem& problem = prepared->problem;
  if (!shapes_fit(call)) return Answer::DoesNotFit;
  if (!is_out_apart(call)) return Answer::MayOverlap;
  const Tensor& x = *call.x;
  const Tensor weight = first_of(*call.weight);
  if (call.weight->dim == 3) {
    const auto* const ends = call.group_ends ? static_cast<const int*>(call.group_ends->data) : nullptr;
    problem.groups = {ends, call.weight->sizes[0], call.weight->strides[0], /*are_alike=*/!call.group_ends};
  }
  problem.epilogue = call.epilogue;
  problem.is_pair = call.weight2 != nullptr;
  problem.n = weight.sizes[0];
  problem.k = weight.sizes[1];
  problem.m = 1;
  for (int axis = 0; axis + 1 < x.dim; ++axis) problem.m *= x.sizes[axis];
  const EpilogueInfo& epilogue = epilogue_info(call.epilogue);
  if (!epilogue.linear || !operands_fit(call, epilogue, &problem) || !scales_fit(call, &problem) ||
      !read_out_scale(call, &problem)) {
    return Answer::DoesNotFit;
  }
  if (!moments_fit(call, problem.n) || !stored_fits(call, &problem)) return Answer::DoesNotFit;
  problem.has_column_moments = call.column_moments;
  prepared->is_x_strided = as_strided(x, problem.m, problem.k, &problem.x);
  as_strided(weight, problem.n, problem.k, &problem.weight);
  problem.is_weight_transposed = problem.weight.row_stride == 1 && problem.weight.column_stride != 1;
  prepared->is_out_matrix = set_output(call.out, call.result_element(), &problem);
  const bool do_rows_overlap = prepared->is_out_matrix && problem.m > 1 && problem.out.row_stride < problem.n;
  if (do_rows_overlap && !call.is_out_apart) return Answer::MayOverlap;
  prepared->is_out_padded = call.is_out_padded;
  problem.alignment = std::min({alignment_of(x.data), alignment_of(weight.data), alignment_of(problem.out.data),
                                alignment_of(problem.stored.data)});
  if (call.weight2 && !read_weight2(*call.weight2, &problem)) return Answer::NoPair;
  problem.has_bias = has_bias(call) || call.operands.fold;
  problem.are_operands_contiguous = call.operands.fold || are_contiguous(problem);
  problem.is_batch_invariant = call.is_batch_invariant;
  prepared->has_cublas = x.is_cuda();
  prepared->fp32_order = call.fp32_order;
  prepared->split = call.split;
  prepared->scaled = call.scaled;
  if (call.described) {
    problem.device = *call.described;
    prepared->has_cublas = prepared->has_kernels = true;
  }
#if EPIGEMM_WITH_CUDA
  if (x.is_cuda() && !call.described) problem.device = cuda::device(x.device);
#endif
  return problem.is_empty() ? Answer::IsEmpty : Answer::Done;
}

}  // namespace epigemm::call
