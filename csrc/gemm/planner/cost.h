// Formulas that the cost models share. Plain C++. Times are in microseconds unless a name says cycles.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gemm/grid.h"
#include "gemm/problem.h"

namespace epigemm::cost {

inline double as_double(int64_t number) { return static_cast<double>(number); }

// Close to the largest one, and larger if they are similar: two limits together take longer than each of them alone.
// Fourth powers, because two square roots are ten times cheaper than a general power.
inline double norm4(double a, double b, double c = 0) {
  a *= a, b *= b, c *= c;
  return std::sqrt(std::sqrt(a * a + b * b + c * c));
}

// The alignment of rows of so many bytes to L2's lines of 128 bytes. A stage of K that straddles two lines costs L2
// more. 0: whole lines, 1: halves, 2: quarters, 3: less.
inline int alignment_class(int64_t row_bytes) {
  return row_bytes % 128 == 0 ? 0 : row_bytes % 64 == 0 ? 1 : row_bytes % 32 == 0 ? 2 : 3;
}

// Device memory's bytes a clock cycle of the multiprocessors.
inline double memory_bytes_per_cycle(const Device& device) { return device.memory_bytes_per_us / device.clock_mhz; }

// The figures were fitted to epilogues of two classes: with nearly no cost, or with a sigmoid.
constexpr FunctorCost kSigmoid = functor_cost("sigmoid");

inline double cycles_of(const FunctorCost& cost, const Problem& problem, FunctorKernel kernel) {
  const bool is_16_bits = element_bytes(problem.out.element) == 2;
  return (is_16_bits ? cost.with_rounded : cost.with_float)[static_cast<int>(kernel)];
}
inline double functor_cycles(const Problem& problem, FunctorKernel kernel) {
  return cycles_of(epilogue_info(problem.epilogue).cost, problem, kernel);
}

inline bool is_transcendental(const Problem& problem, FunctorKernel kernel) {
  constexpr double kLeast = 0.75;  // of a sigmoid's cost, which is that of two exponentials
  return functor_cycles(problem, kernel) >= kLeast * cycles_of(kSigmoid, problem, kernel);
}

// The additional time of a functor compared with those of its class, in cycles of one multiprocessor. A single
// exponential belongs to no class and is counted in full.
inline double longer_functor_cycles(const Problem& problem, FunctorKernel kernel, double elements, bool has_sigmoid) {
  const double in_class = has_sigmoid ? cycles_of(kSigmoid, problem, kernel) : 0;
  return elements * std::max(0.0, functor_cycles(problem, kernel) - in_class);
}
inline double longer_functor_cycles(const Problem& problem, FunctorKernel kernel, double elements) {
  return longer_functor_cycles(problem, kernel, elements, is_transcendental(problem, kernel));
}

// Whether an operand is read as a matrix, from memory. A pair's first one is not.
inline bool reads_matrix(const Problem& p) {
  const EpilogueInfo& epilogue = epilogue_info(p.epilogue);
  for (int i = p.is_pair ? first_matrix(epilogue) + 1 : 1; i < epilogue.operand_count; ++i) {
    if (epilogue.operands[i].kind == OperandKind::Matrix) return true;
  }
  return false;
}

// Bytes of the epilogue's matrix operands, which are read once from device memory. A pair's first matrix is not read.
// A matrix that shares rows has few, which stay in the caches: none are counted.
// In a kernel of several rounds these reads compete with the loads of later rounds; those of the last round are not
// hidden.
inline double matrix_bytes(const Problem& p) {
  const EpilogueInfo& epilogue = epilogue_info(p.epilogue);
  int bytes = 0;  // of one element of the result
  for (int i = p.is_pair ? first_matrix(epilogue) + 1 : 1; i < epilogue.operand_count; ++i) {
    if (epilogue.operands[i].kind != OperandKind::Matrix || epilogue.operands[i].shares_rows) continue;
    const bool is_input = epilogue.operands[i].element == OperandElement::Input;
    bytes += is_input ? element_bytes(p.out.element)
                      : std::max(element_bytes(p.out.element), element_bytes(ElementType::Float32));
  }
  return bytes * as_double(p.m) * as_double(p.n);
}

// Matrices that are written: the result, and the second values of an epilogue that has them.
inline double written_matrices(const Problem& p) { return epilogue_info(p.epilogue).has_store ? 2 : 1; }

// The rounds in which a persistent kernel computes its clusters of tiles.
struct Rounds {
  double count;   // the last one included
  double last;    // the share of the places that is used in the last round
  double places;  // clusters that run at once
};

inline Rounds rounds_of(const Grid& grid, int ctas_per_cluster, int multiprocessors) {
  const int64_t places = std::max<int64_t>(1, multiprocessors / ctas_per_cluster);
  const int64_t clusters = grid.clusters();
  const int64_t count = std::max<int64_t>(1, ceil_div(clusters, places));
  return {as_double(count), as_double(clusters - (count - 1) * places) / as_double(places), as_double(places)};
}

}  // namespace epigemm::cost
