// S and dP of the backward where query and key blocks are so small that a warp has one tile, 16 x 8, of each. Called by backward.cuh.
//
// Two warps share 16 rows and 16 columns: one contracts Q K^T, the other dO V^T. Then each gives the other one of its two tiles, so that both
// have S and dP of 8 columns. They read 32 rows of shared memory each, 16 of A and 16 of B, where S and dP of their own tile would take 48.
#pragma once
#include "device/named_barrier.cuh"
#include "device/shared_memory.cuh"
#include "sm80/gemm.cuh"

namespace hf_flash2::sm80 {

// s, dp: of this warp's tile, whose first row and column are given. exchange: shared memory, 16 bytes for each thread of the block.
template <typename T, int kHeadDim>
__device__ __forceinline__ void multiply_in_pairs(float (&s)[1][1][4], float (&dp)[1][1][4], uint32_t sQ, uint32_t sK, uint32_t sdO,
                                                  uint32_t sV, int row, int column, uint32_t exchange) {
  const int second = column / 8 % 2;  // of the pair: has dO V^T
  float product[1][2][4] = {};
  multiply<T, kHeadDim / 16>(product, RowsOfA<kHeadDim>(second ? sdO : sQ, row), 0,
                             ColumnsOfB<kHeadDim>(second ? sV : sK, column - second * 8), 0);
  float given[4], taken[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) given[c] = second ? product[0][0][c] : product[0][1][c];
  store_shared(exchange + (threadIdx.x ^ 32) * 16, given);
  named_barrier_sync(1 + threadIdx.x / 64, 64);
  load_shared(exchange + threadIdx.x * 16, taken);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    s[0][0][c] = second ? taken[c] : product[0][0][c];
    dp[0][0][c] = second ? product[0][1][c] : taken[c];
  }
}

}  // namespace hf_flash2::sm80
