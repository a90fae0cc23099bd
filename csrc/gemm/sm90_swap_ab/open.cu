// The host's half of the kernels whose epilogue is linked in: no device code in here.
#include "gemm/sm90_swap_ab/open.h"

#include "gemm/sm90_swap_ab/launch.h"
#include "link/kernels.h"

namespace epigemm::sm90_swap_ab {
namespace {

using LaunchOpen = const char* (*)(Problem const&, Plan const&, const void* kernel);

template <class Stored, int TileIndex>
const char* launch_open_one(Problem const& problem, Plan const& plan, const void* kernel) {
  return launch_with<Config<Stored, TileIndex>>(
      problem, plan, link::operands_of(problem), [kernel](sm90::LaunchShape const& shape, void** parameters) {
        const char* const refused =
            link::allow(kernel, shape.device, shape.shared_bytes, /*parameter_bytes=*/sizeof(CUtensorMap));
        return refused ? refused : cuda::launch(kernel, shape, parameters);
      });
}

template <class Stored, int... TileIndex>
LaunchOpen find_tile(int tile, std::integer_sequence<int, TileIndex...>) {
  constexpr LaunchOpen launches[] = {&launch_open_one<Stored, TileIndex>...};
  return launches[tile];
}

}  // namespace

const char* launch_open(Problem const& problem, Plan const& plan, const void* kernel) {
  constexpr auto kTileIndices = std::make_integer_sequence<int, kTileCount>{};
  const ElementType element = problem.x.element;
  const LaunchOpen launch = element == ElementType::Float16    ? find_tile<element::float16>(plan.tile, kTileIndices)
                            : element == ElementType::BFloat16 ? find_tile<element::bfloat16>(plan.tile, kTileIndices)
                                                               : find_tile<element::tf32>(plan.tile, kTileIndices);
  return launch(problem, plan, kernel);
}

}  // namespace epigemm::sm90_swap_ab
