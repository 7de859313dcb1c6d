// The smallest kernel of the library, compiled for the same architectures as the others: asking for its attributes tells whether this
// device can run them.
#include "launch.h"

namespace hf_flash2 {

namespace {
__global__ void probe_kernel() {}
}  // namespace

bool has_code_for_current_device() {
  cudaFuncAttributes attributes;
  const bool found = cudaFuncGetAttributes(&attributes, probe_kernel) == cudaSuccess;
  if (!found) cudaGetLastError();  // clear it: the next launch must not report this one
  return found;
}

}  // namespace hf_flash2
