// What the two Hopper backward kernels share: sizes, shared memory, the problem of a thread block, the loading role, the products and the
// steps between them. backward.cuh serves head dims to 128, backward_wide.cuh those above.
//
// Scores are computed keys x queries, so that P and dS are A operands of dV and dK as they come out of the accumulators:
//   S^T = K Q^T,  P^T = exp2(S^T - lse),  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dV += P^T dO,  dK += dS^T Q,  dQ += dS K
#pragma once
#include "attention/mask.cuh"
#include "attention/softmax.cuh"
#include "attention/workspace.cuh"
#include "device/bulk_copy.cuh"
#include "device/grid_dependency.cuh"
#include "device/mbarrier.cuh"
#include "device/semaphore.cuh"
#include "device/shared_memory.cuh"
#include "device/tma.cuh"
#include "device/warpgroup.cuh"
#include "sm90/clear_gaps.cuh"
#include "sm90/clear_rows.cuh"
#include "sm90/scheduler.h"
#include "sm90/store.cuh"
#include "tiles.h"
#include "wgmma.cuh"

namespace hf_flash2::sm90 {

// Where the query heads of a group, those that share a key head, are split among tasks (backward_launch.cuh says when): scratch for what each
// split adds to dK and dV, behind the Workspace.
struct KeyGradientShares {
  float* tiles;    // [Hk, splits, blocks, kKeyGradientFloats]: dK of a key block, then dV; null without splits
  Divisor splits;  // of a group
  int64_t blocks;  // key blocks of one head, over all sequences, numbered by first_block_of()

  static int64_t count_blocks(const HfFlash2ForwardParams& params, int block_n) {
    if (params.sequences_k.cu_seqlens != nullptr) return params.total_k / block_n + params.batch;
    return static_cast<int64_t>(params.batch) * ((params.max_seqlen_k + block_n - 1) / block_n);
  }

  __host__ __device__ bool split() const { return splits.divisor > 1; }

