// What the Hopper forward is made of: the sizes of a tile, its shared memory and barriers, and how results leave.
#pragma once
#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "device/bulk_copy.cuh"
#include "device/mbarrier.cuh"
#include "device/tma.cuh"
#include "device/warpgroup.cuh"
#include "sm90/clear_gaps.cuh"
#include "sm90/cluster_exchange.cuh"
#include "sm90/forward_task.cuh"
#include "sm90/store.cuh"
#include "tiles.h"

namespace hf_flash2::sm90 {

template <int kHeadDimension, TileSize kSize, int kHeadDimensionV = kHeadDimension>
struct ForwardShape : ForwardTile<kHeadDimension, kSize, kHeadDimensionV> {
  using Tile = ForwardTile<kHeadDimension, kSize, kHeadDimensionV>;
  // Above head dim 256, two thread blocks, a cluster, have a tile together, each half of the columns of all there is; or, where tiles are small,
  // two warpgroups have the same rows, and each half of the columns of V.
  static constexpr int kColumnParts = kHeadDimension > 256 && kSize == TileSize::kLarge ? 2 : 1;
  static constexpr int kColumnGroups = kHeadDimensionV / kColumnParts > kMostValueColumns ? 2 : 1,
                       kRowGroups = Tile::kConsumers / kColumnGroups;
  static constexpr int kTaskOutColumns = kHeadDimensionV;
  static constexpr int kHeadDim = kHeadDimension / kColumnParts, kOutColumns = kTaskOutColumns / kColumnParts;  // of a thread block
  static constexpr int kHeadDimV = kOutColumns / kColumnGroups;                                                 // of a warpgroup
  static constexpr int kBlockM = kRowGroups * 64;
  static constexpr int kThreads = (Tile::kConsumers + 1) * 128;
  static constexpr int kPanels = (kHeadDim + 63) / 64, kValuePanels = (kOutColumns + 63) / 64;
  static constexpr int kQueryPanelBytes = kBlockM * 128, kKeyPanelBytes = Tile::kBlockN * 128;
  static constexpr int kQueryBytes = kQueryPanelBytes * kPanels;
  static constexpr int kKeyBytes = kKeyPanelBytes * kPanels, kValueBytes = kKeyPanelBytes * kValuePanels;  // one stage of K, of V
  static constexpr int kPartBytes = kColumnParts > 1 ? PartOfPeer<Tile::kBlockN / 8>::kBytes : 0;          // of S of a warpgroup
  static constexpr int kOutBytes = Tile::kOutApart ? kQueryPanelBytes * kValuePanels : 0;
  // Q of a tile comes in so many parts: in more than one, a warpgroup begins with the next tile as soon as its own rows are there, which are asked
  // for when it, and not all, has done with those before. PERF: d 192 0 to 4 %, d 128 at 1k 1 %, others level or slower. TUNING.md, "Q of a tile".
  static constexpr int kQueryParts = kHeadDim == 192 || (kHeadDim == 128 && kSize == TileSize::kLarge) ? Tile::kConsumers : 1;
  static constexpr int kQueryPartBytes = kQueryPanelBytes / kQueryParts;  // of a panel
  // Before all consumers have stored a tile, the loader hands over kQueryStages more, and one beyond if Q comes in parts: then a power of two.
  static constexpr int kTasks = Tile::kQueryStages + (kQueryParts > 1 ? 3 : 1),
                       kTaskBarriers = kQueryParts > 1 ? kTasks : Tile::kQueryStages;
  static constexpr int kRing = kTaskBarriers + 2 * Tile::kQueryStages * kQueryParts;  // barriers before those of the ring
  static constexpr int kBarriers = kRing + 4 * Tile::kStages + (kColumnParts - 1) * (3 * Tile::kConsumers + 2);
  // A warpgroup leaves the tensor cores to the others while none of its rows sees a key: on the last key blocks below a diagonal, or on all
  // where its rows lie behind the sequence. PERF: 5 % at d 64 full, 512; with 128 rows and more keys in a block, d 128 and d 256 lost 1 to 3 %.
  // TUNING.md, "Blocks that a warpgroup leaves".
  static constexpr bool kLeavesBlocks = Tile::kConsumers == 3 || (kRowGroups > 1 && kSize != TileSize::kLarge);
  static_assert(!kLeavesBlocks || kQueryParts == 1, "a warpgroup that leaves a tile does not wait for Q");
  // With 80 keys a block, at d 256, capped scores spill a register.
  static constexpr bool kHasCapped = kHeadDimension < 256 || (kHeadDimension == 256 && kSize == TileSize::kSmall);
  // A table of its tiles (SequenceTable). PERF: a kernel of its own: with another loader in it, others are 0 to 3 % slower. TUNING.md, "Many short
  // sequences".
  static constexpr bool kHasListed = kHeadDimension <= 128;
  // Dropout: in one size of tiles, but d 64. PERF: TUNING.md, "Forward tiles".
  static constexpr bool kHasDropout =
      kHeadDimension == 64 || (kHeadDimension <= 256 && kSize == (kHeadDimension == 80    ? TileSize::kMedium
                                                                  : kHeadDimension == 256 ? TileSize::kSmall
                                                                                          : TileSize::kLarge));
  // Its bits are drawn before the turn comes, or where registers are short when there is something to drop. PERF: before, d 128 8 to 9 % faster, d
  // 192 7 to 11, d 96 -2 to 8, but d 64 and 256 1 to 3 % slower. TUNING.md, "Dropout".
  static constexpr bool kDrawsEarly = kHeadDim > 64 && kHeadDim < 256;
  // Of a paged cache, whose pages are whole blocks of keys.
  static constexpr bool kHasPaged = kSize == kPagedTiles<kHeadDimension> && kPageMultiple % Tile::kBlockN == 0;
  static constexpr bool kAhead = kHeadDim < 256 || kColumnParts > 1;  // softmax runs ahead of the maximum: forward.cuh
  // Q, which is read once, and O, which is not read again here, are the first that L2 lets go: it holds more of K and V. Where rows are whole
  // lines of what was brought to L2 then, 256 bytes: else that is part of another head's row, too. PERF: 0 to 2 % at d 256, else level or slower.
  // TUNING.md, "Q of a tile".
  static constexpr bool kStreams = kHeadDimension == 256;
  static constexpr bool kSharesTiles = Tile::kBlocksPerSm == 1;  // may: forward_launch.cuh says when
  // Panels of a warpgroup's O in shared memory: in the tile's, or side by side in a stage of K or V.
  static constexpr int kOutPanelBytes = Tile::kOutApart ? kQueryPanelBytes : 64 * 128;
  // O leaves through a stage of K for one warpgroup, of V for the other, where these are large enough.
  static constexpr int kOutPanels = (kHeadDimV + 63) / 64;
  static constexpr bool kLendsStages = !Tile::kOutApart && Tile::kConsumers == 2 && kOutPanelBytes * kOutPanels <= kValueBytes;
  static_assert(Tile::kOutApart || kLendsStages || kColumnGroups > 1, "a stage for each");
  static constexpr int kSharedBytes = Tile::kQueryStages * kQueryBytes + Tile::kStages * (kKeyBytes + kValueBytes) + kOutBytes +
                                      Tile::kConsumers * kPartBytes + (kColumnParts - 1) * kUnitBytes + kTasks * ForwardTask::kBytes +
                                      (kBarriers + 1) / 2 * 16;
  static __device__ __forceinline__ int row_group(int group) { return kColumnGroups == 1 ? group : group % kRowGroups; }
  // The first column of V that a warpgroup computes of those of its thread block, and the first panel of these, of Q, K and V alike.
  static __device__ __forceinline__ int first_column(int group) { return kColumnGroups == 1 ? 0 : group / kRowGroups * kHeadDimV; }
  static __device__ __forceinline__ int first_panel() { return kColumnParts == 1 ? 0 : cluster_rank() * kPanels; }
  // The consumers take what a block has got at its launch and the loader leaves; to take more hangs.
  static constexpr int kLaunchRegisters = 65536 / (kThreads * Tile::kBlocksPerSm) / 8 * 8;
  static constexpr int kLoaderRegisters = Tile::kConsumers == 3 ? 32 : 40;
  static constexpr int kConsumerRegisters = (kLaunchRegisters * (Tile::kConsumers + 1) - kLoaderRegisters) / Tile::kConsumers / 8 * 8;
  static_assert(kConsumerRegisters <= 240, "what a thread may have");
};

// Shared-memory addresses: tiles, then barriers. "full": the copy has landed; "empty": every consumer is done with it.
template <typename Shape>
struct ForwardShared {
  uint32_t base;

