// FlashAttention-2 backward for Hopper: TMA loads, wgmma products, warpgroups with roles. Dao, arXiv 2307.08691, algorithm 2. Launched by
// backward_launch.cuh between preprocess_kernel (delta, zeroed dQ) and convert_dq_kernel (dQ to its dtype).
//
// One block owns 128 keys of one key head and keeps dK and dV in registers while the query blocks that see them stream by, over all query
// heads that share the key head: dK and dV are reduced over the group in place. Two warpgroups compute, 64 keys each; of the last, one
// thread keeps a ring of Q and a ring of dO stages filled and one warp adds dQ to global memory.
// Per query block, everything keys x queries, so that P and dS are A operands as they come out of the accumulators:
//   S^T = K Q^T,  P^T = exp2(S^T - lse),  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dV += P^T dO,  dK += dS^T Q
// Only dS goes through shared memory, once, for dQ = dS K, which contracts over the keys of both warpgroups: each computes 64 x 64 of it.
// PERF: this order of operations, on one H200, d 128, 16k tokens, 16 heads: the main kernel alone 494 / 564 / 607 / 628 / 574 TFLOP/s full at
// 512 / 1k / 2k / 4k / 16k. Carrying the S accumulator over the loop edge made ptxas serialise every wgmma.
#pragma once
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "attention/workspace.cuh"
#include "device/bulk_copy.cuh"
#include "device/mbarrier.cuh"
#include "device/semaphore.cuh"
#include "device/tma.cuh"
#include "device/warpgroup.cuh"
#include "sm90/clear_rows.cuh"
#include "sm90/scheduler.h"
#include "sm90/store.cuh"
#include "tiles.h"
#include "wgmma.cuh"

namespace hf_flash2::sm90 {

struct BackwardArguments {
  CUtensorMap q, k, v, dout;  // boxes of 64 columns x one tile of rows
  HfFlash2BackwardParams params;
  TileScheduler scheduler;
};

template <int kHeadDimension>
struct BackwardShape : BackwardTile<kHeadDimension> {
  using Tile = BackwardTile<kHeadDimension>;
  static constexpr int kHeadDim = kHeadDimension, kBlockM = Tile::kBlockM, kStages = Tile::kStages;
  static constexpr int kConsumers = 2, kBlockN = kConsumers * 64, kThreads = (kConsumers + 1) * 128;
  static constexpr int kPanels = (kHeadDim + 63) / 64;
  static constexpr int kDqColumns = kPanels * 64;  // of a tile of the dQ accumulator; those behind the head dim stay zero
  static_assert(kBlockM * kDqColumns == kConsumers * 64 * 64, "each consumer computes 64 x 64 of dQ: 64 of the rows or of the columns");
  static constexpr bool kDqByRows = kBlockM == 128;
  static constexpr int kDqPieceFloats = 64 * 64;
  static constexpr int kKeyPanelBytes = kBlockN * 128, kQueryPanelBytes = kBlockM * 128, kScorePanelBytes = kBlockN * 128;
  static constexpr int kKeyBytes = kKeyPanelBytes * kPanels, kQueryBytes = kQueryPanelBytes * kPanels;  // K or V, one stage of Q or dO
  static constexpr int kScoreBytes = kScorePanelBytes * (kBlockM / 64);                                 // dS, panels of 64 queries
  static constexpr int kDqPieceBytes = kDqPieceFloats * 4, kRowBytes = kBlockM * 4;                     // one stage of lse or delta
  static constexpr int kBarriers = 2 + 4 * kStages;
  static constexpr int kSharedBytes =
      2 * kKeyBytes + kStages * (2 * kQueryBytes + 2 * kRowBytes + kScoreBytes) + kConsumers * kDqPieceBytes + kBarriers * 8;
  static constexpr int kLoaderRegisters = 24, kConsumerRegisters = 240;
};

// Shared-memory addresses: tiles, rows, then barriers. "full": the copy has landed; "empty": every consumer is done with it.
template <typename Shape>
struct BackwardShared {
  static constexpr int kStages = Shape::kStages;
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base; }
  __device__ __forceinline__ uint32_t v() const { return k() + Shape::kKeyBytes; }
  __device__ __forceinline__ uint32_t q(int stage) const { return v() + Shape::kKeyBytes + stage * Shape::kQueryBytes; }
  __device__ __forceinline__ uint32_t dout(int stage) const { return q(kStages + stage); }
  __device__ __forceinline__ uint32_t ds(int stage) const { return q(2 * kStages) + stage * Shape::kScoreBytes; }
  __device__ __forceinline__ uint32_t dq(int consumer) const { return ds(kStages) + consumer * Shape::kDqPieceBytes; }
  __device__ __forceinline__ uint32_t lse_log2(int stage) const { return dq(Shape::kConsumers) + stage * Shape::kRowBytes; }
  __device__ __forceinline__ uint32_t delta(int stage) const { return lse_log2(kStages + stage); }
  __device__ __forceinline__ uint32_t barrier(int i) const { return lse_log2(2 * kStages) + i * 8; }
  __device__ __forceinline__ uint32_t k_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t v_full() const { return barrier(1); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(2 + stage); }
  __device__ __forceinline__ uint32_t q_empty(int stage) const { return barrier(2 + kStages + stage); }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return barrier(2 + 2 * kStages + stage); }
  __device__ __forceinline__ uint32_t dout_empty(int stage) const { return barrier(2 + 3 * kStages + stage); }
};

