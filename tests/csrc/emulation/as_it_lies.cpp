// What the kernels do that read an fp32 weight as it lies (sm90_fp16x3/as_it_lies_mainloop.h), under g++: which numbers
// a thread reads, which scales are found to be wrong, and the arithmetic of a result. Its own formulas are those of the
// headers' comments; what it calls are the headers' functions. A line a check, 0 for none.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "gemm/fp16_slices/layout.h"
#include "gemm/fp16_slices/range_check.h"
#include "gemm/fp16_slices/rescale.h"
#include "gemm/fp16_slices/weight_scale.h"
#include "gemm/sm90_fp16x3/weight_order.h"

using namespace epigemm;
using namespace epigemm::fp16_slices;
using namespace epigemm::sm90_fp16x3;

using Half = _Float16;

uint32_t bits_of(Half number) {
  uint16_t bits;
  std::memcpy(&bits, &number, 2);
  return bits;
}

Half half_of(float number) { return static_cast<Half>(number); }
float float_of(Half number) { return static_cast<float>(number); }

// --- addresses -----------------------------------------------------------------------------------------------------

constexpr int kRows = 128;

// As TMA swizzles rows of 128 bytes.
int swizzled(int address) { return address ^ (address / 128 % 8) << 4; }

int address_of(int thread, int step, int half, int r) {
  const uint32_t first = weight_offset(thread);
  return static_cast<int>((first ^ weight_chunk(step, half) * 16) + r * 8 * kBoxRowBytes);
}

// Where x's slice of wgmma's k-th column of a step lies: the column of x whose slice is there.
int column_of_x(int step, int k) {
  for (int column = 0; column < kBoxK; ++column) {
    if (slice_offset(column, 0, 1, SliceOrder::Turned) == step * kStepK + k) return column;
  }
  return -1;
}

int wrong_addresses() {
  int wrong = 0;
  std::vector<int> row_at(kRows * kBoxRowBytes, -1), k_at(kRows * kBoxRowBytes, -1);
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kBoxK; ++k) {
      const int at = swizzled(row * kBoxRowBytes + 4 * k);
      row_at[at] = row, k_at[at] = k;
    }
  }
  for (int thread = 0; thread < 256; ++thread) {
    const int lane = thread % 32, g = lane / 4, q = lane % 4;
    for (int step = 0; step < kStepsOfBox; ++step) {
      for (int half = 0; half < 2; ++half) {
        for (int r = 0; r < 2; ++r) {
          for (int e = 0; e < 2; ++e) {
            const int at = address_of(thread, step, half, r) + 4 * e;
            // wgmma's operand A: rows g and g + 8 of the warp's 16, K = 2 q + {0, 1} and 8 further.
            wrong += row_at[at] != thread / 32 * 16 + g + 8 * r;
            wrong += k_at[at] != column_of_x(step, 8 * half + 2 * q + e);
          }
        }
      }
    }
  }
  return wrong;
}

// Reads of 64 bits are made by half-warps: the most that meet in a bank.
int conflicts() {
  int worst = 0;
  for (int first = 0; first < 256; first += 16) {
    for (int read = 0; read < 8; ++read) {
      int words[32] = {};
      for (int thread = first; thread < first + 16; ++thread) {
        const int at = address_of(thread, read / 4, read / 2 % 2, read % 2);
        for (int word = 0; word < 2; ++word) worst = std::max(worst, ++words[(at / 4 + word) % 32]);
      }
    }
  }
  return worst - 1;
}

// --- the same of a transposed weight -------------------------------------------------------------------------------

constexpr int kStageK = 64;

int transposed_at(int thread, int read) {
  const uint32_t first = transposed_offset(thread, kStageK);
  return static_cast<int>(transposed_address(first, read / 8, read / 4 % 2, read / 2 % 2, read % 2));
}

constexpr int kReads = kStageK / kStepK * 8;  // of a thread, in a stage

int wrong_transposed_addresses() {
  int wrong = 0;
  std::vector<int> row_at(kRows * kStageK * 4, -1), k_at(row_at);
  for (int row = 0; row < kRows; ++row) {
    for (int k = 0; k < kStageK; ++k) {
      const int at = swizzled((row / kBoxRows * kStageK + k) * kBoxRowBytes + row % kBoxRows * 4);
      row_at[at] = row, k_at[at] = k;
    }
  }
  for (int thread = 0; thread < 256; ++thread) {
    const int lane = thread % 32, g = lane / 4, q = lane % 4;
    for (int read = 0; read < kReads; ++read) {
      const int step = read / 8, half = read / 4 % 2, r = read / 2 % 2, e = read % 2;
      const int at = transposed_at(thread, read);
      wrong += row_at[at] != thread / 32 * 16 + g + 8 * r;
      wrong += k_at[at] != step * kStepK + 8 * half + 2 * q + e;
    }
  }
  return wrong;
}

