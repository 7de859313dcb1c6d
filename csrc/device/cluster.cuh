// Clusters of two thread blocks: each reaches the shared memory of its peer (sm_90). PTX ISA: "mapa", "barrier.cluster", "mbarrier.arrive",
// "cp.async.bulk". Grids are one-dimensional, so blocks 2i and 2i + 1 are a cluster.
#pragma once
#include <stdint.h>

namespace hf_flash2 {

__device__ __forceinline__ int cluster_rank() { return blockIdx.x % 2; }

// Where the peer has what lies at this address of shared memory here.
__device__ __forceinline__ uint32_t peer_address(uint32_t address) {
  uint32_t peer;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(peer) : "r"(address), "r"(cluster_rank() ^ 1));
  return peer;
}

// All threads of both blocks that have not ended meet.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at a barrier of the peer, to say that something there may be overwritten: of what this thread wrote it says nothing.
// PERF: .release.cluster would have it wait for all it wrote or added to global memory (MEMBAR.ALL.GPU).
__device__ __forceinline__ void peer_mbarrier_arrive(uint32_t peer_barrier) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer_barrier) : "memory");
}

// Stores 16 bytes in shared memory of the peer and counts them on a barrier there. PTX ISA: "st.async".
__device__ __forceinline__ void store_to_peer(uint32_t peer_destination, const float (&x)[4], uint32_t peer_barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(peer_destination),
               "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "r"(peer_barrier)
               : "memory");
}

// Copies `bytes` to shared memory of the peer and counts them on a barrier there; by one thread. A multiple of 16 bytes, as the addresses are.
__device__ __forceinline__ void bulk_copy_to_peer(uint32_t peer_destination, uint32_t source, uint32_t bytes, uint32_t peer_barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(peer_destination),
               "r"(source), "r"(bytes), "r"(peer_barrier)
               : "memory");
}

}  // namespace hf_flash2
