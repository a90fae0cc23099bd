// One fused GEMM on Hopper: CUTLASS's TMA warp-specialised mainloop, an open epilogue of our own (epilogue.cuh), and
// who does what when.
//
// A CTA is a producer warpgroup and one or two that multiply. Of the producer's warps one loads x and the weight for
// all tiles of the CTA, and one or two help, each with the epilogue of a warpgroup. CTAs are persistent: a tile after
// the other.
//
//   Pingpong      a warpgroup has every other tile to itself. Mainloops take turns; an epilogue runs under the other
//                 warpgroup's mainloop, and beside its epilogue where that is what takes the time.
//   Cooperative   the warpgroups share every tile: half the epilogue, where nothing hides it.
//   Single        there is one.
//
// Rows and columns are the kernel's: those of D, or of its transpose.
#pragma once

#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED  // columns in steps of 8

#include "cutlass/arch/grid_dependency_control.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "gemm/sm90/epilogue.cuh"
#include "gemm/sm90/groups.cuh"
#include "gemm/sm90/share_of_k.cuh"
#include "gemm/sm90/tile.h"

namespace epigemm::sm90 {

// CUTLASS's mainloop for matrices of one type. Its layouts are those of x, M x K, and of the weight's transpose, K x N,
// or of a transposed tile's weight and of x's transpose.
template <class Element, int Stages, Schedule schedule, class TileShape, class ClusterShape,
          class LayoutA = cutlass::layout::RowMajor, class LayoutB = cutlass::layout::ColumnMajor,
          int kAlignment = 16 / sizeof(Element)>
using Collective = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp,
    /*ElementA=*/Element, LayoutA, kAlignment,
    /*ElementB=*/Element, LayoutB, kAlignment,
    /*ElementAccumulator=*/float, TileShape, ClusterShape, cutlass::gemm::collective::StageCount<Stages>,
    std::conditional_t<schedule == Schedule::Cooperative, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                       cutlass::gemm::KernelTmaWarpSpecializedPingpong>>::CollectiveOp;

// One product of x and the weight themselves.
template <class Element_, int Stages, Schedule schedule>
struct OneProduct {
  using Element = Element_;
  static constexpr int kSlices = 1, kWeights = 1;
  static constexpr bool kPrefetchesRows = false, kStartsNextEarly = false, kJudgesRows = false, kSharesK = false,
                        kIsGrouped = false, kHasBlockScales = false;

  template <class TileShape, class ClusterShape>
  using Mainloop = Collective<Element, Stages, schedule, TileShape, ClusterShape>;
};

// Types, as in OneProduct: Element (of x and the weight), Mainloop, kSlices (numbers that it reads for one of x or the
// weight), kWeights (that x is multiplied by: pair_mainloop.cuh), kPrefetchesRows (their head comes to L2 while the
// kernel ahead runs, which must not write them), kStartsNextEarly (the next kernel has something to do before this
// one's results are there), kJudgesRows (the mainloop may find that the rows' roots, by which it and the epilogue go,
// are not the right ones: then the CTA computes all its tiles again), kSharesK (CTAs may share the K of a tile:
// share_of_k.cuh), kIsGrouped (rows of D are in groups: groups.cuh), kHasBlockScales (the mainloop asks where its tile
// is, whose stages have scales of their own). Besides: Operand, Output, Sums (epilogue.cuh); `tile`.
template <class Types>
struct Kernel {
  using Element = typename Types::Element;
  static constexpr Tile tile = Types::tile;
  static constexpr bool is_cooperative = tile.schedule == Schedule::Cooperative;
  static constexpr bool takes_turns = tile.schedule == Schedule::Pingpong;
  static constexpr int kRows = tile.transposed ? tile.n : tile.m, kColumns = tile.transposed ? tile.m : tile.n;
  static constexpr int kClusterRows = tile.transposed ? tile.cluster_n : tile.cluster_m;
  static constexpr int kClusterColumns = tile.transposed ? tile.cluster_m : tile.cluster_n;
  static constexpr int kCluster = kClusterRows * kClusterColumns;

  using TileShape = cute::Shape<cute::Int<kRows>, cute::Int<Types::kWeights * kColumns>,
                                cute::Int<kStageRowBytes / static_cast<int>(sizeof(Element))>>;
  using ClusterShape = cute::Shape<cute::Int<kClusterRows>, cute::Int<kClusterColumns>, cute::_1>;
  using Mainloop = typename Types::template Mainloop<TileShape, ClusterShape>;
  using Pipeline = typename Mainloop::MainloopPipeline;
  using PipelineState = typename Mainloop::PipelineState;

