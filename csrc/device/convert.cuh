// Number formats: packing float pairs into the 16-bit types of q, k, v; and the functions that the special-function unit has, each within
// 2^-22 or so, relative. PTX ISA: "cvt", "ex2", "lg2", "rcp".
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace hf_flash2 {

// Two floats -> one 32-bit register, `low` in the lower half (the lower index of a fragment). kPositive: 0 in place of negative ones.
template <typename T, bool kPositive = false>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  if constexpr (std::is_same_v<T, __half>) {
    if constexpr (kPositive)
      asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  } else {
    if constexpr (kPositive)
      asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    else
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  }
  return packed;
}

// As pack<__half>, but what is too large becomes the largest there is.
template <bool kPositive = false>
__device__ __forceinline__ uint32_t pack_half_finite(float low, float high) {
  uint32_t packed;
  if constexpr (kPositive)
    asm("cvt.rn.relu.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  else
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

template <typename T>
__device__ __forceinline__ float2 unpack(uint32_t packed);

template <>
__device__ __forceinline__ float2 unpack<__half>(uint32_t packed) {
  return __half22float2(*reinterpret_cast<__half2*>(&packed));
}

template <>
__device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t packed) {
  return make_float2(__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u));
}

// Two comparisons of fp16: 0xffff in each half where a < b. PTX ISA: "set".
__device__ __forceinline__ uint32_t less_half2(uint32_t a, uint32_t b) {
  uint32_t less;
  asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(less) : "r"(a), "r"(b));
  return less;
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace hf_flash2
