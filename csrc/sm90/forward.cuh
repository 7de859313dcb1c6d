// FlashAttention-2 forward for Hopper: TMA loads, wgmma products, warpgroups with roles. Dao, arXiv 2307.08691, algorithm 1; the overlap of
// softmax with products follows Shah et al., FlashAttention-3, arXiv 2407.08608, section 3. Launched by forward_launch.cuh.
//
// The last warpgroup loads: one thread finds the tiles, hands them over and keeps a ring of K and a ring of V stages filled. The others
// compute, 64 query rows each, or two the same rows and half of V each (ForwardShape::kColumnGroups). Inside one, S of the next key block is
// issued together with O += P V of the last, and softmax runs while that product does; across them, a ring of named barriers makes them take
// turns at issuing, so that one computes softmax while another has the tensor cores. O leaves through shared memory by the copy engine, under the
// next tile. Above head dim 256, a cluster of two thread blocks has a tile, and exchanges parts of S (ForwardShape::kColumnParts).
// A thread block works on several query blocks when the grid is smaller than their number: loads of the next one start early. Where tiles
// are small, one consumer computes, and several thread blocks share a multiprocessor.
// Softmax does not look for the maximum of a block: it takes that of the blocks before, and the sums of a block, which have to be added up
// anyway, say where this is too low (OnlineSoftmax::update_ahead, late_maximum.cuh). Only the first block of a tile and masked ones are
// done the usual way. PERF: of some 430 instructions a thread at d 64 it leaves 310, and none of them waits for all scores: 9 to 14 % at d 64, 2 to
// 11 % at d 128, nothing at d 256, where products take all the time. TUNING.md, "Softmax ahead of the maximum".
// Where queries are few, the rows of a query block are those of all heads of a group (tile_heads_log2): K and V are read once for them.
// Where query blocks are few, several thread blocks share the keys of one (splits), and a second kernel puts their results together;
// likewise of equal tiles those that make no whole round over the thread blocks (SharedTiles).
#pragma once
#include <type_traits>

#include "attention/dropout.cuh"
#include "attention/softcap.cuh"
#include "sm90/clear_rows.cuh"
#include "sm90/combine.cuh"
#include "sm90/forward_load.cuh"
#include "sm90/late_maximum.cuh"
#include "wgmma.cuh"