// Reads of 32 bits are made by whole warps.
int transposed_conflicts() {
  int worst = 0;
  for (int first = 0; first < 256; first += 32) {
    for (int read = 0; read < kReads; ++read) {
      int words[32] = {};
      for (int thread = first; thread < first + 32; ++thread) {
        worst = std::max(worst, ++words[transposed_at(thread, read) / 4 % 32]);
      }
    }
  }
  return worst - 1;
}

// Slices in the other order are the same ones: every place once, hi and lo, and groups of four stay together.
int wrong_places() {
  int wrong = 0;
  for (int slices = 1; slices <= kSlices; ++slices) {
    std::set<int64_t> places;
    for (int64_t column = 0; column < 192; ++column) {
      for (int slice = 0; slice < slices; ++slice) {
        const int64_t at = slice_offset(column, slice, slices, SliceOrder::Turned);
        wrong += !places.insert(at).second || at < 0 || at >= 192 * slices;
        wrong += at != slice_offset(column / 4 * 4, slice, slices, SliceOrder::Turned) + column % 4;
        wrong += at / (32 * slices) / 2 != slice_offset(column, slice, slices) / (32 * slices) / 2;
      }
    }
  }
  return wrong + (padded_columns(65, 1, SliceOrder::Turned) != 128) + (padded_columns(65, 1) != 72);
}

// --- scales --------------------------------------------------------------------------------------------------------

// The bits of a row's largest hi under some scale, as the kernel sees them.
uint32_t largest_high(const std::vector<float>& row, float scale) {
  uint32_t largest = 0;
  for (const float x : row) {
    uint32_t bits = bits_of(half_of(x * scale)) & 0x7fff;
    largest = std::max(largest, bits > 0x7c00 ? 0x7fffu : bits);  // NaN, as max.NaN gives it
  }
  return largest;
}

float finite_largest(const std::vector<float>& row) {
  float largest = 0;
  for (const float x : row) largest = std::max(largest, finite_magnitude(x));
  return largest;
}

// A scale is found to be the row's if and only if it is.
int wrong_verdicts() {
  int wrong = 0;
  std::mt19937 random(1);
  std::vector<float> edges = {0.0f, 0x1p-149f, 0x1.fffffep-127f, 0x1p-126f, 0x1.fffffep127f, 0x1p127f, 1.0f, 65504.0f};
  for (const int e : {-130, -126, -115, -113, -112, -20, -1, 0, 1, 13, 14, 15, 113, 126, 127}) {
    // Around a power of two, and around the number from which fp16 rounds to the next one.
    for (const float edge : {std::ldexp(1.0f, e), std::ldexp(0x1.ffep0f, e)}) {
      edges.insert(edges.end(), {edge, std::nextafter(edge, 0.0f), std::nextafter(edge, HUGE_VALF)});
    }
  }
  for (int i = 0; i < 2000; ++i) {
    edges.push_back(
        std::ldexp(1 + static_cast<float>(random() >> 8) * 0x1p-24f, static_cast<int>(random() % 276) - 149));
  }
  for (const float largest : edges) {
    if (!std::isfinite(largest)) continue;
    const int right = weight_exponent(largest);
    wrong += right % 2 != 0 || right < kLeastExponent || right > kLargestExponent;
    const float s = largest * power_of_two(right);
    wrong += !(s < 0x1p15f) || (s < 8188 && right != kLargestExponent);
    for (int e = kLeastExponent; e <= kLargestExponent; e += 2) {
      const float scale = power_of_two(e);
      wrong += scale != scale_of_root(row_root(e));
      wrong += is_scale_of_row(largest_high({0.0f, -largest, largest / 2}, scale), scale) != (e == right);
    }
  }
  // What is not finite is never right, whatever the scale: somebody has to look at the row.
  for (int e = kLeastExponent; e <= kLargestExponent; e += 2) {
    for (const float bad : {HUGE_VALF, -HUGE_VALF, std::nanf("")}) {
      wrong += is_scale_of_row(largest_high({1.0f, bad}, power_of_two(e)), power_of_two(e));
    }
  }
  return wrong;
}

