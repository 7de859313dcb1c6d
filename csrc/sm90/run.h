// The entry points of the Hopper family, one instance per head dim and dtype, each compiled in a file of its own (instantiate.py).
#pragma once
#include "params.h"

namespace hf_flash2::sm90 {

template <int kHeadDim, typename T>
void run_forward(const HfFlash2ForwardParams& params);

}  // namespace hf_flash2::sm90
