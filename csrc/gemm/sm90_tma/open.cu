// The host's half of the large tiles: no device code in here.
#include "gemm/sm90/run.h"
#include "gemm/sm90_tma/kernel_names.h"
#include "gemm/sm90_tma/open_kernel.h"

namespace epigemm::sm90_tma {
namespace {

template <class Element, bool MatrixByTma, int TileIndex>
const char* launch_tile(Problem const& problem, Plan const& plan, const void* kernel) {
  using Open = OpenKernel<Element, TileIndex, MatrixByTma>;
  return sm90::run<typename Open::GemmKernel>(kernel, Open::arguments(problem, plan), problem.stream);
}

using LaunchOpen = const char* (*)(Problem const&, Plan const&, const void*);

template <class Element, bool MatrixByTma, int... TileIndex>
LaunchOpen launch_of(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchOpen launches[] = {&launch_tile<Element, MatrixByTma, TileIndex>...};
  return launches[tile];
}

template <class Element>
const char* launch_element(Problem const& problem, Plan const& plan, const void* kernel) {
  constexpr auto tiles = std::make_integer_sequence<int, kTileCount>{};
  const LaunchOpen launch = has_matrix_by_tma(problem) ? launch_of<Element, /*MatrixByTma=*/true>(plan.tile, tiles)
                                                       : launch_of<Element, /*MatrixByTma=*/false>(plan.tile, tiles);
  return launch(problem, plan, kernel);
}

}  // namespace

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels) {
  const void* const kernel = kernels.handles[0];
  switch (problem.x.element) {
    case ElementType::Float16:
      return launch_element<element::float16>(problem, plan, kernel);
    case ElementType::BFloat16:
      return launch_element<element::bfloat16>(problem, plan, kernel);
    default:
      return launch_element<element::tf32>(problem, plan, kernel);
  }
}

}  // namespace epigemm::sm90_tma
