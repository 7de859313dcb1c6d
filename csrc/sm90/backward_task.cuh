// What a thread block of the Hopper backward works on: its launch arguments, sizes that follow from a tile, and tasks.
#pragma once
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/sequence_table.cuh"
#include "attention/softcap.cuh"
#include "attention/workspace.cuh"
#include "device/cluster.cuh"
#include "device/semaphore.cuh"
#include "device/shared_memory.cuh"
#include "sm90/scheduler.h"
#include "tiles.h"

namespace hf_flash2::sm90 {

// How the query heads of a group, those that share a key head, are split among tasks (backward_launch.cuh says when), and where: scratch for what
// each split adds to dK and dV, behind the Workspace. Rounded to T each, as eager rounds what each head adds: fp32 would be twice the traffic.
// Key heads are counted over the batch. A part is a key head whose group is whole, of the first ones, or behind these a split of another.
struct GroupSplits {
  void*
      shares;  // of T, [key heads that are split, or Hk of a packed batch, splits, blocks, kKeyGradientElements]: dK of a key block, then dV
  Divisor group;   // query heads of a key head
  Divisor splits;  // of a group; one: no shares
  Divisor heads;   // query heads of a split
  int whole;       // key heads that are not split, where others are
  int64_t blocks;  // key blocks of one head, of a sequence; of a packed batch over all of them, numbered by first_block_of()

  static int64_t count_blocks(const HfFlash2ForwardParams& params, int block_n) {
    if (params.sequences_k.cu_seqlens != nullptr) return params.total_k / block_n + params.batch;
    return (params.max_seqlen_k + block_n - 1) / block_n;
  }

  // Query heads of each part of a key head, and of the first so many parts.
  __host__ __device__ __forceinline__ int heads_of(int key_head) const {
    return static_cast<int>(key_head < whole ? group.divisor : heads.divisor);
  }
  int heads_before(int part) const {
    return std::min(part, whole) * static_cast<int>(group.divisor) + std::max(0, part - whole) * static_cast<int>(heads.divisor);
  }
  __device__ __forceinline__ void find(int part, int& key_head, int& split) const {
    const int of_rest = splits.quotient(max(0, part - whole));
    key_head = part < whole ? part : whole + of_rest;
    split = part < whole ? 0 : part - whole - of_rest * static_cast<int>(splits.divisor);
  }

  // The share of a task whose first query head is `head`. In the order of accumulators: 64 keys after 64 keys, of these 8 columns after 8
  // columns, of these a thread's four elements after each other.
  template <typename Shape, typename T>
  __device__ __forceinline__ T* share(const HfFlash2ForwardParams& params, int batch, int head, int key_block) const {
    const bool packed = params.sequences_k.cu_seqlens != nullptr;
    const int first_head = packed ? 0 : batch * params.heads_q - whole * static_cast<int>(group.divisor);
    const int64_t first_block = packed ? first_block_of(params.sequences_k, batch, params.max_seqlen_k, Shape::kBlockN) : 0;
    return static_cast<T*>(shares) + (heads.quotient(first_head + head) * blocks + first_block + key_block) * Shape::kKeyGradientElements;
  }
};

struct BackwardArguments {
  CUtensorMap q, k, v, dout;            // make_sequence_map()
  CUtensorMap zero_queries, zero_keys;  // make_tensor_map(), for boxes behind the last token
  int map_rows_q, map_rows_k;           // of a sequence, in the maps
  const float* delta;                   // of the Workspace: to find it there takes registers that the loader has not
  HfFlash2BackwardParams params;
  TileScheduler scheduler;
  GroupSplits groups;
  int query_blocks;     // of all heads
  int task_blocks;      // thread blocks that compute
  int rounding_blocks;  // those behind them, which round dQ: rounding.cuh
  int dq_stages;        // of dQ in shared memory, on its way out
  bool tells_stored;    // tasks say kStored
  bool first_stores;    // the first key block that comes to a tile of dQ stores it, as nothing has cleared it
  ScoreCap cap;
  DropoutRate dropout;
  SequenceTable table;  // of key blocks, where counts_units() of short sequences (StoresLone); made by the kernel before

