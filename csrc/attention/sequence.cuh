// Where one sequence of the batch lies: the three forms of HfFlash2Sequences (params.h) become one start and one length. How blocks of its
// tokens are numbered, and which of its query blocks a thread block has.
#pragma once
#include "params.h"

namespace hf_flash2 {

struct Sequence {
  int start;   // first token: in the packed tensor, or in the row of this batch entry
  int length;  // tokens
};

// Whether sequences have lengths of their own, which only the device knows.
__host__ __device__ __forceinline__ bool have_lengths(const HfFlash2Sequences& sequences) {
  return sequences.cu_seqlens != nullptr || sequences.ranges != nullptr;
}

__device__ __forceinline__ Sequence find_sequence(const HfFlash2Sequences& sequences, int batch_size, int batch, int max_seqlen) {
  if (sequences.cu_seqlens != nullptr) {
    const int start = sequences.cu_seqlens[batch];
    return {start, min(sequences.cu_seqlens[batch + 1] - start, max_seqlen)};
  }
  if (sequences.ranges != nullptr) return {sequences.ranges[batch], sequences.ranges[batch_size + batch]};
  return {0, max_seqlen};
}

// By a warp, of at most kFewSequences: the longest, the first one of several.
constexpr int kFewSequences = 32;
__device__ __forceinline__ int find_longest(const HfFlash2Sequences& sequences, int batch_size, int max_seqlen) {
  int found = threadIdx.x % 32, length = found < batch_size ? find_sequence(sequences, batch_size, found, max_seqlen).length : -1;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, length, offset), batch = __shfl_xor_sync(0xffffffffu, found, offset);
    if (other > length || (other == length && batch < found)) length = other, found = batch;
  }
  return found;
}

// The `index`-th sequence where `first` comes before all others, and these in order.
__device__ __forceinline__ int batch_in_order(int index, int first) { return index == 0 ? first : index <= first ? index - 1 : index; }

// Blocks of `size` tokens of a sequence.
__device__ __forceinline__ int count_blocks_of(const HfFlash2Sequences& sequences, int batch_size, int batch, int max_seqlen, int size) {
  return (find_sequence(sequences, batch_size, batch, max_seqlen).length + size - 1) / size;
}

// Number of the first block of `size` tokens of sequence `batch`, counted over all sequences so that blocks of different ones never meet,
// whatever the lengths, without knowing them on the host: cu_seqlens[batch] / size + batch when packed (each earlier sequence wastes less than
// one block), batch * ceil(max_seqlen / size) when dense.
__device__ __forceinline__ int64_t first_block_of(const HfFlash2Sequences& sequences, int batch, int max_seqlen, int size) {
  return sequences.cu_seqlens != nullptr ? sequences.cu_seqlens[batch] / size + batch
                                         : static_cast<int64_t>(batch) * ((max_seqlen + size - 1) / size);
}

// Query block `index` of all; in kernels with a thread block for each, that of the thread block. Those of one head stand next to each other.
struct QueryBlock {
  int blocks, number;  // of the longest sequence, and which of them
  int head, batch;

  __device__ __forceinline__ QueryBlock(const HfFlash2ForwardParams& params, int block_m, uint32_t index = blockIdx.x)
      : blocks((params.max_seqlen_q + block_m - 1) / block_m),
        number(index % blocks),
        head(index / blocks % params.heads_q),
        batch(index / blocks / params.heads_q) {}
};

// Address of token 0 of a sequence, for one head. 64-bit: tensors can exceed 2^31 elements.
template <typename T>
__device__ __forceinline__ T* token_pointer(const HfFlash2Tensor& tensor, int batch, int head, int token) {
  return static_cast<T*>(tensor.data) + batch * tensor.batch_stride + token * tensor.token_stride + head * tensor.head_stride;
}

}  // namespace hf_flash2
