// FlashAttention-2 backward for Hopper, head dims above 128. Dao, arXiv 2307.08691, algorithm 2. Launched by backward_launch.cuh like
// backward.cuh, and laid out like it, but for what the registers of a warpgroup can hold: dK or dV of 64 keys, not both.
//
// A task is 128 keys, for a cluster of two thread blocks with 64 each. Of a block, the first warpgroup computes S and P and keeps dV, the second
// computes dP and dS and keeps dK. P goes to the second through shared memory, thread by thread: both hold the same elements. dS goes through
// shared memory, and to the peer, for dQ = dS K: each block computes half its columns, for the keys of both, each warpgroup some of them, a
// step later, and adds them to global memory from its registers. So the first is a step ahead of the second, and waits for it only where it
// would be two. PERF: one H200, full and causal at 4k: d 256 388 386 -> 460 423 TFLOP/s, d 192/128 413 392 -> 477 442, where both had met in
// every step for dS.
// PERF: what blocks add to dQ, in fp32, is what limits them: without these additions, d 256 full at 4k ran at 618 in place of 418. A block of
// its own, with 64 keys, adds D columns a step, in a cluster half of that. One H100, 512, 1k, 4k, 16k, TFLOP/s: d 256 full 252 337 418 445 ->
// 280 391 503 535, causal 157 244 391 445 -> 165 276 454 530; d 192 full 257 339 415 446 -> 273 381 471 500, causal 160 249 391 440 -> 160 267
// 425 496; 192/128 at 4k, 16k full 384 410 -> 464 490, causal 355 401 -> 406 467. Of that, P in fp16 is 1 to 8 %.
// Tried and left: Q and dO by multicast, half the rows loaded by each block for both: d 256 1 to 2 % faster from 4k on, 1 % slower before, d 192
// 0 to 1 % slower. At d 256, dK and dV sent by TMA through the last stage of Q and dO: one H100, 1 % faster at 512 and 1k, level from 2k on.
#pragma once
#include "device/reduce_add.cuh"
#include "device/semaphore.cuh"
#include "sm90/backward_parts.cuh"