  // Parts of a sequence, where all groups are split alike.
  __device__ __forceinline__ int parts() const { return params.forward.heads_k * static_cast<int>(groups.splits.divisor); }
  // Only the device knows which of the scheduler's units there are.
  __host__ __device__ __forceinline__ bool counts_units() const { return have_lengths(params.forward.sequences_k); }
  template <typename Shape>
  __device__ __forceinline__ int key_blocks_of(int batch) const {
    const HfFlash2ForwardParams& forward = params.forward;
    return count_blocks_of(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k, Shape::kTaskKeys);
  }
  // How many units there are, by a warp.
  template <typename Shape>
  __device__ __forceinline__ int count_units() const {
    if (!counts_units()) return static_cast<int>(scheduler.units());
    int blocks = 0;
    for (int batch = threadIdx.x % 32; batch < params.forward.batch; batch += 32) blocks += key_blocks_of<Shape>(batch);
    for (int offset = 1; offset < 32; offset *= 2) blocks += __shfl_xor_sync(0xffffffffu, blocks, offset);
    return blocks * parts();
  }
};

// Sizes that follow from the tile. A kernel adds kWorkBytes: shared memory of its own, a multiple of 1 KB.
template <int kHeadDimension, int kHeadDimensionV = kHeadDimension>
struct BackwardSizes : BackwardTile<kHeadDimension> {
  using Tile = BackwardTile<kHeadDimension>;
  static constexpr int kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN, kCluster = Tile::kCluster;
  // The thread blocks of a cluster have a task together: each its keys, or above head dim 256 each half the columns of the same keys. kHeadDim
  // and kHeadDimV are the columns of a block.
  static constexpr int kTaskHeadDim = kHeadDimension, kTaskHeadDimV = kHeadDimensionV;
  static constexpr int kColumnParts = kTaskHeadDim > 256 ? kCluster : 1, kTaskBlocks = kCluster / kColumnParts;
  static constexpr int kTaskKeys = kBlockN * kTaskBlocks;
  static constexpr int kHeadDim = kTaskHeadDim / kColumnParts, kHeadDimV = kTaskHeadDimV / kColumnParts;
  static constexpr bool kCapped = false, kDropout = false, kStoresLone = false;
  // Dropout: bits are drawn while S is under way. PERF: d 64 8 to 9 %, d 128 2, d 192 3; d 96 and 256 2 to 3 % slower. TUNING.md, "Dropout".
  static constexpr bool kDrawsEarly = kHeadDim % 64 == 0 && kHeadDim < 256;
  static constexpr int kConsumers = 2, kConsumerThreads = kConsumers * 128, kThreads = kConsumerThreads + 128;
  static constexpr int kPanels = (kHeadDim + 63) / 64, kValuePanels = (kHeadDimV + 63) / 64;
  static constexpr int kKeyPanelBytes = kBlockN * 128, kQueryPanelBytes = kBlockM * 128, kScorePanelBytes = kBlockN * 128;
  static constexpr int kKeyBytes = kKeyPanelBytes * kPanels, kValueBytes = kKeyPanelBytes * kValuePanels;  // K, V
  // Of a cluster, each block computes half the columns of dQ, for all keys: it has as much as it needs of its peer's K, two panels.
  static constexpr int kPeerPanels = kTaskBlocks > 1 ? 2 : 0, kPeerKeyBytes = kPeerPanels * kKeyPanelBytes;
  static __device__ __forceinline__ int first_peer_panel(int rank) { return rank * (kPanels - kPeerPanels); }
  // The first panel of this block's columns.
  static __device__ __forceinline__ int first_panel() { return kColumnParts > 1 ? cluster_rank() * kPanels : 0; }
  static constexpr int kQueryBytes = kQueryPanelBytes * kPanels, kDoutBytes = kQueryPanelBytes * kValuePanels;  // one stage of Q, of dO
  static constexpr int kScoreBytes = kScorePanelBytes * (kBlockM / 64);                                         // dS, panels of 64 queries
  static constexpr int kRowBytes = kBlockM * 4;                                                                 // one stage of lse or delta
  // A tile of the dQ accumulator is pieces of 64 x 64, side by side, or below each other where there is one column of them (kDqByRows). A piece is
  // one group of 16 rows after another, so that those behind a sequence can be left out; of a group, 8 columns after 8 columns, of these a
  // lane's four elements after each other. The last piece has the columns that are left: PERF: d 80 and 96.
  static constexpr int kDqColumns = kPanels * kColumnParts * 64, kDqPieceFloats = 64 * 64,
                       kDqPieces = kBlockM / 64 * kPanels * kColumnParts;
  static constexpr int kDqRows = 16;  // a group, which a warp of a consumer has
  static __device__ __forceinline__ int dq_columns(int piece) {
    constexpr int kLast = kHeadDim - (kPanels - 1) * 64;
    return kFirstStoresDq && kPanels > 1 && piece == kPanels - 1 ? kLast : 64;
  }
  // Of columns [8 tile, 8 tile + 8) of a piece, where the elements of a thread are.
  static __device__ __forceinline__ int dq_place(int tile, int thread, int columns = 64) {
    return thread / 32 * (kDqRows * columns) + (tile * 32 + thread % 32) * 4;
  }
  // How many floats of a piece have queries, of so many from its first on. PERF: others are not added, 1 % of ragged batches. TUNING.md, "Who
  // adds to dQ".
  static __device__ __forceinline__ int dq_floats(int queries, int columns = 64) {
    return min(64, (queries + kDqRows - 1) / kDqRows * kDqRows) * columns;
  }
  static constexpr bool kDqByRows = kBlockM == 128;
  // Of a key block, dK and dV. In the last pass a thread block adds up kDqPieces pieces of 64 x kShareColumns.
  static constexpr int kKeyGradientElements = kBlockN * (kTaskHeadDim + kTaskHeadDimV);
  static constexpr int kShareColumns = kHeadDim % 32 == 0 ? 32 : 16;
  static constexpr int kShareThreadBlocks = (kKeyGradientElements / (64 * kShareColumns) + kDqPieces - 1) / kDqPieces;
  // Nothing need clear the accumulator: the first key block that comes to a tile can store, and the others add. Above head dim 128, where two
  // warpgroups add from registers, each when it has something, in deterministic mode only.
  static constexpr bool kFirstStoresDq = kHeadDim <= 128;
  static constexpr bool kTellsEnds = kHeadDim <= 128;  // of tasks, when what they add to dQ can be seen: have_all()
  static_assert(kBlockM == 64 || (kBlockM == 128 && kPanels == 1), "a row or a column of pieces");
  static constexpr int kLoaderRegisters = kCluster > 1 ? 40 : 24;  // with 24 the loader of a cluster spills 200 to 340 bytes
  static constexpr int kConsumerRegisters = kCluster > 1 ? 232 : 240;
  static_assert(kLoaderRegisters * 128 + kConsumerRegisters * kConsumerThreads <= 65536 / kThreads / 8 * 8 * kThreads,
                "what a block has got at its launch; to take more hangs");
};

// What the tasks of a part say, each by a turn of a semaphore of its first tile: kAdded, that it has added all it adds to dQ; kStored, that its
// shares of dK and dV are stored, where dQ is rounded beside; neither by a thread block's last task nor by those that no query sees.
constexpr int kAdded = 1, kStored = 2;

// Whether all tasks of the part of a query head have said so, of a sequence that has queries: else nothing clears its semaphores. Then what they
// have added or stored can be seen. Before the end of the kernel that computes, in one that begins early, it may be asked because that lets the
// next begin only when the kernel before it has cleared the semaphores.
template <typename Shape>
__device__ __forceinline__ bool have_all(int said, const HfFlash2BackwardParams& params, const GroupSplits& groups, int batch, int head) {
  const HfFlash2ForwardParams& forward = params.forward;
  const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
  const int heads_of_part = groups.heads_of(batch * forward.heads_k + groups.group.quotient(head));
  const int64_t first_tile = workspace.first_block(forward, batch, head / heads_of_part * heads_of_part, Shape::kBlockM);
  const int keys = find_sequence(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k).length;
  return semaphore_read(workspace.semaphore(first_tile, said)) >= (keys + Shape::kBlockN - 1) / Shape::kBlockN;
}

// Whether the task of the first key block has stored dQ of a query block of `q`, as no other comes to it (StoresLone).
template <typename Shape>
__device__ __forceinline__ bool is_stored_by_task(const HfFlash2ForwardParams& forward, int batch, const Sequence& q, int query_block) {
  const Sequence k = find_sequence(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k);
  return Mask(forward, batch, q, k).is_lone(query_block, Shape::kBlockN, Shape::kBlockM);
}

// A key block of a key head, and the query blocks that see it, of all query heads that share the key head or of a split of them.
struct BackwardTask {
  int batch, first_head, key_block, heads;  // query heads, those of a part (GroupSplits)
  Sequence q, k;
  Mask mask;
  int query_block_begin, query_block_end;
  int query_block_first;             // where the round over [begin, end) starts
  int unmasked_begin, unmasked_end;  // query blocks that need no mask
  int first_tile, head_tiles;        // tile number (Workspace) of the first query block of the first query head; tiles of a head

