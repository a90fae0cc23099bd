// CTAs of a cluster that share the K of a tile, for products with fewer tiles than the GPU has multiprocessors.
//
// Each CTA sums over its part of K as if that were all. Then the leader, the cluster's first CTA, adds the others' sums
// to its own, in the order of their parts, and goes on to the epilogue alone. So two calls give the same bits.
//
// A cluster has a single tile. Its stages are empty by then, and hold the sums until the leader has read them from the
// other CTAs' shared memory.
#pragma once

#include <cuda_runtime.h>

#include "cute/arch/cluster_sm90.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"

namespace epigemm::sm90 {

// Of a CTA: stages of K.
struct StepsOfK {
  int first, count;
};

// Threads: of a CTA, that multiply.
template <bool MayShare, int Threads>
struct ShareOfK;

template <int Threads>
struct ShareOfK<false, Threads> {
  static constexpr int ctas = 1;

  CUTLASS_DEVICE static constexpr int tile(int block) { return block; }
  CUTLASS_DEVICE static constexpr bool is_shared() { return false; }
  CUTLASS_DEVICE static constexpr bool is_leader() { return true; }
  CUTLASS_DEVICE static constexpr StepsOfK steps(int all) { return {0, all}; }
  CUTLASS_DEVICE static void meet() {}
  CUTLASS_DEVICE static void raise(int& flag) { flag = 1; }

  template <class Sums, class... Seen>
  CUTLASS_DEVICE static constexpr bool gather(void*, int, Sums&, Seen&...) {
    return true;
  }
};

template <int Threads>
struct ShareOfK<true, Threads> {
  int ctas;  // of a cluster

  CUTLASS_DEVICE bool is_shared() const { return ctas > 1; }
  CUTLASS_DEVICE bool is_leader() const { return !is_shared() || rank() == 0; }
  CUTLASS_DEVICE int tile(int block) const { return block / ctas; }

  CUTLASS_DEVICE StepsOfK steps(int all) const {
    if (!is_shared()) return {0, all};
    const int first = all * rank() / ctas;
    return {first, all * (rank() + 1) / ctas - first};
  }

  // By all warps of all CTAs that have not ended: what one has written before, the others see.
  CUTLASS_DEVICE void meet() const {
    if (!is_shared()) return;
    asm volatile("" ::: "memory");  // accesses are not moved beyond the barrier
    __syncwarp();
    cute::cluster_arrive();
    cute::cluster_wait();
    asm volatile("" ::: "memory");
  }

  // The leader's sums become those of the tile, and what it has `seen` of the rows, where rows are judged, what all
  // have. Returns whether this CTA is the leader. `memory`: of the stages, which every thread of the CTA that
  // multiplies has read.
  template <class Sums, class... Seen>
  CUTLASS_DEVICE bool gather(void* memory, int thread, Sums& sums, Seen&... seen) const {
    if (!is_shared()) return true;
    constexpr int kVectors = cute::size(typename Sums::layout_type{}) / 4;
    const uint32_t mine = cute::cast_smem_ptr_to_uint(memory) + static_cast<uint32_t>(thread * sizeof(float4));
    if (!is_leader()) {
      cutlass::arch::NamedBarrier::sync(kThreads, kId);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const uint32_t at = mine + static_cast<uint32_t>(i * kThreads * sizeof(float4));
        asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(sums(4 * i)), "f"(sums(4 * i + 1)),
                     "f"(sums(4 * i + 2)), "f"(sums(4 * i + 3))
                     : "memory");
      }
      (put(mine + static_cast<uint32_t>(kVectors * kThreads * sizeof(float4)), seen.words()), ...);
      cutlass::arch::fence_view_async_shared();  // TMA may write there next
    }
    meet();
    if (!is_leader()) return false;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int other = 1; other < ctas; ++other) {
      const uint32_t theirs = cute::set_block_rank(mine, other);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        float4 part;
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(part.x), "=f"(part.y), "=f"(part.z), "=f"(part.w)
                     : "r"(theirs + static_cast<uint32_t>(i * kThreads * sizeof(float4))));
        sums(4 * i) += part.x, sums(4 * i + 1) += part.y, sums(4 * i + 2) += part.z, sums(4 * i + 3) += part.w;
      }
      (seen.add(words_at(theirs + static_cast<uint32_t>(kVectors * kThreads * sizeof(float4)))), ...);
    }
    return true;
  }

  // Sets a flag in the shared memory of all CTAs.
  CUTLASS_DEVICE void raise(int& flag) const {
    const uint32_t mine = cute::cast_smem_ptr_to_uint(&flag);
    for (int cta = 0; cta < ctas; ++cta) {
      asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(cute::set_block_rank(mine, cta)), "r"(1) : "memory");
    }
  }

 private:
  CUTLASS_DEVICE static void put(uint32_t at, uint4 words) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(words.x), "r"(words.y), "r"(words.z),
                 "r"(words.w)
                 : "memory");
  }

  CUTLASS_DEVICE static uint4 words_at(uint32_t theirs) {
    uint4 words;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(theirs));
    return words;
  }

  CUTLASS_DEVICE static int rank() { return static_cast<int>(cute::block_rank_in_cluster()); }

  static constexpr int kThreads = Threads;
  static constexpr int kId = 1;  // of a named barrier: of the turns, which these kernels do not take
};

}  // namespace epigemm::sm90
