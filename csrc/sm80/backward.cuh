// FlashAttention-2 backward on mma.sync, for every GPU from Ampere on. Dao, arXiv 2307.08691, algorithm 2. Launched by
// backward_launch.cuh between preprocess_kernel (delta, zeroed dQ) and convert_dq_kernel (dQ to its dtype).
//
// One block owns kBlockN keys of one key head and keeps dK and dV in registers while the query blocks that see them stream by, over all
// query heads that share the key head: dK and dV are reduced over the group in place, k and v are never repeated. Per query block:
//   S = Q K^T,  P = exp2(S - lse),  dP = dO V^T,  dS = P (dP - delta)        P and dS go through shared memory, rounded
//   dV += P^T dO,  dQ = dS K (added to fp32 in global memory),  dK += dS^T Q
// delta, lse and dQ live in the Workspace.
#pragma once
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/softcap.cuh"
#include "attention/softmax.cuh"
#include "attention/workspace.cuh"
#include "device/reduce_add.cuh"
#include "device/semaphore.cuh"
#include "sm80/gemm.cuh"
#include "sm80/paired_products.cuh"
#include "tiles.h"

namespace hf_flash2::sm80 {

template <int kHeadDim, TileVariant kVariant>
struct BackwardShape : BackwardTile<kHeadDim, kVariant> {
  using Tile = BackwardTile<kHeadDim, kVariant>;
  static constexpr int kWarps = Tile::kWarpsM * Tile::kWarpsN, kThreads = kWarps * 32;
  static_assert(Tile::kWarpsKeys * Tile::kWarpsDim == kWarps, "all products use all warps");
  static constexpr int kKeyBytes = Tile::kBlockN * kHeadDim * 2;         // K or V
  static constexpr int kQueryBytes = Tile::kBlockM * kHeadDim * 2;       // one stage of Q or dO
  static constexpr int kScoreBytes = Tile::kBlockM * Tile::kBlockN * 2;  // P or dS
  // Accumulator tiles of 16 x 8 a warp holds.
  static constexpr int kMTiles = Tile::kBlockM / Tile::kWarpsM / 16, kNTiles = Tile::kBlockN / Tile::kWarpsN / 8;      // S, dP
  static constexpr int kKeyTiles = Tile::kBlockN / Tile::kWarpsKeys / 16, kDimTiles = kHeadDim / Tile::kWarpsDim / 8;  // dK, dV
  static constexpr int kDqDimTiles = kHeadDim / Tile::kWarpsN / 8;                                                     // dQ, kMTiles rows
  static constexpr int kDqFloatsPerWarp = kMTiles * kDqDimTiles * 128;
  static constexpr bool kPairs = kNTiles == 1;  // of warps, each with S and dP of one tile: paired_products.cuh
  static constexpr bool kExchangeApart = kPairs && kVariant == TileVariant::kLarge;  // else in the place of P and dS
  static constexpr int kDqPieces = kPairs ? kDqDimTiles / 8 : 1;  // one after the other, of 32 registers a thread beside 128 of dK and dV
  static constexpr int kSharedBytes = 2 * (kKeyBytes + Tile::kStages * kQueryBytes + kScoreBytes) + (kExchangeApart ? kThreads * 16 : 0);
};

// Waits until it is this block's turn to add to a dQ tile: key blocks add in the order of their launch, so that the sum is the same every time.
// Blocks with lower numbers were launched earlier, so the wait always ends.
__device__ __forceinline__ void wait_turn(const int32_t* semaphore, int turn) {
  if (threadIdx.x == 0) semaphore_wait(semaphore, turn);
  __syncthreads();
}

__device__ __forceinline__ void pass_turn(int32_t* semaphore) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) semaphore_pass(semaphore);
}

