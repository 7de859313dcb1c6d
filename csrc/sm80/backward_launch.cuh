// Launch of the mma.sync backward: preprocess, main kernel, conversion of dQ; and the choice of tile variant.
#pragma once
#include "attention/preprocess.cuh"
#include "attention/sinks.cuh"
#include "launch.h"
#include "sm80/backward.cuh"
#include "sm80/clear_gaps.cuh"
#include "sm80/run.h"

namespace hf_flash2::sm80 {

template <int kHeadDim, typename T, TileVariant kVariant>
void launch_backward(const HfFlash2BackwardParams& params) {
  using Shape = BackwardShape<kHeadDim, kVariant>;
  const HfFlash2ForwardParams& forward = params.forward;
  const int64_t query_blocks = ceil_div(forward.max_seqlen_q, Shape::kBlockM) * forward.heads_q * forward.batch;
  const int64_t key_blocks = ceil_div(forward.max_seqlen_k, Shape::kBlockN) * forward.heads_k * forward.batch;
  launch_clear_gaps(params, forward);
  const PreprocessArguments prepared{params, {nullptr}, 0, 1};
  launch<preprocess_kernel<kSm80, Shape::kBlockM, kHeadDim, true, T>>(prepared, query_blocks, kPreprocessThreads, 0, forward.device,
                                                                      forward.stream, "attention backward, preprocess");
  if (forward.dropout_p > 0.f || forward.softcap > 0.f)
    launch<backward_kernel<kHeadDim, T, kVariant, true>>(params, key_blocks, Shape::kThreads, Shape::kSharedBytes, forward.device,
                                                         forward.stream, "attention backward");
  else
    launch<backward_kernel<kHeadDim, T, kVariant, false>>(params, key_blocks, Shape::kThreads, Shape::kSharedBytes, forward.device,
                                                          forward.stream, "attention backward");
  launch<convert_dq_kernel<kHeadDim, T, kVariant>>(params, query_blocks, Shape::kThreads, 0, forward.device, forward.stream,
                                                   "attention backward, dq");
  if (params.dsinks != nullptr)
    launch<sink_gradient_kernel<kSm80, Shape::kBlockM, kHeadDim>>(params, forward.heads_q, kSinkThreads, 0, forward.device, forward.stream,
                                                                  "attention backward, sinks");
}

template <int kHeadDim>
bool large_variant_fits(int device) {
  return shared_memory_per_block(device) >= BackwardShape<kHeadDim, TileVariant::kLarge>::kSharedBytes;
}

template <int kHeadDim, typename T>
int64_t backward_workspace_bytes(const HfFlash2BackwardParams& params) {
  const int block_m = large_variant_fits<kHeadDim>(params.forward.device) ? BackwardTile<kHeadDim, TileVariant::kLarge>::kBlockM
                                                                          : BackwardTile<kHeadDim, TileVariant::kSmall>::kBlockM;
  return Workspace::bytes(params.forward, block_m, kHeadDim);
}

template <int kHeadDim, typename T>
void run_backward(const HfFlash2BackwardParams& params) {
  if (large_variant_fits<kHeadDim>(params.forward.device))
    launch_backward<kHeadDim, T, TileVariant::kLarge>(params);
  else
    launch_backward<kHeadDim, T, TileVariant::kSmall>(params);
}

}  // namespace hf_flash2::sm80
