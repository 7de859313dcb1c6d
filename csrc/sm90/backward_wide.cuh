// FlashAttention-2 backward for Hopper, head dims above 128. Dao, arXiv 2307.08691, algorithm 2. Launched by backward_launch.cuh like
// backward.cuh, and laid out like it, but for what the registers of a warpgroup can hold: dK or dV of 64 keys, not both.
//
// A task is 64 keys. The first warpgroup computes S and P and keeps dV, the second computes dP and dS and keeps dK. P goes to the second
// through shared memory, thread by thread: both hold the same elements. dS goes through shared memory for dQ = dS K, of which each
// computes some columns, a step later, and adds them to global memory from its registers. So the first is a step ahead of the second, and
// waits for it only where it would be two. PERF: one H200, full and causal at 4k: d 256 388 386 -> 460 423 TFLOP/s, d 192/128 413 392 -> 477
// 442, where both had met in every step for dS. All of it hangs on what the compiler schedules together, here above all between dK and dQ:
// with turns said by a barrier in place of Turns::pass(), d 256 reached 444.
#pragma once
#include "device/reduce_add.cuh"
#include "device/semaphore.cuh"
#include "sm90/backward_parts.cuh"

namespace hf_flash2::sm90 {

template <int kHeadDim, int kHeadDimV = kHeadDim>
struct BackwardWideShape : BackwardSizes<kHeadDim, kHeadDimV> {
  using Sizes = BackwardSizes<kHeadDim, kHeadDimV>;
  static_assert(Sizes::kBlockN == 64 && Sizes::kBlockM == 64, "the consumers share one block of scores");
  static constexpr int kPBytes = Sizes::kBlockN * Sizes::kBlockM * 4,
                       kWorkBytes = Sizes::kStages * Sizes::kScoreBytes + kPBytes;               // dS, then P
  static constexpr int kFirstColumns = 128, kSecondColumns = Sizes::kDqColumns - kFirstColumns;  // of dQ, by consumer
};

template <typename Shape>
__device__ __forceinline__ uint32_t wide_ds_buffer(const BackwardShared<Shape>& shared, int stage) {
  return shared.work() + stage * Shape::kScoreBytes;
}
// Elements of this thread in tile n of P, in fp32.
template <typename Shape>
__device__ __forceinline__ uint32_t wide_p_buffer(const BackwardShared<Shape>& shared, int n) {
  return wide_ds_buffer(shared, Shape::kStages) + (n * 128 + threadIdx.x % 128) * 16;
}

// Named barriers: the first consumer has written P, the second has read it; the second has written dS to a buffer; a consumer's turn has come;
// all of a consumer's threads are here.
constexpr int kPFull = 2, kPEmpty = 3;
__device__ __forceinline__ int wide_ds_full(int stage) { return 4 + stage; }
__device__ __forceinline__ int turn_has_come(int consumer) { return 6 + consumer; }
__device__ __forceinline__ int consumer_is_here(int consumer) { return 8 + consumer; }
constexpr int kTurnThreads = 128 + 32;  // a consumer and the warp that waits

// Deterministic mode: the key blocks add to a tile of dQ one after the other, each consumer on its own: both pass a turn a block. They wait
// for blocks that were launched earlier, so that waiting always ends. PERF: a warp of the loader's watches the semaphores while the
// consumers compute, and a turn is passed on in the step behind it: then what was added has long arrived, and the fence is cheap.
struct Turns {
  int32_t* added = nullptr;  // semaphore of the tile that was added to last

  template <typename Shape>
  static __device__ __forceinline__ void watch(const HfFlash2BackwardParams& params, const BackwardTask& task) {
    if (!params.deterministic) return;
    const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
    task.for_each_step([&](uint32_t, int, int query_block, int tile) {
      if (threadIdx.x % 32 == 0) semaphore_wait(workspace.semaphores + tile, 2 * task.template turn<Shape>(params.forward, query_block));
      __syncwarp();
      for (int consumer = 0; consumer < Shape::kConsumers; ++consumer) named_barrier_sync(turn_has_come(consumer), kTurnThreads);
    });
  }

