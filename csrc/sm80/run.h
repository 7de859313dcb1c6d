// The entry points of the mma.sync family, one instance per head dim and dtype, in the files of instantiate.py.
#pragma once
#include <stdint.h>

#include "params.h"

namespace hf_flash2::sm80 {

// The instance for a head dim of dispatch.h: 80 is Hopper's alone.
template <int kHeadDim>
constexpr int kBuilt = kHeadDim == 80 ? 96 : kHeadDim;

template <int kHeadDim, typename T>
void run_forward(const HfFlash2ForwardParams& params);

template <int kHeadDim, typename T>
void run_backward(const HfFlash2BackwardParams& params);

// Bytes of device scratch run_backward needs.
template <int kHeadDim, typename T>
int64_t backward_workspace_bytes(const HfFlash2BackwardParams& params);

}  // namespace hf_flash2::sm80
