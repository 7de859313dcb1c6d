// The online softmax of FlashAttention-2 (arXiv 2307.08691, algorithm 1), in base 2, on mma.sync accumulators.
// A thread holds kRows rows (2 of each 16-row tile), each shared with the 3 other lanes of its quad.
#pragma once
#include <math.h>

#include "device/convert.cuh"

namespace hf_flash2 {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <typename Op>
__device__ __forceinline__ float quad_reduce(float x, Op op) {
  x = op(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return op(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

template <int kMTiles>
struct OnlineSoftmax {
  float row_max[kMTiles][2];  // of the scores seen so far, times scale_log2, the same in all lanes of a quad
  float row_sum[kMTiles][2];  // of this lane's columns only, until finish()

  __device__ __forceinline__ OnlineSoftmax() {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = -INFINITY;
        row_sum[m][half] = 0.f;
      }
    }
  }

  // scores <- exp2((scores - max) * scale). `rescale` is what the unnormalised out of earlier blocks has to be multiplied with.
  // With kLazy a maximum that grew by at most 8 (base 2) is not followed: the sums stay far from overflow, and out need not be touched
  // while no row of the warp moved. Returns whether some row did.
  // PERF: the form of which ptxas makes the fastest code: 1 to 2 % at d 128 full. TUNING.md, "Softmax ahead of the maximum".
  template <bool kLazy = false, int kNTiles>
  __device__ __forceinline__ bool update(float (&scores)[kMTiles][kNTiles][4], float (&rescale)[kMTiles][2], float scale_log2) {
    bool moved = !kLazy;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float block_max = largest(scores[m], half);
        // NOTE: the product is rounded before it is compared. Fused with the subtraction below, a maximum that has not moved would not give
        // 1 but something off by that rounding, at every block in the same direction.
        float scaled_max = fmaxf(row_max[m][half], block_max * scale_log2);
        if constexpr (kLazy) {
          const bool grows = scaled_max - row_max[m][half] > 8.f;
          scaled_max = grows ? scaled_max : row_max[m][half];
          moved |= grows;
        }
        // NOTE: a row that has seen no key yet keeps max = -inf; subtracting 0 instead gives exp2(-inf) = 0, never -inf - (-inf).
        const float shift = scaled_max == -INFINITY ? 0.f : scaled_max;
        rescale[m][half] = exp2_approx(row_max[m][half] - shift);
        row_max[m][half] = scaled_max;
        const float sum = exponentials(scores[m], half, scale_log2, shift, kLazy ? 0.f : row_sum[m][half] * rescale[m][half]);
        row_sum[m][half] = kLazy ? fmaf(row_sum[m][half], rescale[m][half], sum) : sum;
      }
    }
    return kLazy ? __any_sync(0xffffffffu, moved) : true;
  }

