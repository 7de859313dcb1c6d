// The launch of what writes new keys and values into a cache (append.cu).
#pragma once
#include "params.h"

namespace hf_flash2 {

void run_append(const HfFlash2AppendParams& params);

}  // namespace hf_flash2