template <int kHeadDim, typename T, TileVariant kVariant, bool kExtras>
__global__ void __launch_bounds__(BackwardShape<kHeadDim, kVariant>::kThreads, 1)
    backward_kernel(const __grid_constant__ HfFlash2BackwardParams params) {
  using Shape = BackwardShape<kHeadDim, kVariant>;
  constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kStages = Shape::kStages, kThreads = Shape::kThreads;
  constexpr int kMTiles = Shape::kMTiles, kNTiles = Shape::kNTiles, kKeyTiles = Shape::kKeyTiles, kDimTiles = Shape::kDimTiles;
  const HfFlash2ForwardParams& forward = params.forward;

  // Grid: key blocks fastest and in order; under a causal mask the first see the most queries. In deterministic mode, below a diagonal, the last
  // come first: each starts at queries of its own, and none waits for the others to get there. PERF: 1.7 to 1.9 times as fast.
  // TUNING.md, "Other GPUs".
  const int key_blocks = (forward.max_seqlen_k + kBlockN - 1) / kBlockN;
  const bool descends = params.deterministic && forward.window_right >= 0;
  const int key_block = descends ? key_blocks - 1 - blockIdx.x % key_blocks : blockIdx.x % key_blocks;
  const int head_k = blockIdx.x / key_blocks % forward.heads_k;
  const int batch = blockIdx.x / key_blocks / forward.heads_k;
  const int group = forward.heads_q / forward.heads_k;

  const Sequence seq_q = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q);
  const Sequence seq_k = find_sequence(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k);
  const int key_begin = key_block * kBlockN;
  if (key_begin >= seq_k.length) return;
  const Mask mask(forward, batch, seq_q, seq_k);
  const int query_block_begin = mask.query_block_begin(key_begin, kBlockM);
  const int query_block_end = mask.query_block_end(key_begin + kBlockN, kBlockM);
  const int blocks_per_head = max(0, query_block_end - query_block_begin);
  const int steps = blocks_per_head * group;

  extern __shared__ __align__(128) char shared[];
  const uint32_t sK = shared_address(shared);              // [kBlockN, kHeadDim]; dK on the way out
  const uint32_t sV = sK + Shape::kKeyBytes;               // [kBlockN, kHeadDim]; dV on the way out
  const uint32_t sQ = sV + Shape::kKeyBytes;               // kStages x [kBlockM, kHeadDim]
  const uint32_t sdO = sQ + kStages * Shape::kQueryBytes;  // kStages x [kBlockM, kHeadDim]
  const uint32_t sP = sdO + kStages * Shape::kQueryBytes;  // [kBlockM, kBlockN]
  const uint32_t sdS = sP + Shape::kScoreBytes;            // [kBlockM, kBlockN]
  const uint32_t exchange = Shape::kExchangeApart ? sdS + Shape::kScoreBytes : sP;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp / Shape::kWarpsN * (kMTiles * 16), warp_column = warp % Shape::kWarpsN * (kNTiles * 8);       // S, dP
  const int warp_key = warp / Shape::kWarpsDim * (kKeyTiles * 16), warp_dim = warp % Shape::kWarpsDim * (kDimTiles * 8);  // dK, dV
  const int warp_dq_dim = warp % Shape::kWarpsN * (Shape::kDqDimTiles * 8);                                               // dQ columns

  const Workspace workspace(params, kBlockM, kHeadDim);
  const int64_t tile_of_head_0 = workspace.first_block(forward, batch, head_k * group, kBlockM);

  // Step s works on query block query_block_begin + s % blocks_per_head of query head s / blocks_per_head of the group.
  auto load_queries = [&](int step) {
    const int head = head_k * group + step / blocks_per_head;
    const int row_begin = (query_block_begin + step % blocks_per_head) * kBlockM;
    const int stage = step % kStages * Shape::kQueryBytes;
    load_tile_async<kBlockM, kHeadDim, kThreads>(sQ + stage, token_pointer<const T>(forward.q, batch, head, seq_q.start),
                                                 forward.q.token_stride, row_begin, seq_q.length, forward.head_dim);
    load_tile_async<kBlockM, kHeadDim, kThreads>(sdO + stage, token_pointer<const T>(params.dout, batch, head, seq_q.start),
                                                 params.dout.token_stride, row_begin, seq_q.length, forward.head_dim_v);
  };

  load_tile_async<kBlockN, kHeadDim, kThreads>(sK, token_pointer<const T>(forward.k, batch, head_k, seq_k.start), forward.k.token_stride,
                                               key_begin, seq_k.length, forward.head_dim);
  load_tile_async<kBlockN, kHeadDim, kThreads>(sV, token_pointer<const T>(forward.v, batch, head_k, seq_k.start), forward.v.token_stride,
                                               key_begin, seq_k.length, forward.head_dim_v);
  if (steps > 0) load_queries(0);
  cp_async_commit();

  const float scale_log2 = kExtras ? scale_of_scores(forward) : forward.softmax_scale * kLog2e, inverse_scale = 1.f / scale_log2;
  float dk[kKeyTiles][kDimTiles][4] = {}, dv[kKeyTiles][kDimTiles][4] = {};

  for (int step = 0; step < steps; ++step) {
    const int head_in_group = step / blocks_per_head;
    const int query_block = query_block_begin + step % blocks_per_head;
    const int row_begin = query_block * kBlockM;
    const uint32_t stage = step % kStages * Shape::kQueryBytes;
    const int64_t tile = tile_of_head_0 + head_in_group * workspace.blocks + query_block;

    cp_async_wait<0>();
    __syncthreads();  // Q and dO (and at first K and V) have arrived; nobody reads the other stage, P or dS of the last step any more
    if (kStages == 2 && step + 1 < steps) {
      load_queries(step + 1);
      cp_async_commit();
    }

    const float* delta = workspace.delta + tile * kBlockM * 2 + warp_row + lane / 4;
    float row_delta[kMTiles][2], row_lse_log2[kMTiles][2];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_delta[m][half] = delta[m * 16 + half * 8];
        row_lse_log2[m][half] = delta[kBlockM + m * 16 + half * 8];
      }
    }

    float p[kMTiles][kNTiles][4] = {}, ds[kMTiles][kNTiles][4];
    if constexpr (Shape::kPairs)
      multiply_in_pairs<T, kHeadDim>(p, ds, sQ + stage, sK, sdO + stage, sV, warp_row, warp_column, exchange);
    else
      multiply<T, kHeadDim / 16>(p, RowsOfA<kHeadDim>(sQ + stage, warp_row), 0, ColumnsOfB<kHeadDim>(sK, warp_column), 0);
    if (kExtras && forward.softcap > 0.f) cap_scores(p, forward.softmax_scale / forward.softcap);
    if (mask.needed(row_begin, row_begin + kBlockM, key_begin, key_begin + kBlockN))
      mask.apply(p, row_begin + warp_row + lane / 4, key_begin + warp_column + lane % 4 * 2);
    if (mask.visible != nullptr) mask.apply_holes(p, key_begin + warp_column + lane % 4 * 2);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) p[m][n][c] = exp2_approx(fmaf(p[m][n][c], scale_log2, -row_lse_log2[m][c / 2]));

    if constexpr (!Shape::kPairs) {
#pragma unroll
      for (int i = 0; i < kMTiles * kNTiles * 4; ++i) (&ds[0][0][0])[i] = 0.f;
      multiply<T, kHeadDim / 16>(ds, RowsOfA<kHeadDim>(sdO + stage, warp_row), 0, ColumnsOfB<kHeadDim>(sV, warp_column), 0);
    } else if constexpr (!Shape::kExchangeApart) {
      __syncthreads();  // every warp has what it was given
    }
    if (kExtras && forward.dropout_p > 0.f) {
      // p is P by the keep probability already, and delta times it: preprocess.cuh.
      float kept[kMTiles][kNTiles][4];
#pragma unroll
      for (int i = 0; i < kMTiles * kNTiles * 4; ++i) (&kept[0][0][0])[i] = (&p[0][0][0])[i];
      const Dropout<true> dropout(forward.rng_state);
      // Of a pair, both draw for both.
      const int first_column = Shape::kPairs ? warp_column / 16 * 16 : warp_column;
      const auto bits = dropout.draw<kMTiles, Shape::kPairs ? 2 : kNTiles>(batch * forward.heads_q + head_k * group + head_in_group,
                                                                           row_begin + warp_row, key_begin + first_column);
      bits.for_each_dropped(DropoutRate::of(forward.dropout_p), [&](int m, int n, int c) {
        if (!Shape::kPairs || n == warp % 2) kept[m][n % kNTiles][c] = ds[m][n % kNTiles][c] = 0.f;
      });
      write_accumulators<T, kBlockN>(sP, kept, warp_row, warp_column);
    } else {
      write_accumulators<T, kBlockN>(sP, p, warp_row, warp_column);
    }
