#include "call/linear.h"

#include <algorithm>
#include <limits>
#include <string>

#include "call/operands.h"
#include "gemm/planner/fallback.h"
#include "gemm/planner/planner.h"
#include "gemm/sm90_fp16x3/layout.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#endif
#if EPIGEMM_WITH_SM90
#include "gemm/launch.h"
#endif

namespace epigemm::call {

const FP32Road fp32_roads[kFP32Roads] = {
    {0, {}, false},
    {1, {Arithmetic::Split}, false},
    {2, {Arithmetic::Scaled, Arithmetic::TF32}, true},
    {3, {Arithmetic::Scaled, Arithmetic::TF32, Arithmetic::Split}, false},
    {1, {Arithmetic::TF32}, false},
    {1, {Arithmetic::TF32}, true},
};

namespace {

constexpr int kAllocated = 256;  // bytes: what PyTorch aligns new CUDA memory to, at least

int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return static_cast<int>(address == 0 ? kAllocated : std::min<uintptr_t>(address & (~address + 1), kAllocated));
}

bool are_contiguous(const EpilogueInfo& epilogue, const Problem& problem) {
  for (int i = 1; i < epilogue.operand_count; ++i) {
    const OperandValue& value = problem.operands[i - 1];
    const bool is_vector = epilogue.operands[i].kind == OperandKind::PerColumn && value.data;
    if (is_vector && value.stride != 1 && problem.n > 1) return false;
  }
  return true;
}

// A call as the planner sees it.
struct Prepared {
  Problem problem;
  bool is_x_matrix = false, is_weight_matrix = false, is_out_matrix = true;

  bool are_matrices() const { return is_x_matrix && is_weight_matrix && is_out_matrix; }
};

bool shapes_fit(const LinearCall& call) {
  const Tensor &x = *call.x, &weight = *call.weight;
  if (x.dim < 1 || weight.dim != 2 || x.sizes[x.dim - 1] != weight.sizes[1]) return false;
  if (weight.element != x.element || !weight.is_beside(x)) return false;
  if (!call.out) return true;
  const Tensor& out = *call.out;
  if (out.dim != x.dim || out.element != x.element || !out.is_beside(x)) return false;
  return std::equal(out.sizes, out.sizes + out.dim - 1, x.sizes) && out.sizes[out.dim - 1] == weight.sizes[0];
}

// Whether the caller's `out` can be written: where it is not clear, the cold path looks closer.
bool is_out_apart(const LinearCall& call) {
  if (!call.out) return true;
  const Tensor& out = *call.out;
  if (!out.is_contiguous() || !are_apart(out, *call.x) || !are_apart(out, *call.weight)) return false;
  for (const Tensor* other : {call.bias, call.vectors[0], call.vectors[1], call.scalar}) {
    if (other && !are_apart(out, *other)) return false;
  }
  for (int i = 0; call.fold && i < 6; ++i) {
    if (call.fold->vectors[i] && !are_apart(out, *call.fold->vectors[i])) return false;
  }
  return true;
}

bool operands_fit(const LinearCall& call, const EpilogueInfo& epilogue, Problem* problem) {
  if (call.fold) return fold_fits(*call.fold, *call.x, problem->n);
  const Operands given{call.bias, call.vectors, call.scalar, call.has_number, call.number};
  return fill_operands(epilogue, given, *call.x, problem->n, problem->operands);
}

// False where the arguments do not fit, or nothing is multiplied.
bool prepare(const LinearCall& call, Prepared* prepared) {
  Problem& problem = prepared->problem;
  if (!shapes_fit(call) || !is_out_apart(call)) return false;
  const Tensor &x = *call.x, &weight = *call.weight;
  problem.epilogue = call.epilogue;
  problem.n = weight.sizes[0];
  problem.k = weight.sizes[1];
  problem.m = 1;
  for (int axis = 0; axis + 1 < x.dim; ++axis) problem.m *= x.sizes[axis];
  if (problem.m == 0 || problem.n == 0 || problem.k == 0) return false;
  const EpilogueInfo& epilogue = epilogue_info(call.epilogue);
  if (!epilogue.linear || !operands_fit(call, epilogue, &problem)) return false;
  prepared->is_x_matrix = as_matrix(x, problem.m, problem.k, &problem.x);
  prepared->is_weight_matrix = as_matrix(weight, problem.n, problem.k, &problem.weight);
  problem.out = {nullptr, x.element, problem.m > 1 ? problem.n : (problem.n + 15) / 16 * 16};
  problem.alignment = std::min(alignment_of(x.data), alignment_of(weight.data));
  if (call.out) problem.alignment = std::min(problem.alignment, alignment_of(call.out->data));
  problem.has_bias = call.bias != nullptr || call.fold != nullptr;
  problem.are_operands_contiguous = call.fold != nullptr || are_contiguous(epilogue, problem);
#if EPIGEMM_WITH_CUDA
  if (x.is_cuda()) problem.device = cuda::device(x.device);
#endif
  return true;
}

// What runs.
struct Road {
  Answer answer = Answer::Done;  // Elsewhere: the cold path decides
  Plan plan;                     // the fallback's where nothing is fused
  Arithmetic arithmetic = Arithmetic::IEEE;