  // By every thread of a consumer.
  template <typename Shape>
  __device__ __forceinline__ void wait(const HfFlash2BackwardParams& params, int tile) {
    if (!params.deterministic) return;
    added = Workspace(params, Shape::kBlockM, Shape::kDqColumns).semaphores + tile;
    named_barrier_sync(turn_has_come(threadIdx.x / 128), kTurnThreads);
  }
  // By every thread of a consumer, after what it added last.
  __device__ __forceinline__ void pass() const {
    if (added == nullptr) return;
    named_barrier_sync(consumer_is_here(threadIdx.x / 128), 128);
    if (threadIdx.x % 128 != 0) return;
    __threadfence();  // for all of them, as the barrier came before
    semaphore_pass(added);
  }
};

// Adds columns [first_column, + kColumns) of dQ to global memory.
template <typename Shape, int kColumns>
__device__ __forceinline__ void add_query_gradient(const HfFlash2BackwardParams& params, const float (&dq)[kColumns / 8][4],
                                                   int first_column, int tile) {
  const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
  const int thread = threadIdx.x % 128;
  float* columns = workspace.dq + static_cast<int64_t>(tile) * (Shape::kBlockM * Shape::kDqColumns) + first_column * 64;
#pragma unroll
  for (int n = 0; n < kColumns / 8; ++n) reduce_add(columns + (n * 128 + thread / 32 * 32) * 4, thread % 32, dq[n]);
}

// Calls f(step, query_block, tile, is_first) for every step of a task, counted from `step` on. Returns the one behind the last.
template <typename F>
__device__ __forceinline__ uint32_t for_each_wide_step(const BackwardTask& task, uint32_t step, const F& f) {
  if (!task.has_steps()) return step;
  BackwardTask::Step at = task.first();
  const auto tile = [&] { return task.first_tile + at.head * task.head_tiles + at.query_block; };
  f(step++, at.query_block, tile(), std::true_type{});
  while (task.advance(at)) f(step++, at.query_block, tile(), std::false_type{});
  return step;
}

// The first consumer: P and dV.
template <typename Shape, typename T>
__device__ __forceinline__ uint32_t compute_values(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                                   const BackwardTask& task, uint32_t first_step) {
  constexpr int kHeadDimV = Shape::kHeadDimV, kBlockM = Shape::kBlockM, kStages = Shape::kStages, kColumns = Shape::kFirstColumns;
  const HfFlash2BackwardParams& params = arguments.params;
  const ScoreLane lane(task.mask, task.key_block * Shape::kBlockN);
  const float scale_log2 = params.forward.softmax_scale * kLog2e;
  float dv[kHeadDimV / 8][4];
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) (&dv[0][0])[i] = 0.f;

  Turns turns;
  int last_tile = 0;  // of the step before
  const auto add_dq = [&](float (&dq)[Shape::kFirstColumns / 8][4]) {
    wgmma_use<kColumns / 2>(&dq[0][0]);
    turns.wait<Shape>(params, last_tile);
    add_query_gradient<Shape, kColumns>(params, dq, 0, last_tile);
  };
  const auto issue_dq = [&](float (&dq)[Shape::kFirstColumns / 8][4], uint32_t step) {
    named_barrier_sync(wide_ds_full(step % kStages), Shape::kConsumerThreads);
    issue_query_gradient<Shape, T, kColumns>(&dq[0][0], wide_ds_buffer(shared, step % kStages), hidden(shared.k()));
  };
  const auto advance = [&](uint32_t step, int query_block, int tile, auto is_first) {  // is_first: an integral_constant<bool>
    constexpr bool kFirst = decltype(is_first)::value;
    const uint32_t stage = step % kStages, parity = step / kStages & 1;
    float p[kBlockM / 8][4], dq[Shape::kFirstColumns / 8][4];  // dq: of the step before
    uint32_t p_rounded[kBlockM / 4];
    clear_queries(shared, task, step, query_block);
    mbarrier_wait(shared.q_full(stage), parity);
    const RowValues<kBlockM / 8> lse_log2(shared.lse_log2(stage));  // PERF: before the product, which keeps shared memory busy
    issue_scores<Shape, T>(&p[0][0], hidden(shared.k()), shared.q(stage));
    wgmma_wait<0>();
    wgmma_use<kBlockM / 2>(&p[0][0]);
    if (task.mask_needed(query_block)) lane.apply_mask(p, task.mask, query_block * kBlockM);
    exponentiate(p, lse_log2, scale_log2);
    named_barrier_sync(kPEmpty, Shape::kConsumerThreads);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) store_shared(wide_p_buffer(shared, n), p[n]);
    named_barrier_arrive(kPFull, Shape::kConsumerThreads);
    round_tiles<T, kBlockM / 8>(p_rounded, p);
    mbarrier_wait(shared.dout_full(stage), parity);
    issue_key_gradient<Shape, T, kBlockM, kHeadDimV>(&dv[0][0], p_rounded, shared.dout(stage));
    if constexpr (kFirst) {
      wgmma_wait<0>();
      mbarrier_arrive(shared.empty(stage));
    } else {
      turns.pass();
      issue_dq(dq, step - 1);
      wgmma_wait<1>();
      mbarrier_arrive(shared.empty(stage));
      wgmma_wait<0>();
      add_dq(dq);
    }
    last_tile = tile;
  };
  const uint32_t next_step = for_each_wide_step(task, first_step, advance);
  if (task.has_steps()) {
    float dq[Shape::kFirstColumns / 8][4];
    turns.pass();
    issue_dq(dq, next_step - 1);
    wgmma_wait<0>();
    add_dq(dq);
  }
  turns.pass();
  if (task.has_steps()) mbarrier_arrive(shared.keys_empty());
  wgmma_use<kHeadDimV / 2>(&dv[0][0]);
  store_key_gradient<Shape, T>(arguments, params.dv, Shape::kBlockN * Shape::kHeadDim, dv, task, lane.key, params.forward.head_dim_v);
  return next_step;
}

