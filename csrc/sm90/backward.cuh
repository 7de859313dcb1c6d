// FlashAttention-2 backward for Hopper, head dims to 128: TMA loads, wgmma products, warpgroups with roles. Dao, arXiv 2307.08691, algorithm 2.
// Launched by backward_launch.cuh between preprocess_kernel (delta) and the last kernel: convert_kernel, round_rest_kernel, or both.
//
// A task is 128 keys of one key head. A thread block keeps their dK and dV in registers while the query blocks that see them stream by, over
// all query heads that share the key head, or a split of them: dK and dV are reduced over these in place. Two warpgroups compute, 64 keys
// each; of the last, one thread finds tasks and loads, one warp adds dQ to global memory, and one may find its turns there. Only dS goes
// through shared memory, once, for dQ = dS K, which contracts over the keys of both warpgroups: each computes 64 x 64 of it, a step later. So
// neither waits for the other's dS, and one can be half a step ahead: they take turns at dQ, dK and S, and while one computes P and dS the
// other has the tensor cores.
// PERF: dQ, the dK of a step and the S of the next are under way together. The loop ends behind dS, where no product is: carried over the edge,
// one makes ptxas serialise all. -2 to 9 % faster than a loop that ends behind dK; turns bring 3 to 10 %. Shared memory is what limits it, 81 %
// busy beside what the copy engine moves. TUNING.md, "The loop".
// A task costs some 5 us beside its steps, a quarter of the time at 1k causal, d 128. What was tried against that: TUNING.md, "Tasks".
#pragma once
#include "device/semaphore.cuh"
#include "sm90/backward_parts.cuh"
#include "sm90/rounding.cuh"