  static constexpr int kBytes = 64;

  // task_block: a block of kTaskKeys, of which a thread block of a cluster has the kBlockN of its rank. part: counted over the batch.
  template <typename Shape>
  static __device__ __forceinline__ BackwardTask make(const BackwardArguments& arguments, int task_block, int part) {
    const HfFlash2BackwardParams& params = arguments.params;
    const HfFlash2ForwardParams& forward = params.forward;
    const GroupSplits& groups = arguments.groups;
    int key_head, split;
    groups.find(part, key_head, split);
    const int batch = key_head / forward.heads_k, heads = groups.heads_of(key_head);
    const int first_head = (key_head - batch * forward.heads_k) * static_cast<int>(groups.group.divisor) + split * heads;
    const int key_block = task_block * Shape::kTaskBlocks + (Shape::kTaskBlocks > 1 ? cluster_rank() : 0),
              key_begin = key_block * Shape::kBlockN, task_begin = task_block * Shape::kTaskKeys;
    const Sequence q = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q);
    const Sequence k = find_sequence(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k);
    const Mask mask(forward, batch, q, k);
    const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
    const int query_block_begin = mask.query_block_begin(task_begin, Shape::kBlockM);
    const int query_block_end = mask.query_block_end(task_begin + Shape::kTaskKeys, Shape::kBlockM);
    // Where the first key block at a tile of dQ stores and the others wait for that, those of one head that start together start at query
    // blocks of their own: under a causal mask, or a window, by themselves (then on = 0, or the same for all), else on the diagonal. Not in
    // deterministic mode, where a tile takes the key blocks in the order of their launch.
    const int on = max(0, key_begin / Shape::kBlockM - query_block_begin);
    const bool round = arguments.first_stores && !params.deterministic && query_block_begin < query_block_end;
    return {batch,
            first_head,
            key_block,
            heads,
            q,
            k,
            mask,
            query_block_begin,
            query_block_end,
            round ? query_block_begin + on % (query_block_end - query_block_begin) : query_block_begin,
            mask.unmasked_query_block_begin(key_begin + Shape::kBlockN, Shape::kBlockM),
            mask.unmasked_query_block_end(key_begin, Shape::kBlockM),
            static_cast<int>(workspace.first_block(forward, batch, first_head, Shape::kBlockM)),
            static_cast<int>(workspace.blocks)};
  }

