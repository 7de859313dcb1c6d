// FlashAttention-2 forward on mma.sync, for every GPU from Ampere on: out = softmax(scale * Q K^T + mask) V and the log-sum-exp of each
// row. Dao, arXiv 2307.08691, algorithm 1. Launched by forward_launch.cuh.
//
// One block computes kBlockM query rows of one head. Its warps split the rows (each kBlockM / kNWarps), so softmax needs no exchange
// between warps. K and V blocks stream through two stages of shared memory, from the last visible to the first: while one block is computed
// on, the next is in flight.
// To d 128, softmax does not look for the maximum of a block: it takes that of the blocks before, and where the sums of a block say that
// this is too low (OnlineSoftmax::update_ahead), the scores, which it has overwritten, are computed once more. The first block and masked
// ones are done the usual way. PERF: 2 to 7 %; d 192 and 256, where eight warps are one block of a multiprocessor, lost 3.5 %.
// TUNING.md, "Softmax ahead of the maximum".
#pragma once
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/pages.cuh"
#include "attention/sinks.cuh"
#include "attention/softcap.cuh"
#include "attention/softmax.cuh"
#include "sm80/gemm.cuh"
#include "tiles.h"

namespace hf_flash2::sm80 {

template <int kHeadDim, TileVariant kVariant>
struct ForwardShape : ForwardTile<kHeadDim, kVariant> {
  using Tile = ForwardTile<kHeadDim, kVariant>;
  static constexpr int kThreads = Tile::kNWarps * 32;
  static constexpr int kHeadDimV = kHeadDim < kMostValueColumns ? kHeadDim : kMostValueColumns;
  static constexpr int kKeyBytes = Tile::kBlockN * kHeadDim * 2, kValueBytes = Tile::kBlockN * kHeadDimV * 2;  // one stage of K, of V
  static constexpr int kSharedBytes = Tile::kBlockM * kHeadDim * 2 + 2 * (kKeyBytes + kValueBytes);
  static constexpr bool kAhead = kHeadDim <= 128;
};

// kExtras: with dropout, capped scores or a paged cache, or several of them.
template <int kHeadDim, typename T, TileVariant kVariant, bool kExtras>
__global__ void __launch_bounds__(ForwardShape<kHeadDim, kVariant>::kThreads, ForwardShape<kHeadDim, kVariant>::kBlocksPerSm)
    forward_kernel(const __grid_constant__ HfFlash2ForwardParams params) {
  using Shape = ForwardShape<kHeadDim, kVariant>;
  constexpr int kBlockM = Shape::kBlockM, kBlockN = Shape::kBlockN, kThreads = Shape::kThreads, kKeyBytes = Shape::kKeyBytes;
  constexpr int kHeadDimV = Shape::kHeadDimV, kKeyToValueBytes = Shape::kKeyBytes / Shape::kValueBytes;
  constexpr int kRowsPerWarp = kBlockM / Shape::kNWarps;
  constexpr int kMTiles = kRowsPerWarp / 16, kNTiles = kBlockN / 8, kDTiles = kHeadDimV / 8;

  // Grid: query blocks fastest, so that blocks of one head run together and share its K and V in L2; the last, longest rows first.
  const QueryBlock at(params, kBlockM);
  const int query_block = at.blocks - 1 - at.number, head = at.head, batch = at.batch;
  const int head_k = head / (params.heads_q / params.heads_k);

  const Sequence seq_q = find_sequence(params.sequences_q, params.batch, batch, params.max_seqlen_q);
  const Sequence seq_k = find_sequence(params.sequences_k, params.batch, batch, params.max_seqlen_k);
  const int row_begin = query_block * kBlockM;
  if (row_begin >= seq_q.length) return;
  const Mask mask(params, batch, seq_q, seq_k);
  const int key_block_begin = mask.key_block_begin(row_begin, kBlockN);
  const int key_block_end = mask.key_block_end(row_begin + kBlockM, kBlockN);

  const T* gQ = token_pointer<const T>(params.q, batch, head, seq_q.start);
  const T* gK = token_pointer<const T>(params.k, batch, head_k, seq_k.start);
  const T* gV = token_pointer<const T>(params.v, batch, head_k, seq_k.start);

  extern __shared__ __align__(128) char shared[];
  const uint32_t sQ = shared_address(shared);       // [kBlockM, kHeadDim]; O on the way out
  const uint32_t sK = sQ + kBlockM * kHeadDim * 2;  // 2 x [kBlockN, kHeadDim]
  const uint32_t sV = sK + 2 * kKeyBytes;           // 2 x [kBlockN, kHeadDimV]

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp * kRowsPerWarp;              // first row of this warp in the block
  const int lane_row = row_begin + warp_row + lane / 4;  // first row of this lane in the sequence

  auto load_keys_and_values = [&](int block, uint32_t stage) {
    const T *keys = gK, *values = gV;
    if (kExtras && params.block_table != nullptr) {  // from where token 0 would lie, were all of them in a row
      const KeyPlace at = find_key(params.block_table, params.block_table_stride, params.page_size, batch, block * kBlockN);
      keys = token_pointer<const T>(params.k, at.page, head_k, at.token - block * kBlockN);
      values = token_pointer<const T>(params.v, at.page, head_k, at.token - block * kBlockN);
    }
    load_tile_async<kBlockN, kHeadDim, kThreads>(sK + stage, keys, params.k.token_stride, block * kBlockN, seq_k.length, params.head_dim);
    load_tile_async<kBlockN, kHeadDimV, kThreads>(sV + stage / kKeyToValueBytes, values, params.v.token_stride, block * kBlockN,
                                                  seq_k.length, params.head_dim_v);
    cp_async_commit();
  };

  if (key_block_begin < key_block_end) {
    load_tile_async<kBlockM, kHeadDim, kThreads>(sQ, gQ, params.q.token_stride, row_begin, seq_q.length, params.head_dim);
    load_keys_and_values(key_block_end - 1, 0);
  }

  const float scale_log2 = kExtras ? scale_of_scores(params) : params.softmax_scale * kLog2e;
  const DropoutRate rate = DropoutRate::of(kExtras ? params.dropout_p : 0.f);
  OnlineSoftmax<kMTiles> softmax;
  float out[kMTiles][kDTiles][4] = {};

  uint32_t stage = 0;  // byte offset of the block computed on
  for (int block = key_block_end - 1; block >= key_block_begin; --block, stage ^= kKeyBytes) {
    cp_async_wait<0>();
    __syncthreads();  // this block (and at first Q) has arrived for every thread; nobody reads the other stage any more
    if (block > key_block_begin) load_keys_and_values(block - 1, stage ^ kKeyBytes);

    float scores[kMTiles][kNTiles][4];
    const auto compute_scores = [&] {
#pragma unroll
      for (int i = 0; i < kMTiles * kNTiles * 4; ++i) (&scores[0][0][0])[i] = 0.f;
      multiply<T, kHeadDim / 16>(scores, RowsOfA<kHeadDim>(sQ, warp_row), 0, ColumnsOfB<kHeadDim>(sK + stage, 0), 0);
      if (kExtras && params.softcap > 0.f) cap_scores(scores, params.softmax_scale / params.softcap);
    };
    compute_scores();

    const int key_begin = block * kBlockN;
    const bool limited = mask.needed(row_begin, row_begin + kBlockM, key_begin, key_begin + kBlockN);
    bool ahead = Shape::kAhead && !limited && mask.visible == nullptr && block < key_block_end - 1;
    if (ahead) {
      float sums[kMTiles][2];
      ahead = softmax.update_ahead(scores, sums, scale_log2);
      if (ahead)
        softmax.add(sums);
      else
        compute_scores();
    }
    if (!ahead) {
      if (limited) mask.apply(scores, lane_row, key_begin + lane % 4 * 2);
      if (mask.visible != nullptr) mask.apply_holes(scores, key_begin + lane % 4 * 2);
      float rescale[kMTiles][2];
      softmax.update(scores, rescale, scale_log2);
      scale_rows(out, rescale);
    }
    if (kExtras && params.dropout_p > 0.f) {
      const Dropout<true> dropout(params.rng_state);  // in every block anew: kept, it would cost registers that spill
      const auto bits = dropout.draw<kMTiles, kNTiles>(batch * params.heads_q + head, row_begin + warp_row, key_begin);
      bits.for_each_dropped(rate, [&](int m, int n, int c) { scores[m][n][c] = 0.f; });
    }
    multiply_probabilities<T>(out, scores, RowsOfB<kHeadDimV>(sV + stage / kKeyToValueBytes, 0));
  }

  float normalise[kMTiles][2];
  const float sink = find_sink(params, head);
  softmax.finish(normalise, rate.out_scale, [&](int, int) { return sink; });
  scale_rows(out, normalise);

  if (lane % 4 == 0) {
    float* lse = params.softmax_lse + batch * params.lse_batch_stride + head * params.lse_head_stride + seq_q.start;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = lane_row + m * 16 + half * 8;
        if (row < seq_q.length) lse[row] = softmax.row_max[m][half];
      }
    }
  }

  // O leaves through the rows of Q that only this warp has read.
  __syncwarp();
  write_accumulators<T, kHeadDim>(sQ, out, warp_row, 0);
  __syncwarp();
  T* gO = token_pointer<T>(params.out, batch, head, seq_q.start);
  store_tile<kRowsPerWarp, kHeadDim, 32>(sQ + warp_row * kHeadDim * 2, gO, params.out.token_stride, row_begin + warp_row, seq_q.length,
                                         params.head_dim_v, lane);
}

}  // namespace hf_flash2::sm80
