// Launching a large tile's kernel.
#pragma once

#include <algorithm>

#include "device/launch.h"
#include "gemm/grid.h"
#include "gemm/operands.h"
#include "gemm/problem.h"
#include "gemm/sm90/tensor_map.h"
#include "gemm/sm90_tma/kernel.cuh"

namespace epigemm::sm90_tma {

template <class Element>
constexpr CUtensorMapDataType kMapType = CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
template <>
constexpr CUtensorMapDataType kMapType<element::float16> = CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
template <>
constexpr CUtensorMapDataType kMapType<element::bfloat16> = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// `kernel`: the tile's with an epilogue in it, a cudaKernel_t. Returns nullptr, or what was refused and why.
template <class Element, class Kernel>
const char* launch_kernel(Problem const& problem, Plan const& plan, bool is_matrix_by_tma, const void* kernel) {
  constexpr Tile tile = Kernel::tile;
  typename Kernel::Params params;
  const int m = static_cast<int>(problem.m), n = static_cast<int>(problem.n), k = static_cast<int>(problem.k);
  params.mainloop = Kernel::Mainloop::to_underlying_arguments(
      cute::make_shape(m, n, k, 1),
      {static_cast<Element const*>(problem.x.data),
       {problem.x.row_stride, cute::_1{}, 0},
       static_cast<Element const*>(problem.weight.data),
       {problem.weight.row_stride, cute::_1{}, 0}},
      /*workspace=*/nullptr);
  sm90::EpilogueParams& epilogue = params.epilogue;
  epilogue.operands = operands_of(problem);
  epilogue.m = m, epilogue.n = n, epilogue.is_matrix_by_tma = is_matrix_by_tma;
  const auto encode = [&](CUtensorMap* map, const void* data, int64_t stride) {
    return sm90::encode(map, kMapType<Element>, sizeof(Element), data, stride, m, n, sm90::kPassRows, tile.pass_row_bytes);
  };
  if (!encode(&epilogue.out, problem.out.data, problem.out.row_stride) ||
      (is_matrix_by_tma && !encode(&epilogue.matrix, epilogue.operands.data[open::kMatrix0],
                                   epilogue.operands.matrix_strides[0]))) {
    return "the driver refused a TMA descriptor";
  }
  params.k = k;
  params.k_steps = static_cast<int>(ceil_div(k * static_cast<int64_t>(sizeof(Element)), kTileKBytes));
  params.lines_m = static_cast<int>(ceil_div(m, tile.m * tile.cluster_m));
  params.lines_n = static_cast<int>(ceil_div(n, tile.n * tile.cluster_n));
  params.swizzle = plan.swizzle;
  params.is_along_m = plan.raster == Raster::AlongM;

  const int64_t tiles = static_cast<int64_t>(params.lines_m) * params.lines_n;
  const auto clusters =
      static_cast<unsigned>(std::min<int64_t>(std::max(1, problem.device.multiprocessors / Kernel::kCluster), tiles));
  const cuda::LaunchShape shape{dim3(clusters * tile.cluster_m, tile.cluster_n),
                                dim3(Kernel::kThreads),
                                dim3(tile.cluster_m, tile.cluster_n),
                                Kernel::kSharedBytes,
                                problem.device.index,
                                problem.stream,
                                /*dependent=*/true};
  const char* const refused = cuda::allow(kernel, shape.device, shape.shared_bytes, sizeof params);
  if (refused) return refused;
  void* parameters[] = {&params};
  return cuda::launch(kernel, shape, parameters);
}

}  // namespace epigemm::sm90_tma
