// The launch of the cross-entropy (cross_entropy.cu).
#pragma once
#include "params.h"

namespace hf_flash2 {

void run_cross_entropy(const HfFlash2CrossEntropyParams& params);

}  // namespace hf_flash2
