// Launching a CUTLASS GEMM.
#pragma once

#include "cutlass/cutlass.h"

namespace epigemm::sm90 {

// Enqueues a GEMM. The caller has seen to what TMA asks of strides and addresses, and that rows of the output may be
// written up to whole 16 bytes (CUTLASS's own can_implement would also refuse an N that ends between). Returns nullptr,
// or what CUTLASS refused and why. `dependent`: programmatic dependent launch, that is, barriers and descriptors are
// set up while the kernel ahead drains; every warp then waits for its results.
template <class Gemm>
const char* run(typename Gemm::Arguments const& arguments, void* stream, bool dependent) {
  static_assert(Gemm::ArchTag::kMinComputeCapability == 90);
  auto const cuda_stream = static_cast<cudaStream_t>(stream);
  Gemm gemm;
  cutlass::Status status =
      gemm.initialize(arguments, /*workspace=*/nullptr, cuda_stream);  // the persistent scheduler needs none
  if (status != cutlass::Status::kSuccess) return cutlass::cutlassGetStatusString(status);
  status = gemm.run(cuda_stream, /*cuda_adapter=*/nullptr, /*launch_with_pdl=*/dependent);
  return status == cutlass::Status::kSuccess ? nullptr : cutlass::cutlassGetStatusString(status);
}

}  // namespace epigemm::sm90
