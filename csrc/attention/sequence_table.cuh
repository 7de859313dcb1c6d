// A table of the blocks there are of sequences whose lengths only the device may know, numbered sequence by sequence, those of one head: where
// these are many and short, and thread blocks that take one block after another would pass too many of them.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>

#include "attention/sequence.cuh"

namespace hf_flash2 {

// Sequences in the order of batch_in_order(). blocks_of(batch): of a sequence.
template <typename F>
struct CountedSequences {
  int batches, first;
  F blocks_of;

  __device__ __forceinline__ int batch(int index) const { return batch_in_order(index, first); }
  // Never negative, as lengths of wrong cu_seqlens may be: where these say that blocks are, something is written.
  __device__ __forceinline__ int blocks(int index) const { return index < batches ? max(0, blocks_of(batch(index))) : 0; }
};
template <typename F>
__device__ __forceinline__ CountedSequences<F> count_sequences(int batches, int first, const F& blocks_of) {
  return {batches, first, blocks_of};
}

// A sequence, the number of its first block, and how many it has: none behind the last.
struct CountedSequence {
  int batch, first, blocks;
};

// Of this lane and those before it, by a warp.
__device__ __forceinline__ int sum_of_lanes(int x) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int before = __shfl_up_sync(0xffffffffu, x, offset);
    x += static_cast<int>(threadIdx.x % 32) >= offset ? before : 0;
  }
  return x;
}

// The sequence of block `number`, by a warp that counts to it.
template <typename F>
__device__ __forceinline__ CountedSequence count_to(int number, const CountedSequences<F>& sequences) {
  int before = 0;
#pragma unroll 1
  for (int at = 0; at < sequences.batches; at += 32) {
    const int blocks = sequences.blocks(at + static_cast<int>(threadIdx.x % 32)), end = before + sum_of_lanes(blocks);
    const uint32_t behind = __ballot_sync(0xffffffffu, number < end);
    if (behind != 0) {
      const int found = __ffs(static_cast<int>(behind)) - 1;
      return {sequences.batch(at + found), __shfl_sync(0xffffffffu, end - blocks, found), __shfl_sync(0xffffffffu, blocks, found)};
    }
    before = __shfl_sync(0xffffffffu, end, 31);
  }
  return {0, 0, 0};
}

struct SequenceTable {
  int2* entries;  // null: no table. How many blocks there are; then of each its sequence, and the number of the first block of that

  // How many blocks there may be. of_longest: of the longest sequence; of_tokens: whole ones of all tokens, if packed, and each sequence has a part of
  // one more.
  static int most_blocks(const HfFlash2Sequences& sequences, int batches, int64_t of_longest, int64_t of_tokens) {
    const int64_t all = batches * of_longest;
    return static_cast<int>(sequences.cu_seqlens != nullptr ? std::min(all, of_tokens + batches) : all);
  }
  // Whether counting on from one sequence to the next would take longer. most_blocks: that there may be; heads: of each; workers: who take one
  // after another.
  // PERF: that takes one thread some 170 cycles a sequence. TUNING.md, "Many short sequences".
  static bool pays(int batches, int most_blocks, int heads, int workers) {
    constexpr double kMany = 8;
    const double blocks = (static_cast<double>(batches) + most_blocks) / 2;  // about
    return workers * static_cast<double>(batches) > kMany * heads * blocks;
  }
  static int64_t bytes(int64_t most_blocks) { return (1 + most_blocks) * sizeof(int2); }

  // By a thread block of kThreads. most_blocks: that there is space for.
  template <int kThreads, typename F>
  __device__ __forceinline__ void make(int most_blocks, const CountedSequences<F>& sequences) const {
    constexpr int kWarps = kThreads / 32, kFew = 4;
    static_assert(kWarps <= 32, "a lane for each");
    __shared__ int of_warps[kWarps];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int before = 0;  // blocks of the sequences before `at`
    for (int at = 0; at < sequences.batches; at += kThreads) {
      const int index = at + static_cast<int>(threadIdx.x), blocks = sequences.blocks(index);
      int end = before + sum_of_lanes(blocks);
      if (lane == 31) of_warps[warp] = end - before;
      __syncthreads();
      const int to_warp = sum_of_lanes(lane < kWarps ? of_warps[lane] : 0);
      __syncthreads();  // all have read them
      end += warp > 0 ? __shfl_sync(0xffffffffu, to_warp, warp - 1) : 0;
      before += __shfl_sync(0xffffffffu, to_warp, 31);
      const int batch = sequences.batch(index), first = end - blocks, last = min(end, most_blocks);
      for (int block = first; block < min(last, first + kFew); ++block) entries[1 + block] = make_int2(batch, first);
      for (uint32_t rest = __ballot_sync(0xffffffffu, blocks > kFew); rest != 0; rest &= rest - 1) {  // of each by the warp
        const int other = __ffs(static_cast<int>(rest)) - 1, from = __shfl_sync(0xffffffffu, first, other);
        const int2 entry = make_int2(__shfl_sync(0xffffffffu, batch, other), from);
        const int to = __shfl_sync(0xffffffffu, last, other);
        for (int block = from + kFew + lane; block < to; block += 32) entries[1 + block] = entry;
      }
    }
    if (threadIdx.x == 0) entries[0] = make_int2(min(before, most_blocks), 0);
  }

  // The sequence of block `number`. By who has waited for the kernel that made the table. count(batch): blocks of a sequence.
  template <typename F>
  __device__ __forceinline__ CountedSequence find(int number, const F& count) const {
    if (number >= entries[0].x) return {0, 0, 0};
    const int2 entry = entries[1 + number];
    return {entry.x, entry.y, count(entry.x)};
  }
};

}  // namespace hf_flash2