// The second consumer: dS and dK.
template <typename Shape, typename T>
__device__ __forceinline__ uint32_t compute_keys(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                                 const BackwardTask& task, uint32_t first_step) {
  constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kStages = Shape::kStages, kColumns = Shape::kSecondColumns;
  const HfFlash2BackwardParams& params = arguments.params;
  float dk[kHeadDim / 8][4];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] = 0.f;

  Turns turns;
  int last_tile = 0;  // of the step before
  const auto add_dq = [&](float (&dq)[Shape::kSecondColumns / 8][4]) {
    wgmma_use<kColumns / 2>(&dq[0][0]);
    turns.wait<Shape>(params, last_tile);
    add_query_gradient<Shape, kColumns>(params, dq, Shape::kFirstColumns, last_tile);
  };
  const auto issue_dq = [&](float (&dq)[Shape::kSecondColumns / 8][4], uint32_t step) {
    issue_query_gradient<Shape, T, kColumns>(&dq[0][0], wide_ds_buffer(shared, step % kStages),
                                             hidden(shared.k()) + Shape::kFirstColumns / 64 * Shape::kKeyPanelBytes);
  };
  const auto advance = [&](uint32_t step, int query_block, int tile, auto is_first) {
    constexpr bool kFirst = decltype(is_first)::value;
    const uint32_t stage = step % kStages, parity = step / kStages & 1;
    float ds[kBlockM / 8][4], dq[Shape::kSecondColumns / 8][4];
    uint32_t ds_rounded[kBlockM / 4];
    clear_queries(shared, task, step, query_block);
    mbarrier_wait(shared.dout_full(stage), parity);
    issue_scores<Shape, T, Shape::kHeadDimV>(&ds[0][0], hidden(shared.v()), shared.dout(stage));
    named_barrier_sync(kPFull, Shape::kConsumerThreads);
    wgmma_wait<0>();
    wgmma_use<kBlockM / 2>(&ds[0][0]);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) {  // P a tile at a time: beside dK and dP all of it would spill
      const uint4 x = load_shared_uint4(wide_p_buffer(shared, n));
      const float p[1][4] = {{__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)}};
      differentiate(ds + n, p, RowValues<1>(shared.delta(stage) + n * 32));
    }
    named_barrier_arrive(kPEmpty, Shape::kConsumerThreads);  // reads before an arrival are done when the barrier completes (PTX ISA)
    round_tiles<T, kBlockM / 8>(ds_rounded, ds);
    // Two buffers of dS: the first had multiplied with this one before it wrote this P.
    store_panels<Shape::kScorePanelBytes, kBlockM / 8>(wide_ds_buffer(shared, stage), ds_rounded);
    named_barrier_arrive(wide_ds_full(stage), Shape::kConsumerThreads);
    mbarrier_wait(shared.q_full(stage), parity);
    issue_key_gradient<Shape, T>(&dk[0][0], ds_rounded, shared.q(stage));
    if constexpr (kFirst) {
      wgmma_wait<0>();
      mbarrier_arrive(shared.empty(stage));
    } else {
      turns.pass();
      issue_dq(dq, step - 1);
      wgmma_wait<1>();
      mbarrier_arrive(shared.empty(stage));
      wgmma_wait<0>();
      add_dq(dq);
    }
    named_barrier_sync(consumer_is_here(1), 128);  // all of dS is there
    last_tile = tile;
  };
  const uint32_t next_step = for_each_wide_step(task, first_step, advance);
  if (task.has_steps()) {
    float dq[Shape::kSecondColumns / 8][4];
    turns.pass();
    issue_dq(dq, next_step - 1);
    wgmma_wait<0>();
    add_dq(dq);
  }
  turns.pass();
  if (task.has_steps()) mbarrier_arrive(shared.keys_empty());
  wgmma_use<kHeadDim / 2>(&dk[0][0]);
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] *= params.forward.softmax_scale;
  const ScoreLane lane(task.mask, task.key_block * Shape::kBlockN);
  store_key_gradient<Shape, T>(arguments, params.dk, 0, dk, task, lane.key, params.forward.head_dim);
  return next_step;
}

