// Decides which kernels run a linear call. This is the only place that decides. It works on numbers alone, and launches
// and allocates nothing.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "call/linear.h"
#include "gemm/launch.h"
#include "gemm/planner/planner.h"

namespace epigemm::call {

// The arithmetics that an fp32 product, or one of 8 bits, may run in, in the order in which they are tried; PyTorch's
// GEMM comes last. A row of `fp32_orders`.
struct FP32Order {
  int count;
  Arithmetic tried[3];
  bool is_tf32_allowed;  // to PyTorch's GEMM, by its own setting
};

constexpr int kFP32Orders = 8, kFirstOrderOf8Bits = 6;
extern const FP32Order fp32_orders[kFP32Orders];

// What is known of a call when it is decided.
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
  // Kernels of groups read weights in either order.
  bool is_weight_matrix() const {
    return problem.weight.column_stride == 1 || (problem.groups && problem.is_weight_transposed);
  }
  bool are_matrices() const { return is_x_matrix() && is_weight_matrix() && is_out_matrix; }
};

// The outcome for one arithmetic: it runs, or the reason why not.
enum class Verdict { Runs, NotRepresentable, NoKernels, NotPlanned, MemoryIsShort, CopyTakesGain, OtherIsFaster };

struct Tried {
  Verdict verdict = Verdict::NotPlanned;
  Problem problem;   // as given to the planner, with the copies on which a fused plan runs
  Candidate chosen;  // if it was planned
  bool is_padded = false;
  double other_microseconds = 0;  // of a kernel without slices, if it was compared
};

// A batch-invariant call runs in the first arithmetic that is accurate enough for its K. Predicted times are not used.
const FP32Order& order_of(const Prepared& prepared);

Tried try_arithmetic(const Prepared& prepared, Arithmetic arithmetic);

// The decision: which kernels run the call.
struct Decision {
  Plan plan;  // the fallback plan if nothing is fused
  Arithmetic arithmetic = Arithmetic::IEEE;
  bool is_packed = false;  // on slices: the weight has a pack
  bool is_padded = false;  // on slices and in 8 bits: the result is written to rows of whole 16 bytes and then copied
  Copies copies = {};      // 16 bits: what the call copies for its kernel
  // The fallback in 16 bits, if the planner has chosen it: PyTorch's GEMM is expected to compute the whole epilogue.
  std::optional<bool> is_one_kernel;

  bool is_on_slices() const { return plan.is_fused() && epigemm::is_on_slices(arithmetic); }
};

// `tried`: if not null, gets the outcome of every arithmetic of the order, also of those after the one that runs.
Decision decide(const Prepared& prepared, std::vector<Tried>* tried = nullptr);

// The decision for a plan that a caller forces.
Decision decision_of(const Prepared& prepared, const ForcedPlan& forced);

constexpr const char* kNoGemmKernels = "epigemm was built without the Hopper GEMM kernels";

// Why kernels cannot multiply the tensors as they lie, in words; empty where they can.
const char* why_not_readable(const Prepared& prepared);

// Why a forced plan cannot run, in words; empty where it can.
std::string why_not_forced(const Prepared& prepared, const ForcedPlan& forced, const Decision& decision);

// How much PyTorch's GEMM computes in the fallback. If cuBLAS is slower with a bias, another kernel adds it.
Gemm choose_gemm(const Prepared& prepared, const Decision& decision);

// The largest power of two, at most 256, that divides an address; PyTorch aligns new CUDA memory to that.
int alignment_of(const void* pointer);

// Whether the epilogue's vectors have no gaps.
bool are_contiguous(const Problem& problem);

}  // namespace epigemm::call
