// FlashAttention-2 backward for Hopper, head dims to 128, of short sequences: small thread blocks of one warpgroup, several on a multiprocessor, so
// that others compute while one waits. Dao, arXiv 2307.08691, algorithm 2, as two passes over the scores.
// Launched by backward_short_launch.cuh behind short_preprocess_kernel (delta).
//
// A thread block has 64 tokens of a sequence and a key head. First, as keys: their dK and dV stay in registers while the query blocks that see them
// come by, over all query heads that share the key head. Then, as queries of each of these heads: dQ stays there, while the key blocks that they
// see come by, for which S, P, dP and dS are computed again. So nothing is added to global memory: no fp32 accumulator of dQ, no order to keep, and
// the same bits from run to run. Where queries and keys are the same tokens, their own dS is not computed again: of the last head it stays from the
// first pass, and where they see no others, dQ of each head follows at once. Of a causal sequence the first tokens have most queries, and the last
// most keys: all its thread blocks have as much to do.
#pragma once
#include "attention/block_owners.cuh"
#include "sm90/backward_parts.cuh"

namespace hf_flash2::sm90 {

template <int kHeadDimension>
struct BackwardShortShape : BackwardShortTile<kHeadDimension> {
  using Tile = BackwardShortTile<kHeadDimension>;
  static constexpr int kHeadDim = kHeadDimension, kThreads = 128;
  static constexpr int kPanels = (kHeadDim + 63) / 64, kPanelBytes = 64 * 128, kTileBytes = kPanels * kPanelBytes;
  static constexpr int kKeyPanelBytes = kPanelBytes, kQueryPanelBytes = kPanelBytes, kRowBytes = 64 * 4;
  static_assert(Tile::kBlockM == 64 && Tile::kBlockN == 64, "both are the rows of a warpgroup, and of a panel");
  static constexpr bool kOneByOne = Tile::kBlocksPerSm > 2;  // dP not beside S and dV: there are no registers for it
  static constexpr int kDqColumns = 0;                       // Workspace: nothing is accumulated there
};

// Shared memory: pairs of tiles, K and V or Q and dO: one that stays and two that take turns; dS; of each pair, delta and lse * log2e of its
// queries; what the loader and stores need to know.
template <typename Shape>
struct BackwardShortShared {
  static constexpr int kPairBytes = 2 * Shape::kTileBytes, kPairs = 3, kTiles = kPairs * kPairBytes, kTaskBytes = 48;
  static constexpr int kBytes = kTiles + Shape::kPanelBytes + kPairs * (2 * Shape::kRowBytes + 8) + kTaskBytes;
  uint32_t base;

  __device__ __forceinline__ uint32_t first(int pair) const { return base + pair * kPairBytes; }          // K or Q
  __device__ __forceinline__ uint32_t second(int pair) const { return first(pair) + Shape::kTileBytes; }  // V or dO
  __device__ __forceinline__ uint32_t ds() const { return base + kTiles; }
  __device__ __forceinline__ uint32_t delta(int pair) const { return ds() + Shape::kPanelBytes + pair * (2 * Shape::kRowBytes); }
  __device__ __forceinline__ uint32_t lse_log2(int pair) const { return delta(pair) + Shape::kRowBytes; }
  __device__ __forceinline__ uint32_t task() const { return delta(kPairs); }
  __device__ __forceinline__ uint32_t queries() const { return task() + 32; }  // the block of the second pass
  __device__ __forceinline__ uint32_t full(int pair) const { return task() + kTaskBytes + pair * 8; }
};

struct BackwardShortArguments {
  CUtensorMap q, k, v, dout;            // make_sequence_map()
  CUtensorMap zero_queries, zero_keys;  // make_tensor_map(), for boxes behind the last column
  int map_rows_q, map_rows_k;           // of a sequence, in the maps
  const float* tile_rows;               // of the Workspace: delta and lse * log2e of each tile
  HfFlash2BackwardParams params;
  BlockOwners<64> owners_q, owners_k;
  Divisor blocks_q, blocks_k;  // of the longest sequence
  Divisor heads_k, group;
  CUtensorMap dq, dk, dv;  // make_sequence_map()

  __device__ __forceinline__ int map_batch(int batch) const { return owners_q.of != nullptr ? 0 : batch; }
};

// PERF: in shared memory, where it is read again for each use, as registers are what limits the thread blocks of a multiprocessor.
struct ShortTask {
  Sequence q, k;
  int batch, first_head;  // query head
  int first_tile;         // number (Workspace) of the first query block of the first query head
  int head_tiles;         // of a head

