// What an mma.sync kernel is expected to take. Nothing was measured: the shares below are assumed, until
// the kernels have run on their GPUs. Apart from tiles.h, so that new figures recompile the planner alone.
//
// time = base + norm(computation, L2, memory) + adding the sums of several CTAs + the last round's epilogue
#pragma once

#include <algorithm>

#include "gemm/fp16_slices/costs.h"
#include "gemm/planner/cost.h"
#include "gemm/sm80/architecture.h"
#include "gemm/sm80_mma/shares.h"

namespace epigemm::sm80_mma {

// The share of the tensor cores' rate that a multiprocessor reaches when it is full of this tile's CTAs.
constexpr double kShareOfRate[] = {
    0.85,  // 128x256x64
    0.85,  // 256x128x64
    0.80,  // 128x256x32
    0.80,  // 256x128x32
    0.80,  // 128x128x32
    0.65,  // 64x128x32
    0.50,  // 64x64x64
    0.15,  // 16x64x64
    0.30,  // 64x128x32 by elements: see below
    0.25,  // 64x64x32 by elements
};
static_assert(sizeof(kShareOfRate) / sizeof(double) == kTileCount, "every tile needs its cost");

// Of TF32's rate, which is half of that of 16 bits.
constexpr double kShareOfRateTF32[] = {
    0.80,  // 128x256x16
    0.75,  // 128x128x16
    0.50,  // 64x64x32
};
static_assert(sizeof(kShareOfRateTF32) / sizeof(double) == kTileCountTF32, "every tile needs its cost");

// Of a third of the rate of 16 bits: three products.
constexpr double kShareOfRateSplit[] = {
    0.75,  // 128x128x32
    0.60,  // 64x128x32
};
static_assert(sizeof(kShareOfRateSplit) / sizeof(double) == kTileCountSplit, "every tile needs its cost");

constexpr double kShareOfRateScaled[] = {
    0.80,  // 128x256x32
    0.80,  // 128x128x32
    0.50,  // 64x64x64
};
static_assert(sizeof(kShareOfRateScaled) / sizeof(double) == kTileCountScaled, "every tile needs its cost");

inline double flops_per_cycle(const Problem& p, int tile) {
  const double of_16_bits = Sm80::tensor_flops_per_cycle(p.device);
  switch (inputs_of(p)) {
    case Inputs::Split:
      return kShareOfRateSplit[tile] * of_16_bits / 3;
    case Inputs::Scaled:
      return kShareOfRateScaled[tile] * of_16_bits;
    case Inputs::TF32:
      return kShareOfRateTF32[tile] * of_16_bits / 2;
    case Inputs::Bits16:
      break;
  }
  return kShareOfRate[tile] * of_16_bits;
}

// What a product on slices takes beside the GEMM: the splits, and the fixup, which seldom has anything to do.
inline double slices_microseconds(const Problem& p) {
  constexpr double kFixupUs = 4;
  if (!is_on_slices(p.arithmetic)) return 0;
  const double of_weight = p.is_packed ? 0 : fp16_slices::split_microseconds(p, p.n);
  return fp16_slices::split_microseconds(p, p.m) + of_weight + kFixupUs;
}

// CTAs of a multiprocessor, limited by shared memory and by registers. A thread has 56 to 138 registers beside its sums
// by the linker's output, and of two slices up to 190: the figure here gives their CTAs.
inline int ctas_per_multiprocessor(const Tile& tile, const Device& device) {
  constexpr int kBesideSums = 110;
  const int by_shared = Sm80::shared_of_multiprocessor(device) / (tile.shared_bytes() + Sm80::kSharedOfSystem);
  const int by_registers = Sm80::kRegisters / (tile.m * tile.n + kBesideSums * tile.threads());
  return std::max(1, std::min(by_shared, by_registers));
}

// Bytes that are read from device memory. Strips that are `swizzle` tiles wide run along the raster's axis: the operand
// of that axis is read again for every strip, except for the part that is still in L2.
inline double loaded_bytes(const Problem& p, const Plan& plan) {
  using cost::as_double;
  const Tile& tile = tile_of(p, plan.tile);
  const bool is_along_m = plan.raster == Raster::AlongM;
  const double x = tile.bytes() * as_double(p.m) * as_double(p.k);
  const double weight = tile.bytes() * as_double(p.n) * as_double(p.k);
  const double walked = is_along_m ? x : weight;
  const double strips = as_double(ceil_div(is_along_m ? ceil_div(p.n, tile.n) : ceil_div(p.m, tile.m), plan.swizzle));
  const double missed = std::clamp(walked / Sm80::l2_bytes(p.device) - 0.5, 0.0, 1.0);
  return x + weight + missed * (strips - 1) * walked;
}

// Tiles by elements, whose loads take the time: measured at 14 shapes on an H100, with an error of up to a fifth.
struct ElementsCost {
  double step_cycles;          // one stage of K, if the multiprocessor has nothing else to do
  double step_cycles_of_many;  // its share of the time if the multiprocessor is full of CTAs
};

constexpr ElementsCost kElementsCosts[] = {{4000, 2300}, {1900, 1350}};  // of the last two tiles
static_assert(kTiles[kTileCount - 3].loads == Loads::Vectors && kTiles[kTileCount - 2].loads == Loads::Elements);

inline double microseconds_by_elements(const Problem& p, const Plan& plan, double of_busiest, double memory) {
  constexpr double kBaseUs = 5, kOddStoreUs = 2.7e-6;  // of an element, in rows that begin anywhere
  const ElementsCost& cost = kElementsCosts[plan.tile - (kTileCount - 2)];
  const double steps = cost::as_double(ceil_div(p.k, kTiles[plan.tile].k));
  const double cycles = std::max(steps * cost.step_cycles, steps * of_busiest * cost.step_cycles_of_many);
  const bool are_stores_odd = p.n * element_bytes(p.out.element) % kVectorBytes != 0;
  const double stores_us = are_stores_odd ? kOddStoreUs * cost::as_double(p.m) * cost::as_double(p.n) : 0;
  return kBaseUs + std::max(cycles, memory) / p.device.clock_mhz + stores_us;
}

// How much longer a multiprocessor takes over the same work while it has fewer warps than two for each of its four
// schedulers: nothing hides their latencies. Measured of tiles by elements, 1.4 and 1.7 (above), and assumed of the
// others.
inline double slowdown_of_few_warps(const Tile& tile, double ctas) {
  constexpr double kEnough = 8, kSlowdown = 1.5;
  return ctas * (tile.threads() / 32) < kEnough ? kSlowdown : 1;
}

// The bytes of L2 that a multiprocessor reads or writes in a cycle.
constexpr double kL2BytesPerCycle = 0.7 * Sm80::kL2BytesPerCycle;

// Where several CTAs share the K of a tile: every CTA writes its sums to L2, and the last one of a tile reads those of
// all. Nothing hides that, for all CTAs end at about the same time. `of_busiest`, `tiles_of_busiest`: CTAs, and tiles
// of which it adds the sums, of one multiprocessor. Assumed like the rest, and so is the time of the memset and of
// counting the CTAs.
inline double adding_microseconds(const Problem& p, const Plan& plan, double of_busiest, double tiles_of_busiest) {
  constexpr double kMemsetUs = 2, kCountUs = 1;
  if (plan.splits == 1) return 0;
  const Tile& tile = tile_of(p, plan.tile);
  const double sums_bytes = 4.0 * tile.m * tile.n;
  const double l2 = (of_busiest + plan.splits * tiles_of_busiest) * sums_bytes / kL2BytesPerCycle;
  // What does not fit into L2 goes through memory.
  const double all = cost::as_double(bytes_of_sums(p, plan));
  const double missed = std::clamp(all / Sm80::l2_bytes(p.device) - 0.5, 0.0, 1.0);
  return kMemsetUs + kCountUs + l2 / p.device.clock_mhz + missed * 2 * all / p.device.memory_bytes_per_us;
}

inline double microseconds(const Problem& p, const Plan& plan) {
  constexpr double kBaseUs = 5, kEpiloguePerElement = 0.25;  // cycles of a multiprocessor
  using cost::as_double;
  const Tile& tile = tile_of(p, plan.tile);
  const int most = ctas_per_multiprocessor(tile, p.device);
  const double multiprocessors = p.device.multiprocessors, area = tile.m * tile.n;
  const double tiles = as_double(tiles_of(p, tile));
  // Of a CTA: the whole K in stages, or the longest share.
  const int64_t units = ceil_div(units_of(p, tile), plan.splits);
  const double columns = as_double(plan.splits == 1 ? round_up(p.k, tile.columns()) : units * columns_of_unit(tile));

  // CTAs of the busiest multiprocessor: whole rounds, and the partly filled last one.
  const double of_busiest = std::ceil(tiles * plan.splits / multiprocessors);
  const double tiles_of_busiest = std::ceil(tiles / multiprocessors);
  const double compute = of_busiest * 2 * area * columns / flops_per_cycle(p, plan.tile) *
                         slowdown_of_few_warps(tile, std::min<double>(of_busiest, most));
  const double l2 = of_busiest * tile.bytes() * (tile.m + tile.n) * columns / kL2BytesPerCycle;
  const double moved =
      loaded_bytes(p, plan) + element_bytes(p.out.element) * as_double(p.m) * as_double(p.n) + cost::matrix_bytes(p);
  const double memory = moved / cost::memory_bytes_per_cycle(p.device);

  if (tile.loads == Loads::Elements) return microseconds_by_elements(p, plan, of_busiest, memory);

  // A CTA's epilogue is hidden while other CTAs of its multiprocessor are busy.
  const double of_tile =
      kEpiloguePerElement * area + cost::longer_functor_cycles(p, FunctorKernel::SwapAB, area, /*has_sigmoid=*/false);
  const double epilogue = of_tile * std::max(1.0, tiles_of_busiest / most);
  return kBaseUs + (cost::norm4(compute, l2, memory) + epilogue) / p.device.clock_mhz +
         adding_microseconds(p, plan, of_busiest, tiles_of_busiest) + slices_microseconds(p);
}

}  // namespace epigemm::sm80_mma