  // `part`: which split of which key head, counted over both. In the order of accumulators: 64 keys after 64 keys, of these 8 columns after 8
  // columns, of these a thread's four elements after each other.
  template <typename Shape>
  __device__ __forceinline__ float* tile(const HfFlash2ForwardParams& params, int batch, int part, int key_block) const {
    const int64_t first_block = first_block_of(params.sequences_k, batch, params.max_seqlen_k, Shape::kBlockN);
    return tiles + (part * blocks + first_block + key_block) * Shape::kKeyGradientFloats;
  }
};

struct BackwardArguments {
  CUtensorMap q, k, v, dout;  // boxes of 64 columns x one tile of rows
  HfFlash2BackwardParams params;
  TileScheduler scheduler;
  KeyGradientShares shares;
  int query_blocks;     // of all heads
  int task_blocks;      // thread blocks that compute
  int rounding_blocks;  // those behind them, which round dQ: rounding.cuh
  bool first_stores;    // the first key block that comes to a tile of dQ stores it, as nothing has cleared it
};

// Sizes that follow from the tile. A kernel adds kWorkBytes: shared memory of its own, a multiple of 1 KB.
template <int kHeadDimension, int kHeadDimensionV = kHeadDimension>
struct BackwardSizes : BackwardTile<kHeadDimension> {
  using Tile = BackwardTile<kHeadDimension>;
  static constexpr int kHeadDim = kHeadDimension, kHeadDimV = kHeadDimensionV, kBlockM = Tile::kBlockM, kBlockN = Tile::kBlockN;
  static constexpr int kConsumers = 2, kConsumerThreads = kConsumers * 128, kThreads = kConsumerThreads + 128;
  static constexpr int kPanels = (kHeadDim + 63) / 64, kValuePanels = (kHeadDimV + 63) / 64;
  static constexpr int kKeyPanelBytes = kBlockN * 128, kQueryPanelBytes = kBlockM * 128, kScorePanelBytes = kBlockN * 128;
  static constexpr int kKeyBytes = kKeyPanelBytes * kPanels, kValueBytes = kKeyPanelBytes * kValuePanels;       // K, V
  static constexpr int kQueryBytes = kQueryPanelBytes * kPanels, kDoutBytes = kQueryPanelBytes * kValuePanels;  // one stage of Q, of dO
  static constexpr int kScoreBytes = kScorePanelBytes * (kBlockM / 64);                                         // dS, panels of 64 queries
  static constexpr int kRowBytes = kBlockM * 4;                                                                 // one stage of lse or delta
  // A tile of the dQ accumulator is pieces of 64 x 64, side by side, or below each other where there is one column of them (kDqByRows).
  // Columns behind the head dim stay zero.
  static constexpr int kDqColumns = kPanels * 64, kDqPieceFloats = 64 * 64, kDqPieces = kBlockM / 64 * kPanels;
  static constexpr bool kDqByRows = kBlockM == 128;
  // Of a key block, dK and dV. In the last pass a thread block adds up kDqPieces pieces of 64 x 32.
  static constexpr int kKeyGradientFloats = kBlockN * (kHeadDim + kHeadDimV);
  static constexpr int kShareThreadBlocks = (kKeyGradientFloats / (64 * 32) + kDqPieces - 1) / kDqPieces;
  // Nothing need clear the accumulator: the first key block that comes to a tile can store, and the others add. Not above head dim 128, where
  // two warpgroups add from registers, each when it has something.
  static constexpr bool kFirstStoresDq = kHeadDim <= 128;
  // A thread block takes one task after another, or has one. PERF: one H200, d 192/128 at 512, 1k, 4k, 8k, TFLOP/s: full 277 329 390 403 ->
  // 307 361 417 428, causal 194 267 370 391 -> 212 293 396 410. At d 256 registers do not suffice: ptxas serialises the products (C7511).
  static constexpr bool kTakesTasks = kHeadDim < 256;
  static_assert(kBlockM == 64 || (kBlockM == 128 && kPanels == 1), "a row or a column of pieces");
  static constexpr int kLoaderRegisters = 24, kConsumerRegisters = 240;
  static_assert(kLoaderRegisters * 128 + kConsumerRegisters * kConsumerThreads <= 65536 / kThreads / 8 * 8 * kThreads,
                "what a block has got at its launch; to take more hangs");
};

// A key block of a key head, and the query blocks that see it, of all query heads that share the key head or of a split of them.
struct BackwardTask {
  int batch, part, key_block, heads;  // part: which split of which key head (KeyGradientShares); heads: query heads of a part
  Sequence q, k;
  Mask mask;
  int query_block_begin, query_block_end;
  int query_block_first;             // where the round over [begin, end) starts
  int unmasked_begin, unmasked_end;  // query blocks that need no mask
  int first_tile, head_tiles;        // tile number (Workspace) of the first query block of the first query head; tiles of a head

  static constexpr int kBytes = 64;

  template <typename Shape>
  static __device__ __forceinline__ BackwardTask make(const BackwardArguments& arguments, int unit) {
    int key_block, batch_head;
    arguments.scheduler.tile(unit, 0, key_block, batch_head);
    const HfFlash2BackwardParams& params = arguments.params;
    const HfFlash2ForwardParams& forward = params.forward;
    const int parts = forward.heads_k * arguments.shares.splits.divisor, heads = forward.heads_q / parts;
    const int batch = batch_head / parts, part = batch_head % parts;
    const int key_begin = key_block * Shape::kBlockN;
    const Sequence q = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q);
    const Sequence k = find_sequence(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k);
    const Mask mask(forward, batch, q, k);
    const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
    const int query_block_begin = mask.query_block_begin(key_begin, Shape::kBlockM);
    const int query_block_end = mask.query_block_end(key_begin + Shape::kBlockN, Shape::kBlockM);
    // Where the first key block at a tile of dQ stores and the others wait for that, those of one head that start together start at query
    // blocks of their own: under a causal mask, or a window, by themselves (then on = 0, or the same for all), else on the diagonal. Not in
    // deterministic mode, where a tile takes the key blocks in the order of their launch.
    const int on = max(0, key_begin / Shape::kBlockM - query_block_begin);
    const bool round = arguments.first_stores && !params.deterministic && query_block_begin < query_block_end;
    return {batch,
            part,
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
            static_cast<int>(workspace.first_block(forward, batch, part * heads, Shape::kBlockM)),
            static_cast<int>(workspace.blocks)};
  }

