// The loader of the Hopper backward, and what it shares with those that compute: addresses in shared memory, barriers, and the way of a task to
// them.
#pragma once
#include "device/bulk_copy.cuh"
#include "device/cluster.cuh"
#include "device/grid_dependency.cuh"
#include "device/mbarrier.cuh"
#include "device/semaphore.cuh"
#include "device/tma.cuh"
#include "device/warpgroup.cuh"
#include "sm90/backward_task.cuh"
#include "sm90/clear_gaps.cuh"
#include "sm90/cluster_exchange.cuh"

namespace hf_flash2::sm90 {

// Shared-memory addresses: tiles, the work space of the kernel, rows, then barriers. "full": the copy has landed; "empty": every consumer is
// done with it.
template <typename Shape>
struct BackwardShared {
  static constexpr int kStages = Shape::kStages, kDoutStages = Shape::kDoutStages, kBarriers = 4 + 3 * kStages + Shape::kOwnBarriers;
  static constexpr int kBytes = Shape::kKeyBytes + Shape::kValueBytes + Shape::kPeerKeyBytes +
                                kStages * (Shape::kQueryBytes + 2 * Shape::kRowBytes) + kDoutStages * Shape::kDoutBytes +
                                Shape::kWorkBytes + BackwardTask::kBytes + kUnitBytes + (kBarriers + 1) / 2 * 16;
  uint32_t base;

  __device__ __forceinline__ uint32_t k() const { return base; }
  __device__ __forceinline__ uint32_t v() const { return k() + Shape::kKeyBytes; }
  __device__ __forceinline__ uint32_t peer_k() const { return v() + Shape::kValueBytes; }  // what this block needs of it
  __device__ __forceinline__ uint32_t q(int stage) const { return peer_k() + Shape::kPeerKeyBytes + stage * Shape::kQueryBytes; }
  __device__ __forceinline__ uint32_t dout(int stage) const { return q(kStages) + stage * Shape::kDoutBytes; }
  __device__ __forceinline__ uint32_t work() const { return dout(kDoutStages); }
  __device__ __forceinline__ uint32_t lse_log2(int stage) const { return work() + Shape::kWorkBytes + stage * Shape::kRowBytes; }
  __device__ __forceinline__ uint32_t delta(int stage) const { return lse_log2(kStages + stage); }
  __device__ __forceinline__ uint32_t task() const { return lse_log2(2 * kStages); }
  // The number of the next task, from the peer; or of backward.cuh, whether this block stores dQ of a step, as the first there.
  __device__ __forceinline__ uint32_t unit() const { return task() + BackwardTask::kBytes; }
  __device__ __forceinline__ uint32_t stores() const { return unit(); }
  __device__ __forceinline__ uint32_t barrier(int i) const { return unit() + kUnitBytes + i * 8; }
  __device__ __forceinline__ uint32_t task_full() const { return barrier(0); }
  __device__ __forceinline__ uint32_t task_empty() const { return barrier(1); }
  __device__ __forceinline__ uint32_t keys_full() const { return barrier(2); }  // K and V
  __device__ __forceinline__ uint32_t keys_empty() const { return barrier(3); }
  __device__ __forceinline__ uint32_t q_full(int stage) const { return barrier(4 + stage); }
  __device__ __forceinline__ uint32_t dout_full(int stage) const { return barrier(4 + kStages + stage); }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barrier(4 + 2 * kStages + stage); }  // Q and dO
  // Of backward.cuh, kOwnBarriers: the turn of a step, between the warp that watches and the one that adds; and dQ has left for global memory.
  __device__ __forceinline__ uint32_t turn_full() const { return barrier(4 + 3 * kStages); }
  __device__ __forceinline__ uint32_t turn_empty() const { return barrier(5 + 3 * kStages); }
  __device__ __forceinline__ uint32_t dq_empty(int consumer, int stage) const { return barrier(6 + 3 * kStages + consumer + stage * 2); }
  // Of backward_wide.cuh:
  __device__ __forceinline__ uint32_t p_empty() const { return barrier(4 + 3 * kStages); }
  __device__ __forceinline__ uint32_t ds_full(int stage) const { return barrier(5 + 3 * kStages + stage); }
  __device__ __forceinline__ uint32_t ds_empty(int stage) const { return barrier(7 + 3 * kStages + stage); }
  __device__ __forceinline__ uint32_t dout_empty() const { return barrier(9 + 3 * kStages); }  // where Q and dO have stages of their own
  __device__ __forceinline__ uint32_t unit_full() const { return barrier(10 + 3 * kStages); }
  __device__ __forceinline__ uint32_t unit_empty() const { return barrier(11 + 3 * kStages); }
  // Where blocks have half the columns: the peer's part of S, or of dP.
  __device__ __forceinline__ PartOfPeer<Shape::kBlockM / 8> part_of_peer(int consumer) const {
    return {work() + Shape::kPartsAt + consumer * Shape::kPartBytes, barrier(12 + 3 * kStages + 2 * consumer),
            barrier(16 + 3 * kStages + consumer)};
  }
  // Not in every launch: a second stage of dQ, and zeros for gaps (clear_gaps.cuh).
  static constexpr int kMostBytes = whole_lines(kBytes) + (Shape::kDqStages - 1) * Shape::kDqStageBytes + kZeroBytes;
  static_assert(kMostBytes <= 227 * 1024);
  static int bytes(int dq_stages, bool gaps) {
    if (dq_stages == 1 && !gaps) return kBytes;
    return whole_lines(kBytes) + (dq_stages - 1) * Shape::kDqStageBytes + (gaps ? kZeroBytes : 0);
  }
  __device__ __forceinline__ uint32_t second_dq() const { return base + whole_lines(kBytes); }
  __device__ __forceinline__ uint32_t zeros(int dq_stages) const { return second_dq() + (dq_stages - 1) * Shape::kDqStageBytes; }

