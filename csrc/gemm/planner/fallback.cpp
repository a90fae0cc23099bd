#include "gemm/planner/fallback.h"
#include "epilogue/builtin.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "gemm/planner/cost.h"
#include "gemm/planner/cublas.h"

namespace epigemm {
namespace {

// The elementwise kernel, in place on the product, which L2 still holds in part; matrices it reads from memory. A
// functor that is longer than those of its class is computed beside that.
double elementwise_microseconds(const Problem& p) {
  struct Cost {
    double fixed_us, bytes_in_l2, bytes_beyond, l2_bytes;
  };
  constexpr Cost kCheap = {5.73, 1.51, 1.25, 25.1e6}, kTranscendental = {5.59, 1.70, 0.674, 29.5e6};
  const Cost& c = cost::is_transcendental(p) ? kTranscendental : kCheap;
  const double bytes = cost::as_double(p.m) * cost::as_double(p.n) * element_bytes(p.out.element);
  const double moved = c.bytes_in_l2 * bytes + c.bytes_beyond * std::max(0.0, bytes - c.l2_bytes);
  const double memory = (moved + cost::matrix_bytes(p)) / p.device.memory_bytes_per_us;
  const double of_multiprocessor = cost::as_double(p.m) * cost::as_double(p.n) / p.device.multiprocessors;
  const double functor = cost::longer_functor_cycles(p, of_multiprocessor) / p.device.clock_mhz;
  return c.fixed_us + (functor > 0 ? cost::norm4(memory, functor) : memory);
}

// Two kernels in a row take this much less than the sum of their times: the second starts while the first ends.
constexpr double kSharedStart = 2.5;

// In 16 bits the product has its bias before it is rounded (csrc/call/decide.cpp).
bool is_bias_in_product(const Problem& p) {
  const EpilogueInfo& epilogue = epilogue_info(p.epilogue);
  return element_bytes(p.x.element) == 2 && (epilogue.takes_bias ? p.has_bias : epilogue.bias > 0);
}

double two_kernels_microseconds(const Problem& p) {
  const double bare = cublas::product_microseconds(p);
  const double product = is_bias_in_product(p) ? std::max(bare, cublas::product_with_bias_microseconds(p)) : bare;
  return product + elementwise_microseconds(p) - kSharedStart;
}

// The properties for which cuBLAS has different kernels: fp32 arithmetic, and the layout of x and of the weight.
enum class Kind { PlainFP32, TF32, TF32Misaligned, Bits16, Bits16OffLines, Bits16Misaligned };

Kind kind_of(const Problem& p) {
  constexpr int64_t kRowBytes = 16;
  const int bytes = element_bytes(p.x.element);
  const bool is_aligned = p.k * bytes % kRowBytes == 0 && p.n * bytes % kRowBytes == 0;
  if (cublas::is_plain_fp32(p)) return Kind::PlainFP32;
  if (bytes == 4) return is_aligned ? Kind::TF32 : Kind::TF32Misaligned;
  if (!is_aligned) return Kind::Bits16Misaligned;
  return cost::alignment_class(p.k * bytes) >= 2 ? Kind::Bits16OffLines : Kind::Bits16;
}

// Where cuBLAS's product with a bias was slower than its plain product and a kernel of ours, of 6,000 random calls on
// an H200 and an H100: it splits a long K for the plain product alone, and has fewer kernels with a bias. Tiles are of
// 128 x 128 and counted for each multiprocessor. Bits16Misaligned is there for accuracy, too: with a bias cuBLAS has
// more than twice the error in bf16 at 11x5349x3280.
struct Region {
  Kind kind;
  int64_t least_m, most_m, least_n, most_n, least_k;
  double least_tiles, most_tiles;
};

constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
constexpr double kAnyTiles = std::numeric_limits<double>::infinity();
constexpr Region kApart[] = {
    {Kind::PlainFP32, 8, kAny, 1, kAny, 512, 0, 3},
    {Kind::PlainFP32, 2, 7, 1, 999, 512, 0, 3},
    {Kind::PlainFP32, 1, 1, 8000, kAny, 6000, 0, kAnyTiles},
    {Kind::PlainFP32, 3, 3, 8000, kAny, 6000, 0, kAnyTiles},
    {Kind::TF32, 1, kAny, 1, kAny, 4096, 0, 0.15},
    {Kind::TF32, 33, 64, 1, 12000, 8193, 0, kAnyTiles},
    {Kind::TF32Misaligned, 17, kAny, 1, kAny, 700, 0, 1},
    {Kind::Bits16Misaligned, 2, kAny, 1, kAny, 512, 0, 2},
    {Kind::Bits16OffLines, 129, 512, 1, kAny, 8193, 0, kAnyTiles},
};

bool adds_bias_apart(const Problem& p) {
  constexpr int64_t kTile = 128;
  if (p.x.element == ElementType::Float64) return false;
  const Kind kind = kind_of(p);
  const double tiles =
      cost::as_double(ceil_div(p.m, kTile) * ceil_div(p.n, kTile)) / std::max(1, p.device.multiprocessors);
  return std::any_of(std::begin(kApart), std::end(kApart), [&](const Region& r) {
    return r.kind == kind && p.m >= r.least_m && p.m <= r.most_m && p.n >= r.least_n && p.n <= r.most_n &&
           p.k >= r.least_k && tiles >= r.least_tiles && tiles < r.most_tiles;
  });
}

}  // namespace

bool is_fallback_one_kernel(EpilogueId epilogue, bool has_bias) {
  return epilogue == EpilogueId::bias || (epilogue == EpilogueId::bias_relu && has_bias);
}

bool is_fallback_one_kernel(const Problem& p) {
  if (!is_fallback_one_kernel(p.epilogue, p.has_bias)) return false;
  const bool has_gaps = p.m > 1 && p.out.row_stride != p.n;
  return p.epilogue == EpilogueId::bias || (!has_gaps && p.n > 1);
}

bool is_fallback_expected_in_one_kernel(const Problem& p) {
  return is_fallback_one_kernel(p) && !(p.has_bias && adds_bias_apart(p));
}

double fallback_microseconds(const Problem& p) {
  if (p.m == 0 || p.n == 0 || p.k == 0 || p.device.multiprocessors == 0) return 0;
  if (!is_fallback_one_kernel(p)) return two_kernels_microseconds(p);
  if (!p.has_bias) return cublas::product_microseconds(p);
  if (adds_bias_apart(p)) return two_kernels_microseconds(p);
  return cublas::product_with_bias_microseconds(p);
}

}  // namespace epigemm