  __device__ __forceinline__ void store(uint32_t address) const {
    store_shared(address, make_uint4(q.start, q.length, k.start, k.length));
    store_shared(address + 16, make_uint4(batch, first_head, first_tile, head_tiles));
  }
  static __device__ __forceinline__ ShortTask load(uint32_t address) {
    const auto i = [](uint32_t x) { return static_cast<int>(x); };
    const uint4 a = load_shared_uint4(address), b = load_shared_uint4(address + 16);
    return {{i(a.x), i(a.y)}, {i(a.z), i(a.w)}, i(b.x), i(b.y), i(b.z), i(b.w)};
  }
};

// The copies of a thread block, by one thread.
template <typename Shape>
struct ShortLoader {
  const BackwardShortArguments& arguments;
  const BackwardShortShared<Shape>& shared;

  __device__ __forceinline__ void load(uint32_t tile, const CUtensorMap* map, const CUtensorMap* zeros, int pair, int map_rows,
                                       const Sequence& sequence, int block, int head, int batch, int columns) const {
    const int map_batch = arguments.map_batch(batch);
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel) {
      const int column = panel * 64;
      if (panel == 0 || column < columns)
        tma_load(tile + panel * Shape::kPanelBytes, map, shared.full(pair), column, map_rows - sequence.length + block * 64,
                 sequence.start + sequence.length, head, map_batch);
      else
        tma_load(tile + panel * Shape::kPanelBytes, zeros, shared.full(pair), 0, map_rows, 0, 0);
    }
  }
  __device__ __forceinline__ void load_keys(int pair, int block) const {
    const HfFlash2ForwardParams& forward = arguments.params.forward;
    const ShortTask task = ShortTask::load(shared.task());
    const int head = arguments.group.quotient(task.first_head);
    mbarrier_arrive_expect(shared.full(pair), 2 * Shape::kTileBytes);
    load(shared.first(pair), &arguments.k, &arguments.zero_keys, pair, arguments.map_rows_k, task.k, block, head, task.batch,
         forward.head_dim);
    load(shared.second(pair), &arguments.v, &arguments.zero_keys, pair, arguments.map_rows_k, task.k, block, head, task.batch,
         forward.head_dim_v);
  }
  __device__ __forceinline__ void load_queries(int pair, int head, int block) const {
    const HfFlash2ForwardParams& forward = arguments.params.forward;
    const ShortTask task = ShortTask::load(shared.task());
    const int tile = task.first_tile + head * task.head_tiles + block;
    head += task.first_head;
    mbarrier_arrive_expect(shared.full(pair), 2 * Shape::kTileBytes + 2 * Shape::kRowBytes);
    load(shared.first(pair), &arguments.q, &arguments.zero_queries, pair, arguments.map_rows_q, task.q, block, head, task.batch,
         forward.head_dim);
    load(shared.second(pair), &arguments.dout, &arguments.zero_queries, pair, arguments.map_rows_q, task.q, block, head, task.batch,
         forward.head_dim_v);
    bulk_load(shared.delta(pair), arguments.tile_rows + static_cast<int64_t>(tile) * (2 * 64), 2 * Shape::kRowBytes, shared.full(pair));
  }
};

// A gradient of 64 tokens, rounded, to a tile whose contents nobody needs any more.
template <typename Shape, typename T>
__device__ __forceinline__ void write_gradient(uint32_t tile, const float (&gradient)[Shape::kHeadDim / 8][4]) {
  uint32_t rounded[Shape::kHeadDim / 4];
  round_tiles<T, Shape::kHeadDim / 8>(rounded, gradient);
  store_panels<Shape::kPanelBytes, Shape::kHeadDim / 8>(tile, rounded);
}

// From there to its rows in global memory, by one thread, behind a barrier. The tile may be written again after bulk_wait_read().
// PERF: in place of rows stored from registers, 200 instructions for 64 columns, exchanged between lanes: 65. One H200, packed, causal, to 64, 128,
// 256 tokens, d 64 5 4 4 % faster, d 128 10 8 6. TUNING.md, "Small thread blocks".
template <typename Shape>
__device__ __forceinline__ void store_gradient(const CUtensorMap* map, uint32_t tile, int map_rows, const Sequence& sequence, int block,
                                               int head, int map_batch, int columns) {
#pragma unroll
  for (int panel = 0; panel < Shape::kPanels; ++panel) {
    const int column = panel * 64;
    if (panel == 0 || column < columns)
      tma_store<true>(map, tile + panel * Shape::kPanelBytes, column, map_rows - sequence.length + block * 64,
                      sequence.start + sequence.length, head, map_batch);
  }
  bulk_commit();
}

