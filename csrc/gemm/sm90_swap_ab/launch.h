// Launching a swap-AB kernel.
#pragma once

#include "device/launch.h"
#include "gemm/grid.h"
#include "gemm/operands.h"
#include "gemm/problem.h"
#include "gemm/sm90/tensor_map.h"
#include "gemm/sm90_swap_ab/kernel.cuh"

namespace epigemm::sm90_swap_ab {

// The element types of a unit, as torch stores them.
namespace element {
using float16 = __half;
using bfloat16 = __nv_bfloat16;
using tf32 = float;
}  // namespace element

// Boxes of `box_rows` rows and one stage of columns.
template <class Config>
bool encode(CUtensorMap* map, Matrix const& matrix, int64_t rows, int64_t columns, int box_rows) {
  return sm90::encode(map, sm90::kMapType<typename Config::Element>, sizeof(typename Config::Stored), matrix.data,
                      matrix.row_stride, rows, columns, box_rows, kTileKBytes);
}

// `kernel`: the tile's with an epilogue in it, a cudaKernel_t. Returns nullptr, or what was refused and why.
template <class Config>
const char* launch_tile(Problem const& problem, Plan const& plan, const void* kernel) {
  CUtensorMap weight_map, x_map;
  if (!encode<Config>(&weight_map, problem.weight, problem.n, problem.k, Config::tile.n) ||
      !encode<Config>(&x_map, problem.x, problem.m, problem.k, Config::tile.m)) {
    return "the driver refused a TMA descriptor";
  }
  Arguments arguments{problem.out.data,
                      problem.out.row_stride,
                      static_cast<int>(problem.m),
                      static_cast<int>(problem.n),
                      static_cast<int>(ceil_div(problem.k, Config::kTileK)),
                      operands_of(problem),
                      problem.stored.data,
                      problem.stored.row_stride};
  const auto tiles_m = static_cast<unsigned>(ceil_div(problem.m, Config::tile.m));
  const auto tiles_n = static_cast<unsigned>(ceil_div(problem.n, Config::tile.n));
  const auto splits = static_cast<unsigned>(plan.splits);
  void* parameters[] = {&weight_map, &x_map, &arguments};
  const cuda::LaunchShape shape{{splits, tiles_m, tiles_n},
                                {Config::kThreads, 1, 1},
                                /*cluster=*/{splits, 1, 1},
                                /*shared_bytes=*/sizeof(typename Config::Shared),
                                problem.device.index,
                                problem.stream,
                                /*dependent=*/true};
  const char* const refused =
      cuda::allow(kernel, shape.device, shape.shared_bytes, /*parameter_bytes=*/sizeof(CUtensorMap));
  return refused ? refused : cuda::launch(kernel, shape, parameters);
}

}  // namespace epigemm::sm90_swap_ab