// Named barriers. A piece of dQ is "full" when its consumer has written it, "empty" when it has left for global memory.
constexpr int kConsumersMeet = 1;
__device__ __forceinline__ int dq_full(int consumer) { return 2 + consumer; }
__device__ __forceinline__ int dq_empty(int consumer) { return 4 + consumer; }
constexpr int kDqThreads = 128 + 32;  // a consumer and the warp that adds

// What a thread block works on: the same for all roles.
struct BackwardTask {
  int batch, head_k, key_block, group;  // group: query heads that share the key head
  Sequence q, k;
  Mask mask;
  int query_block_begin, query_block_end;
  int first_tile, head_tiles;  // tile number (Workspace) of the first query block of the first query head; tiles of a head

  template <typename Shape>
  static __device__ __forceinline__ BackwardTask make(const HfFlash2BackwardParams& params, int key_block, int batch_head) {
    const HfFlash2ForwardParams& forward = params.forward;
    const int batch = batch_head / forward.heads_k, head_k = batch_head % forward.heads_k, group = forward.heads_q / forward.heads_k;
    const int key_begin = key_block * Shape::kBlockN;
    const Sequence q = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q);
    const Sequence k = find_sequence(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k);
    const Mask mask(forward, batch, q, k);
    const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
    return {batch,
            head_k,
            key_block,
            group,
            q,
            k,
            mask,
            mask.query_block_begin(key_begin, Shape::kBlockM),
            mask.query_block_end(key_begin + Shape::kBlockN, Shape::kBlockM),
            static_cast<int>(workspace.first_block(forward, batch, head_k * group, Shape::kBlockM)),
            static_cast<int>(workspace.blocks)};
  }

  // Calls f(step, head, query_block, tile) for every query block of every query head; tile is its number in the Workspace.
  template <typename F>
  __device__ __forceinline__ void for_each_step(const F& f) const {
    int step = 0;
    for (int head = 0; head < group; ++head) {
#pragma unroll 1
      for (int query_block = query_block_begin; query_block < query_block_end; ++query_block)
        f(step++, head_k * group + head, query_block, first_tile + head * head_tiles + query_block);
    }
  }
};

