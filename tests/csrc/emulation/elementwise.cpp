// The elementwise kernels' own source on the CPU, with the host's half that launches them: what every thread stores
// against the functor, applied element by element. The bits are the same, for the arithmetic is the same C++.
//
// Prints how many problems were run; exits with 1 where one is wrong, or writes beside its results.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string>

#include "emulation/fibers.h"

using std::max;
using std::min;

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// --- the functor that is linked in: it reads a slot of every kind, of both element types
// -------------------------------

#define EPIGEMM_SLOTS(T) T c0, T c1, T c2, T c3, T s0, T s1, T s2, T s3, T r0, T r1, T m0, T m1
#include "open/contract.h"

namespace {

template <class T>
T value_of(T acc, T c0, T c1, T s0, T r0, T m0, T m1) {
  return (acc + c0) * c1 * s0 + r0 * m0 - m1;
}

template <class T>
T slope_of(T acc, T c0, T c1, T s0, T r0, T m0, int slot) {
  using namespace epigemm::open;
  return slot == kColumn0 + 1   ? (acc + c0) * s0
         : slot == kScalar0     ? (acc + c0) * c1
         : slot == kRow0        ? m0
         : slot == kMatrix0     ? r0
         : slot == kMatrix0 + 1 ? T(-1)
                                : c1 * s0;
}

}  // namespace

extern "C" int epigemm_operand(int slot) {
  using namespace epigemm::open;
  if (slot == kColumn0 || slot == kRow0 || slot == kMatrix0) return kOfElement;
  return slot == kColumn0 + 1 || slot == kScalar0 || slot == kMatrix0 + 1 ? kOfCompute : kUnread;
}
constexpr int kRowsEach = 3;  // for a row of the matrix that shares rows
extern "C" bool epigemm_shares_rows(int slot) { return slot == epigemm::open::kMatrix0 + 1; }
extern "C" float epigemm_apply(float acc, EPIGEMM_SLOTS(float)) { return value_of(acc, c0, c1, s0, r0, m0, m1); }
extern "C" double epigemm_apply_double(double acc, EPIGEMM_SLOTS(double)) {
  return value_of(acc, c0, c1, s0, r0, m0, m1);
}
extern "C" float epigemm_apply_near(float acc, EPIGEMM_SLOTS(float), bool& is_far) {
  is_far |= acc > 1.0f;  // beyond, the kernel must take the result of epigemm_apply
  return acc > 1.0f ? -1e30f : value_of(acc, c0, c1, s0, r0, m0, m1);
}
extern "C" bool epigemm_has_far() { return true; }
extern "C" void epigemm_apply_four(const float*, const float*, float*) {}
extern "C" void epigemm_apply_near_four(const float*, const float*, float*, bool&) {}
extern "C" bool epigemm_has_store() { return false; }
extern "C" float epigemm_store(float, EPIGEMM_SLOTS(float)) { return 0; }
extern "C" float epigemm_store_near(float, EPIGEMM_SLOTS(float), bool&) { return 0; }
extern "C" bool epigemm_has_far_store() { return false; }
extern "C" float epigemm_slope(float acc, EPIGEMM_SLOTS(float), int slot) {
  return slope_of(acc, c0, c1, s0, r0, m0, slot);
}
extern "C" double epigemm_slope_double(double acc, EPIGEMM_SLOTS(double), int slot) {
  return slope_of(acc, c0, c1, s0, r0, m0, slot);
}

#undef __shared__
#define __shared__ static
#undef __launch_bounds__
#define __launch_bounds__(...)
#ifndef __grid_constant__
#define __grid_constant__
#endif

#include "elementwise/compiled.cuh"
#include "elementwise/launch.cu"
#include "elementwise/problem.cpp"
#include "epilogue/scale_batch_norm.h"
#include "epilogue/sigmoid.h"
#include "epilogue/sigmoid_scale_residual.h"

// --- launches
// ----------------------------------------------------------------------------------------------------------