  static constexpr int kGroups = tile.groups(), kSharers = tile.sharers();
  static constexpr int MaxThreadsPerBlock = 128 * (kGroups + 1), MinBlocksPerMultiprocessor = 1;
  static constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;
  static_assert(kProducerRegisters + 2 * kConsumerRegisters <= 3 * 168, "of all warpgroups, as they are launched");

  using Epilogue =
      EpilogueConfig<typename Types::Operand, typename Types::Output, typename Types::Sums, tile.transposed,
                     tile.group_rows(), kPassRows * kSharers, kColumns, kGroups, tile.slots, tile.slot_bytes,
                     tile.vector_bytes(sizeof(typename Mainloop::TensorStorage)), Types::kWeights - 1,
                     Types::kIsGrouped>;

  static_assert(Epilogue::kDRows == tile.moment_rows(sizeof(typename Types::Output)));
  static_assert(!Types::kJudgesRows || (!takes_turns && kCluster == 1), "what is computed again is of one CTA");
  static_assert(!Types::kSharesK || (!takes_turns && kCluster == 1), "a tile's cluster is of those that share its K");

  static constexpr bool kIsGrouped = Types::kIsGrouped;
  static_assert(!kIsGrouped || !Types::kJudgesRows || (tile.transposed && !Types::kSharesK),
                "rows that are judged are the weight's, and CTAs that share K have one tile");

  using Sharing = ShareOfK<Types::kSharesK, 128 * kSharers>;

  struct Params {
    typename Mainloop::Params mainloop;
    typename Epilogue::Params epilogue;
    int k, k_steps;
    int lines_of_rows, lines_of_columns;  // the grid of tiles of clusters
    int swizzle;
    bool is_along_rows;
    Sharing sharing;
    GroupParams<kIsGrouped> groups;
    CUtensorMap stored;  // the matrix of the functor's second values, of D; last, because few kernels read it
  };

  struct Shared {
    alignas(1024) typename Mainloop::TensorStorage operands;
    typename Epilogue::Shared epilogue;
    alignas(16) typename Mainloop::PipelineStorage pipeline;
    int is_again_wanted;  // by a mainloop that judges rows
  };
  static constexpr int kSharedBytes = sizeof(Shared);
  static_assert(sizeof(typename Mainloop::TensorStorage) % 1024 == 0, "the epilogue's part is not aligned");
  static_assert(!Types::kSharesK ||
                    kRows * kColumns * sizeof(float) + kSharers * 2048 <= sizeof(typename Mainloop::TensorStorage),
                "no room for sums (share_of_k.cuh)");
  static_assert(kSharedBytes <= Sm90::kSharedBytes, "a stage or a slot too many");

  // --- tiles ---------------------------------------------------------------------------------------------------------

  // The tiles of one warpgroup, or of the whole CTA.
  struct Tiles {
    int now, step, end;

    CUTLASS_DEVICE bool is_there() const { return now < end; }
    CUTLASS_DEVICE static Group group() { return {}; }
  };

  // The same where rows are in groups, by a whole warp.
  struct GroupedTiles {
    int now, step;
    GroupSearch search;
    Group of;

    CUTLASS_DEVICE bool is_there() const { return of.begin < of.end; }
    CUTLASS_DEVICE Group group() const { return of; }
  };

  using AnyTiles = std::conditional_t<kIsGrouped, GroupedTiles, Tiles>;

  CUTLASS_DEVICE static AnyTiles tiles_from(Params const& p, int now, int step) {
    if constexpr (kIsGrouped) {
      GroupedTiles tiles{now, step, {}, {}};
      find_group(p, tiles);
      return tiles;
    } else {
      return {now, step, p.lines_of_rows * p.lines_of_columns};
    }
  }

  CUTLASS_DEVICE static AnyTiles next(Params const& p, AnyTiles tiles) {
    tiles.now += tiles.step;
    if constexpr (kIsGrouped) find_group(p, tiles);
    return tiles;
  }

