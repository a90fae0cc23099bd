// Formulas that the cost models share. Plain C++. Times are in microseconds unless a name says cycles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm/grid.h"
#include "gemm/problem.h"

namespace epigemm::cost {

inline double as_double(int64_t number) { return static_cast<double>(number); }

// Close to the largest, and more where they are alike: what limits together takes longer than each limit alone. Fourth
// powers, for two square roots are an order cheaper than a general power.
inline double norm4(double a, double b, double c = 0) {
  a *= a, b *= b, c *= c;
  return std::sqrt(std::sqrt(a * a + b * b + c * c));
}

// How rows of so many bytes lie in L2's lines of 128: a stage of K that straddles two of them costs L2 more. 0: whole
// lines, 1: halves, 2: quarters, 3: less.
inline int alignment_class(int64_t row_bytes) {
  return row_bytes % 128 == 0 ? 0 : row_bytes % 64 == 0 ? 1 : row_bytes % 32 == 0 ? 2 : 3;
}

// Device memory's bytes a clock cycle of the multiprocessors.
inline double memory_bytes_per_cycle(const Device& device) { return device.memory_bytes_per_us / device.clock_mhz; }

// The epilogues that the figures are fitted to are of two classes, by their special functions an element: none, or the
// two of a sigmoid.
constexpr int kFunctionsOfSigmoid = 2;

inline int special_functions(const Problem& problem) { return epilogue_info(problem.epilogue).special_functions; }
inline bool is_transcendental(const Problem& problem) { return special_functions(problem) >= kFunctionsOfSigmoid; }

// What a functor takes for special functions that its class does not have (`in_class`), in cycles of one
// multiprocessor, which computes 16 of them a cycle. The count is that of a functor's fp32 form; its form for
// 16-bit results is about a third as long. Above a limit the count no longer predicts the time.
inline double longer_functor_cycles(const Problem& problem, double elements, int in_class) {
  constexpr int kMostFunctions = 64;
  const double per_cycle = element_bytes(problem.out.element) == 2 ? 54 : 16;
  const int more = std::clamp(special_functions(problem), in_class, kMostFunctions) - in_class;
  return elements * more / per_cycle;
}
inline double longer_functor_cycles(const Problem& problem, double elements) {
  return longer_functor_cycles(problem, elements, is_transcendental(problem) ? kFunctionsOfSigmoid : 0);
}

// Bytes of the epilogue's matrix operands, which are read once, from device memory. In a kernel of several rounds what
// the earlier ones read competes with the loads of later rounds; nothing hides what the last one reads.
inline double matrix_bytes(const Problem& p) {
  const EpilogueInfo& epilogue = epilogue_info(p.epilogue);
  int bytes = 0;  // of one element of the result
  for (int i = 1; i < epilogue.operand_count; ++i) {
    if (epilogue.operands[i].kind != OperandKind::Matrix) continue;
    const bool is_input = epilogue.operands[i].element == OperandElement::Input;
    bytes += is_input ? element_bytes(p.x.element)
                      : std::max(element_bytes(p.x.element), element_bytes(ElementType::Float32));
  }
  return bytes * as_double(p.m) * as_double(p.n);
}

// The rounds in which a persistent kernel goes through its clusters of tiles, padding included.
struct Rounds {
  double count;   // the last one included
  double last;    // the share of the places that the last round takes
  double places;  // clusters at work at once
};

inline Rounds rounds_of(const Grid& grid, int swizzle, int ctas_per_cluster, int multiprocessors) {
  const int64_t places = std::max<int64_t>(1, multiprocessors / ctas_per_cluster);
  const int64_t clusters = round_up(grid.clusters_m, swizzle) * round_up(grid.clusters_n, swizzle);
  const int64_t count = std::max<int64_t>(1, ceil_div(clusters, places));
  return {as_double(count), as_double(clusters - (count - 1) * places) / as_double(places), as_double(places)};
}

}  // namespace epigemm::cost