#pragma unroll
    for (int m = 0; m < kMTiles; ++m)
#pragma unroll
      for (int n = 0; n < kNTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          ds[m][n][c] = p[m][n][c] * (ds[m][n][c] - row_delta[m][c / 2]);
          if (kExtras && forward.softcap > 0.f) ds[m][n][c] *= slope_of_cap(p[m][n][c], row_lse_log2[m][c / 2], inverse_scale);
        }
    write_accumulators<T, kBlockN>(sdS, ds, warp_row, warp_column);
    __syncthreads();  // P and dS are complete

    multiply<T, kBlockM / 16>(dv, ColumnsOfA<kBlockN>(sP, 0), warp_key / 16, RowsOfB<kHeadDim>(sdO + stage, 0), warp_dim / 16);

    const auto finish_queries = [&] {
      multiply<T, kBlockM / 16>(dk, ColumnsOfA<kBlockN>(sdS, 0), warp_key / 16, RowsOfB<kHeadDim>(sQ + stage, 0), warp_dim / 16);
      if (kStages == 1 && step + 1 < steps) {
        __syncthreads();  // nobody reads Q or dO any more
        load_queries(step + 1);
        cp_async_commit();
      }
    };
    // PERF: first where there is one stage, so that the queries of the next step come while dQ is computed: 2 to 10 %. TUNING.md, "Other GPUs".
    if constexpr (kStages == 1) finish_queries();

