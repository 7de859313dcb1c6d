// What L2 is told about the data of a copy. PTX ISA: "createpolicy".
#pragma once
#include <stdint.h>

namespace hf_flash2 {

// It lets this data go before other data.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}

}  // namespace hf_flash2
