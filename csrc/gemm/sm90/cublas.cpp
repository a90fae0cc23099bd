// Models of cuBLAS's kernels. cuBLAS picks a tile and a split of K by its own heuristics. It is modelled as the fastest
// of a set of tiles and splits. Fitted to random shapes on an H200 and an H100 (docs/internals.md): the median
// error is 4% in 16 bits, 6% in TF32 and 5 to 9% in plain fp32. The figures are effective ones, not properties of
// kernels.
#include <algorithm>
#include <iterator>
#include <limits>

#include "gemm/planner/architecture.h"
#include "gemm/planner/copies.h"
#include "gemm/planner/cost.h"
#include "gemm/sm90/architecture.h"

namespace epigemm::sm90 {
namespace {

using cost::as_double;

struct Shape {
  int m, n;
};

// --- tensor cores: 16 bits and TF32 --------------------------------------------------------------------------------

constexpr Shape kTensorTiles[] = {{64, 16},   {64, 32},   {64, 64},   {64, 128},  {64, 256},  {128, 64},
                                  {128, 128}, {128, 192}, {128, 256}, {256, 128}, {192, 128}, {256, 64}};
constexpr int kTensorSplits[] = {1, 2, 3, 4, 6, 8};

struct TensorCost {
  double base_us;
  double step_cycles, step_cycles_of_tile;  // a stage of K (128 bytes): fixed, and of a tile of 128 x 128
  double l2_bytes_per_cycle;
  double throttling;
  double misaligned[4];    // factors of L2's bytes by alignment class of K
  double epilogue_cycles;  // of a tile of 128 x 128
  double memory_factor, memory_misaligned;
  double split_us, split_mb_per_us;  // adding up the parts of K
  double writes;                     // of the result's bytes, beside the loads'
  double misaligned_writes;          // factor where N is of alignment class 3
  double lone_sharing;               // factor of L2's bytes where CTAs run in step: one round, K in whole lines
  double last_writes;                // share of the last round's writes that nothing hides
};

constexpr TensorCost kBias16 = {6.25, 149,   350, 31.8,  0.153, {1, 1, 1.01, 1.17}, 3280, 0.991, 0.114, 1.77,
                                1.56, 0.591, 2,   0.728, 0.0387};
constexpr TensorCost kBare16 = {5.64, 177,   350,  31.1, 0.108, {1, 1, 1, 1.18}, 2380, 0.992, 0.105, 2.54,
                                4.85, 0.744, 1.77, 0.95, 0};
constexpr TensorCost kBiasTF32 = {7.05, 134,   371, 31.3, 0.193, {1, 1.09, 1.09, 1.17}, 4540, 0.953, 0.685, 18,
                                  1.56, 0.729, 2,   1.03, 0.0387};
constexpr TensorCost kBareTF32 = {6.82, 245,   428,  31.8, 0, {1, 1.16, 1.13, 1.18}, 4830, 0.958, 0.631, 2.92,
                                  4.85, 0.753, 1.77, 1.18, 0};

// In 16 bits cuBLAS loads 16 bytes at a time only if the rows of x, the weight and the result all allow it. Otherwise
// it uses kernels that load one element or two, and are equally slow whichever of the three is the cause. Fitted to 25
// shapes of 20 to 2,300 us on an H200 and an H100 (random-51, random-52): the median error is 5%, the largest 50%, too
// long at 20x13408x147. 65536x256x63, which they do not hold, takes 70 us (H200) where 58 are predicted.
struct NarrowCost {
  double bytes_per_cycle;  // of a CTA's loads
  double epilogue;         // factor
};

constexpr double kWideBytesPerCycle = 500;

NarrowCost narrow_cost(const Problem& p) {
  constexpr int64_t kWide = 16, kByPairs = 4;
  constexpr NarrowCost kNone = {kWideBytesPerCycle, 1}, kPairs = {10, 3}, kSingle = {5, 4};
  // For a matrix times a vector cuBLAS has another kernel.
  if (element_bytes(p.x.element) != 2 || p.m == 1 || std::min(p.n, p.k) < kLeastCopied) return kNone;
  const int64_t bytes = bytes_of_steps(p);
  return bytes % kWide == 0 ? kNone : bytes % kByPairs == 0 ? kPairs : kSingle;
}

double tensor_microseconds(const Problem& p, const TensorCost& c) {
  constexpr double kStageBytes = 96, kHalfThrottledUs = 500, kTileArea = 128 * 128;
  constexpr double kFewTiles = 2;  // K is split where tiles and splits are at most so many rounds
  const double m = as_double(p.m), n = as_double(p.n), k = as_double(p.k), bytes = element_bytes(p.x.element);
  const double sms = p.device.multiprocessors, per_cycle = cost::memory_bytes_per_cycle(p.device);
  const int alignment = cost::alignment_class(p.k * element_bytes(p.x.element));
  const double misaligned = c.misaligned[alignment];
  const double writes = bytes * m * n / per_cycle *
                        (cost::alignment_class(p.n * element_bytes(p.x.element)) == 3 ? c.misaligned_writes : 1);
  const double memory =
      bytes * (m * k + n * k) / per_cycle * c.memory_factor * (1 + (misaligned - 1) * c.memory_misaligned) +
      c.writes * writes;
  const double steps = std::ceil(k * bytes / 128);
  const NarrowCost narrow = narrow_cost(p);
  double best = std::numeric_limits<double>::infinity();
  for (const Shape& tile : kTensorTiles) {
    const double grid_m = std::ceil(m / tile.m), grid_n = std::ceil(n / tile.n);
    const double area = tile.m * tile.n / kTileArea;
    const double mma = c.step_cycles + c.step_cycles_of_tile * area;
    for (const int splits : kTensorSplits) {
      const double tiles = grid_m * grid_n * splits;
      if (splits > 1 && tiles > kFewTiles * sms) break;
      const double rounds = std::ceil(tiles / sms), last = (tiles - (rounds - 1) * sms) / sms;
      const double fetched =
          kStageBytes * (m / grid_m + n / grid_n) * misaligned * (alignment == 0 && rounds == 1 ? c.lone_sharing : 1);
      const double l2 = fetched / c.l2_bytes_per_cycle, own = fetched / narrow.bytes_per_cycle;
      const double full = rounds > 1 ? cost::norm4(mma, l2, own) : 0;
      const double compute = std::ceil(steps / splits) * ((rounds - 1) * full + cost::norm4(mma, l2 * last, own));
      const double cycles = cost::norm4(compute, memory) +
                            narrow.epilogue * c.epilogue_cycles * area * (1 + 0.5 * (rounds - 1)) +
                            c.last_writes * writes / rounds;
      double us = cycles / p.device.clock_mhz;
      us = c.base_us + us * (1 + c.throttling * us / (us + kHalfThrottledUs));
      if (splits > 1) us += c.split_us + 8e-6 * m * n * splits / c.split_mb_per_us;
      best = std::min(best, us);
    }
  }
  return best;
}

// --- plain fp32 ------------------------------------------------------------------------------------------------------

constexpr Shape kSgemmTiles[] = {{128, 128}, {128, 64}, {64, 128}, {64, 64}, {32, 128}, {32, 32}};
constexpr int kSgemmSplits[] = {1, 2, 3, 4, 6, 8, 12, 16};

struct SgemmCost {
  double base_us;
  double l2_mb_per_us;
  double throttling, half_throttled_us;
  double memory_factor;
  double epilogue_us;   // of a tile of 128 x 128
  double lone_step_us;  // 32 columns of K, of a CTA that has a multiprocessor to itself
  double few_us, few_walk[2], few_product, few_product_of_row;  // the kernels for few rows
  double split_us, split_mb_per_us;
  double step_us[std::size(kSgemmTiles)];  // 32 columns of K, of a tile of 128 x 128
};

constexpr double kFittedClockMhz = 1980;
constexpr SgemmCost kBiasSgemm = {
    9.00, 1.56,         0,     1,     0.836, 0.0119, 0.184,
    5.68, {4.32, 8.85}, 0.575, 0.188, 0,     1,      {1.26, 1.68, 1.77, 2.55, 2.32, 0.951}};
constexpr SgemmCost kBareSgemm = {5.51, 3.39,         0.118, 9420,  0.801, 3.08, 0.792,
                                  6.88, {3.37, 7.98}, 0.723, 0.158, 5.71,  6.92, {2.36, 2.17, 2.16, 1.63, 3.97, 2.80}};

// For up to 16 rows cuBLAS has kernels that go along K once, with all rows in registers.
double few_rows_microseconds(const Problem& p, const SgemmCost& c, double slowdown) {
  constexpr int64_t kFewColumns = 512;
  constexpr double kFewColumnsUs = 5, kFewColumnsStep = 3.5e-3;
  const double n = as_double(p.n), k = as_double(p.k);
  const double walk = slowdown * c.few_walk[p.m <= 6 && p.m != 3 ? 0 : 1] * k * 1e-3;
  const double products = slowdown * (c.few_product + c.few_product_of_row * as_double(p.m)) * n * k * 1e-6;
  const double memory = c.memory_factor * 4 * n * k / p.device.memory_bytes_per_us;
  const double us = c.few_us + std::sqrt(walk * walk + products * products + memory * memory);
  return p.n <= kFewColumns ? std::min(us, kFewColumnsUs + slowdown * kFewColumnsStep * k) : us;
}

double sgemm_microseconds(const Problem& p, const SgemmCost& c, bool is_bare) {
  constexpr double kStage = 32, kTileArea = 128 * 128, kOneRowUs = 8, kOneRowMBPerUs = 3.6;
  constexpr int64_t kFewRows = 16, kCertainlyFew = 10, kCertainlyFewBare = 8, kManyColumns = 1024;
  const double m = as_double(p.m), n = as_double(p.n), k = as_double(p.k), sms = p.device.multiprocessors;
  const double slowdown = kFittedClockMhz / p.device.clock_mhz;
  if (p.m == 1) return kOneRowUs + std::max(4 * n * k / p.device.memory_bytes_per_us, 4e-6 * n * k / kOneRowMBPerUs);
  double best = std::numeric_limits<double>::infinity();
  if (p.m <= kFewRows) {
    best = few_rows_microseconds(p, c, slowdown);
    if (is_bare ? p.m <= kCertainlyFewBare && p.n >= kManyColumns : p.m <= kCertainlyFew) return best;
  }
  const double memory = c.memory_factor * 4 * (m * k + n * k + m * n) / p.device.memory_bytes_per_us;
  for (std::size_t i = 0; i < std::size(kSgemmTiles); ++i) {
    const Shape& tile = kSgemmTiles[i];
    const double grid_m = std::ceil(m / tile.m), grid_n = std::ceil(n / tile.n), area = tile.m * tile.n / kTileArea;
    const double load = 1e-6 * 4 * kStage * (m / grid_m + n / grid_n);
    const double step = slowdown * c.step_us[i] * area, lone = slowdown * c.lone_step_us;
    const double crowded = load * sms / c.l2_mb_per_us;
    for (const int splits : kSgemmSplits) {
      if (splits > 1 && !is_bare) break;  // with a bias cuBLAS does not split K
      const double ctas = grid_m * grid_n * splits;
      const double rounds = std::ceil(ctas / sms), rest = ctas - (rounds - 1) * sms;
      const double full = std::sqrt(step * step + crowded * crowded);
      const double of_rest = load * rest / c.l2_mb_per_us;
      const double last = std::sqrt(step * step + lone * lone + of_rest * of_rest);
      double us = std::ceil(std::ceil(k / kStage) / splits) * ((rounds - 1) * full + last) +
                  rounds * slowdown * c.epilogue_us * area;
      us *= 1 + c.throttling * us / (us + c.half_throttled_us);
      us = c.base_us + cost::norm4(us, memory);
      if (splits > 1) us += c.split_us + 4e-6 * m * n * splits / c.split_mb_per_us;
      best = std::min(best, us);
    }
  }
  return best;
}

bool is_plain_fp32(const Problem& p) {
  return p.x.element == ElementType::Float32 && !p.is_tf32_allowed && p.arithmetic != Arithmetic::TF32;
}

// --- the bias -----------------------------------------------------------------------------------------------------

// The cases for which cuBLAS has different kernels: fp32 arithmetic, and the layout of x and of the weight.
enum class Kind { PlainFP32, TF32, TF32Misaligned, Bits16, Bits16OffLines, Bits16Misaligned };

Kind kind_of(const Problem& p) {
  constexpr int64_t kRowBytes = 16;
  const int bytes = element_bytes(p.x.element);
  const bool is_aligned = p.k * bytes % kRowBytes == 0 && p.n * bytes % kRowBytes == 0;
  if (is_plain_fp32(p)) return Kind::PlainFP32;
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

double tiles_of_multiprocessor(const Problem& p) {
  constexpr int64_t kTile = 128;
  return cost::as_double(ceil_div(p.m, kTile) * ceil_div(p.n, kTile)) / std::max(1, p.device.multiprocessors);
}

bool is_slower_with_bias(const Problem& p) {
  if (p.x.element == ElementType::Float64) return false;
  const Kind kind = kind_of(p);
  const double tiles = tiles_of_multiprocessor(p);
  return std::any_of(std::begin(kApart), std::end(kApart), [&](const Region& r) {
    return r.kind == kind && p.m >= r.least_m && p.m <= r.most_m && p.n >= r.least_n && p.n <= r.most_n &&
           p.k >= r.least_k && tiles >= r.least_tiles && tiles < r.most_tiles;
  });
}

// Where cuBLAS's GEMM with a bias and a ReLU takes longer in 16 bits than is predicted of the one with a bias. The
// first row that fits counts. At 1024x8192x8192 it takes 1.01 times as long.
struct SlowReLU {
  int64_t least_m, least_n, least_k, most_k;
  double least_us;     // with the bias alone
  double least_tiles;  // of 128 x 128, for each multiprocessor
  double factor;
};

constexpr SlowReLU kSlowReLU[] = {
    // Up to twice as long, in bf16 on an H100.
    {1, 1, 1, 63, 0, 0, 1.4},
    // 1.0 to 1.4 times as long, in bf16 on an H100, at 23 random shapes of 60 us and more.
    {1, 1, 64, 1000, 30, 0, 1.2},
    // 1.1 to 1.7 times as long, in bf16, at five shapes of 19 us and more (short-65 of an H100; two of them on an
    // H200). A fused kernel is expected to take nearly the same time there, so a tenth is enough. With up to 64 columns
    // or fewer rows cuBLAS takes what is predicted.
    {16000, 65, 64, 256, 0, 3, 1.1},
};

class Hopper final : public Architecture {
 public:
  bool is_of(const Device& device) const override { return Sm90::is_of(device); }

  double product_microseconds(const Problem& p) const override {
    if (is_plain_fp32(p)) return sgemm_microseconds(p, kBareSgemm, /*is_bare=*/true);
    return tensor_microseconds(p, element_bytes(p.x.element) == 2 ? kBare16 : kBareTF32);
  }

  double product_with_bias_microseconds(const Problem& p) const override {
    if (is_plain_fp32(p)) return sgemm_microseconds(p, kBiasSgemm, /*is_bare=*/false);
    return tensor_microseconds(p, element_bytes(p.x.element) == 2 ? kBias16 : kBiasTF32);
  }

  double relu_factor(const Problem& p, double with_bias_us) const override {
    if (element_bytes(p.x.element) != 2) return 1;
    const double tiles = tiles_of_multiprocessor(p);
    const auto* const found = std::find_if(std::begin(kSlowReLU), std::end(kSlowReLU), [&](const SlowReLU& row) {
      return p.m >= row.least_m && p.n >= row.least_n && p.k >= row.least_k && p.k <= row.most_k &&
             with_bias_us >= row.least_us && tiles >= row.least_tiles;
    });
    return found == std::end(kSlowReLU) ? 1 : found->factor;
  }

  bool adds_bias_apart(const Problem& p) const override { return is_slower_with_bias(p); }
};

}  // namespace

const Architecture& architecture() {
  static const Hopper architecture;
  return architecture;
}

}  // namespace epigemm::sm90
