// Capped scores: softcap * tanh(score * softmax_scale / softcap) in place of score * softmax_scale, before any mask. Gemma Team, Gemma 2,
// arXiv 2408.00118, section 2.
// PERF: one H200, causal, batch 2 at 4k, with and without a cap of 50, us: 16/8 heads of 256, Hopper forward 453 366, mma.sync 1264 1009, its
// backward 3896 3600; 16 of 128 321 195, 613 437, 1647 1310; 32 of 64 557 252, 807 473, 1978 1416. One query after 8k keys, 16/8 heads of 256, 1
// and 8 sequences: 41 35, 143 139, mma.sync 561 428, 545 431. Eager attention: 9719 and 11374, 9192 and 10681, 18003 and 21136.
#pragma once
#include "attention/softmax.cuh"

namespace hf_flash2 {

// By the exponential, near 0 by the series, where that would lose digits: tanh.approx is off by 5e-4, which a cap of 50 makes 0.02 of a score.
__device__ __forceinline__ float tanh_of(float x) {
  const float square = x * x, series = x * fmaf(square, fmaf(square, 2.f / 15, -1.f / 3), 1.f);
  return square < 0.01f ? series : 1.f - 2.f * reciprocal_approx(exp2_approx(x * (2.f * kLog2e)) + 1.f);
}

// What scores are multiplied with in the exponent of base 2: as they come, or once they are hyperbolic tangents (cap_scores).
__device__ __forceinline__ float scale_of_scores(const HfFlash2ForwardParams& params) {
  return (params.softcap > 0.f ? params.softcap : params.softmax_scale) * kLog2e;
}

// scale: softmax_scale / softcap.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void cap_scores(float (&scores)[kMTiles][kNTiles][4], float scale) {
#pragma unroll
  for (int i = 0; i < kMTiles * kNTiles * 4; ++i) (&scores[0][0][0])[i] = tanh_of((&scores[0][0][0])[i] * scale);
}

// The derivative of a capped score by the score, 1 - tanh^2, from its probability p = exp2(tanh / inverse_scale - lse_log2). 0 where p is, as
// under a mask: so is the gradient there.
__device__ __forceinline__ float slope_of_cap(float p, float lse_log2, float inverse_scale) {
  const float tanh = (log2_approx(p) + lse_log2) * inverse_scale;
  return fmaxf(0.f, fmaf(-tanh, tanh, 1.f));
}

}  // namespace hf_flash2
