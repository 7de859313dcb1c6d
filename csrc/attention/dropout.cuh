// Dropout on attention probabilities: a pure function of (rng_state, batch, head, row, column), so that forward and backward agree
// whatever their tiles. The same mask as dropout_keep_mask in hf_flash2/reference.py.
//
// One Philox call decides 16 scores of a 16 x 16 block: those in rows 2i, 2i + 1, + 8 and columns 2j, 2j + 1, + 8. Two lanes of an accumulator
// have half of them each, a row, or of a transposed accumulator a column of each two: they share their calls. A word of the four is for an even
// or odd row and column; in it a score has 16 bits, a byte of its own and below it one that is another's: that correlates the two by less than
// 2^-8. They are read as a number in fp16, as two of those are compared by one instruction.
// PERF: with softmax ahead of the maximum, a forward with dropout is 12 to 34 % faster for it, a backward 3 to 6 %. TUNING.md, "Dropout".
#pragma once
#include <math.h>

#include "device/convert.cuh"
#include "device/philox.cuh"
#include "params.h"

namespace hf_flash2 {

// What the Hopper kernels are told: in their arguments it takes no registers.
struct DropoutRate {
  uint32_t threshold;  // twice the number, in fp16, below which the bits of a score have to be for it to be dropped or, if rare, kept
  float out_scale;     // 1 / keep probability
  bool keeps_few;

  static constexpr float kMost = 0.9f;  // above it, bits that are no numbers would be too many: there the threshold says what is kept

  // Of the 2^16 numbers, `below` ascend from -inf = 0xfc00 to -0 = 0x8000, which is 0, and on.
  static __host__ __device__ __forceinline__ DropoutRate of(float p) {
    const bool keeps_few = p > kMost;
    const int below = static_cast<int>(rintf((keeps_few ? 1.f - p : p) * 65536.f));
    const uint32_t number = below <= 0x7c00 ? 0xfc00 - below : below - 0x7c01 > 0 ? below - 0x7c01 : 1;
    return {number | number << 16, 1.f / (1.f - p), keeps_few};
  }
};

// Random bits of this lane's elements of kMTiles x kNTiles accumulator tiles. kTransposed: rows of accumulators are keys.
template <bool kTransposed, int kMTiles, int kNTiles>
struct DropoutBits {
  static_assert(kNTiles % 2 == 0, "a Philox call serves two 8-column tiles");
  uint2 words[kMTiles][kNTiles / 2];  // x: of the even rows of two tiles (kTransposed: columns), y: of the odd ones

  // Calls f(m, n, half, mask) for all pairs of elements, 2 half and 2 half + 1: 16 bits of the mask for each, 1 where below the threshold.
  template <typename F>
  __device__ __forceinline__ void for_each_pair(uint32_t threshold, const F& f) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int tile = n % 2, low = kTransposed ? tile * 2 + half : half * 2 + tile, high = (low + 1) % 4;  // bytes
          const uint2 pair = words[m][n / 2];
          f(m, n, half, less_half2(__byte_perm(pair.x, pair.y, low | high << 4 | (low + 4) << 8 | (high + 4) << 12), threshold));
        }
      }
    }
  }

  // Calls f(m, n, c) for every element that is dropped.
  template <typename F>
  __device__ __forceinline__ void for_each_dropped(const DropoutRate& rate, const F& f) const {
    for_each_pair(rate.threshold, [&](int m, int n, int half, uint32_t below) {
      if (rate.keeps_few) below = ~below;
      if (below & 1) f(m, n, half * 2);
      if (below >> 31) f(m, n, half * 2 + 1);
    });
  }
};

// kDraws: there is dropout.
template <bool kDraws, bool kTransposed = false>
struct Dropout {
  __device__ __forceinline__ explicit Dropout(const int64_t*) {}
  template <int, int>
  __device__ __forceinline__ int draw(int, int, int) const {
    return 0;
  }
};

template <bool kTransposed>
struct Dropout<true, kTransposed> {
  uint4 stream;  // of this lane

  __device__ __forceinline__ explicit Dropout(const int64_t* rng_state) {
    const uint64_t seed = rng_state[0], offset = rng_state[1];
    const uint32_t rows = threadIdx.x % 32 / 8, columns = threadIdx.x % 4;  // of the accumulator, in twos
    const uint32_t pair = kTransposed ? columns * 4 + rows : rows * 4 + columns;
    stream = philox4x32(make_uint4(pair, static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32), 0),
                        make_uint2(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)));
  }

  // Of accumulator tiles whose first row (query) and column (key), multiples of 16, the same in all lanes, are given. batch_head: batch * heads +
  // head.
  template <int kMTiles, int kNTiles>
  __device__ __forceinline__ DropoutBits<kTransposed, kMTiles, kNTiles> draw(int batch_head, int row, int column) const {
    const bool odd = threadIdx.x & 4;  // this lane's rows of accumulators
    const auto draw_block = [&](int m, int n) {
      const uint32_t row_block = row / 16 + (kTransposed ? n : m), column_block = column / 16 + (kTransposed ? m : n);
      return philox4x32(make_uint4(stream.x ^ row_block, stream.y ^ column_block, stream.z ^ static_cast<uint32_t>(batch_head), stream.w),
                        make_uint2(0, 0));
    };
    // x: of even rows and columns, y: of odd columns, z: of odd rows, w: of both.
    const auto words_of = [](const uint4& bits, bool odd_rows) {
      return kTransposed ? make_uint2(odd_rows ? bits.y : bits.x, odd_rows ? bits.w : bits.z)
                         : make_uint2(odd_rows ? bits.z : bits.x, odd_rows ? bits.w : bits.y);
    };
    DropoutBits<kTransposed, kMTiles, kNTiles> drawn;
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n + 1 < kNTiles / 2; n += 2) {
        const uint4 bits = draw_block(m, n + odd);
        const uint2 own = words_of(bits, odd), others = words_of(bits, !odd);
        const uint2 from = make_uint2(__shfl_xor_sync(0xffffffffu, others.x, 4), __shfl_xor_sync(0xffffffffu, others.y, 4));
        drawn.words[m][n] = odd ? from : own;
        drawn.words[m][n + 1] = odd ? own : from;
      }
      if constexpr (kNTiles % 4 != 0) drawn.words[m][kNTiles / 2 - 1] = words_of(draw_block(m, kNTiles / 2 - 1), odd);
    }
    return drawn;
  }
};

}  // namespace hf_flash2
