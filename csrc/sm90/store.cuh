// Accumulators to memory: whole tiles into shared memory, for the copy engine, or rows straight to global memory, where the four lanes that
// share one exchange 8-column pieces so that each writes 16 contiguous bytes.
#pragma once
#include "device/convert.cuh"
#include "device/shared_memory.cuh"
#include "device/warpgroup.cuh"

namespace hf_flash2::sm90 {

// Accumulators as A operands, or for store_panels(). kPositive: 0 in place of negative ones.
template <typename T, int kTiles, bool kPositive = false>
__device__ __forceinline__ void round_tiles(uint32_t* rounded, const float (*x)[4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rounded[n * 2 + half] = pack<T, kPositive>(x[n][half * 2], x[n][half * 2 + 1]);
  }
}

// Writes a warpgroup's rounded accumulators [64, kTiles * 8] as panels of 64 columns, kPanelBytes apart, with the swizzle of
// panel_descriptor(); for the engine to read after a barrier.
template <int kPanelBytes, int kTiles>
__device__ __forceinline__ void store_panels(uint32_t panel, const uint32_t (&rounded)[kTiles * 2]) {
  // Lanes 8i .. 8i + 7 point to rows 8 (i % 2) .. of this warp's 16, chunk (of 8 columns) i / 2 of a pair.
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
  const uint32_t address = panel + row * 128 + ((lane / 16) ^ (lane % 8)) * 16;
#pragma unroll
  for (int n = 0; n < kTiles; n += 2) stmatrix_x4((address ^ (n % 8 * 16)) + n / 8 * kPanelBytes, rounded + n * 2);
  async_proxy_fence();
}

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

// Writes row lane / 4 + 8 * half of a warp's accumulators [16, kDTiles * 8], rounded to T, leaving out columns from `columns` on. kStreams: L2
// lets it go before other things.
template <bool kStreams = false, typename T, int kDTiles>
__device__ __forceinline__ void store_row(const float (&c)[kDTiles][4], int half, T* row, bool valid, int columns) {
  static_assert(kDTiles % 2 == 0, "tiles are exchanged four at a time, at the end perhaps two");
#pragma unroll
  for (int tile = 0; tile < kDTiles; tile += 4) {
    uint32_t pieces[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (tile + i < kDTiles)
        pieces[i] = pack<T>(c[tile + i][half * 2], c[tile + i][half * 2 + 1]);
      else
        pieces[i] = 0;
    }
    transpose_quad(pieces);
    const int column = (tile + threadIdx.x % 4) * 8;
    if (!valid || column >= columns || (kDTiles % 4 != 0 && column >= kDTiles * 8)) continue;
    uint4* const to = reinterpret_cast<uint4*>(row + column);
    const uint4 x = make_uint4(pieces[0], pieces[1], pieces[2], pieces[3]);
    if constexpr (kStreams)
      __stcs(to, x);
    else
      *to = x;
  }
}

// The same as floats: the lanes of a quad write 32 bytes side by side.
template <int kDTiles>
__device__ __forceinline__ void store_row(const float (&c)[kDTiles][4], int half, float* row, bool valid, int columns) {
#pragma unroll
  for (int tile = 0; tile < kDTiles; ++tile) {
    const int column = tile * 8 + threadIdx.x % 4 * 2;
    if (valid && column < columns) *reinterpret_cast<float2*>(row + column) = make_float2(c[tile][half * 2], c[tile][half * 2 + 1]);
  }
}

}  // namespace hf_flash2::sm90
