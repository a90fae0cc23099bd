// The host's half of the mma.sync kernels: no device code in here.
#include <algorithm>

#include "device/launch.h"
#include "gemm/grid.h"
#include "gemm/operands.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/arguments.h"
#include "gemm/sm80_mma/tiles.h"
#include "open/kernel_names.h"

namespace epigemm::sm80_mma {
namespace {

Order order_of(Problem const& problem, Plan const& plan, Tile const& tile) {
  const int m = static_cast<int>(ceil_div(problem.m, tile.m)), n = static_cast<int>(ceil_div(problem.n, tile.n));
  const bool is_along_m = plan.raster == Raster::AlongM;
  const int walked = is_along_m ? m : n, across = is_along_m ? n : m;
  return {is_along_m, walked, across, std::min(plan.swizzle, across)};
}

}  // namespace

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels) {
  const Tile& tile = tile_of(element_bytes(problem.x.element), plan.tile);
  const Order order = order_of(problem, plan, tile);
  Arguments arguments{{problem.x.data, problem.x.row_stride},
                      {problem.weight.data, problem.weight.row_stride},
                      problem.out.data,
                      problem.out.row_stride,
                      static_cast<int>(problem.m),
                      static_cast<int>(problem.n),
                      static_cast<int>(problem.k),
                      order,
                      operands_of(problem)};
  void* parameters[] = {&arguments};
  const cuda::LaunchShape shape{{static_cast<unsigned>(order.walked * order.across), 1, 1},
                                {static_cast<unsigned>(tile.threads()), 1, 1},
                                /*cluster=*/{1, 1, 1},
                                static_cast<std::size_t>(tile.shared_bytes()),
                                problem.device.index,
                                problem.stream,
                                /*dependent=*/false};
  const void* const kernel = kernels.handles[0];
  const char* const refused = cuda::allow(kernel, shape.device, shape.shared_bytes, sizeof arguments);
  return refused ? refused : cuda::launch(kernel, shape, parameters);
}

}  // namespace epigemm::sm80_mma