// From memory that holds anything comes the root of a scale; a root stays as it is.
int wrong_roots() {
  int wrong = 0;
  std::mt19937 random(2);
  for (int i = 0; i < 100000; ++i) {
    const float root = some_root(bit_cast<float>(static_cast<uint32_t>(random())));
    const int e = static_cast<int>(bit_cast<uint32_t>(scale_of_root(root)) >> 23) - 127;
    wrong += e < kLeastExponent || e > kLargestExponent || e % 2 != 0 || row_root(e) != root;
  }
  for (int e = kLeastExponent; e <= kLargestExponent; e += 2) wrong += some_root(row_root(e)) != row_root(e);
  return wrong;
}

int wrong_counts() {
  int wrong = 0;
  std::mt19937 random(3);
  for (const unsigned of_ten : {0u, 3u, 10u}) {
    uint32_t counts = 0;
    int expected = 0;
    for (int64_t i = 0; i < kMostCountedColumns / 8 - 1; ++i) {
      const bool first = random() % 10 < of_ten, second = random() % 10 < of_ten;
      counts = count_pair(counts, (first ? 0xffffu : 0) | (second ? 0xffff0000u : 0));
      expected += first + second;
    }
    wrong += counted(counts) != expected;
  }
  return wrong;
}

// --- arithmetic ----------------------------------------------------------------------------------------------------

// Rounds towards zero, as tensor cores add: to 24 bits of the largest of the terms.
float truncated(double sum, double largest) {
  if (largest == 0) return 0;
  const double unit = std::ldexp(1.0, std::ilogb(largest) - 23);
  return static_cast<float>(std::trunc(sum / unit) * unit);
}

struct Row {
  std::vector<Half> high, low;  // in x's order of slices
  float root;
  int32_t statistics;
};

// A row of the weight under some scale, in the order in which threads read it; or of x.
Row split(const std::vector<float>& numbers, float scale, float root) {
  const auto padded = static_cast<std::size_t>(padded_columns(static_cast<int64_t>(numbers.size()), kSlices));
  Row row{std::vector<Half>(padded), std::vector<Half>(padded), root, 0};
  for (std::size_t k = 0; k < numbers.size(); ++k) {
    const auto slices = split_element<Half>(numbers[k] * scale, half_of, float_of);
    const auto at = static_cast<std::size_t>(slice_offset(static_cast<int64_t>(k), 0, 1, SliceOrder::Turned));
    row.high[at] = slices.high, row.low[at] = slices.low;
  }
  return row;
}

// Adds the 16 products of a step.
float step(float sum, const std::vector<Half>& a, const std::vector<Half>& b, std::size_t first) {
  double exact = sum, largest = std::fabs(static_cast<double>(sum));
  for (std::size_t k = first; k < first + kStepK; ++k) {
    const double product = static_cast<double>(float_of(a[k])) * static_cast<double>(float_of(b[k]));
    exact += product, largest = std::max(largest, std::fabs(product));
  }
  return truncated(exact, largest);
}

enum class Loop { InTurn, WithBlocks, One };  // as in as_it_lies_mainloop.h

// Of K, in one CTA.
struct Part {
  std::size_t first, end;
};

// Two accumulators: a promotion's small products, then its large ones on top of them.
float in_turn(const Row& weight, const Row& x, std::size_t promotion, Part of_k) {
  float sum = 0;
  for (std::size_t first = of_k.first; first < of_k.end; first += promotion) {
    float part = 0;
    for (std::size_t k = first; k < first + promotion; k += kStepK) {
      part = step(part, weight.low, x.high, k);
      part = step(part, weight.high, x.low, k);
    }
    part *= 0x1p-11f;
    for (std::size_t k = first; k < first + promotion; k += kStepK) part = step(part, weight.high, x.high, k);
    sum += part;
  }
  return sum;
}

float with_blocks(const Row& weight, const Row& x, Part of_k) {
  float sum = 0, large = 0, small = 0, blocks = 0;
  for (std::size_t k = of_k.first; k < of_k.end; k += kStepK) {
    large = step(large, weight.high, x.high, k);
    small = step(small, weight.low, x.high, k);
    small = step(small, weight.high, x.low, k);
    if ((k + kStepK) % 32 == 0) sum += large, large = 0;
    if ((k + kStepK - of_k.first) % 512 == 0) blocks += sum, sum = 0;
  }
  return std::fma(small, 0x1p-11f, sum + blocks);
}

float one_slice(const Row& weight, const Row& x, Part of_k) {
  float sum = 0;
  for (std::size_t k = of_k.first; k < of_k.end; k += kStepK) sum = step(sum, weight.high, x.high, k);
  return sum;
}

