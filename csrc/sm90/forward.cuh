// FlashAttention-2 forward for Hopper: TMA loads, wgmma products, warpgroups with roles. Dao, arXiv 2307.08691, algorithm 1; the overlap of
// softmax with products follows Shah et al., FlashAttention-3, arXiv 2407.08608, section 3. Launched by forward_launch.cuh.
//
// The last warpgroup loads: one thread keeps a ring of K and a ring of V stages filled. The others compute, 64 query rows each. Inside one,
// S of the next key block is issued together with O += P V of the last, and softmax runs while that product does; across them, a ring of
// named barriers makes them take turns at issuing, so that one computes softmax while another has the tensor cores.
// A thread block works on several query blocks when the grid is smaller than their number: loads of the next one start early.
// Where queries are few, the rows of a query block are those of all heads of a group (tile_heads_log2): K and V are read once for them.
// Where query blocks are few, several thread blocks share the keys of one (splits), and a second kernel puts their results together.
#pragma once
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "device/warpgroup.cuh"
#include "sm90/clear_rows.cuh"
#include "sm90/combine.cuh"
#include "sm90/scheduler.h"
#include "sm90/store.cuh"
#include "tiles.h"
#include "wgmma.cuh"

namespace hf_flash2::sm90 {

struct ForwardArguments {
  CUtensorMap q, k, v;  // boxes of 64 columns x one tile of rows
  HfFlash2ForwardParams params;
  Divisor heads, group;  // tiles of one token over all heads; query heads that share a key head
  int tile_heads_log2;   // row r of a tile is query r >> this of head r % 2^this: those of one head (0), or of all in a group
  Divisor splits;        // how many units share the key blocks of a tile; 1: results are final
  TileScheduler scheduler;
};

enum class Masking { kNone, kLimits, kHoles };  // of one block: none, sequence end and window, these and the key mask

template <int kHeadDimension, TileLength kLength, int kHeadDimensionV = kHeadDimension>
struct ForwardShape : ForwardTile<kHeadDimension, kLength, kHeadDimensionV> {
  using Tile = ForwardTile<kHeadDimension, kLength, kHeadDimensionV>;
  static constexpr int kHeadDim = kHeadDimension, kHeadDimV = kHeadDimensionV;
  static constexpr int kBlockM = Tile::kConsumers * 64;
  static constexpr int kThreads = (Tile::kConsumers + 1) * 128;
  static constexpr int kPanels = (kHeadDim + 63) / 64, kValuePanels = (kHeadDimV + 63) / 64;
  static constexpr int kQueryPanelBytes = kBlockM * 128, kKeyPanelBytes = Tile::kBlockN * 128;
  static constexpr int kQueryBytes = kQueryPanelBytes * kPanels;
  static constexpr int kKeyBytes = kKeyPanelBytes * kPanels, kValueBytes = kKeyPanelBytes * kValuePanels;  // one stage of K, of V
  static constexpr int kBarriers = 2 + 4 * Tile::kStages;
  static constexpr int kSharedBytes = kQueryBytes + Tile::kStages * (kKeyBytes + kValueBytes) + kBarriers * 8;
  static constexpr int kLoaderRegisters = Tile::kConsumers == 2 ? 24 : 32, kConsumerRegisters = Tile::kConsumers == 2 ? 240 : 160;
};

// Shared-memory addresses: tiles, then barriers. "full": the copy has landed; "empty": every consumer is done with it.
template <typename Shape>
struct ForwardShared {
  uint32_t base;

