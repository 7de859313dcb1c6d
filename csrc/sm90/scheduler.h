// Which blocks of queries (forward) or keys (backward) a thread block works on, and in what order.
#pragma once
#include <limits.h>
#include <stdint.h>

#include <algorithm>

#include "attention/sequence.cuh"
#include "launch.h"
#include "params.h"

namespace hf_flash2::sm90 {

// Causal without a window: the work of a block of queries grows with its number, that of a block of keys shrinks.
inline bool is_triangular(const HfFlash2ForwardParams& params) { return params.window_right >= 0 && params.window_left < 0; }

// How many blocks of `block` tokens, of a sequence of `seqlen`, so many neighbouring rows of the other side see at most, as far as shapes tell:
// blocks of keys for queries, blocks of queries for keys.
inline int64_t most_blocks_seen(const HfFlash2ForwardParams& params, int seqlen, int64_t rows, int block) {
  const int64_t all = ceil_div(seqlen, block);
  if (params.window_left < 0 || params.window_right < 0) return all;
  const int64_t seen = int64_t{params.window_left} + params.window_right + rows;  // and these may begin anywhere in a block
  return std::min(all, ceil_div(seen - 1, block) + 1);
}

// Of heads whose tiles take turns, so many at most, and how many L2 holds: of what tiles of one head read or add again and again.
constexpr int64_t kMostHeadsAtOnce = 16;
inline int64_t heads_in_l2(int64_t bytes_of_head) {
  constexpr int64_t kBytes = 32 << 20;
  return std::max<int64_t>(1, kBytes / std::max<int64_t>(1, bytes_of_head));
}

enum class TileOrder : int {
  kByHead,           // blocks of one head one after another: what few heads read is in L2 at any time
  kLastBlockFirst,   // by descending block inside groups of heads: under a causal mask the short blocks of queries fill the gaps at the end
  kFirstBlockFirst,  // by ascending block inside groups of heads: the same for blocks of keys
  kPairs,  // the first and the last block left of one head, or the middle ones of two: under a causal mask all pairs are equal work
};

// Division by a number known on the host: n / d = n * ceil(2^p / d) >> p with p = 31 + ceil(log2 d), exact for 0 <= n < 2^31 (Granlund and
// Montgomery, "Division by Invariant Integers using Multiplication"): the upper half of 2 n times the multiplier, shifted. PERF: an integer
// division takes a GPU some 100 cycles, and what is divided here stands before the first load of a thread block.
struct Divisor {
  uint32_t divisor, multiplier;
  int shift;

  static Divisor of(int d) {
    int log2 = 0;
    while ((int64_t{1} << log2) < d) ++log2;
    return {static_cast<uint32_t>(d), static_cast<uint32_t>(((uint64_t{1} << (31 + log2)) + d - 1) / d), log2};
  }
  __host__ __device__ int quotient(int n) const {
    const uint64_t product = static_cast<uint64_t>(2 * static_cast<uint32_t>(n)) * multiplier;
    return static_cast<int>(static_cast<uint32_t>(product >> 32) >> shift);
  }
  __host__ __device__ int remainder(int n) const { return n - quotient(n) * static_cast<int>(divisor); }
};

struct TileScheduler {
  TileOrder order;
  int blocks;  // of the longest sequence
  int heads;   // heads * batch; where tiles hold all heads of a group, groups * batch
  int group;   // heads that share the L2; 1 for kByHead; of kPairs those whose pairs are whole, 1, or 2 of an odd number of blocks
  Divisor units_of_group;
  int last_group;      // its number
  Divisor full, last;  // heads of a group, and of the last one
  int back_from;       // units from this one on come in the opposite order

  // The last `together` groups are one, if there are groups.
  static TileScheduler make(TileOrder order, int blocks, int heads, int group, int together = 1) {
    const bool grouped = order != TileOrder::kByHead && order != TileOrder::kPairs;
    group = grouped ? std::max(1, std::min(group, heads)) : order == TileOrder::kPairs ? 1 + blocks % 2 : 1;
    const int last_group = std::max<int>(0, ceil_div(heads, group) - (grouped ? together : 1));
    const Divisor last = Divisor::of(std::max(1, heads - last_group * group));
    TileScheduler scheduler{order, blocks, heads, group, {}, last_group, Divisor::of(group), last, INT_MAX};
    scheduler.units_of_group = Divisor::of(std::max(1, blocks * group / scheduler.tiles_per_unit()));
    return scheduler;
  }