namespace hf_flash2::sm90 {

template <typename Shape, typename T, ForwardExtra kExtra>
__device__ __forceinline__ void compute_tiles(const ForwardArguments& arguments, const ForwardShared<Shape>& shared) {
  constexpr int kHeadDim = Shape::kHeadDim, kHeadDimV = Shape::kHeadDimV;
  constexpr int kBlockN = Shape::kBlockN, kStages = Shape::kStages, kConsumers = Shape::kConsumers;
  constexpr bool kCapped = kIsCapped<kExtra>, kDropout = kExtra == ForwardExtra::kDropout;
  const HfFlash2ForwardParams& params = arguments.params;
  const int group = warpgroup_index(), lane = threadIdx.x % 32;
  const int group_row = Shape::row_group(group) * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;  // first row of this lane in the block
  const int query_part = Shape::kQueryParts > 1 ? group : 0;
  const bool elected = threadIdx.x % 128 == 0;
  const auto stores_lse = [&] { return lane % 4 == 0 && Shape::first_panel() == 0 && Shape::first_column(group) == 0; };
  const float scale_log2 = kCapped ? arguments.cap.log2 : params.softmax_scale * kLog2e;

  float scores[1][kBlockN / 8][4], out[1][kHeadDimV / 8][4], rescale[1][2];
  uint32_t probabilities[kBlockN / 4];  // rounded, as A operands

  // PERF: descriptors of a tile are made once and advanced, two instructions a product in place of five, issued beside softmax that wants
  // all there are: d 128 1 to 2 %. TUNING.md, "Descriptors".
  const auto issue_scores = [&](int tile, int stage) {
    const uint64_t queries = panel_descriptor(shared.q(tile) + Shape::row_group(group) * 8192), keys = panel_descriptor(shared.k(stage));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k)
      WgmmaShared<T, kBlockN>::multiply(&scores[0][0][0], advance_descriptor(queries, k / 4 * Shape::kQueryPanelBytes + k % 4 * 32),
                                        advance_descriptor(keys, k / 4 * Shape::kKeyPanelBytes + k % 4 * 32), k > 0);
    wgmma_commit();
  };
  const auto issue_output = [&](int stage) {
    const uint32_t columns = shared.v(stage) + Shape::first_column(group) / 64 * Shape::kKeyPanelBytes;
    const uint64_t values = panel_descriptor(columns, Shape::kKeyPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k)
      WgmmaRegisters<T, kHeadDimV>::multiply(&out[0][0][0], probabilities + k * 4, advance_descriptor(values, k * 2048), 1);
    wgmma_commit();
  };
  const auto clear_out = [&] {
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) (&out[0][0][0])[i] = 0.f;
  };
  // Turns: whoever has issued its products gives the turn to the next.
  const auto wait_turn = [&] {
    if constexpr (kConsumers > 1) named_barrier_sync(kTurnBarrier + group, 256);
  };
  const auto pass_turn = [&] {
    if constexpr (kConsumers > 1) named_barrier_arrive(kTurnBarrier + (group + 1) % kConsumers, 256);
  };
  // Where O has no shared memory apart: the "empty" barrier of the stage that it leaves through, until the copy engine has read it; else 0.
  uint32_t lent = 0;
  const auto give_stage_back = [&] {
    if (Shape::kLendsStages && lent != 0 && elected) {
      bulk_wait_read<0>();
      mbarrier_arrive(lent);
    }
    lent = 0;
  };
  const Dropout<kDropout> dropout(params.rng_state);
  if (group == kConsumers - 1) pass_turn();  // the first turn is warpgroup 0's

  int use = 0;  // key blocks computed so far
  // Where there are column parts, S of a key block is what both blocks of a cluster make of theirs.
  const auto add_part_of_peer = [&] {
    if constexpr (Shape::kColumnParts > 1) shared.part_of_peer(group).exchange(scores[0], use);
  };
  for (int tile = 0;; ++tile) {
    mbarrier_wait(shared.task_full(tile), shared.task_parity(tile));
    const ForwardTask task = ForwardTask::load(shared.task(tile));
    if (task.head == ForwardTask::kNone) break;
    const int row = task.row_begin + group_row;
    const bool lends = Shape::kLendsStages && leaves_by_engine<Shape>(arguments, task);
    uint32_t through = shared.out(group);
    OnlineSoftmax<1> softmax;
    const auto finish = [&] {
      const ForwardTask done = ForwardTask::load(shared.task(tile));  // again: registers
      softmax.finish(rescale, kDropout ? arguments.dropout.out_scale : 1.f,
                     [&](int, int half) { return sink_of_row<Shape>(arguments, done, row + half * 8); });
      if (stores_lse()) store_lse<Shape>(arguments, done, row, softmax.row_max[0]);
    };

    if (task.key_block_begin < task.key_block_end) {
      const Mask mask(params, task.batch, task.q, task.k, task.has_holes);
      int block = task.key_block_end - 1;
      const auto apply_mask = [&](uint32_t visible) {
        mask.apply(scores, row, block * kBlockN + lane % 4 * 2, visible, arguments.tile_heads_log2);
      };
      // Dropout, of `block`: its bits, and what they do to the probabilities.
      const auto draw = [&] {
        return dropout.template draw<1, kBlockN / 8>(task.batch * params.heads_q + task.head, row - lane / 4, block * kBlockN);
      };
      const auto drop = [&](const auto& bits) {
        if constexpr (kDropout)
          bits.for_each_pair(arguments.dropout.threshold,
                             [&](int, int n, int half, uint32_t dropped) { probabilities[n * 2 + half] &= ~dropped; });
      };
      // S of `block` is there. The last stage of K is kept for O of warpgroup 0, for which it waits until the other has left it.
      const auto release_keys = [&](int stage) {
        const bool last = block == task.key_block_begin;
        if (elected && !(lends && last && group == 0)) mbarrier_arrive(shared.k_empty(stage));
        if (!last) return;
        mbarrier_arrive(shared.q_empty(tile, query_part));
        if (lends && group == 1) named_barrier_arrive(kStageBarrier, 256);
      };
      if constexpr (kIsPaged<kExtra>) {
        if ((block + 1) * kBlockN > task.k.length) {
          mbarrier_wait(shared.v_full(use % kStages), use / kStages & 1);
          clear_rows<kBlockN, Shape::kValuePanels, kConsumers * 128>(shared.v(use % kStages), task.k.length - block * kBlockN);
          async_proxy_fence();
          named_barrier_sync(kClearBarrier, kConsumers * 128);
        }
      }
      if constexpr (Shape::kLeavesBlocks) {
        const int first_row = task.row_begin + group * 64, last_query = (first_row + 63) >> arguments.tile_heads_log2;
        const bool idle = first_row >= task.q.length << arguments.tile_heads_log2;
        // At least one block is for each, as rows that see no key have results, too.
        const int own_end = idle ? task.key_block_begin : max(mask.key_block_end(last_query + 1, kBlockN), task.key_block_begin + 1);
        if (block >= own_end) give_stage_back();
#pragma unroll 1
        for (; block >= own_end; --block, ++use) {
          mbarrier_wait(shared.k_full(use % kStages), use / kStages & 1);
          wait_turn();
          pass_turn();
          if (elected) mbarrier_arrive(shared.k_empty(use % kStages));
          mbarrier_wait(shared.v_full(use % kStages), use / kStages & 1);
          if (elected) mbarrier_arrive(shared.v_empty(use % kStages));
        }
        if (idle) {
          mbarrier_arrive(shared.q_empty(tile, query_part));
          continue;
        }
      }
      mbarrier_wait(shared.q_full(tile, query_part), shared.q_parity(tile));
      mbarrier_wait(shared.k_full(use % kStages), use / kStages & 1);
      // Before the warpgroup may write its tile of O again: it waits for S, which no warp has before all have issued it.
      if (Shape::kOutApart && elected) bulk_wait_read<0>();
      give_stage_back();
      wait_turn();
      issue_scores(tile, use % kStages);
      pass_turn();
      wgmma_wait<0>();
      wgmma_use<kBlockN / 2>(&scores[0][0][0]);
      release_keys(use % kStages);
      add_part_of_peer();
      if constexpr (kCapped) cap_scores(scores, arguments.cap.scale);
      if (task.is_masked(block)) apply_mask(mask.visible_columns(block * kBlockN));
      softmax.update(scores, rescale, scale_log2);
      round_tiles<T, kBlockN / 8>(probabilities, scores[0]);
      drop(draw());
      clear_out();

      // S = Q K^T of `block` beside O += P V of the block before; softmax of S under the latter.
      const auto advance = [&](auto masked) {
        constexpr bool kMasked = decltype(masked)::value;
        // NOTE: before the products are issued: a branch between them and their wait makes ptxas serialise.
        const uint32_t visible = kMasked ? mask.visible_columns(block * kBlockN) : 0;
        const int stage_v = use % kStages, parity_v = use / kStages & 1;
        ++use;
        const int stage_k = use % kStages, parity_k = use / kStages & 1;
        decltype(draw()) bits;
        if constexpr (Shape::kDrawsEarly) bits = draw();
        mbarrier_wait(shared.k_full(stage_k), parity_k);
        wait_turn();
        issue_scores(tile, stage_k);
        mbarrier_wait(shared.v_full(stage_v), parity_v);
        issue_output(stage_v);
        pass_turn();
        wgmma_wait<1>();
        wgmma_use<kBlockN / 2>(&scores[0][0][0]);
        release_keys(stage_k);
        add_part_of_peer();
        if constexpr (kCapped) cap_scores(scores, arguments.cap.scale);
        if constexpr (kMasked) apply_mask(visible);
        constexpr bool kAhead = Shape::kAhead && !kMasked && !kIsPaged<kExtra>;  // follow_maximum reads k where it lies
        float sums[1][2];
        bool moved;
        if constexpr (kAhead)
          moved = !softmax.update_ahead(scores, sums, scale_log2);
        else
          moved = softmax.template update<true>(scores, rescale, scale_log2);
        wgmma_wait<0>();
        wgmma_use<kHeadDimV / 2>(&out[0][0][0]);
        if (elected) mbarrier_arrive(shared.v_empty(stage_v));
        // Before the branch: beside the exponentials.
        if constexpr (kAhead) round_tiles<T, kBlockN / 8>(probabilities, scores[0]);
        if (__builtin_expect(moved, 0)) {
          if constexpr (kAhead) {
            follow_maximum<T, kCapped>(arguments, ForwardTask::load(shared.task(tile)), row, block * kBlockN, scale_log2, softmax, scores,
                                       sums, rescale);
            round_tiles<T, kBlockN / 8>(probabilities, scores[0]);
          }
          scale_rows(out, rescale);
        }
        if constexpr (kAhead)
          softmax.add(sums);
        else
          round_tiles<T, kBlockN / 8>(probabilities, scores[0]);
        if constexpr (!Shape::kDrawsEarly) bits = draw();
        drop(bits);
      };
      --block;
      while (block >= task.key_block_begin) {
        if (task.is_masked(block)) {
          advance(std::true_type{});
          --block;
        } else {
          const int last = Shape::kAhead ? max(task.key_block_begin, task.unmasked_begin) : block;
          do {
            advance(std::false_type{});
          } while (--block >= last);
        }
      }

      const int stage_v = use % kStages;
      mbarrier_wait(shared.v_full(stage_v), use / kStages & 1);
      issue_output(stage_v);
      finish();
      wgmma_wait<0>();
      wgmma_use<kHeadDimV / 2>(&out[0][0][0]);
      if (elected && !(lends && group == 1)) mbarrier_arrive(shared.v_empty(stage_v));
      ++use;
      scale_rows(out, rescale);
      if (lends) {
        // In this order: warpgroup 0 cannot say that it has left the stage of V a second time before the other has heard the first.
        named_barrier_sync(kStageBarrier + group, 256);
        if (group == 0) named_barrier_arrive(kStageBarrier + 1, 256);
        through = group == 0 ? shared.k(stage_v) : shared.v(stage_v);
        lent = group == 0 ? shared.k_empty(stage_v) : shared.v_empty(stage_v);
      }
    } else {
      give_stage_back();
      mbarrier_arrive(shared.q_empty(tile, query_part));
      if (stores_lse()) store_lse<Shape>(arguments, task, row, {INFINITY, INFINITY});
      clear_out();
    }
    const ForwardTask done = ForwardTask::load(shared.task(tile));
    store_out<Shape, T>(arguments, Shape::kOutApart ? leaves_by_engine<Shape>(arguments, done) : lends, through, done, row, out[0]);
  }
  if (elected) bulk_wait_all();
  if (group == 0) wait_turn();  // takes the turn nobody is left to take: arrivals and waits of every barrier match
}

