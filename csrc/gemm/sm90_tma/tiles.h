// The tiles for which Hopper kernels exist. Adding one = adding a row here, and its measured cost in costs.h. Free
// of CUTLASS, so that the planner can read them on a machine without a GPU.
#pragma once

#include "gemm/sm90/tile.h"

namespace epigemm::sm90_tma {

using sm90::Schedule;
using sm90::Tile;

// A stage has 128 bytes of K. Shared memory is used for more stages if the mainloop takes the time, or for more slots
// if a costly epilogue does.
constexpr Tile kTiles[] = {
    // 128 accumulators a thread, the most that registers allow. The cluster's two CTAs along M share the weight tile by
    // multicast. Fastest with a long K and few waves.
    {128, 256, 2, 1, Schedule::Cooperative, false, 4, 4, 4096},
    // The same with M and N exchanged, for grids that it fills better; its two CTAs along N share the x tile.
    {256, 128, 1, 2, Schedule::Cooperative, false, 4, 4, 4096},
    // For grids in which 128-wide tiles would leave the last wave half empty.
    {128, 192, 2, 1, Schedule::Pingpong, false, 5, 3, 4096},
    // Large grids: the rate of the large tiles, with an epilogue that runs during the next tile's mainloop.
    {192, 128, 1, 2, Schedule::Pingpong, false, 5, 3, 4096},
    // The most used tile: nearly the large tiles' rate, and its epilogue runs during the next tile's mainloop.
    {128, 128, 2, 1, Schedule::Pingpong, false, 6, 2, 8192},
    // 192x128 with larger slots and one stage less. Fastest if K is short and the epilogue takes the time.
    {192, 128, 1, 2, Schedule::Pingpong, false, 4, 4, 8192},
    // Few tiles, whose epilogue is not hidden: two warpgroups share it, and no cluster has to be set up.
    {128, 128, 1, 1, Schedule::Cooperative, false, 6, 2, 8192},
    // Grids of few tiles: the tile is best whose grid makes one full wave, or two. Of all multiples of 16 as heights,
    // these are the ones that random shapes need.
    {96, 128, 1, 1, Schedule::Cooperative, true, 7, 2, 6144},
    {160, 128, 1, 1, Schedule::Cooperative, true, 5, 2, 10240},
    {96, 64, 1, 1, Schedule::Single, true, 10, 2, 6144},
    {128, 64, 1, 1, Schedule::Single, true, 8, 2, 8192},
    // The same, only in 16 bits: for TF32 CuTe's TMA needs multiples of 32 rows.
    {144, 256, 1, 1, Schedule::Cooperative, true, 4, 2, 6144},
    {80, 128, 1, 1, Schedule::Cooperative, true, 7, 1, 10240},
    {240, 128, 1, 1, Schedule::Cooperative, true, 4, 2, 6144},
    {80, 64, 1, 1, Schedule::Single, true, 10, 1, 10240},
    // 128x128 with a slot for each pass and one stage less: a matrix of the epilogue is loaded under the mainloop as a
    // whole. 3 to 8% faster if the epilogue reads one and K is at most 512.
    {128, 128, 2, 1, Schedule::Pingpong, false, 5, 4, 8192},
    // N that is a little less than a multiple of these.
    {128, 160, 2, 1, Schedule::Pingpong, false, 5, 4, 4096},
    {128, 224, 2, 1, Schedule::Cooperative, false, 4, 4, 4096},
    // The same, and the narrowest N: 72 to 96 columns of 100,000 rows take 3 to 10% less with a GELU.
    {128, 96, 2, 1, Schedule::Pingpong, false, 6, 3, 4096},
};

constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);
constexpr int kTF32TileCount = kTileCount - 8;

// The tiles of pairs of products (Problem::is_pair), in 16 bits. n columns of the result have sums in 2n columns, so
// registers and shared memory are those of a tile above with 2n columns.
constexpr Tile kPairTiles[] = {
    // The counterpart of 128x128 above. The cluster's CTAs along M share the tiles of both weights.
    {128, 64, 2, 1, Schedule::Pingpong, false, 6, 2, 8192},
    // 192 sums a thread: a quarter less to load for the same products, if N fills it.
    {128, 96, 2, 1, Schedule::Pingpong, false, 5, 3, 4096},
    // Long K and few waves.
    {128, 128, 2, 1, Schedule::Cooperative, false, 4, 4, 4096},
    // M up to 128, where a cluster's second CTA would have no rows, and grids of few tiles.
    {128, 64, 1, 1, Schedule::Cooperative, false, 6, 2, 4096},
};

constexpr int kPairTileCount = sizeof(kPairTiles) / sizeof(kPairTiles[0]);

