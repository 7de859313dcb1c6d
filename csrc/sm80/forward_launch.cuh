// Launch of the mma.sync forward: grid, the choice of tile variant and that between the plain kernel and the one with extras.
#pragma once
#include "launch.h"
#include "sm80/clear_gaps.cuh"
#include "sm80/forward.cuh"
#include "sm80/run.h"

namespace hf_flash2::sm80 {

template <int kHeadDim, typename T, TileVariant kVariant>
void launch_forward(const HfFlash2ForwardParams& params) {
  using Shape = ForwardShape<kHeadDim, kVariant>;
  const int64_t blocks = ceil_div(params.max_seqlen_q, Shape::kBlockM) * params.heads_q * params.batch;
  launch_clear_gaps(params, params);
  if (params.dropout_p > 0.f || params.softcap > 0.f || params.block_table != nullptr)
    launch<forward_kernel<kHeadDim, T, kVariant, true>>(params, blocks, Shape::kThreads, Shape::kSharedBytes, params.device, params.stream,
                                                        "attention forward");
  else
    launch<forward_kernel<kHeadDim, T, kVariant, false>>(params, blocks, Shape::kThreads, Shape::kSharedBytes, params.device, params.stream,
                                                         "attention forward");
}

template <int kHeadDim, typename T>
void run_slice(const HfFlash2ForwardParams& params) {
  using Large = ForwardShape<kHeadDim, TileVariant::kLarge>;
  if constexpr (kForwardHasSmall<kHeadDim>) {
    if (shared_memory_per_block(params.device) < Large::kSharedBytes * Large::kBlocksPerSm)
      return launch_forward<kHeadDim, T, TileVariant::kSmall>(params);
  }
  launch_forward<kHeadDim, T, TileVariant::kLarge>(params);
}

// Columns of v and out by slices of what a launch computes; all write the same lse.
template <int kHeadDim, typename T>
void run_forward(const HfFlash2ForwardParams& params) {
  HfFlash2ForwardParams slice = params;
  for (int column = 0; column < params.head_dim_v; column += kMostValueColumns) {
    slice.head_dim_v = std::min(params.head_dim_v - column, kMostValueColumns);
    slice.v.data = static_cast<uint16_t*>(params.v.data) + column;
    slice.out.data = static_cast<uint16_t*>(params.out.data) + column;
    run_slice<kHeadDim, T>(slice);
  }
}

}  // namespace hf_flash2::sm80
