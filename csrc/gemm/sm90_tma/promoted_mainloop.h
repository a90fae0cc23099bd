// The mainloop of 8-bit products whose sums are promoted: the tensor cores, which keep 13 or 14 bits of a sum, add 128
// products of each, and these sums are added to a second accumulator in fp32.
#pragma once

#include "gemm/sm90/kernel.cuh"

namespace epigemm::sm90_tma {

// Base: CUTLASS's mainloop. Tiles are cooperative or single: a warpgroup's additions run under the other one's
// products.
template <class Base>
struct PromotedMainloop : Base {
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using Pipeline = typename Base::MainloopPipeline;
  static constexpr int kPromoted = 128;  // of K
  static_assert(cute::get<2>(typename Base::TileShape{}) == kPromoted, "a stage is promoted as a whole");

  template <class Sums>
  CUTLASS_DEVICE void mma(Pipeline pipeline, PipelineState read, Sums& sums, int stages, int thread,
                          TensorStorage& shared, typename Base::Params const&) {
    using namespace cute;
    typename Base::TiledMma mma;
    const int warpgroup = __shfl_sync(~0u, thread / 128, 0);
    auto const slice = mma.get_slice(warpgroup * 128);
    Tensor const a = slice.make_fragment_A(
        slice.partition_A(make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{})));
    Tensor const b = slice.make_fragment_B(
        slice.partition_B(make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{})));
    Tensor part = make_fragment_like(sums);
    constexpr int kMmas = size<2>(decltype(a){});
    clear(sums);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < stages; ++stage) {
      pipeline.consumer_wait(read);
      mma.accumulate_ = GMMA::ScaleOut::Zero;
      warpgroup_fence_operand(part);
      warpgroup_arrive();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kMmas; ++i) {
        gemm(mma, a(_, _, i, read.index()), b(_, _, i, read.index()), part);
        mma.accumulate_ = GMMA::ScaleOut::One;
      }
      warpgroup_commit_batch();
      warpgroup_wait<0>();
      warpgroup_fence_operand(part);
      pipeline.consumer_release(read);
      ++read;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < size(sums); ++i) sums(i) += part(i);
    }
  }

  // Every stage has been released.
  CUTLASS_DEVICE void mma_tail(Pipeline, PipelineState, int) {}
};

}  // namespace epigemm::sm90_tma
