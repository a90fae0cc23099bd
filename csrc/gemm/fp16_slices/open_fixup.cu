// The host's half of the fixup and of the fp32 product: no device code in here.
#include <algorithm>

#include "device/launch.h"
#include "gemm/operands.h"
#include "gemm/fp16_slices/fixup.cuh"

namespace epigemm::fp16_slices {
namespace {

FixupArguments fixup_arguments(FixupProblem const& fixup) {
  Problem const& problem = fixup.split.problem;
  return {fixup.x,
          fixup.weight,
          fixup.split.x,
          fixup.split.weight,
          static_cast<float*>(problem.out.data),
          static_cast<float*>(problem.stored.data),
          problem.out.row_stride,
          problem.stored.row_stride,
          {static_cast<BlockMoments<float>*>(problem.column_blocks), fixup.block_rows},
          operands_of(problem),
          fixup.is_weight_judged_late};
}

const char* enqueue(const void* kernel, FixupProblem const& fixup, bool is_dependent) {
  Problem const& problem = fixup.split.problem;
  const int64_t more = std::min(problem.groups.count, problem.m);  // a tile of rows for each group may not be whole
  const int64_t tiles = ((problem.m + fp32_tile::kTileM - 1) / fp32_tile::kTileM + more) *
                        ((problem.n + fp32_tile::kTileN - 1) / fp32_tile::kTileN);
  const int64_t most = int64_t(kCtasPerMultiprocessor) * problem.device.multiprocessors;
  const cuda::LaunchShape shape{/*grid=*/dim3(static_cast<unsigned>(std::min(tiles, most))),
                                /*block=*/dim3(kThreads),
                                /*cluster=*/dim3(1),
                                /*shared_bytes=*/0,
                                problem.device.index,
                                problem.stream,
                                is_dependent};
  GroupedFixupArguments arguments{fixup_arguments(fixup), problem.groups};  // other kernels read the first part
  void* parameters[] = {&arguments};
  return cuda::launch(kernel, shape, parameters);
}

}  // namespace

const char* launch_fixup(FixupProblem const& fixup, const void* kernel, FixupStart start) {
  return enqueue(kernel, fixup, /*is_dependent=*/start == FixupStart::BesideGemm);
}

const char* launch_fp32(FixupProblem const& fixup, const void* kernel) {
  return enqueue(kernel, fixup, /*is_dependent=*/false);
}

}  // namespace epigemm::fp16_slices
