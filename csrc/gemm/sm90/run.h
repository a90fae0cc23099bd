// Launching a CUTLASS GEMM.
#pragma once

#include "cute/int_tuple.hpp"
#include "cutlass/device_kernel.h"
#include "gemm/sm90/enqueue.h"

namespace epigemm::sm90 {

template <class Kernel>
LaunchShape shape_of(typename Kernel::Params const& params, int device, void* stream, bool dependent) {
  using ClusterShape = typename Kernel::DispatchPolicy::ClusterShape;
  static_assert(Kernel::ArchTag::kMinComputeCapability == 90);
  constexpr unsigned cluster_m = cute::size<0>(ClusterShape{}), cluster_n = cute::size<1>(ClusterShape{});
  return {Kernel::get_grid_shape(params),
          Kernel::get_block_shape(),
          dim3(cluster_m, cluster_n),
          Kernel::SharedStorageSize,
          device,
          stream,
          dependent};
}

// Enqueues a GEMM. The caller has seen to what TMA asks of strides and addresses, and that rows of the output may be
// written up to whole 16 bytes (CUTLASS's own can_implement would also refuse an N that ends between). Returns nullptr,
// or what the driver refused and why. `dependent`: see LaunchShape.
//
// CUTLASS's own adapter does the same, but sets the kernel's attributes at every call.
template <class Gemm>
const char* run(typename Gemm::Arguments const& arguments, void* stream, bool dependent) {
  using Kernel = typename Gemm::GemmKernel;
  // The persistent scheduler needs no workspace.
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, /*workspace=*/nullptr);
  void* parameters[] = {&params};
  return enqueue<&cutlass::device_kernel<Kernel>>(
      shape_of<Kernel>(params, arguments.hw_info.device_id, stream, dependent), parameters);
}

// The same for a kernel that an epilogue was linked into. It reads nothing before the kernel ahead is done.
template <class Kernel>
const char* run_linked(const void* kernel, typename Kernel::Arguments const& arguments, void* stream) {
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, /*workspace=*/nullptr);
  return enqueue_linked(kernel, shape_of<Kernel>(params, arguments.hw_info.device_id, stream, /*dependent=*/true),
                        &params, sizeof params);
}

}  // namespace epigemm::sm90