namespace {

using namespace epigemm;
using namespace epigemm::cuda;

std::function<void(const void*, void**)> call;  // of a kernel, by a thread
bool has_barriers = false;
std::set<const void*> launched;
int problems = 0;

template <class Arguments>
void expect(bool is_sum) {
  call = [](const void* kernel, void** parameters) {
    reinterpret_cast<void (*)(Arguments)>(const_cast<void*>(kernel))(*static_cast<Arguments*>(parameters[0]));
  };
  has_barriers = is_sum;
}

}  // namespace

extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** parameters) {
  launched.insert(kernel);
  for (unsigned block = 0; block < config->gridDim.x; ++block) {
    const int threads = static_cast<int>(config->blockDim.x);
    blockIdx.x = block, gridDim.x = config->gridDim.x;
    if (has_barriers) emulation::run_fibers(threads, blockIdx, 37 * block % threads, [&] { call(kernel, parameters); });
    for (int i = 0; i < threads && !has_barriers; ++i) {
      threadIdx.x = i;
      call(kernel, parameters);
    }
  }
  return cudaSuccess;
}
extern "C" cudaError_t cudaGetLastError() { return cudaSuccess; }
extern "C" const char* cudaGetErrorString(cudaError_t) { return "an error"; }

namespace {

// Of the functor that is linked in: as open_unit.cu.in.
template <class Element>
struct LinkedKernels {
  static void value(ElementwiseArguments<Element> p) { run_elementwise<open::Linked, Parts::Any>(p); }
  static void derivative(DerivativeArguments<Element> p) { run_derivative<open::Linked, Parts::Any>(p); }
  static void sums(DerivativeArguments<Element> p) { run_derivative_sums<open::Linked, Parts::Any>(p); }
};

template <class Functor, class Element>
struct Kernels {
  using Called = Compiled<Functor, Element>;
  static KernelForms of(ElementwiseKernel which, ElementType element) { return kernel_of<Functor>(which, element); }
};
template <class Element>
struct Kernels<open::Linked, Element> {
  using Called = open::Linked;
  static KernelForms of(ElementwiseKernel which, ElementType) {
    using Linked = LinkedKernels<Element>;
    if (which == ElementwiseKernel::Value) return {reinterpret_cast<const void*>(&Linked::value)};
    return {
        reinterpret_cast<const void*>(which == ElementwiseKernel::Derivative ? &Linked::derivative : &Linked::sums)};
  }
};

// --- problems
// ----------------------------------------------------------------------------------------------------------

void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

uint32_t state = 7;

// From -2 to 2.
float drawn() {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(static_cast<int>(state >> 16) % 4096 - 2048) / 1024;
}

// A matrix in memory that begins `begins` elements behind a multiple of 64 bytes, with `gap` elements behind each row.
template <class T>
struct Memory {
  int64_t rows, columns, stride, begins;
  std::vector<T> all;
  T* base;

  Memory(int64_t rows, int64_t columns, int begins, int gap, bool is_drawn = true)
      : rows(rows), columns(columns), stride(columns + gap), begins(begins), all(rows * stride + 192, T(-12345.0f)) {
    base = reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(all.data() + 32) + 63) / 64 * 64) + begins;
    for (int64_t i = 0; is_drawn && i < rows * columns; ++i) at(i / columns, i % columns) = T(drawn());
  }
  Memory(const Memory&) = delete;
  T& at(int64_t i, int64_t j) { return base[i * stride + j]; }
  // Whether all elements are those of `wanted`, also those that belong to no row.
  template <class Wanted>
  void check(const std::string& name, Wanted wanted) {
    std::vector<T> expected(all.size(), T(-12345.0f));
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) expected[&at(i, j) - all.data()] = wanted(i, j);
    }
    if (std::memcmp(all.data(), expected.data(), all.size() * sizeof(T)) != 0) fail(name);
  }
};

struct Case {
  int64_t m, n;
  int begins, gap;
  bool has_columns;
};