  // To shared memory and back: what load() does not find there is the same for every task of a call.
  __device__ __forceinline__ void store(uint32_t address) const {
    store_shared(address, make_uint4(batch, first_head, key_block, mask.visible != nullptr));
    store_shared(address + 16, make_uint4(q.start, q.length, k.start, k.length));
    store_shared(address + 32, make_uint4(query_block_begin, query_block_end, query_block_first, first_tile));
    store_shared(address + 48, make_uint4(unmasked_begin, unmasked_end, heads, head_tiles));
  }
  static __device__ __forceinline__ BackwardTask load(uint32_t address, const HfFlash2ForwardParams& params) {
    const auto i = [](uint32_t x) { return static_cast<int>(x); };
    const uint4 a = load_shared_uint4(address), b = load_shared_uint4(address + 16), c = load_shared_uint4(address + 32),
                d = load_shared_uint4(address + 48);
    const Sequence q{i(b.x), i(b.y)}, k{i(b.z), i(b.w)};
    return {i(a.x), i(a.y), i(a.z), i(d.z), q,      k,      Mask(params, i(a.x), q, k, a.w != 0),
            i(c.x), i(c.y), i(c.z), i(d.x), i(d.y), i(c.w), i(d.w)};
  }
  static __device__ __forceinline__ Sequence load_queries(uint32_t address) {
    const uint4 x = load_shared_uint4(address + 16);
    return {static_cast<int>(x.x), static_cast<int>(x.y)};
  }
  // There are no more.
  static __device__ __forceinline__ void store_none(uint32_t address) {
    store_shared(address, make_uint4(0, 0, static_cast<uint32_t>(kNone), 0));
  }
  static constexpr int kNone = -1;  // key_block

