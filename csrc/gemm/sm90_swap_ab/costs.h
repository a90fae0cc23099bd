// What a swap-AB kernel is expected to take. Fitted to random shapes on an H200 and an H100 (docs/internals.md): the
// chosen plan takes 2 to 3% longer than the fastest on average. Apart from tiles.h, so that new figures recompile the
// planner alone.
//
// time = base + norm(computation, L2, memory) + epilogue, and the reduction where K is split; in clock cycles.
#pragma once

#include <algorithm>

#include "gemm/planner/cost.h"
#include "gemm/sm90_swap_ab/tiles.h"

namespace epigemm::sm90_swap_ab {

struct TileCost {
  double step_cycles;       // one stage of K of one CTA, if several share a multiprocessor
  double lone_step_cycles;  // the same if each has a multiprocessor to itself, so that its waits are not hidden
};

constexpr TileCost kTileCosts[] = {
    {84.3, 258},   // 16x64
    {60.8, 378},   // 16x128
    {113, 268},    // 32x64
    {125, 212},    // 64x64
    {271, 256},    // 64x128
    {558, 539},    // 128x128
    {545, 552},    // 64x256
    {1060, 1150},  // 128x256
};
static_assert(sizeof(kTileCosts) / sizeof(kTileCosts[0]) == kTileCount, "every tile needs its measured cost");

// Figures that depend on the element type and on the kind of epilogue.
struct Cost {
  double base_us;
  double l2_bytes_per_cycle;  // of one multiprocessor, with all of them at work
  double misaligned[4];       // factors of L2's bytes by alignment class of K
  double outside;             // a row of a TMA box beyond the matrix, in bytes of L2 over those of a row inside
  double visible_writes;      // the share of the result's bytes that is added to the loads'
  double serial_epilogues;    // the share of an epilogue that each further CTA of a multiprocessor adds
  double matrix_cycles;       // the time for reading a matrix operand in the epilogue of a tile of 128 x 128
  double epilogue_cycles[kTileCount];
};

constexpr Cost kCheapIn16Bits = {
    4.52, 45.8, {1, 1.05, 1.20, 1.88}, 1.93, 0.974, 1.03, 1080, {1550, 1970, 1790, 3080, 3850, 4980, 5250, 8160}};
constexpr Cost kTranscendentalIn16Bits = {
    4.44, 45.8, {1, 1.05, 1.20, 1.88}, 1.93, 1.86, 1.08, 983, {1400, 1820, 1880, 3340, 4200, 5760, 6120, 9390}};
constexpr Cost kCheapInTF32 = {
    4.61, 48.3, {1, 1.17, 1.33, 1.70}, 1.77, 0, 1.33, 1080, {1230, 1540, 1340, 2740, 3820, 5240, 5150, 9330}};
constexpr Cost kTranscendentalInTF32 = {
    4.45, 48.3, {1, 1.17, 1.33, 1.70}, 1.79, 0.521, 1.30, 983, {1410, 1740, 1620, 3580, 4770, 6420, 6390, 10300}};

inline const Cost& cost_of(const Problem& p) {
  const bool is_16_bits = element_bytes(p.x.element) == 2;
  if (cost::is_transcendental(p, FunctorKernel::SwapAB)) {
    return is_16_bits ? kTranscendentalIn16Bits : kTranscendentalInTF32;
  }
  return is_16_bits ? kCheapIn16Bits : kCheapInTF32;
}

inline int64_t steps_of(const Problem& p) { return ceil_div(p.k * element_bytes(p.x.element), kTileKBytes); }

// A cluster of 4 or 8 CTAs is in one part of the chip, whose number of multiprocessors is not a multiple of that. On an
// H200 and an H100, 120 multiprocessors were seen in use.
inline int usable_multiprocessors(int splits, int multiprocessors) {
  return splits > 2 ? multiprocessors * 10 / 11 : multiprocessors;
}

// CTAs that run in step share requests to L2. Those of a cluster read different parts of K.
inline double sharing(int splits, bool is_lone, int alignment) {
  constexpr double kWholeLines = 0.869, kOtherLines = 1.05, kPairs = 1.17, kMore = 1.11;
  if (splits > 1) return splits == 2 ? kPairs : kMore;
  if (!is_lone) return 1;
  return alignment == 0 ? kWholeLines : kOtherLines;
}

inline double microseconds(const Problem& p, const Plan& plan) {
  constexpr double kMultiprocessorBytesPerCycle = 92.5, kMemoryFactor = 1.02, kMemoryMisaligned = 0.0209,
                   kTileArea = 128 * 128;
  constexpr double kReduction = 1020, kReductionPerSplit = 18.4, kReductionPerByte = 0.0197;  // cycles
  using cost::as_double;
  const Tile& tile = kTiles[plan.tile];
  const TileCost& of_tile = kTileCosts[plan.tile];
  const Cost& c = cost_of(p);
  const double m = as_double(p.m), n = as_double(p.n), k = as_double(p.k), bytes = element_bytes(p.x.element);
  const double grid_m = as_double(ceil_div(p.m, tile.m)), grid_n = as_double(ceil_div(p.n, tile.n));
  const double ctas = grid_m * grid_n * plan.splits;
  const double usable = std::max(1, usable_multiprocessors(plan.splits, p.device.multiprocessors));
  const double of_one = std::ceil(ctas / usable);  // CTAs of the busiest multiprocessor
  const double rounds = std::ceil(ctas / (usable * tile.ctas_per_multiprocessor));
  const double steps = as_double(ceil_div(steps_of(p), plan.splits));

  const int alignment = cost::alignment_class(p.k * element_bytes(p.x.element));
  const double rows_outside = (grid_m * tile.m - m) / grid_m + (grid_n * tile.n - n) / grid_n;
  const double fetched = kTileKBytes * (c.misaligned[alignment] * (m / grid_m + n / grid_n) + c.outside * rows_outside);
  const double compute = steps * std::max(of_one * of_tile.step_cycles, rounds * of_tile.lone_step_cycles);
  const double l2 = cost::norm4(
      of_one * steps * fetched / kMultiprocessorBytesPerCycle,
      sharing(plan.splits, of_one == 1, alignment) * ctas * steps * fetched / (c.l2_bytes_per_cycle * usable));
  const double read = cost::matrix_bytes(p), read_last = read / rounds;
  const double memory =
      (bytes * ((m * k + n * k) * kMemoryFactor * (1 + kMemoryMisaligned * (c.misaligned[alignment] - 1)) +
                cost::written_matrices(p) * m * n * c.visible_writes) +
       (read - read_last)) /
      cost::memory_bytes_per_cycle(p.device);
  double epilogue = c.epilogue_cycles[plan.tile] +
                    cost::longer_functor_cycles(p, FunctorKernel::SwapAB, tile.m * tile.n / plan.splits);
  if (cost::reads_matrix(p)) epilogue += c.matrix_cycles * tile.m * tile.n / (kTileArea * plan.splits);
  double tail = epilogue * (1 + c.serial_epilogues * (of_one - 1)) + read_last / cost::memory_bytes_per_cycle(p.device);
  if (plan.splits > 1) {
    tail += kReduction + kReductionPerSplit * (plan.splits - 1) + kReductionPerByte * 4 * tile.m * tile.n * of_one;
  }
  return c.base_us + (cost::norm4(compute, l2, memory) + tail) / p.device.clock_mhz;
}

}  // namespace epigemm::sm90_swap_ab