namespace hf_flash2::sm90 {

template <int kHeadDim>
struct BackwardShape : BackwardSizes<kHeadDim> {
  using Sizes = BackwardSizes<kHeadDim>;
  static_assert(Sizes::kBlockN == 128 && Sizes::kDqPieces == 2, "64 keys and one piece of dQ a consumer");
  static_assert(Sizes::kStages == 2, "a buffer of dS and a ds_full() of every consumer for each");
  static constexpr bool kRounds = false;
  static constexpr int kDqPieceBytes = Sizes::kDqPieceFloats * 4;
  static constexpr int kDqStageBytes = 2 * kDqPieceBytes;
  static constexpr int kWorkBytes = Sizes::kStages * Sizes::kScoreBytes + kDqStageBytes;  // dS, then dQ in fp32
  static constexpr int kOwnBarriers = 2 + (Sizes::kDqStages > 1 ? 4 : 0);
};

// With thread blocks that round dQ, or none of them. PERF: a kernel of its own, as ptxas makes a faster loop of it, 2 to 4 % at d 64 from 8k on,
// but short calls are 2 to 10 % slower. TUNING.md, "dQ rounded beside".
template <typename Shape>
struct Rounds : Shape {
  static constexpr bool kRounds = true;
};

// For short causal sequences. Where only the first key block comes to a query block, that task has all of its dQ, which the consumers round and
// store: no kernel need do so later. PERF: where these blocks are many, 1 to 10 %; a kernel of its own, as for others the loop is 1 to 2 % slower.
// TUNING.md, "dQ of one task". Where only the device knows their lengths, tasks are found by a table (SequenceTable).
template <typename Shape>
struct StoresLone : Shape {
  static constexpr bool kStoresLone = true;
};

template <typename Shape>
__device__ __forceinline__ uint32_t ds_buffer(const BackwardShared<Shape>& shared, int stage) {
  return shared.work() + stage * Shape::kScoreBytes;
}
template <typename Shape>
__device__ __forceinline__ uint32_t dq_buffer(const BackwardShared<Shape>& shared, int consumer, uint32_t stage) {
  const uint32_t first = ds_buffer(shared, Shape::kStages), apart = shared.second_dq() - first;
  return first + stage * apart + consumer * Shape::kDqPieceBytes;
}

// Named barriers of a piece of dQ: "full" when its consumer has written it, "empty" when it has left for global memory. Where there may be two
// stages, that is an mbarrier, as there are no more named ones.
__device__ __forceinline__ int dq_full(int consumer, uint32_t stage) { return 2 + consumer + stage * 2; }
__device__ __forceinline__ int dq_empty(int consumer) { return 4 + consumer; }
constexpr int kDqThreads = 128 + 32;  // a consumer and the warp that adds
template <typename Shape>
__device__ __forceinline__ uint32_t dq_stage(const BackwardArguments& arguments, uint32_t step) {
  return Shape::kDqStages > 1 ? step & (arguments.dq_stages - 1) : 0;
}
// Of consumers: its dS is there for itself, and for the other; its turn has come. ds_full takes turns with the buffers: the first consumer may
// say that its next dS is there before the other has asked for the last.
__device__ __forceinline__ int ds_here(int consumer) { return 7 + consumer; }
__device__ __forceinline__ int ds_full(int consumer, int stage) { return 9 + consumer * 2 + stage; }
__device__ __forceinline__ int consumer_turn(int consumer) { return 13 + consumer; }

// Turns. Of the key blocks that come to a tile of dQ, the first stores, and those behind it wait until that is done and add: in any order, or in
// deterministic mode one after the other. Where the accumulator has been cleared (not first_stores), all add.
// Waiting always ends. In deterministic mode it is for blocks that were launched earlier. Else, who is first at a tile is a block that
// runs, and from taking that turn to passing it on it waits for no other block: it takes the next only when it has begun to store, and
// passes this one on before it waits with the next.

// By one thread: waits for this block's turn at a tile, except for the first. Returns whether it is the first, which stores.
__device__ __forceinline__ bool wait_for_turn(int32_t* semaphore, int turn, bool deterministic) {
  if (turn > 0 && turn < kEveryTurn) semaphore_wait(semaphore, deterministic ? turn : kEveryTurn);
  return turn == 0;
}

// Finds the turns for the warp that adds: in deterministic mode, and where dQ has two stages.
// PERF: that warp has to wait for its additions, too, and both one after the other often took longer than a step. TUNING.md, "Who adds to dQ".
__device__ __forceinline__ bool has_watcher(const BackwardArguments& arguments) {
  return arguments.params.deterministic || (arguments.dq_stages > 1 && arguments.first_stores);
}
template <typename Shape>
__device__ __forceinline__ void watch_turns(const BackwardArguments& arguments, const BackwardShared<Shape>& shared) {
  const HfFlash2BackwardParams& params = arguments.params;
  const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
  uint32_t number = 0;
  wait_for_kernel_before();  // it clears the semaphores
  for_each_task(arguments, shared, [&](const BackwardTask& task) {
    task.for_each_step([&](uint32_t, int, int query_block, int tile) {
      if (threadIdx.x % 32 == 0) {
        mbarrier_wait(shared.turn_empty(), (number & 1) ^ 1);
        int32_t* semaphore = workspace.semaphore(tile);
        const int turn = params.deterministic ? task.template turn<Shape>(params.forward, query_block) : semaphore_take(semaphore);
        store_shared(shared.stores(), wait_for_turn(semaphore, turn, params.deterministic));
        mbarrier_arrive(shared.turn_full());
      }
      __syncwarp();
      ++number;
    });
  });
}

// Brings dQ to global memory, by one warp: the consumers go on as soon as a piece has been read, or with two stages before that.
template <typename Shape>
__device__ __forceinline__ void add_query_gradients(const BackwardArguments& arguments, const BackwardShared<Shape>& shared) {
  const HfFlash2BackwardParams& params = arguments.params;
  const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
  const bool elected = elect_one(), watched = has_watcher(arguments);
  uint32_t step = 0;
  int32_t* written = nullptr;  // semaphore of the tile of the step before, if others wait for what was written there
  const auto pass_turn = [&] {
    if (written == nullptr) return;
    bulk_wait_all();
    bulk_global_fence();
    semaphore_pass(written, params.deterministic ? 1 : kEveryTurn);
  };
  // Of the task before, its semaphore of kStored: its shares are stored when a dQ of this task is there. PERF: said at the end, as that waits for
  // what this multiprocessor stores: at the first dQ, groups at 2k and 4k are 1 to 2 % slower.
  int32_t* stored = nullptr;
  // A piece of the step before has been read; in the first step nothing has been issued yet.
  const auto release = [&](int consumer) {
    if constexpr (Shape::kDqStages > 1) {
      if (elected && step > 0) mbarrier_arrive(shared.dq_empty(consumer, dq_stage<Shape>(arguments, step - 1)));
    } else {
      __syncwarp();
      named_barrier_arrive(dq_empty(consumer), kDqThreads);
    }
  };
  // queries: from the first of the tile to the end of the sequence, none where nothing is added.
  const auto add = [&](int tile, int queries) {
    if (elected) bulk_wait_read<1>();
    release(0);
    if (elected) bulk_wait_read<0>();
    release(1);
    float* dq = workspace.dq + static_cast<int64_t>(tile) * (Shape::kBlockM * Shape::kDqColumns);
    // PERF: here, the warp has nothing to do for most of a step: that hides how long the semaphores take.
    bool first = false;
    if (arguments.first_stores && elected) {
      int32_t* semaphore = workspace.semaphore(tile);
      if (watched) {
        pass_turn();
        mbarrier_wait(shared.turn_full(), step & 1);
        first = load_shared_int(shared.stores()) != 0;
        if (params.deterministic) mbarrier_arrive(shared.turn_empty());
      } else {
        const int turn = semaphore_take(semaphore);
        pass_turn();
        first = wait_for_turn(semaphore, turn, false);
      }
      written = first || params.deterministic ? semaphore : nullptr;
      bulk_global_fence();
    }
    for (int consumer = 0; consumer < Shape::kConsumers; ++consumer) {
      const uint32_t stage = dq_stage<Shape>(arguments, step), buffer = dq_buffer(shared, consumer, stage);
      __syncwarp();
      named_barrier_sync(dq_full(consumer, stage), kDqThreads);
      if (elected) {
        float* piece = dq + consumer * Shape::kDqPieceFloats;
        const int bytes = Shape::dq_floats(queries - (Shape::kDqByRows ? consumer * 64 : 0), Shape::dq_columns(consumer)) * 4;
        if (bytes > 0) {
          if (first)
            bulk_store(piece, buffer, bytes);
          else
            bulk_reduce_add(piece, buffer, bytes);
        }
        bulk_commit();
        // Not before, as who takes a turn early has others wait.
        if (consumer == 0 && watched && !params.deterministic) mbarrier_arrive(shared.turn_empty());
      }
    }
    ++step;
  };
  wait_for_kernel_before();  // it clears the semaphores, or the accumulator
  let_next_kernel_begin();   // which may read them at once
  if (elected) bulk_global_fence();
  for_each_task(arguments, shared, [&](const BackwardTask& task) {
    const int lone_end = task.template lone_end<Shape>();
    task.for_each_step([&](uint32_t, int, int query_block, int tile) {
      add(tile, Shape::kStoresLone && query_block < lone_end ? 0 : task.q.length - query_block * Shape::kBlockM);
    });
    if (elected) {
      pass_turn();
      if (task.q.length > 0) {
        bulk_wait_all();
        bulk_global_fence();
        semaphore_pass(workspace.semaphore(task.first_tile, kAdded));
        if (Shape::kRounds && arguments.tells_stored && task.has_steps()) {
          if (stored != nullptr) semaphore_pass(stored);
          stored = workspace.semaphore(task.first_tile, kStored);
        }
      }
    }
    written = nullptr;
  });
  if (elected) bulk_wait_all();
}

template <typename Shape, typename T>
__device__ __forceinline__ uint32_t compute_gradients(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                                      const BackwardTask& task, uint32_t first_step, uint32_t keys_parity) {
  constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kStages = Shape::kStages;
  const HfFlash2BackwardParams& params = arguments.params;
  const int consumer = warpgroup_index(), thread = threadIdx.x % 128;
  const uint32_t keys = shared.k() + consumer * (64 * 128), values = shared.v() + consumer * (64 * 128);  // this consumer's rows of a panel
  const ScoreLane lane(task.mask, task.key_block * Shape::kBlockN + consumer * 64);
  const float scale_log2 = Shape::kCapped ? arguments.cap.log2 : params.forward.softmax_scale * kLog2e;
  const Dropout<Shape::kDropout, true> dropout(params.forward.rng_state);

  float dk[kHeadDim / 8][4], dv[kHeadDim / 8][4];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] = (&dv[0][0])[i] = 0.f;

