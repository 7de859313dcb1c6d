// Scratch of the backward pass: delta (one float a query row) and the fp32 accumulator of dQ (one tile a query block). Query blocks are numbered
// per head, see first_block_of().
#pragma once
#include "attention/sequence.cuh"

namespace hf_flash2 {

struct Workspace {
  static constexpr int kSemaphores = 4;          // of a tile
  static constexpr int kMostRoundingWarps = 96;  // of thread blocks that round dQ beside the backward: sm90/rounding.cuh

  float* delta;         // [H, blocks, block_m]: rowsum(dO * O) - dlse, then lse * log2e, each block_m floats (see preprocess.cuh)
  float* dq;            // [H, blocks, block_m * columns]: dQ / softmax_scale, in the accumulation order of the kernel family
  int32_t* semaphores;  // [kSemaphores, H, blocks]: who may write to a part of dq, when, and what tasks say; see preprocess.cuh
  int32_t* rounded;     // [kMostRoundingWarps]: how far each has come
  int32_t* next_unit;   // one: how many key blocks have been taken by thread blocks that take one after another; zero at first
  int64_t blocks;       // query blocks of one head, over all sequences
  int64_t tiles;        // of all heads

  __host__ __device__ static int64_t query_blocks(const HfFlash2ForwardParams& params, int block_m) {
    if (params.sequences_q.cu_seqlens != nullptr) return params.total_q / block_m + params.batch;
    return static_cast<int64_t>(params.batch) * ((params.max_seqlen_q + block_m - 1) / block_m);
  }

  __host__ __device__ static int64_t bytes(const HfFlash2ForwardParams& params, int block_m, int columns) {
    const int64_t tiles = query_blocks(params, block_m) * params.heads_q;
    return (tiles * (block_m * (columns + 2) + kSemaphores) + kMostRoundingWarps + 1) * 4;
  }

  __host__ __device__ Workspace(const HfFlash2BackwardParams& params, int block_m, int columns)
      : blocks(query_blocks(params.forward, block_m)), tiles(blocks * params.forward.heads_q) {
    dq = static_cast<float*>(params.workspace);
    delta = dq + tiles * block_m * columns;
    semaphores = reinterpret_cast<int32_t*>(delta + tiles * block_m * 2);
    rounded = semaphores + kSemaphores * tiles;
    next_unit = rounded + kMostRoundingWarps;
  }

  __device__ __forceinline__ int32_t* semaphore(int64_t tile, int part = 0) const { return semaphores + part * tiles + tile; }

  // Number of the first query block of sequence `batch`, counted over all heads.
  __device__ __forceinline__ int64_t first_block(const HfFlash2ForwardParams& params, int batch, int head, int block_m) const {
    const int64_t block = first_block_of(params.sequences_q, batch, params.max_seqlen_q, block_m);
    return head * blocks + block;
  }
};

}  // namespace hf_flash2