// PERF: a brief call waits for its instructions, which come from memory after other kernels. ptxas places first what stands last here: the
// loader, for which all wait, right behind the start. d 64 causal, 16 heads at 256: 11.4 -> 9.2 us. TUNING.md, "Brief calls".
template <typename Shape, typename T, ForwardExtra kExtra>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm) forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  const ForwardShared<Shape> shared{shared_address(memory)};
  let_next_kernel_begin();  // combine_kernel, where keys are split: nothing else is launched early behind this one
  constexpr int kStartThreads = Shape::kConsumers * 128 + 32;
  constexpr bool kClusters = Shape::kColumnParts > 1;
  if constexpr (kClusters) {
    if (threadIdx.x == 0) shared.make_barriers();
    cluster_meet();  // the peer may reach them
  }
  if (threadIdx.x < Shape::kConsumers * 128) {
    take_registers<Shape::kConsumerRegisters>();
    if constexpr (!kClusters) named_barrier_sync(kStartBarrier, kStartThreads);
    compute_tiles<Shape, T, kExtra>(arguments, shared);
  } else {
    give_registers<Shape::kLoaderRegisters>();
    const HfFlash2ForwardParams& params = arguments.params;
    const int warp = warp_index() - Shape::kConsumers * 4;
    if (warp != 0) {
      if (!may_have_gaps(params)) return;
      if (warp == 1)
        clear_gaps<false>(shared.zeros(), [&](const auto& clear) { for_each_forward_gap(params, blockIdx.x, gridDim.x, clear); });
      if (warp == 2) fill_lse_gaps(params, blockIdx.x, gridDim.x);
      if (warp == 3 && arguments.begins_with_longest()) {
        const int longest = find_longest(params.sequences_k, params.batch, params.max_seqlen_k);
        if (elect_one()) store_shared(shared.first_batch(), longest);
        __syncwarp();
        named_barrier_arrive(kFirstBarrier, 64);
      }
    } else {
      // The loader needs nobody for its first copies: it makes the barriers itself.
      if constexpr (!kClusters) {
        if (elect_one()) shared.make_barriers();
        __syncwarp();
        named_barrier_arrive(kStartBarrier, kStartThreads);
      }
      int first_batch = 0;
      if (arguments.begins_with_longest()) {
        named_barrier_sync(kFirstBarrier, 64);
        first_batch = load_shared_int(shared.first_batch());
      }
      CountedSequence at{0, 0, 0};
      if constexpr (kExtra == ForwardExtra::kListed)
        at = count_to(arguments.heads.quotient(blockIdx.x / Shape::kColumnParts),
                      arguments.template counted_sequences<Shape::kBlockM>(first_batch));
      if (elect_one()) load_tiles<Shape, kExtra>(arguments, shared, first_batch, at);
    }
  }
  if constexpr (kClusters) cluster_meet();  // the peer may still say that it has read what came from here
}

}  // namespace hf_flash2::sm90
