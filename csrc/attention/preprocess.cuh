// First pass of the backward: delta = rowsum(dO * O) - dlse and lse * log2e for every query row. Where the kernel that follows adds to dQ from
// its first key block on (kClearDq), zeros in the accumulator, and semaphores that say so; else, or with an order to keep, zeros in these.
// delta: Dao, arXiv 2307.08691, algorithm 2, line 4; the dlse term because d lse / d S = P.
// Under dropout with keep probability r, lse + log r and r delta are left: then exp(S - that) is P / r, so that dV is the sum of what is kept
// of it times dO, and dS = P / r (dP - that), with dP of dropped elements 0.
#pragma once
#include <math.h>

#include "attention/sequence_table.cuh"
#include "attention/softmax.cuh"
#include "attention/workspace.cuh"
#include "device/grid_dependency.cuh"
#include "device/semaphore.cuh"

namespace hf_flash2 {

constexpr int kPreprocessThreads = 256;

struct PreprocessArguments {
  HfFlash2BackwardParams params;
  SequenceTable table;  // of key blocks, for Hopper: a thread block more makes it, the first
  int most_key_blocks;
  int keys_of_block;
};

// 8 elements each.
template <typename T>
__device__ __forceinline__ void add_products(float& sum, const uint4& x, const uint4& y) {
  const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 a = unpack<T>(xs[i]), b = unpack<T>(ys[i]);
    sum += a.x * b.x + a.y * b.y;
  }
}

// One block of threads per query block; a tile of the dQ accumulator has kColumns columns. Rows past the end of a sequence get lse = +inf,
// so that P = exp2(S - lse) = 0 without a row mask. kFamily only keeps the kernels of the families apart, which are compiled for different
// architectures: two of one name in one library, and the runtime may find the wrong one.
// PERF: the last query blocks first, and O streams through L2: that then holds dO of the first, which the backward begins with. With the last
// kernel in that order, too (sm90/backward_convert.cuh), 0 to 3 %. This kernel is a tenth of a backward at d 128 causal 1k; what was
// tried to be rid of it: TUNING.md, "First and last kernel".
template <HfFlash2Family kFamily, int kBlockM, int kColumns, bool kClearDq, typename T>
__global__ void __launch_bounds__(kPreprocessThreads) preprocess_kernel(const __grid_constant__ PreprocessArguments arguments) {
  if constexpr (kFamily == kSm90) let_next_kernel_begin();
  const HfFlash2BackwardParams& params = arguments.params;
  const HfFlash2ForwardParams& forward = params.forward;
  const Workspace workspace(params, kBlockM, kColumns);
  if (blockIdx.x == 0 && threadIdx.x == 0) *workspace.next_unit = 0;
  if (kFamily == kSm90 && arguments.table.entries != nullptr && blockIdx.x == 0) {
    const auto blocks_of = [&](int batch) {
      return count_blocks_of(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k, arguments.keys_of_block);
    };
    return arguments.table.make<kPreprocessThreads>(arguments.most_key_blocks, count_sequences(forward.batch, 0, blocks_of));
  }
  const QueryBlock at(forward, kBlockM, gridDim.x - 1 - blockIdx.x);
  const int query_block = at.number, head = at.head, batch = at.batch;
  const Sequence seq = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q);
  if (query_block * kBlockM >= seq.length) return;

  const int64_t tile = workspace.first_block(forward, batch, head, kBlockM) + query_block;
  if (threadIdx.x < Workspace::kSemaphores)
    *workspace.semaphore(tile, threadIdx.x) = threadIdx.x == 0 && kClearDq && !params.deterministic ? kEveryTurn : 0;
  if constexpr (kClearDq) {
    float4* dq = reinterpret_cast<float4*>(workspace.dq + tile * kBlockM * kColumns);
    for (int i = threadIdx.x; i < kBlockM * kColumns / 4; i += kPreprocessThreads) dq[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  }

  // 8 lanes a row, 8 elements a lane and step.
  const T* out = token_pointer<const T>(forward.out, batch, head, seq.start);
  const T* dout = token_pointer<const T>(params.dout, batch, head, seq.start);
  const int64_t lse_offset = batch * forward.lse_batch_stride + head * forward.lse_head_stride + seq.start;
  float* delta = workspace.delta + tile * kBlockM * 2;
  const float keep = 1.f - forward.dropout_p, keep_log2 = forward.dropout_p > 0.f ? log2_approx(keep) : 0.f;
  for (int r = threadIdx.x / 8; r < kBlockM; r += kPreprocessThreads / 8) {
    const int row = query_block * kBlockM + r;
    float sum = 0.f;
    if (row < seq.length) {
      for (int column = threadIdx.x % 8 * 8; column < forward.head_dim_v; column += 64) {
        const uint4 o = __ldcs(reinterpret_cast<const uint4*>(out + row * forward.out.token_stride + column));
        const uint4 d = *reinterpret_cast<const uint4*>(dout + row * params.dout.token_stride + column);
        add_products<T>(sum, o, d);
      }
    }
#pragma unroll
    for (int offset = 1; offset < 8; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (threadIdx.x % 8 == 0) {
      const bool valid = row < seq.length;
      if (valid && params.dlse != nullptr) sum -= params.dlse[lse_offset + row];
      delta[r] = keep * sum;
      delta[kBlockM + r] = valid ? forward.softmax_lse[lse_offset + row] * kLog2e + keep_log2 : INFINITY;
    }
  }
}

}  // namespace hf_flash2
