#include <cmath>
#include <stdexcept>

#include "cpu/kernels.h"
#include "cpu/types.h"
#include "elementwise/fold.h"

namespace epigemm {
namespace cpu {

extern const Kernels kernels_baseline[];
extern const Kernels kernels_x86_64_v3[];
extern const Kernels kernels_x86_64_v4[];

namespace {

struct Level {
  const char* name;
  const Kernels* kernels;
};

Level choose_level() {
#if defined(EPIGEMM_CPU_HAS_X86_64_V4)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("f16c")) {
    return {"x86_64_v4", kernels_x86_64_v4};
  }
#endif
#if defined(EPIGEMM_CPU_HAS_X86_64_V3)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
      __builtin_cpu_supports("f16c")) {
    return {"x86_64_v3", kernels_x86_64_v3};
  }
#endif
  return {"baseline", kernels_baseline};
}

const Level& chosen_level() {
  static const Level level = choose_level();
  return level;
}

double load(const FoldVector& vector, int64_t column, double absent) {
  if (!vector.data) return absent;
  const int64_t offset = column * vector.stride;
  switch (vector.element) {
    case ElementType::Float16:
      return to_compute(static_cast<const Float16*>(vector.data)[offset]);
    case ElementType::BFloat16:
      return to_compute(static_cast<const BFloat16*>(vector.data)[offset]);
    case ElementType::Float64:
      return static_cast<const double*>(vector.data)[offset];
    default:
      return static_cast<const float*>(vector.data)[offset];
  }
}

template <class Element>
void fold(const FoldProblem& problem) {
  for (int64_t column = 0; column < problem.columns; ++column) {
    const FoldedColumn folded = fold_column(problem, column, &load);
    static_cast<Element*>(problem.multiplier)[column] = static_cast<Element>(folded.multiplier);
    static_cast<Element*>(problem.offset)[column] = static_cast<Element>(folded.offset);
  }
}

const Kernels& kernels_of(const ElementwiseProblem& problem) {
  if (!has_compiled_elementwise(problem.epilogue))
    throw std::invalid_argument("this epilogue has no kernel for the CPU");
  return chosen_level().kernels[static_cast<int>(problem.epilogue)];
}

template <class Problem>
void run_in_parallel(const Problem& problem, void (*kernel)(const Problem&, int64_t, int64_t),
                     ParallelFor parallel_for) {
  // Below this many elements a thread's start costs more than it saves; torch's own grain size.
  constexpr int64_t kGrain = 32768;
  struct Context {
    const Problem* problem;
    void (*kernel)(const Problem&, int64_t, int64_t);
  } context{&problem, kernel};
  parallel_for(
      0, problem.elements(), kGrain,
      [](int64_t begin, int64_t end, void* opaque) {
        const auto* context = static_cast<const Context*>(opaque);
        context->kernel(*context->problem, begin, end);
      },
      &context);
}

}  // namespace

const char* level() { return chosen_level().name; }

void run(const ElementwiseProblem& problem, ParallelFor parallel_for) {
  run_in_parallel(problem, kernels_of(problem).forward, parallel_for);
}

void run_derivative(const DerivativeProblem& problem, ParallelFor parallel_for) {
  run_in_parallel(problem, kernels_of(problem).derivative, parallel_for);
}

}  // namespace cpu

void fold_cpu(const FoldProblem& problem) {
  problem.element == ElementType::Float64 ? cpu::fold<double>(problem) : cpu::fold<float>(problem);
}

}  // namespace epigemm
