// The model of cuBLAS on GPUs for which nothing was fitted: a roofline with an efficiency. It has no tiles, so it
// ignores partly filled last waves of cuBLAS, and a fused plan has to be faster than would be necessary.
#include "gemm/planner/architecture.h"
#include "gemm/planner/cost.h"
#include "gemm/sm80/architecture.h"

namespace epigemm::sm80 {
namespace {

constexpr double kBaseUs = 5;        // about what fitted models of other GPUs have
constexpr double kLeastGain = 1.10;  // how much faster a fused plan must be by assumed figures

bool is_plain_fp32(const Problem& p) {
  return p.x.element == ElementType::Float32 && !p.is_tf32_allowed && p.arithmetic != Arithmetic::TF32;
}

double flops_per_cycle(const Problem& p) {
  if (is_plain_fp32(p)) return Sm80::fp32_flops_per_cycle(p.device);
  const double of_16_bits = Sm80::cublas_flops_per_cycle(p.device);
  return element_bytes(p.x.element) == 2 ? of_16_bits : of_16_bits / 2;
}

double product_us(const Problem& p) {
  using cost::as_double;
  const double m = as_double(p.m), n = as_double(p.n), k = as_double(p.k);
  const double cycles = 2 * m * n * k / (flops_per_cycle(p) * p.device.multiprocessors);
  const double bytes = element_bytes(p.x.element) * (m * k + n * k + m * n);
  return kBaseUs +
         cost::norm4(cycles / p.device.clock_mhz, bytes / p.device.memory_bytes_per_us) / Sm80::kCublasEfficiency;
}

class Ampere final : public Architecture {
 public:
  bool is_of(const Device& device) const override { return Sm80::is_of(device); }
  double product_microseconds(const Problem& p) const override { return product_us(p); }
  double product_with_bias_microseconds(const Problem& p) const override { return product_us(p); }

  // It is not known where it is slower, so the bias stays in PyTorch's GEMM.
  bool adds_bias_apart(const Problem&) const override { return false; }

  double least_gain() const override { return kLeastGain; }
};

}  // namespace

const Architecture& architecture() {
  static const Ampere architecture;
  return architecture;
}

}  // namespace epigemm::sm80
