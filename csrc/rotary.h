// The launch of the rotary embedding (rotary.cu).
#pragma once
#include "params.h"

namespace hf_flash2 {

void run_rotary(const HfFlash2RotaryParams& params);

}  // namespace hf_flash2
