// Bank-conflict-free placement of 16-bit tiles in shared memory: rows of kColumns elements, the 16-byte chunks of a row permuted by XOR
// with a function of the row, so that 8 consecutive rows of one chunk column lie in 8 different bank groups (what ldmatrix reads at once).
#pragma once
#include <stdint.h>

namespace hf_flash2 {

template <int kColumns>
struct Swizzle {
  static_assert(kColumns == 16 || kColumns % 32 == 0, "a row must be 2 chunks or whole groups of 4 or 8");
  static constexpr int kRowBytes = kColumns * 2;
  // Chunks that permute among themselves: 8 (128 bytes) where the row is whole such groups, else 4 with the XOR taken from row / 2, or 2 and
  // row / 4.
  static constexpr int kGroup = kColumns % 64 == 0 ? 8 : kColumns % 32 == 0 ? 4 : 2;

  static __device__ __forceinline__ int row_xor(int row) { return kGroup == 8 ? row & 7 : kGroup == 4 ? (row >> 1) & 3 : (row >> 2) & 1; }

  // Byte offset of chunk `chunk` (8 elements) of row `row`.
  static __device__ __forceinline__ uint32_t offset(int row, int chunk) { return row * kRowBytes + ((chunk ^ row_xor(row)) * 16); }
};

}  // namespace hf_flash2
