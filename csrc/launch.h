// Host-side launch helpers shared by both kernel families. Failures are thrown (errors.h) and end at the extern "C" boundary (api.cpp).
// PERF: nothing here needs strings or exceptions, which take a kernel's file half a second to read, two or three times.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>

#include "params.h"

namespace hf_flash2 {

void check_cuda(cudaError_t error, const char* doing);

// Throws, with the number behind the message.
[[noreturn]] void fail_launch(int code, const char* message);
[[noreturn]] void fail_launch(int code, const char* message, int number);

// Shared memory one block may use, opted in, in bytes. HF_FLASH2_SHARED_MEMORY_LIMIT lowers it, to test the tiles of smaller GPUs.
int shared_memory_per_block(int device);

int multiprocessors(int device);

// 10 * major + minor, e.g. 90 for Hopper.
int compute_capability(int device);

// What this library holds for the current device: machine code or PTX that runs there, PTX alone and of a newer CUDA than the driver compiles,
// or nothing. Throws where the device does not answer.
enum class Code { kRuns, kNewerPtx, kNone };
Code code_for_current_device();

// When a kernel begins: after the one before it in the stream has ended, or while that still runs (grid_dependency.cuh). From sm_90 on.
enum class Start { kInOrder, kEarly };

// Thread blocks, or what they count in 32 bits.
void check_count(int64_t count, const char* name);

struct Kernel {
  const void* function;
  int cluster;        // thread blocks of a cluster (cluster.cuh)
  uint64_t* allowed;  // a bit for each device on which it may use more than 48 KB of shared memory
};

// One-dimensional launch; does nothing for an empty grid. most_shared_bytes: of all launches of a kernel, where they differ. wants_l1: all there is,
// in place of the shared memory that the kernel before it took.
void launch_kernel(const Kernel& kernel, const void* params, int64_t blocks, int threads, int shared_bytes, int device, void* stream,
                   const char* name, Start start, int most_shared_bytes, bool wants_l1);

// Of kernel(params).
template <auto kKernel, typename Params, int kCluster = 1>
void launch(const Params& params, int64_t blocks, int threads, int shared_bytes, int device, void* stream, const char* name,
            Start start = Start::kInOrder, int most_shared_bytes = 0, bool wants_l1 = false) {
  static uint64_t allowed = 0;
  launch_kernel({reinterpret_cast<const void*>(kKernel), kCluster, &allowed}, &params, blocks, threads, shared_bytes, device, stream, name,
                start, most_shared_bytes, wants_l1);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace hf_flash2
