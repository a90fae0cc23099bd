// The host's half of the large tiles: no device code in here.
#include <utility>

#include "gemm/sm90/launch.h"
#include "gemm/sm90_tma/kernel.h"
#include "open/kernel_names.h"

namespace epigemm::sm90_tma {
namespace {

constexpr auto kTileIndices = std::make_integer_sequence<int, kTileCount>{};
constexpr auto kPairTileIndices = std::make_integer_sequence<int, kPairTileCount>{};
constexpr auto kTF32TileIndices = std::make_integer_sequence<int, kTF32TileCount>{};

template <class Element, int TileIndex>
const char* launch_tile(Problem const& problem, Plan const& plan, const void* kernel) {
  return sm90::launch<Types<Element, TileIndex>>(problem, plan, {problem.x.data, problem.x.row_stride},
                                                 {problem.weight.data, problem.weight.row_stride}, problem.k, kernel);
}

template <class Element, int TileIndex>
const char* launch_pair(Problem const& problem, Plan const& plan, const void* kernel) {
  const auto multiplied = [&](const void* weight) { return sm90::Multiplied{weight, problem.weight.row_stride}; };
  return sm90::launch<PairTypes<Element, TileIndex>>(problem, plan, {problem.x.data, problem.x.row_stride},
                                                     multiplied(problem.weight.data), problem.k, kernel,
                                                     multiplied(problem.weight2));
}

using LaunchTile = const char* (*)(Problem const&, Plan const&, const void*);

template <class Element, int... TileIndex>
LaunchTile find_tile(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchTile launches[] = {&launch_tile<Element, TileIndex>...};
  return launches[tile];
}

template <class Element, int... TileIndex>
LaunchTile find_pair(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchTile launches[] = {&launch_pair<Element, TileIndex>...};
  return launches[tile];
}

template <class Element>
LaunchTile find_16_bits(Problem const& problem, int tile) {
  return problem.is_pair ? find_pair<Element>(tile, kPairTileIndices) : find_tile<Element>(tile, kTileIndices);
}

}  // namespace

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels) {
  const ElementType element = problem.x.element;
  const LaunchTile launch = element == ElementType::Float16    ? find_16_bits<element::float16>(problem, plan.tile)
                            : element == ElementType::BFloat16 ? find_16_bits<element::bfloat16>(problem, plan.tile)
                                                               : find_tile<element::tf32>(plan.tile, kTF32TileIndices);
  return launch(problem, plan, kernels.handles[0]);
}

}  // namespace epigemm::sm90_tma