// The operands of a functor, each in memory of its own.
template <class Called, class Element>
struct Given {
  using Compute = typename ComputeType<Element>::type;
  Case sizes;
  std::vector<std::unique_ptr<Memory<Element>>> of_element{open::kSlots};
  std::vector<std::unique_ptr<Memory<Compute>>> of_compute{open::kSlots};
  SlotOperands operands{};

  explicit Given(const Case& sizes) : sizes(sizes) {
    for (int number = 1; number < kOperandKinds; ++number) {
      const KindTraits traits = traits_of(static_cast<OperandKind>(number));
      const int first = open::first_slot(static_cast<OperandKind>(number));
      for (int i = 0; i < traits.most; ++i) {
        if (Called::operand(first + i) != open::kUnread) draw(first + i, traits, i);
      }
    }
  }
  void draw(int slot, KindTraits traits, int number) {
    const bool is_matrix = traits.by_row && traits.by_column;
    if (!traits.by_row && !traits.by_column) {
      operands.scalars[number] = 0.75;
      return;
    }
    if (!traits.by_row && !sizes.has_columns) return;
    const int64_t rows = !traits.by_row              ? 1
                         : Called::shares_rows(slot) ? bands::divided_up(sizes.m, kRowsEach)
                                                     : sizes.m;
    const int64_t columns = traits.by_column ? sizes.n : 1;
    const auto made = [&](auto& memory) {
      memory.reset(new std::decay_t<decltype(*memory)>(rows, columns, sizes.begins, is_matrix ? sizes.gap : 0));
      operands.data[slot] = memory->base;
      if (is_matrix) operands.matrix_strides[number] = memory->stride;
    };
    Called::operand(slot) == open::kOfElement ? made(of_element[slot]) : made(of_compute[slot]);
    if (Called::shares_rows(slot)) operands.shared_rows[number] = open::SharedRows::by(kRowsEach);
  }
  void values(int64_t i, int64_t j, Compute (&to)[open::kSlots]) const {
    for (int slot = 0; slot < open::kSlots; ++slot) {
      const bool is_column = slot < open::kScalar0, is_row = slot >= open::kRow0;
      const int64_t row = !is_row ? 0 : Called::shares_rows(slot) ? i / kRowsEach : i;
      const int64_t column = is_column || slot >= open::kMatrix0 ? j : 0;
      to[slot] = is_column ? Compute(kIsAbsentNegative<Element> ? -0.0 : 0.0) : Compute(0);
      if (!is_column && !is_row && Called::operand(slot)) to[slot] = Compute(operands.scalars[slot - open::kScalar0]);
      if (of_element[slot]) to[slot] = to_compute(of_element[slot]->at(row, column));
      if (of_compute[slot]) to[slot] = of_compute[slot]->at(row, column);
    }
  }
};

template <class Functor, class Element>
struct Check {
  using Called = typename Kernels<Functor, Element>::Called;
  using Compute = typename ComputeType<Element>::type;
  static constexpr bool kIsLinked = std::is_same_v<Functor, open::Linked>;
  ElementType element;
  std::string name;

  KernelForms kernel(ElementwiseKernel which) const { return Kernels<Functor, Element>::of(which, element); }

  void value(const Case& c) const {
    const Given<Called, Element> given(c);
    Memory<Element> x(c.m, c.n, c.begins, c.gap), out(c.m, c.n, c.begins, c.gap, false);
    expect<ElementwiseArguments<Element>>(false);
    const char* const refused = launch_elementwise(
        {element, c.m, c.n, x.base, x.stride, out.base, out.stride, given.operands}, kernel(ElementwiseKernel::Value));
    if (refused) fail(refused);
    out.check(name + ": value", [&](int64_t i, int64_t j) {
      Compute values[open::kSlots];
      given.values(i, j, values);
      return from_compute<Element>(Called::Result::of(to_compute(x.at(i, j)), values));
    });
    ++problems;
  }

