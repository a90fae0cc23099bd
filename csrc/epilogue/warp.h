// Votes of a warp, for host and device.
#pragma once

#include "epilogue/operands.h"

namespace epigemm {

// Whether `is_so` holds in any active thread of the warp: a branch on it does not split the warp. On a host: the
// argument.
EPIGEMM_HOST_DEVICE bool any_of_warp(bool is_so) {
#if defined(__CUDA_ARCH__)
  return __any_sync(__activemask(), is_so);
#else
  return is_so;
#endif
}

// The same where all threads of the warp are active. The vote also brings them together again, if they were apart.
EPIGEMM_HOST_DEVICE bool any_of_whole_warp(bool is_so) {
#if defined(__CUDA_ARCH__)
  return __any_sync(~0u, is_so);
#else
  return is_so;
#endif
}

}  // namespace epigemm
