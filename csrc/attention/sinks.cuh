// Attention sinks: a learned logit for each query head that takes its part of every softmax and gives nothing to out. Xiao et al., Efficient
// Streaming Language Models with Attention Sinks, arXiv 2309.17453, section 3.3; as GPT-OSS has them. The forward counts them where it has all
// scores of a row (OnlineSoftmax::finish); then out and lse are all that the backward needs to know of them, but for their own gradient, here.
#pragma once
#include <math.h>

#include "attention/softmax.cuh"
#include "attention/workspace.cuh"

namespace hf_flash2 {

// The sink of a query head, times log2 e; -inf where there are none.
__device__ __forceinline__ float find_sink(const HfFlash2ForwardParams& params, int head) {
  return params.sinks == nullptr ? -INFINITY : params.sinks[head] * kLog2e;
}

constexpr int kSinkThreads = 1024;

// dsink = -sum over all rows of P_sink * delta, with P_sink = exp(sink - lse), as dS = P (dP - delta) and a sink has no value, dP = 0. A thread
// block for each head, behind the kernel that leaves delta and lse (preprocess.cuh or sm90/backward_short_preprocess.cuh; what dropout makes of both
// cancels). Sequences are shared among the warps, up to 32 at a time, and added in one order: the same from run to run. kFamily: as in the former.
template <HfFlash2Family kFamily, int kBlockM, int kColumns>
__global__ void __launch_bounds__(kSinkThreads) sink_gradient_kernel(const __grid_constant__ HfFlash2BackwardParams params) {
  constexpr int kWarps = kSinkThreads / 32;
  __shared__ float of_warps[kWarps];
  const HfFlash2ForwardParams& forward = params.forward;
  const Workspace workspace(params, kBlockM, kColumns);
  const int head = blockIdx.x, warp = threadIdx.x / 32;
  int at_once = 1;  // sequences
  while (at_once < min(kWarps, forward.batch)) at_once *= 2;
  const int threads = kSinkThreads / at_once, thread = threadIdx.x % threads;  // of a sequence
  const float sink = find_sink(forward, head);
  float sum = 0.f;
  for (int batch = threadIdx.x / threads; batch < forward.batch; batch += at_once) {
    const Sequence seq = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q);
    const float* rows = workspace.delta + workspace.first_block(forward, batch, head, kBlockM) * (kBlockM * 2);
#pragma unroll 4
    for (int row = thread; row < seq.length; row += threads) {
      const float* delta = rows + row / kBlockM * (kBlockM * 2) + row % kBlockM;
      sum -= exp2_approx(sink - delta[kBlockM]) * delta[0];  // 0 where no key is seen: lse is +inf
    }
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) of_warps[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  sum = 0.f;
  for (int i = 0; i < kWarps; ++i) sum += of_warps[i];
  params.dsinks[head] = sum;
}

}  // namespace hf_flash2