// The tiles of rows in groups, in 16 bits. The CTAs of a cluster are neighbours along N, for two along M could be of
// two groups.
constexpr Tile kGroupedTiles[] = {
    // Many rows a group.
    {256, 128, 1, 2, Schedule::Cooperative, false, 4, 4, 4096},
    // Its epilogue runs during the next tile's mainloop.
    {128, 128, 1, 2, Schedule::Pingpong, false, 6, 2, 8192},
    // Few rows.
    {64, 128, 1, 1, Schedule::Cooperative, true, 8, 1, 8192},
};
constexpr Tile kGroupedPairTiles[] = {
    {128, 128, 1, 2, Schedule::Cooperative, false, 4, 4, 4096},
    {128, 64, 1, 2, Schedule::Pingpong, false, 6, 2, 8192},
};

constexpr int kGroupedTileCount = sizeof(kGroupedTiles) / sizeof(kGroupedTiles[0]);
constexpr int kGroupedPairTileCount = sizeof(kGroupedPairTiles) / sizeof(kGroupedPairTiles[0]);

// Weights: 2 of a pair, else 1.
template <int Weights>
constexpr Tile grouped_tile(int index) {
  return Weights == 2 ? kGroupedPairTiles[index] : kGroupedTiles[index];
}

// The tiles of 8 bits, whose stages have 128 of K. The first ones exist for all types of x, weight and result.
constexpr Tile kFastTiles[] = {
    // Its epilogue runs during the next tile's mainloop.
    {128, 128, 2, 1, Schedule::Pingpong, false, 6, 2, 8192},
    // Few rows.
    {16, 64, 1, 1, Schedule::Single, true, 20, 1, 2048},
    // Few tiles.
    {128, 64, 1, 1, Schedule::Single, true, 8, 2, 8192},
    // Long K and few waves.
    {256, 128, 1, 2, Schedule::Cooperative, false, 4, 4, 4096},
    // Large grids.
    {128, 192, 2, 1, Schedule::Pingpong, false, 5, 2, 4096},
    {192, 128, 1, 2, Schedule::Pingpong, false, 5, 3, 4096},
    // Few tiles, without a cluster; and fewer rows.
    {128, 128, 1, 1, Schedule::Cooperative, false, 6, 2, 8192},
    {64, 64, 1, 1, Schedule::Single, true, 12, 1, 8192},
    {32, 64, 1, 1, Schedule::Single, true, 15, 1, 4096},
    // The weight is read once, by few CTAs: 65 to 160 rows.
    {80, 128, 1, 1, Schedule::Cooperative, true, 7, 1, 10240},
    {96, 128, 1, 1, Schedule::Cooperative, true, 7, 2, 6144},
};

// The same with two accumulators (promoted_mainloop.h), for which half the registers of a tile are left.
constexpr Tile kPromotedTiles[] = {
    {128, 192, 2, 1, Schedule::Cooperative, false, 5, 3, 4096},
    {16, 64, 1, 1, Schedule::Single, true, 20, 1, 2048},
    {64, 128, 1, 1, Schedule::Cooperative, true, 8, 1, 8192},
    {128, 160, 2, 1, Schedule::Cooperative, false, 5, 4, 4096},
    {128, 128, 1, 2, Schedule::Cooperative, false, 6, 2, 8192},
    {32, 64, 1, 1, Schedule::Single, true, 15, 1, 4096},
    {80, 128, 1, 1, Schedule::Cooperative, true, 7, 1, 10240},
    {96, 128, 1, 1, Schedule::Cooperative, true, 7, 2, 6144},
    // Few tiles of more rows.
    {192, 128, 1, 1, Schedule::Cooperative, true, 5, 2, 6144},
};

constexpr int kFastTileCount = sizeof(kFastTiles) / sizeof(kFastTiles[0]);
constexpr int kPromotedTileCount = sizeof(kPromotedTiles) / sizeof(kPromotedTiles[0]);

// The same with factors of blocks, which have registers and lie in one or two blocks of the weight.
constexpr Tile kBlocksTiles[] = {
    {128, 192, 2, 1, Schedule::Cooperative, false, 5, 3, 4096},
    {16, 64, 1, 1, Schedule::Single, true, 20, 1, 2048},
    {64, 128, 1, 1, Schedule::Cooperative, true, 8, 1, 8192},
    {128, 128, 1, 2, Schedule::Cooperative, false, 6, 2, 8192},
    {32, 64, 1, 1, Schedule::Single, true, 15, 1, 4096},
};

// What becomes of sums: see Arithmetic; or they are promoted, and each has factors of its own (promoted_mainloop.h).
enum class Sums8 { Fast, Promoted, Blocks };

// What becomes of results: a type of 16 or 32 bits, or e4m3 with one scale, or with one for each row of a tile.
enum class Results8 { Wide, OneScale, Blocks };

