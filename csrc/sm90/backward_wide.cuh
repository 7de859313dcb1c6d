// FlashAttention-2 backward for Hopper, head dims above 128. Dao, arXiv 2307.08691, algorithm 2. Launched by backward_launch.cuh like
// backward.cuh, and laid out like it, but for what the registers of a warpgroup can hold: dK or dV of 64 keys, not both.
//
// A task is 128 keys, for a cluster of two thread blocks with 64 each. Of a block, the first warpgroup computes S and P and keeps dV, the second
// computes dP and dS and keeps dK. P goes to the second through shared memory, thread by thread: both hold the same elements. dS goes through
// shared memory, and to the peer, for dQ = dS K: each block computes half its columns, for the keys of both, each warpgroup some of them, a
// step later, and adds them to global memory from its registers. So the first is a step ahead of the second, and waits for it only where it
// would be two. PERF: d 256 at 4k 19 % full, 10 % causal, against both meeting in every step for dS. TUNING.md, "Clusters".
// PERF: what blocks add to dQ, in fp32, is what limits them: without these additions, d 256 full at 4k ran at 618 TFLOP/s in place of 418. A block
// of its own, with 64 keys, adds D columns a step, in a cluster half of that: 503.
// Above head dim 256 both blocks of a cluster have the same 64 keys, and half the columns of all there is each: what one makes of its columns is a
// part of S, or of dP, and both send theirs to the other, thread to thread, and add. From there on each has P and dS for its columns of dV, dK and
// dQ, as at d 256: five products, where blocks with other columns of dK and dV, but S and dP over all, would compute seven.
// Most of dQ is the second warpgroup's there, as the first is what the other waits for: 5 %. TUNING.md, "Head dim 512".
#pragma once
#include "sm90/backward_wide_parts.cuh"

namespace hf_flash2::sm90 {

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
    if constexpr (Shape::kColumnParts > 1) shared.part_of_peer(0).exchange(p, step);
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
  store_key_gradient<Shape, T>(arguments, params.dv, Shape::kBlockN * Shape::kTaskHeadDim, dv, task, lane.key, params.forward.head_dim_v);
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
    if constexpr (Shape::kColumnParts > 1) {
      wgmma_wait<0>();
      wgmma_use<kBlockM / 2>(&ds[0][0]);
      shared.part_of_peer(1).exchange(ds, step);
      named_barrier_sync(kPFull, Shape::kConsumerThreads);
    } else {
      named_barrier_sync(kPFull, Shape::kConsumerThreads);
      wgmma_wait<0>();
      wgmma_use<kBlockM / 2>(&ds[0][0]);
    }
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
      if constexpr (Shape::kTaskBlocks > 1) {
        mbarrier_arrive_expect(shared.ds_full(stage), Shape::kScoreBytes);
        bulk_copy_to_peer(peer_address(wide_ds_buffer(shared, stage, 1)), ds_buffer, Shape::kScoreBytes,
                          peer_address(shared.ds_full(stage)));
      } else {
        mbarrier_arrive(shared.ds_full(stage));
      }
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
