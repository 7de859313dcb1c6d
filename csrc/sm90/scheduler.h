// Which query blocks a thread block works on, and in what order. Everything is decided from shapes, so that loading and computing
// warpgroups walk the same list without talking.
#pragma once
#include <stdint.h>

namespace hf_flash2::sm90 {

enum class TileOrder : int {
  kByHead,        // query blocks of one head one after another: K and V of few heads are in L2 at any time
  kLongestFirst,  // by descending query block inside groups of heads: under a causal mask the short ones fill the gaps at the end
  kPairs,         // the longest and the shortest query block left of one head: under a causal mask all pairs are equal work
};

struct TileScheduler {
  TileOrder order;
  int query_blocks;  // of the longest sequence
  int heads;         // heads * batch
  int group;         // heads that share the L2 (kLongestFirst)

  __host__ __device__ int tiles_per_unit() const { return order == TileOrder::kPairs ? 2 : 1; }
  __host__ __device__ int64_t units() const {
    return static_cast<int64_t>(order == TileOrder::kPairs ? (query_blocks + 1) / 2 : query_blocks) * heads;
  }

  // Query block and (batch * heads_q + head) of tile `part` of a unit; false when there is none (the middle of an odd number of pairs).
  __device__ __forceinline__ bool tile(int unit, int part, int& query_block, int& batch_head) const {
    if (order == TileOrder::kPairs) {
      const int pairs = (query_blocks + 1) / 2;
      batch_head = unit / pairs;
      const int pair = unit % pairs;
      query_block = part == 0 ? query_blocks - 1 - pair : pair;
      return part == 0 || query_block != query_blocks - 1 - pair;
    }
    if (order == TileOrder::kLongestFirst) {
      const int first_head = unit / (query_blocks * group) * group;
      const int heads_here = min(group, heads - first_head);
      const int rest = unit - first_head * query_blocks;
      query_block = query_blocks - 1 - rest / heads_here;
      batch_head = first_head + rest % heads_here;
      return true;
    }
    query_block = unit % query_blocks;
    batch_head = unit / query_blocks;
    return true;
  }
};

}  // namespace hf_flash2::sm90