// The same tiles for results of 8 bits, of which a slot holds more columns; the first ones in the same order. Blocks
// have 128 columns; their second tile is for few rows.
constexpr Tile kFastTilesToE4M3[] = {
    {128, 128, 2, 1, Schedule::Pingpong, false, 6, 2, 8192},
    {16, 64, 1, 1, Schedule::Single, true, 20, 1, 1024},
    {128, 64, 1, 1, Schedule::Single, true, 8, 2, 4096},
    {256, 128, 1, 2, Schedule::Cooperative, false, 4, 2, 8192},
};
constexpr Tile kPromotedTilesToE4M3[] = {
    {128, 192, 2, 1, Schedule::Cooperative, false, 5, 3, 4096},
    {16, 64, 1, 1, Schedule::Single, true, 20, 1, 1024},
    {64, 128, 1, 1, Schedule::Cooperative, true, 8, 1, 4096},
};
constexpr Tile kFastTilesToBlocks[] = {
    {128, 128, 2, 1, Schedule::Pingpong, false, 6, 2, 8192},
    {64, 128, 1, 1, Schedule::Single, false, 8, 1, 8192},
    {256, 128, 1, 2, Schedule::Cooperative, false, 4, 2, 8192},
};
constexpr Tile kPromotedTilesToBlocks[] = {
    {128, 128, 2, 1, Schedule::Cooperative, false, 6, 1, 8192},
    {64, 128, 1, 1, Schedule::Single, false, 8, 1, 8192},
};

// Pairs of products in 8 bits. Promoted blocks would need 128 columns of two weights in two accumulators, which are all
// of a thread's registers.
constexpr Tile kFastPairs[] = {
    {128, 64, 2, 1, Schedule::Pingpong, false, 6, 2, 8192},
    {128, 128, 2, 1, Schedule::Cooperative, false, 4, 4, 4096},
};
constexpr Tile kPromotedPairs[] = {
    {128, 64, 2, 1, Schedule::Cooperative, false, 6, 1, 8192},
};
constexpr Tile kFastPairsToE4M3[] = {
    {128, 64, 2, 1, Schedule::Pingpong, false, 6, 2, 4096},
    {128, 128, 2, 1, Schedule::Cooperative, false, 4, 1, 8192},
};
constexpr Tile kPromotedPairsToE4M3[] = {
    {128, 64, 2, 1, Schedule::Cooperative, false, 6, 1, 4096},
};
constexpr Tile kFastPairsToBlocks[] = {
    {128, 128, 2, 1, Schedule::Cooperative, false, 4, 1, 8192},
    // Few rows.
    {64, 128, 1, 1, Schedule::Single, false, 5, 1, 8192},
};

// Whether CTAs may share the K of a tile of 8 bits (sm90/share_of_k.cuh).
constexpr bool may_share_k(const Tile& tile, bool is_pair) {
  return !is_pair && tile.schedule != Schedule::Pingpong && tile.cluster_m * tile.cluster_n == 1;
}

struct Tiles {
  const Tile* tiles;
  int count;

  template <int Count>
  static constexpr Tiles of(const Tile (&tiles)[Count]) {
    return {tiles, Count};
  }
};

constexpr Tiles tiles_of_8_bits(Sums8 sums, bool is_pair, Results8 results) {
  const bool is_fast = sums == Sums8::Fast;
  switch (results) {
    case Results8::OneScale:
      if (is_pair) return is_fast ? Tiles::of(kFastPairsToE4M3) : Tiles::of(kPromotedPairsToE4M3);
      return is_fast ? Tiles::of(kFastTilesToE4M3) : Tiles::of(kPromotedTilesToE4M3);
    case Results8::Blocks:
      if (is_pair) return is_fast ? Tiles::of(kFastPairsToBlocks) : Tiles{};
      return is_fast ? Tiles::of(kFastTilesToBlocks) : Tiles::of(kPromotedTilesToBlocks);
    default:
      if (is_pair) return is_fast ? Tiles::of(kFastPairs) : Tiles::of(kPromotedPairs);
      if (sums == Sums8::Blocks) return Tiles::of(kBlocksTiles);
      return is_fast ? Tiles::of(kFastTiles) : Tiles::of(kPromotedTiles);
  }
}
// Of e4m3 to fp16 and fp32; and where x or the weight is e5m2, to bf16 alone.
constexpr int kOtherResultTileCount = 3, kOtherResultPairCount = 1, kE5M2TileCount = 1;
constexpr int kInvariantTileOf8Bits = 0;

// The tile of batch-invariant calls, for any M: nearly the best rate at many rows, and no taller than necessary.
// Another tile may change the last bits of results, which is a change of behaviour for users.
constexpr int kInvariantTile = 4;
static_assert(kTiles[kInvariantTile].m == 128 && kTiles[kInvariantTile].n == 128, "the 128x128 tile");

constexpr int kTileKBytes = sm90::kStageRowBytes;

}  // namespace epigemm::sm90_tma
