// FlashAttention-2 forward for Hopper: TMA loads, wgmma products, warpgroups with roles. Dao, arXiv 2307.08691, algorithm 1; the overlap of
// softmax with products follows Shah et al., FlashAttention-3, arXiv 2407.08608, section 3. Launched by forward_launch.cuh.
//
// The last warpgroup loads: one thread finds the tiles, hands them over and keeps a ring of K and a ring of V stages filled. The others
// compute, 64 query rows each. Inside one, S of the next key block is issued together with O += P V of the last, and softmax runs while that
// product does; across them, a ring of named barriers makes them take turns at issuing, so that one computes softmax while another has the
// tensor cores. O leaves through shared memory by the copy engine, under the next tile.
// A thread block works on several query blocks when the grid is smaller than their number: loads of the next one start early. Where tiles are
// small, one consumer computes, and several thread blocks share a multiprocessor.
// Where queries are few, the rows of a query block are those of all heads of a group (tile_heads_log2): K and V are read once for them.
// Where query blocks are few, several thread blocks share the keys of one (splits), and a second kernel puts their results together; likewise
// of equal tiles those that make no whole round over the thread blocks (SharedTiles).
// PERF: tried and left: K and V by multicast to a cluster of two, neighbouring query blocks, each loading half a block of keys for both. It
// halves what is read from L2, 5.5 TB/s at d 128, and was to bring 2 to 5 %. One H200, full at 4k, d 64, 128, 256: 542 682 712 -> 410 560 670
// TFLOP/s: a stage is free only when both thread blocks are done with it, and they lose what they had gained by drifting apart.
#pragma once
#include <type_traits>

#include "attention/softmax.cuh"
#include "device/bulk_copy.cuh"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "device/warpgroup.cuh"
#include "sm90/clear_gaps.cuh"
#include "sm90/clear_rows.cuh"
#include "sm90/combine.cuh"
#include "sm90/forward_task.cuh"
#include "sm90/store.cuh"
#include "tiles.h"
#include "wgmma.cuh"

