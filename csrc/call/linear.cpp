#include "call/linear.h"

#include <string>

#include "call/decide.h"
#include "call/kernels.h"
#include "call/moments.h"
#include "call/on_copies.h"
#include "call/operands.h"
#include "call/prepare.h"
#include "call/record.h"
#include "epilogue/builtin.h"
#include "gemm/grid.h"
#include "gemm/launch.h"
#include "gemm/planner/copies.h"
#include "gemm/planner/family.h"
#include "link/kernels.h"

namespace epigemm::call {
namespace {

// What the launches of a call need.
struct Resources {
  open::Kernels kernels;
  void* blocks = nullptr;     // of moments
  char* workspace = nullptr;  // for the copies, then the family, then the fold
  int64_t copies_bytes = 0, family_bytes = 0;
  void* stream = nullptr;
};

constexpr int64_t kSection = 256;  // bytes: where the next part of the workspace begins

// Whether the call ends with this reason. A dry run notes the reason and continues.
bool ends(Answer reason, Torch& torch) {
  Record* const record = torch.record();
  if (record) record->reasons.push_back(reason);
  return !record;
}

bool does_everything(const LinearCall& call, const Problem& problem, Gemm gemm) {
  if (call.epilogue == EpilogueId::bias) return gemm == Gemm::WithBias || !problem.has_bias;
  return gemm == Gemm::WithBiasAndReLU;
}

// Does nothing if there is no fold. False after torch.raise().
bool run_fold_of(const FoldVectors* fold, const LinearCall& call, void* memory, Torch& torch, Problem* problem) {
  if (!fold) return true;
  return run_fold(*fold, *call.x, problem->n, memory, torch, problem->stream, problem->operands);
}

// How much PyTorch's GEMM computes. It also adds the bias of a fold if the product is rounded to 16 bits.
Gemm gemm_of(const LinearCall& call, const Prepared& prepared, const Decision& decision) {
  const bool folds_bias = call.operands.fold && call.operands.fold->vectors[0];
  return folds_bias && element_bytes(call.x->element) == 2 ? Gemm::WithBias : choose_gemm(prepared, decision);
}

// `d`: receives where the result lies.
Answer run_fallback(const LinearCall& call, Gemm gemm, Prepared& prepared, const Resources& resources, Torch& torch,
                    Matrix* d) {
  Problem& problem = prepared.problem;
  void* const memory = resources.workspace;
  problem.stream = resources.stream;
  const int bias = call.operands.fold ? 0 : epilogue_info(call.epilogue).bias - 1;
  Tensor result;
  if (!torch.gemm(gemm, bias, &result)) return Answer::Raised;
  as_matrix(result, problem.m, problem.n, d);
  if (does_everything(call, problem, gemm)) return Answer::Done;
  const Matrix& product = *d;
  FoldVectors fold = call.operands.fold ? *call.operands.fold : FoldVectors{};
  if (gemm == Gemm::WithBias) fold.vectors[0] = nullptr;
  if (!run_fold_of(call.operands.fold ? &fold : nullptr, call, memory, torch, &problem)) return Answer::Raised;
  const int place = epilogue_info(call.epilogue).bias;
  if (gemm == Gemm::WithBias && place > 0) problem.operands[place - 1] = {};  // added already
  const KernelForms kernel =
      elementwise_kernel(call.epilogue, ElementwiseKernel::Value, product.element, problem.device.capability);
  return run_elementwise(problem, kernel, product, product, torch, problem.stream) ? Answer::Done : Answer::Raised;
}

Answer run_fused(const LinearCall& call, const Plan& plan, Prepared& prepared, const Resources& resources, Torch& torch,
                 Matrix* d) {
  Problem& problem = prepared.problem;
  Tensor result;
  if (!torch.result(&result)) return Answer::Raised;
  problem.stream = resources.stream;
  problem.out.data = result.data;
  *d = problem.out;
  if (are_moments_in_kernel(problem, plan)) problem.column_blocks = resources.blocks;
  problem.workspace = resources.workspace + resources.copies_bytes;
  void* const folded = resources.workspace + resources.copies_bytes + resources.family_bytes;
  if (!run_fold_of(call.operands.fold, call, folded, torch, &problem)) return Answer::Raised;
  const char* const refused = launch_on_copies(problem, plan, resources.kernels, resources.workspace);
  if (!refused) return Answer::Done;
  torch.raise((std::string("the fused kernel could not be launched: ") + refused).c_str());
  return Answer::Raised;
}

// The reason why the plan cannot be run at all, or Done.
Answer look_at_plan(const LinearCall& call, const Prepared& prepared, const Decision& decision, Gemm gemm) {
  const Problem& problem = prepared.problem;
  if (decision.plan.is_fused()) return Answer::Done;
  if (call.weight2) return Answer::NoPair;
  if (call.stored) return Answer::NotFused;
  if (call.is_strict || call.is_batch_invariant) return Answer::NotFused;
  // Python knows whether torch._scaled_mm or torch's grouped product takes it.
  if (call.is_8_bits() || problem.groups) return Answer::ByReference;
  if (does_everything(call, problem, gemm)) return Answer::Done;
  return call.x->is_cuda() && are_rows_countable(problem) ? Answer::Done : Answer::ByReference;
}

// A reason that Python has to deal with before the plan is run, or Done.
Answer look_at_tensors(const LinearCall& call, const Prepared& prepared, const Decision& decision, Gemm gemm,
                       Torch& torch) {
  // Kernels read only vectors without gaps, PyTorch's GEMM any.
  const bool is_gemm_all = !decision.plan.is_fused() && does_everything(call, prepared.problem, gemm);
  const bool is_operand_readable = prepared.problem.are_operands_contiguous || is_gemm_all;
  const bool is_x_readable = prepared.is_x_strided || !decision.is_on_slices();
  if ((!is_operand_readable || !is_x_readable) && ends(Answer::NotReadable, torch)) return Answer::NotReadable;
  const bool is_storable = decision.plan.is_fused() ? !decision.is_padded : prepared.is_out_matrix;
  if (!is_storable && ends(Answer::NotStorable, torch)) return Answer::NotStorable;
  const bool needs_other_setting = !decision.plan.is_fused() && call.needs_other_setting;
  if (needs_other_setting && ends(Answer::OtherSetting, torch)) return Answer::OtherSetting;
  return Answer::Done;
}

// What a plan on fp16 slices launches, and the copies that Python makes for it.
void add_launches_on_slices(const LinearCall& call, const Prepared& prepared, const Decision& decision,
                            std::vector<const char*>* launches) {
  const bool reads_weight = family_of(decision.plan.family).reads_weight(decision.arithmetic, decision.plan);
  const bool has_slices = decision.is_packed && call.slices(decision.arithmetic).pack;
  if (!prepared.is_x_strided) launches->push_back("copy_of_x");
  if (reads_weight || !has_slices) launches->push_back(reads_weight ? "scales_of_weight" : "split_of_weight");
  launches->insert(launches->end(), {"split_of_x", "fused", "fixup"});
  if (decision.is_padded) launches->push_back("copy_of_result");
}

void fill(Record* record, const LinearCall& call, const Prepared& prepared, const Decision& decision, Gemm gemm,
          const open::KernelNames& names) {
  record->gemm = gemm;
  const int capability = prepared.problem.device.capability;
  // What is loaded here tells nothing of a GPU that is elsewhere.
  const bool is_elsewhere = call.described && call.described->index < 0;
  for (const open::KernelName name : names) {
    if (is_elsewhere || !link::find(call.epilogue, capability, name)) record->missing.emplace_back(name);
  }
  const Problem& problem = prepared.problem;
  const bool is_behind = !decision.plan.is_fused() && !does_everything(call, problem, record->gemm);
  if (!problem.are_operands_contiguous && (decision.plan.is_fused() || is_behind)) {
    record->launches.push_back("copy_of_operands");
  }
  if (decision.is_on_slices()) {
    add_launches_on_slices(call, prepared, decision, &record->launches);
  } else {
    if (decision.copies.x || decision.copies.weight) record->launches.push_back("copy");
    record->launches.push_back(decision.plan.is_fused() ? "fused" : "torch_gemm");
    if (decision.is_padded) record->launches.push_back("copy_of_result");
    if (decision.copies.out) record->launches.push_back("copy");
  }
  if (is_behind) record->launches.push_back("elementwise");
  if (!problem.has_column_moments) return;
  if (!are_moments_in_kernel(problem, decision.plan)) record->launches.push_back("blocks");
  if (!are_blocks_left(call, problem, decision.plan)) record->launches.push_back("merge");
}

}  // namespace

Answer linear(const LinearCall& call, Torch& torch) {
  Record* const record = torch.record();
  Prepared prepared;
  if (!call.described && !is_ready(*call.x)) return Answer::NotReady;
  const Answer prepares = prepare(call, &prepared);
  if (prepares != Answer::Done && !(record && prepares == Answer::IsEmpty)) return prepares;
  const Decision decision = call.forced ? decision_of(prepared, *call.forced)
                                        : decide(prepared, record && record->wants_tried ? &record->tried : nullptr);
  if (record) {
    record->prepared = prepared;
    record->decision = decision;
  }
  const std::string refused = call.forced ? why_not_forced(prepared, *call.forced, decision) : std::string();
  if (!refused.empty()) {
    torch.raise(("plan: " + refused).c_str());
    return Answer::Raised;
  }
  Problem& problem = prepared.problem;
  problem.arithmetic = decision.arithmetic;
  problem.copies = decision.copies;
  problem.is_out_padded = problem.is_out_padded || (call.is_8_bits() && call.is_out_padded);
  const open::KernelNames names = kernels_of(problem, decision.plan);
  const bool is_fused = decision.plan.is_fused();
  const Gemm gemm = is_fused && !record ? Gemm::Product : gemm_of(call, prepared, decision);
  if (record) fill(record, call, prepared, decision, gemm, names);
  if (prepares != Answer::Done) return prepares;
  if (const Answer answer = look_at_plan(call, prepared, decision, gemm); answer != Answer::Done) return answer;
  Resources resources;
  const bool is_linked = link::find(call.epilogue, problem.device.capability, names, &resources.kernels);
  if (!is_linked && ends(Answer::NotLinked, torch)) return Answer::NotLinked;
  if (const Answer answer = look_at_tensors(call, prepared, decision, gemm, torch); answer != Answer::Done) {
    return answer;
  }
  if (record) return Answer::Done;
  if (decision.is_on_slices()) {
    problem.is_packed = decision.is_packed;
    problem.packed_weight = call.slices(decision.arithmetic).pack;
  }
  if (is_fused) resources.family_bytes = family_of(decision.plan.family).workspace_bytes(problem, decision.plan);
  resources.copies_bytes = copies_bytes(problem);
  const int64_t of_moments = round_up(moments_bytes(call, problem, decision.plan), kSection);
  const int64_t bytes = of_moments + resources.copies_bytes + resources.family_bytes +
                        (call.operands.fold ? fold_bytes(*call.x, problem.n) : 0);
  if (call.x->is_cuda() && !torch.stream(&resources.stream)) return Answer::NotReady;
  if (bytes > 0) {
    resources.workspace = static_cast<char*>(torch.workspace(bytes));
    if (!resources.workspace) return Answer::NoMemory;
  }
  resources.blocks = place_blocks(call, problem, decision.plan, resources.workspace);
  if (bytes > 0) resources.workspace += of_moments;
  Matrix d;
  const Answer answer = is_fused ? run_fused(call, decision.plan, prepared, resources, torch, &d)
                                 : run_fallback(call, gemm, prepared, resources, torch, &d);
  if (answer != Answer::Done) return answer;
  const bool is_done = run_moments(call, decision.plan, problem, d, resources.blocks, torch);
  return is_done ? Answer::Done : Answer::Raised;
}

}  // namespace epigemm::call