// Rounds over blocks [begin, end), each from `first` on.
struct ShortWalk {
  int begin, end, first, rounds, block;  // rounds: left, this one too

  __device__ __forceinline__ ShortWalk(int begin, int end, int first, int rounds)
      : begin(begin), end(end), first(first), rounds(begin < end ? rounds : 0), block(first) {}
  __device__ __forceinline__ bool has_more() const { return rounds > 0; }
  __device__ __forceinline__ void advance() {
    if (++block == end) block = begin;
    if (block == first) --rounds;
  }
};

__device__ __forceinline__ bool needs_mask(const Mask& mask, int query_begin, int key_begin) {
  return mask.visible != nullptr || mask.needed(query_begin, query_begin + 64, key_begin, key_begin + 64);
}

// One query block after another, for the keys that stay, in pair 0: adds to dK and dV. stores_ds: dS to shared memory, too.
template <typename Shape, typename T>
__device__ __forceinline__ void add_key_gradients(const BackwardShortShared<Shape>& shared, float (&dk)[Shape::kHeadDim / 8][4],
                                                  float (&dv)[Shape::kHeadDim / 8][4], int pair, const Mask& mask, int key_begin,
                                                  int query_begin, float scale_log2, bool stores_ds) {
  float p[8][4], ds[8][4];
  uint32_t p_rounded[16], ds_rounded[16];
  issue_scores<Shape, T>(&p[0][0], shared.first(0), shared.first(pair));
  if constexpr (!Shape::kOneByOne) issue_scores<Shape, T>(&ds[0][0], shared.second(0), shared.second(pair));
  wgmma_wait<Shape::kOneByOne ? 0 : 1>();
  wgmma_use<32>(&p[0][0]);
  if (needs_mask(mask, query_begin, key_begin)) ScoreLane(mask, key_begin).apply_mask(p, mask, query_begin);
#pragma unroll
  for (int n = 0; n < 8; n += 2) exponentiate<2>(p + n, RowValues<2>(shared.lse_log2(pair) + n * 32), scale_log2);
  round_tiles<T, 8>(p_rounded, p);
  issue_key_gradient<Shape, T>(&dv[0][0], p_rounded, shared.second(pair));
  if constexpr (Shape::kOneByOne) {
    wgmma_wait<0>();
    issue_scores<Shape, T>(&ds[0][0], shared.second(0), shared.second(pair));
  }
  wgmma_wait<Shape::kOneByOne ? 0 : 1>();
  wgmma_use<32>(&ds[0][0]);
#pragma unroll
  for (int n = 0; n < 8; n += 2) differentiate<false>(ds + n, p + n, RowValues<2>(shared.delta(pair) + n * 32));
  round_tiles<T, 8>(ds_rounded, ds);
  issue_key_gradient<Shape, T>(&dk[0][0], ds_rounded, shared.first(pair));
  if (stores_ds) store_panels<Shape::kPanelBytes, 8>(shared.ds(), ds_rounded);
  wgmma_wait<0>();
}

// dQ = dS K of what add_key_gradients() has stored.
template <typename Shape, typename T>
__device__ __forceinline__ void multiply_ds(const BackwardShortShared<Shape>& shared, float (&dq)[Shape::kHeadDim / 8][4]) {
  constexpr int kLast = Shape::kHeadDim % 64 == 0 ? 64 : Shape::kHeadDim % 64;
#pragma unroll
  for (int panel = 0; panel + 1 < Shape::kPanels; ++panel)
    issue_query_gradient<Shape, T, 64>(&dq[panel * 8][0], shared.ds(), shared.first(0) + panel * Shape::kPanelBytes);
  constexpr int kLastPanel = Shape::kPanels - 1;
  issue_query_gradient<Shape, T, kLast>(&dq[kLastPanel * 8][0], shared.ds(), shared.first(0) + kLastPanel * Shape::kPanelBytes);
  wgmma_wait<0>();
  wgmma_use<Shape::kHeadDim / 2>(&dq[0][0]);
}