  // To shared memory and back: what load() does not find there is the same for every task of a call.
  __device__ __forceinline__ void store(uint32_t address) const {
    store_shared(address, make_uint4(batch, part, key_block, mask.visible != nullptr));
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
  // There are no more.
  static __device__ __forceinline__ void store_none(uint32_t address) {
    store_shared(address, make_uint4(0, 0, static_cast<uint32_t>(kNone), 0));
  }
  static constexpr int kNone = -1;  // key_block

  __device__ __forceinline__ bool mask_needed(int query_block) const { return query_block < unmasked_begin || query_block >= unmasked_end; }

  // Deterministic mode: how many key blocks come to a tile of dQ before this one, in the order of their launch (backward_launch.cuh).
  template <typename Shape>
  __device__ __forceinline__ int turn(const HfFlash2ForwardParams& params, int query_block) const {
    const int row_begin = query_block * Shape::kBlockM;
    return params.window_right >= 0 ? mask.key_block_end(row_begin + Shape::kBlockM, Shape::kBlockN) - 1 - key_block
                                    : key_block - mask.key_block_begin(row_begin, Shape::kBlockN);
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

  // Calls f(step, head, query_block, tile) for all of them; tile is its number in the Workspace. Steps are counted from `step` on. Returns the
  // one behind the last.
  template <typename F>
  __device__ __forceinline__ uint32_t for_each_step(const F& f, uint32_t step = 0) const {
    if (!has_steps()) return step;
    for (int head = 0; head < heads; ++head) {
      int query_block = query_block_first;
#pragma unroll 1
      do {
        f(step++, part * heads + head, query_block, first_tile + head * head_tiles + query_block);
        if (++query_block == query_block_end) query_block = query_block_begin;
      } while (query_block != query_block_first);
    }
    return step;
  }
};

// Shared-memory addresses: tiles, the work space of the kernel, rows, then barriers. "full": the copy has landed; "empty": every consumer is
// done with it.
template <typename Shape>
struct BackwardShared {
  static constexpr int kStages = Shape::kStages, kBarriers = 5 + 3 * kStages;
  static constexpr int kBytes = Shape::kKeyBytes + Shape::kValueBytes +
                                kStages * (Shape::kQueryBytes + Shape::kDoutBytes + 2 * Shape::kRowBytes) + Shape::kWorkBytes +
                                BackwardTask::kBytes + (kBarriers + 1) / 2 * 16;
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base; }
  __device__ __forceinline__ uint32_t v() const { return k() + Shape::kKeyBytes; }
  __device__ __forceinline__ uint32_t q(int stage) const { return v() + Shape::kValueBytes + stage * Shape::kQueryBytes; }
  __device__ __forceinline__ uint32_t dout(int stage) const { return q(kStages) + stage * Shape::kDoutBytes; }
  __device__ __forceinline__ uint32_t work() const { return dout(kStages); }
  __device__ __forceinline__ uint32_t lse_log2(int stage) const { return work() + Shape::kWorkBytes + stage * Shape::kRowBytes; }
  __device__ __forceinline__ uint32_t delta(int stage) const { return lse_log2(kStages + stage); }
  __device__ __forceinline__ uint32_t task() const { return lse_log2(2 * kStages); }
  __device__ __forceinline__ uint32_t barrier(int i) const { return task() + BackwardTask::kBytes + i * 8; }
  __device__ __forceinline__ uint32_t task_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t task_empty() const { return barrier(1); }
  __device__ __forceinline__ uint32_t keys_full() const { return barrier(2); }  // K and V
  __device__ __forceinline__ uint32_t keys_empty() const { return barrier(3); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(4 + stage); }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return barrier(4 + kStages + stage); }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barrier(4 + 2 * kStages + stage); }  // Q and dO
  __device__ __forceinline__ uint32_t p_empty() const { return barrier(4 + 3 * kStages); }                 // backward_wide.cuh
  __device__ __forceinline__ uint32_t zeros() const { return base + kBytes; }  // where there may be gaps: clear_gaps.cuh

  // By the whole block. warps: those that read tasks beside the consumers.
  __device__ __forceinline__ void make_barriers(int warps = 0) const {
    if (threadIdx.x == 0) {
      mbarrier_init(task_full(), 1);
      mbarrier_init(task_empty(), Shape::kConsumerThreads + warps * 32);
      mbarrier_init(keys_full(), 1);
      mbarrier_init(keys_empty(), Shape::kConsumerThreads);
      mbarrier_init(p_empty(), 128);
      for (int stage = 0; stage < kStages; ++stage) {
        mbarrier_init(q_full(stage), 1);
        mbarrier_init(dout_full(stage), 1);
        // By every thread, as each has read lse and delta. PERF: not slower than by one of a warpgroup behind a barrier of its threads, and
        // compute-sanitizer can follow it.
        mbarrier_init(empty(stage), Shape::kConsumerThreads);
      }
      mbarrier_init_fence();
    }
    __syncthreads();
  }
};

