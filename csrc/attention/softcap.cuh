// Capped scores: softcap * tanh(score * softmax_scale / softcap) in place of score * softmax_scale, before any mask. Gemma Team, Gemma 2,
// arXiv 2408.00118, section 2.
// PERF: one H200, causal, batch 2 at 4k, with and without a cap of 50, us: 16/8 heads of 256, Hopper forward 453 366, backward 1629 1447,
// mma.sync 1264 1009, 3940 3600; 16 of 128 321 195, 809 654, mma.sync 613 437, 1650 1310; 32 of 64 557 252, 1087 708, mma.sync 807 473, 1970
// 1416. One query after 8k keys, 16/8 heads of 256, 1 and 8 sequences: 41 35, 143 139, mma.sync 561 428, 545 431; from pages, in
// a CUDA graph, 31 28, 132 131, mma.sync 617 518, 580 497. Eager attention: 9719 and 11374, 9192 and 10681, 18003 and 21136.
#pragma once
#include "attention/softmax.cuh"

namespace hf_flash2 {

// What the Hopper kernels are told of a cap: in their arguments it takes no registers.
struct ScoreCap {
  float scale;               // softmax_scale / softcap
  float log2, inverse_log2;  // softcap * log2 e, and 1 by that

  static ScoreCap of(const HfFlash2ForwardParams& params) {
    return {params.softmax_scale / params.softcap, params.softcap * kLog2e, 1 / (params.softcap * kLog2e)};
  }
};

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
template <typename Scores>
__device__ __forceinline__ void cap_scores(Scores& scores, float scale) {
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(Scores) / sizeof(float)); ++i) {
    float& score = reinterpret_cast<float*>(&scores)[i];
    score = tanh_of(score * scale);
  }
}

// The derivative of a capped score by the score, 1 - tanh^2, from its probability p = exp2(tanh / inverse_scale - lse_log2). 0 where p is, as
// under a mask: so is the gradient there.
__device__ __forceinline__ float slope_of_cap(float p, float lse_log2, float inverse_scale) {
  const float tanh = (log2_approx(p) + lse_log2) * inverse_scale;
  return fmaxf(0.f, fmaf(-tanh, tanh, 1.f));
}

}  // namespace hf_flash2