// dQ of a query head, by way of a tile.
template <typename Shape, typename T>
__device__ __forceinline__ void store_query_gradient(const BackwardShortArguments& arguments, const BackwardShortShared<Shape>& shared,
                                                     float (&dq)[Shape::kHeadDim / 8][4], uint32_t tile, int head, int query_block) {
  const HfFlash2ForwardParams& forward = arguments.params.forward;
#pragma unroll
  for (int i = 0; i < Shape::kHeadDim / 2; ++i) (&dq[0][0])[i] *= forward.softmax_scale;
  write_gradient<Shape, T>(tile, dq);
  __syncthreads();
  if (threadIdx.x != 0) return;
  const ShortTask task = ShortTask::load(shared.task());
  store_gradient<Shape>(&arguments.dq, tile, arguments.map_rows_q, task.q, query_block, task.first_head + head,
                        arguments.map_batch(task.batch), forward.head_dim);
}

// One key block after another, for the queries that stay: adds to dQ.
template <typename Shape, typename T>
__device__ __forceinline__ void add_query_gradient(const BackwardShortShared<Shape>& shared, float (&dq)[Shape::kHeadDim / 8][4], int stays,
                                                   int pair, const Mask& mask, int query_begin, int key_begin, float scale_log2) {
  float p[1][8][4], ds[8][4];
  uint32_t ds_rounded[16];
  issue_scores<Shape, T>(&p[0][0][0], shared.first(stays), shared.first(pair));
  issue_scores<Shape, T>(&ds[0][0], shared.second(stays), shared.second(pair));
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
  float lse_log2[2], delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    lse_log2[half] = load_shared_float(shared.lse_log2(stays) + (row + half * 8) * 4);
    delta[half] = load_shared_float(shared.delta(stays) + (row + half * 8) * 4);
  }
  wgmma_wait<1>();
  wgmma_use<32>(&p[0][0][0]);
  if (needs_mask(mask, query_begin, key_begin))
    mask.apply(p, query_begin + row, key_begin + ScoreLane::query(), mask.visible_columns(key_begin));
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) p[0][n][c] = exp2_approx(fmaf(p[0][n][c], scale_log2, -lse_log2[c / 2]));
  }
  wgmma_wait<0>();
  wgmma_use<32>(&ds[0][0]);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) ds[n][c] = p[0][n][c] * (ds[n][c] - delta[c / 2]);
  }
  round_tiles<T, 8>(ds_rounded, ds);
  issue_key_gradient<Shape, T>(&dq[0][0], ds_rounded, shared.first(pair));
  wgmma_wait<0>();
}

// Zeros in those rows of a block, counted from the first of its row of the batch, that no sequence covers; with ranges only.
template <typename Shape, typename T>
__device__ __forceinline__ void clear_block(const HfFlash2Tensor& tensor, const SequenceBlock& of, int max_seqlen, int head, int columns) {
  constexpr int kChunks = Shape::kPanels * 8;  // of a row, 8 columns each
  T* const rows = token_pointer<T>(tensor, of.batch, head, of.block * 64);
#pragma unroll 1
  for (int i = threadIdx.x; i < 64 * kChunks; i += Shape::kThreads) {
    const int row = i / kChunks, column = i % kChunks * 8, token = of.block * 64 + row;
    if (token < max_seqlen && column < columns && (token < of.sequence.start || token >= of.sequence.start + of.sequence.length))
      __stcs(reinterpret_cast<uint4*>(rows + row * tensor.token_stride + column), make_uint4(0, 0, 0, 0));
  }
}

