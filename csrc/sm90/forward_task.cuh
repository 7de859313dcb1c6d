// What a thread block of the Hopper forward works on: its launch arguments, the tiles, and where their rows go.
#pragma once
#include <cuda.h>

#include "attention/dropout.cuh"
#include "attention/gaps.cuh"
#include "attention/mask.cuh"
#include "attention/sequence_table.cuh"
#include "attention/softcap.cuh"
#include "device/grid_dependency.cuh"
#include "device/semaphore.cuh"
#include "device/shared_memory.cuh"
#include "sm90/scheduler.h"

namespace hf_flash2::sm90 {

// Where thread blocks leave out and lse: results or, of shares, scratch, where those of a token lie side by side.
struct ForwardResults {
  HfFlash2Tensor out;  // of shares: floats, each share divided by its own sum, head_dim_v apart
  float* lse;          // natural log, +inf where no key is seen
  int64_t lse_batch_stride, lse_head_stride;

  static ForwardResults of(const HfFlash2ForwardParams& params) {
    return {params.out, params.softmax_lse, params.lse_batch_stride, params.lse_head_stride};
  }

  static int64_t share_rows(const HfFlash2ForwardParams& params) {
    const int64_t tokens = params.sequences_q.cu_seqlens != nullptr ? params.total_q : int64_t{params.batch} * params.max_seqlen_q;
    return tokens * params.heads_q;
  }
  static int64_t share_bytes(const HfFlash2ForwardParams& params, int splits) {
    return share_rows(params) * splits * (params.head_dim_v + 1) * 4;
  }
  // out [batch, heads, tokens, splits, Dv], then lse [batch, heads, tokens, splits]; packed: no batch.
  static ForwardResults of_shares(const HfFlash2ForwardParams& params, int splits) {
    const bool packed = params.sequences_q.cu_seqlens != nullptr;
    const int64_t of_head = int64_t{packed ? params.total_q : params.max_seqlen_q} * splits,
                  of_batch = packed ? 0 : of_head * params.heads_q;
    const int64_t columns = params.head_dim_v;
    float* const out = static_cast<float*>(params.workspace);
    return {{out, of_batch * columns, splits * columns, of_head * columns}, out + share_rows(params) * splits * columns, of_batch, of_head};
  }

  // Of the first split.
  __device__ __forceinline__ float* lse_of(int batch, int head, int token, int splits) const {
    return lse + batch * lse_batch_stride + head * lse_head_stride + int64_t{token} * splits;
  }
};

// Tiles that make no whole round over the thread blocks: their key blocks, counted tile after tile, are shared by all, an equal run for
// each. All tiles have as many key blocks. A piece is what one thread block computes of one tile; the slot of a piece is their numbers'
// sum.
struct SharedTiles {
  int tiles, key_blocks;  // how many there are, and of each
  int run;                // key blocks of a thread block; 0: no tile is shared
  float *out, *lse;       // of pieces: [slots, kBlockM, Dv], divided by their own sum, and [slots, kBlockM]

  __host__ __device__ bool any() const { return run > 0; }
  int slots() const { return any() ? (tiles * key_blocks + run - 1) / run + tiles : 0; }
  // The thread blocks that have a piece of a tile.
  __device__ __forceinline__ int first_of(int tile) const { return tile * key_blocks / run; }
  __device__ __forceinline__ int last_of(int tile) const { return ((tile + 1) * key_blocks - 1) / run; }
};

// A thread block's share of a tile's key blocks.
struct Piece {
  int slot = -1;  // none: it has all, or as many as its split
  int begin, end;
};

struct ForwardArguments {
  CUtensorMap q, k, v;  // make_sequence_map(), of pages make_tensor_map(): boxes of 64 columns x one tile of rows; of q, x a part of them
  CUtensorMap out;      // the same: boxes of 64 columns x the rows of one warpgroup
  CUtensorMap zero_queries, zero_keys;  // for columns behind those of a head, at the same coordinates: zeros
  int map_rows_q, map_rows_k;           // of a sequence, in the maps
  HfFlash2ForwardParams params;
  Divisor heads, group;    // tiles of one token over all heads; query heads that share a key head
  int tile_heads_log2;     // row r of a tile is query r >> this of head r % 2^this: those of one head (0), or of all in a group
  Divisor splits;          // how many units share the key blocks of a tile; 1: results are final
  ForwardResults results;  // of the whole or, with splits, of shares
  TileScheduler scheduler;
  int whole_units;  // of the scheduler, and of each split; behind them the rest of kPairs, or the shared tiles
  SharedTiles shared;
  ScoreCap cap;
  DropoutRate dropout;
  int32_t* next_tile;   // counts the tiles that thread blocks take one after another; null: they have equal shares
  SequenceTable table;  // of query blocks
  int most_blocks;      // that may stand there

