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
// Where zeros are paced, so many times as much is under way at a time.
constexpr int kZeroGroups = 2;

// By a warp: `for_each(clear)` calls clear(tensor, batch, begin, end, heads, columns) for rows. A thread block has a megabyte or two of them.
// kPaced: spread over the time of the kernel, so that what it loads does not queue behind them.
// PERF: padded against packed, 32k tokens of which sequences cover 30 %, causal, d 64 and 128, one H200: a forward took 36 to 46 us more, a
// backward 124 to 158, when torch filled whole tensors before; then, all zeros at once, -2 to 14 and 13 to 55. With ordinary stores by one
// warp of each thread block a backward took 215 to 660 us more, with those of the first kernel of the backward 72 to 110. A backward is faster
// with zeros that are paced and leave L2 first, at 2k, 4k, 8k, TFLOP/s: d 64 301 384 460 -> 305 392 469, d 128 329 441 509 -> 336 455 517, with
// 4 KB at a time; 32 are 0.5 to 1.5 % slower, 16 and 8 level, 2 are 0 to 0.8 % faster, 1 is 8 % slower at 2k. Without any zeros it is 337 414
// 477 and 386 486 537: what is left is memory traffic, 282 MB beside 480. A forward, 2k, 4k, 8k, one H100: d 64 305 405 516 -> 297 408 522,
// d 128 338 483 629 -> 336 484 632 with 4 KB at a time, 8 and 16 the same; 353 428 535 and 400 523 652 without any. Zeros that do not wait for
// the first kernel: level. Zeros all to one place, which stay in L2, cost a forward as much as these: it is the way from a multiprocessor to L2
// that they take from its loads, some 26 bytes a cycle, and pauses between them do not help (one H200, d 128, padded to 2k, 4k, 8k 399 530 630, so
// 403 530 622, paced 391 528 625, by ordinary stores of three warps 375 504 601, without any 443 554 636; 8, 16, 32 KB each time the loader has
// asked for a block: 2k -13 -1 1 %, 8k -1 -1 -1).
template <bool kPaced, typename F>
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
        for (int bytes = tokens_of_run * heads_of_run * columns * 2; bytes > 0; bytes -= kZeroBytes, run += kZeroBytes) {
          bulk_store_streaming(run, zeros, min(bytes, kZeroBytes));
          if constexpr (kPaced) {
            bulk_commit();
            bulk_wait<kZeroGroups - 1>();
          }
        }
      }
    }
  });
  bulk_commit();
  bulk_wait_all();
}

}  // namespace hf_flash2::sm90
