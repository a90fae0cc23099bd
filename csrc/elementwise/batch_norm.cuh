// What the kernels of both directions of BatchNorm share.
#pragma once

#include <algorithm>

#include "device/query.h"
#include "elementwise/bands.cuh"
#include "elementwise/batch_norm.h"
#include "elementwise/typed_vector.cuh"

namespace epigemm::cuda::bands {

constexpr int kWarps = 8, kThreads = kLanes * kWarps;
constexpr int kBatch = kAtOnce * kWarps;  // rows that a CTA loads at once

// What y is made of, in one column.
template <class Compute>
struct NormColumn {
  Compute mean, variance, scale, gamma, beta, inverse, t, slope;

  __device__ NormColumn(const BatchNorm& p, int64_t column, Compute mean, Compute variance)
      : mean(mean),
        variance(variance),
        scale(load<Compute>(p.scale, column, 1)),
        gamma(load<Compute>(p.gamma, column, 1)),
        beta(load<Compute>(p.beta, column, 0)),
        inverse(1 / sqrt(fma(scale * scale, variance, static_cast<Compute>(p.eps)))),
        t(scale * inverse),
        slope(gamma * t) {}

  __device__ NormColumn(const BatchNorm& p, int64_t column)
      : NormColumn(p, column, static_cast<const Compute*>(p.mean)[column],
                   static_cast<const Compute*>(p.variance)[column]) {}
};

// Rows of a CTA of a pass that writes a matrix: enough of them to pay for a band's values, few enough that the CTAs are
// many rounds of all multiprocessors, of which the last is then a small part.
inline int64_t rows_of_a_pass(const BatchNorm& p, int64_t bands) {
  constexpr int64_t kWantedOfEach = 16;
  const int64_t wanted = kWantedOfEach * device(p.device).multiprocessors;
  return kBatch * std::clamp<int64_t>(divided_up(p.rows * bands, wanted * kBatch), 1, 2);
}

// Calls body with a value of the element type, and with how many elements an access may have.
template <class Body>
const char* with_access(const BatchNorm& p, bool is_aligned, Body body) {
  return with_element_type(p.element, [&](auto element) {
    using Element = decltype(element);
    const bool is_wide = is_aligned && aligned(p.u) && p.columns % kWide<Element> == 0;
    return is_wide ? body(element, std::integral_constant<int, kWide<Element>>{})
                   : body(element, std::integral_constant<int, 1>{});
  });
}

}  // namespace epigemm::cuda::bands
