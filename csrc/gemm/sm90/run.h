// Launching a CUTLASS GEMM.
#pragma once

#include "cute/int_tuple.hpp"
#include "device/launch.h"

namespace epigemm::sm90 {

using cuda::LaunchShape;

template <class Kernel>
LaunchShape shape_of(typename Kernel::Params const& params, int device, void* stream) {
  using ClusterShape = typename Kernel::DispatchPolicy::ClusterShape;
  static_assert(Kernel::ArchTag::kMinComputeCapability == 90);
  constexpr unsigned cluster_m = cute::size<0>(ClusterShape{}), cluster_n = cute::size<1>(ClusterShape{});
  return {Kernel::get_grid_shape(params),
          Kernel::get_block_shape(),
          dim3(cluster_m, cluster_n),
          Kernel::SharedStorageSize,
          device,
          stream,
          /*dependent=*/true};
}

// Enqueues a GEMM whose epilogue was linked in; it reads nothing before the kernel ahead is done. The caller has seen
// to what TMA asks of strides and addresses, and that rows of the output may be written up to whole 16 bytes (CUTLASS's
// own can_implement would also refuse an N that ends between). Returns nullptr, or what the driver refused and why.
template <class Kernel>
const char* run(const void* kernel, typename Kernel::Arguments const& arguments, void* stream) {
  // The persistent scheduler needs no workspace.
  typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, /*workspace=*/nullptr);
  const LaunchShape shape = shape_of<Kernel>(params, arguments.hw_info.device_id, stream);
  if (const char* const refused = cuda::allow(kernel, shape.device, shape.shared_bytes, sizeof params)) return refused;
  void* parameters[] = {&params};
  return cuda::launch(kernel, shape, parameters);
}

}  // namespace epigemm::sm90