  // `acc_type`: an Element, or a Compute.
  template <class Acc>
  void derivative(const Case& c, Acc, bool with_slots, bool with_sums) const {
    const Given<Called, Element> given(c);
    Memory<Element> grad(c.m, c.n, c.begins, c.gap);
    Memory<Acc> acc(c.m, c.n, c.begins, c.gap), of_acc(c.m, c.n, c.begins, 0, false);
    std::vector<std::unique_ptr<Memory<Compute>>> of_slot(open::kSlots);
    DerivativeProblem problem{element,     c.m,      c.n,        grad.base,
                              grad.stride, acc.base, acc.stride, !std::is_same_v<Acc, Element>};
    problem.of_acc = {of_acc.base, problem.is_acc_of_compute};
    problem.operands = given.operands;
    for (int slot = 0; slot < open::kSlots && with_slots; ++slot) {
      if (!Called::is_derived(slot)) continue;
      of_slot[slot].reset(new Memory<Compute>(c.m, c.n, c.begins, 0, false));
      problem.of_slot[slot] = {of_slot[slot]->base, true};
    }
    std::vector<Compute> sums;
    if (with_sums) {
      if (!can_sum_columns(problem, !kIsLinked)) return;
      problem.parts = sum_parts(problem);
      sums.assign(problem.parts * c.n, Compute(NAN));
      problem.partial_sums = sums.data();
    }
    expect<DerivativeArguments<Element>>(with_sums);
    const auto which = with_sums ? ElementwiseKernel::DerivativeSums : ElementwiseKernel::Derivative;
    if (const char* const refused = launch_derivative(problem, kernel(which))) fail(refused);
    const auto wanted = [&](int64_t i, int64_t j, int slot) {
      Compute values[open::kSlots];
      given.values(i, j, values);
      return Called::derivative(to_compute(grad.at(i, j)), to_compute(acc.at(i, j)), values, slot);
    };
    of_acc.check(name + ": derivative", [&](int64_t i, int64_t j) { return from_compute<Acc>(wanted(i, j, -1)); });
    for (int slot = 0; slot < open::kSlots; ++slot) {
      if (!of_slot[slot]) continue;
      of_slot[slot]->check(name + ": derivative of a slot", [&](int64_t i, int64_t j) { return wanted(i, j, slot); });
    }
    for (int64_t j = 0; j < c.n && with_sums; ++j) check_sum(of_acc, sums, problem.parts, j);
    ++problems;
  }

  template <class Acc>
  void check_sum(Memory<Acc>& of_acc, const std::vector<Compute>& sums, int64_t parts, int64_t j) const {
    double found = 0, exact = 0, magnitude = 0;
    for (int64_t part = 0; part < parts; ++part) found += sums[part * of_acc.columns + j];
    for (int64_t i = 0; i < of_acc.rows; ++i) {
      const double each = to_compute(of_acc.at(i, j));
      exact += each, magnitude += std::abs(each);
    }
    if (!(std::abs(found - exact) <= 1e-5 * magnitude)) fail(name + ": sums");
  }

  // x's axes in another order than out's.
  void strided() const {
    if constexpr (!kIsLinked) {
      const int64_t sizes[] = {3, 5, 7};
      const Given<Called, Element> given({1, 7, 0, 0, true});
      Memory<Element> x(1, 105, 1, 0), out(1, 105, 1, 0, false);
      StridedProblem problem;
      problem.element = element;
      problem.dimensions = 3;
      std::copy_n(sizes, 3, problem.sizes);
      const int64_t of_out[] = {35, 7, 1}, of_x[] = {1, 3, 15}, of_columns[] = {0, 0, 1};
      std::copy_n(of_out, 3, problem.strides[StridedProblem::kOut]);
      std::copy_n(of_x, 3, problem.strides[StridedProblem::kX]);
      std::copy_n(of_columns, 3, problem.strides[StridedProblem::kColumn]);
      problem.x = x.base;
      problem.out = out.base;
      problem.operands = given.operands;
      problem.multiprocessors = 1;
      simplify(problem);
      ElementwiseProblem matrix;
      if (as_matrix(problem, &matrix)) fail(name + ": is no matrix");
      const KernelForms kernels = kernel(ElementwiseKernel::Strided);
      for (const KernelForms& each : {kernels, KernelForms{kernels.any, kernels.any}}) {
        expect<StridedArguments<Element>>(false);
        if (const char* const refused = launch_strided(problem, each)) fail(refused);
        out.check(name + ": strided", [&](int64_t, int64_t at) {
          Compute values[open::kSlots];
          given.values(0, at % 7, values);
          const Element from = x.at(0, at / 35 + at / 7 % 5 * 3 + at % 7 * 15);
          return from_compute<Element>(Called::Result::of(to_compute(from), values));
        });
        ++problems;
      }
    }
  }

