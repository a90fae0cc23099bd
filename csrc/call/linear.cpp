#include "call/linear.h"
#include "epilogue/builtin.h"

#include <string>

#include "call/decide.h"
#include "call/operands.h"
#include "call/prepare.h"
#include "gemm/sm90_fp16x3/layout.h"
#include "link/needed.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#endif
#if EPIGEMM_WITH_SM90
#include "gemm/launch.h"
#endif

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

// fp16 slices of x and, where there is no pack, of the weight.
int64_t slices_bytes(const LinearCall& call, const Decision& decision, const Problem& problem) {
  const int slices = decision.arithmetic == Arithmetic::Split ? sm90_fp16x3::kSlices : 1;
  const int64_t weight = call.pack ? 0 : sm90_fp16x3::split_bytes(problem.n, problem.k, slices);
  return sm90_fp16x3::split_bytes(problem.m, problem.k, slices) + weight;
}

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

Answer run_linked_behind(const Tensor& product, void* zero_bias, Torch& torch, Problem& problem) {
  if (zero_bias && !replace_bias(zero_bias, torch, &problem)) return Answer::Raised;
  const Matrix result{product.data, product.element, problem.n};
  return run_linked(problem, result, result, torch, problem.stream) ? Answer::Done : Answer::Raised;
}

// `memory`: of the fold's results, or of `zero_bias_bytes`.
Answer run_fallback(const LinearCall& call, Prepared& prepared, void* memory, void* stream, Torch& torch) {
  Problem& problem = prepared.problem;
  problem.stream = stream;
  const Gemm gemm = gemm_of(call, prepared);
  const int bias = call.operands.fold ? 0 : epilogue_info(call.epilogue).bias - 1;
  Tensor product;
  if (!torch.gemm(gemm, bias, &product)) return Answer::Raised;
  if (does_everything(call, problem, gemm)) return Answer::Done;
  if (!has_compiled_elementwise(call.epilogue)) {
    return run_linked_behind(product, gemm == Gemm::WithBias ? memory : nullptr, torch, problem);
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
  return run_elementwise(elementwise, *call.x, torch, stream) ? Answer::Done : Answer::Raised;
}

#if EPIGEMM_WITH_SM90

Answer run_fused(const LinearCall& call, const Decision& decision, Prepared& prepared, char* workspace, void* stream,
                 Torch& torch) {
  Problem& problem = prepared.problem;
  Tensor result;
  if (!torch.result(&result)) return Answer::Raised;
  problem.arithmetic = decision.arithmetic;
  problem.stream = stream;
  problem.out.data = result.data;
  if (decision.is_on_slices()) {
    problem.is_packed = call.pack != nullptr;
    problem.packed_weight = call.pack;
    problem.workspace = workspace;
  }
  void* const folded = workspace + (decision.is_on_slices() ? slices_bytes(call, decision, problem) : 0);
  if (!run_fold_of(call.operands.fold, call, folded, torch, &problem)) return Answer::Raised;
  const char* const refused = launch(problem, decision.plan);
  if (!refused) return Answer::Done;
  torch.raise((std::string("the fused kernel could not be launched: ") + refused).c_str());
  return Answer::Raised;
}

#endif

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
  prepared.problem.arithmetic = decision.arithmetic;
  if (!link::are_linked(call.epilogue, link::needed_kernels(prepared.problem, decision.plan))) return Answer::NotLinked;
  const Answer answer = is_on_slices ? look_at_slices(call, prepared, decision)
                        : is_fused   ? Answer::Done
                                     : look_at_fallback(call);
  if (answer != Answer::Done) return answer;
  const int64_t slices = is_on_slices ? slices_bytes(call, decision, prepared.problem) : 0;
  const int64_t bytes = slices + (call.operands.fold ? fold_bytes(*call.x, prepared.problem.n) : 0) +
                        (is_fused ? 0 : zero_bias_bytes(call, prepared));
  void* stream = nullptr;
  if (call.x->is_cuda() && !torch.stream(&stream)) return Answer::NotReady;
  char* workspace = nullptr;
  if (bytes > 0) {
    workspace = static_cast<char*>(torch.workspace(bytes));
    if (!workspace) return Answer::NoMemory;
  }
#if EPIGEMM_WITH_SM90
  if (is_fused) return run_fused(call, decision, prepared, workspace, stream, torch);
#endif
  return run_fallback(call, prepared, workspace, stream, torch);
}

}  // namespace epigemm::call
