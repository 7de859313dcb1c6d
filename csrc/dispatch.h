// Run-time values -> template axes. The axes of the whole library are head dim and dtype, listed here (and in instantiate.py, which writes
// files of them); everything else is a run-time value or chosen inside a family.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "errors.h"
#include "launch.h"

// A development build may compile fewer head dims (HF_FLASH2_HEAD_DIMS=64,128 in the environment of build.py).
#ifndef HF_FLASH2_HEAD_DIMS
#define HF_FLASH2_HEAD_DIMS "64,80,96,128,192,256,512"
#endif

namespace hf_flash2 {

// Whether the comma-separated list HF_FLASH2_HEAD_DIMS names head_dim.
constexpr bool is_built(int head_dim) {
  int number = 0;
  for (const char* c = HF_FLASH2_HEAD_DIMS;; ++c) {
    if (*c >= '0' && *c <= '9') {
      number = number * 10 + (*c - '0');
      continue;
    }
    if (number == head_dim) return true;
    if (*c == '\0') return false;
    number = 0;
  }
}

// Calls f(std::integral_constant<int, kHeadDim>) for the smallest built head dim that holds `head_dim`; the kernels fill the rest with zeros.
template <typename Result, int kHeadDim, int... kLarger, typename F>
Result dispatch_head_dim_from(int head_dim, const F& f) {
  if constexpr (is_built(kHeadDim)) {
    if (head_dim <= kHeadDim) return f(std::integral_constant<int, kHeadDim>{});
  }
  if constexpr (sizeof...(kLarger) > 0) {
    return dispatch_head_dim_from<Result, kLarger...>(head_dim, f);
  } else {
    throw LaunchError(kErrorUnsupported,
                      "no kernel of this build takes head_dim " + std::to_string(head_dim) + "; rebuild without HF_FLASH2_HEAD_DIMS");
  }
}

// By the greater of the two head dims of a call: what the other tensors lack is filled with zeros. A family may have instances of its own for
// a smaller head dim of v (sm90/*_launch.cuh).
template <typename Result, typename F>
Result dispatch_head_dim(const HfFlash2ForwardParams& params, const F& f) {
  return dispatch_head_dim_from<Result, 64, 80, 96, 128, 192, 256, 512>(std::max(params.head_dim, params.head_dim_v), f);
}
constexpr int kMostHeadDim = 512;

template <typename F>
auto dispatch_dtype(int dtype, const F& f) {
  return dtype == kBFloat16 ? f(__nv_bfloat16{}) : f(__half{});
}

}  // namespace hf_flash2