namespace hf_flash2::sm90 {

template <int kHeadDim, int kHeadDimV = kHeadDim>
struct BackwardWideShape : BackwardSizes<kHeadDim, kHeadDimV> {
  using Sizes = BackwardSizes<kHeadDim, kHeadDimV>;
  static_assert(Sizes::kBlockN == 64 && Sizes::kBlockM == 64, "the consumers share one block of scores");
  static constexpr int kPBytes = Sizes::kBlockN * Sizes::kBlockM * 2;
  static constexpr int kWorkBytes = 2 * Sizes::kStages * Sizes::kScoreBytes + kPBytes;  // dS of both blocks, then P
  static constexpr bool kDeterministic = false;
  static constexpr int kApart = kHeadDim == 256 ? 6 : kHeadDimV == 128 ? 4 : 2;  // products between two additions: add_dq()
  // Columns of dQ that a consumer computes, and the first of them.
  static constexpr int kColumns[2] = {64, Sizes::kDqColumns / 2 - 64};
  template <int kConsumer>
  static __device__ __forceinline__ int first_column(int rank) {
    return kConsumer == 0 ? rank * 128 : 64 + rank * (Sizes::kDqColumns == 256 ? 128 : 32);
  }
};

// Deterministic mode, a kernel of its own: the key blocks add to a tile of dQ one after the other, each consumer on its own.
template <typename Shape>
struct InOrder : Shape {
  static constexpr bool kDeterministic = true;
};

// dS, of the keys of this block or, with `peers`, of its peer's.
template <typename Shape>
__device__ __forceinline__ uint32_t wide_ds_buffer(const BackwardShared<Shape>& shared, int stage, int peers = 0) {
  return shared.work() + (stage * 2 + peers) * Shape::kScoreBytes;
}
// P goes to the second consumer in fp16, times 2^12: to 2^-26 it has 11 bits, and 16 is the largest there is. dV is of the same multiple.
// PERF: against fp32, one H100, at 1k, 4k, 16k, TFLOP/s: d 256 full 381 472 495 -> 391 503 535, causal 273 430 491 -> 276 454 530, d 192/128
// full at 4k, 16k 449 464 -> 464 490, causal 393 450 -> 406 467. In fp16 the errors of dQ and dK are 1.2 times as large, in bf16 as before.
constexpr int kPExponent = 12;
constexpr float kOneOfP = 1.f / (1 << kPExponent);
template <int kTiles, bool kPositive = false>
__device__ __forceinline__ void round_tiles_to_half(uint32_t* rounded, const float (*x)[4]) {
#pragma unroll
  for (int i = 0; i < kTiles * 2; ++i) rounded[i] = pack_half_finite<kPositive>(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
}
// Elements of this thread in tiles 2n and 2n + 1 of P.
template <typename Shape>
__device__ __forceinline__ uint32_t wide_p_buffer(const BackwardShared<Shape>& shared, int n) {
  return wide_ds_buffer(shared, Shape::kStages) + (n * 128 + threadIdx.x % 128) * 16;
}

// Named barriers: the first consumer has written P; the second has written dS to a buffer, and all of it is there for itself; a consumer's
// turn has come, and it has added. That P has been read is said by an mbarrier: compute-sanitizer cannot follow a named one that readers
// arrive at, not even in the example of the PTX ISA ("bar"), and it is not faster.
constexpr int kPFull = 2, kDsHere = 3;
__device__ __forceinline__ int turn_has_come(int consumer) { return 6 + consumer; }
__device__ __forceinline__ int has_added(int consumer) { return 8 + consumer; }
constexpr int kTurnThreads = 128 + 32;  // a consumer and the warp that keeps its order

// Deterministic mode: watches the turns of a consumer and passes them on, by a warp of its own. It waits for tasks that were taken
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
  const auto semaphore = [&] {
    return workspace.semaphore(task.first_tile + at.head * task.head_tiles + at.query_block, cluster_rank() * 2 + consumer);
  };
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
  constexpr int kColumns = Shape::kColumns[kConsumer];
  const int stage = step % Shape::kStages, rank = cluster_rank(), column = Shape::template first_column<kConsumer>(rank);
  const uint32_t of_panel = column % 64 * 2;
  mbarrier_wait(shared.ds_full(stage), step / Shape::kStages & 1);
  issue_query_gradient<Shape, T, kColumns>(&dq[0][0], wide_ds_buffer(shared, stage),
                                           hidden(shared.k()) + column / 64 * Shape::kKeyPanelBytes + of_panel);
  issue_query_gradient<Shape, T, kColumns, true>(
      &dq[0][0], wide_ds_buffer(shared, stage, 1),
      hidden(shared.peer_k()) + (column / 64 - Shape::first_peer_panel(rank)) * Shape::kKeyPanelBytes + of_panel);
}

// Where a thread adds to a tile of dQ, in bytes, its lane's four floats (reduce_add.cuh, from sm_90 on) included, and where it says that dS has
// been read: the same in every step. PERF: kept in registers; the loop over tasks else finds them in every step anew, from threadIdx and
// blockIdx.
struct DqPlace {
  uint32_t bytes, peer_ds_empty;

  template <typename Shape, int kConsumer>
  static __device__ __forceinline__ DqPlace make(const BackwardShared<Shape>& shared) {
    const uint32_t column = Shape::template first_column<kConsumer>(cluster_rank());
    return {hidden((column * 64 + threadIdx.x % 128 * 4) * sizeof(float)), peer_address(shared.ds_empty(0))};
  }
};

// Waits for them and adds them to global memory.
// PERF: additions that follow each other at once keep the other consumer from shared memory: all of them go through one queue. So the
// address of each depends on kApart products behind those of the one before, of some five cycles each. One H200, before clusters, d 256 full at
// 1k, 4k, 16k, TFLOP/s: 357 439 442 -> 369 476 451; nanosleep in place of the products 460 (where 486). One H100, 1, 2, 3, 4, 6, 8, 14 of them,
// full at 4k, in % of what had no loop over tasks: d 192 100 103 100 95 94 93 90, 192/128 106 105 107 108 108 106 104, d 256 102 100 98 100 102
// 100 98; causal alike.
template <typename Shape, int kConsumer>
__device__ __forceinline__ void add_dq(const HfFlash2BackwardParams& params, const DqPlace& place,
                                       float (&dq)[Shape::kColumns[kConsumer] / 8][4], uint32_t step, int tile, bool first) {
  constexpr int kTiles = Shape::kColumns[kConsumer] / 8;
  wgmma_wait<0>();
  wgmma_use<kTiles * 4>(&dq[0][0]);
  if (threadIdx.x % 32 == 0) peer_mbarrier_arrive(place.peer_ds_empty + step % Shape::kStages * 8);
  if constexpr (Shape::kDeterministic) named_barrier_sync(turn_has_come(kConsumer), kTurnThreads);
  const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
  char* const columns =
      reinterpret_cast<char*>(workspace.dq + static_cast<int64_t>(tile) * (Shape::kBlockM * Shape::kDqColumns)) + place.bytes;
  uint32_t zero = __float_as_uint(dq[kTiles - 1][3]) & params.forward.head_dim >> 31;  // which the compiler does not know
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float* const four = reinterpret_cast<float*>(columns + zero + n * (128 * 4 * sizeof(float)));
    if (Shape::kDeterministic && first)
      store_reduced(four, 0, dq[n]);
    else
      reduce_add(four, 0, dq[n]);
    for (int i = 0; i < Shape::kApart; ++i) zero = zero * zero + zero;
  }
  if constexpr (Shape::kDeterministic) named_barrier_arrive(has_added(kConsumer), kTurnThreads);
}

