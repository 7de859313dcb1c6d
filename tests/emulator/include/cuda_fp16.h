// The 16-bit types are tags and storage here; arithmetic on them goes through PTX or float.
#pragma once
#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct __half2 {
  uint16_t low, high;
};
inline float2 __half22float2(__half2 x) { return {emulator::from_half(x.low), emulator::from_half(x.high)}; }
inline float __half2float(__half x) { return emulator::from_half(x.bits); }
inline __half __float2half_rn(float x) { return {emulator::to_half(x)}; }
