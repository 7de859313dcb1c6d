// What the two thread blocks of a cluster exchange that have a task together: its number, and parts of scores.
#pragma once
#include "device/bulk_copy.cuh"
#include "device/cluster.cuh"
#include "device/grid_dependency.cuh"
#include "device/mbarrier.cuh"
#include "device/semaphore.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"

namespace hf_flash2::sm90 {

constexpr uint32_t kUnitBytes = 16;  // the smallest copy

// By one thread of each: the first takes units, and hands their numbers to its peer. `number` counts them from 0 on. Shared: where they arrive,
// unit(), and their barriers, unit_full() and unit_empty().
template <typename Shared>
__device__ __forceinline__ int unit_of_cluster(const Shared& shared, int unit, uint32_t number) {
  if (cluster_rank() == 0) {
    mbarrier_wait(shared.unit_empty(), (number & 1) ^ 1);
    store_shared(shared.unit(), make_uint4(unit, 0, 0, 0));
    async_proxy_fence();
    bulk_copy_to_peer(peer_address(shared.unit()), shared.unit(), kUnitBytes, peer_address(shared.unit_full()));
    return unit;
  }
  mbarrier_arrive_expect(shared.unit_full(), kUnitBytes);
  mbarrier_wait(shared.unit_full(), number & 1);
  unit = static_cast<int>(load_shared_uint4(shared.unit()).x);
  peer_mbarrier_arrive(peer_address(shared.unit_empty()));
  return unit;
}

// The next unit of a worker, a thread block or a cluster of kBlocks: from `counter`, which the kernel before clears, numbers from first() on. By
// one thread of each block. taken: so many so far.
template <int kBlocks, typename Shared, typename First>
__device__ __forceinline__ int take_unit(const Shared& shared, int32_t* counter, const First& first, uint32_t& taken) {
  int unit = 0;
  if (kBlocks == 1 || cluster_rank() == 0) {
    wait_for_kernel_before();
    unit = first() + take_next(counter);
  }
  if constexpr (kBlocks > 1) unit = unit_of_cluster(shared, unit, taken++);
  return unit;
}

// Where thread blocks have half of the columns each: of S, or of dP, a warpgroup has in `part` what its columns make. It sends that to its peer,
// and adds what comes from there, each thread that of its own elements. The sum is the same in both blocks. Steps are counted from 0 on.
// PERF: the first half is added while the second is under way: forward 2 %, backward 0 to 2. TUNING.md, "Forward tiles".
template <int kTiles>
struct PartOfPeer {
  static constexpr int kHalves = 2;
  static constexpr uint32_t kTileBytes = 128 * 16, kBytes = kTiles * kTileBytes;
  uint32_t buffer;
  uint32_t full;   // one for each half, side by side: it has arrived
  uint32_t empty;  // the peer has read what came from here, each warp

  __device__ __forceinline__ void make_barriers() const {
    for (int half = 0; half < kHalves; ++half) mbarrier_init(full + half * 8, 1);
    mbarrier_init(empty, 4);
  }

  __device__ __forceinline__ void exchange(float (&part)[kTiles][4], uint32_t step) const {
    constexpr int kOfHalf = kTiles / kHalves;
    const uint32_t own = buffer + threadIdx.x % 128 * 16, parity = step & 1;
    const uint32_t peer_own = peer_address(own), peer_full = peer_address(full);
    if (threadIdx.x % 128 == 0) {
      for (int half = 0; half < kHalves; ++half) mbarrier_arrive_expect(full + half * 8, kBytes / kHalves);
    }
    mbarrier_wait(empty, parity ^ 1);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) store_to_peer(peer_own + n * kTileBytes, part[n], peer_full + n / kOfHalf * 8);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      if (n % kOfHalf == 0) mbarrier_wait(full + n / kOfHalf * 8, parity);
      float of_peer[4];
      load_shared(own + n * kTileBytes, of_peer);
#pragma unroll
      for (int c = 0; c < 4; ++c) part[n][c] += of_peer[c];
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) peer_mbarrier_arrive(peer_address(empty));
  }
};

}  // namespace hf_flash2::sm90
