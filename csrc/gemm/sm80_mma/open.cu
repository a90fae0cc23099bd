// The host's half of the mma.sync kernels: no device code in here.
#include <algorithm>

#include "device/fill.h"
#include "device/launch.h"
#include "gemm/fp16_slices/coverage.h"
#include "gemm/fp16_slices/kernels.h"
#include "gemm/grid.h"
#include "gemm/operands.h"
#include "gemm/sm80_mma/arguments.h"
#include "gemm/sm80_mma/shares.h"
#include "open/kernel_names.h"

namespace epigemm::sm80_mma {
namespace {

Order order_of(Problem const& problem, Plan const& plan, Tile const& tile) {
  const int m = static_cast<int>(ceil_div(problem.m, tile.m)), n = static_cast<int>(ceil_div(problem.n, tile.n));
  const bool is_along_m = plan.raster == Raster::AlongM;
  const int walked = is_along_m ? m : n, across = is_along_m ? n : m;
  return {is_along_m, walked, across, std::min(plan.swizzle, across)};
}

// Of K, with the counters and the sums behind what fp16 slices take of the workspace.
Division division_of(Problem const& problem, Plan const& plan, Tile const& tile) {
  const int units = static_cast<int>(units_of(problem, tile));
  Division division{plan.splits, units / plan.splits, units % plan.splits};
  if (plan.splits > 1) {
    char* const counters = static_cast<char*>(problem.workspace) + fp16_slices::workspace_bytes(problem);
    division.arrived = reinterpret_cast<int*>(counters);
    division.sums = reinterpret_cast<float*>(counters + counter_bytes(problem, tile));
  }
  return division;
}

// CTAs along the tiles. Where a multiprocessor runs one at a time, it goes on to further tiles, and loads them while it
// finishes the one before. Of smaller tiles another CTA multiplies in that time.
int ctas_along_tiles(Problem const& problem, Plan const& plan, Tile const& tile, Order const& order) {
  const int tiles = order.walked * order.across;
  return plan.splits == 1 && tile.is_alone() ? std::min(tiles, problem.device.multiprocessors) : tiles;
}

const char* clear_counters(Problem const& problem, Division const& division, int64_t bytes) {
  if (division.splits == 1) return nullptr;
  return cuda::fill(division.arrived, 0, bytes / 2, problem.device.index, problem.stream);
}

// `k`: elements of a row of both operands.
const char* launch_gemm(Problem const& problem, Plan const& plan, Rows const& x, Rows const& weight, int64_t k,
                        const void* kernel) {
  const Tile& tile = tile_of(problem, plan.tile);
  const Order order = order_of(problem, plan, tile);
  const Division division = division_of(problem, plan, tile);
  Arguments arguments{x,
                      weight,
                      problem.out.data,
                      problem.out.row_stride,
                      static_cast<int>(problem.m),
                      static_cast<int>(problem.n),
                      static_cast<int>(k),
                      order,
                      division,
                      operands_of(problem)};
  void* parameters[] = {&arguments};
  const cuda::LaunchShape shape{
      {static_cast<unsigned>(ctas_along_tiles(problem, plan, tile, order)), static_cast<unsigned>(plan.splits), 1},
      {static_cast<unsigned>(tile.threads()), 1, 1},
      /*cluster=*/{1, 1, 1},
      static_cast<std::size_t>(tile.shared_bytes()),
      problem.device.index,
      problem.stream,
      /*dependent=*/false};
  const char* refused = cuda::allow(kernel, shape.device, shape.shared_bytes, sizeof arguments);
  if (!refused) refused = clear_counters(problem, division, counter_bytes(problem, tile));
  return refused ? refused : cuda::launch(kernel, shape, parameters);
}

const char* launch_on_slices(fp16_slices::SplitProblem const& split, Plan const& plan, const void* kernel) {
  const int64_t row = split.x.padded_columns * fp16_slices::slices_of(split.problem.arithmetic);
  const auto rows = [&](fp16_slices::SplitMatrix const& matrix) { return Rows{matrix.slices, row, matrix.roots}; };
  return launch_gemm(split.problem, plan, rows(split.x), rows(split.weight), row, kernel);
}

}  // namespace

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels) {
  if (is_on_slices(problem.arithmetic)) {
    return fp16_slices::launch(problem, plan, kernels, &launch_on_slices, fp16_slices::FixupStart::BehindGemm);
  }
  const auto rows = [](Matrix const& matrix) { return Rows{matrix.data, matrix.row_stride}; };
  return launch_gemm(problem, plan, rows(problem.x), rows(problem.weight), problem.k, kernels.handles[0]);
}

}  // namespace epigemm::sm80_mma