template <typename Shape>
__device__ __forceinline__ void load_tiles(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                           const BackwardTask& task) {
  constexpr int kStages = Shape::kStages, kBlockM = Shape::kBlockM;
  const Workspace workspace(arguments.params, kBlockM, Shape::kDqColumns);
  const int map_batch = arguments.params.forward.sequences_q.cu_seqlens != nullptr ? 0 : task.batch;
  const auto load_panels = [&](uint32_t tile, uint32_t panel_bytes, const CUtensorMap* map, uint32_t full, int token, int head) {
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel)
      tma_load(tile + panel * panel_bytes, map, full, panel * 64, token, head, map_batch);
  };

  if (task.query_block_begin < task.query_block_end) {
    const int token = task.k.start + task.key_block * Shape::kBlockN;
    mbarrier_arrive_expect(shared.k_full(), Shape::kKeyBytes);
    load_panels(shared.k(), Shape::kKeyPanelBytes, &arguments.k, shared.k_full(), token, task.head_k);
    mbarrier_arrive_expect(shared.v_full(), Shape::kKeyBytes);
    load_panels(shared.v(), Shape::kKeyPanelBytes, &arguments.v, shared.v_full(), token, task.head_k);
  }
  task.for_each_step([&](int step, int head, int query_block, int tile) {
    const int stage = step % kStages, released = (step / kStages & 1) ^ 1, token = task.q.start + query_block * kBlockM;
    const float* rows = workspace.delta + static_cast<int64_t>(tile) * (kBlockM * 2);
    mbarrier_wait(shared.q_empty(stage), released);
    mbarrier_arrive_expect(shared.q_full(stage), Shape::kQueryBytes + Shape::kRowBytes);
    load_panels(shared.q(stage), Shape::kQueryPanelBytes, &arguments.q, shared.q_full(stage), token, head);
    bulk_load(shared.lse_log2(stage), rows + kBlockM, Shape::kRowBytes, shared.q_full(stage));
    mbarrier_wait(shared.dout_empty(stage), released);
    mbarrier_arrive_expect(shared.dout_full(stage), Shape::kQueryBytes + Shape::kRowBytes);
    load_panels(shared.dout(stage), Shape::kQueryPanelBytes, &arguments.dout, shared.dout_full(stage), token, head);
    bulk_load(shared.delta(stage), rows, Shape::kRowBytes, shared.dout_full(stage));
  });
}

// Adds dQ to global memory, by one warp: the consumers go on as soon as a piece has been read. In deterministic mode key blocks add in
// ascending order; blocks with lower numbers were launched earlier, so that waiting for a turn always ends.
template <typename Shape>
__device__ __forceinline__ void add_query_gradients(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                                    const BackwardTask& task) {
  const HfFlash2BackwardParams& params = arguments.params;
  const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
  const bool elected = threadIdx.x % 32 == 0;
  task.for_each_step([&](int, int, int query_block, int tile) {
    // The pieces of the step before have been read; in the first step nothing has been issued yet.
    if (elected) bulk_wait_read<1>();
    __syncwarp();
    named_barrier_arrive(dq_empty(0), kDqThreads);
    if (elected) bulk_wait_read<0>();
    __syncwarp();
    named_barrier_arrive(dq_empty(1), kDqThreads);

    float* dq = workspace.dq + static_cast<int64_t>(tile) * (Shape::kBlockM * Shape::kDqColumns);
    if (elected && params.deterministic) {
      semaphore_wait(workspace.semaphores + tile, task.key_block - task.mask.key_block_begin(query_block * Shape::kBlockM, Shape::kBlockN));
      bulk_global_fence();
    }
    for (int consumer = 0; consumer < Shape::kConsumers; ++consumer) {
      __syncwarp();
      named_barrier_sync(dq_full(consumer), kDqThreads);
      if (elected) {
        bulk_reduce_add(dq + consumer * Shape::kDqPieceFloats, shared.dq(consumer), Shape::kDqPieceBytes);
        bulk_commit();
      }
    }
    if (elected && params.deterministic) {
      bulk_wait_all();
      bulk_global_fence();
      semaphore_pass(workspace.semaphores + tile);
    }
  });
  if (elected) bulk_wait_all();
}

