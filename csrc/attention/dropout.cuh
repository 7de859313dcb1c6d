// Dropout on attention probabilities: a pure function of (rng_state, batch, head, row, column), so that forward and backward agree
// whatever their tiles. One Philox call decides the 8 scores a lane holds of a 16 x 16 block, 16 random bits each.
// The same mask as dropout_keep_mask in hf_flash2/reference.py.
#pragma once
#include "device/philox.cuh"
#include "params.h"

namespace hf_flash2 {

struct Dropout {
  uint2 key;
  uint32_t lane_counter;  // lane + 32 * offset
  uint32_t batch_head;
  uint32_t threshold;  // an element is dropped when its 16 bits are below this

  __device__ __forceinline__ Dropout(const HfFlash2ForwardParams& params, int batch, int head, int lane) {
    const uint64_t seed = params.rng_state[0], offset = params.rng_state[1];
    key = make_uint2(static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    lane_counter = lane + 32u * static_cast<uint32_t>(offset);
    batch_head = batch * params.heads_q + head;
    threshold = __float2uint_rn(params.dropout_p * 65536.f);
  }

  // Calls drop(m, n, c) for every dropped element of kMTiles x kNTiles accumulator tiles whose first row and column (multiples of 16, the
  // same in all lanes) are given.
  template <int kMTiles, int kNTiles, typename Drop>
  __device__ __forceinline__ void for_dropped(int row, int column, Drop drop) const {
    static_assert(kNTiles % 2 == 0, "a Philox call serves two 8-column tiles");
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int n = 0; n < kNTiles; n += 2) {
        const uint4 bits = philox4x32(make_uint4(row / 16 + m, column / 16 + n / 2, lane_counter, batch_head), key);
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int tile = i / 4, half = i / 2 % 2, c = i % 2;  // word = tile * 2 + half
          if (((words[tile * 2 + half] >> (16 * c)) & 0xffffu) < threshold) drop(m, n + tile, half * 2 + c);
        }
      }
    }
  }
};

}  // namespace hf_flash2