namespace hf_flash2::sm90 {

template <int kHeadDimension, TileSize kSize, int kHeadDimensionV = kHeadDimension>
struct ForwardShape : ForwardTile<kHeadDimension, kSize, kHeadDimensionV> {
  using Tile = ForwardTile<kHeadDimension, kSize, kHeadDimensionV>;
  static constexpr int kHeadDim = kHeadDimension, kHeadDimV = kHeadDimensionV;
  static constexpr int kBlockM = Tile::kConsumers * 64;
  static constexpr int kThreads = (Tile::kConsumers + 1) * 128;
  static constexpr int kPanels = (kHeadDim + 63) / 64, kValuePanels = (kHeadDimV + 63) / 64;
  static constexpr int kQueryPanelBytes = kBlockM * 128, kKeyPanelBytes = Tile::kBlockN * 128;
  static constexpr int kQueryBytes = kQueryPanelBytes * kPanels;
  static constexpr int kKeyBytes = kKeyPanelBytes * kPanels, kValueBytes = kKeyPanelBytes * kValuePanels;  // one stage of K, of V
  static constexpr int kOutBytes = Tile::kStoreTiles ? kQueryPanelBytes * kValuePanels : 0;
  static constexpr int kBarriers = 3 + 4 * Tile::kStages;
  // A warpgroup leaves the tensor cores to the others while none of its rows sees a key: on the last key blocks below a diagonal, or on all
  // where its rows lie behind the sequence. PERF: of 192 rows, the last tile of a head has 128 at 512 and 64 at 1k. One H200, d 64 full,
  // TFLOP/s: 390 450 -> 410 471; below a diagonal, d 64 at 4k, 8k, 16k 511 558 579 -> 523 563 581, d 256 at 512, 1k, 2k, with tiles of 64 keys,
  // 367 516 633 -> 383 531 641. With 128 rows and more keys in a block, d 128 and d 256 lost 1 to 3 %.
  static constexpr bool kLeavesBlocks = Tile::kConsumers == 3 || (Tile::kConsumers > 1 && kSize == TileSize::kSmall);
  static constexpr bool kSharesTiles = Tile::kBlocksPerSm == 1;  // may: forward_launch.cuh says when
  static constexpr int kSharedBytes =
      kQueryBytes + Tile::kStages * (kKeyBytes + kValueBytes) + kOutBytes + 2 * ForwardTask::kBytes + (kBarriers + 1) / 2 * 16;
  // The consumers take what a block has got at its launch and the loader leaves; to take more hangs.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * Tile::kBlocksPerSm) / 8 * 8;
  static constexpr int kLoaderRegisters = Tile::kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = (kLaunchRegisters * (Tile::kConsumers + 1) - kLoaderRegisters) / Tile::kConsumers / 8 * 8;
  static_assert(kConsumerRegisters <= 240, "what a thread may have");
};

// Shared-memory addresses: tiles, then barriers. "full": the copy has landed; "empty": every consumer is done with it.
template <typename Shape>
struct ForwardShared {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base; }
  __device__ __forceinline__ uint32_t k(int stage) const { return base + Shape::kQueryBytes + stage * Shape::kKeyBytes; }
  __device__ __forceinline__ uint32_t v(int stage) const { return k(Shape::kStages) + stage * Shape::kValueBytes; }
  __device__ __forceinline__ uint32_t out(int group) const { return v(Shape::kStages) + group * 8192; }  // 64 rows
  __device__ __forceinline__ uint32_t task(int tile) const { return out(0) + Shape::kOutBytes + tile % 2 * ForwardTask::kBytes; }
  __device__ __forceinline__ uint32_t barrier(int i) const { return task(1) + ForwardTask::kBytes + i * 8; }
  __device__ __forceinline__ uint32_t task_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t q_full() const { return barrier(1); }
  __device__ __forceinline__ uint32_t q_empty() const { return barrier(2); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(3 + stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return barrier(3 + Shape::kStages + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(3 + 2 * Shape::kStages + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return barrier(3 + 3 * Shape::kStages + stage); }
  __device__ __forceinline__ uint32_t zeros() const { return base + Shape::kSharedBytes; }  // where there may be gaps: clear_gaps.cuh

  // By one thread, before any use.
  __device__ __forceinline__ void make_barriers() const {
    mbarrier_init(task_full(), 1);
    mbarrier_init(q_full(), 1);
    mbarrier_init(q_empty(), Shape::kConsumers * 128);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      mbarrier_init(k_full(stage), 1);
      mbarrier_init(v_full(stage), 1);
      mbarrier_init(k_empty(stage), Shape::kConsumers);
      mbarrier_init(v_empty(stage), Shape::kConsumers);
    }
    mbarrier_init_fence();
  }
};

template <typename Shape>
__device__ __forceinline__ void load_tiles(const ForwardArguments& arguments, const ForwardShared<Shape>& shared) {
  constexpr int kStages = Shape::kStages;
  const HfFlash2ForwardParams& params = arguments.params;
  const bool packed = params.sequences_q.cu_seqlens != nullptr;
  int use = 0, tiles = 0;  // key blocks loaded and tiles handed over so far

  const auto hand_over = [&](const ForwardTask& task) {
    mbarrier_wait(shared.q_empty(), (tiles & 1) ^ 1);
    task.store(shared.task(tiles++));
    mbarrier_arrive(shared.task_full());
  };

  const auto load = [&](int query_block, int batch_head, int split, const Piece& piece) {
    const ForwardTask task = ForwardTask::make<Shape::kBlockM, Shape::kBlockN>(arguments, query_block, batch_head, split, piece);
    if (task.query_begin(arguments) >= task.q.length) return;
    if (task.key_block_begin == task.key_block_end) {
      hand_over(task);
      return mbarrier_arrive(shared.q_full());
    }
    const int head_k = arguments.group.quotient(task.head), map_batch = packed ? 0 : task.batch;
#pragma unroll 1
    for (int block = task.key_block_end - 1; block >= task.key_block_begin; --block, ++use) {
      const int stage = use % kStages, released = (use / kStages & 1) ^ 1;
      const int token = task.k.start + block * Shape::kBlockN;
      mbarrier_wait(shared.k_empty(stage), released);
      mbarrier_arrive_expect(shared.k_full(stage), Shape::kKeyBytes);
      for (int panel = 0; panel < Shape::kPanels; ++panel)
        tma_load(shared.k(stage) + panel * Shape::kKeyPanelBytes, &arguments.k, shared.k_full(stage), panel * 64, token, head_k, map_batch);
      if (block == task.key_block_end - 1) {
        hand_over(task);
        mbarrier_arrive_expect(shared.q_full(), Shape::kQueryBytes);
        for (int panel = 0; panel < Shape::kPanels; ++panel)
          tma_load(shared.q() + panel * Shape::kQueryPanelBytes, &arguments.q, shared.q_full(), panel * 64, task.head,
                   task.q.start + task.query_begin(arguments), map_batch);
      }
      mbarrier_wait(shared.v_empty(stage), released);
      mbarrier_arrive_expect(shared.v_full(stage), Shape::kValueBytes);
      for (int panel = 0; panel < Shape::kValuePanels; ++panel)
        tma_load(shared.v(stage) + panel * Shape::kKeyPanelBytes, &arguments.v, shared.v_full(stage), panel * 64, token, head_k, map_batch);
    }
  };
  // PERF: two loops. In one, the d 64 and 128 kernels that do not count lost 3 to 5 % at 512 and 1k: what precedes the loads of a tile delays it.
  if (arguments.next_tile != nullptr)
    for_each_counted_tile<Shape::kBlockM>(arguments, load);
  else
    for_each_tile<Shape::kConsumers == 3, Shape::kSharesTiles>(arguments, load);
  hand_over(ForwardTask::none());
}

// Named barriers: kTurnBarrier + i and kOutBarrier + i are warpgroup i's.
constexpr int kStartBarrier = 0, kClearBarrier = 1, kTurnBarrier = 2, kOutBarrier = 5;

// The lse of rows `row` and `row` + 8, or what it is over this share of the keys.
template <typename Shape>
__device__ __forceinline__ void store_lse(const ForwardArguments& arguments, const ForwardTask& task, int row, const float (&lse)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const OutputRow at(arguments, task, row + half * 8);
    float* const to = Shape::kSharesTiles && task.slot >= 0
                          ? arguments.shared.lse + (task.slot * Shape::kBlockM + row + half * 8 - task.row_begin)
                          : arguments.results.lse_of(at.batch, at.head, at.token, arguments.splits.divisor) + task.split;
    if (at.valid) *to = lse[half];
  }
}

// A warpgroup's rows of O. The copy engine takes whole tiles, under whatever the warpgroup does next; rows of a tile that ends behind its
// sequence, and shares, which are floats, are written from registers. `row` is this thread's first.
template <typename Shape, typename T>
__device__ __forceinline__ void store_out(const ForwardArguments& arguments, const ForwardShared<Shape>& shared, const ForwardTask& task,
                                          int row, const float (&out)[Shape::kHeadDimV / 8][4]) {
  const HfFlash2ForwardParams& params = arguments.params;
  const bool is_piece = Shape::kSharesTiles && task.slot >= 0;
  if constexpr (Shape::kStoreTiles) {
    const int query_end = (task.row_begin + Shape::kBlockM) >> arguments.tile_heads_log2;
    if (arguments.splits.divisor == 1 && !is_piece && query_end <= task.q.length && task.key_block_begin < task.key_block_end) {
      const int group = warpgroup_index();
      uint32_t rounded[Shape::kHeadDimV / 4];
      round_tiles<T, Shape::kHeadDimV / 8>(rounded, out);
      store_panels<Shape::kQueryPanelBytes, Shape::kHeadDimV / 8>(shared.out(group), rounded);
      named_barrier_sync(kOutBarrier + group, 128);
      if (threadIdx.x % 128 == 0) {
        const int token = task.q.start + ((task.row_begin + group * 64) >> arguments.tile_heads_log2);
        for (int panel = 0; panel < Shape::kValuePanels; ++panel)
          tma_store(&arguments.out, shared.out(group) + panel * Shape::kQueryPanelBytes, panel * 64, task.head, token,
                    params.sequences_q.cu_seqlens != nullptr ? 0 : task.batch);
        bulk_commit();
      }
      return;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const OutputRow at(arguments, task, row + half * 8);
    const HfFlash2Tensor& to = arguments.results.out;
    if (arguments.splits.divisor > 1 || is_piece) {
      const int piece_row = task.slot * Shape::kBlockM + row + half * 8 - task.row_begin;
      float* const share = is_piece ? arguments.shared.out + static_cast<int64_t>(piece_row) * params.head_dim_v
                                    : token_pointer<float>(to, at.batch, at.head, at.token) + task.split * params.head_dim_v;
      store_row(out, half, share, at.valid, params.head_dim_v);
    } else {
      store_row(out, half, token_pointer<T>(to, at.batch, at.head, at.token), at.valid, params.head_dim_v);
    }
  }
}

template <typename Shape, typename T>
__device__ __forceinline__ void compute_tiles(const ForwardArguments& arguments, const ForwardShared<Shape>& shared) {
  constexpr int kHeadDim = Shape::kHeadDim, kHeadDimV = Shape::kHeadDimV;
  constexpr int kBlockN = Shape::kBlockN, kStages = Shape::kStages, kConsumers = Shape::kConsumers;
  const HfFlash2ForwardParams& params = arguments.params;
  const int group = warpgroup_index(), lane = threadIdx.x % 32;
  const int group_row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;  // first row of this lane in the block
  const bool elected = threadIdx.x % 128 == 0;
  const bool ragged = params.sequences_k.cu_seqlens != nullptr || params.sequences_k.ranges != nullptr;
  const float scale_log2 = params.softmax_scale * kLog2e;

  float scores[1][kBlockN / 8][4], out[1][kHeadDimV / 8][4], rescale[1][2];
  uint32_t probabilities[kBlockN / 4];  // rounded, as A operands

  // PERF: descriptors of a tile are made once and advanced, two instructions a product in place of five, issued beside softmax that wants all
  // there are. One H200, call by call, full and causal at 1k, 4k, 16k, TFLOP/s: d 128 631 684 660 -> 646 699 670, 423 658 614 -> 430 667 626;
  // d 256 0 to 2 % faster; d 64 level, but 0.5 to 1 % faster with key blocks counted unsigned, which costs d 128 0.5 to 1 %.
  const auto issue_scores = [&](int stage) {
    const uint64_t queries = panel_descriptor(shared.q() + group * 8192), keys = panel_descriptor(shared.k(stage));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k)
      WgmmaShared<T, kBlockN>::multiply(&scores[0][0][0], advance_descriptor(queries, k / 4 * Shape::kQueryPanelBytes + k % 4 * 32),
                                        advance_descriptor(keys, k / 4 * Shape::kKeyPanelBytes + k % 4 * 32), k > 0);
    wgmma_commit();
  };
  const auto issue_output = [&](int stage) {
    const uint64_t values = panel_descriptor(shared.v(stage), Shape::kKeyPanelBytes);
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
  if (group == kConsumers - 1) pass_turn();  // the first turn is warpgroup 0's

  std::conditional_t<kHeadDim == 64, uint32_t, int> use = 0;  // key blocks computed so far
  for (int tile = 0;; ++tile) {
    mbarrier_wait(shared.task_full(), tile & 1);
    const ForwardTask task = ForwardTask::load(shared.task(tile));
    if (task.head == ForwardTask::kNone) break;
    const int row = task.row_begin + group_row;
    OnlineSoftmax<1> softmax;
    const auto finish = [&] {
      softmax.finish(rescale, 1.f);
      if (lane % 4 == 0) store_lse<Shape>(arguments, ForwardTask::load(shared.task(tile)), row, softmax.row_max[0]);
    };

    if (task.key_block_begin < task.key_block_end) {
      const Mask mask(params, task.batch, task.q, task.k, task.has_holes);
      int block = task.key_block_end - 1;
      const auto apply_mask = [&](uint32_t visible) {
        mask.apply(scores, row, block * kBlockN + lane % 4 * 2, visible, arguments.tile_heads_log2);
      };
      if (ragged && (block + 1) * kBlockN > task.k.length) {
        mbarrier_wait(shared.v_full(use % kStages), use / kStages & 1);
        clear_rows<kBlockN, Shape::kValuePanels, kConsumers * 128>(shared.v(use % kStages), task.k.length - block * kBlockN);
        async_proxy_fence();
        named_barrier_sync(kClearBarrier, kConsumers * 128);
      }
      if constexpr (Shape::kLeavesBlocks) {
        const int first_row = task.row_begin + group * 64, last_query = (first_row + 63) >> arguments.tile_heads_log2;
        const bool idle = first_row >= task.q.length << arguments.tile_heads_log2;
        // At least one block is for each, as rows that see no key have results, too.
        const int own_end = idle ? task.key_block_begin : max(mask.key_block_end(last_query + 1, kBlockN), task.key_block_begin + 1);
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
          mbarrier_arrive(shared.q_empty());
          continue;
        }
      }
      mbarrier_wait(shared.q_full(), tile & 1);
      mbarrier_wait(shared.k_full(use % kStages), use / kStages & 1);
      // Before the warpgroup may write its tile of O again: it waits for S, which no warp has before all have issued it.
      if (Shape::kStoreTiles && elected) bulk_wait_read<0>();
      wait_turn();
      issue_scores(use % kStages);
      pass_turn();
      wgmma_wait<0>();
      wgmma_use<kBlockN / 2>(&scores[0][0][0]);
      if (elected) mbarrier_arrive(shared.k_empty(use % kStages));
      if (block == task.key_block_begin) mbarrier_arrive(shared.q_empty());
      if (task.is_masked(block)) apply_mask(mask.visible_columns(block * kBlockN));
      softmax.update(scores, rescale, scale_log2);
      round_tiles<T, kBlockN / 8>(probabilities, scores[0]);
      clear_out();

      // S = Q K^T of `block` beside O += P V of the block before; softmax of S under the latter.
      const auto advance = [&](auto masked) {
        constexpr bool kMasked = decltype(masked)::value;
        // NOTE: before the products are issued: a branch between them and their wait makes ptxas serialise.
        const uint32_t visible = kMasked ? mask.visible_columns(block * kBlockN) : 0;
        const int stage_v = use % kStages, parity_v = use / kStages & 1;
        ++use;
        const int stage_k = use % kStages, parity_k = use / kStages & 1;
        mbarrier_wait(shared.k_full(stage_k), parity_k);
        wait_turn();
        issue_scores(stage_k);
        mbarrier_wait(shared.v_full(stage_v), parity_v);
        issue_output(stage_v);
        pass_turn();
        wgmma_wait<1>();
        wgmma_use<kBlockN / 2>(&scores[0][0][0]);
        if (elected) mbarrier_arrive(shared.k_empty(stage_k));
        if (block == task.key_block_begin) mbarrier_arrive(shared.q_empty());
        if constexpr (kMasked) apply_mask(visible);
        const bool moved = softmax.template update<Shape::kLazyRescale>(scores, rescale, scale_log2);
        wgmma_wait<0>();
        wgmma_use<kHeadDimV / 2>(&out[0][0][0]);
        if (elected) mbarrier_arrive(shared.v_empty(stage_v));
        if (moved) scale_rows(out, rescale);
        round_tiles<T, kBlockN / 8>(probabilities, scores[0]);
      };
      for (--block; block >= task.key_block_begin; --block) {
        if (task.is_masked(block))
          advance(std::true_type{});
        else
          advance(std::false_type{});
      }

      const int stage_v = use % kStages;
      mbarrier_wait(shared.v_full(stage_v), use / kStages & 1);
      issue_output(stage_v);
      finish();
      wgmma_wait<0>();
      wgmma_use<kHeadDimV / 2>(&out[0][0][0]);
      if (elected) mbarrier_arrive(shared.v_empty(stage_v));
      ++use;
      scale_rows(out, rescale);
    } else {
      mbarrier_arrive(shared.q_empty());
      if (lane % 4 == 0) store_lse<Shape>(arguments, task, row, {INFINITY, INFINITY});
      clear_out();
    }
    store_out<Shape, T>(arguments, shared, ForwardTask::load(shared.task(tile)), row, out[0]);
  }
  if (Shape::kStoreTiles && elected) bulk_wait_all();
  if (group == 0) wait_turn();  // takes the turn nobody is left to take: arrivals and waits of every barrier match
}

// PERF: a brief call waits for its instructions, which come from memory after other kernels. ptxas places first what stands last here: the
// loader, for which all wait, right behind the start. Small tiles of d 64 and 128 have less than 64 KB of code: with 78 in place of 68, the
// loader behind 64, d 64 took 1 to 2 us longer. One H200, L2 flushed, causal, 16 heads at 256, 512, 1k: d 64 11.4 15.0 20.9 -> 9.2 12.4 18.6 us,
// d 128 13.8 17.3 25.7 -> 11.0 14.7 23.7; 0.3 to 1.1 of the latter because the loader neither divides nor waits for a barrier before its first
// copies.
template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm) forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  const ForwardShared<Shape> shared{shared_address(memory)};
  let_next_kernel_begin();  // combine_kernel, where keys are split: nothing else is launched early behind this one
  constexpr int kStartThreads = Shape::kConsumers * 128 + 32;
  if (threadIdx.x < Shape::kConsumers * 128) {
    take_registers<Shape::kConsumerRegisters>();
    named_barrier_sync(kStartBarrier, kStartThreads);
    compute_tiles<Shape, T>(arguments, shared);
  } else {
    give_registers<Shape::kLoaderRegisters>();
    const HfFlash2ForwardParams& params = arguments.params;
    const int warp = warp_index() - Shape::kConsumers * 4;
    if (warp != 0) {
      if (!may_have_gaps(params)) return;
      if (warp == 1)
        clear_gaps<false>(shared.zeros(), [&](const auto& clear) { for_each_forward_gap(params, blockIdx.x, gridDim.x, clear); });
      if (warp == 2) fill_lse_gaps(params, blockIdx.x, gridDim.x);
    } else {
      // The loader needs nobody for its first copies: it makes the barriers itself.
      if (elect_one()) shared.make_barriers();
      __syncwarp();
      named_barrier_arrive(kStartBarrier, kStartThreads);
      if (elect_one()) load_tiles<Shape>(arguments, shared);
    }
  }
}

}  // namespace hf_flash2::sm90