// Accumulators as A operands.
template <typename T, int kTiles>
__device__ __forceinline__ void round_tiles(uint32_t (&rounded)[kTiles * 2], const float (&x)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rounded[n * 2 + half] = pack<T>(x[n][half * 2], x[n][half * 2 + 1]);
  }
}

template <typename Shape, typename T>
__device__ __forceinline__ void compute_gradients(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                                  const BackwardTask& task) {
  constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kStages = Shape::kStages;
  constexpr int kPanels = Shape::kPanels, kThreads = Shape::kConsumers * 128;
  const HfFlash2BackwardParams& params = arguments.params;
  const int consumer = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const bool elected = thread == 0;
  const int key_begin = task.key_block * kBlockN;
  const int block_key = consumer * 64 + thread / 32 * 16 + lane / 4, key = key_begin + block_key;  // this lane's keys: key and key + 8
  const int query = lane % 4 * 2;  // this lane's queries: query and query + 1 of every 8
  const float scale_log2 = params.forward.softmax_scale * kLog2e;

  float dk[kHeadDim / 8][4], dv[kHeadDim / 8][4];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] = (&dv[0][0])[i] = 0.f;
  float p[kBlockM / 8][4], ds[kBlockM / 8][4];               // S and then P, dP and then dS; transposed
  uint32_t p_rounded[kBlockM / 4], ds_rounded[kBlockM / 4];  // as A operands
  float dq[8][4];

  const auto meet = [] { named_barrier_sync(kConsumersMeet, kThreads); };
  // S^T or dP^T [64 keys, kBlockM queries] = keys queries^T.
  const auto issue_scores = [&](float* scores, uint32_t keys, uint32_t queries) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kHeadDim / 16; ++k)
      WgmmaShared<T, kBlockM>::multiply(scores, panel_descriptor(keys + consumer * 8192 + k / 4 * Shape::kKeyPanelBytes + k % 4 * 32),
                                        panel_descriptor(queries + k / 4 * Shape::kQueryPanelBytes + k % 4 * 32), k > 0);
    wgmma_commit();
  };
  // dV or dK [64 keys, kHeadDim] += P^T or dS^T times queries.
  const auto issue_key_gradient = [&](float* gradient, const uint32_t* scores, uint32_t queries) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k)
      WgmmaRegisters<T, kHeadDim>::multiply(gradient, scores + k * 4, panel_descriptor(queries + k * 2048, Shape::kQueryPanelBytes), 1);
    wgmma_commit();
  };
  // This consumer's 64 x 64 of dQ = dS K.
  const auto issue_query_gradient = [&](int stage) {
    const uint32_t rows = shared.ds(stage) + (Shape::kDqByRows ? consumer * Shape::kScorePanelBytes : 0);
    const uint32_t columns = shared.k() + (Shape::kDqByRows ? 0 : consumer * Shape::kKeyPanelBytes);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k)
      WgmmaSharedByRows<T, 64>::multiply(&dq[0][0], panel_descriptor(rows + k * 2048), panel_descriptor(columns + k * 2048), k > 0);
    wgmma_commit();
  };

  const auto advance = [&](int step, int row_begin, const int (&last_query)[2], auto masked) {  // masked: an integral_constant<bool>
    const int stage = step % kStages, parity = step / kStages & 1;
    mbarrier_wait(shared.q_full(stage), parity);
    issue_scores(&p[0][0], shared.k(), shared.q(stage));
    mbarrier_wait(shared.dout_full(stage), parity);
    issue_scores(&ds[0][0], shared.v(), shared.dout(stage));

    wgmma_wait<1>();
    wgmma_use<kBlockM / 2>(&p[0][0]);
    if constexpr (decltype(masked)::value) {
      const int row = row_begin + query;
      const int first[2] = {task.mask.first_query(key) - row, task.mask.first_query(key + 8) - row};
      const int last[2] = {last_query[0] - row, last_query[1] - row};
      Mask::apply_transposed(p, first, last);
    }
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 lse_log2 = load_shared_float2(shared.lse_log2(stage) + (n * 8 + query) * 4);
#pragma unroll
      for (int c = 0; c < 4; ++c) p[n][c] = exp2_approx(fmaf(p[n][c], scale_log2, c % 2 == 0 ? -lse_log2.x : -lse_log2.y));
    }

    round_tiles<T>(p_rounded, p);
    issue_key_gradient(&dv[0][0], p_rounded, shared.dout(stage));

    wgmma_wait<1>();
    wgmma_use<kBlockM / 2>(&ds[0][0]);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const float2 delta = load_shared_float2(shared.delta(stage) + (n * 8 + query) * 4);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 pair = Shape::kRoundedP ? unpack<T>(p_rounded[n * 2 + half]) : make_float2(p[n][half * 2], p[n][half * 2 + 1]);
        ds[n][half * 2] = pair.x * (ds[n][half * 2] - delta.x);
        ds[n][half * 2 + 1] = pair.y * (ds[n][half * 2 + 1] - delta.y);
      }
    }
    round_tiles<T>(ds_rounded, ds);

    // Two buffers of dS: when both consumers met in the step before, both had multiplied with this one for the last time.
    // Row block_key (and 8 on), chunk n of 8 queries: chunk and row permuted as panel_descriptor() wants it.
    const uint32_t ds_row = shared.ds(stage) + block_key * 128 + lane / 4 * 16 + lane % 4 * 4;
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {
      const uint32_t address = (ds_row ^ (n % 8 * 16)) + n / 8 * Shape::kScorePanelBytes;
      store_shared(address, ds_rounded[2 * n]);
      store_shared(address + 1024, ds_rounded[2 * n + 1]);
    }
    async_proxy_fence();
    meet();  // dS is complete
    issue_query_gradient(stage);
    issue_key_gradient(&dk[0][0], ds_rounded, shared.q(stage));

    wgmma_wait<2>();
    if (elected) mbarrier_arrive(shared.dout_empty(stage));
    wgmma_wait<1>();
    wgmma_use<32>(&dq[0][0]);
    named_barrier_sync(dq_empty(consumer), kDqThreads);