// By a warp that has nothing else to do.
template <typename Shape>
__device__ __forceinline__ void clear_gradient_gaps(const BackwardArguments& arguments, const BackwardShared<Shape>& shared) {
  if (may_have_gaps(arguments.params))
    clear_gaps(shared.zeros(),
               [&](const auto& clear) { for_each_backward_gap(arguments.params, blockIdx.x, arguments.task_blocks, clear); });
}

// The copies of the loader, one thread: K and V of a task, then a ring of Q with lse and dO with delta. Only lse and delta come from the kernel
// before; for its end the consumers wait through them, too.
template <typename Shape>
struct Loader {
  static constexpr int kStages = Shape::kStages, kBlockM = Shape::kBlockM;
  const BackwardArguments& arguments;
  const BackwardShared<Shape>& shared;
  uint32_t step = 0, key_blocks = 0;  // loaded so far: query blocks, and key blocks that some query sees

  __device__ __forceinline__ void load(const BackwardTask& task) {
    const Workspace workspace(arguments.params, kBlockM, Shape::kDqColumns);
    const int map_batch = arguments.params.forward.sequences_q.cu_seqlens != nullptr ? 0 : task.batch;
    const auto load_panels = [&](uint32_t tile, int panels, uint32_t panel_bytes, const CUtensorMap* map, uint32_t full, int token,
                                 int head) {
#pragma unroll
      for (int panel = 0; panel < panels; ++panel) tma_load(tile + panel * panel_bytes, map, full, panel * 64, token, head, map_batch);
    };
    const auto load_keys = [&] {
      const int token = task.k.start + task.key_block * Shape::kBlockN, head = arguments.shares.splits.quotient(task.part);
      if (key_blocks > 0) mbarrier_wait(shared.keys_empty(), (key_blocks - 1) & 1);
      mbarrier_arrive_expect(shared.keys_full(), Shape::kKeyBytes + Shape::kValueBytes);
      load_panels(shared.k(), Shape::kPanels, Shape::kKeyPanelBytes, &arguments.k, shared.keys_full(), token, head);
      load_panels(shared.v(), Shape::kValuePanels, Shape::kKeyPanelBytes, &arguments.v, shared.keys_full(), token, head);
    };

    const uint32_t first_step = step;
    step = task.for_each_step(
        [&](uint32_t step, int head, int query_block, int tile) {
          const uint32_t stage = step % kStages, released = (step / kStages & 1) ^ 1;
          const int token = task.q.start + query_block * kBlockM;
          const float* rows = workspace.delta + static_cast<int64_t>(tile) * (kBlockM * 2);
          mbarrier_wait(shared.empty(stage), released);
          mbarrier_arrive_expect(shared.q_full(stage), Shape::kQueryBytes + Shape::kRowBytes);
          load_panels(shared.q(stage), Shape::kPanels, Shape::kQueryPanelBytes, &arguments.q, shared.q_full(stage), token, head);
          mbarrier_arrive_expect(shared.dout_full(stage), Shape::kDoutBytes + Shape::kRowBytes);
          load_panels(shared.dout(stage), Shape::kValuePanels, Shape::kQueryPanelBytes, &arguments.dout, shared.dout_full(stage), token,
                      head);
          if (step == first_step) load_keys();  // PERF: a stage of the ring is free a step before K and V are
          if (step == 0) {
            wait_for_kernel_before();
            bulk_global_fence();  // it wrote lse and delta by ordinary stores
          }
          bulk_load(shared.lse_log2(stage), rows + kBlockM, Shape::kRowBytes, shared.q_full(stage));
          bulk_load(shared.delta(stage), rows, Shape::kRowBytes, shared.dout_full(stage));
        },
        step);
    key_blocks += task.has_steps();
  }
};

