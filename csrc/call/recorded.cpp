#include "call/recorded.h"
#include "epilogue/builtin.h"

#include "call/operands.h"
#include "call/prepare.h"
#include "gemm/planner/fallback.h"

namespace epigemm::call {
namespace {

// PyTorch's node is in C++. Ours is in Python, so the engine's thread waits for the interpreter: 140 us a layer,
// forward and backward, on an H200's host (benchmarks/results/nvidia-h200/host/notes.md). The layer's three products
// take about three times as long as the first.
constexpr double kHostUs = 140;
constexpr double kProducts = 3;
// The same for a CPU, for whose products there is no model: some 20 us.
constexpr double kFewProducts = 1 << 20;

// For grad @ weight, where the weight is a transposed matrix, or grad^T @ x, where both are.
bool is_fused(const Prepared& forward, int64_t m, int64_t n, int64_t k, bool is_x_transposed) {
  // In 16 bits PyTorch's GEMM multiplies transposed matrices (autograd/gradient_products.py).
  if (element_bytes(forward.problem.x.element) == 2) return false;
  Prepared prepared;
  Problem& problem = prepared.problem;
  const ElementType element = forward.problem.x.element;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.x = is_x_transposed ? Matrix{nullptr, element, 1, m} : Matrix{nullptr, element, k, 1};
  problem.weight = {nullptr, element, 1, n};
  problem.out = {nullptr, element, n, 1};
  problem.alignment = alignment_of(nullptr);
  problem.has_bias = false;
  problem.device = forward.problem.device;
  prepared.is_x_strided = true;
  prepared.has_cublas = forward.has_cublas;
  prepared.fp32_order = forward.fp32_order;
  return decide(prepared).plan.is_fused();
}

bool is_bound_by_host(const Prepared& prepared) {
  const Problem& p = prepared.problem;
  if (p.device.capability != 0) return kProducts * fallback_microseconds(p) < kHostUs;
  return static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) < kFewProducts;
}

// Whether PyTorch has an operator for what follows the product and its bias, which saves what our node would.
bool is_one_operator(EpilogueId epilogue) {
  switch (epilogue) {
    case EpilogueId::bias_relu:
    case EpilogueId::bias_gelu:
    case EpilogueId::bias_gelu_tanh:
    case EpilogueId::bias_silu:
      return true;
    default:
      return false;
  }
}

}  // namespace

Answer recorder_of(const LinearCall& call) {
  // With more axes PyTorch's product is a view where gradients are recorded, and with gaps between rows a product whose
  // bias is added after it was rounded.
  const bool is_matrix = call.x->dim == 2;
  const bool is_known = call.epilogue == EpilogueId::bias
                            ? is_matrix
                            : is_one_operator(call.epilogue) && (is_matrix || call.x->is_contiguous());
  if (!is_known || call.weight->dim != 2 || call.operands.fold || call.out || call.is_strict ||
      call.is_batch_invariant || call.needs_other_setting) {
    return Answer::Recorded;
  }
  Prepared prepared;
  if (!is_ready(*call.x)) return Answer::NotReady;
  if (prepare(call, &prepared) != Answer::Done) return Answer::Recorded;
  const Problem& p = prepared.problem;
  // The plan is remembered, so it is asked first. What a kernel of few rows saves is less than our node costs.
  const Plan plan = decide(prepared).plan;
  const bool is_worth_it = plan.is_fused() && plan.family != FamilyId::sm90_few_rows;
  if (is_worth_it || !is_bound_by_host(prepared)) return Answer::Recorded;
  const bool is_any_fused = is_fused(prepared, p.m, p.k, p.n, /*is_x_transposed=*/false) ||
                            is_fused(prepared, p.n, p.k, p.m, /*is_x_transposed=*/true);
  return is_any_fused ? Answer::Recorded : Answer::RecordedByTorch;
}

}  // namespace epigemm::call
