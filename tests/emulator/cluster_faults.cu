// A cluster of two blocks that send each other a row in every round, right or wrong in one way: as faults.cu, for tests/test_emulator.py.
#include <cuda_runtime.h>

#include "device/bulk_copy.cuh"
#include "device/cluster.cuh"
#include "device/mbarrier.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"
#include "errors.h"
#include "launch.h"

namespace {

using namespace hf_flash2;

enum Fault {
  kNone,
  kNoProxyFence,    // the row is sent without a fence after the stores
  kNoEmptyWait,     // the next is written and sent before the peer says that it has read the last
  kNoFullWait,      // what the peer sends is read before it has arrived
  kNothingSent,     // by the first block
  kTooFewBytes,     // a row that is no multiple of 16 bytes
  kOrdinaryAccess,  // to an address of the peer
  kNoMeeting,       // at the end: the blocks know that all rows have been read, then the first arrives once more
  kNoArrival,       // a thread waits at the barrier of the cluster and has not arrived
  kUnheard,         // the first block writes its row anew when the copy may well have been made, but nobody has told it
  kUnmetEnd,        // the blocks do not meet at the end
  kUnmetBegin,      // or at the beginning
  kStores,          // none: the threads send the row, 16 bytes each
  kStoresUnheard,   // and do not wait for what the peer says
  kFaults
};

struct Arguments {
  float* out;  // [kRounds, 2, kThreads]
  Fault fault;
};

constexpr int kThreads = 64, kRounds = 3, kRowBytes = kThreads * 4, kSharedBytes = 2 * kRowBytes + 48;

__global__ void __launch_bounds__(kThreads) exchange_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  const Fault fault = arguments.fault;
  const bool stores = fault == kStores || fault == kStoresUnheard;
  const int thread = threadIdx.x, rank = cluster_rank();
  const uint32_t mine = shared_address(memory), received = mine + kRowBytes, full = received + kRowBytes, empty = full + 8,
                 spent = empty + 8, scratch = full + 32;
  if (thread == 0) {
    mbarrier_init(full, 1);
    mbarrier_init(empty, 1);
    mbarrier_init(spent, 1);
    mbarrier_init_fence();
  }
  if (fault == kNoArrival) asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
  if (fault == kUnmetBegin)
    __syncthreads();
  else
    cluster_meet();
  for (int round = 0; round < kRounds; ++round) {
    if (round > 0 && fault == kUnheard && rank == 0) {  // spends time in which others can go on
      if (thread == 0) {
        mbarrier_arrive_expect(spent, 16);
        bulk_load(scratch, arguments.out, 16, spent);
      }
      mbarrier_wait(spent, (round - 1) & 1);
    } else if (round > 0 && fault != kNoEmptyWait && fault != kStoresUnheard) {
      mbarrier_wait(empty, (round - 1) & 1);
    }
    const auto element = [&](int thread) { return float(round * 1000 + rank * 100 + thread); };
    const uint32_t own = fault == kOrdinaryAccess ? peer_address(mine) : mine;
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(own + thread * 4), "f"(element(thread)) : "memory");
    if (fault != kNoProxyFence) async_proxy_fence();
    __syncthreads();
    if (thread == 0) {
      mbarrier_arrive_expect(full, kRowBytes);
      if (!stores && (fault != kNothingSent || rank == 1))
        bulk_copy_to_peer(peer_address(received), mine, fault == kTooFewBytes ? kRowBytes - 8 : kRowBytes, peer_address(full));
    }
    if (stores && thread % 4 == 0) {
      const float four[4] = {element(thread), element(thread + 1), element(thread + 2), element(thread + 3)};
      store_to_peer(peer_address(received) + thread * 4, four, peer_address(full));
    }
    if (fault != kNoFullWait) mbarrier_wait(full, round & 1);
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(received + thread * 4) : "memory");
    arguments.out[(round * 2 + rank) * kThreads + thread] = x;
    __syncthreads();
    if (thread == 0) peer_mbarrier_arrive(peer_address(empty));
  }
  if (fault == kNoMeeting) mbarrier_wait(empty, (kRounds - 1) & 1);
  if (fault == kNoMeeting && rank == 0 && thread == 0) peer_mbarrier_arrive(peer_address(empty));
  if (fault != kNoMeeting && fault != kUnmetEnd) cluster_meet();
}

}  // namespace

// Runs the kernel with one fault in so many clusters, all of which write the same out; returns what went wrong, or an empty text.
extern "C" __attribute__((visibility("default"))) const char* run_cluster_with_fault(int fault, float* out, int blocks) {
  static std::string error;
  error.clear();
  try {
    launch<exchange_kernel, Arguments, 2>({out, static_cast<Fault>(fault)}, blocks, kThreads, kSharedBytes, 0, nullptr, "exchange");
  } catch (const LaunchError& launch_error) {
    error = launch_error.what();
  }
  return error.c_str();
}
