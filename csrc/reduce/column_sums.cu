#include "reduce/column_sums.h"

#include "device/dependent.cuh"
#include "device/launch.h"
#include "device/types.cuh"

namespace epigemm {
namespace {

constexpr int kLanes = 32, kGroups = 32;

// A CTA has 32 columns. Each group takes every 32nd part, and a tree adds the groups.
template <class Element>
__global__ void __launch_bounds__(kLanes* kGroups) add_kernel(const __grid_constant__ ColumnParts given) {
  using Compute = typename cuda::ComputeType<Element>::type;
  __shared__ Compute sums[kGroups][kLanes];
  cuda::wait_for_kernel_ahead();
  cuda::let_dependents_start();
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int64_t column = int64_t(blockIdx.x) * kLanes + lane;
  const bool is_inside = column < given.columns;
  const auto* const parts = static_cast<const Compute*>(given.parts) + (is_inside ? column : 0);
  Compute sum = 0;
#pragma unroll 4
  for (int64_t i = group; i < given.count; i += kGroups) sum += parts[i * given.columns];
  sums[group][lane] = sum;
#pragma unroll
  for (int half = kGroups / 2; half > 0; half /= 2) {
    __syncthreads();
    if (group < half) sums[group][lane] += sums[group + half][lane];
  }
  if (group == 0 && is_inside) static_cast<Element*>(given.sums)[column] = cuda::from_compute<Element>(sums[0][lane]);
}

}  // namespace

const char* add_column_parts_cuda(const ColumnParts& parts, const MomentStream& on) {
  return cuda::with_element_type(parts.element, [&](auto example) -> const char* {
    const auto ctas = static_cast<unsigned>((parts.columns + kLanes - 1) / kLanes);
    const cuda::LaunchShape shape{
        dim3(ctas), dim3(kLanes * kGroups), /*cluster=*/dim3(1), /*shared_bytes=*/0, on.device,
        on.stream,  on.is_dependent};
    ColumnParts argument = parts;
    void* parameters[] = {&argument};
    return cuda::launch<&add_kernel<decltype(example)>>(shape, parameters);
  });
}

}  // namespace epigemm
