// The host's half of the large tiles: no device code in here.
#include <utility>

#include "gemm/sm90/launch.h"
#include "gemm/sm90_tma/kernel.h"
#include "open/kernel_names.h"

namespace epigemm::sm90_tma {
namespace {

constexpr auto kTileIndices = std::make_integer_sequence<int, kTileCount>{};
constexpr auto kTF32TileIndices = std::make_integer_sequence<int, kTF32TileCount>{};

template <class Element, int TileIndex>
const char* launch_tile(Problem const& problem, Plan const& plan, const void* kernel) {
  return sm90::launch<Types<Element, TileIndex>>(problem, plan, {problem.x.data, problem.x.row_stride},
                                                 {problem.weight.data, problem.weight.row_stride}, problem.k, kernel);
}

using LaunchTile = const char* (*)(Problem const&, Plan const&, const void*);

template <class Element, int... TileIndex>
LaunchTile find_tile(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchTile launches[] = {&launch_tile<Element, TileIndex>...};
  return launches[tile];
}

}  // namespace

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels) {
  const ElementType element = problem.x.element;
  const LaunchTile launch = element == ElementType::Float16    ? find_tile<element::float16>(plan.tile, kTileIndices)
                            : element == ElementType::BFloat16 ? find_tile<element::bfloat16>(plan.tile, kTileIndices)
                                                               : find_tile<element::tf32>(plan.tile, kTF32TileIndices);
  return launch(problem, plan, kernels.handles[0]);
}

}  // namespace epigemm::sm90_tma
