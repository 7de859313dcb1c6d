// Turns between thread blocks, counted in global memory. PTX ISA: "ld.acquire", "red.release".
#pragma once
#include <stdint.h>

namespace hf_flash2 {

// Waits until at least `turns` turns have been passed; what the passers wrote before can be seen. Called by one thread.
__device__ __forceinline__ void semaphore_wait(const int32_t* semaphore, int turns) {
  int value;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(semaphore) : "memory");
  } while (value < turns);
}

__device__ __forceinline__ void semaphore_pass(int32_t* semaphore) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(semaphore) : "memory");
}

}  // namespace hf_flash2
