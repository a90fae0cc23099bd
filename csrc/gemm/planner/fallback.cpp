#include "gemm/planner/fallback.h"
#include "epilogue/builtin.h"

#include <algorithm>

#include "gemm/planner/architecture.h"
#include "gemm/planner/cost.h"

namespace epigemm {
namespace {

// The elementwise kernel, in place on the product, of which a part is still in L2. It reads matrices from memory. A
// functor with a higher cost than its class is computed at the same time.
double elementwise_microseconds(const Problem& p) {
  struct Cost {
    double fixed_us, bytes_in_l2, bytes_beyond, l2_bytes;
  };
  constexpr Cost kCheap = {5.73, 1.51, 1.25, 25.1e6}, kTranscendental = {5.59, 1.70, 0.674, 29.5e6};
  const Cost& c = cost::is_transcendental(p, FunctorKernel::Elementwise) ? kTranscendental : kCheap;
  const double bytes = cost::as_double(p.m) * cost::as_double(p.n) * element_bytes(p.out.element);
  const double moved = c.bytes_in_l2 * bytes + c.bytes_beyond * std::max(0.0, bytes - c.l2_bytes);
  const double memory = (moved + cost::matrix_bytes(p)) / p.device.memory_bytes_per_us;
  const double of_multiprocessor = cost::as_double(p.m) * cost::as_double(p.n) / p.device.multiprocessors;
  const double functor =
      cost::longer_functor_cycles(p, FunctorKernel::Elementwise, of_multiprocessor) / p.device.clock_mhz;
  return c.fixed_us + (functor > 0 ? cost::norm4(memory, functor) : memory);
}

// In 16 bits the bias is added before the product is rounded (csrc/call/decide.cpp).
bool is_bias_in_product(const Problem& p) {
  return element_bytes(p.x.element) == 2 && epilogue_info(p.epilogue).bias > 0 && p.has_bias;
}

double two_kernels_microseconds(const Problem& p) {
  const Architecture& architecture = architecture_of(p.device);
  const double bare = architecture.product_microseconds(p);
  const double product = is_bias_in_product(p) ? std::max(bare, architecture.product_with_bias_microseconds(p)) : bare;
  return product + elementwise_microseconds(p) - kSharedStartUs;
}

double one_kernel_microseconds(const Problem& p) {
  const Architecture& architecture = architecture_of(p.device);
  if (!p.has_bias) return architecture.product_microseconds(p);
  const double with_bias = architecture.product_with_bias_microseconds(p);
  return p.epilogue == EpilogueId::bias_relu ? architecture.relu_factor(p, with_bias) * with_bias : with_bias;
}

// torch.bmm, as one product of all rows, while the other weights are read; and PyTorch's pointwise operators, one for
// each operand, and one for a function of the sum. 34 batches with a GELU alone on an H200 took 0.75 to 1.23 times as
// long, 0.92 in the median. Of those that lose by this choice the worst takes 5% longer.
double batches_microseconds(const Problem& p) {
  constexpr double kReading = 0.9;
  using cost::as_double;
  Problem one = p;
  one.groups = {};
  const double weights = element_bytes(p.weight.element) * as_double(p.groups.count) * as_double(p.n) * as_double(p.k);
  const double product =
      architecture_of(p.device).product_microseconds(one) + kReading * weights / p.device.memory_bytes_per_us;
  if (is_fallback_one_kernel(p)) return product;
  const EpilogueInfo& epilogue = epilogue_info(p.epilogue);
  const int operands = epilogue.operand_count - 1 - (epilogue.bias > 0 && !p.has_bias);
  const bool has_function = operands == 0 || cost::is_transcendental(p, FunctorKernel::Elementwise);
  return product + (operands + has_function) * (elementwise_microseconds(one) - kSharedStartUs);
}

}  // namespace

bool is_fallback_one_kernel(EpilogueId epilogue, bool has_bias) {
  return epilogue == EpilogueId::bias || (epilogue == EpilogueId::bias_relu && has_bias);
}

bool is_fallback_one_kernel(const Problem& p) {
  if (p.groups.are_alike) return p.epilogue == EpilogueId::bias && !p.has_bias;  // torch.bmm adds nothing
  if (!is_fallback_one_kernel(p.epilogue, p.has_bias)) return false;
  const bool has_gaps = p.m > 1 && p.out.row_stride != p.n;
  return p.epilogue == EpilogueId::bias || (!has_gaps && p.n > 1);
}

bool is_fallback_expected_in_one_kernel(const Problem& p) {
  if (is_8_bits(p.x.element)) return p.epilogue == EpilogueId::bias;
  if (!is_fallback_one_kernel(p) || (p.has_bias && architecture_of(p.device).adds_bias_apart(p))) return false;
  const bool may_be_slower = p.epilogue == EpilogueId::bias_relu && element_bytes(p.x.element) == 2;
  return !may_be_slower || one_kernel_microseconds(p) <= two_kernels_microseconds(p);
}

double fallback_microseconds(const Problem& p) {
  if (p.is_empty() || p.device.multiprocessors == 0) return 0;
  if (is_8_bits(p.x.element)) return fallback_microseconds(in_16_bits(p));  // torch._scaled_mm
  if (p.groups.are_alike) return batches_microseconds(p);
  return is_fallback_expected_in_one_kernel(p) ? one_kernel_microseconds(p) : two_kernels_microseconds(p);
}

}  // namespace epigemm
