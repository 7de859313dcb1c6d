// First kernel of the backward of short sequences: delta and lse * log2e of every query row, as preprocess_kernel leaves them, and whose blocks are.
#pragma once
#include <math.h>

#include "attention/block_owners.cuh"
#include "attention/preprocess.cuh"
#include "sm90/scheduler.h"

namespace hf_flash2::sm90 {

struct ShortPreprocessArguments {
  HfFlash2BackwardParams params;
  BlockOwners<64> owners_q, owners_k;
  Divisor blocks;      // of the longest sequence
  Divisor head_parts;  // of a query block
  int log2_heads;      // of a part; the last one may have fewer
};

// What a thread block has of the rows: a query block, of 1 to 4 heads.
template <int kBlockM, typename T>
__device__ __forceinline__ void prepare_rows(const ShortPreprocessArguments& arguments) {
  const HfFlash2BackwardParams& params = arguments.params;
  const HfFlash2ForwardParams& forward = params.forward;
  const int index = gridDim.x - 1 - blockIdx.x, block = arguments.head_parts.quotient(index);
  const int batch = arguments.blocks.quotient(block), query_block = arguments.blocks.remainder(block);
  const Sequence seq = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q);
  const int first_row = query_block * kBlockM, rows = min(kBlockM, seq.length - first_row);
  if (rows <= 0) return;

  const int first_head = arguments.head_parts.remainder(index) << arguments.log2_heads;
  const int heads = min(1 << arguments.log2_heads, forward.heads_q - first_head);
  const Workspace workspace(params, kBlockM, 0);
  float* const tiles = workspace.delta + (workspace.first_block(forward, batch, first_head, kBlockM) + query_block) * (kBlockM * 2);
  const int64_t tile_stride = workspace.blocks * (kBlockM * 2);  // from head to head
  const int64_t lse_offset = batch * forward.lse_batch_stride + first_head * forward.lse_head_stride + seq.start + first_row;
  for (int i = threadIdx.x; i < heads * kBlockM; i += kPreprocessThreads) {
    const int row = i % kBlockM, head = i / kBlockM;
    float* const delta = tiles + head * tile_stride + row;
    if (row >= rows) delta[0] = 0.f;
    delta[kBlockM] = row < rows ? forward.softmax_lse[lse_offset + head * forward.lse_head_stride + row] * kLog2e : INFINITY;
  }

  // Rows of heads, 8 lanes each, two at once; those of a token one after another, as they may lie in memory.
  constexpr int kAtOnce = 2, kRowsOfStep = kPreprocessThreads / 8;
  for (int first = threadIdx.x / 32 * 4; first < rows << arguments.log2_heads; first += kAtOnce * kRowsOfStep) {  // of the warp
    int row[kAtOnce], head[kAtOnce];
    bool valid[kAtOnce];
    const T *out[kAtOnce], *dout[kAtOnce];
    float sum[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int number = first + threadIdx.x % 32 / 8 + i * kRowsOfStep;
      row[i] = number >> arguments.log2_heads, head[i] = number & ((1 << arguments.log2_heads) - 1);
      valid[i] = row[i] < rows && head[i] < heads;
      out[i] = token_pointer<const T>(forward.out, batch, first_head + head[i], seq.start + first_row + row[i]);
      dout[i] = token_pointer<const T>(params.dout, batch, first_head + head[i], seq.start + first_row + row[i]);
      sum[i] = 0.f;
    }
    for (int column = threadIdx.x % 8 * 8; column < forward.head_dim_v; column += 64) {
      uint4 o[kAtOnce], d[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        o[i] = d[i] = make_uint4(0, 0, 0, 0);
        if (valid[i]) {
          o[i] = __ldcs(reinterpret_cast<const uint4*>(out[i] + column));
          d[i] = *reinterpret_cast<const uint4*>(dout[i] + column);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) add_products<T>(sum[i], o[i], d[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int offset = 1; offset < 8; offset *= 2) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
      if (threadIdx.x % 8 != 0 || !valid[i]) continue;
      if (params.dlse != nullptr) sum[i] -= params.dlse[lse_offset + head[i] * forward.lse_head_stride + row[i]];
      tiles[head[i] * tile_stride + row[i]] = sum[i];
    }
  }
}

// One block of threads per query block and 1 to 4 heads, so that beside what it looks up it has something to read, and a thread block that finds
// its query block behind the end of the sequence, as most do of ragged ones, ends for several heads.
// PERF: the table last, by little code (BlockOwners), 6 thread blocks a multiprocessor: 1 to 2 % faster, few thread blocks 3 to 10. TUNING.md,
// "Small thread blocks".
template <int kBlockM, typename T>
__global__ void __launch_bounds__(kPreprocessThreads, 6)
    short_preprocess_kernel(const __grid_constant__ ShortPreprocessArguments arguments) {
  let_next_kernel_begin();
  prepare_rows<kBlockM, T>(arguments);
  const HfFlash2ForwardParams& forward = arguments.params.forward;
  arguments.owners_q.write(forward.sequences_q, forward.batch, forward.max_seqlen_q);
  arguments.owners_k.write(forward.sequences_k, forward.batch, forward.max_seqlen_k);
}

}  // namespace hf_flash2::sm90