  static constexpr int kQueryStages = Shape::kQueryStages;

  __device__ __forceinline__ uint32_t q(int tile) const { return base + tile % kQueryStages * Shape::kQueryBytes; }
  __device__ __forceinline__ uint32_t k(int stage) const { return base + kQueryStages * Shape::kQueryBytes + stage * Shape::kKeyBytes; }
  __device__ __forceinline__ uint32_t v(int stage) const { return k(Shape::kStages) + stage * Shape::kValueBytes; }
  __device__ __forceinline__ uint32_t out(int group) const { return v(Shape::kStages) + group * 8192; }  // 64 rows
  __device__ __forceinline__ uint32_t task(int tile) const {
    return part_buffer(Shape::kConsumers) + tile % Shape::kTasks * ForwardTask::kBytes;
  }
  __device__ __forceinline__ uint32_t part_buffer(int group) const { return out(0) + Shape::kOutBytes + group * Shape::kPartBytes; }
  // The number of the next tile, from the peer.
  __device__ __forceinline__ uint32_t unit() const { return task(Shape::kTasks - 1) + ForwardTask::kBytes; }
  __device__ __forceinline__ uint32_t barrier(int i) const { return unit() + (Shape::kColumnParts - 1) * kUnitBytes + i * 8; }
  __device__ __forceinline__ uint32_t task_full(int tile) const { return barrier(tile % Shape::kTaskBarriers); }
  __device__ __forceinline__ uint32_t q_full(int tile, int part) const {
    return barrier(Shape::kTaskBarriers + tile % kQueryStages * Shape::kQueryParts + part);
  }
  __device__ __forceinline__ uint32_t q_empty(int tile, int part) const {
    return barrier(Shape::kTaskBarriers + (kQueryStages + tile % kQueryStages) * Shape::kQueryParts + part);
  }
  // How often these had been used before `tile`, odd or even.
  static __device__ __forceinline__ int task_parity(int tile) { return tile / Shape::kTaskBarriers & 1; }
  static __device__ __forceinline__ int q_parity(int tile) { return tile / kQueryStages & 1; }
  __device__ __forceinline__ uint32_t ring(int i) const { return barrier(Shape::kRing + i); }
  __device__ __forceinline__ uint32_t k_full(int stage) const { return ring(stage); }
  __device__ __forceinline__ uint32_t k_empty(int stage) const { return ring(Shape::kStages + stage); }
  __device__ __forceinline__ uint32_t v_full(int stage) const { return ring(2 * Shape::kStages + stage); }
  __device__ __forceinline__ uint32_t v_empty(int stage) const { return ring(3 * Shape::kStages + stage); }
  // Where there are column parts: what the peer has of S.
  __device__ __forceinline__ PartOfPeer<Shape::kBlockN / 8> part_of_peer(int group) const {
    return {part_buffer(group), ring(4 * Shape::kStages + 2 * group), ring(4 * Shape::kStages + 2 * Shape::kConsumers + group)};
  }
  __device__ __forceinline__ uint32_t unit_full() const { return ring(4 * Shape::kStages + 3 * Shape::kConsumers); }
  __device__ __forceinline__ uint32_t unit_empty() const { return ring(4 * Shape::kStages + 3 * Shape::kConsumers + 1); }
  // Where there may be gaps: zeros (clear_gaps.cuh), and the sequence that comes first.
  static constexpr int kBytesWithGaps = whole_lines(Shape::kSharedBytes) + kZeroBytes + 16;
  __device__ __forceinline__ uint32_t zeros() const { return base + whole_lines(Shape::kSharedBytes); }
  __device__ __forceinline__ uint32_t first_batch() const { return zeros() + kZeroBytes; }

