// Rows of results that no sequence covers, where ranges leave some: zeros, +inf in lse. Only the device knows which they are. On Hopper, warps
// that have nothing else to do fill them (sm90/clear_gaps.cuh), elsewhere a kernel of its own (sm80/clear_gaps.cuh).
#pragma once
#include <math.h>

#include "attention/sequence.cuh"

namespace hf_flash2 {

// Whether there may be such rows.
__host__ __device__ inline bool may_have_gaps(const HfFlash2ForwardParams& params) { return params.sequences_q.ranges != nullptr; }
__host__ __device__ inline bool may_have_gaps(const HfFlash2BackwardParams& params) {
  return params.forward.sequences_q.ranges != nullptr || params.forward.sequences_k.ranges != nullptr;
}

// Calls clear(tensor, batch, begin, end, heads, columns) for rows [begin, end) of a batch entry of `tensor`, [B, tokens, heads, columns], until
// it has been called for all that fall to worker `worker` of `workers`. Neighbours take different rows of the batch, each from a place of its own
// on: then each worker has some of every place, and all about as many gaps, though these lie at one end of their rows.
// PERF: a padded forward to 4k and 8k 1 %, at 2k level, as a backward. TUNING.md, "Zeros in gaps".
template <typename F>
__device__ __forceinline__ void for_each_gap(const HfFlash2Tensor& tensor, const HfFlash2Sequences& sequences, int batch_size, int tokens,
                                             int heads, int columns, int worker, int workers, const F& clear) {
  constexpr int kTokens = 16;  // for each look at a range
  const int parts = (tokens + kTokens - 1) / kTokens, apart = parts / batch_size;
  for (int i = worker; i < batch_size * parts; i += workers) {
    const int batch = i % batch_size, part = (i / batch_size + batch * apart) % parts;
    const int begin = part * kTokens, end = min(begin + kTokens, tokens);
    const Sequence sequence = find_sequence(sequences, batch_size, batch, tokens);
#pragma unroll 1
    for (int side = 0; side < 2; ++side) {  // before the sequence, and behind it
      const int first = side == 0 ? begin : max(begin, sequence.start + sequence.length), last = side == 0 ? min(end, sequence.start) : end;
      if (first < last) clear(tensor, batch, first, last, heads, columns);
    }
  }
}

// Of a forward: out.
template <typename F>
__device__ __forceinline__ void for_each_forward_gap(const HfFlash2ForwardParams& params, int worker, int workers, const F& clear) {
  for_each_gap(params.out, params.sequences_q, params.batch, params.max_seqlen_q, params.heads_q, params.head_dim_v, worker, workers,
               clear);
}

// Of a backward: dq, dk and dv.
template <typename F>
__device__ __forceinline__ void for_each_backward_gap(const HfFlash2BackwardParams& params, int worker, int workers, const F& clear) {
  const HfFlash2ForwardParams& forward = params.forward;
  const HfFlash2Sequences &q = forward.sequences_q, &k = forward.sequences_k;
  if (q.ranges != nullptr)
    for_each_gap(params.dq, q, forward.batch, forward.max_seqlen_q, forward.heads_q, forward.head_dim, worker, workers, clear);
  if (k.ranges == nullptr) return;
  for_each_gap(params.dk, k, forward.batch, forward.max_seqlen_k, forward.heads_k, forward.head_dim, worker, workers, clear);
  for_each_gap(params.dv, k, forward.batch, forward.max_seqlen_k, forward.heads_k, forward.head_dim_v, worker, workers, clear);
}

// +inf in lse, by warp `worker` of `workers`.
__device__ __forceinline__ void fill_lse_gaps(const HfFlash2ForwardParams& params, int worker, int workers) {
  const int tokens = params.max_seqlen_q;
  for (int i = worker; i < params.batch * params.heads_q; i += workers) {
    const int batch = i / params.heads_q, head = i - batch * params.heads_q;
    const Sequence sequence = find_sequence(params.sequences_q, params.batch, batch, tokens);
    float* lse = params.softmax_lse + batch * params.lse_batch_stride + head * params.lse_head_stride;
#pragma unroll 1
    for (int token = threadIdx.x % 32; token < tokens; token += 32)
      if (token < sequence.start || token >= sequence.start + sequence.length) lse[token] = INFINITY;
  }
}

}  // namespace hf_flash2
