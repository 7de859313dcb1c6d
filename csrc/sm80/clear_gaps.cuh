// Zeros in rows that no sequence covers (attention/gaps.cuh), by a kernel of its own before a forward or backward on ranges.
#pragma once
#include "attention/gaps.cuh"
#include "launch.h"

namespace hf_flash2::sm80 {

constexpr int kClearThreads = 256;

// Zeros in rows [begin, end) of a batch entry, by a warp.
struct ClearRows {
  __device__ __forceinline__ void operator()(const HfFlash2Tensor& tensor, int batch, int begin, int end, int heads, int columns) const {
    const int pieces = columns / 8;  // of 16 bytes
    for (int token = begin; token < end; ++token) {
      for (int i = threadIdx.x % 32; i < heads * pieces; i += 32) {
        const int head = i / pieces;
        *reinterpret_cast<uint4*>(token_pointer<uint16_t>(tensor, batch, head, token) + (i - head * pieces) * 8) = make_uint4(0, 0, 0, 0);
      }
    }
  }
};

__device__ __forceinline__ void clear_gaps(const HfFlash2ForwardParams& params, int worker, int workers) {
  for_each_forward_gap(params, worker, workers, ClearRows{});
  fill_lse_gaps(params, worker, workers);
}

__device__ __forceinline__ void clear_gaps(const HfFlash2BackwardParams& params, int worker, int workers) {
  for_each_backward_gap(params, worker, workers, ClearRows{});
}

namespace {  // each file has its own

template <typename Params>
__global__ void __launch_bounds__(kClearThreads) clear_gaps_kernel(const __grid_constant__ Params params) {
  constexpr int kWarps = kClearThreads / 32;
  clear_gaps(params, blockIdx.x * kWarps + threadIdx.x / 32, gridDim.x * kWarps);
}

// Launches it where there may be some. `forward`: params, or those of its forward.
template <typename Params>
void launch_clear_gaps(const Params& params, const HfFlash2ForwardParams& forward) {
  if (!may_have_gaps(params)) return;
  launch<clear_gaps_kernel<Params>>(params, 4 * multiprocessors(forward.device), kClearThreads, 0, forward.device, forward.stream,
                                    "attention, gaps");
}

}  // namespace

}  // namespace hf_flash2::sm80
