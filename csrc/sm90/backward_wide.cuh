// FlashAttention-2 backward for Hopper, head dims above 128. Dao, arXiv 2307.08691, algorithm 2. Launched by backward_launch.cuh like
// backward.cuh, and laid out like it, but for what the registers of a warpgroup can hold: dK or dV of 64 keys, not both.
//
// A task is 64 keys. The first warpgroup computes S and P and keeps dV, the second computes dP and dS and keeps dK. P goes to the second
// through shared memory, thread by thread: both hold the same elements. dS goes through shared memory for dQ = dS K, of which each
// computes some columns, a step later, and adds them to global memory from its registers. So the first is a step ahead of the second, and
// waits for it only where it would be two. PERF: one H200, full and causal at 4k: d 256 388 386 -> 460 423 TFLOP/s, d 192/128 413 392 ->
// 477 442, where both had met in every step for dS.
// Tried and left: at d 256, dK and dV sent by TMA through the last stage of Q and dO: one H100, 1 % faster at 512 and 1k, level from 2k on.
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
                       kWorkBytes = Sizes::kStages * Sizes::kScoreBytes + kPBytes;  // dS, then P
  static constexpr bool kDeterministic = false;
  // Of dQ, by consumer.
  static constexpr int kFirstColumn[2] = {0, 128}, kColumns[2] = {128, Sizes::kDqColumns - 128};
};

