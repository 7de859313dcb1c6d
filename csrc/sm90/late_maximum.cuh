// What is left to do where softmax ran ahead of a maximum that has grown: OnlineSoftmax::update_ahead.
#pragma once
#include "attention/softcap.cuh"
#include "attention/softmax.cuh"
#include "device/mma_sync.cuh"
#include "sm90/forward_task.cuh"

namespace hf_flash2::sm90 {

// Scores of a key block once more, from global memory, by a warp: those from `key` on, all of which there are. `row` is this thread's first
// row in the sequence, counted as in OutputRow. As wgmma leaves them, but for the order of its additions.
template <typename T, int kNTiles>
__device__ __forceinline__ void compute_scores_again(const ForwardArguments& arguments, const ForwardTask& task, int row, int key,
                                                     float (&scores)[kNTiles][4]) {
  const HfFlash2ForwardParams& params = arguments.params;
  const int lane = threadIdx.x % 32, columns = params.head_dim;
  const OutputRow first(arguments, task, row), second(arguments, task, row + 8);
  const T* const q0 = token_pointer<T>(params.q, first.batch, first.head, first.token);
  const T* const q1 = token_pointer<T>(params.q, second.batch, second.head, second.token);
  const T* const keys = token_pointer<T>(params.k, task.batch, arguments.group.quotient(task.head), task.k.start + key + lane / 4);
  const auto load = [&](const T* row, int column, bool valid) {
    return valid && column < columns ? *reinterpret_cast<const uint32_t*>(row + column) : 0u;
  };
#pragma unroll
  for (int i = 0; i < kNTiles * 4; ++i) (&scores[0][0])[i] = 0.f;
#pragma unroll 1
  for (int column = lane % 4 * 2; column < columns + lane % 4 * 2; column += 16) {
    const uint32_t a[4] = {load(q0, column, first.valid), load(q1, column, second.valid), load(q0, column + 8, first.valid),
                           load(q1, column + 8, second.valid)};
    const T* at = keys;
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      mma_m16n8k16<T>(scores[n], a, load(at, column, true), load(at, column + 8, true));
      at += 8 * params.k.token_stride;
      asm volatile("" : "+l"(at));  // else ptxas keeps all these addresses, and spills
    }
  }
}

// By a warp of whose sums some are too large: makes scores, sums and the maximum as if this had been looked for, and says how to rescale
// out. Where exponentials may have overflowed, when the maximum grew by some 100 (base 2) from one block to the next, from the scores:
// those of all rows of the warp, so that here alone one row depends on others, by how its probabilities are rounded.
template <typename T, bool kCapped, int kNTiles>
__device__ __forceinline__ void follow_maximum(const ForwardArguments& arguments, const ForwardTask& task, int row, int key,
                                               float scale_log2, OnlineSoftmax<1>& softmax, float (&scores)[1][kNTiles][4],
                                               float (&sums)[1][2], float (&rescale)[1][2]) {
  constexpr float kMost = 1e30f;
  if (__all_sync(0xffffffffu, sums[0][0] <= kMost && sums[0][1] <= kMost)) {
    softmax.raise_max(scores, sums, rescale);
  } else {
    compute_scores_again<T>(arguments, task, row, key, scores[0]);
    if constexpr (kCapped) cap_scores(scores, arguments.cap.scale);
    softmax.template update<true>(scores, rescale, scale_log2);
    sums[0][0] = sums[0][1] = 0.f;  // added already
  }
}

}  // namespace hf_flash2::sm90
