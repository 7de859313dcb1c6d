// Accumulators to memory: whole tiles into shared memory, for the copy engine, or rows straight to global memory, where the four lanes that
// share one exchange 8-column pieces so that each writes 16 contiguous bytes.
#pragma once
#include "device/convert.cuh"
#include "device/shared_memory.cuh"

namespace hf_flash2::sm90 {

// In: lane t of a quad holds columns 2t, 2t + 1 of four 8-column tiles. Out: lane t holds all 8 columns of tile t.
__device__ __forceinline__ void transpose_quad(uint32_t (&r)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const uint32_t a = __shfl_xor_sync(0xffffffffu, odd ? r[0] : r[1], 1);
  const uint32_t b = __shfl_xor_sync(0xffffffffu, odd ? r[2] : r[3], 1);
  if (odd)
    r[0] = a, r[2] = b;
  else
    r[1] = a, r[3] = b;
  // r[2 i + j]: the piece of lane (t & ~1) + j of tile 2 i + (t & 1)
  const uint32_t c = __shfl_xor_sync(0xffffffffu, high ? r[0] : r[2], 2);
  const uint32_t d = __shfl_xor_sync(0xffffffffu, high ? r[1] : r[3], 2);
  if (high)
    r[0] = c, r[1] = d;
  else
    r[2] = c, r[3] = d;
}

// Writes row lane / 4 + 8 * half of a warp's accumulators [16, kDTiles * 8], rounded to T, leaving out columns from `columns` on.
template <typename T, int kDTiles>
__device__ __forceinline__ void store_row(const float (&c)[kDTiles][4], int half, T* row, bool valid, int columns) {
  static_assert(kDTiles % 4 == 0, "tiles are exchanged four at a time");
#pragma unroll
  for (int tile = 0; tile < kDTiles; tile += 4) {
    uint32_t pieces[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pieces[i] = pack<T>(c[tile + i][half * 2], c[tile + i][half * 2 + 1]);
    transpose_quad(pieces);
    const int column = (tile + threadIdx.x % 4) * 8;
    if (valid && column < columns) *reinterpret_cast<uint4*>(row + column) = make_uint4(pieces[0], pieces[1], pieces[2], pieces[3]);
  }
}

// Writes a warpgroup's accumulators [64, kDTiles * 8], rounded to T, into panels of 64 columns in shared memory, with the 128-byte swizzle.
template <typename T, int kPanelBytes, int kDTiles>
__device__ __forceinline__ void store_tile(const float (&c)[kDTiles][4], uint32_t tile) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  const uint32_t row_address = tile + row * 128;
#pragma unroll
  for (int t = 0; t < kDTiles; t += 2) {
    const uint32_t pieces[4] = {pack<T>(c[t][0], c[t][1]), pack<T>(c[t][2], c[t][3]), pack<T>(c[t + 1][0], c[t + 1][1]),
                                pack<T>(c[t + 1][2], c[t + 1][3])};
    stmatrix_x4(row_address + t / 8 * kPanelBytes + ((t % 8 + lane / 16) ^ (row % 8)) * 16, pieces);
  }
}

// The same as floats: neighbours exchange pairs, so that each lane writes 16 bytes of one of two tiles.
template <int kDTiles>
__device__ __forceinline__ void store_row(const float (&c)[kDTiles][4], int half, float* row, bool valid, int columns) {
  static_assert(kDTiles % 2 == 0, "tiles are exchanged two at a time");
  const bool odd = threadIdx.x & 1;
#pragma unroll
  for (int tile = 0; tile < kDTiles; tile += 2) {
    const float* mine = c[tile] + half * 2;
    const float* next = c[tile + 1] + half * 2;
    const float a = __shfl_xor_sync(0xffffffffu, odd ? mine[0] : next[0], 1);
    const float b = __shfl_xor_sync(0xffffffffu, odd ? mine[1] : next[1], 1);
    const float4 quad = make_float4(odd ? a : mine[0], odd ? b : mine[1], odd ? next[0] : a, odd ? next[1] : b);
    const int column = (tile + odd) * 8 + threadIdx.x % 4 / 2 * 4;
    if (valid && column < columns) *reinterpret_cast<float4*>(row + column) = quad;
  }
}

}  // namespace hf_flash2::sm90
