// epigemm::_architecture, _calibrate and _multiply_bare_out: what the planner knows of a GPU, and what it is told.
#include "gemm/planner/architecture.h"

#include <sstream>

#include "gemm/planner/measured.h"
#include "gemm/planner/plan_cache.h"
#include "torch/plans.h"

#if EPIGEMM_WITH_CUDA
#include "device/query.h"
#include "device/tensor_rate.h"
#endif

namespace epigemm::binding {
namespace {

// `gpu`, `device`: as of _plan. Rates are of the whole device, in flops a microsecond.
std::string architecture(const List<int64_t>& gpu, int64_t device) {
  const Device of = described_device(gpu.values, device);
  check(of.multiprocessors > 0, "device: got ", device, ", which is no CUDA device");
  const Architecture& architecture = architecture_of(of);
  const Limits limits = architecture.limits(of);
  const double cycles = of.multiprocessors * of.clock_mhz;  // a microsecond's, of all multiprocessors
  std::ostringstream json;
  json.precision(12);
  json << std::boolalpha << "{\"name\": \"" << architecture.name() << "\", \"is_fitted\": " << architecture.is_fitted()
       << ", \"is_calibrated\": " << of.is_calibrated() << ", \"is_speed_assumed\": " << of.is_speed_assumed
       << ", \"capability\": " << of.capability << ", \"multiprocessors\": " << of.multiprocessors
       << ", \"clock_mhz\": " << of.clock_mhz << ", \"memory_bytes_per_us\": " << of.memory_bytes_per_us
       << ", \"l2_bytes\": " << limits.l2_bytes << ", \"has_half_rate_sums\": " << of.has_half_rate_sums
       << ", \"shared_bytes\": " << limits.shared_bytes
       << ", \"tensor_flops_per_us\": " << cycles * limits.tensor_flops_per_cycle
       << ", \"cublas_flops_per_us\": " << cycles * limits.cublas_flops_per_cycle
       << ", \"fp32_flops_per_us\": " << cycles * limits.fp32_flops_per_cycle
       << ", \"cublas_efficiency\": " << limits.cublas_efficiency << ", \"least_gain\": " << architecture.least_gain(of)
       << "}";
  return json.str();
}

// `figures`: empty, or memory_bytes_per_us, tensor_flops_per_us and thousandths of cublas_efficiency. Device -1: they
// are only checked.
void calibrate(int64_t device, const std::vector<int64_t>& figures) {
  check(device >= -1 && device < measured::kMostDevices, "device must be the index of a CUDA device, got ", device);
  check(figures.empty() || figures.size() == 3, "figures must be none or three, got ", figures.size());
  for (const int64_t figure : figures) check(figure > 0, "figures must be positive, got ", figure);
#if EPIGEMM_WITH_CUDA
  if (device < 0) return;
  const int index = static_cast<int>(device);
  const Architecture& architecture = architecture_of(cuda::device(index));
  check(!architecture.is_fitted(), "the cost models of ", architecture.name(), " are fitted: they take no figures");
  if (figures.empty()) {
    cuda::calibrate(index, 0, 0, 0);
  } else {
    cuda::calibrate(index, static_cast<double>(figures[0]), static_cast<double>(figures[1]),
                    1e-3 * static_cast<double>(figures[2]));
  }
  plan_cache::clear();
#endif
}

#if EPIGEMM_WITH_CUDA
// In bf16 or TF32. `sums`: fp32, one number at least. Returns the floating-point operations.
int64_t multiply_bare(int64_t steps, const TensorView& sums, bool is_tf32) {
  constexpr int64_t kMostSteps = 1 << 24;
  check(steps > 0 && steps <= kMostSteps, "steps must be in 1..", kMostSteps, ", got ", steps);
  check(element_of(sums, "sums") == ElementType::Float32 && sums.numel() > 0, "sums must have fp32 numbers");
  const int device = sums.device();
  const CurrentDevice guard(device);
  int64_t flops = 0;
  const char* const refused =
      cuda::multiply_bare(static_cast<int>(steps), is_tf32, static_cast<float*>(sums.mutable_data()),
                          cuda::device(device).multiprocessors, device, current_stream(device), &flops);
  check(!refused, "the loop of mma.sync could not be launched: ", refused ? refused : "");
  return flops;
}
#endif

}  // namespace
}  // namespace epigemm::binding

STABLE_TORCH_LIBRARY_IMPL(epigemm, CompositeExplicitAutograd, m) {
  m.impl("_architecture", TORCH_BOX(&epigemm::binding::architecture));
  m.impl("_calibrate", TORCH_BOX(&epigemm::binding::calibrate));
}

#if EPIGEMM_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(epigemm, CUDA, m) {
  m.impl("_multiply_bare_out", TORCH_BOX(&epigemm::binding::multiply_bare));
}
#endif
