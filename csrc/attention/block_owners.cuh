// Whose each block of tokens is: for kernels with a thread block for each, numbered as first_block_of() does. Of packed sequences a table says,
// whose order is another.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include "attention/sequence.cuh"

namespace hf_flash2 {

// A block of a sequence; there is none where it begins behind the end.
struct SequenceBlock {
  int batch, block;
  Sequence sequence;

  __device__ __forceinline__ bool is_there(int size) const { return block >= 0 && block * size < sequence.length; }
};

template <int kSize>
struct BlockOwners {
  int4* of;     // [blocks]: sequence, number of the block there, start and length of the sequence; null unless packed
  int blocks;   // as Workspace::query_blocks() counts them, of keys likewise
  int ordered;  // so many of the last sequences are put in order, the longest first, so that all thread blocks end together

  // By all warps of a kernel, each of some sequences. Of those in order, each finds its place by counting the blocks of those before it.
  // PERF: loops are not unrolled: the table is short, and the code of a kernel that has much else to do.
  __device__ __forceinline__ void write(const HfFlash2Sequences& sequences, int batches, int max_seqlen) const {
    if (of == nullptr) return;
    __builtin_assume(sequences.cu_seqlens != nullptr);  // PERF: 1,080 instructions in place of 1,200
    const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    const auto blocks_of = [&](int batch) { return max(0, count_blocks_of(sequences, batches, batch, max_seqlen, kSize)); };
    const auto first_of = [&](int batch) { return static_cast<int>(first_block_of(sequences, batch, max_seqlen, kSize)); };
#pragma unroll 1
    for (int64_t at = int64_t{blockIdx.x} * warps + threadIdx.x / 32; at < batches; at += int64_t{gridDim.x} * warps) {
      const int batch = static_cast<int>(at);
      const bool in_order = batch >= batches - ordered;
      const int begin = in_order ? batches - ordered : batch, end = in_order ? batches : batch + 1;
      const Sequence sequence = find_sequence(sequences, batches, batch, max_seqlen);
      const int count = blocks_of(batch);
      int before = 0, all = 0;
#pragma unroll 1
      for (int other = begin + lane; other < end; other += 32) {
        const int others = blocks_of(other);
        all += others;
        if (others > count || (others == count && other < batch)) before += others;
      }
      before = __reduce_add_sync(0xffffffffu, before), all = __reduce_add_sync(0xffffffffu, all);
      // From here to where those after them begin, so that every number has an owner or none, whatever cu_seqlens says.
      const int first = begin == 0 ? 0 : first_of(begin);
#pragma unroll 1
      for (int block = lane; block < min(count, blocks - first - before); block += 32) {
        if (first + before + block >= 0) of[first + before + block] = make_int4(batch, block, sequence.start, sequence.length);
      }
      if (batch != begin) continue;
      const int behind = end == batches ? blocks : min(blocks, first_of(end));
#pragma unroll 1
      for (int number = max(0, first + all) + lane; number < behind; number += 32) of[number] = make_int4(0, -1, 0, 0);
    }
  }

  // blocks_of_longest: a Divisor, of the longest sequence.
  template <typename Divisor>
  __device__ __forceinline__ SequenceBlock find(const HfFlash2Sequences& sequences, int batches, int max_seqlen,
                                                const Divisor& blocks_of_longest, int number) const {
    if (number >= blocks) return {0, -1, {0, 0}};
    if (of != nullptr) {
      const int4 x = of[number];
      return {x.x, x.y, {x.z, x.w}};
    }
    const int batch = blocks_of_longest.quotient(number);
    return {batch, static_cast<int>(blocks_of_longest.remainder(number)), find_sequence(sequences, batches, batch, max_seqlen)};
  }

  // first_block_of() a sequence, found without looking into cu_seqlens. start: of the sequence.
  template <typename Divisor>
  __device__ __forceinline__ int first_block(int batch, int start, const Divisor& blocks_of_longest) const {
    return of != nullptr ? start / kSize + batch : batch * static_cast<int>(blocks_of_longest.divisor);
  }
};

}  // namespace hf_flash2