  // update() without looking for a maximum: scores <- exp2(scores * scale - max) with the maximum of earlier blocks, `sums` <- theirs, of
  // this lane's columns. Returns whether all sums of the warp are small enough for that maximum to do. A maximum that is too low costs no
  // precision as long as floats reach, and every exponential is in a sum: where one overflowed, or a row had no maximum yet, it does not
  // do. Then raise_max() or, from the scores, update(); at last add().
  template <int kNTiles>
  __device__ __forceinline__ bool update_ahead(float (&scores)[kMTiles][kNTiles][4], float (&sums)[kMTiles][2], float scale_log2) const {
    bool fits = true;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sums[m][half] = exponentials(scores[m], half, scale_log2, row_max[m][half], 0.f);
        fits &= sums[m][half] <= kMostAhead;  // nor does it where a sum is no number: of a score of -inf above a maximum of -inf
      }
    }
    return __all_sync(0xffffffffu, fits);
  }

  // The maximum follows sums that are finite, to the largest score: its probability is 1 then, which 16 bits hold, and where one key
  // outweighs the others, out is its value. Simulated at d 64, 1k normal scores, that of the first key 10 higher, root mean square: out,
  // before it is rounded, off by 1.2e-5, dq and dk by 1.4e-3 and 1.1e-3, as with maxima looked for; by 1.5e-3, 1.8e-3 and 1.4e-3, where the
  // maximum follows by whole numbers, from sums of 4096 on. `rescale` as in update(). Rows whose sums are small enough keep what they have,
  // whatever those do that share their warp: other heads of a group, or other queries.
  template <int kNTiles>
  __device__ __forceinline__ void raise_max(float (&scores)[kMTiles][kNTiles][4], float (&sums)[kMTiles][2], float (&rescale)[kMTiles][2]) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = row_max[m][half], most = largest(scores[m], half);
        const float sum = quad_reduce(sums[m][half], [](float a, float b) { return fmaxf(a, b); });
        row_max[m][half] += sum > kMostAhead ? log2_approx(most) : 0.f;
        const float factor = exp2_approx(before - row_max[m][half]);  // NOTE: of the sum as it is rounded, which later blocks subtract
        row_sum[m][half] *= factor;
        sums[m][half] *= factor;
        rescale[m][half] = factor;
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) scores[m][n][half * 2] *= factor, scores[m][n][half * 2 + 1] *= factor;
      }
    }
  }

  __device__ __forceinline__ void add(const float (&sums)[kMTiles][2]) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) row_sum[m][0] += sums[m][0], row_sum[m][1] += sums[m][1];
  }

  // Completes the row sums and leaves the natural-log lse of each row in row_max. `rescale` is what normalises out: out_scale / sum
  // (out_scale: 1 / keep probability under dropout). A row that saw no key: rescale 0, lse +inf. sink_log2(m, half): the sink of a row, times
  // log2 e, which takes its part of the sum and adds nothing to out; -inf for none: then all is as without, bit by bit.
  template <typename F>
  __device__ __forceinline__ void finish(float (&rescale)[kMTiles][2], float out_scale, const F& sink_log2) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_reduce(row_sum[m][half], [](float a, float b) { return a + b; });
        const float sink = sink_log2(m, half), largest = fmaxf(row_max[m][half], sink);
        const float weight = exp2_approx(row_max[m][half] - largest), total = fmaf(sum, weight, exp2_approx(sink - largest));
        // PERF: exact division and logarithm take some 200 cycles more, at the end of every tile.
        rescale[m][half] = sum == 0.f ? 0.f : out_scale * weight * reciprocal_approx(total);
        row_max[m][half] = sum == 0.f ? INFINITY : (largest + log2_approx(total)) * kLn2;
      }
    }
  }

 private:
  // Ahead, of a lane's columns: beyond, a single key may outweigh those before, and its rounding all others.
  static constexpr float kMostAhead = 256.f;

  // Of one row, one half of an accumulator, in all lanes of its quad.
  template <int kNTiles>
  static __device__ __forceinline__ float largest(const float (&scores)[kNTiles][4], int half) {
    float most = fmaxf(scores[0][half * 2], scores[0][half * 2 + 1]);
#pragma unroll
    for (int n = 1; n < kNTiles; ++n) most = fmaxf(most, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
    return quad_reduce(most, [](float a, float b) { return fmaxf(a, b); });
  }

  // Of the same: scores <- exp2(scores * scale_log2 - shift); returns `sum` and theirs, of this lane's columns.
  template <int kNTiles>
  static __device__ __forceinline__ float exponentials(float (&scores)[kNTiles][4], int half, float scale_log2, float shift, float sum) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      float* pair = scores[n] + half * 2;
      pair[0] = exp2_approx(fmaf(pair[0], scale_log2, -shift));
      pair[1] = exp2_approx(fmaf(pair[1], scale_log2, -shift));
      sum += pair[0] + pair[1];  // half the chain of dependent additions
    }
    return sum;
  }
};

template <int kMTiles, int kDTiles>
__device__ __forceinline__ void scale_rows(float (&out)[kMTiles][kDTiles][4], const float (&factor)[kMTiles][2]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int d = 0; d < kDTiles; ++d)
#pragma unroll
      for (int c = 0; c < 4; ++c) out[m][d][c] *= factor[m][c / 2];
}

}  // namespace hf_flash2
