// The host's half of the large tiles: no device code in here.
#include <algorithm>
#include <utility>

#include "gemm/sm90/launch.h"
#include "gemm/sm90_tma/eight_bits.h"
#include "open/kernel_names.h"

namespace epigemm::sm90_tma {
namespace {

constexpr auto kTileIndices = std::make_integer_sequence<int, kTileCount>{};
constexpr auto kPairTileIndices = std::make_integer_sequence<int, kPairTileCount>{};
constexpr auto kGroupedTileIndices = std::make_integer_sequence<int, kGroupedTileCount>{};
constexpr auto kGroupedPairTileIndices = std::make_integer_sequence<int, kGroupedPairTileCount>{};
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

template <class Element, int Weights, int TileIndex>
const char* launch_groups(Problem const& problem, Plan const& plan, const void* kernel) {
  const auto launch = problem.is_weight_transposed
                          ? &sm90::launch<GroupedTypes<Element, Weights, TileIndex, /*IsWeightTransposed=*/true>>
                          : &sm90::launch<GroupedTypes<Element, Weights, TileIndex, /*IsWeightTransposed=*/false>>;
  return launch(problem, plan, {}, {}, problem.k, kernel, {});
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

template <class Element, int Weights, int... TileIndex>
LaunchTile find_groups(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchTile launches[] = {&launch_groups<Element, Weights, TileIndex>...};
  return launches[tile];
}

template <class Element>
LaunchTile find_16_bits(Problem const& problem, int tile) {
  if (problem.groups) {
    return problem.is_pair ? find_groups<Element, /*Weights=*/2>(tile, kGroupedPairTileIndices)
                           : find_groups<Element, /*Weights=*/1>(tile, kGroupedTileIndices);
  }
  return problem.is_pair ? find_pair<Element>(tile, kPairTileIndices) : find_tile<Element>(tile, kTileIndices);
}

template <class X, class Weight, class Result, Sums8 sums, int Weights, int TileIndex>
const char* launch_8_bits(Problem const& problem, Plan const& plan, const void* kernel) {
  const auto multiplied = [](Matrix const& matrix, Scale const& scale) {
    return sm90::Multiplied{matrix.data, matrix.row_stride, scale.data, !scale.is_of_rows};
  };
  return sm90::launch<EightBitTypes<X, Weight, Result, sums, TileIndex, Weights>>(
      problem, plan, multiplied(problem.x, problem.x_scale), multiplied(problem.weight, problem.weight_scale),
      problem.k, kernel, sm90::Multiplied{problem.weight2, problem.weight.row_stride});
}

template <class X, class Weight, class Result, Sums8 sums, int Weights, int... TileIndex>
LaunchTile find_8_bits(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchTile launches[] = {&launch_8_bits<X, Weight, Result, sums, Weights, TileIndex>..., nullptr};
  return launches[tile];
}

// Fast, Promoted: how many tiles there are.
template <class X, class Weight, class Result, int Fast, int Promoted, int Weights = 1>
LaunchTile find_8_bits(Problem const& problem, int tile) {
  return problem.arithmetic == Arithmetic::Fast
             ? find_8_bits<X, Weight, Result, Sums8::Fast, Weights>(tile, std::make_integer_sequence<int, Fast>{})
             : find_8_bits<X, Weight, Result, Sums8::Promoted, Weights>(tile,
                                                                        std::make_integer_sequence<int, Promoted>{});
}

constexpr int kEvery = kFastTileCount;

// e4m3 by e4m3. Most: of the tiles that there are.
template <class Result, int Most, int Weights>
LaunchTile find_e4m3(Problem const& problem, int tile) {
  constexpr Results8 results = kResults<Result>;
  using element::e4m3;
  constexpr auto count = [](Sums8 sums) { return std::min(tiles_of_8_bits(sums, Weights == 2, results).count, Most); };
  if (problem.x_scale.is_of_blocks) {
    return find_8_bits<e4m3, e4m3, Result, Sums8::Blocks, Weights>(
        tile, std::make_integer_sequence<int, count(Sums8::Blocks)>{});
  }
  return find_8_bits<e4m3, e4m3, Result, count(Sums8::Fast), count(Sums8::Promoted), Weights>(problem, tile);
}

template <int MostOfOthers, int Weights>
LaunchTile find_e4m3(Problem const& problem, int tile) {
  switch (problem.out.element) {
    case ElementType::Float16:
      return find_e4m3<element::float16, MostOfOthers, Weights>(problem, tile);
    case ElementType::BFloat16:
      return find_e4m3<element::bfloat16, kEvery, Weights>(problem, tile);
    case ElementType::Float32:
      return find_e4m3<element::float32, MostOfOthers, Weights>(problem, tile);
    default:
      return problem.out_scale.is_of_blocks ? find_e4m3<element::bfloat16_to_blocks, kEvery, Weights>(problem, tile)
                                            : find_e4m3<element::bfloat16_to_e4m3, kEvery, Weights>(problem, tile);
  }
}

template <class X, class Weight>
LaunchTile find_e5m2_beside(Problem const& problem, int tile) {
  return find_8_bits<X, Weight, element::bfloat16, kE5M2TileCount, kE5M2TileCount>(problem, tile);
}

LaunchTile find_8_bits(Problem const& problem, int tile) {
  using element::e4m3, element::e5m2;
  if (problem.x.element == ElementType::Float8E5M2) return find_e5m2_beside<e5m2, e4m3>(problem, tile);
  if (problem.weight.element == ElementType::Float8E5M2) return find_e5m2_beside<e4m3, e5m2>(problem, tile);
  return problem.is_pair ? find_e4m3<kOtherResultPairCount, 2>(problem, tile)
                         : find_e4m3<kOtherResultTileCount, 1>(problem, tile);
}

}  // namespace

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels) {
  const ElementType element = problem.x.element;
  const LaunchTile launch = is_8_bits(element)                 ? find_8_bits(problem, plan.tile)
                            : element == ElementType::Float16  ? find_16_bits<element::float16>(problem, plan.tile)
                            : element == ElementType::BFloat16 ? find_16_bits<element::bfloat16>(problem, plan.tile)
                                                               : find_tile<element::tf32>(plan.tile, kTF32TileIndices);
  return launch(problem, plan, kernels.handles[0]);
}

}  // namespace epigemm::sm90_tma
