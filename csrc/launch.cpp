// Launches of kernels, and what went wrong with them: see launch.h.
#include "launch.h"

#include "errors.h"

namespace hf_flash2 {

void check_cuda(cudaError_t error, const char* doing) {
  if (error != cudaSuccess) throw LaunchError(kErrorCuda, std::string(doing) + ": " + cudaGetErrorString(error));
}

void fail_launch(int code, const char* message) { throw LaunchError(code, message); }
void fail_launch(int code, const char* message, int number) { throw LaunchError(code, message + std::to_string(number)); }

void check_count(int64_t count, const char* name) {
  if (count > INT32_MAX - (1 << 20))  // a counter may go beyond what there is, by a step of all that count
    throw LaunchError(kErrorArgument, std::string(name) + ": batch * heads * blocks of max_seqlen must stay below 2^31, got " +
                                          std::to_string(count) + "; give a max_seqlen that is closer to the longest sequence");
}

// Lets a kernel use more than 48 KB of shared memory; asked of the runtime once per kernel and device.
static void allow_shared_memory(const Kernel& kernel, int bytes, int device) {
  const uint64_t bit = uint64_t{1} << (device % 64);
  if (__atomic_load_n(kernel.allowed, __ATOMIC_RELAXED) & bit) return;
  check_cuda(cudaFuncSetAttribute(kernel.function, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "reserving shared memory");
  __atomic_fetch_or(kernel.allowed, bit, __ATOMIC_RELAXED);
}

void launch_kernel(const Kernel& kernel, const void* params, int64_t blocks, int threads, int shared_bytes, int device, void* stream,
                   const char* name, Start start, int most_shared_bytes, bool wants_l1) {
  if (blocks == 0) return;
  check_count(blocks, name);
  most_shared_bytes = std::max(most_shared_bytes, shared_bytes);
  if (most_shared_bytes > 48 * 1024) allow_shared_memory(kernel, most_shared_bytes, device);
  cudaLaunchAttribute attributes[3] = {};
  unsigned count = 0;
  if (start == Start::kEarly) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (kernel.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(kernel.cluster), 1, 1};
  }
  if (wants_l1) {
    attributes[count].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[count++].val.sharedMemCarveout = cudaSharedmemCarveoutMaxL1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = count;
  void* arguments[] = {const_cast<void*>(params)};
  check_cuda(cudaLaunchKernelExC(&config, kernel.function, arguments), name);
}

}  // namespace hf_flash2