// Deterministic mode, a kernel of its own: the key blocks add to a tile of dQ one after the other, each consumer on its own.
template <typename Shape>
struct InOrder : Shape {
  static constexpr bool kDeterministic = true;
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

// Named barriers: the first consumer has written P; the second has written dS to a buffer, and all of it is there for itself; a consumer's
// turn has come, and it has added. That P has been read is said by an mbarrier: compute-sanitizer cannot follow a named one that readers
// arrive at, not even in the example of the PTX ISA ("bar"), and it is not faster.
constexpr int kPFull = 2, kDsHere = 3;
__device__ __forceinline__ int wide_ds_full(int stage) { return 4 + stage; }
__device__ __forceinline__ int turn_has_come(int consumer) { return 6 + consumer; }
__device__ __forceinline__ int has_added(int consumer) { return 8 + consumer; }
constexpr int kTurnThreads = 128 + 32;  // a consumer and the warp that keeps its order

// Deterministic mode: watches the turns of a consumer and passes them on, by a warp of its own. It waits for blocks that were launched
// earlier, so that waiting always ends. It asks for the next turn while the consumer adds: if that has come, the consumer may go on before the
// last is passed on, which takes a fence.
// PERF: the consumers wait for no fence, and a turn is passed on at once. One H200, d 256 at 1k, 4k, 16k, % of the default's speed: full 81 78
// 78 -> 90 87 86, causal 82 80 77 -> 94 89 87, where one warp watched for both consumers and they passed turns on a step later. Asking while the
// consumer adds, then the first block at a tile that stores, so that nothing clears dQ: full at 1k, 4k, 16k, TFLOP/s, 340 407 427 -> 352 433
// 442 -> 371 445 465, causal 269 377 408 -> 274 391 420 -> 300 417 451 (the default 359 447 468, 294 433 468). Tried and left: sums of dQ of
// their own for even and odd key blocks, so that two steps lie between what one block and the next one add: at 2k, 4k, 16k full 89 86 84 %
// -> 79 79 83, causal 87 84 82 -> 75 76 72. A kernel for dK and dV and one for dQ would need no order, but seven products in place of five: 71 %
// at best.
template <typename Shape>
__device__ __forceinline__ void keep_order(const HfFlash2BackwardParams& params, const BackwardTask& task, int consumer) {
  if (!task.has_steps()) return;
  const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
  const bool elected = threadIdx.x % 32 == 0;
  BackwardTask::Step at = task.first();
  const auto semaphore = [&] { return workspace.semaphore(task.first_tile + at.head * task.head_tiles + at.query_block, consumer); };
  const auto turn = [&] { return task.template turn<Shape>(params.forward, at.query_block); };
  const auto let_add = [&] {
    __syncwarp();
    named_barrier_arrive(turn_has_come(consumer), kTurnThreads);
  };
  if (elected) semaphore_wait(semaphore(), turn());
  let_add();
  for (bool more = true; more;) {
    int32_t* const current = semaphore();
    more = task.advance(at);
    const bool come = __any_sync(0xffffffffu, elected && more && semaphore_read(semaphore()) >= turn());
    named_barrier_sync(has_added(consumer), kTurnThreads);
    if (come) let_add();
    if (elected) semaphore_pass(current);
    if (more && !come) {
      if (elected) semaphore_wait(semaphore(), turn());
      let_add();
    }
  }
}

// A consumer's columns of dQ, begun: once its dS is there.
template <typename Shape, typename T, int kConsumer>
__device__ __forceinline__ void issue_dq(float (&dq)[Shape::kColumns[kConsumer] / 8][4], const BackwardShared<Shape>& shared,
                                         uint32_t step) {
  const int stage = step % Shape::kStages;
  if constexpr (kConsumer == 0)
    named_barrier_sync(wide_ds_full(stage), Shape::kConsumerThreads);
  else
    named_barrier_sync(kDsHere, 128);
  issue_query_gradient<Shape, T, Shape::kColumns[kConsumer]>(
      &dq[0][0], wide_ds_buffer(shared, stage), hidden(shared.k()) + Shape::kFirstColumn[kConsumer] / 64 * Shape::kKeyPanelBytes);
}

// Waits for them and adds them to global memory.
// PERF: additions that follow each other at once keep the other consumer from shared memory: all of them go through one queue. So the
// address of each depends on products behind those of the one before, some ten cycles. One H200, d 256 full at 1k, 4k, 16k: 357 439 442 ->
// 369 476 451 TFLOP/s; half and twice as far apart 464 and 475 at 4k, four times 461; nanosleep in place of the products 460 (where 486).
template <typename Shape, int kConsumer>
__device__ __forceinline__ void add_dq(const HfFlash2BackwardParams& params, float (&dq)[Shape::kColumns[kConsumer] / 8][4], int tile,
                                       bool first) {
  constexpr int kTiles = Shape::kColumns[kConsumer] / 8;
  wgmma_wait<0>();
  wgmma_use<kTiles * 4>(&dq[0][0]);
  if constexpr (Shape::kDeterministic) named_barrier_sync(turn_has_come(kConsumer), kTurnThreads);
  const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
  float* columns = workspace.dq + static_cast<int64_t>(tile) * (Shape::kBlockM * Shape::kDqColumns) + Shape::kFirstColumn[kConsumer] * 64 +
                   threadIdx.x % 128 / 32 * (32 * 4);
  uint32_t zero = __float_as_uint(dq[kTiles - 1][3]) & threadIdx.y;  // blocks have one row of threads, which the compiler does not know
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float* const block = columns + n * (128 * 4) + zero;
    if (Shape::kDeterministic && first)
      store_reduced(block, threadIdx.x % 32, dq[n]);
    else
      reduce_add(block, threadIdx.x % 32, dq[n]);
    for (int i = 0; i < 2; ++i) zero = zero * zero + zero;
  }
  if constexpr (Shape::kDeterministic) named_barrier_arrive(has_added(kConsumer), kTurnThreads);
}

// The end of a step, when its last product has been issued: Q and dO are done with, and under that product comes dQ of the step before, of
// `last_tile`.
template <typename Shape, typename T, int kConsumer, bool kFirst>
__device__ __forceinline__ void finish_step(const HfFlash2BackwardParams& params, const BackwardShared<Shape>& shared, uint32_t step,
                                            int last_tile, bool first) {
  if constexpr (kFirst) {
    wgmma_wait<0>();
    mbarrier_arrive(shared.empty(step % Shape::kStages));
  } else {
    float dq[Shape::kColumns[kConsumer] / 8][4];
    issue_dq<Shape, T, kConsumer>(dq, shared, step - 1);
    wgmma_wait<1>();
    mbarrier_arrive(shared.empty(step % Shape::kStages));
    add_dq<Shape, kConsumer>(params, dq, last_tile, first);
  }
}