// Calls f(task) for every task that the loader hands over; by consumers and the warps that add or watch.
template <typename Shape, typename F>
__device__ __forceinline__ void for_each_task(const BackwardArguments& arguments, const BackwardShared<Shape>& shared, const F& f) {
  for (uint32_t number = 0;; ++number) {
    mbarrier_wait(shared.task_full(), number & 1);
    const BackwardTask task = BackwardTask::load(shared.task(), arguments.params.forward);
    mbarrier_arrive(shared.task_empty());
    if (task.key_block == BackwardTask::kNone) return;
    f(task);
  }
}

// The loader, one thread: finds the tasks of this thread block, hands them over and loads what they need. The first is the block's own; those
// behind it, and in deterministic mode all, are taken from a counter: then a task waits for turns of running blocks only, where the first one
// of a block that is not there yet would be a turn that those running wait for.
// PERF: a block that takes one task after another loads K, V and the first Q and dO of the next under the end of the last. In % of cuDNN at
// 512, 1k, 4k on one H200, with what warpgroup_index() brings: d 64 full 111 108 108 -> 131 121 118, causal 114 115 115 -> 139 133 126; d 128
// full 111 110 108 -> 118 113 110, causal 113 113 114 -> 122 120 117.
template <typename Shape>
__device__ __forceinline__ void load_tasks(const BackwardArguments& arguments, const BackwardShared<Shape>& shared) {
  const Workspace workspace(arguments.params, Shape::kBlockM, Shape::kDqColumns);
  const int units = arguments.scheduler.units();
  Loader<Shape> loader{arguments, shared};
  uint32_t tasks = 0;  // handed over so far
  const auto wait_for_slot = [&] { mbarrier_wait(shared.task_empty(), (tasks++ & 1) ^ 1); };
  const auto take_unit = [&] {
    wait_for_kernel_before();  // it clears the counter
    return take_next(workspace.next_unit);
  };
  const bool in_order = arguments.params.deterministic;
  const int first = in_order ? 0 : arguments.task_blocks;
  for (int unit = in_order ? take_unit() : blockIdx.x; unit < units; unit = first + take_unit()) {
    const BackwardTask task = BackwardTask::make<Shape>(arguments, unit);
    if (task.key_block * Shape::kBlockN >= task.k.length) continue;
    wait_for_slot();
    task.store(shared.task());
    mbarrier_arrive(shared.task_full());
    loader.load(task);
  }
  wait_for_slot();
  BackwardTask::store_none(shared.task());
  mbarrier_arrive(shared.task_full());
}