template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads, 1) backward_wide_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  const BackwardShared<Shape> shared{shared_address(memory)};
  const bool loads = threadIdx.x == Shape::kConsumerThreads, watches = threadIdx.x / 32 == Shape::kConsumerThreads / 32 + 1;
  // Arrivals and waits of every barrier match.
  const auto begin_computing = [] {
    if (threadIdx.x >= 128) named_barrier_arrive(kPEmpty, Shape::kConsumerThreads);
  };
  const auto end_computing = [] {
    if (threadIdx.x < 128) named_barrier_sync(kPEmpty, Shape::kConsumerThreads);
  };
  const auto compute = [&](const BackwardTask& task, uint32_t step, uint32_t keys_parity) {
    if (task.has_steps()) wait_for_keys(shared, task, keys_parity);
    // PERF: by warpgroup_index(), d 256 is 8 % slower.
    const bool first = Shape::kTakesTasks ? warpgroup_index() == 0 : threadIdx.x < 128;
    return first ? compute_values<Shape, T>(arguments, shared, task, step) : compute_keys<Shape, T>(arguments, shared, task, step);
  };
  let_next_kernel_begin();

  if constexpr (Shape::kTakesTasks) {
    shared.make_barriers(1);
    if (threadIdx.x >= Shape::kConsumerThreads) {
      give_registers<Shape::kLoaderRegisters>();
      if (loads) load_tasks<Shape>(arguments, shared);
      if (watches) {
        wait_for_kernel_before();  // it clears the semaphores
        for_each_task(arguments, shared, [&](const BackwardTask& task) { Turns::watch<Shape>(arguments.params, task); });
      }
    } else {
      take_registers<Shape::kConsumerRegisters>();
      uint32_t step = 0, key_blocks = 0;
      begin_computing();
      for_each_task(arguments, shared, [&](const BackwardTask& task) {
        step = compute(task, step, key_blocks & 1);
        key_blocks += task.has_steps();
      });
      end_computing();
    }
  } else {
    const BackwardTask task = BackwardTask::make<Shape>(arguments, blockIdx.x);
    if (task.key_block * Shape::kBlockN >= task.k.length) return wait_for_kernel_before();
    shared.make_barriers();
    if (threadIdx.x >= Shape::kConsumerThreads) {
      give_registers<Shape::kLoaderRegisters>();
      if (loads && !task.has_steps()) wait_for_kernel_before();
      if (loads) Loader<Shape>{arguments, shared}.load(task);
      if (watches) {
        wait_for_kernel_before();
        Turns::watch<Shape>(arguments.params, task);
      }
    } else {
      take_registers<Shape::kConsumerRegisters>();
      begin_computing();
      compute(task, 0, 0);
      end_computing();
    }
  }
}

}  // namespace hf_flash2::sm90