#pragma unroll
    for (int piece = 0; piece < Shape::kDqPieces; ++piece) {
      constexpr int kTiles = Shape::kDqDimTiles / Shape::kDqPieces;
      float dq[kMTiles][kTiles][4] = {};
      multiply<T, kBlockN / 16>(dq, RowsOfA<kBlockN>(sdS, warp_row), 0, RowsOfB<kHeadDim>(sK, 0), (warp_dq_dim + piece * kTiles * 8) / 16);
      float* dq_block = workspace.dq + tile * kBlockM * kHeadDim + warp * Shape::kDqFloatsPerWarp + piece * kTiles * 128;
      if (params.deterministic && piece == 0)
        wait_turn(workspace.semaphore(tile), descends ? mask.key_block_end(row_begin + kBlockM, kBlockN) - 1 - key_block
                                                      : key_block - mask.key_block_begin(row_begin, kBlockN));
#pragma unroll
      for (int m = 0; m < kMTiles; ++m)
#pragma unroll
        for (int d = 0; d < kTiles; ++d) reduce_add(dq_block + (m * Shape::kDqDimTiles + d) * 128, lane, dq[m][d]);
    }
    if (params.deterministic) pass_turn(workspace.semaphore(tile));
    if constexpr (kStages > 1) finish_queries();
  }

#pragma unroll
  for (int m = 0; m < kKeyTiles; ++m)
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
      for (int c = 0; c < 4; ++c) dk[m][d][c] *= forward.softmax_scale;
  cp_async_wait<0>();
  __syncthreads();  // nobody reads K or V any more
  write_accumulators<T, kHeadDim>(sK, dk, warp_key, warp_dim);
  write_accumulators<T, kHeadDim>(sV, dv, warp_key, warp_dim);
  __syncthreads();
  store_tile<kBlockN, kHeadDim, kThreads>(sK, token_pointer<T>(params.dk, batch, head_k, seq_k.start), params.dk.token_stride, key_begin,
                                          seq_k.length, forward.head_dim, threadIdx.x);
  store_tile<kBlockN, kHeadDim, kThreads>(sV, token_pointer<T>(params.dv, batch, head_k, seq_k.start), params.dv.token_stride, key_begin,
                                          seq_k.length, forward.head_dim_v, threadIdx.x);
}

// Last pass: dQ = softmax_scale * accumulator, rounded to T, from the accumulation order of backward_kernel to rows.
template <int kHeadDim, typename T, TileVariant kVariant>
__global__ void __launch_bounds__(BackwardShape<kHeadDim, kVariant>::kThreads)
    convert_dq_kernel(const __grid_constant__ HfFlash2BackwardParams params) {
  using Shape = BackwardShape<kHeadDim, kVariant>;
  constexpr int kBlockM = Shape::kBlockM;
  const HfFlash2ForwardParams& forward = params.forward;
  const QueryBlock at(forward, kBlockM);
  const int row_begin = at.number * kBlockM, head = at.head, batch = at.batch;
  const Sequence seq = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q);
  if (row_begin >= seq.length) return;

  __shared__ __align__(128) char shared[kBlockM * kHeadDim * 2];
  const uint32_t tile = shared_address(shared);
  const Workspace workspace(params, kBlockM, kHeadDim);
  const int64_t block = workspace.first_block(forward, batch, head, kBlockM) + at.number;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* accumulated = workspace.dq + block * kBlockM * kHeadDim + warp * Shape::kDqFloatsPerWarp;
  float dq[Shape::kMTiles][Shape::kDqDimTiles][4];
#pragma unroll
  for (int m = 0; m < Shape::kMTiles; ++m)
#pragma unroll
    for (int d = 0; d < Shape::kDqDimTiles; ++d) {
      const float4 x = load_reduced(accumulated + (m * Shape::kDqDimTiles + d) * 128, lane);
      dq[m][d][0] = x.x * forward.softmax_scale, dq[m][d][1] = x.y * forward.softmax_scale;
      dq[m][d][2] = x.z * forward.softmax_scale, dq[m][d][3] = x.w * forward.softmax_scale;
    }
  write_accumulators<T, kHeadDim>(tile, dq, warp / Shape::kWarpsN * (Shape::kMTiles * 16),
                                  warp % Shape::kWarpsN * (Shape::kDqDimTiles * 8));
  __syncthreads();
  store_tile<kBlockM, kHeadDim, Shape::kThreads>(tile, token_pointer<T>(params.dq, batch, head, seq.start), params.dq.token_stride,
                                                 row_begin, seq.length, forward.head_dim, threadIdx.x);
}

}  // namespace hf_flash2::sm80
