#include "call/decide.h"
#include "epilogue/builtin.h"

#include <algorithm>
#include <limits>

#include "gemm/grid.h"
#include "gemm/planner/copies.h"
#include "gemm/planner/fallback.h"
#include "gemm/planner/family.h"

namespace epigemm::call {

const FP32Order fp32_orders[kFP32Orders] = {
    {1, {Arithmetic::IEEE}, false},
    {2, {Arithmetic::Split, Arithmetic::IEEE}, false},
    {2, {Arithmetic::Scaled, Arithmetic::TF32}, true},
    {3, {Arithmetic::Scaled, Arithmetic::TF32, Arithmetic::Split}, false},
    {1, {Arithmetic::TF32}, false},
    {1, {Arithmetic::TF32}, true},
    {1, {Arithmetic::Promoted}, false},
    {1, {Arithmetic::Fast}, false},
};

namespace {

// The same for batch-invariant calls, for which PyTorch's GEMM is not allowed.
constexpr FP32Order invariant_orders[kFP32Orders] = {
    {1, {Arithmetic::IEEE}, false},
    {2, {Arithmetic::Split, Arithmetic::IEEE}, false},
    {3, {Arithmetic::Scaled, Arithmetic::Split, Arithmetic::IEEE}, false},
    {3, {Arithmetic::Scaled, Arithmetic::Split, Arithmetic::IEEE}, false},
    {1, {Arithmetic::TF32}, false},
    {1, {Arithmetic::TF32}, false},
    {1, {Arithmetic::Promoted}, false},
    {1, {Arithmetic::Fast}, false},
};

constexpr int kAllocated = 256;  // bytes: PyTorch aligns new CUDA memory to at least this

// Whether TMA can read an fp32 matrix or its transpose, or one for each group: rows of whole 16 bytes, from multiples
// of them.
bool is_readable_by_tma(const Matrix& matrix, int64_t rows, int64_t columns, const Groups& groups) {
  constexpr int64_t kRowElements = 4;
  const bool is_transposed = matrix.column_stride != 1;
  const int64_t stride = is_transposed ? matrix.column_stride : matrix.row_stride;
  const bool are_apart = groups.count <= 1 || (groups.weight_stride > 0 && groups.weight_stride % kRowElements == 0);
  return (!is_transposed || matrix.row_stride == 1) && stride % kRowElements == 0 && are_apart &&
         stride >= (is_transposed ? rows : columns) && alignment_of(matrix.data) >= 16;
}

// Whether both are transposed, as for the gradient of a weight: a sum over the rows of two matrices that have been made
// since the last such call. No scale of their columns that is remembered is right, and the kernel that reads a weight
// as it lies would read these columns again one by one: 19 ms where there are 262144 rows.
bool are_transposed(const Matrix& x, const Matrix& weight) {
  return x.row_stride == 1 && x.column_stride != 1 && weight.row_stride == 1 && weight.column_stride != 1;
}

// The problem on fp16 slices, whose layout suits the kernels whatever the layout of the tensors is.
Problem on_slices(const Prepared& prepared, Arithmetic arithmetic, bool is_packed) {
  Problem problem = prepared.problem;
  problem.arithmetic = arithmetic;
  problem.is_weight_readable = is_readable_by_tma(problem.weight, problem.n, problem.k, problem.groups) &&
                               !are_transposed(problem.x, problem.weight);
  problem.x = {nullptr, ElementType::Float32, problem.k};
  problem.weight = {nullptr, ElementType::Float32, problem.k};
  problem.out = {nullptr, ElementType::Float32, problem.n};
  problem.alignment = kAllocated;
  problem.are_operands_contiguous = true;
  problem.is_packed = is_packed && !problem.groups;
  problem.is_tf32_allowed = order_of(prepared).is_tf32_allowed;
  return problem;
}

// Of a fused kernel that multiplies the tensors themselves, instead of one on slices; infinite if none is chosen.
double microseconds_instead(const Prepared& prepared, Arithmetic of_slices) {
  Problem problem = prepared.problem;
  if (!prepared.are_matrices() || !problem.are_operands_contiguous) return std::numeric_limits<double>::infinity();
  problem.is_tf32_allowed = of_slices == Arithmetic::Scaled;
  problem.arithmetic = problem.is_tf32_allowed ? Arithmetic::TF32 : Arithmetic::IEEE;
  return choose(problem).microseconds;
}

constexpr int64_t kRowBytes = 16;

// Whether the kernels on slices, or of 8 bits, can store the result directly: to a matrix with rows of whole 16 bytes.
bool is_storable(const Prepared& prepared) {
  const Problem& problem = prepared.problem;
  const int64_t row_elements = kRowBytes / element_bytes(problem.out.element);
  return prepared.is_out_matrix && (problem.n % row_elements == 0 || prepared.is_out_padded) &&
         problem.out.row_stride % row_elements == 0 && alignment_of(problem.out.data) >= kRowBytes;
}

// Whether copying the result from padded rows takes as long as slices save. Where groups end anywhere, nobody predicts
// what PyTorch's products take, one for each.
bool does_copy_take_gain(const Problem& problem, double fused_us) {
  if (problem.groups && !problem.groups.are_alike) return false;
  constexpr double kLaunchUs = 3.0;
  constexpr double kBytesPerUs = 4.0e6;  // device memory, roughly: copies of results are rare
  const double bytes = 8.0 * static_cast<double>(problem.m) * static_cast<double>(problem.n);
  const std::optional<measured::Choice> found = find_measured(problem);
  const double fallback_us = found ? found->fallback_microseconds : fallback_microseconds(problem);
  return fused_us + kLaunchUs + bytes / kBytesPerUs > fallback_us;
}

Tried try_slices(const Prepared& prepared, Arithmetic arithmetic) {
  const WeightSlices slices = arithmetic == Arithmetic::Split ? prepared.split : prepared.scaled;
  Tried tried;
  tried.problem = on_slices(prepared, arithmetic, slices.pack != nullptr);
  tried.chosen = choose(tried.problem);
  tried.is_padded = !is_storable(prepared);
  const double fused_us = tried.chosen.microseconds;
  if (!tried.chosen.plan.is_fused()) {
    tried.verdict = Verdict::NotPlanned;
  } else if (!prepared.has_kernels) {
    tried.verdict = Verdict::NoKernels;
  } else if (prepared.problem.is_batch_invariant) {
    tried.verdict = Verdict::Runs;
  } else if (slices.is_memory_short) {
    tried.verdict = Verdict::MemoryIsShort;
  } else if (tried.is_padded && does_copy_take_gain(tried.problem, fused_us)) {
    tried.verdict = Verdict::CopyTakesGain;
  } else {
    tried.other_microseconds = microseconds_instead(prepared, arithmetic);
    tried.verdict = tried.other_microseconds < fused_us ? Verdict::OtherIsFaster : Verdict::Runs;
  }
  return tried;
}

// The problem of 8 bits, whose result is written to rows of whole 16 bytes.
Problem of_8_bits(const Prepared& prepared, Arithmetic arithmetic) {
  Problem problem = prepared.problem;
  problem.arithmetic = arithmetic;
  problem.is_out_padded = prepared.is_out_padded;
  if (is_storable(prepared)) return problem;
  problem.is_out_padded = true;
  problem.out = {nullptr, problem.out.element, round_up(problem.n, kRowBytes / element_bytes(problem.out.element))};
  problem.alignment = std::min(alignment_of(problem.x.data), alignment_of(problem.weight.data));
  return problem;
}

Verdict verdict_of(const Prepared& prepared, const Candidate& chosen) {
  return !chosen.plan.is_fused() ? Verdict::NotPlanned : prepared.has_kernels ? Verdict::Runs : Verdict::NoKernels;
}

Tried try_8_bits(const Prepared& prepared, Arithmetic arithmetic) {
  Tried tried;
  tried.problem = of_8_bits(prepared, arithmetic);
  tried.is_padded = !is_storable(prepared);
  if (!prepared.is_x_matrix() || !prepared.is_weight_matrix()) {
    tried.verdict = Verdict::NotRepresentable;
    return tried;
  }
  tried.chosen = choose(tried.problem);
  tried.verdict = verdict_of(prepared, tried.chosen);
  return tried;
}

Copies copies_of(const Prepared& prepared) {
  return prepared.is_x_strided && prepared.is_out_matrix ? copies_for(prepared.problem) : Copies{};
}

// Whether a kernel that multiplies the tensors themselves, or copies of them, can address them. The kernel in fp32
// multiply-adds reads any strides.
bool is_readable(const Prepared& prepared, Arithmetic arithmetic, const Copies& copies) {
  const bool is_strided = arithmetic == Arithmetic::IEEE && prepared.problem.x.element == ElementType::Float32;
  if (!is_strided) {
    return (copies.x || prepared.is_x_matrix()) && (copies.weight || prepared.is_weight_matrix()) &&
           prepared.is_out_matrix;
  }
  return prepared.is_x_strided && prepared.is_out_matrix && prepared.problem.are_operands_contiguous;
}

bool reads_any_rows(const Plan& plan) { return plan.is_fused() && family_of(plan.family).reads_any_rows(plan); }

// Takes a kernel that reads the operands as they lie, if it is faster than one that reads copies, or was measured to
// be. Where nothing is copied, it is the one of which the reason against a fused kernel tells.
void take_as_they_lie(Tried* tried) {
  Problem problem = tried->problem;
  problem.copies = {};
  if (const std::optional<measured::Choice> found = find_measured(tried->problem)) {
    if (reads_any_rows(found->plan)) tried->problem = problem;
    return;
  }
  const Candidate other = choose(problem);
  const bool is_alone = std::min(problem.n, problem.k) < kLeastCopied && why_not_covered(problem).empty();
  const bool is_faster =
      other.plan.is_fused() && (!tried->chosen.plan.is_fused() || other.microseconds < tried->chosen.microseconds);
  if (!is_alone && !is_faster) return;
  tried->problem = problem;
  tried->chosen = other;
}

Problem problem_of(const Prepared& prepared, const Decision& decision) {
  if (is_on_slices(decision.arithmetic)) return on_slices(prepared, decision.arithmetic, decision.is_packed);
  if (is_8_bits(prepared.problem.x.element)) return of_8_bits(prepared, decision.arithmetic);
  Problem problem = prepared.problem;
  problem.arithmetic = decision.arithmetic;
  problem.copies = decision.copies;
  return problem;
}

// The arithmetic's fastest fused plan: measured, or by prediction on copies or, if it reads any rows, without them.
void take_fastest(const Prepared& prepared, Decision* decision) {
  Problem problem = problem_of(prepared, *decision);
  if (const std::optional<measured::Choice> found = find_measured(problem)) {
    decision->plan = found->plan;
    if (reads_any_rows(found->plan)) decision->copies = {};
    return;
  }
  const std::vector<Candidate> candidates = rank_candidates(problem);
  if (!candidates.empty()) decision->plan = candidates.front().plan;
  if (!problem.copies.any() || !is_readable(prepared, decision->arithmetic, {})) return;
  problem.copies = {};
  const std::vector<Candidate> others = rank_candidates(problem);
  if (others.empty() || (!candidates.empty() && candidates.front().microseconds <= others.front().microseconds)) return;
  decision->plan = others.front().plan;
  decision->copies = {};
}

}  // namespace

const FP32Order& order_of(const Prepared& prepared) {
  const FP32Order* const orders = prepared.problem.is_batch_invariant ? invariant_orders : fp32_orders;
  const ElementType element = prepared.problem.x.element;
  return orders[element == ElementType::Float32 || is_8_bits(element) ? prepared.fp32_order : 0];
}

Tried try_arithmetic(const Prepared& prepared, Arithmetic arithmetic) {
  if (is_on_slices(arithmetic)) return try_slices(prepared, arithmetic);
  if (is_8_bits(prepared.problem.x.element)) return try_8_bits(prepared, arithmetic);
  Tried tried;
  tried.problem = prepared.problem;
  tried.problem.arithmetic = arithmetic;
  tried.problem.copies = copies_of(prepared);
  if (!is_readable(prepared, arithmetic, tried.problem.copies)) {
    tried.verdict = Verdict::NotRepresentable;
    return tried;
  }
  tried.chosen = choose(tried.problem);
  if (tried.problem.copies.any() && is_readable(prepared, arithmetic, {})) take_as_they_lie(&tried);
  tried.verdict = verdict_of(prepared, tried.chosen);
  return tried;
}

Decision decide(const Prepared& prepared, std::vector<Tried>* tried) {
  const Problem& problem = prepared.problem;
  const ElementType element = problem.x.element;
  const bool has_device = problem.device.capability != 0 && element != ElementType::Float64;
  const FP32Order& order = order_of(prepared);
  Decision decision;
  bool is_decided = !has_device;
  for (int i = 0; i < order.count && (tried || !is_decided); ++i) {
    const Arithmetic arithmetic = order.tried[i];
    const bool counts = !is_decided;
    if (!counts && (!tried || (is_on_slices(arithmetic) && problem.device.capability == 0))) continue;
    const Tried found = try_arithmetic(prepared, arithmetic);
    if (counts && found.verdict == Verdict::Runs) {
      decision = {found.chosen.plan, arithmetic, found.problem.is_packed, found.is_padded, found.problem.copies};
      is_decided = true;
    }
    if (counts && found.verdict == Verdict::NotPlanned && element_bytes(element) == 2) {
      decision.is_one_kernel = found.chosen.is_one_kernel;
    }
    if (tried) tried->push_back(found);
  }
  return decision;
}

Decision decision_of(const Prepared& prepared, const ForcedPlan& forced) {
  Decision decision{forced.plan, forced.arithmetic};
  if (is_on_slices(forced.arithmetic)) {
    const WeightSlices& slices = forced.arithmetic == Arithmetic::Split ? prepared.split : prepared.scaled;
    decision.is_packed = slices.pack != nullptr;
    decision.is_padded = !is_storable(prepared);
  } else if (is_8_bits(prepared.problem.x.element)) {
    decision.is_padded = !is_storable(prepared);
  } else if (forced.is_fastest || (forced.plan.is_fused() && !reads_any_rows(forced.plan))) {
    decision.copies = copies_of(prepared);
  }
  if (forced.is_fastest) take_fastest(prepared, &decision);
  return decision;
}

std::string why_not_forced(const Prepared& prepared, const ForcedPlan& forced, const Decision& decision) {
  if (!decision.plan.is_fused() && !forced.is_fastest) return {};
  if (!prepared.has_kernels) return kNoGemmKernels;
  if (!is_on_slices(decision.arithmetic) && !is_readable(prepared, decision.arithmetic, decision.copies)) {
    return why_not_readable(prepared);
  }
  Problem problem = problem_of(prepared, decision);
  // Where calls never choose a family, it runs if its plan is forced.
  problem.is_any_family_offered = !forced.is_fastest;
  // A forced plan may be less accurate than its arithmetic promises. (So its accuracy can be measured.)
  const std::string why_not = forced.is_fastest ? why_not_accurate(problem) : why_not_covered(problem);
  return why_not.empty() ? why_not_planned(problem, decision.plan) : why_not;
}

const char* why_not_readable(const Prepared& prepared) {
  if (!prepared.is_x_matrix()) {
    return "x is not a row-major matrix: its last dimension must be contiguous and the others one stride apart";
  }
  if (!prepared.is_weight_matrix()) return "weight is not row-major: its in_features must be contiguous";
  if (!prepared.is_out_matrix) return "out is not a row-major matrix";
  return prepared.problem.are_operands_contiguous ? "" : "a per-column operand is not contiguous";
}

namespace {

// fp32 behind another epilogue than a ReLU. With up to four rows PyTorch's addmm takes at most 1.5% longer than mm, and
// mm up to 29% longer than addmm; with eight and more rows addmm may take half as long again (torch 2.11 on an H100, 25
// sizes).
bool is_bias_added_by_gemm(const Prepared& prepared) {
  constexpr int kFewRows = 4;
  const Problem& problem = prepared.problem;
  const bool is_measured = problem.x.element == ElementType::Float32 && problem.device.multiprocessors > 0;
  return is_measured && problem.m <= kFewRows && !problem.is_batch_invariant && !order_of(prepared).is_tf32_allowed;
}

}  // namespace

Gemm choose_gemm(const Prepared& prepared, const Decision& decision) {
  Problem problem = prepared.problem;
  const EpilogueId epilogue = problem.epilogue;
  if (epilogue_info(epilogue).bias == 0 || !problem.has_bias) return Gemm::Product;
  // Product and bias may cancel: a product that is rounded to 16 bits before its bias is added loses the difference.
  const bool is_rounded = element_bytes(problem.x.element) == 2;
  if (epilogue != EpilogueId::bias && epilogue != EpilogueId::bias_relu) {
    return is_rounded || is_bias_added_by_gemm(prepared) ? Gemm::WithBias : Gemm::Product;
  }
  if (!prepared.has_cublas) return is_rounded || epilogue == EpilogueId::bias ? Gemm::WithBias : Gemm::Product;
  const bool is_double = problem.x.element == ElementType::Float64;
  if (!problem.is_empty() && !is_double && problem.device.multiprocessors > 0) {
    problem.arithmetic = Arithmetic::IEEE;
    problem.is_tf32_allowed = order_of(prepared).is_tf32_allowed;
    // Where cuBLAS would split K, or takes longer for a ReLU than an elementwise kernel does, its GEMM with a fused
    // ReLU is slower than a GEMM and a separate ReLU.
    const bool is_one_kernel =
        decision.is_one_kernel ? *decision.is_one_kernel : is_fallback_expected_in_one_kernel(problem);
    if (!is_one_kernel) return is_rounded ? Gemm::WithBias : Gemm::Product;
  }
  if (epilogue == EpilogueId::bias) return Gemm::WithBias;
  // With K = 0 PyTorch leaves the ReLU out. For a single column it multiplies a matrix by a vector, and rounds before
  // it adds the bias.
  const bool has_gaps = !prepared.is_out_matrix || (problem.m > 1 && problem.out.row_stride != problem.n);
  const bool adds_relu =
      !problem.is_empty() && !is_double && problem.n > 1 && !has_gaps && problem.operands[0].stride == 1;
  if (adds_relu) return Gemm::WithBiasAndReLU;
  return is_rounded ? Gemm::WithBias : Gemm::Product;
}

int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int>(address == 0 ? kAllocated : std::min<uintptr_t>(address & (~address + 1), kAllocated));
}

bool are_contiguous(const Problem& problem) {
  const EpilogueInfo& epilogue = epilogue_info(problem.epilogue);
  for (int i = 1; i < epilogue.operand_count; ++i) {
    const OperandValue& value = problem.operands[i - 1];
    const KindTraits traits = traits_of(epilogue.operands[i].kind);
    const bool is_vector = traits.by_row != traits.by_column;
    const int64_t length = traits.by_row ? problem.m : problem.n;
    if (is_vector && length > 1 && value.data && value.stride != 1) return false;
  }
  return true;
}

}  // namespace epigemm::call