// The end of a step, when its last product has been issued: Q and dO are done with, and under that product comes dQ of the step before, of
// `last_tile`.
template <typename Shape, typename T, int kConsumer, bool kFirst>
__device__ __forceinline__ void finish_step(const HfFlash2BackwardParams& params, const BackwardShared<Shape>& shared, const DqPlace& place,
                                            uint32_t step, int last_tile, bool first) {
  // Where Q and dO have stages of their own, who is done with one of them has said so.
  const uint32_t done = Shape::kDoutStages == Shape::kStages || kConsumer == 1 ? shared.empty(step % Shape::kStages) : shared.dout_empty();
  if constexpr (kFirst) {
    wgmma_wait<0>();
    mbarrier_arrive(done);
  } else {
    float dq[Shape::kColumns[kConsumer] / 8][4];
    issue_dq<Shape, T, kConsumer>(dq, shared, step - 1);
    wgmma_wait<2>();
    mbarrier_arrive(done);
    add_dq<Shape, kConsumer>(params, place, dq, step - 1, last_tile, first);
  }
}

// Calls f(step, at), which ends with a product of its own under way, for every step of a task, and finishes each. Steps are counted on
// from `step`.
template <typename Shape, typename T, int kConsumer, typename F>
__device__ __forceinline__ void for_each_wide_step(const HfFlash2BackwardParams& params, const BackwardShared<Shape>& shared,
                                                   const BackwardTask& task, uint32_t& step, uint32_t keys_parity, const F& f) {
  if (!task.has_steps()) return;
  wait_for_keys(shared, task, keys_parity);
  const DqPlace place = DqPlace::make<Shape, kConsumer>(shared);
  BackwardTask::Step at = task.first();
  int last_tile = 0;
  bool first = false;  // deterministic mode: it was the first key block there
  const auto advance = [&](auto is_first) {
    const int tile = task.first_tile + at.head * task.head_tiles + at.query_block;
    clear_queries(shared, task, step, at.query_block);
    f(step, at);
    finish_step<Shape, T, kConsumer, decltype(is_first)::value>(params, shared, place, step++, last_tile, first);
    last_tile = tile;
    if constexpr (Shape::kDeterministic) first = task.template turn<Shape>(params.forward, at.query_block) == 0;
  };
  advance(std::true_type{});
  while (task.advance(at)) advance(std::false_type{});
  float dq[Shape::kColumns[kConsumer] / 8][4];
  issue_dq<Shape, T, kConsumer>(dq, shared, step - 1);
  wgmma_wait<0>();
  mbarrier_arrive(shared.keys_empty());
  add_dq<Shape, kConsumer>(params, place, dq, step - 1, last_tile, first);
}