  bool is_on_slices() const {
    return plan.is_fused() && (arithmetic == Arithmetic::Split || arithmetic == Arithmetic::Scaled);
  }
};

// The problem on fp16 slices: they lie as the kernels want them, wherever the tensors lie.
Problem on_slices(const Prepared& prepared, Arithmetic arithmetic, bool is_packed, bool is_tf32_allowed) {
  Problem problem = prepared.problem;
  problem.arithmetic = arithmetic;
  problem.x = {nullptr, ElementType::Float32, problem.k};
  problem.weight = {nullptr, ElementType::Float32, problem.k};
  problem.out = {nullptr, ElementType::Float32, problem.n};
  problem.alignment = kAllocated;
  problem.is_packed = is_packed;
  problem.is_tf32_allowed = is_tf32_allowed;
  return problem;
}

double tf32_microseconds(const Prepared& prepared) {
  Problem problem = prepared.problem;
  if (!prepared.are_matrices() || !problem.are_operands_contiguous) return std::numeric_limits<double>::infinity();
  problem.arithmetic = Arithmetic::TF32;
  problem.is_tf32_allowed = true;
  return choose(problem).microseconds;
}

// Whether the kernels on slices can store the result: rows of whole 16 bytes.
bool is_storable(const LinearCall& call, const Problem& problem) {
  constexpr int64_t kRowElements = 4;
  return problem.n % kRowElements == 0 && (!call.out || alignment_of(call.out->data) >= 16);
}

// fp16 slices: a plan, the fallback's (another arithmetic is tried), or an answer of the cold path's.
Road try_slices(const LinearCall& call, const Prepared& prepared, const FP32Road& road, int index) {
  const Arithmetic arithmetic = road.tried[index];
  const bool is_packed = call.pack_use == PackUse::Keep || call.pack;
  const Problem problem = on_slices(prepared, arithmetic, is_packed, road.is_tf32_allowed);
  const Candidate chosen = choose(problem);
  if (!chosen.plan.is_fused()) return {};
  // The pack at hand is that of the road's first arithmetic; one that is still to be made is made by the cold path.
  const bool lacks_pack = is_packed && (!call.pack || index > 0);
  const bool is_readable = prepared.is_x_matrix || call.x->dim == 2;
  if (lacks_pack || !is_readable || !is_storable(call, problem) || !prepared.problem.are_operands_contiguous) {
    return {Answer::Elsewhere, {}, arithmetic};
  }
  if (arithmetic == Arithmetic::Scaled && tf32_microseconds(prepared) < chosen.microseconds) return {};
  return {Answer::Done, chosen.plan, arithmetic};
}

Road fp32_road(const LinearCall& call, Prepared& prepared) {
  const FP32Road& road = fp32_roads[call.fp32_road];
  for (int i = 0; i < road.count; ++i) {
    if (road.tried[i] == Arithmetic::TF32) {
      prepared.problem.arithmetic = Arithmetic::TF32;
      const Plan plan = prepared.are_matrices() ? choose_plan(prepared.problem) : Plan{};
      if (plan.is_fused()) return {Answer::Done, plan, Arithmetic::TF32};
    } else {
      const Road found = try_slices(call, prepared, road, i);
      if (found.plan.is_fused() || found.answer != Answer::Done) return found;
    }
  }
  prepared.problem.arithmetic = Arithmetic::IEEE;
  prepared.problem.is_tf32_allowed = road.is_tf32_allowed;
  return {};
}

Road choose_road(const LinearCall& call, Prepared& prepared) {
  if (!call.x->is_cuda() || call.x->element == ElementType::Float64) return {};
  if (call.x->element == ElementType::Float32) return fp32_road(call, prepared);
  if (!prepared.are_matrices()) return {};
  return {Answer::Done, choose_plan(prepared.problem), Arithmetic::IEEE};
}

// fp16 slices of x and, where there is no pack, of the weight.
int64_t slices_bytes(const LinearCall& call, const Road& road, const Problem& problem) {
  const int pieces = road.arithmetic == Arithmetic::Split ? sm90_fp16x3::kPieces : 1;
  const int64_t weight = call.pack ? 0 : sm90_fp16x3::split_bytes(problem.n, problem.k, pieces);
  return sm90_fp16x3::split_bytes(problem.m, problem.k, pieces) + weight;
}

// How much PyTorch's GEMM is to do: where cuBLAS is slower with a bias, it comes in a kernel of its own.
Gemm choose_gemm(const LinearCall& call, const Problem& problem) {
  if (!call.bias) return Gemm::Product;
  if (!call.x->is_cuda()) return problem.epilogue == EpilogueId::bias ? Gemm::WithBias : Gemm::Product;
  Problem with_bias = problem;
  with_bias.epilogue = EpilogueId::bias;
  if (problem.device.multiprocessors > 0 && problem.x.element != ElementType::Float64 &&
      !is_fallback_expected_in_one_kernel(with_bias)) {
    return Gemm::Product;
  }
  if (problem.epilogue == EpilogueId::bias) return Gemm::WithBias;
  // A single column PyTorch computes as a matrix times a vector, and rounds before it adds the bias.
  const bool is_relu = problem.epilogue == EpilogueId::bias_relu && problem.n > 1 && call.bias->is_contiguous();
  return is_relu && problem.x.element != ElementType::Float64 ? Gemm::WithBiasAndReLU : Gemm::Product;
}

bool does_everything(const LinearCall& call, Gemm gemm) {
  if (call.epilogue == EpilogueId::bias) return !call.fold && (gemm == Gemm::WithBias || !call.bias);
  return gemm == Gemm::WithBiasAndReLU;
}

Answer run_fallback(const LinearCall& call, Prepared& prepared, void* fold_memory, void* stream, Torch& torch) {
  Problem& problem = prepared.problem;
  const Gemm gemm = choose_gemm(call, problem);
  Tensor product;
  if (!torch.gemm(gemm, &product)) return Answer::Raised;
  if (does_everything(call, gemm)) return Answer::Done;
  if (call.fold) run_fold(*call.fold, *call.x, problem.n, fold_memory, stream, problem.operands);
  ElementwiseProblem elementwise;
  elementwise.epilogue = call.epilogue;
  elementwise.element = call.x->element;
  elementwise.dimensions = 2;
  elementwise.sizes[0] = problem.m;
  elementwise.sizes[1] = problem.n;
  for (int tensor : {ElementwiseProblem::kOut, ElementwiseProblem::kX}) {
    elementwise.strides[tensor][0] = problem.n;
    elementwise.strides[tensor][1] = 1;
  }
  const EpilogueInfo& epilogue = epilogue_info(call.epilogue);
  for (int i = 1; i < epilogue.operand_count; ++i) {
    elementwise.operands[i - 1] = problem.operands[i - 1];
    elementwise.strides[ElementwiseProblem::kFirstOperand + i - 1][1] = problem.operands[i - 1].stride;
  }
  elementwise.x = elementwise.out = product.data;
  return run_elementwise(elementwise, *call.x, torch, stream) ? Answer::Done : Answer::Raised;
}

#if EPIGEMM_WITH_SM90

void read_strided(const Tensor& tensor, bool is_matrix, Matrix* matrix) {
  if (is_matrix) return;  // as it is
  *matrix = {tensor.data, tensor.element, tensor.strides[0], tensor.strides[1]};
}

Answer run_fused(const LinearCall& call, const Road& road, Prepared& prepared, char* workspace, void* stream,
                 Torch& torch) {
  Problem& problem = prepared.problem;
  Tensor result;
  if (!torch.result(&result)) return Answer::Raised;
  problem.arithmetic = road.arithmetic;
  problem.stream = stream;
  problem.out.data = result.data;
  if (road.is_on_slices()) {
    read_strided(*call.x, prepared.is_x_matrix, &problem.x);
    read_strided(*call.weight, prepared.is_weight_matrix, &problem.weight);
    problem.is_packed = call.pack != nullptr;
    problem.packed_weight = call.pack;
    problem.workspace = workspace;
  }
  if (call.fold) {
    void* const folded = workspace + (road.is_on_slices() ? slices_bytes(call, road, problem) : 0);
    run_fold(*call.fold, *call.x, problem.n, folded, stream, problem.operands);
  }
  const char* refused = launch(problem, road.plan);
  const std::string error = refused || road.is_on_slices() ? cuda::last_error() : std::string();
  if (!refused && error.empty()) return Answer::Done;
  torch.raise(
      (std::string("the fused kernel could not be launched: ") + (refused ? refused : "") + " " + error).c_str());
  return Answer::Raised;
}

#endif

}  // namespace