// Calls f(step, query_block), which ends with a product of its own under way, for every step of a task, counted from `step` on, and finishes
// each. Returns the one behind the last.
template <typename Shape, typename T, int kConsumer, typename F>
__device__ __forceinline__ uint32_t for_each_wide_step(const HfFlash2BackwardParams& params, const BackwardShared<Shape>& shared,
                                                       const BackwardTask& task, uint32_t step, const F& f) {
  if (!task.has_steps()) return step;
  BackwardTask::Step at = task.first();
  int last_tile = 0;
  bool first = false;  // deterministic mode: it was the first key block there
  const auto advance = [&](auto is_first) {
    const int tile = task.first_tile + at.head * task.head_tiles + at.query_block;
    clear_queries(shared, task, step, at.query_block);
    f(step, at.query_block);
    finish_step<Shape, T, kConsumer, decltype(is_first)::value>(params, shared, step++, last_tile, first);
    last_tile = tile;
    if constexpr (Shape::kDeterministic) first = task.template turn<Shape>(params.forward, at.query_block) == 0;
  };
  advance(std::true_type{});
  while (task.advance(at)) advance(std::false_type{});
  float dq[Shape::kColumns[kConsumer] / 8][4];
  issue_dq<Shape, T, kConsumer>(dq, shared, step - 1);
  add_dq<Shape, kConsumer>(params, dq, last_tile, first);
  mbarrier_arrive(shared.keys_empty());
  return step;
}

// The first consumer: P and dV.
template <typename Shape, typename T>
__device__ __forceinline__ uint32_t compute_values(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                                   const BackwardTask& task, uint32_t first_step) {
  constexpr int kHeadDimV = Shape::kHeadDimV, kBlockM = Shape::kBlockM, kStages = Shape::kStages;
  const HfFlash2BackwardParams& params = arguments.params;
  const ScoreLane lane(task.mask, task.key_block * Shape::kBlockN);
  const float scale_log2 = params.forward.softmax_scale * kLog2e;
  float dv[kHeadDimV / 8][4];
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) (&dv[0][0])[i] = 0.f;

  const uint32_t next_step = for_each_wide_step<Shape, T, 0>(params, shared, task, first_step, [&](uint32_t step, int query_block) {
    const uint32_t stage = step % kStages, parity = step / kStages & 1;
    float p[kBlockM / 8][4];
    uint32_t p_rounded[kBlockM / 4];
    mbarrier_wait(shared.q_full(stage), parity);
    const RowValues<kBlockM / 8> lse_log2(shared.lse_log2(stage));  // PERF: before the product, which keeps shared memory busy
    issue_scores<Shape, T>(&p[0][0], hidden(shared.k()), shared.q(stage));
    wgmma_wait<0>();
    wgmma_use<kBlockM / 2>(&p[0][0]);
    if (task.mask_needed(query_block)) lane.apply_mask(p, task.mask, query_block * kBlockM);
    exponentiate(p, lse_log2, scale_log2);
    mbarrier_wait(shared.p_empty(), (step & 1) ^ 1);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; ++n) store_shared(wide_p_buffer(shared, n), p[n]);
    named_barrier_arrive(kPFull, Shape::kConsumerThreads);
    round_tiles<T, kBlockM / 8>(p_rounded, p);
    mbarrier_wait(shared.dout_full(stage), parity);
    issue_key_gradient<Shape, T, kBlockM, kHeadDimV>(&dv[0][0], p_rounded, shared.dout(stage));
  });
  wgmma_use<kHeadDimV / 2>(&dv[0][0]);
  store_key_gradient<Shape, T>(arguments, params.dv, Shape::kBlockN * Shape::kHeadDim, dv, task, lane.key, params.forward.head_dim_v);
  return next_step;
}