  // For a tile in a group behind the last one's, or in the same.
  CUTLASS_DEVICE static void find_group(Params const& p, GroupedTiles& tiles) {
    constexpr int kTileRows = tile.m * tile.cluster_m;
    const int m = tile.transposed ? p.epilogue.columns : p.epilogue.rows;
    const int across = tile.transposed ? p.lines_of_rows : p.lines_of_columns;
    tiles.of = tiles.search.find(p.groups, tiles.now, m, kTileRows, across);
  }

  CUTLASS_DEVICE static AnyTiles all_tiles(Params const& p) {
    const int x = static_cast<int>(blockIdx.x), ctas = static_cast<int>(gridDim.x);
    if (p.sharing.is_shared()) return tiles_from(p, p.sharing.tile(x), ctas);
    return tiles_from(p, x / kClusterRows, ctas / kClusterRows);
  }

  CUTLASS_DEVICE static AnyTiles tiles_of(Params const& p, int group) {
    if constexpr (!takes_turns) return all_tiles(p);
    const int first = static_cast<int>(blockIdx.x) / kClusterRows, step = static_cast<int>(gridDim.x) / kClusterRows;
    return tiles_from(p, first + group * step, kGroups * step);
  }

  // The position of a tile in the grid, or in its group's, down and across. The tiles are taken along one direction, in
  // bands of `swizzle` lines.
  CUTLASS_DEVICE static Place index_of(Params const& p, AnyTiles const& tiles) {
    int lines_of_rows = p.lines_of_rows, lines_of_columns = p.lines_of_columns, number = tiles.now;
    if constexpr (kIsGrouped) {
      const Group of = tiles.group();
      (tile.transposed ? lines_of_columns : lines_of_rows) =
          static_cast<int>(ceil_div(of.end - of.begin, tile.m * tile.cluster_m));
      number -= of.tile;
    }
    const int minor_count = p.is_along_rows ? lines_of_rows : lines_of_columns;
    const int major_count = p.is_along_rows ? lines_of_columns : lines_of_rows;
    const int band = number / (p.swizzle * minor_count), rest = number - band * p.swizzle * minor_count;
    const int width = min(p.swizzle, major_count - band * p.swizzle);
    const int minor = rest / width, major = band * p.swizzle + rest - minor * width;
    const int row = p.is_along_rows ? minor : major, column = p.is_along_rows ? major : minor;
    if constexpr (kCluster == 1) return {row, column};
    return {row * kClusterRows + static_cast<int>(blockIdx.x) % kClusterRows,
            column * kClusterColumns + static_cast<int>(blockIdx.y)};
  }

  CUTLASS_DEVICE static Place place_of(Params const& p, AnyTiles const& tiles, int group) {
    const Place index = index_of(p, tiles);
    Place place{index.row * kRows + (is_cooperative ? group * kPassRows : 0), index.column * kColumns};
    (tile.transposed ? place.column : place.row) += tiles.group().begin;
    return place;
  }

  // Behind all tiles, by all warps that have to do with them: whether they are computed again, which they are once.
  CUTLASS_DEVICE static bool wants_again(Params const& p, Shared& shared, bool is_again) {
    if constexpr (!Types::kJudgesRows) {
      p.sharing.meet();  // until then the leader reads the others' sums
      return false;
    }
    constexpr int kThreads = 128 * kGroups + 32 * (1 + kGroups);
    constexpr int kId = 0;  // of the turns, which these kernels do not take
    if (p.sharing.is_shared()) {
      p.sharing.meet();  // even behind the last tile: until then the leader reads the others' sums
      return !is_again && shared.is_again_wanted != 0;
    }
    if (is_again) return false;
    asm volatile("" ::: "memory");  // accesses are not moved beyond the barrier
    __syncwarp();
    cutlass::arch::NamedBarrier::sync(kThreads, kId);
    asm volatile("" ::: "memory");
    return shared.is_again_wanted != 0;
  }

  // --- the producer's warps ------------------------------------------------------------------------------------------

  // CUTLASS's tensors along K.
  CUTLASS_DEVICE static auto inputs_of(Params const& p, Mainloop const& mainloop) {
    if constexpr (kIsGrouped) {
      return 0;
    } else {
      return mainloop.load_init(cute::make_shape(p.epilogue.rows, p.epilogue.columns, p.k, cute::Int<1>{}), p.mainloop);
    }
  }

  template <class Stages>
  CUTLASS_DEVICE static auto stages_from(int first, Stages const& stages) {
    return cute::make_coord_iterator(cute::idx2crd(first, stages), stages);
  }

