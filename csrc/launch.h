// Host-side launch helpers shared by both kernel families. Failures are thrown as LaunchError and end at the extern "C" boundary (api.cpp).
#pragma once
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "params.h"

namespace hf_flash2 {

struct LaunchError : std::runtime_error {
  int code;  // HfFlash2Error
  LaunchError(int code, const std::string& message) : std::runtime_error(message), code(code) {}
};

inline void check_cuda(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) throw LaunchError(kErrorCuda, std::string(doing) + ": " + cudaGetErrorString(error));
}

// Lets a kernel use more than 48 KB of shared memory; asked of the runtime once per kernel and device.
inline void allow_shared_memory(const void* kernel, int bytes, int device, std::atomic<uint64_t>& done) {
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (done.load(std::memory_order_relaxed) & bit) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "reserving shared memory");
  done.fetch_or(bit, std::memory_order_relaxed);
}

// Shared memory one block may use, opted in, in bytes. HF_FLASH2_SHARED_MEMORY_LIMIT lowers it, to test the tiles of smaller GPUs.
int shared_memory_per_block(int device);

int multiprocessors(int device);

// 10 * major + minor, e.g. 90 for Hopper.
int compute_capability(int device);

// Whether this library holds machine code, or PTX the driver can compile, for the current device.
bool has_code_for_current_device();

// When a kernel begins: after the one before it in the stream has ended, or while that still runs (grid_dependency.cuh). From sm_90 on.
enum class Start { kInOrder, kEarly };

// Thread blocks, or what they count in 32 bits.
inline void check_count(int64_t count, const char* name) {
  if (count > INT32_MAX - (1 << 20))  // a counter may go beyond what there is, by a step of all that count
    throw LaunchError(kErrorArgument, std::string(name) + ": batch * heads * blocks of max_seqlen must stay below 2^31, got " +
                                          std::to_string(count) + "; give a max_seqlen that is closer to the longest sequence");
}

// One-dimensional launch of kernel(params); does nothing for an empty grid. most_shared_bytes: of all launches of a kernel, where they differ.
// kCluster: thread blocks of a cluster (cluster.cuh).
template <auto kKernel, typename Params, int kCluster = 1>
void launch(const Params& params, int64_t blocks, int threads, int shared_bytes, int device, void* stream, const char* name,
            Start start = Start::kInOrder, int most_shared_bytes = 0) {
  static std::atomic<uint64_t> shared_memory_allowed{0};
  if (blocks == 0) return;
  check_count(blocks, name);
  most_shared_bytes = std::max(most_shared_bytes, shared_bytes);
  if (most_shared_bytes > 48 * 1024)
    allow_shared_memory(reinterpret_cast<const void*>(kKernel), most_shared_bytes, device, shared_memory_allowed);
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (start == Start::kEarly) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (kCluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {kCluster, 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  void* arguments[] = {const_cast<Params*>(&params)};
  check_cuda(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kKernel), arguments), name);
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace hf_flash2
