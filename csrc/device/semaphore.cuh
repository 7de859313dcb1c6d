// Turns between thread blocks, counted in global memory. PTX ISA: "ld.acquire", "red.release", "atom.acquire", "atom.relaxed".
#pragma once
#include <stdint.h>

namespace hf_flash2 {

// How many turns have been passed; what the passers wrote before can be seen.
__device__ __forceinline__ int semaphore_read(const int32_t* semaphore) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(semaphore) : "memory");
  return value;
}

// Waits until at least `turns` turns have been passed; what the passers wrote before can be seen. Called by one thread.
__device__ __forceinline__ void semaphore_wait(const int32_t* semaphore, int turns) {
  while (semaphore_read(semaphore) < turns) {
  }
}

// Passes on one turn, or kEveryTurn there may be.
__device__ __forceinline__ void semaphore_pass(int32_t* semaphore, int turns = 1) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(semaphore), "r"(turns) : "memory");
}
constexpr int kEveryTurn = 1 << 30;

// Where turns go to who comes first: the number that took one before, plus kEveryTurn once that has been passed; then, what the passer wrote
// before can be seen.
__device__ __forceinline__ int semaphore_take(int32_t* semaphore) {
  int before;
  asm volatile("atom.acquire.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(semaphore) : "memory");
  return before;
}

// The next number, from 0 on; says nothing about what others have written.
__device__ __forceinline__ int take_next(int32_t* counter) {
  int before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

}  // namespace hf_flash2
