// CUTLASS's mainloop for CTAs of a cluster that share the K of a tile (sm90/share_of_k.cuh), whose stages are released
// in the CTA itself. What is loaded is CUTLASS's, and so is the order of sums.
//
// Fast sums lose up to 2^-13 of the largest summand at each addition in the tensor cores. A part of K has fewer of
// these, and the parts are added in fp32: so the bound of a result's error is not larger than that of one CTA.
#pragma once

#include "gemm/sm90/cta_pipeline.cuh"
#include "gemm/sm90/kernel.cuh"

namespace epigemm::sm90_tma {

template <class Base, bool SharesK>
using PipelineOf =
    std::conditional_t<SharesK, sm90::CtaPipeline<Base::DispatchPolicy::Stages>, typename Base::MainloopPipeline>;

// What a thread's warpgroup multiplies, in shared memory: (MMA, MMA_M or MMA_N, MMA_K, stage).
template <class Base>
CUTLASS_DEVICE auto operand_a(typename Base::TensorStorage& shared, int warpgroup) {
  using namespace cute;
  auto const slice = typename Base::TiledMma{}.get_slice(warpgroup * 128);
  return slice.make_fragment_A(
      slice.partition_A(make_tensor(make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{})));
}
template <class Base>
CUTLASS_DEVICE auto operand_b(typename Base::TensorStorage& shared, int warpgroup) {
  using namespace cute;
  auto const slice = typename Base::TiledMma{}.get_slice(warpgroup * 128);
  return slice.make_fragment_B(
      slice.partition_B(make_tensor(make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{})));
}

template <class Base>
struct SharedKMainloop : Base {
  using typename Base::PipelineState;
  using typename Base::TensorStorage;
  using MainloopPipeline = PipelineOf<Base, /*SharesK=*/true>;

  // A stage is released when the products of the next one have been begun.
  template <class Sums>
  CUTLASS_DEVICE void mma(MainloopPipeline pipeline, PipelineState read, Sums& sums, int stages, int thread,
                          TensorStorage& shared, typename Base::Params const&) {
    using namespace cute;
    typename Base::TiledMma mma;
    const int warpgroup = __shfl_sync(~0u, thread / 128, 0);
    Tensor const a = operand_a<Base>(shared, warpgroup);
    Tensor const b = operand_b<Base>(shared, warpgroup);
    PipelineState done = read;
    clear(sums);
    mma.accumulate_ = GMMA::ScaleOut::One;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int stage = 0; stage < stages; ++stage, ++read) {
      pipeline.consumer_wait(read);
      warpgroup_fence_operand(sums);
      warpgroup_arrive();
      gemm(mma, a(_, _, _, read.index()), b(_, _, _, read.index()), sums);
      warpgroup_commit_batch();
      if (stage == 0) continue;
      warpgroup_wait<1>();
      warpgroup_fence_operand(sums);
      pipeline.consumer_release(done);
      ++done;
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(sums);
    pipeline.consumer_release(done);
  }

  // Every stage has been released.
  CUTLASS_DEVICE void mma_tail(MainloopPipeline, PipelineState, int) {}
};

}  // namespace epigemm::sm90_tma