  const auto issue_dq = [&](float (&dq)[8][4], uint32_t step) {
    const uint32_t stage = step % kStages;
    named_barrier_sync(ds_here(consumer), 128);
    named_barrier_sync(ds_full(1 - consumer, stage), Shape::kConsumerThreads);
    issue_query_gradient<Shape, T, 64>(&dq[0][0], ds_buffer(shared, stage) + (Shape::kDqByRows ? consumer * Shape::kScorePanelBytes : 0),
                                       shared.k() + (Shape::kDqByRows ? 0 : consumer * Shape::kKeyPanelBytes));
  };
  // PERF: in a register; found in every step anew, from threadIdx, d 64 is 1 to 4 % slower, d 128 1. TUNING.md, "Who adds to dQ".
  const uint32_t dq_place = hidden(Shape::dq_place(0, thread, Shape::dq_columns(consumer)) * 4);
  const int lone_end = task.template lone_end<Shape>();
  // dQ of a lone query block, to its rows.
  const auto store_lone = [&](float (&dq)[8][4], const BackwardTask::Step& at) {
    const int row = at.query_block * kBlockM + (Shape::kDqByRows ? consumer * 64 : 0) + thread / 32 * 16 + thread % 32 / 4;
    const int column = Shape::kDqByRows ? 0 : consumer * 64;
    T* rows = token_pointer<T>(params.dq, task.batch, task.first_head + at.head, task.q.start + row) + column;
#pragma unroll
    for (int i = 0; i < 32; ++i) (&dq[0][0])[i] *= params.forward.softmax_scale;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      store_row(dq, half, rows + half * 8 * params.dq.token_stride, row + half * 8 < task.q.length, params.forward.head_dim - column);
  };
  // at: `back` steps behind this one.
  const auto store_dq = [&](float (&dq)[8][4], uint32_t step, BackwardTask::Step at, int back) {
    const uint32_t stage = dq_stage<Shape>(arguments, step);
    wgmma_use<32>(&dq[0][0]);
    if constexpr (Shape::kDqStages > 1)
      mbarrier_wait(shared.dq_empty(consumer, stage), (step >> (arguments.dq_stages - 1) & 1) ^ 1);
    else
      named_barrier_sync(dq_empty(consumer), kDqThreads);
    bool lone = false;
    if (Shape::kStoresLone && lone_end > 0) {
      for (int i = 0; i < back; ++i) task.retreat(at);
      lone = at.query_block < lone_end;
    }
    if (lone) {
      store_lone(dq, at);
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (n * 8 < Shape::dq_columns(consumer))
          store_shared(dq_buffer(shared, consumer, stage) + dq_place + Shape::dq_place(n, 0) * 4, dq[n]);
      }
    }
    async_proxy_fence();
    named_barrier_arrive(dq_full(consumer, stage), kDqThreads);
  };
  const auto pass_turn = [&] { named_barrier_arrive(consumer_turn(1 - consumer), Shape::kConsumerThreads); };

  using Scores = float[kBlockM / 8][4];
  uint32_t ds_rounded[kBlockM / 4];  // dS^T of the step that `advance` starts from, as A operand
  const auto issue_s = [&](Scores& p, uint32_t step) {
    mbarrier_wait(shared.q_full(step % kStages), step / kStages & 1);
    issue_scores<Shape, T>(&p[0][0], hidden(keys), shared.q(step % kStages));
  };
  const auto issue_dk = [&](uint32_t step) { issue_key_gradient<Shape, T>(&dk[0][0], ds_rounded, shared.q(step % kStages)); };
  // Two buffers of dS: the other has said that its dS of the step before is there, and before that it had multiplied with this buffer.
  const auto store_ds = [&](uint32_t step) {
    const uint32_t stage = step % kStages;
    store_panels<Shape::kScorePanelBytes, kBlockM / 8>(ds_buffer(shared, stage) + consumer * (64 * 128), ds_rounded);
    named_barrier_arrive(ds_full(consumer, stage), Shape::kConsumerThreads);
  };
  // From S, in p and under way, to dS, in ds_rounded; dV on the way. lse_log2: of the first 64 queries.
  const auto differentiate_scores = [&](Scores& p, RowValues<8> lse_log2, uint32_t step, const BackwardTask::Step& at) {
    const uint32_t stage = step % kStages;
    Scores ds;  // dP and then dS
    uint32_t p_rounded[kBlockM / 4];
    const auto draw = [&] { return draw_bits<Shape>(dropout, arguments, task, at, lane.key); };
    decltype(draw()) bits;
    if constexpr (Shape::kDrawsEarly) bits = draw();
    wgmma_wait<0>();
    wgmma_use<kBlockM / 2>(&p[0][0]);
    mbarrier_wait(shared.dout_full(stage), step / kStages & 1);
    issue_scores<Shape, T>(&ds[0][0], hidden(values), shared.dout(stage));
    if constexpr (Shape::kCapped) {
      cap_scores(p, arguments.cap.scale);
      lse_log2 = RowValues<8>(shared.lse_log2(stage));  // not before: registers
    }
    if (task.mask_needed(at.query_block)) lane.apply_mask(p, task.mask, at.query_block * kBlockM);
#pragma unroll
    for (int part = 0; part < kBlockM / 64; ++part) {
      const RowValues<8> lse_part = lse_log2;
      if (part + 1 < kBlockM / 64) lse_log2 = RowValues<8>(shared.lse_log2(stage) + (part + 1) * (64 * 4));
      exponentiate<8>(p + part * 8, lse_part, scale_log2);
    }
    if constexpr (!Shape::kDrawsEarly) bits = draw();
    if constexpr (Shape::kDropout) mark_dropped(p, bits, arguments.dropout);
    // 64 queries at a time, and not before the last are multiplied: P in fp32 beside what dV reads would leave too few registers, and ptxas
    // would serialise (C7512).
#pragma unroll
    for (int part = 0; part < kBlockM / 64; ++part) {
      const uint32_t delta_rows = shared.delta(stage) + part * (64 * 4);
      if (part > 0) wgmma_wait<0>();
      round_tiles<T, 8, Shape::kDropout>(p_rounded + part * 16, p + part * 8);
      const RowValues<4> delta(delta_rows);
      issue_key_gradient<Shape, T, 64>(&dv[0][0], p_rounded + part * 16, shared.dout(stage) + part * (64 * 128));
      if (part == 0) {
        wgmma_wait<1>();
        wgmma_use<kBlockM / 2>(&ds[0][0]);
      }
      const RowValues<4> delta_rest(delta_rows + 32 * 4);
      if constexpr (Shape::kCapped) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
          multiply_by_slope(p + part * 8 + n, RowValues<1>(shared.lse_log2(stage) + (part * 8 + n) * 32), arguments.cap);
      }
      differentiate<Shape::kDropout>(ds + part * 8, p + part * 8, delta);
      differentiate<Shape::kDropout>(ds + part * 8 + 4, p + part * 8 + 4, delta_rest);
      round_tiles<T, 8>(ds_rounded + part * 16, ds + part * 8);
    }
    wgmma_wait<0>();
  };
  // From dS of a step to that of the next, at `at`; with dQ of the step before, but not in the first.
  const auto advance = [&](uint32_t step, const BackwardTask::Step& at, auto is_first) {  // is_first: an integral_constant<bool>
    // S beside dQ and dK takes 208 registers at d 128, too many for ptxas (C7512): there it follows when dQ is stored.
    constexpr bool kFirst = decltype(is_first)::value, kScoresEarly = kHeadDim < 128;
    Scores p;
    float dq[8][4];
    named_barrier_sync(consumer_turn(consumer), Shape::kConsumerThreads);
    if constexpr (!kFirst) {
      // PERF: a moment for S of the other, which has just been issued: without it, groups are 1 to 2 % slower, with twice as much all 1 %.
      if constexpr (!kScoresEarly) named_barrier_sync(ds_here(consumer), 128);
      issue_dq(dq, step - 1);
    }
    issue_dk(step);
    if constexpr (kScoresEarly) issue_s(p, step + 1);
    if constexpr (!kFirst) {
      wgmma_wait<kScoresEarly ? 2 : 1>();
      store_dq(dq, step - 1, at, 2);
    }
    if constexpr (!kScoresEarly) {
      issue_s(p, step + 1);
      pass_turn();  // PERF: here at d 128 1 % faster from 4k on, at d 64 1 to 3 % slower
    }
    wgmma_wait<1>();
    mbarrier_arrive(shared.empty(step % kStages));
    store_ds(step);
    const RowValues<8> lse_log2(shared.lse_log2((step + 1) % kStages));
    if constexpr (kScoresEarly) pass_turn();
    differentiate_scores(p, lse_log2, step + 1, at);
  };

  uint32_t step = first_step;
  if (task.has_steps()) {
    mbarrier_wait(shared.keys_full(), keys_parity);
    BackwardTask::Step at = task.first();
    // On a diagonal, no query of the first block may see the second consumer's keys: the tensor cores are left to the other.
    // PERF: d 128 causal 0 to 1 %; with the condition written for both consumers, full 1 to 2 % slower. TUNING.md, "The loop".
    const bool unseen = consumer == 1 && kBlockM < Shape::kBlockN &&
                        at.query_block < task.mask.query_block_begin(task.key_block * Shape::kBlockN + 64, kBlockM);
    if (unseen) {
      mbarrier_wait(shared.q_full(step % kStages), step / kStages & 1);
#pragma unroll
      for (int i = 0; i < kBlockM / 4; ++i) ds_rounded[i] = 0;
    } else {
      Scores p;
      issue_s(p, step);
      differentiate_scores(p, RowValues<8>(shared.lse_log2(step % kStages)), step, at);
    }
    float dq[8][4];
    if (task.advance(at)) {
      advance(step++, at, std::true_type{});
      while (task.advance(at)) advance(step++, at, std::false_type{});
      issue_dq(dq, step - 1);
      issue_dk(step);
      wgmma_wait<1>();
      store_dq(dq, step - 1, at, 2);
    } else {
      issue_dk(step);
    }
    store_ds(step);
    issue_dq(dq, step);
    wgmma_wait<0>();
    mbarrier_arrive(shared.keys_empty());
    mbarrier_arrive(shared.empty(step % kStages));
    store_dq(dq, step++, at, 1);
    wgmma_use<kHeadDim / 2>(&dk[0][0]);
    wgmma_use<kHeadDim / 2>(&dv[0][0]);
  }
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] *= params.forward.softmax_scale;
  const int share_dk = consumer * (64 * kHeadDim), share_dv = share_dk + Shape::kBlockN * kHeadDim;
  store_key_gradient<Shape, T>(arguments, params.dk, share_dk, dk, task, lane.key, params.forward.head_dim);
  store_key_gradient<Shape, T>(arguments, params.dv, share_dv, dv, task, lane.key, params.forward.head_dim_v);
  return step;
}