// The first consumer: P and dV. `steps`: of all its tasks so far.
template <typename Shape, typename T>
__device__ __forceinline__ void compute_values(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                               const BackwardTask& task, uint32_t& steps, uint32_t keys_parity) {
  constexpr int kHeadDimV = Shape::kHeadDimV, kBlockM = Shape::kBlockM, kStages = Shape::kStages;
  const HfFlash2BackwardParams& params = arguments.params;
  // What goes to the second consumer serves dV, too.
  constexpr bool kPIsHalf = std::is_same_v<T, __half> && !Shape::kCapped && !Shape::kDropout;
  const ScoreLane lane(task.mask, task.key_block * Shape::kBlockN);
  const float scale_log2 = Shape::kCapped ? arguments.cap.log2 : params.forward.softmax_scale * kLog2e;
  const Dropout<Shape::kDropout, true> dropout(params.forward.rng_state);
  float dv[kHeadDimV / 8][4];
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) (&dv[0][0])[i] = 0.f;

  for_each_wide_step<Shape, T, 0>(params, shared, task, steps, keys_parity, [&](uint32_t step, const BackwardTask::Step& at) {
    const uint32_t stage = step % kStages, dout_stage = step % Shape::kDoutStages;
    float p[kBlockM / 8][4];
    uint32_t p_half[kBlockM / 4], p_rounded[kBlockM / 4];
    mbarrier_wait(shared.q_full(stage), step / kStages & 1);
    RowValues<kBlockM / 8> lse_log2(shared.lse_log2(stage));  // PERF: before the product, which keeps shared memory busy
    issue_scores<Shape, T>(&p[0][0], hidden(shared.k()), shared.q(stage));
    const auto draw = [&] { return draw_bits<Shape>(dropout, arguments, task, at, lane.key); };
    decltype(draw()) bits;
    if constexpr (Shape::kDrawsEarly) bits = draw();
    wgmma_wait<0>();
    wgmma_use<kBlockM / 2>(&p[0][0]);
    if constexpr (Shape::kDoutStages != kStages) mbarrier_arrive(shared.empty(stage));
    if constexpr (Shape::kCapped) cap_scores(p, arguments.cap.scale);
    if (task.mask_needed(at.query_block)) lane.apply_mask(p, task.mask, at.query_block * kBlockM);
#pragma unroll
    for (float2& rows : lse_log2.rows) rows.x -= kPExponent, rows.y -= kPExponent;
    exponentiate(p, lse_log2, scale_log2);
    if constexpr (!Shape::kDrawsEarly) bits = draw();
    if constexpr (Shape::kDropout) mark_dropped(p, bits, arguments.dropout);
    const auto round = [&] {
      if constexpr (std::is_same_v<T, __half>)
        round_tiles_to_half<kBlockM / 8, Shape::kDropout>(p_rounded, p);
      else
        round_tiles<T, kBlockM / 8, Shape::kDropout>(p_rounded, p);
    };
    if constexpr (Shape::kCapped) {  // dV takes P, dS has it times the slope
      round();
      multiply_by_slope(p, lse_log2, arguments.cap);
    }
    round_tiles_to_half<kBlockM / 8>(p_half, p);
    mbarrier_wait(shared.p_empty(), (step & 1) ^ 1);
#pragma unroll
    for (int n = 0; n < kBlockM / 16; ++n)
      store_shared(wide_p_buffer(shared, n), make_uint4(p_half[n * 4], p_half[n * 4 + 1], p_half[n * 4 + 2], p_half[n * 4 + 3]));
    named_barrier_arrive(kPFull, Shape::kConsumerThreads);
    if constexpr (!kPIsHalf && !Shape::kCapped) round();
    mbarrier_wait(shared.dout_full(dout_stage), step / Shape::kDoutStages & 1);
    issue_key_gradient<Shape, T, kBlockM, kHeadDimV>(&dv[0][0], kPIsHalf ? p_half : p_rounded, shared.dout(dout_stage));
  });
  wgmma_use<kHeadDimV / 2>(&dv[0][0]);
#pragma unroll
  for (int i = 0; i < kHeadDimV / 2; ++i) (&dv[0][0])[i] *= kOneOfP;
  store_key_gradient<Shape, T>(arguments, params.dv, Shape::kBlockN * Shape::kHeadDim, dv, task, lane.key, params.forward.head_dim_v);
}