// All consumers wait for each other.
template <typename Shape>
__device__ __forceinline__ void consumers_meet() {
  named_barrier_sync(1, Shape::kConsumerThreads);
}

// By all consumers: K and V have landed, and their rows behind the sequence are zero.
template <typename Shape>
__device__ __forceinline__ void wait_for_keys(const BackwardShared<Shape>& shared, const BackwardTask& task, uint32_t parity = 0) {
  mbarrier_wait(shared.keys_full(), parity);
  const int rows = task.k.length - task.key_block * Shape::kBlockN;
  if (rows >= Shape::kBlockN) return;
  clear_rows<Shape::kBlockN, Shape::kPanels, Shape::kConsumerThreads>(shared.k(), rows);
  clear_rows<Shape::kBlockN, Shape::kValuePanels, Shape::kConsumerThreads>(shared.v(), rows);
  async_proxy_fence();
  consumers_meet<Shape>();
}

// By all consumers: where a query block reaches behind the sequence, its rows there are zero.
template <typename Shape>
__device__ __forceinline__ void clear_queries(const BackwardShared<Shape>& shared, const BackwardTask& task, uint32_t step,
                                              int query_block) {
  const int rows = task.q.length - query_block * Shape::kBlockM;
  if (rows >= Shape::kBlockM) return;
  const uint32_t stage = step % Shape::kStages, parity = step / Shape::kStages & 1;
  mbarrier_wait(shared.q_full(stage), parity);
  mbarrier_wait(shared.dout_full(stage), parity);
  clear_rows<Shape::kBlockM, Shape::kPanels, Shape::kConsumerThreads, 1>(shared.q(stage), rows);
  clear_rows<Shape::kBlockM, Shape::kValuePanels, Shape::kConsumerThreads, 1>(shared.dout(stage), rows);
  async_proxy_fence();
  consumers_meet<Shape>();
}

// x, as a value that the compiler knows nothing about. PERF: what depends on it is computed where it is used; else, in a loop over tasks, the
// descriptors of every step are computed ahead and spilled.
__device__ __forceinline__ uint32_t hidden(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// S^T or dP^T [64 keys, kBlockM queries] = keys queries^T, over kColumns.
template <typename Shape, typename T, int kColumns = Shape::kHeadDim>
__device__ __forceinline__ void issue_scores(float* scores, uint32_t keys, uint32_t queries) {
  const uint64_t a = panel_descriptor(keys), b = panel_descriptor(queries);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k)
    WgmmaShared<T, Shape::kBlockM>::multiply(scores, advance_descriptor(a, k / 4 * Shape::kKeyPanelBytes + k % 4 * 32),
                                             advance_descriptor(b, k / 4 * Shape::kQueryPanelBytes + k % 4 * 32), k > 0);
  wgmma_commit();
}

// dV or dK [64 keys, kColumns] += P^T or dS^T times kQueries rows of dO or Q.
template <typename Shape, typename T, int kQueries = Shape::kBlockM, int kColumns = Shape::kHeadDim>
__device__ __forceinline__ void issue_key_gradient(float* gradient, const uint32_t* scores, uint32_t queries) {
  const uint64_t b = panel_descriptor(queries, Shape::kQueryPanelBytes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kQueries / 16; ++k)
    WgmmaRegisters<T, kColumns>::multiply(gradient, scores + k * 4, advance_descriptor(b, k * 2048), 1);
  wgmma_commit();
}

// dQ [64 queries, kColumns] = dS K, of one panel of dS and the columns of K from a panel on.
template <typename Shape, typename T, int kColumns>
__device__ __forceinline__ void issue_query_gradient(float* dq, uint32_t ds, uint32_t keys) {
  const uint64_t a = panel_descriptor(ds), b = panel_descriptor(keys, Shape::kKeyPanelBytes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Shape::kBlockN / 16; ++k)
    WgmmaSharedByRows<T, kColumns>::multiply(dq, advance_descriptor(a, k * 2048), advance_descriptor(b, k * 2048), k > 0);
  wgmma_commit();
}

