// What the large tiles are expected to take. Fitted in 16 bits to 210 random shapes on an H100 and an H200 (K from 48
// to 2048 at 150 of them, rows of any whole 16 bytes), in TF32 to 279 on an H100, two thirds of them grids of few
// tiles. The median error is 4%, and the chosen tile takes 1% to 2% longer than the fastest on average.
// Throttling is that of an earlier fit, to calls one after the other, for these were measured with pauses. Apart from
// tiles.h, so that new figures recompile the planner alone.
//
// time = fixed + rounds x (stages of K x step + epilogue), the first round's loads from memory beside its computation,
// the later rounds' beside theirs. Times of computation are in clock cycles.
#pragma once

#include <algorithm>

#include "gemm/planner/cost.h"
#include "gemm/sm90/shares.h"
#include "gemm/sm90_tma/tiles.h"

namespace epigemm::sm90_tma {

// One stage of K (128 bytes) of a whole tile, in cycles, with its data loaded. The tensor cores need 512 and 256 for
// 128x128 and 64x128. The rest of a narrow tile's time are its waits.
constexpr double kStepCyclesIn16Bits[] = {1237, 1217, 988, 981,  764, 1012, 662, 556,  805, 367,
                                          334,  1394, 529, 1164, 341, 786,  862, 1108, 620};
constexpr double kStepCyclesInTF32[] = {1260, 1270, 962, 965, 713, 1000, 627, 492, 804, 292, 379};

// Figures that depend on the element type and on the kind of epilogue.
struct Cost {
  double base_us;
  double l2_bytes_per_cycle;  // a CTA's share of L2's bandwidth, with every place taken
  double misaligned[4];       // factors of L2's bytes by alignment class of K
  double outside;             // a row of a TMA box beyond the matrix, in bytes of L2 over those of a row inside
  double throttling;          // sustained load lowers the clocks by up to this share
  double hidden_writes;       // the share of the result's bytes that competes with the loads of later rounds
  double visible_writes;      // the share of a round's results for which the epilogue waits
  double matrix_cycles;       // the time for reading a matrix operand in the epilogue of a tile of 128 x 128
  double epilogue_cycles[kTileCount];
  double fixed_us[kTileCount];
};

constexpr Cost kCheapIn16Bits = {
    5.26,
    67.4,
    {1, 1.61, 1.74, 2.54},
    4.24,
    0.204,
    0.502,
    0.496,
    1900,
    {950, 1126, 8559, 8122, 5534, 5840, 682, 810, 581, 681, 757, 1164, 656, 1025, 653, 5240, 7879, 925, 4200},
    {3.91, 3.6, 0.211, 0.0526, -0.23, 0.313, 1.73, 1.38, 1.94, 1.32, 1.48, 2.64, 1.36, 2.38, 1.23, -0.0788, -0.136,
     3.27, -0.1}};
constexpr Cost kTranscendentalIn16Bits = {
    5.43,
    67.4,
    {1, 1.61, 1.74, 2.54},
    4.24,
    0.204,
    0.491,
    0.404,
    1900,
    {3051, 3084, 9733, 9397, 6445, 7786, 1725, 1460, 1755, 1271, 1455, 2821, 1199, 2434, 1200, 6201, 8673, 2644, 4900},
    {3.31, 3.17, 0.203, 0.225, -0.0763, 0.458, 1.79, 1.44, 2.22, 1.11, 1.3, 3.28, 1.52, 2.81, 1.03, 0.129, -0.186, 3.18,
     -0.1}};
constexpr Cost kCheapInTF32 = {5.34,
                               44.7,
                               {1, 1.34, 1.41, 2.01},
                               2.5,
                               0,
                               1.03,
                               0.269,
                               2900,
                               {3440, 3640, 13930, 10310, 8030, 10030, 723, 173, 421, 324, 129},
                               {3.48, 3.06, -1.5, 0.122, -0.795, -0.658, 2.35, 2.44, 2.74, 2.06, 2.18}};
constexpr Cost kTranscendentalInTF32 = {6,
                                        44.7,
                                        {1, 1.34, 1.41, 2.01},
                                        2.5,
                                        0,
                                        1.16,
                                        0.24,
                                        2900,
                                        {4590, 4470, 16170, 11130, 8200, 10610, 786, 323, 520, 601, 324},
                                        {3.3, 3.29, -2, 0.516, -0.278, 0.0238, 2.53, 2.23, 3.1, 1.71, 1.96}};

static_assert(sizeof(kStepCyclesIn16Bits) / sizeof(double) == kTileCount, "every tile needs its measured cost");
static_assert(sizeof(kStepCyclesInTF32) / sizeof(double) == kTF32TileCount, "every tile needs its measured cost");

// Tiles of pairs, each with the figures that the ordinary tile with the same mainloop and registers, which has the
// columns of both products, had when kOfPairs was fitted to them: tiles 4, 2, 0 and 6. Those of the epilogue are for
// half as many results.
constexpr double kStepCyclesOfPairs[] = {713, 962, 1260, 627};
constexpr Cost kCheapPairs = {5.24,
                              63.6,
                              {1, 1.46, 1.83, 2.72},
                              2.5,
                              0.204,
                              0.885,
                              0.29,
                              1900,
                              {3730, 6050, 1330, 136},
                              {0.384, 0.299, 2.67, 1.99}};
constexpr Cost kTranscendentalPairs = {5.33,
                                       63.6,
                                       {1, 1.46, 1.83, 2.72},
                                       2.5,
                                       0.204,
                                       0.822,
                                       0.239,
                                       1900,
                                       {5720, 9300, 4040, 1640},
                                       {0.368, 0.028, 2.63, 2.01}};

// Times of pairs over those that the figures give, at 19 shapes on an H100. The rest of the factor is measured, too,
// and not understood: in grids of several rounds a pingpong tile is slowed by the share of rows outside of the result.
constexpr double kOfPairs[] = {1.06, 1.02, 0.98, 1.18};
constexpr double kOutsidePingpong = 1.2;
static_assert(sizeof(kStepCyclesOfPairs) / sizeof(double) == kPairTileCount, "every tile needs its cost");
static_assert(sizeof(kOfPairs) / sizeof(double) == kPairTileCount, "every tile needs its factor");

// 8 bits. A stage has as many bytes as in 16 bits, and takes the tensor cores as long; the rest is that of the tile of
// 16 bits that is named beside it. Estimated from 38 shapes on an H200, where the choice is 1% behind the fastest tile.
struct CostOf8Bits {
  double step_cycles;
  int like;                  // a tile of 16 bits
  double more_epilogue = 0;  // cycles: of two accumulators the epilogue is never hidden
};
constexpr CostOf8Bits kCostsOfFast[] = {{764, 4}, {150, 14}, {334, 10}, {1217, 1}, {988, 2}, {981, 3},
                                        {662, 6}, {220, 14}, {180, 14}, {529, 12}, {556, 7}};
constexpr CostOf8Bits kCostsOfPromoted[] = {{1030, 17, 1400}, {170, 14}, {420, 7},      {920, 6, 1500}, {780, 6, 900},
                                            {200, 14},        {620, 12}, {640, 7, 400}, {1030, 8, 1400}};
static_assert(sizeof(kCostsOfFast) / sizeof(CostOf8Bits) == kFastTileCount, "every tile needs its cost");
// Of scales of blocks by 18 shapes, in the same way.
constexpr CostOf8Bits kCostsOfBlocks[] = {{1080, 17, 1400}, {240, 14}, {650, 7}, {820, 6, 900}, {295, 14}};
static_assert(sizeof(kCostsOfBlocks) / sizeof(CostOf8Bits) == sizeof(kBlocksTiles) / sizeof(Tile));
static_assert(sizeof(kCostsOfPromoted) / sizeof(CostOf8Bits) == kPromotedTileCount, "every tile needs its cost");
// Not measured: results in blocks, whose epilogues are longer, and pairs, which are like tiles of pairs of 16 bits.
constexpr CostOf8Bits kCostsOfFastBlocks[] = {{764, 4, 1500}, {334, 10, 1500}, {1217, 1, 1500}};
constexpr CostOf8Bits kCostsOfPromotedBlocks[] = {{780, 6, 2400}, {420, 10, 2400}};
constexpr CostOf8Bits kCostsOfFastPairs[] = {{764, 0}, {1260, 2}};
constexpr CostOf8Bits kCostsOfPromotedPairs[] = {{780, 3, 900}};
constexpr CostOf8Bits kCostsOfFastPairsToBlocks[] = {{1260, 2, 1500}, {620, 3, 1500}};
static_assert(sizeof(kCostsOfFastBlocks) / sizeof(CostOf8Bits) ==
              tiles_of_8_bits(Sums8::Fast, false, Results8::Blocks).count);
static_assert(sizeof(kCostsOfPromotedBlocks) / sizeof(CostOf8Bits) ==
              tiles_of_8_bits(Sums8::Promoted, false, Results8::Blocks).count);
static_assert(sizeof(kCostsOfFastPairs) / sizeof(CostOf8Bits) ==
              tiles_of_8_bits(Sums8::Fast, true, Results8::Wide).count);
static_assert(sizeof(kCostsOfPromotedPairs) / sizeof(CostOf8Bits) ==
              tiles_of_8_bits(Sums8::Promoted, true, Results8::Wide).count);

inline Sums8 sums_of_8_bits(const Problem& p) {
  return p.arithmetic == Arithmetic::Fast ? Sums8::Fast : p.x_scale.is_of_blocks ? Sums8::Blocks : Sums8::Promoted;
}

inline Tiles tiles_of_8_bits(const Problem& p) {
  const Results8 quantised = p.out_scale.is_of_blocks ? Results8::Blocks : Results8::OneScale;
  return tiles_of_8_bits(sums_of_8_bits(p), p.is_pair, is_8_bits(p.out.element) ? quantised : Results8::Wide);
}

inline const CostOf8Bits& cost_of_8_bits(const Problem& p, int tile) {
  const bool is_fast = p.arithmetic == Arithmetic::Fast;
  if (p.is_pair && p.out_scale.is_of_blocks) return kCostsOfFastPairsToBlocks[tile];
  if (p.is_pair) return is_fast ? kCostsOfFastPairs[tile] : kCostsOfPromotedPairs[tile];
  if (p.out_scale.is_of_blocks) return is_fast ? kCostsOfFastBlocks[tile] : kCostsOfPromotedBlocks[tile];
  if (p.x_scale.is_of_blocks && !is_8_bits(p.out.element)) return kCostsOfBlocks[tile];
  return is_fast ? kCostsOfFast[tile] : kCostsOfPromoted[tile];
}

// The tile of `Cost` and of other figures; of a pair among the tiles of pairs.
inline int tile_of_figures(const Problem& p, int tile) {
  return is_8_bits(p.x.element) ? cost_of_8_bits(p, tile).like : tile;
}

// Whether its figures are those of 16 bits.
inline bool is_like_16_bits(const Problem& p) { return element_bytes(p.x.element) <= 2; }

inline double factor_of_pair(const Problem& p, const Plan& plan, double padded_m, double rounds) {
  const int tile = tile_of_figures(p, plan.tile);
  const bool is_slowed = kPairTiles[tile].schedule == Schedule::Pingpong && rounds > 1;
  return kOfPairs[tile] * (is_slowed ? 1 + kOutsidePingpong * (1 - cost::as_double(p.m) / padded_m) : 1);
}

inline double step_cycles(const Problem& p, int tile) {
  if (is_8_bits(p.x.element)) return cost_of_8_bits(p, tile).step_cycles;
  if (p.is_pair) return kStepCyclesOfPairs[tile];
  return is_like_16_bits(p) ? kStepCyclesIn16Bits[tile] : kStepCyclesInTF32[tile];
}

inline const Cost& cost_of(const Problem& p) {
  const bool is_16_bits = is_like_16_bits(p);
  if (cost::is_transcendental(p, FunctorKernel::Cooperative)) {
    return p.is_pair ? kTranscendentalPairs : is_16_bits ? kTranscendentalIn16Bits : kTranscendentalInTF32;
  }
  return p.is_pair ? kCheapPairs : is_16_bits ? kCheapIn16Bits : kCheapInTF32;
}

// The share of an epilogue's wait for a matrix that is left: for the tile with a slot for each pass, if the matrix, of
// `read` bytes, is one that TMA loads, which has the type of the results.
inline double matrix_share(const Problem& p, int tile, double read) {
  constexpr int kTileOfMatrices = 15;
  const double results = element_bytes(p.out.element) * cost::as_double(p.m) * cost::as_double(p.n);
  return !p.is_pair && tile_of_figures(p, tile) == kTileOfMatrices && read > 0 && read <= results ? 0.5 : 1;
}

// The epilogue's passes over a tile that store the functor's second values, which are counted as cheap ones.
inline double store_cycles(const Problem& p, int tile) {
  if (!epilogue_info(p.epilogue).has_store || p.is_pair) return 0;
  return (is_like_16_bits(p) ? kCheapIn16Bits : kCheapInTF32).epilogue_cycles[tile_of_figures(p, tile)];
}

inline double more_epilogue_cycles(const Problem& p, int tile) {
  return is_8_bits(p.x.element) ? cost_of_8_bits(p, tile).more_epilogue : 0;
}

// What statistics of D's columns add to the epilogue of a tile: the warpgroups read the results once more. Fitted to
// times of every tile on an H100 at seven shapes in bf16 (K from 1024 to 8192), over those without statistics and
// without the kernel that merges. They are small where an epilogue waits for its slots in any case.
constexpr double kColumnMomentCycles[] = {4075, 4050, 7025, 7150, 625, 1575, 1625, 1850, 1775, 225,
                                          400,  3425, 875,  3150, 200, 700,  2175, 3775, 600};
static_assert(sizeof(kColumnMomentCycles) / sizeof(double) == kTileCount, "every tile needs its measured cost");

inline double moment_cycles(const Problem& p, int tile) {
  return p.has_column_moments && !p.is_pair ? kColumnMomentCycles[tile_of_figures(p, tile)] : 0;
}

inline const Tile& tile_of(const Problem& p, int index) {
  if (p.groups) return p.is_pair ? kGroupedPairTiles[index] : kGroupedTiles[index];
  if (is_8_bits(p.x.element)) return tiles_of_8_bits(p).tiles[index];
  return p.is_pair ? kPairTiles[index] : kTiles[index];
}

inline double weights_of(const Problem& p) { return p.is_pair ? 2 : 1; }

inline Grid grid_of(const Problem& p, const Tile& tile) {
  return {ceil_div(ceil_div(p.m, tile.m), tile.cluster_m), ceil_div(ceil_div(p.n, tile.n), tile.cluster_n)};
}

// Bytes that are read from device memory. Clusters are computed along the raster's axis, in strips that are `swizzle`
// clusters wide: the operand of that axis is read again for every strip, except for the part that is still in L2.
struct Loads {
  double all, first_round;
};

inline Loads loads_of(const Problem& p, const Plan& plan, const Grid& grid, double places) {
  constexpr double kL2Bytes = 27.9e6, kMissed = 0.889;
  using cost::as_double;
  const double bytes = element_bytes(p.x.element);
  const double x = bytes * as_double(p.m) * as_double(p.k),
               weight = weights_of(p) * bytes * as_double(p.n) * as_double(p.k);
  const bool along_m = plan.raster == Raster::AlongM;
  const double walked = along_m ? x : weight, other = along_m ? weight : x;
  const double length = as_double(along_m ? grid.clusters_m : grid.clusters_n);
  const double width = as_double(along_m ? grid.clusters_n : grid.clusters_m);
  const double strip = std::min<double>(plan.swizzle, width);
  const double strips_at_once = std::max(1.0, places / (length * strip));
  const double passes = std::max(1.0, std::ceil(width / strip) / strips_at_once);
  const double missed = kMissed * std::clamp(walked / kL2Bytes - 0.5, 0.0, 1.0);
  const double all = walked * (1 + missed * (passes - 1)) + other;
  const double touched = std::min(1.0, std::ceil(places / strip) / length) * walked +
                         std::min(1.0, strip * std::ceil(places / (length * strip)) / width) * other;
  return {all, std::min(all, touched)};
}

inline double microseconds_of_groups(const Problem& p, const Plan& plan);

inline double microseconds(const Problem& p, const Plan& plan) {
  if (p.groups) return microseconds_of_groups(p, plan);
  constexpr double kCtaBytesPerCycle = 153, kMemoryFactor = 1.03, kMemoryMisaligned = 0.335;
  constexpr double kIdleSpeedup = 0.169, kAcrossCluster = 0.984;
  // What tiles that do not hide their epilogue take longer with so few stages of K, by the same shapes.
  constexpr double kFewSteps = 2, kOfFewSteps = 1.08;
  constexpr double kMisalignedWrites = 0.506, kHalfThrottledUs = 1660, kTileArea = 128 * 128;
  using cost::as_double;
  const Tile& tile = tile_of(p, plan.tile);
  const Cost& c = cost_of(p);
  const bool is_transcendental = cost::is_transcendental(p, FunctorKernel::Cooperative);
  const FunctorKernel kernel =
      tile.schedule == Schedule::Pingpong ? FunctorKernel::Pingpong : FunctorKernel::Cooperative;
  const double m = as_double(p.m), n = as_double(p.n), weights = weights_of(p);
  const int figures = tile_of_figures(p, plan.tile);
  const Grid grid = grid_of(p, tile);
  const double grid_m = as_double(grid.clusters_m), grid_n = as_double(grid.clusters_n);
  const double padded_m = grid_m * tile.m * tile.cluster_m, padded_n = grid_n * tile.n * tile.cluster_n;
  const int ctas = tile.cluster_m * tile.cluster_n;
  const cost::Rounds rounds =
      cost::rounds_of({grid.clusters_m * plan.splits, grid.clusters_n}, ctas, p.device.multiprocessors);

  // What a cluster loads from L2 for one stage of K, on average.
  const double misaligned = c.misaligned[cost::alignment_class(p.k * element_bytes(p.x.element))];
  const double rows_outside =
      (padded_m - m) * tile.cluster_n / grid_m + weights * (padded_n - n) * tile.cluster_m / grid_n;
  const double fetched = kTileKBytes * (misaligned * (m / grid_m + weights * n / grid_n) + c.outside * rows_outside);
  const bool is_across = (plan.raster == Raster::AlongN) == (tile.cluster_m > tile.cluster_n);
  const double inside = m * n / (padded_m * padded_n);
  const double mma = step_cycles(p, plan.tile);
  const auto step = [&](double share) {  // with that share of the places busy
    return cost::norm4(mma * (1 - kIdleSpeedup * (1 - share)),
                       (is_across ? kAcrossCluster : 1) * fetched * share / (c.l2_bytes_per_cycle * ctas),
                       fetched / (kCtaBytesPerCycle * ctas));
  };

  const double steps = as_double(ceil_div(ceil_div(p.k * element_bytes(p.x.element), kTileKBytes), plan.splits));
  const double per_byte =
      (1 + kMemoryMisaligned * (misaligned - 1)) * kMemoryFactor / cost::memory_bytes_per_cycle(p.device);
  const double written = cost::written_matrices(p) * element_bytes(p.out.element) * m * n;
  // The epilogue waits for the same share of its reads as of its writes.
  const double read = cost::matrix_bytes(p), read_beside = (1 - c.visible_writes) * read;
  const Loads loads = loads_of(p, plan, grid, rounds.places / plan.splits);
  double mainloops = 0;
  if (rounds.count == 1) {
    mainloops = cost::norm4(steps * step(rounds.last), per_byte * loads.first_round);
  } else {
    const double later =
        loads.all - loads.first_round + (c.hidden_writes * written + read_beside) * (1 - 1 / rounds.count);
    mainloops = cost::norm4(steps * step(1), per_byte * loads.first_round) +
                cost::norm4(steps * ((rounds.count - 2) * step(1) + step(rounds.last)), per_byte * later);
  }

  const bool are_writes_misaligned = cost::alignment_class(p.n * element_bytes(p.out.element)) == 3;
  const double epilogue =
      c.epilogue_cycles[figures] / weights + store_cycles(p, plan.tile) + moment_cycles(p, plan.tile) +
      more_epilogue_cycles(p, plan.tile) +
      c.visible_writes * written / rounds.count / cost::memory_bytes_per_cycle(p.device) *
          (1 + (are_writes_misaligned ? kMisalignedWrites : 0)) +
      c.visible_writes * read / rounds.count / cost::memory_bytes_per_cycle(p.device) +
      (cost::reads_matrix(p) ? matrix_share(p, plan.tile, read) * c.matrix_cycles * tile.m * tile.n / kTileArea : 0) +
      cost::longer_functor_cycles(p, kernel, tile.m * tile.n, is_transcendental);
  double cycles = mainloops + rounds.count * epilogue;
  if (tile.schedule == Schedule::Pingpong) {
    // One warpgroup's epilogue runs during the other's mainloop; they have alternate tiles.
    const double of_one = mainloops / rounds.count;
    const bool is_even = std::fmod(rounds.count, 2) == 0;
    const double of_longer = std::ceil(rounds.count / 2) * (of_one + epilogue) + (is_even ? of_one : 0);
    cycles = rounds.count == 1 ? mainloops + epilogue : std::max(mainloops + epilogue, of_longer);
  } else if (rounds.count > 1 && steps <= kFewSteps && !p.is_pair && is_like_16_bits(p)) {
    cycles *= kOfFewSteps;
  }
  cycles += read_beside / rounds.count / cost::memory_bytes_per_cycle(p.device);
  const double us = cycles / p.device.clock_mhz;
  const double busy =
      steps * rounds.count * mma * inside / cycles;  // the share of time in which the tensor cores are busy
  const double of_pair = p.is_pair ? factor_of_pair(p, plan, padded_m, rounds.count) : 1;
  return c.base_us + c.fixed_us[figures] + sm90::gather_us(tile, plan.splits) +
         of_pair * us * (1 + c.throttling * busy * busy * us / (us + kHalfThrottledUs));
}

// Rows in groups: as one product of as many whole tiles as groups need whose last one is half full, by the figures of
// tiles with the same mainloop, but at least the time in which all groups' weights are read. Of 18 pairs on an H200,
// models' and random ones, all took .96 to 1.19 of it (benchmarks/results/nvidia-h200/experts).
constexpr int kLikeGrouped[] = {1, 4, 7}, kLikeGroupedPair[] = {2, 0};
static_assert(sizeof(kLikeGrouped) / sizeof(int) == kGroupedTileCount, "every tile needs its cost");
static_assert(sizeof(kLikeGroupedPair) / sizeof(int) == kGroupedPairTileCount, "every tile needs its cost");

inline double microseconds_of_groups(const Problem& p, const Plan& plan) {
  Problem one = p;
  const Tile& tile = tile_of(p, plan.tile);
  one.groups = {};
  const int64_t rows = ceil_div(p.m, p.groups.count);
  one.m = p.groups.count * (p.groups.are_alike ? round_up(rows, tile.m) : std::max<int64_t>(tile.m, rows + tile.m / 2));
  one.n = round_up(p.n, tile.n * tile.cluster_n);  // a cluster's second CTA may have no columns
  Plan like = plan;
  like.tile = p.is_pair ? kLikeGroupedPair[plan.tile] : kLikeGrouped[plan.tile];
  const double bytes = weights_of(p) * element_bytes(p.weight.element) * cost::as_double(p.groups.count) *
                       cost::as_double(p.n) * cost::as_double(p.k);
  return std::max(microseconds(one, like), cost_of(p).base_us + bytes / p.device.memory_bytes_per_us);
}

}  // namespace epigemm::sm90_tma