  // For units that all run at once, the long ones first, several on a multiprocessor: each begins with one of the first `multiprocessors`, and
  // gets the shortest of the others beside the longest of these.
  void go_back(int multiprocessors) { back_from = multiprocessors; }

  __host__ __device__ int tiles_per_unit() const { return order == TileOrder::kPairs ? 2 : 1; }
  __host__ __device__ int64_t units() const {
    if (order != TileOrder::kPairs) return static_cast<int64_t>(blocks) * heads;
    return static_cast<int64_t>(units_of_group.divisor) * (last_group + 1);
  }

  // Block and (batch * heads + head) of tile `part` of a unit; false when there is none (of the second of two heads, where there is but one left).
  __device__ __forceinline__ bool tile(int unit, int part, int& block, int& batch_head) const {
    if (unit >= back_from) unit = static_cast<int>(units()) - 1 - (unit - back_from);
    const int number = min(units_of_group.quotient(unit), last_group), rest = unit - number * static_cast<int>(units_of_group.divisor);
    if (order == TileOrder::kPairs) {  // of the one head, of the other, and the middle ones
      const int pairs = blocks / 2, of_head = rest < pairs ? rest : rest - pairs;
      const bool is_middle = rest == 2 * pairs;
      batch_head = number * group + (is_middle ? part : rest >= pairs);
      block = is_middle ? pairs : part == 0 ? blocks - 1 - of_head : of_head;
      return batch_head < heads;
    }
    const Divisor& heads_here = number < last_group ? full : last;
    block = heads_here.quotient(rest);
    batch_head = number * group + rest - block * static_cast<int>(heads_here.divisor);
    if (order == TileOrder::kLastBlockFirst) block = blocks - 1 - block;
    return true;
  }

  // Of kPairs, of an even number of blocks: the tiles of the units from `first` on, by descending work; `number` counts from 0 to twice these units.
  __device__ __forceinline__ bool tile_of_rest(int first, int number, int& block, int& batch_head) const {
    // Units of a head are numbered by descending work of their longer tile. Of the first head here, those before `skipped` are not among these.
    const int of_head = blocks / 2, rest = static_cast<int>(units()) - first, place = number < rest ? number : 2 * rest - 1 - number;
    const int first_head = first / of_head, skipped = first - first_head * of_head;
    const int whole_heads = heads - first_head - (skipped > 0), before = skipped * whole_heads;
    const int heads_here = place < before ? whole_heads : heads - first_head;
    const int from = place < before ? 0 : before;
    const int pair = (place < before ? 0 : skipped) + (place - from) / heads_here;
    const int head = heads - heads_here + (place - from) % heads_here;
    return tile(head * of_head + pair, number < rest ? 0 : 1, block, batch_head);
  }

  // As tile(), among so many heads of so many blocks each, a part of all, which only the device knows. Not for kPairs.
  __device__ __forceinline__ void tile_among(int blocks, int heads, int unit, int& block, int& head) const {
    const int first_head = unit / (blocks * group) * group;
    const int heads_here = min(group, heads - first_head);
    const int rest = unit - first_head * blocks;
    block = rest / heads_here;
    if (order == TileOrder::kLastBlockFirst) block = blocks - 1 - block;
    head = first_head + rest % heads_here;
  }
};

// The blocks there are of sequences whose lengths only the device may know, numbered sequence by sequence. Numbers are asked for in ascending
// order.
struct CountedBlocks {
  int first_batch = 0;    // the sequence that comes before all others; these are in order
  int at = 0, first = 0;  // a sequence, counted as they come, and the number of its first block

  // count(batch): blocks of each of its heads. Not for kPairs.
  template <typename F>
  __device__ __forceinline__ bool find(const TileScheduler& scheduler, int batches, int heads, int number, const F& count, int& block,
                                       int& batch_head) {
    for (; at < batches; ++at) {
      const int batch = batch_in_order(at, first_batch), blocks = count(batch);
      if (number < first + blocks * heads) {
        scheduler.tile_among(blocks, heads, number - first, block, batch_head);
        batch_head += batch * heads;
        return true;
      }
      first += blocks * heads;
    }
    return false;
  }
};

}  // namespace hf_flash2::sm90