  __device__ __forceinline__ bool mask_needed(int query_block) const { return query_block < unmasked_begin || query_block >= unmasked_end; }

  // Deterministic mode: how many key blocks come to a tile of dQ before this one, in the order of their launch (backward_launch.cuh).
  template <typename Shape>
  __device__ __forceinline__ int turn(const HfFlash2ForwardParams& params, int query_block) const {
    const int row_begin = query_block * Shape::kBlockM, task_block = key_block / Shape::kTaskBlocks;
    return params.window_right >= 0 ? mask.key_block_end(row_begin + Shape::kBlockM, Shape::kTaskKeys) - 1 - task_block
                                    : task_block - mask.key_block_begin(row_begin, Shape::kTaskKeys);
  }

  __device__ __forceinline__ bool has_steps() const { return query_block_begin < query_block_end; }

  // A walk over the query blocks of every query head of the task, where there are some.
  struct Step {
    int head, query_block;  // the head counted from the first of the task
  };
  __device__ __forceinline__ Step first() const { return {0, query_block_first}; }
  // Goes on to the next, if there is one.
  __device__ __forceinline__ bool advance(Step& at) const {
    if (++at.query_block == query_block_end) at.query_block = query_block_begin;
    return at.query_block != query_block_first || ++at.head < heads;
  }

  // Goes back to the one before.
  __device__ __forceinline__ void retreat(Step& at) const {
    if (at.query_block == query_block_first) --at.head;
    if (at.query_block == query_block_begin) at.query_block = query_block_end;
    --at.query_block;
  }

  // No other task comes to dQ of the query blocks before this one (Mask::is_lone).
  template <typename Shape>
  __device__ __forceinline__ int lone_end() const {
    return Shape::kStoresLone && key_block == 0 ? mask.lone_query_block_end(Shape::kBlockN, Shape::kBlockM) : 0;
  }

  // Calls f(step, head, query_block, tile) for all of them; tile is its number in the Workspace. Steps are counted from `step` on. Returns the
  // one behind the last.
  template <typename F>
  __device__ __forceinline__ uint32_t for_each_step(const F& f, uint32_t step = 0) const {
    if (!has_steps()) return step;
    for (int head = 0; head < heads; ++head) {
      int query_block = query_block_first;
#pragma unroll 1
      do {
        f(step++, first_head + head, query_block, first_tile + head * head_tiles + query_block);
        if (++query_block == query_block_end) query_block = query_block_begin;
      } while (query_block != query_block_first);
    }
    return step;
  }
};
}  // namespace hf_flash2::sm90
