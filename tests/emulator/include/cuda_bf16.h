#pragma once
#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return emulator::from_bfloat16(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {emulator::to_bfloat16(x)}; }
