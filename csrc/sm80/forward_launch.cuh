// Launch of the mma.sync forward: grid and the choice between the plain and the dropout kernel.
#pragma once
#include "launch.h"
#include "sm80/forward.cuh"
#include "sm80/run.h"

namespace hf_flash2::sm80 {

template <int kHeadDim, typename T, bool kDropout>
void launch_forward(const HfFlash2ForwardParams& params) {
  using Tile = ForwardTile<kHeadDim>;
  const int64_t blocks = ceil_div(params.max_seqlen_q, Tile::kBlockM) * params.heads_q * params.batch;
  launch<forward_kernel<kHeadDim, T, kDropout>>(params, blocks, Tile::kNWarps * 32, kForwardSharedBytes<kHeadDim>, params.device,
                                                params.stream, "attention forward");
}

template <int kHeadDim, typename T>
void run_forward(const HfFlash2ForwardParams& params) {
  if (params.dropout_p > 0.f)
    launch_forward<kHeadDim, T, true>(params);
  else
    launch_forward<kHeadDim, T, false>(params);
}

}  // namespace hf_flash2::sm80
