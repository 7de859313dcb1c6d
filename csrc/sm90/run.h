// The entry points of the Hopper family, one instance per head dim and dtype, in the files of instantiate.py.
#pragma once
#include <stdint.h>

#include "params.h"

namespace hf_flash2::sm90 {

// Above, 1 by the keep probability would leave too little of what fp16 holds to P (backward_wide.cuh).
constexpr float kMostDropout = 0.9f;

template <int kHeadDim, typename T>
void run_forward(const HfFlash2ForwardParams& params);

// Bytes of device scratch run_forward needs; mostly 0.
template <int kHeadDim, typename T>
int64_t forward_workspace_bytes(const HfFlash2ForwardParams& params);

template <int kHeadDim, typename T>
void run_backward(const HfFlash2BackwardParams& params);

// Bytes of device scratch run_backward needs.
template <int kHeadDim, typename T>
int64_t backward_workspace_bytes(const HfFlash2BackwardParams& params);

}  // namespace hf_flash2::sm90