// The second consumer: dS and dK.
template <typename Shape, typename T>
__device__ __forceinline__ void compute_keys(const BackwardArguments& arguments, const BackwardShared<Shape>& shared,
                                             const BackwardTask& task, uint32_t& steps, uint32_t keys_parity) {
  constexpr int kHeadDim = Shape::kHeadDim, kBlockM = Shape::kBlockM, kStages = Shape::kStages;
  const HfFlash2BackwardParams& params = arguments.params;
  const bool sends = warp_index() % 4 == 0;
  float dk[kHeadDim / 8][4];
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] = 0.f;

  for_each_wide_step<Shape, T, 1>(params, shared, task, steps, keys_parity, [&](uint32_t step, const BackwardTask::Step&) {
    const uint32_t stage = step % kStages, parity = step / kStages & 1, dout_stage = step % Shape::kDoutStages;
    float ds[kBlockM / 8][4];
    uint32_t ds_rounded[kBlockM / 4];
    mbarrier_wait(shared.dout_full(dout_stage), step / Shape::kDoutStages & 1);
    issue_scores<Shape, T, Shape::kHeadDimV>(&ds[0][0], hidden(shared.v()), shared.dout(dout_stage));
    named_barrier_sync(kPFull, Shape::kConsumerThreads);
    wgmma_wait<0>();
    wgmma_use<kBlockM / 2>(&ds[0][0]);
#pragma unroll
    for (int n = 0; n < kBlockM / 8; n += 2) {  // P two tiles at a time: beside dK and dP all of it would spill
      const uint4 x = load_shared_uint4(wide_p_buffer(shared, n / 2));
      const uint32_t p_half[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 delta = RowValues<1>(shared.delta(dout_stage) + (n + i) * 32).rows[0];
        const float minus_delta[2] = {-kOneOfP * delta.x, -kOneOfP * delta.y};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 p = unpack<__half>(p_half[i * 2 + half]);
          float* const pair = ds[n + i] + half * 2;
          if constexpr (Shape::kDropout) {
            pair[0] = fmaf(fmaxf(p.x, 0.f) * kOneOfP, pair[0], fabsf(p.x) * minus_delta[0]);
            pair[1] = fmaf(fmaxf(p.y, 0.f) * kOneOfP, pair[1], fabsf(p.y) * minus_delta[1]);
          } else {
            pair[0] = p.x * fmaf(pair[0], kOneOfP, minus_delta[0]);
            pair[1] = p.y * fmaf(pair[1], kOneOfP, minus_delta[1]);
          }
        }
      }
    }
    mbarrier_arrive(shared.p_empty());
    if constexpr (Shape::kDoutStages != kStages) mbarrier_arrive(shared.dout_empty());
    round_tiles<T, kBlockM / 8>(ds_rounded, ds);
    // Two buffers of dS: the first had multiplied with this one before it wrote this P. The peer has now, both with its copy and with its own.
    mbarrier_wait(shared.ds_empty(stage), parity ^ 1);
    const uint32_t ds_buffer = wide_ds_buffer(shared, stage);
    store_panels<Shape::kScorePanelBytes, kBlockM / 8>(ds_buffer, ds_rounded);
    named_barrier_sync(kDsHere, 128);
    if (sends && elect_one()) {
      mbarrier_arrive_expect(shared.ds_full(stage), Shape::kScoreBytes);
      bulk_copy_to_peer(peer_address(wide_ds_buffer(shared, stage, 1)), ds_buffer, Shape::kScoreBytes, peer_address(shared.ds_full(stage)));
    }
    mbarrier_wait(shared.q_full(stage), parity);
    issue_key_gradient<Shape, T>(&dk[0][0], ds_rounded, shared.q(stage));
  });
  wgmma_use<kHeadDim / 2>(&dk[0][0]);
#pragma unroll
  for (int i = 0; i < kHeadDim / 2; ++i) (&dk[0][0])[i] *= params.forward.softmax_scale;
  const ScoreLane lane(task.mask, task.key_block * Shape::kBlockN);
  store_key_gradient<Shape, T>(arguments, params.dk, 0, dk, task, lane.key, params.forward.head_dim);
}

template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads, 1) backward_wide_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  const BackwardShared<Shape> shared{shared_address(memory)};
  const int warp = warp_index() - Shape::kConsumerThreads / 32;  // behind the consumers: the loader, then one that keeps order for each
  if constexpr (!Shape::kDeterministic) let_next_kernel_begin();
  shared.make_barriers(Shape::kDeterministic ? 2 : 0);
  if (threadIdx.x >= Shape::kConsumerThreads) {
    give_registers<Shape::kLoaderRegisters>();
    if (warp == 0) {
      if (elect_one()) load_tasks<Shape>(arguments, shared);
    } else if (Shape::kDeterministic && (warp == 1 || warp == 2)) {
      wait_for_kernel_before();  // it clears the semaphores
      let_next_kernel_begin();   // which may read them at once
      for_each_task(arguments, shared, [&](const BackwardTask& task) { keep_order<Shape>(arguments.params, task, warp - 1); });
    } else if (warp == 3) {
      clear_gradient_gaps(arguments, shared);
    }
  } else {
    take_registers<Shape::kConsumerRegisters>();
    const bool of_values = warpgroup_index() == 0;
    uint32_t step = 0, key_blocks = 0;
    for_each_task(arguments, shared, [&](const BackwardTask& task) {
      if (of_values)
        compute_values<Shape, T>(arguments, shared, task, step, key_blocks & 1);
      else
        compute_keys<Shape, T>(arguments, shared, task, step, key_blocks & 1);
      key_blocks += task.has_steps();
    });
  }
  cluster_meet();  // the peer may still say that it is done with what came from here
}

}  // namespace hf_flash2::sm90