  // By one thread, before any use.
  __device__ __forceinline__ void make_barriers() const {
    for (int tile = 0; tile < Shape::kTaskBarriers; ++tile) mbarrier_init(task_full(tile), 1);
    for (int i = 0; i < kQueryStages * Shape::kQueryParts; ++i) {
      mbarrier_init(q_full(0, i), 1);
      mbarrier_init(q_empty(0, i), Shape::kConsumers * 128 / Shape::kQueryParts);
    }
    for (int stage = 0; stage < Shape::kStages; ++stage) {
      mbarrier_init(k_full(stage), 1);
      mbarrier_init(v_full(stage), 1);
      mbarrier_init(k_empty(stage), Shape::kConsumers);
      mbarrier_init(v_empty(stage), Shape::kConsumers);
    }
    if constexpr (Shape::kColumnParts > 1) {
      for (int group = 0; group < Shape::kConsumers; ++group) part_of_peer(group).make_barriers();
      mbarrier_init(unit_full(), 1);
      mbarrier_init(unit_empty(), 1);
    }
    mbarrier_init_fence();
  }
};

// Named barriers: kTurnBarrier + i, kOutBarrier + i and kStageBarrier + i are warpgroup i's.
constexpr int kStartBarrier = 0, kClearBarrier = 1, kTurnBarrier = 2, kOutBarrier = 5, kStageBarrier = 8, kFirstBarrier = 10;

// Whether a task is a share of the keys: then its results are scratch, and put together later (combine.cuh).
template <typename Shape>
__device__ __forceinline__ bool is_share(const ForwardArguments& arguments, const ForwardTask& task) {
  return arguments.splits.divisor > 1 || (Shape::kSharesTiles && task.slot >= 0);
}

// The sink of a row, times log2 e. Who puts shares together counts it.
template <typename Shape>
__device__ __forceinline__ float sink_of_row(const ForwardArguments& arguments, const ForwardTask& task, int row) {
  return is_share<Shape>(arguments, task) ? -INFINITY : find_sink(arguments.params, OutputRow(arguments, task, row).head);
}

// The lse of rows `row` and `row` + 8, or what it is over this share of the keys.
template <typename Shape>
__device__ __forceinline__ void store_lse(const ForwardArguments& arguments, const ForwardTask& task, int row, const float (&lse)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const OutputRow at(arguments, task, row + half * 8);
    float* const to = Shape::kSharesTiles && task.slot >= 0
                          ? arguments.shared.lse + (task.slot * Shape::kBlockM + row + half * 8 - task.row_begin)
                          : arguments.results.lse_of(at.batch, at.head, at.token, arguments.splits.divisor) + task.split;
    if (at.valid) *to = lse[half];
  }
}

