// Barriers of some of the warps of a thread block, by number; 0 is that of __syncthreads(). PTX ISA: "bar".
#pragma once

namespace hf_flash2 {

__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace hf_flash2