// `ctas` share K: the sums of their parts are added in order (sm90/share_of_k.cuh).
float product(const Row& weight, const Row& x, Loop loop, std::size_t ctas) {
  const std::size_t promotion = x.high.size() >= 4096 ? 64 : 32, stages = x.high.size() / kStageK;
  float sum = 0;
  for (std::size_t cta = 0; cta < ctas; ++cta) {
    const Part part{stages * cta / ctas * kStageK, stages * (cta + 1) / ctas * kStageK};
    sum += loop == Loop::InTurn       ? in_turn(weight, x, promotion, part)
           : loop == Loop::WithBlocks ? with_blocks(weight, x, part)
                                      : one_slice(weight, x, part);
  }
  return rescale(weight.root, x.root, sum);
}

double draw(std::mt19937& random, int kind) {
  const double unit = random() * 0x1p-32;
  switch (kind) {
    case 0:
      return 2 * unit - 1;
    case 1:
      return unit;
    case 2:
      return std::ldexp(2 * unit - 1, static_cast<int>(random() % 25) - 12);
    default:
      return random() % 2 ? 0 : unit;
  }
}

// The error in eps |A||B|. `shift`: the remembered scale is off by 2^shift; then the tile is computed again.
double error(int kind, int k, int shift, Loop loop, std::size_t ctas) {
  std::mt19937 random(static_cast<unsigned>(kind * 1000003 + k));
  std::vector<float> w(static_cast<std::size_t>(k)), x(w);
  const double of_weight = std::ldexp(1.0, kind * 20 - 30);
  for (float& each : w) each = static_cast<float>(draw(random, kind) * of_weight);
  for (float& each : x) each = static_cast<float>(draw(random, kind));
  const int right = weight_exponent(finite_largest(w));
  const int first = std::clamp(right + shift, kLeastExponent, kLargestExponent);
  const float scale =
      power_of_two(is_scale_of_row(largest_high(w, power_of_two(first)), power_of_two(first)) ? first : right);
  if (scale != power_of_two(right)) return HUGE_VAL;
  const int of_x = row_exponent(finite_largest(x));
  const Row a = split(w, scale, row_root(right)), b = split(x, power_of_two(of_x), row_root(of_x));
  const float found = product(a, b, loop, ctas);
  double exact = 0, magnitude = 0;
  for (std::size_t i = 0; i < w.size(); ++i) {
    exact += static_cast<double>(w[i]) * x[i], magnitude += std::fabs(static_cast<double>(w[i]) * x[i]);
  }
  return magnitude == 0 ? (found == 0 ? 0 : HUGE_VAL) : std::fabs(found - exact) / magnitude * 0x1p24;
}

// --- the range check -----------------------------------------------------------------------------------------------

// Pairs of rows that just pass, made so that their tiny elements lose as much as they can: the loss over the sum, in
// eps. The bound is 5/8 (weight_scale.h).
double worst_loss() {
  double worst = 0;
  for (const int k : {128, 1024, 8192}) {
    const int needed = std::max(1, k / 64);
    for (const double largest_x : {0x1p13, 0x1.fffp14}) {
      for (int large_x = needed; large_x <= k; large_x += std::max(1, k / 16)) {
        const int large_w = k + needed - large_x;  // the fewest
        if (large_w > k) continue;
        // Where x is large and the weight is not: the weight is tiny; and the other way round.
        const double both = needed * (largest_x * 0x1p-8) * 0x1p6;
        const double lost = (large_x - needed) * largest_x * 0x1p-35 + (large_w - needed) * 0x1p15 * 0x1p-35;
        worst = std::max(worst, lost / both * 0x1p24);
      }
    }
  }
  return worst;
}

int main() {
  std::printf("%d %d %d %d %d %d %d %d\n", wrong_addresses(), conflicts(), wrong_transposed_addresses(),
              transposed_conflicts(), wrong_places(), wrong_verdicts(), wrong_roots(), wrong_counts());
  std::printf("%g\n", worst_loss());
  // kind, K, by how much the remembered scale is off, how many CTAs share K, the error
  for (int kind = 0; kind < 4; ++kind) {
    for (const int k : {1, 16, 33, 128, 1000, 4096, 8192}) {
      for (const auto& [shift, ctas] : {std::pair(0, 1), {20, 1}, {-20, 1}, {60, 1}, {-60, 1}, {0, 2}, {0, 8}}) {
        if (k < 512 * ctas && ctas > 1) continue;
        for (const Loop loop : {Loop::InTurn, Loop::WithBlocks, Loop::One}) {
          std::printf("%s %d %d %d %d %g\n", loop == Loop::One ? "scaled" : "split", kind, k, shift, ctas,
                      error(kind, k, shift, loop, static_cast<std::size_t>(ctas)));
        }
      }
    }
  }
  return 0;
}