template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocksPerSm)
    backward_short_kernel(const __grid_constant__ BackwardShortArguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  constexpr int kHeadDim = Shape::kHeadDim;
  const BackwardShortShared<Shape> shared{shared_address(memory)};
  const ShortLoader<Shape> loader{arguments, shared};
  const HfFlash2BackwardParams& params = arguments.params;
  const HfFlash2ForwardParams& forward = params.forward;
  if (threadIdx.x == 0) {
    for (int pair = 0; pair < shared.kPairs; ++pair) mbarrier_init(shared.full(pair), 1);
    mbarrier_init_fence();
  }
  wait_for_kernel_before();
  bulk_global_fence();  // it wrote delta and lse by ordinary stores
  const int number = arguments.heads_k.quotient(blockIdx.x), key_head = arguments.heads_k.remainder(blockIdx.x);
  const SequenceBlock of_k = arguments.owners_k.find(forward.sequences_k, forward.batch, forward.max_seqlen_k, arguments.blocks_k, number);
  const SequenceBlock found_q =
      arguments.owners_q.find(forward.sequences_q, forward.batch, forward.max_seqlen_q, arguments.blocks_q, number);
  const int group = static_cast<int>(arguments.group.divisor);
  const auto clear_gaps_of_block = [&] {
    if (forward.sequences_k.ranges != nullptr && number < arguments.owners_k.blocks) {
      clear_block<Shape, T>(params.dk, of_k, forward.max_seqlen_k, key_head, forward.head_dim);
      clear_block<Shape, T>(params.dv, of_k, forward.max_seqlen_k, key_head, forward.head_dim_v);
    }
    if (forward.sequences_q.ranges != nullptr && number < arguments.owners_q.blocks) {
      for (int head = 0; head < group; ++head)
        clear_block<Shape, T>(params.dq, found_q, forward.max_seqlen_q, key_head * group + head, forward.head_dim);
    }
  };
  if (!of_k.is_there(64)) clear_gaps_of_block();
  if (!of_k.is_there(64) && !found_q.is_there(64)) return;
  const float scale_log2 = forward.softmax_scale * kLog2e;
  const Workspace workspace(params, 64, Shape::kDqColumns);
  const auto make_task = [&](int batch, const Sequence& q, const Sequence& k) {
    if (threadIdx.x != 0) return;
    const int first_head = key_head * group, head_tiles = static_cast<int>(workspace.blocks);
    const int first_block = arguments.owners_q.first_block(batch, q.start, arguments.blocks_q);
    ShortTask{q, k, batch, first_head, first_head * head_tiles + first_block, head_tiles}.store(shared.task());
  };
  // Both passes are of one sequence, and its query block and key block are the same tokens.
  const bool same = of_k.batch == found_q.batch && of_k.block == found_q.block && of_k.sequence.length == found_q.sequence.length;
  if (threadIdx.x == 0)
    store_shared(shared.queries(), make_uint4(found_q.batch, found_q.block, found_q.sequence.start, found_q.sequence.length));
  __syncthreads();
  uint32_t phases = 0;  // a bit for each pair
  const auto wait_for = [&](int pair) {
    mbarrier_wait(shared.full(pair), phases >> pair & 1);
    phases ^= 1u << pair;
  };
  bool kept = false;  // dS of the last step of the first pass, of the query block of the second
  int last_pair = 1;

  if (of_k.is_there(64)) {
    const Sequence q = same ? found_q.sequence : find_sequence(forward.sequences_q, forward.batch, of_k.batch, forward.max_seqlen_q);
    make_task(of_k.batch, q, of_k.sequence);
    // PERF: before it is known which queries see them: 0.5 to 2.5 % faster, padded 1 to 5. TUNING.md, "Small thread blocks".
    if (threadIdx.x == 0) loader.load_keys(0, of_k.block);
    const Mask mask(forward, of_k.batch, q, of_k.sequence);
    const int key_block = of_k.block, key_begin = key_block * 64;
    const int begin = mask.query_block_begin(key_begin, 64), end = mask.query_block_end(key_begin + 64, 64);
    kept = same && key_block >= begin && key_block < end;
    const bool lone = kept && mask.key_block_begin(key_begin, 64) == key_block && mask.key_block_end(key_begin + 64, 64) == key_block + 1;
    const int kept_block = kept ? key_block : -1, lone_block = lone ? key_block : -1;      // -1: none
    ShortWalk at(begin, end, kept && key_block + 1 < end ? key_block + 1 : begin, group);  // the query block that is kept comes last
    const auto load_at = [&](const ShortWalk& walk, int pair) { loader.load_queries(pair, group - walk.rounds, walk.block); };
    if (threadIdx.x == 0) {
      ShortWalk ahead = at;
      for (int pair = 1; pair < 3 && ahead.has_more(); ++pair, ahead.advance()) load_at(ahead, pair);
    }
    clear_gaps_of_block();  // while these come
    float dk[kHeadDim / 8][4], dv[kHeadDim / 8][4];
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] = (&dv[0][0])[i] = 0.f;
    wait_for(0);
    int pair = 1;
#pragma unroll 1
    for (; at.has_more(); at.advance(), pair = 3 - pair) {
      wait_for(pair);
      add_key_gradients<Shape, T>(shared, dk, dv, pair, mask, key_begin, at.block * 64, scale_log2, at.block == kept_block);
      __syncthreads();
      if (at.block == lone_block && at.rounds > 1) {
        float dq[kHeadDim / 8][4];
        multiply_ds<Shape, T>(shared, dq);
        store_query_gradient<Shape, T>(arguments, shared, dq, shared.first(pair), group - at.rounds, key_block);
      }
      if (threadIdx.x == 0) {
        ShortWalk ahead = at;
        ahead.advance();
        if (ahead.has_more()) ahead.advance();
        bulk_wait_read<0>();
        if (ahead.has_more()) load_at(ahead, pair);
      }
    }
    last_pair = 3 - pair;
    wgmma_use<kHeadDim / 2>(&dk[0][0]);
    wgmma_use<kHeadDim / 2>(&dv[0][0]);
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] *= forward.softmax_scale;
    write_gradient<Shape, T>(shared.first(pair), dk);
    write_gradient<Shape, T>(shared.second(pair), dv);
    __syncthreads();
    if (threadIdx.x == 0) {
      const int map_batch = arguments.map_batch(of_k.batch);
      store_gradient<Shape>(&arguments.dk, shared.first(pair), arguments.map_rows_k, of_k.sequence, key_block, key_head, map_batch,
                            forward.head_dim);
      store_gradient<Shape>(&arguments.dv, shared.second(pair), arguments.map_rows_k, of_k.sequence, key_block, key_head, map_batch,
                            forward.head_dim_v);
    }
  }

  const uint4 queries = load_shared_uint4(shared.queries());
  const SequenceBlock of_q{
      static_cast<int>(queries.x), static_cast<int>(queries.y), {static_cast<int>(queries.z), static_cast<int>(queries.w)}};
  if (of_q.is_there(64)) {
    const Sequence k =
        kept ? ShortTask::load(shared.task()).k : find_sequence(forward.sequences_k, forward.batch, of_q.batch, forward.max_seqlen_k);
    const Mask mask(forward, of_q.batch, of_q.sequence, k);
    const int query_block = of_q.block;
    const int begin = mask.key_block_begin(query_block * 64, 64), end = mask.key_block_end(query_block * 64 + 64, 64);
    if (!kept) {
      __syncthreads();
      make_task(of_q.batch, of_q.sequence, k);
    }
    // Where dS is kept, of the last query head, that is first.
    const bool lone = kept && end - begin == 1;
    const int stays = kept ? last_pair : 0, first_pair = last_pair - stays, second_pair = 3 - last_pair;
    const int heads = lone ? 1 : group;
    ShortWalk at(begin, end, kept ? query_block : begin, heads);
    if (kept) at.advance();
    const auto head_of = [&](int round) { return !kept ? round : round == 0 ? group - 1 : round - 1; };
    float dq[kHeadDim / 8][4];
    if (kept) {
      multiply_ds<Shape, T>(shared, dq);
      __syncthreads();  // nobody needs these keys any more
    }
    if (threadIdx.x == 0 && at.has_more()) {
      loader.load_keys(first_pair, at.block);
      if (!kept) loader.load_queries(stays, 0, query_block);
      ShortWalk ahead = at;
      ahead.advance();
      bulk_wait_read<0>();  // dK and dV
      if (ahead.has_more()) loader.load_keys(second_pair, ahead.block);
    }
    int pair = first_pair;
#pragma unroll 1
    for (int round = 0; round < heads; ++round) {
      if (!kept || round > 0) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) (&dq[0][0])[i] = 0.f;
        if (at.has_more()) wait_for(stays);
      }
#pragma unroll 1
      for (; at.rounds == heads - round; at.advance(), pair = first_pair + second_pair - pair) {
        wait_for(pair);
        add_query_gradient<Shape, T>(shared, dq, stays, pair, mask, query_block * 64, at.block * 64, scale_log2);
        __syncthreads();
        if (threadIdx.x == 0) {
          ShortWalk ahead = at;
          ahead.advance();
          if (ahead.has_more()) ahead.advance();
          if (ahead.has_more()) loader.load_keys(pair, ahead.block);
        }
      }
      wgmma_use<kHeadDim / 2>(&dq[0][0]);
      store_query_gradient<Shape, T>(arguments, shared, dq, shared.first(stays), head_of(round), query_block);
      if (round + 1 == heads) break;
      if (threadIdx.x == 0) {
        bulk_wait_read<0>();
        if (at.has_more()) loader.load_queries(stays, head_of(round + 1), query_block);
      }
      if (!at.has_more()) __syncthreads();  // there is no step whose barrier others would wait at
    }
  }
  if (threadIdx.x == 0) bulk_wait_read<0>();  // before this memory is another's
}

}  // namespace hf_flash2::sm90