// Where this thread's elements of S^T lie: two keys, `key` and key + 8, and of every 8 queries `query` and query + 1.
struct ScoreLane {
  int key, last_query[2];  // last_query: of each key, see Mask

  __device__ __forceinline__ ScoreLane(const Mask& mask, int first_key)
      : key(first_key + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4), last_query{mask.last_query(key), mask.last_query(key + 8)} {}

  static __device__ __forceinline__ int query() { return threadIdx.x % 4 * 2; }

  template <int kTiles>
  __device__ __forceinline__ void apply_mask(float (&scores)[kTiles][4], const Mask& mask, int row_begin) const {
    const int row = row_begin + query();
    const int first[2] = {mask.first_query(key) - row, mask.first_query(key + 8) - row};
    const int last[2] = {last_query[0] - row, last_query[1] - row};
    Mask::apply_transposed(scores, first, last);
  }
};

// One number of each query row of this thread's elements, two rows of every 8: of lse_log2 or delta.
template <int kTiles>
struct RowValues {
  float2 rows[kTiles];
  __device__ __forceinline__ explicit RowValues(uint32_t address) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) rows[n] = load_shared_float2(address + (n * 8 + ScoreLane::query()) * 4);
  }
};

// P = exp2(scale_log2 S - lse_log2), in place.
template <int kTiles>
__device__ __forceinline__ void exponentiate(float (*scores)[4], const RowValues<kTiles>& lse_log2, float scale_log2) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 lse = lse_log2.rows[n];
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[n][c] = exp2_approx(fmaf(scores[n][c], scale_log2, c % 2 == 0 ? -lse.x : -lse.y));
  }
}

// dS = P (dP - delta), in place of dP.
template <int kTiles>
__device__ __forceinline__ void differentiate(float (*scores)[4], const float (*p)[4], const RowValues<kTiles>& delta_rows) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 delta = delta_rows.rows[n];
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[n][c] = p[n][c] * (scores[n][c] - (c % 2 == 0 ? delta.x : delta.y));
  }
}

// dK or dV of 64 keys to global memory: rounded, to their rows, or where other tasks have shares of it, to floats from `first_float` of the
// task's share on.
// PERF: rows that this kernel will not read again stream through L2, which then holds more of dQ. One H200, at 512 and 1k, TFLOP/s: d 64 full
// 379 481 -> 396 497, causal 214 335 -> 229 355, d 128 full 419 529 -> 435 541, causal 256 392 -> 262 403; 1 to 2 % at 4k. The same for dQ as
// convert_kernel writes it, for K, V, O and the accumulator as they are read: no faster; for Q and dO: 4 to 5 % slower. What is added to
// dQ kept in L2 before other things (evict_last): no faster, at 4k 0.5 % slower.
template <typename Shape, typename T, int kTiles>
__device__ __forceinline__ void store_key_gradient(const BackwardArguments& arguments, const HfFlash2Tensor& tensor, int first_float,
                                                   const float (&gradient)[kTiles][4], const BackwardTask& task, int key, int columns) {
  if (arguments.shares.split()) {
    float* share = arguments.shares.tile<Shape>(arguments.params.forward, task.batch, task.part, task.key_block) + first_float;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      reinterpret_cast<float4*>(share)[n * 128 + threadIdx.x % 128] =
          make_float4(gradient[n][0], gradient[n][1], gradient[n][2], gradient[n][3]);
    return;
  }
  T* rows = token_pointer<T>(tensor, task.batch, task.part, task.k.start);
#pragma unroll
  for (int half = 0; half < 2; ++half)
    store_row<true>(gradient, half, rows + (key + half * 8) * tensor.token_stride, key + half * 8 < task.k.length, columns);
}

}  // namespace hf_flash2::sm90
