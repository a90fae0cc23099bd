#include "call/linear.h"
#include "epilogue/builtin.h"

#include <string>

#include "call/decide.h"
#include "call/kernels.h"
#include "call/operands.h"
#include "call/prepare.h"
#include "gemm/launch.h"
#include "gemm/planner/family.h"
#include "link/kernels.h"

namespace epigemm::call {
namespace {

// What keeps the kernels on slices from running on the tensors as they lie, with the pack at hand; Done: nothing.
Answer look_at_slices(const LinearCall& call, const Prepared& prepared, const Decision& decision) {
  const bool is_first = decision.arithmetic == order_of(prepared).tried[0];
  if (decision.is_packed && !(call.pack && is_first)) return Answer::LacksPack;
  if (!prepared.is_x_strided || !prepared.problem.are_operands_contiguous) return Answer::NotReadable;
  return decision.is_padded ? Answer::NotStorable : Answer::Done;
}

// PyTorch's operators compute an epilogue that has no kernel.
Answer look_at_reference(const LinearCall& call) {
  return call.is_strict || call.is_batch_invariant ? Answer::NotFused : Answer::ByReference;
}

Answer look_at_fallback(const LinearCall& call) {
  if (call.is_strict || call.is_batch_invariant) return Answer::NotFused;
  return call.needs_other_setting ? Answer::OtherSetting : Answer::Done;
}

// A fused call, or one that follows PyTorch's GEMM: what its launches take.
struct Resources {
  open::Kernels kernels;
  char* workspace = nullptr;  // of the family, then of the fold; or of `zero_bias_bytes`
  int64_t family_bytes = 0;
  void* stream = nullptr;
};

bool does_everything(const LinearCall& call, const Problem& problem, Gemm gemm) {
  if (call.epilogue == EpilogueId::bias) return gemm == Gemm::WithBias || !problem.has_bias;
  return gemm == Gemm::WithBiasAndReLU;
}

// Nothing where there is no fold. False after torch.raise().
bool run_fold_of(const FoldVectors* fold, const LinearCall& call, void* memory, Torch& torch, Problem* problem) {
  if (!fold) return true;
  return run_fold(*fold, *call.x, problem->n, memory, torch, problem->stream, problem->operands);
}

// How much PyTorch's GEMM does. The bias of a fold is added there, too, where the product is rounded to 16 bits.
Gemm gemm_of(const LinearCall& call, const Prepared& prepared) {
  const bool folds_bias = call.operands.fold && call.operands.fold->vectors[0];
  return folds_bias && element_bytes(call.x->element) == 2 ? Gemm::WithBias : choose_gemm(prepared);
}

// A linked epilogue whose bias PyTorch's GEMM has added gets one of -0, which changes no sum.
int64_t zero_bias_bytes(const LinearCall& call, const Prepared& prepared) {
  const bool is_replaced = !has_compiled_elementwise(call.epilogue) && gemm_of(call, prepared) == Gemm::WithBias;
  return is_replaced ? element_bytes(call.x->element) * prepared.problem.n : 0;
}

Answer run_linked_behind(const Tensor& product, const void* kernel, void* zero_bias, Torch& torch, Problem& problem) {
  if (zero_bias && !replace_bias(zero_bias, torch, &problem)) return Answer::Raised;
  const Matrix result{product.data, product.element, problem.n};
  return run_linked(problem, kernel, result, result, torch, problem.stream) ? Answer::Done : Answer::Raised;
}

Answer run_fallback(const LinearCall& call, Prepared& prepared, const Resources& resources, Torch& torch) {
  Problem& problem = prepared.problem;
  void* const memory = resources.workspace;
  problem.stream = resources.stream;
  const Gemm gemm = gemm_of(call, prepared);
  const int bias = call.operands.fold ? 0 : epilogue_info(call.epilogue).bias - 1;
  Tensor product;
  if (!torch.gemm(gemm, bias, &product)) return Answer::Raised;
  if (does_everything(call, problem, gemm)) return Answer::Done;
  if (!has_compiled_elementwise(call.epilogue)) {
    void* const zero_bias = gemm == Gemm::WithBias ? memory : nullptr;
    return run_linked_behind(product, resources.kernels.handles[0], zero_bias, torch, problem);
  }
  FoldVectors fold = call.operands.fold ? *call.operands.fold : FoldVectors{};
  if (gemm == Gemm::WithBias) fold.vectors[0] = nullptr;
  if (!run_fold_of(call.operands.fold ? &fold : nullptr, call, memory, torch, &problem)) return Answer::Raised;
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
  if (gemm == Gemm::WithBias && epilogue.takes_bias) elementwise.operands[0] = {};  // added already
  elementwise.x = elementwise.out = product.data;
  return run_elementwise(elementwise, *call.x, torch, resources.stream) ? Answer::Done : Answer::Raised;
}

Answer run_fused(const LinearCall& call, const Plan& plan, Prepared& prepared, const Resources& resources,
                 Torch& torch) {
  Problem& problem = prepared.problem;
  Tensor result;
  if (!torch.result(&result)) return Answer::Raised;
  problem.stream = resources.stream;
  problem.out.data = result.data;
  problem.workspace = resources.workspace;
  void* const folded = resources.workspace + resources.family_bytes;
  if (!run_fold_of(call.operands.fold, call, folded, torch, &problem)) return Answer::Raised;
  const char* const refused = launch(problem, plan, resources.kernels);
  if (!refused) return Answer::Done;
  torch.raise((std::string("the fused kernel could not be launched: ") + refused).c_str());
  return Answer::Raised;
}

}  // namespace

Answer linear(const LinearCall& call, Torch& torch) {
  Prepared prepared;
  if (!is_ready(*call.x)) return Answer::NotReady;
  if (const Answer answer = prepare(call, &prepared); answer != Answer::Done) return answer;
  const Decision decision = decide(prepared);
  const bool is_fused = decision.plan.is_fused(), is_on_slices = decision.is_on_slices();
  if (!has_compiled_elementwise(call.epilogue)) {
    if (!call.x->is_cuda()) return look_at_reference(call);
    // Linked kernels read vectors without gaps; the one behind PyTorch's GEMM, too.
    if (!prepared.problem.are_operands_contiguous) return Answer::NotReadable;
  }
  Problem& problem = prepared.problem;
  problem.arithmetic = decision.arithmetic;
  Resources resources;
  if (!link::find(call.epilogue, kernels_of(problem, decision.plan), &resources.kernels)) return Answer::NotLinked;
  const Answer answer = is_on_slices ? look_at_slices(call, prepared, decision)
                        : is_fused   ? Answer::Done
                                     : look_at_fallback(call);
  if (answer != Answer::Done) return answer;
  if (is_on_slices) {
    problem.is_packed = call.pack != nullptr;
    problem.packed_weight = call.pack;
  }
  if (is_fused) resources.family_bytes = family_of(decision.plan.family).workspace_bytes(problem);
  const int64_t bytes = resources.family_bytes + (call.operands.fold ? fold_bytes(*call.x, problem.n) : 0) +
                        (is_fused ? 0 : zero_bias_bytes(call, prepared));
  if (call.x->is_cuda() && !torch.stream(&resources.stream)) return Answer::NotReady;
  if (bytes > 0) {
    resources.workspace = static_cast<char*>(torch.workspace(bytes));
    if (!resources.workspace) return Answer::NoMemory;
  }
  if (is_fused) return run_fused(call, decision.plan, prepared, resources, torch);
  return run_fallback(call, prepared, resources, torch);
}

}  // namespace epigemm::call
