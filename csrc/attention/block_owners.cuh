// Whose each block of tokens is: for kernels with a thread block for each, numbered as first_block_of() does. Of packed sequences a table says.
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

struct BlockOwners {
  int4* of;    // [blocks]: sequence, number of the block there, start and length of the sequence; null unless packed
  int blocks;  // as Workspace::query_blocks() counts them, of keys likewise
  int size;    // tokens of a block

  // By all threads of a kernel. Each looks for the last sequence that begins with its number or before.
  __device__ __forceinline__ void write(const HfFlash2Sequences& sequences, int batches, int max_seqlen) const {
    if (of == nullptr) return;
    for (int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; at < blocks; at += int64_t{gridDim.x} * blockDim.x) {
      const int number = static_cast<int>(at);
      int batch = 0, end = batches;
#pragma unroll 1
      while (end - batch > 1) {
        const int middle = (batch + end) / 2;
        (number < first_block_of(sequences, middle, max_seqlen, size) ? end : batch) = middle;
      }
      const Sequence sequence = find_sequence(sequences, batches, batch, max_seqlen);
      const int block = number - static_cast<int>(first_block_of(sequences, batch, max_seqlen, size));
      of[number] = make_int4(batch, block, sequence.start, sequence.length);
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
    return {batch, blocks_of_longest.remainder(number), find_sequence(sequences, batches, batch, max_seqlen)};
  }
};

}  // namespace hf_flash2
