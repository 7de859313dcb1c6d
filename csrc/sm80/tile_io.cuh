// Moving 16-bit tiles between global memory, shared memory and mma.sync fragments.
// A tile is kRows x kColumns in shared memory with the placement of device/swizzle.cuh.
#pragma once
#include "device/convert.cuh"
#include "device/cp_async.cuh"
#include "device/mma_sync.cuh"
#include "device/swizzle.cuh"

namespace hf_flash2::sm80 {

// Starts the copy of rows [row_begin, row_begin + kRows) of one head into shared memory with kThreads threads. Rows from row_end on and
// columns from `columns` on (a multiple of 8) are filled with zeros; their source is not read, wherever it points.
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void load_tile_async(uint32_t tile, const T* head, int64_t token_stride, int row_begin, int row_end,
                                                int columns) {
  constexpr int kGroup = Swizzle<kColumns>::kGroup;  // lanes that share a row: 64 or 128 contiguous bytes each pass
  constexpr int kRowsPerPass = kThreads / kGroup;
  const int lane_row = threadIdx.x / kGroup, lane_chunk = threadIdx.x % kGroup;
  const T* source = head + (row_begin + lane_row) * token_stride + lane_chunk * 8;
  const uint32_t destination = tile + Swizzle<kColumns>::offset(lane_row, lane_chunk);
#pragma unroll
  for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
    const bool row_valid = row_begin + pass * kRowsPerPass + lane_row < row_end;
#pragma unroll
    for (int group = 0; group < kColumns / 8 / kGroup; ++group) {
      const bool valid = row_valid && (group * kGroup + lane_chunk) * 8 < columns;
      cp_async_16(destination + pass * kRowsPerPass * Swizzle<kColumns>::kRowBytes + group * kGroup * 16, source + group * kGroup * 8,
                  valid);
    }
    source += kRowsPerPass * token_stride;
  }
  static_assert(kRows % kRowsPerPass == 0 && kRowsPerPass % 8 == 0, "whole passes, the same permutation of chunks in each");
}

// Copies rows [0, kRows) of a shared tile to rows row_begin .. of one head, leaving out rows from row_end on and columns from `columns`.
template <int kRows, int kColumns, int kThreads, typename T>
__device__ __forceinline__ void store_tile(uint32_t tile, T* head, int64_t token_stride, int row_begin, int row_end, int columns,
                                           int thread) {
  constexpr int kGroup = Swizzle<kColumns>::kGroup;
  constexpr int kRowsPerPass = kThreads / kGroup;
  const int lane_row = thread / kGroup, lane_chunk = thread % kGroup;
#pragma unroll
  for (int pass = 0; pass < kRows / kRowsPerPass; ++pass) {
    const int row = pass * kRowsPerPass + lane_row;
    if (row_begin + row >= row_end) continue;
    T* destination = head + (row_begin + row) * token_stride;
#pragma unroll
    for (int group = 0; group < kColumns / 8 / kGroup; ++group) {
      const int chunk = group * kGroup + lane_chunk;
      if (chunk * 8 >= columns) continue;
      *reinterpret_cast<uint4*>(destination + chunk * 8) = load_shared_uint4(tile + Swizzle<kColumns>::offset(row, chunk));
    }
  }
}

// Rounds accumulator tiles to T and writes them at (row, column) of a shared tile; row is a multiple of 16, column of 8.
template <typename T, int kColumns, int kMTiles, int kNTiles>
__device__ __forceinline__ void write_accumulators(uint32_t tile, const float (&c)[kMTiles][kNTiles][4], int row, int column) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int r = row + m * 16 + half * 8 + lane / 4;
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(tile + Swizzle<kColumns>::offset(r, column / 8 + n) + (lane % 4) * 4),
                     "r"(pack<T>(c[m][n][half * 2], c[m][n][half * 2 + 1]))
                     : "memory");
      }
    }
  }
}

// Reads 16 x 16 blocks of a shared tile as fragments. The block's first row is row + a multiple of 16; columns are counted in blocks.
// kByRow: lanes 0-15 address the rows of the left chunk, 16-31 those of the right one (A operands stored [m][k]; B operands stored [k][n],
// transposed). Otherwise lanes 0-7 and 8-15 address left and right chunk of rows 0-7, 16-31 those of rows 8-15 (B operands stored [n][k];
// A operands stored [k][m], transposed).
template <int kColumns, bool kByRow, bool kTranspose>
struct FragmentReader {
  uint32_t base;  // byte address of this lane's row in the block row
  int lane_xor;   // this lane's chunk, permuted

  __device__ __forceinline__ FragmentReader(uint32_t tile, int row) {
    const int lane = threadIdx.x % 32;
    const int lane_row = kByRow ? lane % 16 : lane % 8 + (lane / 16) * 8;
    const int lane_chunk = kByRow ? lane / 16 : lane / 8 % 2;
    base = tile + (row + lane_row) * Swizzle<kColumns>::kRowBytes;
    lane_xor = lane_chunk ^ Swizzle<kColumns>::row_xor(lane_row);
  }

  // The block `row_block` blocks down and `column_block` blocks right.
  __device__ __forceinline__ void read(uint32_t (&fragment)[4], int row_block, int column_block) const {
    const uint32_t address = base + row_block * 16 * Swizzle<kColumns>::kRowBytes + ((column_block * 2) ^ lane_xor) * 16;
    if constexpr (kTranspose)
      ldmatrix_x4_trans(fragment, address);
    else
      ldmatrix_x4(fragment, address);
  }
};

template <int kColumns>
using RowsOfA = FragmentReader<kColumns, true, false>;  // A stored [m][k]
template <int kColumns>
using ColumnsOfA = FragmentReader<kColumns, false, true>;  // A stored [k][m]
template <int kColumns>
using ColumnsOfB = FragmentReader<kColumns, false, false>;  // B stored [n][k]
template <int kColumns>
using RowsOfB = FragmentReader<kColumns, true, true>;  // B stored [k][n]

}  // namespace hf_flash2::sm80