  CUTLASS_DEVICE static void load(Params const& p, Shared& shared, Pipeline& pipeline, int lane) {
    if constexpr (Types::kStartsNextEarly || kIsGrouped) cutlass::arch::launch_dependent_grids();
    Mainloop mainloop;
    [[maybe_unused]] auto const inputs = inputs_of(p, mainloop);
    PipelineState state = cutlass::make_producer_start_state<Pipeline>();
    bool is_again = false;
    do {
      for (AnyTiles tiles = all_tiles(p); tiles.is_there(); tiles = next(p, tiles)) {
        const StepsOfK steps = p.sharing.steps(p.k_steps);
        const uint32_t rank = kCluster == 1 ? 0 : cute::block_rank_in_cluster();
        if constexpr (Types::kJudgesRows) {
          const Place place = place_of(p, tiles, /*group=*/0);
          mainloop.load(p.mainloop, pipeline, state, place.row, place.column, tiles.group().index, steps,
                        shared.operands);
        } else if constexpr (kIsGrouped) {
          const Place place = place_of(p, tiles, /*group=*/0);
          const int row = tile.transposed ? place.column : place.row;
          const int column = tile.transposed ? place.row : place.column;
          mainloop.load(p.mainloop, pipeline, state, row, column, tiles.group().index, steps.count, rank,
                        shared.operands);
        } else {
          const Place index = index_of(p, tiles);
          const auto coordinates = cute::make_coord(index.row, index.column, cute::_, 0);
          mainloop.load(p.mainloop, pipeline, state, inputs, coordinates,
                        stages_from(steps.first, cute::shape<3>(cute::get<0>(inputs))), steps.count, lane, rank,
                        shared.operands);
        }
        state.advance(steps.count);
        p.sharing.meet();
      }
      is_again = wants_again(p, shared, is_again);
    } while (is_again);
    mainloop.load_tail(pipeline, state);
  }

  CUTLASS_DEVICE static void help(Params const& p, Shared& shared, int group, int lane) {
    const EpilogueHelper<Epilogue> helper{p.epilogue, shared.epilogue, group, lane, &p.stored};
    SlotRing ring;
    bool is_again = false;
    do {
      for (AnyTiles tiles = tiles_of(p, group); tiles.is_there(); tiles = next(p, tiles)) {
        // The operands come while TMA still reads the last passes of the tile before.
        const Place place = place_of(p, tiles, group);
        const bool is_leader = p.sharing.is_leader();
        if (is_leader) {
          helper.bring(place, is_again, tiles.group().index);
          helper.prepare(ring, place);
        }
        p.sharing.meet();
        if (is_leader) helper.store(ring, place, tiles.group().end);
      }
      is_again = wants_again(p, shared, is_again);
      if (is_again) helper.wait_for_stores();
    } while (is_again);
    helper.end();
  }

  // --- a warpgroup ---------------------------------------------------------------------------------------------------

  // Waits until it is this warpgroup's turn to run its mainloop.
  CUTLASS_DEVICE static void wait_for_turn(int group) {
    if constexpr (takes_turns) cutlass::arch::NamedBarrier::sync(2 * 128, group);
  }
  CUTLASS_DEVICE static void hand_turn_on(int group) {
    if constexpr (takes_turns) cutlass::arch::NamedBarrier::arrive(2 * 128, 1 - group);
  }

