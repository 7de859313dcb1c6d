// The smallest kernel of the library, compiled for the same architectures as the others: asking for its attributes tells whether this
// device can run them, and if not, why.
#include "launch.h"

namespace hf_flash2 {

namespace {
__global__ void probe_kernel() {}
}  // namespace

Code code_for_current_device() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
  if (error == cudaSuccess) return Code::kRuns;
  cudaGetLastError();  // clear it: the next launch must not report this one
  if (error == cudaErrorUnsupportedPtxVersion) return Code::kNewerPtx;
  if (error != cudaErrorNoKernelImageForDevice && error != cudaErrorInvalidDeviceFunction) check_cuda(error, "looking for kernels");
  return Code::kNone;
}

}  // namespace hf_flash2
