// The tiles of Hopper's persistent kernels, as families list them. Free of CUTLASS, so that the planner can read them
// on a machine without a GPU.
#pragma once

#include "gemm/sm90/architecture.h"
#include "gemm/sm90/schedule.h"

namespace epigemm::sm90 {

constexpr int kStageRowBytes = 128;    // of K: the widest swizzle that TMA has
constexpr int kGroupedRows = 1 << 30;  // the most rows that are in groups (tensor_map.h)
constexpr int kPassRows = 64;          // of a warpgroup's part of a tile, in a pass of the epilogue

struct Tile {
  int m, n;  // output elements of one CTA
  int cluster_m, cluster_n;
  Schedule schedule;
  bool transposed;  // the kernel's rows are the weight's, 64 at a time; its columns are a multiple of 16
  int stages;       // of both operands in shared memory
  int slots;        // buffers in shared memory for a warpgroup's results, one for each pass of the epilogue
  int slot_bytes;   // a pass has 64 rows of a warpgroup's part, as wide as a slot allows

  // The bytes that stages (`stages_bytes`) and slots leave to a warpgroup for the epilogue's vectors. If these need
  // more, there is one slot less.
  constexpr int vector_bytes(int stages_bytes) const {
    constexpr int kBarriersAndScalars = 1024, kAlignment = 1024;
    const int left = Sm90::kSharedBytes - kBarriersAndScalars - stages_bytes - groups() * slots * slot_bytes;
    return left / groups() / kAlignment * kAlignment;
  }

  constexpr int groups() const { return schedule == Schedule::Single ? 1 : 2; }        // warpgroups that multiply
  constexpr int sharers() const { return schedule == Schedule::Cooperative ? 2 : 1; }  // of a tile

  // The rows of the tile (of D or of its transpose) whose epilogue a warpgroup computes.
  constexpr int group_rows() const { return (transposed ? n : m) / sharers(); }

  // The rows of D in a pass, for results of so many bytes. Column statistics have blocks of as many rows.
  constexpr int moment_rows(int result_bytes) const {
    return transposed ? slot_bytes / kPassRows / result_bytes : kPassRows;
  }
};

}  // namespace epigemm::sm90
