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
// What lies behind so many bytes begins on a line. PERF: zeros do, as copies from an odd multiple of 16 bytes are slower, and so
// is what waits for the copy engine: a padded backward 2 to 10 %. TUNING.md, "Zeros in gaps".
__host__ __device__ constexpr int whole_lines(int bytes) { return (bytes + 127) / 128 * 128; }
// Where zeros are paced, so many copies at a time: before the next, all of these have been written.
constexpr int kZerosAtOnce = 4;

// By a warp: `for_each(clear)` calls clear(tensor, batch, begin, end, heads, columns) for rows. A thread block has a megabyte or two of them.
// kPaced: spread over the time of the kernel, so that what it loads does not queue behind them.
// PERF: of 32k tokens, 30 % real, zeros took a backward 124 to 158 us when torch filled whole tensors before, now 13 to 55. Pacing brings it 1 to
// 3 %, with 4 KB at a time; a forward nothing, as there it is the way from a multiprocessor to L2 that they take from its loads.
// TUNING.md, "Zeros in gaps".
template <bool kPaced, typename F>
__device__ __forceinline__ void clear_gaps(uint32_t zeros, const F& for_each) {
  for (int i = threadIdx.x % 32 * 16; i < kZeroBytes; i += 32 * 16) store_shared(zeros + i, make_uint4(0, 0, 0, 0));
  async_proxy_fence();
  __syncwarp();
  wait_for_kernel_before();
  if (!elect_one()) return;
  int copies = 0;
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
        for (int bytes = tokens_of_run * heads_of_run * columns * 2; bytes > 0; bytes -= kZeroBytes, run += kZeroBytes) {
          bulk_store_streaming(run, zeros, min(bytes, kZeroBytes));
          if constexpr (kPaced) {
            if (++copies % kZerosAtOnce == 0) {
              bulk_commit();
              bulk_wait_all();
            }
          }
        }
      }
    }
  });
  bulk_commit();
  bulk_wait_all();
}

}  // namespace hf_flash2::sm90