template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads, 1) backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  const BackwardShared<Shape> shared{shared_address(memory)};
  if constexpr (Shape::kRounds) {
    if (blockIdx.x >= arguments.task_blocks) return round_beside_tasks<Shape, T>(arguments, shared.base);
  }
  shared.make_barriers(has_watcher(arguments) ? 2 : 1);
  if (threadIdx.x < Shape::kConsumerThreads) {  // the loader stands last in the source, first in the code: see forward.cuh
    take_registers<Shape::kConsumerRegisters>();
    uint32_t step = 0, key_blocks = 0;
    if (warpgroup_index() == 1) named_barrier_arrive(consumer_turn(0), Shape::kConsumerThreads);  // the first turn
    for_each_task(arguments, shared, [&](const BackwardTask& task) {
      step = compute_gradients<Shape, T>(arguments, shared, task, step, key_blocks & 1);
      key_blocks += task.has_steps();
    });
    if (warpgroup_index() == 0) named_barrier_sync(consumer_turn(0), Shape::kConsumerThreads);  // takes the turn nobody is left to take
  } else {
    give_registers<Shape::kLoaderRegisters>();
    const int warp = warp_index() - Shape::kConsumerThreads / 32;
    if (warp == 3) {
      clear_gradient_gaps(arguments, shared);
    } else if (warp == 2) {
      if (has_watcher(arguments)) watch_turns<Shape>(arguments, shared);
    } else if (warp == 1) {
      add_query_gradients<Shape>(arguments, shared);
    } else if constexpr (Shape::kStoresLone) {
      CountedSequence first{};
      if (arguments.counts_units())
        first =
            count_to(static_cast<int>(blockIdx.x) / arguments.parts(),
                     count_sequences(arguments.params.forward.batch, 0, [&](int batch) { return arguments.key_blocks_of<Shape>(batch); }));
      if (elect_one()) load_tasks<Shape>(arguments, shared, first);
    } else if (elect_one()) {
      load_tasks<Shape>(arguments, shared);
    }
  }
}

}  // namespace hf_flash2::sm90
