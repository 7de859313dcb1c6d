// Which blocks of queries (forward) or keys (backward) a thread block works on, and in what order. Everything is decided from shapes, so that
// loading and computing warpgroups walk the same list without talking.
#pragma once
#include <stdint.h>

#include "params.h"

namespace hf_flash2::sm90 {

// Causal without a window: the work of a block of queries grows with its number, that of a block of keys shrinks.
inline bool is_triangular(const HfFlash2ForwardParams& params) { return params.window_right >= 0 && params.window_left < 0; }

enum class TileOrder : int {
  kByHead,           // blocks of one head one after another: what few heads read is in L2 at any time
  kLastBlockFirst,   // by descending block inside groups of heads: under a causal mask the short blocks of queries fill the gaps at the end
  kFirstBlockFirst,  // by ascending block inside groups of heads: the same for blocks of keys
  kPairs,            // the first and the last block left of one head: under a causal mask all pairs are equal work
};

struct TileScheduler {
  TileOrder order;
  int blocks;  // of the longest sequence
  int heads;   // heads * batch; where tiles hold all heads of a group, groups * batch
  int group;   // heads that share the L2 (kLastBlockFirst, kFirstBlockFirst)

  __host__ __device__ int tiles_per_unit() const { return order == TileOrder::kPairs ? 2 : 1; }
  __host__ __device__ int64_t units() const { return static_cast<int64_t>(order == TileOrder::kPairs ? (blocks + 1) / 2 : blocks) * heads; }

  // Block and (batch * heads + head) of tile `part` of a unit; false when there is none (the middle of an odd number of pairs).
  __device__ __forceinline__ bool tile(int unit, int part, int& block, int& batch_head) const {
    if (order == TileOrder::kPairs) {
      const int pairs = (blocks + 1) / 2;
      batch_head = unit / pairs;
      const int pair = unit % pairs;
      block = part == 0 ? blocks - 1 - pair : pair;
      return part == 0 || block != blocks - 1 - pair;
    }
    if (order == TileOrder::kLastBlockFirst || order == TileOrder::kFirstBlockFirst) {
      const int first_head = unit / (blocks * group) * group;
      const int heads_here = min(group, heads - first_head);
      const int rest = unit - first_head * blocks;
      block = rest / heads_here;
      if (order == TileOrder::kLastBlockFirst) block = blocks - 1 - block;
      batch_head = first_head + rest % heads_here;
      return true;
    }
    block = unit % blocks;
    batch_head = unit / blocks;
    return true;
  }
};

}  // namespace hf_flash2::sm90