  // Whether the longest sequence comes first: its tiles multiply more of what they load than short ones, and zeros in gaps are written beside the
  // first tiles. PERF: filled to 30 %, 2k, 3 to 4 %; of more than a few sequences nothing, but every thread block looks for it. TUNING.md, "Zeros in
  // gaps".
  __device__ __forceinline__ bool begins_with_longest() const {
    return next_tile != nullptr && may_have_gaps(params) && params.batch <= kFewSequences;
  }
  // Query blocks of a sequence, or where heads of a group share tiles, of these.
  template <int kBlockM>
  __device__ __forceinline__ int blocks_of(int batch) const {
    const int queries = find_sequence(params.sequences_q, params.batch, batch, params.max_seqlen_q).length;
    return ((queries << tile_heads_log2) + kBlockM - 1) / kBlockM;
  }
  template <int kBlockM>
  __device__ __forceinline__ auto counted_sequences(int first_batch) const {
    return count_sequences(params.batch, first_batch, [this](int batch) { return blocks_of<kBlockM>(batch); });
  }
};

// A query block and a share of its keys. The loader finds it and leaves it in shared memory for the consumers.
// PERF: finding it takes some 1,400 cycles of one thread, which the loader has, but for the first, and a consumer does not.
struct ForwardTask {
  int batch, head;  // the first of the tile's heads; kNone: there are no more tiles
  int row_begin;    // of the tile: heads are rows too
  int split;
  Sequence q, k;
  int key_block_begin, key_block_end;
  int unmasked_begin, unmasked_end;  // key blocks of which every row sees every key; none where there are holes
  int has_holes;
  int slot;  // of a piece, or -1
  static constexpr int kNone = -1, kBytes = 64;

  template <int kBlockM, int kBlockN>
  static __device__ __forceinline__ ForwardTask make(const ForwardArguments& arguments, int query_block, int batch_head, int split,
                                                     const Piece& piece) {
    const HfFlash2ForwardParams& params = arguments.params;
    const int batch = arguments.heads.quotient(batch_head), head = arguments.heads.remainder(batch_head) << arguments.tile_heads_log2;
    const int queries = kBlockM >> arguments.tile_heads_log2, query_begin = query_block * queries, query_end = query_begin + queries;
    const Sequence q = find_sequence(params.sequences_q, params.batch, batch, params.max_seqlen_q);
    const Sequence k = find_sequence(params.sequences_k, params.batch, batch, params.max_seqlen_k);
    const Mask mask(params, batch, q, k);
    const int begin = mask.key_block_begin(query_begin, kBlockN);
    const int blocks = query_begin < q.length ? max(0, mask.key_block_end(query_end, kBlockN) - begin) : 0;
    ForwardTask task;
    task.batch = batch, task.head = head, task.row_begin = query_block * kBlockM, task.split = split;
    task.q = q, task.k = k;
    task.key_block_begin = begin + arguments.splits.quotient(blocks * split);
    task.key_block_end = begin + arguments.splits.quotient(blocks * (split + 1));
    task.unmasked_begin = mask.unmasked_block_begin(query_end, kBlockN), task.unmasked_end = mask.unmasked_block_end(query_begin, kBlockN);
    task.has_holes = mask.visible != nullptr;
    if (task.has_holes) task.unmasked_end = 0;
    task.slot = piece.slot;
    if (piece.slot >= 0) task.key_block_begin = piece.begin, task.key_block_end = piece.end;
    return task;
  }
  static __device__ __forceinline__ ForwardTask none() {
    ForwardTask task{};
    task.head = kNone;
    return task;
  }

  // Of the rows of the tile from `row` on.
  __device__ __forceinline__ int query_begin(const ForwardArguments& arguments, int row = 0) const {
    return (row_begin + row) >> arguments.tile_heads_log2;
  }
  __device__ __forceinline__ bool is_masked(int block) const { return block >= unmasked_end || block < unmasked_begin; }

