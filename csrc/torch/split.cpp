// epigemm::_split_rows_out, _split_linear_out and _plan_split: fp32 tensors -> fp16 pieces -> GEMM -> guard.
#include "gemm/split/dispatch.h"
#include "gemm/split/layout.h"
#include "gemm/split/split_rows.h"
#include "gemm/split/tiles.h"
#include "torch/plans.h"

#if EPIGEMM_WITH_CUDA
#include "elementwise/launch.h"
#endif
#if EPIGEMM_WITH_SM90
#include "gemm/split/kernels.h"
#include "gemm/split/repair.h"
#endif

namespace epigemm::binding {
namespace {

using split::SplitMatrix;
using split::StridedMatrix;

StridedMatrix strided(const TensorView& tensor, const char* argument) {
  check(tensor.dim() == 2, argument, " has shape ", Shape{tensor}, ", expected 2 dimensions");
  check(element_of(tensor, argument) == ElementType::Float32, argument, " must be float32");
  return {static_cast<const float*>(tensor.data()), tensor.size(0), tensor.size(1), tensor.stride(0), tensor.stride(1)};
}

// Bytes for pieces. Sections are laid out from an address that is aligned for all of them.
void* buffer_of(const TensorView& buffer, int64_t bytes, const char* argument) {
  check(buffer.dtype() == aoti_torch_dtype_uint8() && buffer.dim() == 1 && buffer.is_contiguous(), argument,
        " must be a contiguous one-dimensional uint8 tensor");
  check(buffer.size(0) >= bytes, argument, " has ", buffer.size(0), " bytes, expected at least ", bytes);
  check(reinterpret_cast<uintptr_t>(buffer.data()) % split::kBufferAlignment == 0, argument,
        " must start at a multiple of ", split::kBufferAlignment, " bytes");
  return buffer.mutable_data();
}

void check_same_device(const TensorView& tensor, const TensorView& x, const char* argument) {
  check(tensor.is_beside(x), argument, " is on another device");
}

void split_rows_out(const TensorView& matrix, int64_t pieces, const TensorView& pack) {
  check(pieces == 1 || pieces == 2, "pieces must be 1 or 2, got ", pieces);
  const StridedMatrix rows = strided(matrix, "matrix");
  const int count = static_cast<int>(pieces);
  check_same_device(pack, matrix, "pack");
  void* buffer = buffer_of(pack, split::split_bytes(rows.rows, rows.columns, count), "pack");
  if (!matrix.is_cuda()) {
    split::split_rows_cpu(rows, count, buffer);
    return;
  }
#if EPIGEMM_WITH_CUDA
  const int device = matrix.device();
  const CurrentDevice guard(device);
  split::split_rows_cuda(rows, count, buffer, current_stream(device));
  const std::string error = cuda::last_error();
  check(error.empty(), "the rows could not be split: ", error);
#else
  check(false, "epigemm was built without CUDA");
#endif
}

Arithmetic pieces_arithmetic(const Name& name) {
  const Arithmetic arithmetic = arithmetic_named(name);
  check(arithmetic == Arithmetic::Split || arithmetic == Arithmetic::Scaled, "arithmetic must be split or scaled, got ",
        name.text());
  return arithmetic;
}

split::SplitTraits planned_traits(const Name& epilogue, int64_t m, int64_t n, int64_t k, bool packed,
                                  const Name& arithmetic, int64_t capability, int64_t multiprocessors) {
  check(m >= 0 && n >= 0 && k >= 0, "m, n and k must not be negative, got ", m, ", ", n, ", ", k);
  check(multiprocessors > 0, "multiprocessors must be positive, got ", multiprocessors);
  split::SplitTraits traits;
  traits.epilogue = epilogue_named(epilogue).id;
  traits.arithmetic = pieces_arithmetic(arithmetic);
  traits.m = m;
  traits.n = n;
  traits.k = k;
  traits.packed = packed;
  traits.capability = static_cast<int>(capability);
  traits.multiprocessors = static_cast<int>(multiprocessors);
  return traits;
}

TileText describe(const split::SplitTraits& traits, int index) {
  const split::Tile& tile = split::tile_of(traits.arithmetic, index);
  return {tile.m, tile.n, split::kTileK, tile.cluster_m, tile.cluster_n, schedule_name(tile.schedule), tile.transposed};
}

std::string plan_split(const Name& epilogue, int64_t m, int64_t n, int64_t k, bool packed, const Name& arithmetic,
                       bool tf32_allowed, int64_t capability, int64_t multiprocessors, bool has_bias, int64_t device) {
  split::SplitTraits traits = planned_traits(epilogue, m, n, k, packed, arithmetic, capability, multiprocessors);
  traits.tf32_allowed = tf32_allowed;
  traits.has_bias = has_bias;
  traits.device = static_cast<int>(device);
  Answer answer{why_not_fused(traits), {}, std::nullopt, second_path_microseconds(traits)};
  if (why_not_possible(traits).empty()) {
    answer.candidates = rank_candidates(traits);
    answer.measured = measured_choice(traits);
  }
  return plan_json(answer, [&](int index) { return describe(traits, index); });
}

// What a batch-invariant call runs on. "why_not_accurate" is a reason that K alone gives: another arithmetic takes
// over.
std::string plan_split_invariant(const Name& epilogue, int64_t m, int64_t n, int64_t k, bool packed,
                                 const Name& arithmetic, int64_t capability, int64_t multiprocessors) {
  const split::SplitTraits traits = planned_traits(epilogue, m, n, k, packed, arithmetic, capability, multiprocessors);
  const Answer answer{why_not_possible(traits), {invariant_candidate(traits)}, std::nullopt, 0};
  return plan_json(
      answer, [&](int index) { return describe(traits, index); },
      ", \"why_not_accurate\": \"" + why_not_accurate(traits) + "\"");
}

#if EPIGEMM_WITH_CUDA

#if EPIGEMM_WITH_SM90

struct SplitCall {
  split::SplitProblem problem;
  StridedMatrix x, weight;
  int pieces = 2;
};

// The kernels store whole 16 bytes: what is left of the last four columns is written too, so it must be the caller's.
Matrix output_matrix(const TensorView& out, int64_t rows, int64_t columns) {
  const int64_t width = split::round_up_to(columns, 4);
  check(out.dim() == 2 && out.size(0) == rows && out.size(1) == width, "out has shape ", Shape{out}, ", expected [",
        rows, ", ", width, "]: N rounded up to 16 bytes");
  check(element_of(out, "out") == ElementType::Float32, "out must be float32");
  const int64_t row_stride = rows > 1 ? out.stride(0) : width;
  check(out.stride(1) == 1 && row_stride % 4 == 0 && row_stride >= width &&
            reinterpret_cast<uintptr_t>(out.data()) % 16 == 0,
        "out must be row-major, its rows and its start at multiples of 16 bytes");
  return {out.mutable_data(), row_stride};
}

// Any row-major matrix: the fp32 kernel stores single elements.
Matrix any_output_matrix(const TensorView& out, int64_t rows, int64_t columns) {
  check(out.dim() == 2 && out.size(0) == rows && out.size(1) == columns, "out has shape ", Shape{out}, ", expected [",
        rows, ", ", columns, "]");
  check(element_of(out, "out") == ElementType::Float32, "out must be float32");
  check(out.stride(1) == 1 || columns <= 1, "out must be row-major");
  return {out.mutable_data(), out.stride(0)};
}

SplitCall make_call(const Name& epilogue_name, const TensorView& x, const TensorView& weight,
                    const std::optional<TensorView>& bias, const List<TensorView>& operands,
                    const List<double>& scalars, Arithmetic arithmetic, const TensorView& out) {
  const EpilogueInfo& epilogue = epilogue_named(epilogue_name);
  SplitCall call;
  call.x = strided(x, "x");
  call.weight = strided(weight, "weight");
  call.pieces = arithmetic == Arithmetic::Split ? 2 : 1;
  check(call.x.columns == call.weight.columns, "x has shape ", Shape{x}, " and weight ", Shape{weight},
        ": the last dimensions must agree");
  check(x.is_cuda(), "x must be on a CUDA device");
  check_same_device(weight, x, "weight");
  check_same_device(out, x, "out");
  Problem& problem = call.problem.problem;
  problem.epilogue = epilogue.id;
  problem.element = ElementType::Float32;
  problem.arithmetic = arithmetic;
  problem.m = call.x.rows;
  problem.n = call.weight.rows;
  problem.k = call.x.columns;
  problem.out = arithmetic == Arithmetic::IEEE ? any_output_matrix(out, problem.m, problem.n)
                                               : output_matrix(out, problem.m, problem.n);
  fill_operands(epilogue, x, problem.n, bias, operands, scalars, problem.operands);
  for (int i = 1; i < epilogue.operand_count; ++i) {
    const OperandValue& value = problem.operands[i - 1];
    check(epilogue.operands[i].kind != OperandKind::PerColumn || !value.data || value.stride == 1 || problem.n == 1,
          epilogue.operands[i].name, " must be contiguous");
  }
  problem.device = x.device();
  problem.capability = cuda::device(problem.device).capability;
  problem.multiprocessors = cuda::device(problem.device).multiprocessors;
  return call;
}

split::SplitTraits traits_of(const Problem& problem, bool packed) {
  split::SplitTraits traits;
  traits.epilogue = problem.epilogue;
  traits.arithmetic = problem.arithmetic;
  traits.m = problem.m;
  traits.n = problem.n;
  traits.k = problem.k;
  traits.packed = packed;
  traits.has_bias = problem.operands[0].data != nullptr;
  traits.capability = problem.capability;
  traits.multiprocessors = problem.multiprocessors;
  traits.device = problem.device;
  return traits;
}

#endif

void split_linear_out(const Name& epilogue, const TensorView& x, const TensorView& weight,
                      const std::optional<TensorView>& pack, const TensorView& workspace,
                      const std::optional<TensorView>& bias, const List<TensorView>& operands,
                      const List<double>& scalars, const Name& arithmetic_name, const List<int64_t>& plan_numbers,
                      const TensorView& out) {
#if EPIGEMM_WITH_SM90
  const Arithmetic arithmetic = pieces_arithmetic(arithmetic_name);
  SplitCall call = make_call(epilogue, x, weight, bias, operands, scalars, arithmetic, out);
  Problem& problem = call.problem.problem;
  const split::SplitTraits traits = traits_of(problem, pack.has_value());
  // A forced plan may run where the split is not the more accurate product: that is how its limit is measured.
  std::string why_not = why_not_possible(traits);
  if (why_not.empty() && plan_numbers.values.empty()) why_not = why_not_accurate(traits);
  check(why_not.empty(), why_not);
  const Plan plan = plan_numbers.values.empty() ? chosen_plan(traits)
                                                : forced_plan(plan_numbers.values, split::tile_count(arithmetic));

  const int64_t x_bytes = split::split_bytes(problem.m, problem.k, call.pieces);
  const int64_t weight_bytes = split::split_bytes(problem.n, problem.k, call.pieces);
  check_same_device(workspace, x, "workspace");
  auto* buffer = static_cast<char*>(buffer_of(workspace, x_bytes + (pack ? 0 : weight_bytes), "workspace"));
  void* weight_buffer = buffer + x_bytes;
  if (pack) {
    check_same_device(*pack, x, "pack");
    weight_buffer = buffer_of(*pack, weight_bytes, "pack");
  }
  call.problem.x = split::split_view(buffer, problem.m, problem.k, call.pieces);
  call.problem.weight = split::split_view(weight_buffer, problem.n, problem.k, call.pieces);

  const CurrentDevice guard(problem.device);
  problem.stream = current_stream(problem.device);
  if (!pack) split::split_rows_cuda(call.weight, call.pieces, weight_buffer, problem.stream);
  split::split_rows_cuda(call.x, call.pieces, buffer, problem.stream);
  const char* refused = split::find_launch(problem.epilogue, arithmetic)(call.problem, plan);
  check(!refused, "the fused kernel could not be launched: ", refused ? refused : "", " ", cuda::last_error());
  split::find_repair(problem.epilogue)({call.problem, call.x, call.weight});
  const std::string error = cuda::last_error();
  check(error.empty(), "the kernels on fp16 pieces could not be launched: ", error);
#else
  (void)epilogue, (void)x, (void)weight, (void)pack, (void)workspace, (void)bias, (void)operands, (void)scalars;
  (void)arithmetic_name, (void)plan_numbers, (void)out;
  check(false, "epigemm was built without the Hopper GEMM kernels");
#endif
}

void fp32_linear_out(const Name& epilogue, const TensorView& x, const TensorView& weight,
                     const std::optional<TensorView>& bias, const List<TensorView>& operands,
                     const List<double>& scalars, const TensorView& out) {
#if EPIGEMM_WITH_SM90
  SplitCall call = make_call(epilogue, x, weight, bias, operands, scalars, Arithmetic::IEEE, out);
  Problem& problem = call.problem.problem;
  const std::string why_not = why_not_possible(traits_of(problem, /*packed=*/false));
  check(why_not.empty(), why_not);
  const CurrentDevice guard(problem.device);
  problem.stream = current_stream(problem.device);
  split::find_fp32(problem.epilogue)({call.problem, call.x, call.weight});
  const std::string error = cuda::last_error();
  check(error.empty(), "the fp32 kernel could not be launched: ", error);
#else
  (void)epilogue, (void)x, (void)weight, (void)bias, (void)operands, (void)scalars, (void)out;
  check(false, "epigemm was built without the Hopper GEMM kernels");
#endif
}

#endif

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_plan_split", TORCH_BOX(&epigemm::binding::plan_split));
  m.impl("_plan_split_invariant", TORCH_BOX(&epigemm::binding::plan_split_invariant));
  m.impl("_split_rows_out", TORCH_BOX(&epigemm::binding::split_rows_out));
}

#if EPIGEMM_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_split_linear_out", TORCH_BOX(&epigemm::binding::split_linear_out));
  m.impl("_fp32_linear_out", TORCH_BOX(&epigemm::binding::fp32_linear_out));
}
#endif
