// Adding four consecutive floats of each lane into global memory. PTX ISA: "red", vector forms from sm_90.
#pragma once

namespace hf_flash2 {

// Adds x[0..3] into the four floats lane `lane` owns of the 128-float block at `block`. Which four is decided here and undone by
// load_reduced(): one 16-byte vector a lane from sm_90 on, four words 128 bytes apart before (each atomic then covers whole sectors).
__device__ __forceinline__ void reduce_add(float* block, int lane, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(block + lane * 4), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(block + i * 32 + lane, x[i]);
#endif
}

// The same in place of what was there.
__device__ __forceinline__ void store_reduced(float* block, int lane, const float (&x)[4]) {
  *reinterpret_cast<float4*>(block + lane * 4) = make_float4(x[0], x[1], x[2], x[3]);
}

__device__ __forceinline__ float4 load_reduced(const float* block, int lane) {
#if __CUDA_ARCH__ >= 900
  return *reinterpret_cast<const float4*>(block + lane * 4);
#else
  return make_float4(block[lane], block[32 + lane], block[64 + lane], block[96 + lane]);
#endif
}

}  // namespace hf_flash2
