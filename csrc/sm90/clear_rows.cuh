// Zeros where a tile of V in a page reaches beyond its sequence: the map of a paged cache clips at the end of a page only, and behind a sequence
// lies what was there before, whose NaN and infinities would survive a multiplication with probability 0. Elsewhere make_sequence_map() does that.
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
