// Where keys lie in a paged cache (HfFlash2ForwardParams::block_table). Kwon et al., PagedAttention, arXiv 2309.06180.
// PERF: a step takes 2 to 18 % more than on keys in rows of a batch, and a third to three fifths of what it takes to gather them first. TUNING.md,
// "Brief calls".
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
