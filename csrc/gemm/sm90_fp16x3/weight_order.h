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
#pragma once

#include <cstdint>

#include "epilogue/operands.h"

namespace epigemm::sm90_fp16x3 {

constexpr int kStepK = 16, kBoxK = 32, kStepsOfBox = kBoxK / kStepK;
constexpr int kBoxRowBytes = 128;

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

}  // namespace epigemm::sm90_fp16x3