#pragma unroll
    for (int n = 0; n < 8; ++n) store_shared(shared.dq(consumer) + (n * 128 + thread) * 16, dq[n]);
    async_proxy_fence();
    named_barrier_arrive(dq_full(consumer), kDqThreads);
    wgmma_wait<0>();
    if (elected) mbarrier_arrive(shared.q_empty(stage));
  };

  if (task.query_block_begin < task.query_block_end) {
    mbarrier_wait(shared.k_full(), 0);
    mbarrier_wait(shared.v_full(), 0);
    if (key_begin + kBlockN > task.k.length) {
      clear_rows<kBlockN, kPanels, kThreads>(shared.k(), task.k.length - key_begin);
      clear_rows<kBlockN, kPanels, kThreads>(shared.v(), task.k.length - key_begin);
      async_proxy_fence();
      meet();
    }
    const int last_query[2] = {task.mask.last_query(key), task.mask.last_query(key + 8)};
    task.for_each_step([&](int step, int, int query_block, int) {
      const int row_begin = query_block * kBlockM;
      if (row_begin + kBlockM > task.q.length) {
        const int stage = step % kStages, parity = step / kStages & 1;
        mbarrier_wait(shared.q_full(stage), parity);
        mbarrier_wait(shared.dout_full(stage), parity);
        clear_rows<kBlockM, kPanels, kThreads>(shared.q(stage), task.q.length - row_begin);
        clear_rows<kBlockM, kPanels, kThreads>(shared.dout(stage), task.q.length - row_begin);
        async_proxy_fence();
        meet();
      }
      if (task.mask.visible != nullptr || task.mask.needed(row_begin, row_begin + kBlockM, key_begin, key_begin + kBlockN))
        advance(step, row_begin, last_query, std::true_type{});
      else
        advance(step, row_begin, last_query, std::false_type{});
    });
    wgmma_use<kHeadDim / 2>(&dk[0][0]);
    wgmma_use<kHeadDim / 2>(&dv[0][0]);
  }