Answer linear(const LinearCall& call, Torch& torch) {
  Prepared prepared;
  if (!is_ready(*call.x) || !prepare(call, &prepared)) return Answer::Elsewhere;
  const Road road = choose_road(call, prepared);
  if (road.answer != Answer::Done) return road.answer;
  const bool is_fallback_here = !call.is_strict && !call.needs_other_setting && (!call.out || call.x->dim == 2);
  if (!road.plan.is_fused() && !is_fallback_here) return Answer::Elsewhere;
  const int64_t slices = road.is_on_slices() ? slices_bytes(call, road, prepared.problem) : 0;
  const int64_t bytes = slices + (call.fold ? fold_bytes(*call.x, prepared.problem.n) : 0);
  void* stream = nullptr;
  if (call.x->is_cuda() && !torch.stream(&stream)) return Answer::Elsewhere;
  char* workspace = nullptr;
  if (bytes > 0) {
    workspace = static_cast<char*>(torch.workspace(bytes));
    if (!workspace) return Answer::Elsewhere;
  }
#if EPIGEMM_WITH_SM90
  if (road.plan.is_fused()) return run_fused(call, road, prepared, workspace, stream, torch);
#endif
  return run_fallback(call, prepared, workspace, stream, torch);
}

}  // namespace epigemm::call