// The second consumer: dS and dK.
template <typename Shape, typename T>
__device__ __forceinline__ uint32_t compute_keys(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                                 const BackwardTask& task, uint32_t first_step) {
  constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kStages = Shape::kStages;
  const HfFlash2BackwardParams& params = arguments.params;
  float dk[kHeadDim / 8][4];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] = 0.f;

  const uint32_t next_step = for_each_wide_step<Shape, T, 1>(params, shared, task, first_step, [&](uint32_t step, int) {
    const uint32_t stage = step % kStages, parity = step / kStages & 1;
    float ds[kBlockM / 8][4];
    uint32_t ds_rounded[kBlockM / 4];
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
    mbarrier_arrive(shared.p_empty());
    round_tiles<T, kBlockM / 8>(ds_rounded, ds);
    // Two buffers of dS: the first had multiplied with this one before it wrote this P.
    store_panels<Shape::kScorePanelBytes, kBlockM / 8>(wide_ds_buffer(shared, stage), ds_rounded);
    named_barrier_arrive(wide_ds_full(stage), Shape::kConsumerThreads);
    mbarrier_wait(shared.q_full(stage), parity);
    issue_key_gradient<Shape, T>(&dk[0][0], ds_rounded, shared.q(stage));
  });
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
  const int warp = warp_index() - Shape::kConsumerThreads / 32;  // behind the consumers: the loader, then one that keeps order for each
  const bool keeps_order = Shape::kDeterministic && (warp == 1 || warp == 2);
  const auto compute = [&](const BackwardTask& task, uint32_t step, uint32_t keys_parity) {
    if (task.has_steps()) wait_for_keys(shared, task, keys_parity);
    return warpgroup_index() == 0 ? compute_values<Shape, T>(arguments, shared, task, step)
                                  : compute_keys<Shape, T>(arguments, shared, task, step);
  };
  let_next_kernel_begin();

  if constexpr (Shape::kTakesTasks) {
    shared.make_barriers(Shape::kDeterministic ? Shape::kConsumers : 0);
    if (threadIdx.x >= Shape::kConsumerThreads) {
      give_registers<Shape::kLoaderRegisters>();
      if (warp == 0) {
        if (elect_one()) load_tasks<Shape>(arguments, shared);
      } else if (keeps_order) {
        wait_for_kernel_before();  // it clears the semaphores
        for_each_task(arguments, shared, [&](const BackwardTask& task) { keep_order<Shape>(arguments.params, task, warp - 1); });
      } else if (warp == 3) {
        clear_gradient_gaps(arguments, shared);
      }
    } else {
      take_registers<Shape::kConsumerRegisters>();
      uint32_t step = 0, key_blocks = 0;
      for_each_task(arguments, shared, [&](const BackwardTask& task) {
        step = compute(task, step, key_blocks & 1);
        key_blocks += task.has_steps();
      });
    }
  } else {
    int key_block, batch_head;
    arguments.scheduler.tile(blockIdx.x, 0, key_block, batch_head);
    const BackwardTask task = BackwardTask::make<Shape>(arguments, key_block, batch_head);
    if (task.key_block * Shape::kBlockN >= task.k.length) {
      if (warp == 3) clear_gradient_gaps(arguments, shared);
      return wait_for_kernel_before();
    }
    shared.make_barriers();
    if (threadIdx.x >= Shape::kConsumerThreads) {
      give_registers<Shape::kLoaderRegisters>();
      if (warp == 0) {
        if (!task.has_steps()) wait_for_kernel_before();
        if (elect_one()) Loader<Shape>{arguments, shared}.load(task);
      } else if (keeps_order) {
        wait_for_kernel_before();
        keep_order<Shape>(arguments.params, task, warp - 1);
      } else if (warp == 3) {
        clear_gradient_gaps(arguments, shared);
      }
    } else {
      take_registers<Shape::kConsumerRegisters>();
      compute(task, 0, 0);
    }
  }
}

}  // namespace hf_flash2::sm90