// Whether the copy engine takes O. Shares, which are floats, are written from registers, as are rows that see no keys, and without shared memory
// of its own a tile that ends behind its sequence, with which a warpgroup may have nothing to do.
template <typename Shape>
__device__ __forceinline__ bool leaves_by_engine(const ForwardArguments& arguments, const ForwardTask& task) {
  const int query_end = (task.row_begin + Shape::kBlockM) >> arguments.tile_heads_log2;
  return !is_share<Shape>(arguments, task) && (Shape::kOutApart || query_end <= task.q.length) && task.key_block_begin < task.key_block_end;
}

// A warpgroup's rows of O, by the copy engine by way of shared memory at `through`, under whatever the warpgroup does next. `row` is this thread's
// first.
template <typename Shape, typename T>
__device__ __forceinline__ void store_out(const ForwardArguments& arguments, bool by_engine, uint32_t through, const ForwardTask& task,
                                          int row, const float (&out)[Shape::kHeadDimV / 8][4]) {
  const HfFlash2ForwardParams& params = arguments.params;
  const int column = Shape::first_panel() * 64 + (Shape::kColumnGroups == 1 ? 0 : Shape::first_column(warpgroup_index()));
  if (by_engine) {
    const int group = warpgroup_index();
    uint32_t rounded[Shape::kHeadDimV / 4];
    round_tiles<T, Shape::kHeadDimV / 8>(rounded, out);
    store_panels<Shape::kOutPanelBytes, Shape::kHeadDimV / 8>(through, rounded);
    named_barrier_sync(kOutBarrier + group, 128);
    if (threadIdx.x % 128 == 0) {
      const int first = arguments.map_rows_q - task.q.length + task.query_begin(arguments, Shape::row_group(group) * 64);
      if (Shape::kOutApart && first >= arguments.map_rows_q) return;  // no box may be all outside
      for (int panel = 0; panel < Shape::kOutPanels && column + panel * 64 < params.head_dim_v; ++panel)
        tma_store<Shape::kStreams>(&arguments.out, through + panel * Shape::kOutPanelBytes, column + panel * 64, task.head, first,
                                   task.q.start + task.q.length, params.sequences_q.cu_seqlens != nullptr ? 0 : task.batch);
      bulk_commit();
    }
    return;
  }
  const bool is_piece = Shape::kSharesTiles && task.slot >= 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const OutputRow at(arguments, task, row + half * 8);
    const HfFlash2Tensor& to = arguments.results.out;
    if (is_share<Shape>(arguments, task)) {
      const int piece_row = task.slot * Shape::kBlockM + row + half * 8 - task.row_begin;
      float* const share = is_piece ? arguments.shared.out + static_cast<int64_t>(piece_row) * params.head_dim_v
                                    : token_pointer<float>(to, at.batch, at.head, at.token) + task.split * params.head_dim_v;
      store_row(out, half, share + column, at.valid, params.head_dim_v - column);
    } else {
      store_row(out, half, token_pointer<T>(to, at.batch, at.head, at.token) + column, at.valid, params.head_dim_v - column);
    }
  }
}

}  // namespace hf_flash2::sm90