#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] *= params.forward.softmax_scale;
  T* gdK = token_pointer<T>(params.dk, task.batch, task.head_k, task.k.start);
  T* gdV = token_pointer<T>(params.dv, task.batch, task.head_k, task.k.start);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = key + half * 8;
    store_row(dk, half, gdK + row * params.dk.token_stride, row < task.k.length, params.forward.head_dim);
    store_row(dv, half, gdV + row * params.dv.token_stride, row < task.k.length, params.forward.head_dim);
  }
}

template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  constexpr int kConsumerThreads = Shape::kConsumers * 128;
  int key_block, batch_head;
  arguments.scheduler.tile(blockIdx.x, 0, key_block, batch_head);
  const BackwardTask task = BackwardTask::make<Shape>(arguments.params, key_block, batch_head);
  if (key_block * Shape::kBlockN >= task.k.length) return;

  extern __shared__ __align__(1024) char memory[];
  const BackwardShared<Shape> shared{shared_address(memory)};
  if (threadIdx.x == 0) {
    mbarrier_init(shared.k_full(), 1);
    mbarrier_init(shared.v_full(), 1);
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      mbarrier_init(shared.q_full(stage), 1);
      mbarrier_init(shared.dout_full(stage), 1);
      mbarrier_init(shared.q_empty(stage), Shape::kConsumers);
      mbarrier_init(shared.dout_empty(stage), Shape::kConsumers);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kConsumerThreads) {
    give_registers<Shape::kLoaderRegisters>();
    if (threadIdx.x == kConsumerThreads)
      load_tiles<Shape>(arguments, shared, task);
    else if (threadIdx.x / 32 == kConsumerThreads / 32 + 1)
      add_query_gradients<Shape>(arguments, shared, task);
  } else {
    take_registers<Shape::kConsumerRegisters>();
    compute_gradients<Shape, T>(arguments, shared, task);
  }
}

// Last pass: dQ = softmax_scale * accumulator, rounded to T, from the accumulation order of backward_kernel to rows. 128 threads a piece,
// each with the elements that it held as a consumer.
template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kConsumers * 128) convert_dq_kernel(const __grid_constant__ HfFlash2BackwardParams params) {
  constexpr int kBlockM = Shape::kBlockM;
  const HfFlash2ForwardParams& forward = params.forward;
  const int query_blocks = (forward.max_seqlen_q + kBlockM - 1) / kBlockM;
  const int row_begin = blockIdx.x % query_blocks * kBlockM;
  const int head = blockIdx.x / query_blocks % forward.heads_q;
  const int batch = blockIdx.x / query_blocks / forward.heads_q;
  const Sequence seq = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q);
  if (row_begin >= seq.length) return;

  const int piece = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const Workspace workspace(params, kBlockM, Shape::kDqColumns);
  const int64_t tile = workspace.first_block(forward, batch, head, kBlockM) + row_begin / kBlockM;
  const float* accumulated = workspace.dq + tile * kBlockM * Shape::kDqColumns + piece * Shape::kDqPieceFloats;
  float dq[8][4];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float4 x = *reinterpret_cast<const float4*>(accumulated + (n * 128 + thread) * 4);
    dq[n][0] = x.x * forward.softmax_scale, dq[n][1] = x.y * forward.softmax_scale;
    dq[n][2] = x.z * forward.softmax_scale, dq[n][3] = x.w * forward.softmax_scale;
  }
  const int column = Shape::kDqByRows ? 0 : piece * 64;
  T* gdQ = token_pointer<T>(params.dq, batch, head, seq.start) + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_begin + (Shape::kDqByRows ? piece * 64 : 0) + thread / 32 * 16 + lane / 4 + half * 8;
    store_row(dq, half, gdQ + row * params.dq.token_stride, row < seq.length, forward.head_dim - column);
  }
}

}  // namespace hf_flash2::sm90
