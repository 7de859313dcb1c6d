// Zeros where a tile of V reaches beyond its sequence: this map clips at the end of the tensor only, and behind a sequence lies another one or
// padding, whose NaN and infinities would survive a multiplication with probability 0. The backward has make_sequence_map() for that.
#pragma once
#include "device/shared_memory.cuh"

namespace hf_flash2::sm90 {

// Clears rows [row_end, kRows) of a tile of panels (64 columns, kRows rows each) with threads 0 .. kThreads of the block. The callers fence
// (async_proxy_fence) and meet at a barrier before anyone multiplies.
template <int kRows, int kPanels, int kThreads>
__device__ __forceinline__ void clear_rows(uint32_t tile, int row_end) {
  constexpr int kChunks = kRows * 8 * kPanels;  // of 16 bytes
#pragma unroll 2
  for (int i = threadIdx.x; i < kChunks; i += kThreads) {
    if (i / 8 % kRows >= row_end) store_shared(tile + i * 16, make_uint4(0, 0, 0, 0));
  }
}

}  // namespace hf_flash2::sm90
