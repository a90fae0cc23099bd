// The host's half of the kernels of few rows: no device code in here.
#include "device/launch.h"
#include "gemm/grid.h"
#include "gemm/operands.h"
#include "gemm/sm90_few_rows/arguments.h"
#include "open/kernel_names.h"

namespace epigemm::sm90_few_rows {
namespace {

bool is_whole(const Rows& rows, int64_t k) {
  constexpr int kVector = 4;
  return k % kVector == 0 && rows.stride % kVector == 0 &&
         reinterpret_cast<uintptr_t>(rows.data) % (kVector * sizeof(float)) == 0;
}

}  // namespace

const char* launch(Problem const& problem, Plan const& plan, open::Kernels const& kernels) {
  const Tile& tile = kTiles[plan.tile];
  const auto rows = [](Matrix const& matrix, int64_t count) {
    return Rows{static_cast<const float*>(matrix.data), matrix.row_stride, static_cast<int>(count)};
  };
  const Rows x = rows(problem.x, problem.m), weight = rows(problem.weight, problem.n);
  const bool is_x = are_few_of_x(problem);
  Arguments arguments{/*many=*/is_x ? weight : x,
                      /*few=*/is_x ? x : weight,
                      static_cast<int>(problem.k),
                      is_x,
                      /*has_vectors=*/is_whole(x, problem.k) && is_whole(weight, problem.k),
                      static_cast<float*>(problem.out.data),
                      static_cast<float*>(problem.stored.data),
                      problem.out.row_stride,
                      problem.stored.row_stride,
                      operands_of(problem)};
  const auto tiles = static_cast<unsigned>(ceil_div(arguments.many.count, tile.many));
  const auto splits = static_cast<unsigned>(plan.splits);
  const cuda::LaunchShape shape{/*grid=*/dim3(tiles * splits),
                                /*block=*/dim3(static_cast<unsigned>(tile.threads)),
                                /*cluster=*/dim3(splits),
                                static_cast<std::size_t>(shared_bytes(tile)),
                                problem.device.index,
                                problem.stream,
                                /*dependent=*/true};
  void* parameters[] = {&arguments};
  const char* const refused =
      cuda::allow(kernels.handles[0], shape.device, shape.shared_bytes, /*parameter_bytes=*/sizeof arguments);
  return refused ? refused : cuda::launch(kernels.handles[0], shape, parameters);
}

}  // namespace epigemm::sm90_few_rows
