// CUTLASS's pipeline of a CTA by itself, which may be one of a cluster (share_of_k.cuh): a stage is released here, not
// in the cluster's first CTA.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/pipeline/pipeline.hpp"

namespace epigemm::sm90 {

template <int Stages>
class CtaPipeline : public cutlass::PipelineTmaAsync<Stages> {
  using Base = cutlass::PipelineTmaAsync<Stages>;

 public:
  template <class ClusterShape>
  CUTLASS_DEVICE CtaPipeline(typename Base::SharedStorage& storage, typename Base::Params params, ClusterShape shape)
      : Base(storage, params, shape), empty_(storage.empty_barrier_) {
    static_assert(cute::size(ClusterShape{}) == 1);
  }

  CUTLASS_DEVICE void consumer_release(typename Base::PipelineState state) { empty_[state.index()].arrive(); }

 private:
  typename Base::EmptyBarrier* const empty_;
};

}  // namespace epigemm::sm90
