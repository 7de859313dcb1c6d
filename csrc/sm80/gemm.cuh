// Warp-level products of shared-memory tiles on mma.sync, as the attention algorithms need them. Each warp computes kMTiles x kNTiles
// tiles of 16 x 8; c is accumulated into.
#pragma once
#include "sm80/tile_io.cuh"

namespace hf_flash2::sm80 {

// c += A * B with A and B in shared memory. The readers say how each is stored; for A stored [m][k] and B stored [n][k] the contraction
// runs along the columns of the tile, for ColumnsOfA and RowsOfB along its rows. The column blocks (of 16) say where each starts.
template <typename T, int kKSteps, int kMTiles, int kNTiles, int kColumnsA, bool kByRowA, bool kTransposeA, int kColumnsB, bool kByRowB,
          bool kTransposeB>
__device__ __forceinline__ void multiply(float (&c)[kMTiles][kNTiles][4], const FragmentReader<kColumnsA, kByRowA, kTransposeA>& a_reader,
                                         int a_column_block, const FragmentReader<kColumnsB, kByRowB, kTransposeB>& b_reader,
                                         int b_column_block) {
  static_assert(kNTiles % 2 == 0, "B fragments come for two tiles at a time");
#pragma unroll
  for (int k = 0; k < kKSteps; ++k) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      if constexpr (kTransposeA)
        a_reader.read(a[m], k, a_column_block + m);
      else
        a_reader.read(a[m], m, a_column_block + k);
    }
#pragma unroll
    for (int n = 0; n < kNTiles / 2; ++n) {
      uint32_t b[4];
      if constexpr (kTransposeB)
        b_reader.read(b, k, b_column_block + n);
      else
        b_reader.read(b, n, b_column_block + k);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        mma_m16n8k16<T>(c[m][2 * n], a[m], b[0], b[1]);
        mma_m16n8k16<T>(c[m][2 * n + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// out += P * V with P from accumulators (rounded to T on the way: their layout is the A layout) and V stored [key][dim].
template <typename T, int kMTiles, int kNTiles, int kDTiles, int kColumns>
__device__ __forceinline__ void multiply_probabilities(float (&out)[kMTiles][kDTiles][4], const float (&p)[kMTiles][kNTiles][4],
                                                       const RowsOfB<kColumns>& v) {
#pragma unroll
  for (int k = 0; k < kNTiles / 2; ++k) {
    uint32_t a[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      a[m][0] = pack<T>(p[m][2 * k][0], p[m][2 * k][1]);
      a[m][1] = pack<T>(p[m][2 * k][2], p[m][2 * k][3]);
      a[m][2] = pack<T>(p[m][2 * k + 1][0], p[m][2 * k + 1][1]);
      a[m][3] = pack<T>(p[m][2 * k + 1][2], p[m][2 * k + 1][3]);
    }
#pragma unroll
    for (int d = 0; d < kDTiles / 2; ++d) {
      uint32_t b[4];
      v.read(b, k, d);
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        mma_m16n8k16<T>(out[m][2 * d], a[m], b[0], b[1]);
        mma_m16n8k16<T>(out[m][2 * d + 1], a[m], b[2], b[3]);
      }
    }
  }
}

}  // namespace hf_flash2::sm80