  __device__ __forceinline__ void store(uint32_t address) const {
    store_shared(address, make_uint4(batch, head, row_begin, split));
    store_shared(address + 16, make_uint4(q.start, q.length, k.start, k.length));
    store_shared(address + 32, make_uint4(key_block_begin, key_block_end, unmasked_begin, unmasked_end));
    store_shared(address + 48, make_uint4(has_holes, slot, 0, 0));
  }
  static __device__ __forceinline__ ForwardTask load(uint32_t address) {
    const uint4 a = load_shared_uint4(address), b = load_shared_uint4(address + 16), c = load_shared_uint4(address + 32),
                d = load_shared_uint4(address + 48);
    ForwardTask task;
    task.batch = a.x, task.head = a.y, task.row_begin = a.z, task.split = a.w;
    task.q.start = b.x, task.q.length = b.y, task.k.start = b.z, task.k.length = b.w;
    task.key_block_begin = c.x, task.key_block_end = c.y, task.unmasked_begin = c.z, task.unmasked_end = c.w;
    task.has_holes = d.x, task.slot = d.y;
    return task;
  }
};

// Calls f(query_block, batch_head, split, piece) for every tile of a worker, a thread block or a cluster of kBlocks: of its equal share, one
// of every round over the workers, and then of what makes no whole round, pieces of the shared tiles, or of kPairs tiles: the longest first, one
// for each worker, then the others, the shortest to who has the longest.
// kStepOn: not at the same place of every round, but one further on. Where their number is a multiple of a head's tiles, some would else
// have all of the last tiles of heads, which may be less work.
template <bool kStepOn, bool kSharesTiles, int kBlocks, typename F>
__device__ __forceinline__ void for_each_tile(const ForwardArguments& arguments, const F& f) {
  const TileScheduler& scheduler = arguments.scheduler;
  const SharedTiles& shared = arguments.shared;
  const int units = arguments.whole_units, workers = gridDim.x / kBlocks, worker = blockIdx.x / kBlocks;
  const int rest = scheduler.order == TileOrder::kPairs ? 2 * (static_cast<int>(scheduler.units()) - units) : 0;
  int place = worker;  // in the round
  int unit = place, part = 0, number = place;
  int key_block = kSharesTiles ? worker * shared.run : 0;  // of the shared tiles, the first that is left
  const int key_block_end = kSharesTiles ? min(key_block + shared.run, shared.tiles * shared.key_blocks) : 0;
  while (true) {  // f stands once: the code of a tile's loads is long
    int query_block, batch_head, split = 0;
    Piece piece;
    bool there = true;
    if (unit < units) {
      there = scheduler.tile(arguments.splits.quotient(unit), part, query_block, batch_head);
      split = arguments.splits.remainder(unit);
      if (++part == scheduler.tiles_per_unit()) {
        part = 0;
        if (++place == workers) place = 0;
        unit += !kStepOn ? workers : place > 0 ? workers + 1 : 1;
      }
    } else if (number < rest) {
      there = scheduler.tile_of_rest(units, number, query_block, batch_head);
      number = number < workers ? 2 * workers - 1 - number : rest;
    } else if (kSharesTiles && key_block < key_block_end) {
      const int tile = key_block / shared.key_blocks, begin = key_block - tile * shared.key_blocks;
      piece = {worker + tile, begin, min(shared.key_blocks, begin + key_block_end - key_block)};
      scheduler.tile(units + tile, 0, query_block, batch_head);
      key_block += piece.end - begin;
    } else {
      return;
    }
    if (there) f(query_block, batch_head, split, piece);
  }
}

// The same of those that it takes from the counter, the first apart. first_batch: the sequence that comes first; take(): the number of the next.
template <int kBlockM, int kBlocks, typename Take, typename F>
__device__ __forceinline__ void for_each_counted_tile(const ForwardArguments& arguments, int first_batch, const Take& take, const F& f) {
  const HfFlash2ForwardParams& params = arguments.params;
  const auto count = [&](int batch) { return arguments.blocks_of<kBlockM>(batch); };
  const int heads = static_cast<int>(arguments.heads.divisor);
  CountedBlocks tiles{first_batch};
  int query_block, batch_head;
  for (int number = blockIdx.x / kBlocks; tiles.find(arguments.scheduler, params.batch, heads, number, count, query_block, batch_head);) {
    f(query_block, batch_head, 0, Piece{});
    number = take();
  }
  wait_for_kernel_before();
}

// The same where there is a table; at: the sequence of the first, before that is there.
template <int kBlockM, int kBlocks, typename Take, typename F>
__device__ __forceinline__ void for_each_listed_tile(const ForwardArguments& arguments, CountedSequence at, const Take& take, const F& f) {
  const int heads = static_cast<int>(arguments.heads.divisor);
  const auto count = [&](int batch) { return arguments.blocks_of<kBlockM>(batch); };
  for (int number = blockIdx.x / kBlocks; at.blocks > 0; at = arguments.table.find(arguments.heads.quotient(number), count)) {
    int query_block, head;
    arguments.scheduler.tile_among(at.blocks, heads, number - at.first * heads, query_block, head);
    f(query_block, at.batch * heads + head, 0, Piece{});
    number = take();
  }
  wait_for_kernel_before();
}

// Where row `row` of a tile goes: its batch, head and token.
struct OutputRow {
  int batch, head, token;
  bool valid;

  __device__ __forceinline__ OutputRow(const ForwardArguments& arguments, const ForwardTask& task, int row) {
    const int query = row >> arguments.tile_heads_log2;
    batch = task.batch, head = task.head + (row & ((1 << arguments.tile_heads_log2) - 1)), token = task.q.start + query;
    valid = query < task.q.length;
  }
};

}  // namespace hf_flash2::sm90
