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
  const EpilogueInfo& epilogue = epilogue_info(p.epilogue);
  return element_bytes(p.x.element) == 2 && (epilogue.takes_bias ? p.has_bias : epilogue.bias > 0);
}

double two_kernels_microseconds(const Problem& p) {
  const Architecture& architecture = architecture_of(p.device);
  const double bare = architecture.product_microseconds(p);
  const double product = is_bias_in_product(p) ? std::max(bare, architecture.product_with_bias_microseconds(p)) : bare;
  return product + elementwise_microseconds(p) - kSharedStartUs;
}

// Behind a short K cuBLAS's GEMM with a bias and a ReLU takes longer than the one with a bias: in bf16 on an H100 1.0
// to 1.4 times as long, at 23 random shapes of 60 us and more with K up to 1000, and up to twice behind a K below 64.
// At 1024x8192x8192 it takes 1.01 times as long. With many rows and three rounds of tiles it takes 1.1 to 1.7 times as
// long as predicted from 19 us on, at five of six shapes of 200 (short-65 of an H100; at two of them on an H200), where
// a fused kernel is expected to take nearly the same time. There 1.1 is enough to choose that. With up to 64 columns
// and with fewer rows cuBLAS takes what is predicted.
double with_relu_microseconds(const Problem& p) {
  constexpr double kLeastUs = 30, kRounds = 3;
  constexpr int64_t kVeryShortK = 64, kShortK = 1000, kTile = 128;
  constexpr int64_t kManyRows = 16000, kManyRowsK = 256, kFewColumns = 64;
  const double with_bias = architecture_of(p.device).product_with_bias_microseconds(p);
  if (element_bytes(p.x.element) != 2) return with_bias;
  if (p.k < kVeryShortK) return 1.4 * with_bias;
  if (with_bias >= kLeastUs && p.k <= kShortK) return 1.2 * with_bias;
  const double tiles = cost::as_double(ceil_div(p.m, kTile) * ceil_div(p.n, kTile));
  const bool has_many_rows =
      p.m >= kManyRows && p.n > kFewColumns && p.k <= kManyRowsK && tiles >= kRounds * p.device.multiprocessors;
  return has_many_rows ? 1.1 * with_bias : with_bias;
}

double one_kernel_microseconds(const Problem& p) {
  const Architecture& architecture = architecture_of(p.device);
  if (!p.has_bias) return architecture.product_microseconds(p);
  if (p.epilogue == EpilogueId::bias_relu) return with_relu_microseconds(p);
  return architecture.product_with_bias_microseconds(p);
}

}  // namespace

bool is_fallback_one_kernel(EpilogueId epilogue, bool has_bias) {
  return epilogue == EpilogueId::bias || (epilogue == EpilogueId::bias_relu && has_bias);
}

bool is_fallback_one_kernel(const Problem& p) {
  if (!is_fallback_one_kernel(p.epilogue, p.has_bias)) return false;
  const bool has_gaps = p.m > 1 && p.out.row_stride != p.n;
  return p.epilogue == EpilogueId::bias || (!has_gaps && p.n > 1);
}

bool is_fallback_expected_in_one_kernel(const Problem& p) {
  if (!is_fallback_one_kernel(p) || (p.has_bias && architecture_of(p.device).adds_bias_apart(p))) return false;
  const bool may_be_slower = p.epilogue == EpilogueId::bias_relu && element_bytes(p.x.element) == 2;
  return !may_be_slower || one_kernel_microseconds(p) <= two_kernels_microseconds(p);
}

double fallback_microseconds(const Problem& p) {
  if (p.is_empty() || p.device.multiprocessors == 0) return 0;
  return is_fallback_expected_in_one_kernel(p) ? one_kernel_microseconds(p) : two_kernels_microseconds(p);
}

}  // namespace epigemm