  // By the whole block. warps: those that read tasks beside the consumers.
  __device__ __forceinline__ void make_barriers(int warps = 0) const {
    if (threadIdx.x == 0) {
      mbarrier_init(task_full(), 1);
      mbarrier_init(task_empty(), Shape::kConsumerThreads + warps * 32);
      mbarrier_init(keys_full(), 1);
      mbarrier_init(keys_empty(), Shape::kConsumerThreads);
      if constexpr (Shape::kCluster == 1) {
        mbarrier_init(turn_full(), 1);
        mbarrier_init(turn_empty(), 1);
        if constexpr (Shape::kDqStages > 1) {
          for (int i = 0; i < 4; ++i) mbarrier_init(dq_empty(i % 2, i / 2), 1);
        }
      } else {
        mbarrier_init(p_empty(), 128);
        for (int stage = 0; stage < 2; ++stage) mbarrier_init(ds_full(stage), 1), mbarrier_init(ds_empty(stage), Shape::kConsumers * 4);
        mbarrier_init(dout_empty(), Shape::kConsumerThreads);
        mbarrier_init(unit_full(), 1);
        mbarrier_init(unit_empty(), 1);
      }
      if constexpr (Shape::kColumnParts > 1) {
        for (int consumer = 0; consumer < 2; ++consumer) part_of_peer(consumer).make_barriers();
      }
      for (int stage = 0; stage < kStages; ++stage) {
        mbarrier_init(q_full(stage), 1);
        mbarrier_init(dout_full(stage), 1);
        // By every thread, as each has read lse and delta. PERF: not slower than by one of a warpgroup behind a barrier of its threads, and
        // compute-sanitizer can follow it.
        mbarrier_init(empty(stage), Shape::kConsumerThreads);
      }
      mbarrier_init_fence();
    }
    if constexpr (Shape::kCluster > 1)
      cluster_meet();
    else
      __syncthreads();
  }
};

// By a warp that has nothing else to do.
template <typename Shape>
__device__ __forceinline__ void clear_gradient_gaps(const BackwardArguments& arguments, const BackwardShared<Shape>& shared) {
  if (may_have_gaps(arguments.params))
    clear_gaps<true>(shared.zeros(arguments.dq_stages),
                     [&](const auto& clear) { for_each_backward_gap(arguments.params, blockIdx.x, arguments.task_blocks, clear); });
}

