// Which numbers of a weight's tile a thread reads, and so in which order x's slices lie along K. Plain C++, so that a
// test on the host reads as the kernel does.
//
// A stage's tile of the weight is in boxes of 32 of K: rows of 128 bytes, whose eight chunks of 16 bytes TMA swizzles
// (chunk ^ row % 8). wgmma takes from a warp, in a step of 16 of K, row g = lane / 4 (and g + 8) and from lane q = lane
// % 4 of them two pairs of neighbours in K. A half-warp reads 64 bits a lane at once, of rows 0 to 3 or 4 to 7: all
// banks are read once if its lanes q are in different halves of a chunk or of the row. So
//
//   lane q reads in step s (0, 1) of a box, for the first and the second half of wgmma's K (h):
//     chunk 4 (q / 2) + 2 s + h,  its half q % 2,    that is K = 16 (q / 2) + 8 s + 4 h + 2 (q % 2) + {0, 1}
//   wgmma's K there is 16 s + 8 h + 2 q + {0, 1}
//
// Sums do not depend on the order of K as long as x has the same. Groups of four numbers are moved: group 4 (q / 2) + 2
// s + h of a box to 4 s + 2 h + q / 2, which turns the three bits of its number round by one.
//
// In a transposed weight rows are neighbours in memory and K lies across it. Its boxes are of 32 rows and a whole stage
// of K, a row of 128 bytes for each k. A lane reads its numbers one by one, 32 bits each, in wgmma's own order of K:
// the eight lanes g of a warp are eight neighbours in memory, and the four lanes q are in rows whose chunks are
// swizzled apart, so that a warp reads all banks once.
#pragma once

#include <cstdint>

#include "epilogue/operands.h"

namespace epigemm::sm90_fp16x3 {

constexpr int kStepK = 16, kBoxK = 32, kStepsOfBox = kBoxK / kStepK;
constexpr int kBoxRowBytes = 128;
constexpr int kBoxRows = 32;  // of a transposed weight

// The chunk that lanes q = 0, 1 read; a lane's address has this times 16 exclusive-ored to its first one.
EPIGEMM_HOST_DEVICE constexpr uint32_t weight_chunk(int step, int half) {
  return static_cast<uint32_t>(2 * step + half);
}

// Where a thread's first numbers lie in a box. Threads are numbered through the warpgroups, which have 64 rows each.
EPIGEMM_HOST_DEVICE constexpr uint32_t weight_offset(int thread) {
  const int lane = thread % 32, g = lane / 4, q = lane % 4;
  const int row = thread / 32 * 16 + g;
  return static_cast<uint32_t>(row * kBoxRowBytes + ((q / 2 * 4) ^ g) * 16 + q % 2 * 8);
}

// The same of a transposed weight, among all boxes of a stage of so many of K: of the thread's first row, at K = 2 q.
EPIGEMM_HOST_DEVICE constexpr uint32_t transposed_offset(int thread, int stage_k) {
  const int lane = thread % 32, k = lane % 4 * 2;
  const int row = thread / 32 * 16 + lane / 4, in_box = row % kBoxRows;
  return static_cast<uint32_t>((row / kBoxRows * stage_k + k) * kBoxRowBytes + (in_box / 4 ^ k) * 16 + in_box % 4 * 4);
}

// From there to the row eight further (r = 1) and to the next of K (e = 1), of the step's first or second half of K.
EPIGEMM_HOST_DEVICE constexpr uint32_t transposed_address(uint32_t first, int step, int half, int r, int e) {
  return (first ^ static_cast<uint32_t>(r * 32 + e * 16)) +
         static_cast<uint32_t>((step * kStepK + half * 8 + e) * kBoxRowBytes);
}

}  // namespace epigemm::sm90_fp16x3
