// Philox 4x32 with 7 rounds: counter-based random numbers (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
// The same numbers as _philox in hf_flash2/reference.py.
#pragma once
#include <stdint.h>

namespace hf_flash2 {

__device__ __forceinline__ uint4 philox4x32(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 7; ++round) {
    const uint32_t hi0 = __umulhi(counter.x, 0xD2511F53u), lo0 = counter.x * 0xD2511F53u;
    const uint32_t hi1 = __umulhi(counter.z, 0xCD9E8D57u), lo1 = counter.z * 0xCD9E8D57u;
    counter = make_uint4(hi1 ^ counter.y ^ key.x, lo1, hi0 ^ counter.w ^ key.y, lo0);
    key.x += 0x9E3779B9u;
    key.y += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace hf_flash2
