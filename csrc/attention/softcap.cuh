// Capped scores: softcap * tanh(score * softmax_scale / softcap) in place of score * softmax_scale, before any mask. Gemma Team, Gemma 2,
// arXiv 2408.00118, section 2.
// PERF: a cap costs 24 % of the Hopper forward at d 256, 65 % at d 128, 120 % at d 64, and 13, 24 and 54 % of the backward.
// TUNING.md, "Capped scores".
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