// The copies of the loader, one thread: K and V of a task, then a ring of Q with lse and dO with delta. Only lse and delta come from the kernel
// before; for its end the consumers wait through them, too.
template <typename Shape>
struct Loader {
  static constexpr int kStages = Shape::kStages, kDoutStages = Shape::kDoutStages, kBlockM = Shape::kBlockM;
  static_assert(kDoutStages == kStages || kDoutStages == 1);
  const BackwardArguments& arguments;
  const BackwardShared<Shape>& shared;
  uint32_t step = 0, key_blocks = 0;  // loaded so far: query blocks, and key blocks that some query sees

  __device__ __forceinline__ void load(const BackwardTask& task) {
    constexpr int kUnroll = Shape::kCluster > 1 ? 1 : 4;
    const HfFlash2ForwardParams& params = arguments.params.forward;
    const int map_batch = params.sequences_q.cu_seqlens != nullptr ? 0 : task.batch, first_panel = Shape::first_panel();
    // `map_rows` are those of both maps. Zeros where the first map has no box, as all of it would be outside: behind the sequence, as of a cluster
    // a key block may be, or behind the columns of a head.
    const auto load_panels = [&](uint32_t tile, int panels, uint32_t panel_bytes, const CUtensorMap* map, const CUtensorMap* zeros,
                                 int map_rows, uint32_t full, int row, int end, int head, int first, int columns) {
#pragma unroll kUnroll
      for (int panel = 0; panel < panels; ++panel) {
        const int column = (first + panel) * 64;
        if ((Shape::kTaskBlocks == 1 || row < map_rows) && (column == 0 || column < columns))
          tma_load(tile + panel * panel_bytes, map, full, column, row, end, head, map_batch);
        else
          tma_load(tile + panel * panel_bytes, zeros, full, 0, map_rows, 0, 0);
      }
    };
    // The task is read again from where the others find it, as it takes more registers than the loader has.
    const auto load_keys = [&] {
      const BackwardTask task = BackwardTask::load(shared.task(), params);
      const int head = arguments.groups.group.quotient(task.first_head), end = task.k.start + task.k.length;
      const auto load_block = [&](uint32_t tile, int panels, const CUtensorMap* map, int key_block, int first, int columns) {
        const int row = arguments.map_rows_k - task.k.length + key_block * Shape::kBlockN;
        load_panels(tile, panels, Shape::kKeyPanelBytes, map, &arguments.zero_keys, arguments.map_rows_k, shared.keys_full(), row, end,
                    head, first, columns);
      };
      if (key_blocks > 0) mbarrier_wait(shared.keys_empty(), (key_blocks - 1) & 1);
      mbarrier_arrive_expect(shared.keys_full(), Shape::kKeyBytes + Shape::kValueBytes + Shape::kPeerKeyBytes);
      load_block(shared.k(), Shape::kPanels, &arguments.k, task.key_block, first_panel, params.head_dim);
      load_block(shared.v(), Shape::kValuePanels, &arguments.v, task.key_block, first_panel, params.head_dim_v);
      if constexpr (Shape::kPeerPanels > 0)
        load_block(shared.peer_k(), Shape::kPeerPanels, &arguments.k, task.key_block ^ 1, Shape::first_peer_panel(cluster_rank()),
                   params.head_dim);
    };

    const uint32_t first_step = step;
    step = task.for_each_step(
        [&](uint32_t step, int head, int query_block, int tile) {
          const uint32_t stage = step % kStages, released = (step / kStages & 1) ^ 1;
          const Sequence q = BackwardTask::load_queries(shared.task());
          const int row = arguments.map_rows_q - q.length + query_block * kBlockM, end = q.start + q.length;
          const float* rows = arguments.delta + static_cast<int64_t>(tile) * (kBlockM * 2);
          const auto load_queries = [&](uint32_t tile, int panels, const CUtensorMap* map, uint32_t full, int columns) {
            load_panels(tile, panels, Shape::kQueryPanelBytes, map, &arguments.zero_queries, arguments.map_rows_q, full, row, end, head,
                        first_panel, columns);
          };
          mbarrier_wait(shared.empty(stage), released);
          mbarrier_arrive_expect(shared.q_full(stage), Shape::kQueryBytes + Shape::kRowBytes);
          load_queries(shared.q(stage), Shape::kPanels, &arguments.q, shared.q_full(stage), params.head_dim);
          // PERF: before dO, which it would wait behind, or for, and with it S: d 64 1 to 3 %, d 256 3 to 6. TUNING.md, "The loop".
          const auto load_lse = [&] { bulk_load(shared.lse_log2(stage), rows + kBlockM, Shape::kRowBytes, shared.q_full(stage)); };
          if (step > 0) load_lse();
          const auto load_dout = [&] {
            const uint32_t dout_full = shared.dout_full(step % kDoutStages);
            mbarrier_arrive_expect(dout_full, Shape::kDoutBytes + Shape::kRowBytes);
            load_queries(shared.dout(step % kDoutStages), Shape::kValuePanels, &arguments.dout, dout_full, params.head_dim_v);
          };
          if constexpr (kDoutStages == kStages) load_dout();
          if (step == first_step) load_keys();  // PERF: a stage of the ring is free a step before K and V are
          if constexpr (kDoutStages != kStages) {
            mbarrier_wait(shared.dout_empty(), (step & 1) ^ 1);
            load_dout();
          }
          if (step == 0) {
            wait_for_kernel_before();
            bulk_global_fence();  // it wrote lse and delta by ordinary stores
            load_lse();
          }
          bulk_load(shared.delta(step % kDoutStages), rows, Shape::kRowBytes, shared.dout_full(step % kDoutStages));
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
// PERF: a block that takes one task after another loads K, V and the first Q and dO of the next under the end of the last: 2 to 22 %, of clusters 0
// to 10. In a fixed order, causal was 5 to 40 % slower than a task each.
// Of sequences whose lengths only the device knows, it takes the key blocks there are; to drop one that is not there takes 1.7 us. PERF: batches to
// 2k, 4k, 8k, filled to 30 %, 1 to 5 %. TUNING.md, "Tasks", also for what was tried.
// first_sequence: of kernels with a table (StoresLone), the sequence of the first task.
template <typename Shape>
__device__ __forceinline__ void load_tasks(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                           CountedSequence first_sequence = {}) {
  const Workspace workspace(arguments.params, Shape::kBlockM, Shape::kDqColumns);
  Loader<Shape> loader{arguments, shared};
  uint32_t tasks = 0;  // handed over so far
  const auto wait_for_slot = [&] { mbarrier_wait(shared.task_empty(), (tasks++ & 1) ^ 1); };
  const auto load = [&](int key_block, int batch_head) {
    const BackwardTask task = BackwardTask::make<Shape>(arguments, key_block, batch_head);
    wait_for_slot();
    task.store(shared.task());
    mbarrier_arrive(shared.task_full());
    loader.load(task);
  };
  const bool in_order = arguments.params.deterministic;
  uint32_t taken = 0;  // from the counter so far
  const auto first = [&] { return in_order ? 0 : arguments.task_blocks / Shape::kCluster; };
  const auto take = [&] { return take_unit<Shape::kCluster>(shared, workspace.next_unit, first, taken); };
  int unit = in_order ? take() : blockIdx.x / Shape::kCluster, key_block, batch_head;
  if (arguments.counts_units()) {
    const auto count = [&](int batch) { return arguments.key_blocks_of<Shape>(batch); };
    if constexpr (Shape::kStoresLone) {
      const int parts = arguments.parts();
      CountedSequence at = in_order ? arguments.table.find(unit / parts, count) : first_sequence;
      for (; at.blocks > 0; at = arguments.table.find(unit / parts, count)) {
        arguments.scheduler.tile_among(at.blocks, parts, unit - at.first * parts, key_block, batch_head);
        load(key_block, at.batch * parts + batch_head);
        unit = take();
      }
    } else {
      CountedBlocks blocks;
      for (; blocks.find(arguments.scheduler, arguments.params.forward.batch, arguments.parts(), unit, count, key_block, batch_head);
           unit = take())
        load(key_block, batch_head);
    }
    wait_for_kernel_before();
  } else {
    for (const int units = arguments.scheduler.units(); unit < units; unit = take()) {
      arguments.scheduler.tile(unit, 0, key_block, batch_head);
      load(key_block, batch_head);
    }
    if constexpr (Shape::kCluster > 1) wait_for_kernel_before();  // the second block, if nothing else had it wait
  }
  wait_for_slot();
  BackwardTask::store_none(shared.task());
  mbarrier_arrive(shared.task_full());
}
}  // namespace hf_flash2::sm90
