// The host's half of the swap-AB kernels: no device code in here.
#include <utility>

#include "gemm/sm90_swap_ab/launch.h"
#include "open/kernel_names.h"

namespace epigemm::sm90_swap_ab {
namespace {

using LaunchTile = const char* (*)(Problem const&, Plan const&, const void* kernel);

template <class Stored, int... TileIndex>
LaunchTile find_tile(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchTile launches[] = {&launch_tile<Config<Stored, TileIndex>>...};
  return launches[tile];
}

}  // namespace

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels) {
  constexpr auto kTileIndices = std::make_integer_sequence<int, kTileCount>{};
  const ElementType element = problem.x.element;
  const LaunchTile launch = element == ElementType::Float16    ? find_tile<element::float16>(plan.tile, kTileIndices)
                            : element == ElementType::BFloat16 ? find_tile<element::bfloat16>(plan.tile, kTileIndices)
                                                               : find_tile<element::tf32>(plan.tile, kTileIndices);
  return launch(problem, plan, kernels.handles[0]);
}

}  // namespace epigemm::sm90_swap_ab