  // A number without axes.
  void point() const {
    if constexpr (!kIsLinked) {
      Given<Called, Element> given({1, 1, 0, 0, false});
      Memory<Element> x(1, 1, 1, 0), out(1, 1, 1, 0, false);
      StridedProblem problem;
      problem.element = element;
      problem.x = x.base;
      problem.out = out.base;
      problem.operands = given.operands;
      simplify(problem);
      ElementwiseProblem matrix;
      if (!as_matrix(problem, &matrix)) fail(name + ": is a matrix");
      expect<ElementwiseArguments<Element>>(false);
      if (const char* const refused = launch_elementwise(matrix, kernel(ElementwiseKernel::Value))) fail(refused);
      out.check(name + ": point", [&](int64_t, int64_t) {
        Compute values[open::kSlots];
        given.values(0, 0, values);
        return from_compute<Element>(Called::Result::of(to_compute(x.at(0, 0)), values));
      });
      ++problems;
    }
  }

  void run() const {
    launched.clear();
    // Elements before each matrix, and behind each of its rows.
    const int places[][2] = {{0, 0}, {0, 3}, {0, 8}, {1, 0}};
    const int64_t shapes[][2] = {{1, 1}, {1, 4099}, {5, 33}, {9, 7}, {7, 64}, {70, 264}};
    for (const auto& [m, n] : shapes) {
      for (const auto& [begins, gap] : places) {
        for (const bool has_columns : {true, false}) {
          const Case each{m, n, begins, gap, has_columns};
          value(each);
          for (const bool with_slots : {false, true}) {
            for (const bool with_sums : {false, true}) {
              derivative(each, Element{}, with_slots, with_sums);
              if (kIsLinked) derivative(each, Compute{}, with_slots, with_sums);
            }
          }
        }
      }
    }
    strided();
    point();
    for (const auto which : {ElementwiseKernel::Value, ElementwiseKernel::Derivative, ElementwiseKernel::DerivativeSums,
                             ElementwiseKernel::Strided}) {
      if (kIsLinked && which == ElementwiseKernel::Strided) continue;
      const KernelForms forms = kernel(which);
      if (!launched.count(forms.any) || (forms.most && !launched.count(forms.most)))
        fail(name + ": a kernel never ran");
    }
  }
};

}  // namespace

int main() {
  Check<SigmoidScaleResidual, __half>{ElementType::Float16, "a scalar, float16"}.run();
  Check<SigmoidScaleResidual, __nv_bfloat16>{ElementType::BFloat16, "a scalar, bfloat16"}.run();
  Check<SigmoidScaleResidual, float>{ElementType::Float32, "a scalar, float32"}.run();
  Check<SigmoidScaleResidual, double>{ElementType::Float64, "a scalar, float64"}.run();
  Check<ScaleBatchNorm, __half>{ElementType::Float16, "folded vectors, float16"}.run();
  Check<Sigmoid, float>{ElementType::Float32, "no operand, float32"}.run();
  Check<open::Linked, __half>{ElementType::Float16, "linked, float16"}.run();
  Check<open::Linked, float>{ElementType::Float32, "linked, float32"}.run();
  Check<open::Linked, double>{ElementType::Float64, "linked, float64"}.run();
  std::printf("%d\n", problems);
}
