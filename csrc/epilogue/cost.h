// What functors cost, as the planner counts it. Plain C++.
#pragma once

#include <string_view>

namespace epigemm {

// The kernels that call a functor. They differ in how many warps hide its latency.
enum class FunctorKernel {
  Elementwise,
  Cooperative,  // large tiles: all warps of a CTA compute one tile
  Pingpong,     // large tiles: half of the warps compute one, which takes the functor twice as long
  SwapAB,
  Slices,
};
constexpr int kFunctorKernels = 5;

// Cycles of a multiprocessor for one element, beyond what storing the product and its bias takes: with float, and with
// RoundedToBFloat16, whose results have 16 bits. (With Rounded, for fp16, tanh and gelu take longer.)
struct FunctorCost {
  double with_float[kFunctorKernels] = {};
  double with_rounded[kFunctorKernels] = {};
};

namespace detail {

struct NamedCost {
  std::string_view primitive;
  FunctorCost cost;
};

constexpr NamedCost kCosts[] = {
#define EPIGEMM_COST(name, e, e16, c, c16, p, p16, s, s16, x) {#name, {{e, c, p, s, x}, {e16, c16, p16, s16, x}}},
#include "epilogue/costs.def"
#undef EPIGEMM_COST
};

// The first row of the table, `other`, stands for primitives that are not in it.
constexpr const FunctorCost& cost_of_primitive(std::string_view name) {
  for (const NamedCost& each : kCosts) {
    if (each.primitive == name) return each.cost;
  }
  return kCosts[0].cost;
}

}  // namespace detail

// The sum of the costs of primitives, given by name between commas. `has_short_forms`: whether results of 16 bits are
// computed with the functions of primitives/short.h, not with float's.
constexpr FunctorCost functor_cost(std::string_view primitives, bool has_short_forms = true) {
  FunctorCost sum;
  while (!primitives.empty()) {
    const std::size_t comma = primitives.find(',');
    const FunctorCost& one = detail::cost_of_primitive(primitives.substr(0, comma));
    for (int i = 0; i < kFunctorKernels; ++i) {
      sum.with_float[i] += one.with_float[i];
      sum.with_rounded[i] += has_short_forms ? one.with_rounded[i] : one.with_float[i];
    }
    primitives.remove_prefix(comma == std::string_view::npos ? primitives.size() : comma + 1);
  }
  return sum;
}

}  // namespace epigemm