  __device__ __forceinline__ uint32_t q() const { return base; }
  __device__ __forceinline__ uint32_t k(int stage) const { return base + Shape::kQueryBytes + stage * Shape::kKeyBytes; }
  __device__ __forceinline__ uint32_t v(int stage) const { return k(Shape::kStages) + stage * Shape::kValueBytes; }
  __device__ __forceinline__ uint32_t barrier(int i) const { return v(Shape::kStages) + i * 8; }
  __device__ __forceinline__ uint32_t q_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t q_empty() const { return barrier(1); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return barrier(2 + Shape::kStages + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return barrier(2 + 2 * Shape::kStages + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return barrier(2 + 3 * Shape::kStages + stage); }
};

// What a query block and a share of its keys is: the same for loader and consumers.
struct ForwardTask {
  int batch, head;             // the first of the tile's heads
  int query_begin, query_end;  // of the tile: the end may lie behind the sequence
  Sequence q, k;
  Mask mask;
  int key_block_begin, key_block_end;

  template <int kBlockM, int kBlockN>
  static __device__ __forceinline__ ForwardTask make(const ForwardArguments& arguments, int query_block, int batch_head, int split) {
    const HfFlash2ForwardParams& params = arguments.params;
    const int batch = arguments.heads.quotient(batch_head);
    const int queries = kBlockM >> arguments.tile_heads_log2, query_begin = query_block * queries, query_end = query_begin + queries;
    const Sequence q = find_sequence(params.sequences_q, params.batch, batch, params.max_seqlen_q);
    const Sequence k = find_sequence(params.sequences_k, params.batch, batch, params.max_seqlen_k);
    const Mask mask(params, batch, q, k);
    const int begin = mask.key_block_begin(query_begin, kBlockN);
    const int blocks = query_begin < q.length ? max(0, mask.key_block_end(query_end, kBlockN) - begin) : 0;
    return {batch,
            arguments.heads.remainder(batch_head) << arguments.tile_heads_log2,
            query_begin,
            query_end,
            q,
            k,
            mask,
            begin + arguments.splits.quotient(blocks * split),
            begin + arguments.splits.quotient(blocks * (split + 1))};
  }
  __device__ __forceinline__ int key_blocks() const { return key_block_end - key_block_begin; }
};

// Calls f(query_block, batch_head, split) for every tile of this thread block.
template <typename F>
__device__ __forceinline__ void for_each_tile(const ForwardArguments& arguments, const F& f) {
  const TileScheduler& scheduler = arguments.scheduler;
  const int units = scheduler.units() * arguments.splits.divisor;
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    for (int part = 0; part < scheduler.tiles_per_unit(); ++part) {
      int query_block, batch_head;
      if (scheduler.tile(arguments.splits.quotient(unit), part, query_block, batch_head))
        f(query_block, batch_head, arguments.splits.remainder(unit));
    }
  }
}

template <typename Shape>
__device__ __forceinline__ void load_tiles(const ForwardArguments& arguments, const ForwardShared<Shape>& shared) {
  constexpr int kStages = Shape::kStages;
  const HfFlash2ForwardParams& params = arguments.params;
  const bool packed = params.sequences_q.cu_seqlens != nullptr;
  int use = 0, query_use = 0;  // key blocks and query blocks loaded so far

  for_each_tile(arguments, [&](int query_block, int batch_head, int split) {
    const ForwardTask task = ForwardTask::make<Shape::kBlockM, Shape::kBlockN>(arguments, query_block, batch_head, split);
    const int head_k = arguments.group.quotient(task.head), map_batch = packed ? 0 : task.batch;
    for (int block = task.key_block_end - 1; block >= task.key_block_begin; --block, ++use) {
      const int stage = use % kStages, released = (use / kStages & 1) ^ 1;
      const int token = task.k.start + block * Shape::kBlockN;
      mbarrier_wait(shared.k_empty(stage), released);
      mbarrier_arrive_expect(shared.k_full(stage), Shape::kKeyBytes);
      for (int panel = 0; panel < Shape::kPanels; ++panel)
        tma_load(shared.k(stage) + panel * Shape::kKeyPanelBytes, &arguments.k, shared.k_full(stage), panel * 64, token, head_k, map_batch);
      if (block == task.key_block_end - 1) {
        mbarrier_wait(shared.q_empty(), (query_use & 1) ^ 1);
        mbarrier_arrive_expect(shared.q_full(), Shape::kQueryBytes);
        for (int panel = 0; panel < Shape::kPanels; ++panel)
          tma_load(shared.q() + panel * Shape::kQueryPanelBytes, &arguments.q, shared.q_full(), panel * 64, task.head,
                   task.q.start + task.query_begin, map_batch);
        ++query_use;
      }
      mbarrier_wait(shared.v_empty(stage), released);
      mbarrier_arrive_expect(shared.v_full(stage), Shape::kValueBytes);
      for (int panel = 0; panel < Shape::kValuePanels; ++panel)
        tma_load(shared.v(stage) + panel * Shape::kKeyPanelBytes, &arguments.v, shared.v_full(stage), panel * 64, token, head_k, map_batch);
    }
  });
}

template <typename Shape, typename T>
__device__ __forceinline__ void compute_tiles(const ForwardArguments& arguments, const ForwardShared<Shape>& shared) {
  constexpr int kHeadDim = Shape::kHeadDim, kHeadDimV = Shape::kHeadDimV;
  constexpr int kBlockN = Shape::kBlockN, kStages = Shape::kStages, kConsumers = Shape::kConsumers;
  const HfFlash2ForwardParams& params = arguments.params;
  const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int group_row = group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;  // first row of this lane in the block
  const bool elected = threadIdx.x % 128 == 0;
  const bool ragged = params.sequences_k.cu_seqlens != nullptr || params.sequences_k.ranges != nullptr;
  const float scale_log2 = params.softmax_scale * kLog2e;

  float scores[1][kBlockN / 8][4], out[1][kHeadDimV / 8][4], rescale[1][2];
  uint32_t probabilities[kBlockN / 4];  // rounded, as A operands

  const auto issue_scores = [&](int stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k)
      WgmmaShared<T, kBlockN>::multiply(&scores[0][0][0],
                                        panel_descriptor(shared.q() + group * 8192 + k / 4 * Shape::kQueryPanelBytes + k % 4 * 32),
                                        panel_descriptor(shared.k(stage) + k / 4 * Shape::kKeyPanelBytes + k % 4 * 32), k > 0);
    wgmma_commit();
  };
  const auto issue_output = [&](int stage) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k)
      WgmmaRegisters<T, kHeadDimV>::multiply(&out[0][0][0], probabilities + k * 4,
                                             panel_descriptor(shared.v(stage) + k * 2048, Shape::kKeyPanelBytes), 1);
    wgmma_commit();
  };
  const auto round_probabilities = [&] {
#pragma unroll
    for (int i = 0; i < kBlockN / 4; ++i) probabilities[i] = pack<T>((&scores[0][0][0])[2 * i], (&scores[0][0][0])[2 * i + 1]);
  };
  // Turns: barrier 2 + i is warpgroup i's. Whoever has issued its products gives the turn to the next.
  const auto wait_turn = [&] { named_barrier_sync(2 + group, 256); };
  const auto pass_turn = [&] { named_barrier_arrive(2 + (group + 1) % kConsumers, 256); };
  if (group == kConsumers - 1) pass_turn();  // the first turn is warpgroup 0's

  int use = 0, query_use = 0;  // key blocks and query blocks computed so far
  for_each_tile(arguments, [&](int query_block, int batch_head, int split) {
    const ForwardTask task = ForwardTask::make<Shape::kBlockM, kBlockN>(arguments, query_block, batch_head, split);
    if (task.query_begin >= task.q.length) return;
    const int row = query_block * Shape::kBlockM + group_row;
    OnlineSoftmax<1> softmax;
#pragma unroll
    for (int i = 0; i < kHeadDimV / 2; ++i) (&out[0][0][0])[i] = 0.f;

    if (task.key_blocks() > 0) {
      int block = task.key_block_end - 1;
      if (ragged && (block + 1) * kBlockN > task.k.length) {
        mbarrier_wait(shared.v_full(use % kStages), use / kStages & 1);
        clear_rows<kBlockN, Shape::kValuePanels, kConsumers * 128>(shared.v(use % kStages), task.k.length - block * kBlockN);
        async_proxy_fence();
        named_barrier_sync(1, kConsumers * 128);
      }
      mbarrier_wait(shared.q_full(), query_use & 1);
      mbarrier_wait(shared.k_full(use % kStages), use / kStages & 1);
      wait_turn();
      issue_scores(use % kStages);
      pass_turn();
      wgmma_wait<0>();
      wgmma_use<kBlockN / 2>(&scores[0][0][0]);
      if (elected) {
        mbarrier_arrive(shared.k_empty(use % kStages));
        if (block == task.key_block_begin) mbarrier_arrive(shared.q_empty());
      }
      const int key = lane % 4 * 2;  // first column of this lane in a block
      if (task.mask.needed(task.query_begin, task.query_end, block * kBlockN, (block + 1) * kBlockN))
        task.mask.apply(scores, row, block * kBlockN + key, arguments.tile_heads_log2);
      if (task.mask.visible != nullptr) task.mask.apply_holes(scores, block * kBlockN + key);
      softmax.update(scores, rescale, scale_log2);
      round_probabilities();

      // S = Q K^T of `block` beside O += P V of the block before; softmax of S under the latter.
      const auto advance = [&](auto masking) {
        constexpr Masking kMasking = decltype(masking)::value;
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
        if (elected) {
          mbarrier_arrive(shared.k_empty(stage_k));
          if (block == task.key_block_begin) mbarrier_arrive(shared.q_empty());
        }
        if constexpr (kMasking != Masking::kNone) task.mask.apply(scores, row, block * kBlockN + key, arguments.tile_heads_log2);
        if constexpr (kMasking == Masking::kHoles) task.mask.apply_holes(scores, block * kBlockN + key);
        const bool moved = softmax.template update<Shape::kLazyRescale>(scores, rescale, scale_log2);
        wgmma_wait<0>();
        wgmma_use<kHeadDimV / 2>(&out[0][0][0]);
        if (elected) mbarrier_arrive(shared.v_empty(stage_v));
        if (moved) scale_rows(out, rescale);
        round_probabilities();
      };
      const int unmasked_begin = task.mask.unmasked_block_begin(task.query_end, kBlockN);
      const int unmasked_end = task.mask.unmasked_block_end(task.query_begin, kBlockN);
      for (--block; block >= task.key_block_begin; --block) {
        if (task.mask.visible != nullptr)
          advance(std::integral_constant<Masking, Masking::kHoles>{});
        else if (block >= unmasked_end || block < unmasked_begin)
          advance(std::integral_constant<Masking, Masking::kLimits>{});
        else
          advance(std::integral_constant<Masking, Masking::kNone>{});
      }

      const int stage_v = use % kStages;
      mbarrier_wait(shared.v_full(stage_v), use / kStages & 1);
      issue_output(stage_v);
      softmax.finish(rescale, scale_log2, 1.f);
      wgmma_wait<0>();
      wgmma_use<kHeadDimV / 2>(&out[0][0][0]);
      if (elected) mbarrier_arrive(shared.v_empty(stage_v));
      ++use, ++query_use;
    } else {
      softmax.finish(rescale, scale_log2, 1.f);
    }
    scale_rows(out, rescale);

#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int query = (row + half * 8) >> arguments.tile_heads_log2, token = task.q.start + query;
      const int head = task.head + ((row + half * 8) & ((1 << arguments.tile_heads_log2) - 1));
      const bool valid = query < task.q.length;
      if (arguments.splits.divisor > 1) {
        const Shares shares(params, arguments.splits.divisor);
        const int64_t share = Shares::row(params, task.batch, head, token) * arguments.splits.divisor + split;
        if (lane % 4 == 0 && valid) shares.lse[share] = softmax.row_max[0][half];
        store_row(out[0], half, shares.out + share * params.head_dim_v, valid, params.head_dim_v);
        continue;
      }
      if (lane % 4 == 0 && valid)
        params.softmax_lse[task.batch * params.lse_batch_stride + head * params.lse_head_stride + token] = softmax.row_max[0][half];
      store_row(out[0], half, token_pointer<T>(params.out, task.batch, head, token), valid, params.head_dim_v);
    }
  });
  if (group == 0) wait_turn();  // takes the turn nobody is left to take: arrivals and waits of every barrier match
}

template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads, 1) forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  const ForwardShared<Shape> shared{shared_address(memory)};
  let_next_kernel_begin();  // combine_kernel, where keys are split: nothing else is launched early behind this one
  if (threadIdx.x == 0) {
    mbarrier_init(shared.q_full(), 1);
    mbarrier_init(shared.q_empty(), Shape::kConsumers);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      mbarrier_init(shared.k_full(stage), 1);
      mbarrier_init(shared.v_full(stage), 1);
      mbarrier_init(shared.k_empty(stage), Shape::kConsumers);
      mbarrier_init(shared.v_empty(stage), Shape::kConsumers);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= Shape::kConsumers * 128) {
    give_registers<Shape::kLoaderRegisters>();
    if (threadIdx.x == Shape::kConsumers * 128) load_tiles<Shape>(arguments, shared);
  } else {
    take_registers<Shape::kConsumerRegisters>();
    compute_tiles<Shape, T>(arguments, shared);
  }
}

}  // namespace hf_flash2::sm90
