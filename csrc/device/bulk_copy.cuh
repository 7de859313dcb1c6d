// Flat copies by the bulk engine (sm_90): contiguous bytes, no tensor map. Addresses and sizes are multiples of 16 bytes; one thread issues.
// PTX ISA: "cp.async.bulk", "cp.reduce.async.bulk", "cp.async.bulk.wait_group".
#pragma once
#include <stdint.h>

#include "device/cache_policy.cuh"

namespace hf_flash2 {

// Copies `bytes` from global into shared memory and counts them on `barrier`.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination), "l"(source),
               "r"(bytes), "r"(barrier)
               : "memory");
}

// Copies `bytes` from shared to global memory. Joins the group that bulk_commit() closes.
__device__ __forceinline__ void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes) : "memory");
}

// The same; L2 lets it go before other things.
__device__ __forceinline__ void bulk_store_streaming(void* destination, uint32_t source, uint32_t bytes) {
  const uint64_t policy = evict_first_policy();
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(destination), "r"(source), "r"(bytes),
               "l"(policy)
               : "memory");
}

// Adds `bytes` of floats from shared to global memory. Joins the group that bulk_commit() closes.
__device__ __forceinline__ void bulk_reduce_add(float* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's newest groups still read their shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all groups of this thread are complete: others can see what they have written.
__device__ __forceinline__ void bulk_wait_all() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(0) : "memory"); }

// Orders ordinary accesses to global memory, before and after, with those of the bulk engine.
__device__ __forceinline__ void bulk_global_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

}  // namespace hf_flash2
