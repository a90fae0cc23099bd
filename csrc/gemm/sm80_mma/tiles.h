// The tiles of the mma.sync kernels. Adding one = adding a row here, and its cost in costs.h. Free of CUTLASS, so that
// the planner can read them on a machine without a GPU.
#pragma once

namespace epigemm::sm80_mma {

constexpr int kVectorBytes = 16;  // what one thread loads, stores, or reads of a matrix at once
constexpr int kInstruction = 16;  // rows of mma.sync; ldmatrix brings as many columns of N at once

// What a kernel multiplies.
enum class Inputs {
  Bits16,  // fp16 or bf16
  TF32,    // fp32, which is rounded in registers
  Split,   // fp32 in two fp16 slices (gemm/fp16_slices/layout.h)
  Scaled,  // fp32 in one fp16 slice
};

// How an operand is loaded to shared memory.
enum class Loads {
  Vectors,   // by cp.async, 16 bytes at a time, several stages ahead: rows of whole 16 bytes
  Elements,  // by elements, through registers, one stage ahead: rows of any length and address
};

struct Tile {
  int m, n;              // rows of x and of the weight
  int k;                 // elements that one stage has of a row: with two slices half of them hi, half lo
  int stages;            // of shared memory
  int warps_m, warps_n;  // a CTA's, along the tile's rows and columns
  Loads loads;
  int element_bytes = 2;  // of an element in memory
  int slices = 1;         // of a row

  constexpr int columns() const { return k / slices; }                   // of K in one stage
  constexpr int bytes() const { return slices * element_bytes; }         // of a column of a row
  constexpr int vector() const { return kVectorBytes / element_bytes; }  // neighbours
  constexpr int instruction_k() const { return 32 / element_bytes; }     // mma.sync m16n8k16, or m16n8k8 of TF32
  constexpr int row_bytes() const { return element_bytes * columns(); }  // of a slice in one stage
  constexpr int threads() const { return 32 * warps_m * warps_n; }
  constexpr int stage_bytes() const { return slices * row_bytes() * (m + n); }

  // Whether a multiprocessor has registers for one CTA alone: its sums take half of them, and it has others, too. Or,
  // as the linker says of two slices, eight warps have more than 128 each.
  constexpr bool is_alone() const { return 2 * m * n >= 64 * 1024 || slices == 2; }

  // Whether several CTAs may share the K of a tile.
  constexpr bool may_split() const { return loads == Loads::Vectors; }

  constexpr int shared_bytes() const { return stages * stage_bytes(); }
};

constexpr Tile kTiles[] = {
    // Large products. The wide stages need 144 KB, which A100, Hopper and B200 have.
    {128, 256, 64, 3, 2, 4, Loads::Vectors},
    {256, 128, 64, 3, 4, 2, Loads::Vectors},
    // The same in 96 KB, for GPUs with 99 KB.
    {128, 256, 32, 4, 2, 4, Loads::Vectors},
    {256, 128, 32, 4, 4, 2, Loads::Vectors},
    // 48 KB: two CTAs fit on a multiprocessor of every GPU, and one loads while the other is in its epilogue.
    {128, 128, 32, 3, 2, 2, Loads::Vectors},
    // Fewer rows, or few tiles.
    {64, 128, 32, 4, 2, 2, Loads::Vectors},
    {64, 64, 64, 3, 2, 2, Loads::Vectors},
    // M up to 16: the weight is read once.
    {16, 64, 64, 4, 1, 4, Loads::Vectors},
    // Rows that are not whole 16 bytes.
    {64, 128, 32, 2, 2, 2, Loads::Elements},
    {64, 64, 32, 2, 2, 2, Loads::Elements},
};

constexpr int kTileCount = sizeof(kTiles) / sizeof(kTiles[0]);

// Of fp32 operands, as TF32: rows of whole 16 bytes. All fit in 99 KB.
constexpr Tile kTilesTF32[] = {
    {128, 256, 16, 4, 2, 4, Loads::Vectors, 4},  // large products
    {128, 128, 16, 3, 2, 2, Loads::Vectors, 4},  // 48 KB: two CTAs on every GPU
    {64, 64, 32, 3, 2, 2, Loads::Vectors, 4},    // fewer rows, or few tiles
};

constexpr int kTileCountTF32 = sizeof(kTilesTF32) / sizeof(kTilesTF32[0]);

// Of fp32 operands in two fp16 slices. All fit in 99 KB. A warp has up to 64x32 results, 64 registers of sums. That of
// the smaller tile has registers for sums over blocks of K, too.
constexpr Tile kTilesSplit[] = {
    {128, 128, 64, 3, 2, 4, Loads::Vectors, 2, 2},  // large products
    {64, 128, 64, 4, 2, 4, Loads::Vectors, 2, 2},   // fewer rows, or few tiles
};

constexpr int kTileCountSplit = sizeof(kTilesSplit) / sizeof(kTilesSplit[0]);

// In one fp16 slice. All fit in 99 KB.
constexpr Tile kTilesScaled[] = {
    {128, 256, 32, 4, 2, 4, Loads::Vectors},  // large products
    {128, 128, 32, 3, 2, 2, Loads::Vectors},  // 48 KB: two CTAs on every GPU
    {64, 64, 64, 3, 2, 2, Loads::Vectors},    // fewer rows, or few tiles
};

constexpr int kTileCountScaled = sizeof(kTilesScaled) / sizeof(kTilesScaled[0]);

constexpr const Tile& tile_of(Inputs inputs, int index) {
  return inputs == Inputs::Split    ? kTilesSplit[index]
         : inputs == Inputs::Scaled ? kTilesScaled[index]
         : inputs == Inputs::TF32   ? kTilesTF32[index]
                                    : kTiles[index];
}

constexpr int tile_count(Inputs inputs) {
  return inputs == Inputs::Split    ? kTileCountSplit
         : inputs == Inputs::Scaled ? kTileCountScaled
         : inputs == Inputs::TF32   ? kTileCountTF32
                                    : kTileCount;
}

}  // namespace epigemm::sm80_mma
