// Zeros in rows that no sequence covers (attention/gaps.cuh), by the bulk engine: one thread of a kernel that computes has them written.
#pragma once
#include "attention/gaps.cuh"
#include "device/bulk_copy.cuh"
#include "device/grid_dependency.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"

namespace hf_flash2::sm90 {

// Of shared memory, behind all else, and only where there may be gaps: with 1 KB more, fewer thread blocks or less L1 may be left.
constexpr int kZeroBytes = 1024;

// By a warp: `for_each(clear)` calls clear(tensor, batch, begin, end, heads, columns) for rows.
// PERF: padded against packed, 32k tokens of which sequences cover 30 %, causal, d 64 and 128, one H200: a forward took 36 to 46 us more, a
// backward 124 to 158, when torch filled whole tensors before; now -2 to 14 and 13 to 55. With ordinary stores by one warp of each thread
// block a backward took 215 to 660 us more, with those of the first kernel of the backward 72 to 110. Zeros that leave L2 first (evict_first),
// or 8 or 32 KB at a time: level.
template <typename F>
__device__ __forceinline__ void clear_gaps(uint32_t zeros, const F& for_each) {
  for (int i = threadIdx.x % 32 * 16; i < kZeroBytes; i += 32 * 16) store_shared(zeros + i, make_uint4(0, 0, 0, 0));
  async_proxy_fence();
  __syncwarp();
  wait_for_kernel_before();
  if (!elect_one()) return;
  for_each([&](const HfFlash2Tensor& tensor, int batch, int begin, int end, int heads, int columns) {
    // What lies side by side is one run.
    const int heads_of_run = tensor.head_stride == columns ? heads : 1;
    const int tokens_of_run = heads_of_run == heads && tensor.token_stride == heads * columns ? end - begin : 1;
#pragma unroll 1
    for (int token = begin; token < end; token += tokens_of_run) {
#pragma unroll 1
      for (int head = 0; head < heads; head += heads_of_run) {
        char* run = reinterpret_cast<char*>(token_pointer<uint16_t>(tensor, batch, head, token));
#pragma unroll 1
        for (int bytes = tokens_of_run * heads_of_run * columns * 2; bytes > 0; bytes -= kZeroBytes, run += kZeroBytes)
          bulk_store(run, zeros, min(bytes, kZeroBytes));
      }
    }
  });
  bulk_commit();
  bulk_wait_all();
}

}  // namespace hf_flash2::sm90
