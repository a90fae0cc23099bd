// What runs a linear call. The one place that decides: from numbers, without launching or allocating anything.
#pragma once

#include <string>
#include <vector>

#include "call/linear.h"
#include "gemm/launch.h"
#include "gemm/planner/planner.h"

namespace epigemm::call {

// What an fp32 product may run on, in this order; PyTorch's GEMM comes after the last. The rows of `fp32_orders`.
struct FP32Order {
  int count;
  Arithmetic tried[3];
  bool is_tf32_allowed;  // to PyTorch's GEMM, by its own setting
};

constexpr int kFP32Orders = 6;
extern const FP32Order fp32_orders[kFP32Orders];

// A call as it is decided on.
struct Prepared {
  Problem problem;
  bool is_x_strided = false;  // x has one stride from row to row, whatever the one from column to column
  bool is_out_matrix = true;
  bool is_out_padded = false;  // as of LinearCall
  bool has_cublas = false;     // PyTorch's GEMM is cuBLAS's
  bool has_kernels = has_gemm_kernels();
  int fp32_order = 0;
  WeightSlices split, scaled;

  bool is_x_matrix() const { return is_x_strided && problem.x.column_stride == 1; }
  bool is_weight_matrix() const { return problem.weight.column_stride == 1; }
  bool are_matrices() const { return is_x_matrix() && is_weight_matrix() && is_out_matrix; }
};

// The outcome for one arithmetic: runs, or why not.
enum class Verdict { Runs, NotRepresentable, NoKernels, NotPlanned, MemoryIsShort, CopyTakesGain, TF32IsFaster };

struct Tried {
  Verdict verdict = Verdict::NotPlanned;
  Problem problem;   // as the planner saw it, with the copies that a fused plan runs on
  Candidate chosen;  // where it was planned
  bool is_padded = false;
  double tf32_microseconds = 0;  // where that decided
};

// A batch-invariant call runs on the first arithmetic that is accurate enough for its K: no predicted time counts.
const FP32Order& order_of(const Prepared& prepared);

inline bool is_on_slices(Arithmetic arithmetic) {
  return arithmetic == Arithmetic::Split || arithmetic == Arithmetic::Scaled;
}

Tried try_arithmetic(const Prepared& prepared, Arithmetic arithmetic);

// The decision: which kernels run.
struct Decision {
  Plan plan;  // the fallback's where nothing is fused
  Arithmetic arithmetic = Arithmetic::IEEE;
  bool is_packed = false;  // on slices: the weight's were not charged to the call
  bool is_padded = false;  // on slices: the result is stored elsewhere, in rows of whole 16 bytes, and copied
  Copies copies = {};      // 16 bits: what the call copies for its kernel

  bool is_on_slices() const { return plan.is_fused() && call::is_on_slices(arithmetic); }
};

// `tried`: gets every arithmetic of the order, also those behind the one that runs.
Decision decide(const Prepared& prepared, std::vector<Tried>* tried = nullptr);

// What runs under a plan that a caller forces, in place of a decision.
Decision decision_of(const Prepared& prepared, const ForcedPlan& forced);

constexpr const char* kNoGemmKernels = "epigemm was built without the Hopper GEMM kernels";

// Why kernels cannot multiply the tensors as they lie, in words; empty where they can.
const char* why_not_readable(const Prepared& prepared);

// Why a forced plan cannot run, in words; empty where it can.
std::string why_not_forced(const Prepared& prepared, const ForcedPlan& forced, const Decision& decision);

// How much PyTorch's GEMM is to do in the fallback: where cuBLAS is slower with a bias, it comes in a kernel of its
// own.
Gemm choose_gemm(const Prepared& prepared);

// The largest power of two, at most 256, that divides an address; PyTorch aligns new CUDA memory to that.
int alignment_of(const void* pointer);

// Whether the epilogue's vectors have no gaps.
bool are_contiguous(const Problem& problem);

}  // namespace epigemm::call