  CUTLASS_DEVICE static void consume(Params const& p, Shared& shared, Pipeline& pipeline, int group, int warp,
                                     int lane) {
    typename Mainloop::TiledMma mma;
    Mainloop mainloop;
    const EpilogueConsumer<Epilogue> consumer{p.epilogue, shared.epilogue, group, warp, lane};
    const int thread = is_cooperative ? static_cast<int>(threadIdx.x) - 128 : static_cast<int>(threadIdx.x) % 128;
    PipelineState state;
    if (takes_turns && group == 1) {
      state.advance(p.k_steps);
      hand_turn_on(group);  // the first mainloop is the other warpgroup's
    }
    SlotRing ring;
    bool is_again = false;
    do {
      for (AnyTiles tiles = tiles_of(p, group); tiles.is_there(); tiles = next(p, tiles)) {
        auto sums = cute::partition_fragment_C(mma, cute::take<0, 2>(TileShape{}));
        const StepsOfK of_cta = p.sharing.steps(p.k_steps);
        const int steps = of_cta.count;
        if constexpr (Types::kJudgesRows) {
          const Place place = place_of(p, tiles, group);
          const Group of = tiles.group();
          mainloop.take_rows(p.mainloop, of.index, place.row, /*counts=*/place.column == of.begin, is_again);
        }
        if constexpr (Types::kHasBlockScales) mainloop.take_place(place_of(p, tiles, group), of_cta.first);
        wait_for_turn(group);
        mainloop.mma(pipeline, state, sums, steps, thread, shared.operands, p.mainloop);
        hand_turn_on(group);
        mainloop.mma_tail(pipeline, state, steps);
        state.advance(steps * (takes_turns ? kGroups : 1));
        if constexpr (!kIsGrouped) {
          if (!next(p, tiles).is_there()) cutlass::arch::launch_dependent_grids();
        }
        if constexpr (Types::kJudgesRows) {
          auto seen = mainloop.seen_rows();
          if (!p.sharing.gather(&shared.operands, thread, sums, seen)) continue;
          consumer.finish(ring, sums, place_of(p, tiles, group));
          const Place place = place_of(p, tiles, group);
          const Group of = tiles.group();
          const bool is_wrong =
              mainloop.judge_rows(p.mainloop, of.index, seen, place.row, /*counts=*/place.column == of.begin);
          if (is_wrong) p.sharing.raise(shared.is_again_wanted);
        } else {
          if (!p.sharing.gather(&shared.operands, thread, sums)) continue;
          consumer.finish(ring, sums, place_of(p, tiles, group));
        }
      }
      is_again = wants_again(p, shared, is_again);
    } while (is_again);
  }

  CUTLASS_DEVICE void operator()(Params const& p, char* memory) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    auto& shared = *reinterpret_cast<Shared*>(memory);
    const int warp_of_cta = cutlass::canonical_warp_idx_sync(), warp = warp_of_cta % 4, lane = threadIdx.x % 32;
    const int role = warp_of_cta / 4;  // 0: the producer

    if (warp_of_cta == 1 && cute::elect_one_sync()) {
      Epilogue::prepare(shared.epilogue);
      if constexpr (Types::kJudgesRows) shared.is_again_wanted = 0;
      cutlass::arch::fence_barrier_init();
      cutlass::arch::fence_view_async_shared();
    }
    if (warp_of_cta == 2 && cute::elect_one_sync()) {
      Mainloop::prefetch_tma_descriptors(p.mainloop);
      cute::prefetch_tma_descriptor(&p.epilogue.out);
    }
    typename Pipeline::Params pipeline_params;
    pipeline_params.role = role ? Pipeline::ThreadCategory::Consumer : Pipeline::ThreadCategory::Producer;
    pipeline_params.is_leader = threadIdx.x % 128 == 0;
    pipeline_params.num_consumers = 128 * kSharers;
    pipeline_params.transaction_bytes = p.mainloop.tma_transaction_bytes;
    Pipeline pipeline(shared.pipeline, pipeline_params, ClusterShape{});
    // The other CTAs' barriers must be initialised before anything is sent to them.
    if constexpr (kCluster > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }

    // Barriers and descriptors are set up before the previous kernel has ended. What that kernel writes is only read
    // afterwards.
    if (role == 0) {
      if constexpr (kGroups > 1)
        cutlass::arch::warpgroup_reg_dealloc<kProducerRegisters>();  // with one warpgroup there are enough
      if constexpr (Types::kPrefetchesRows) {
        if (warp == 1 && cute::elect_one_sync()) {
          StepsOfK steps = p.sharing.steps(p.k_steps);
          steps.count = min(steps.count, Mainloop::kPrefetchedStages / p.sharing.ctas);
          Mainloop::prefetch_rows(p.mainloop, index_of(p, all_tiles(p)).row, steps);
        }
      }
      cutlass::arch::wait_on_dependent_grids();
      if (warp == 0) load(p, shared, pipeline, lane);
      if (warp >= 4 - kGroups) help(p, shared, warp - (4 - kGroups), lane);
    } else {
      if constexpr (kGroups > 1) cutlass::arch::warpgroup_reg_alloc<kConsumerRegisters>();
      cutlass::arch::wait_on_dependent_grids();
      consume(p, shared, pipeline, role - 1, warp, lane);
    }
#endif
  }
};

}  // namespace epigemm::sm90
