// Asynchronous 16-byte copies from global to shared memory (sm_80 and later). PTX ISA: "cp.async", non-bulk.
#pragma once
#include "device/shared_memory.cuh"

namespace hf_flash2 {

// Copies 16 bytes, or writes 16 zero bytes when `valid` is false (the source is then not read).
__device__ __forceinline__ void cp_async_16(uint32_t destination, const void* source, bool valid) {
  const int source_bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(source_bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups are still in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace hf_flash2
