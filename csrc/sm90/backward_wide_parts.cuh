// What both consumers of backward_wide.cuh do: P and dS from one to the other, parts of S and dP from block to block, and dQ to global memory.
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
  static constexpr int kPartBytes = Sizes::kColumnParts > 1 ? PartOfPeer<Sizes::kBlockM / 8>::kBytes : 0;
  // dS, of both blocks where each has its keys, then P, then the peer's parts of S and dP.
  static constexpr int kPartsAt = Sizes::kTaskBlocks * Sizes::kStages * Sizes::kScoreBytes + kPBytes;
  static constexpr int kWorkBytes = kPartsAt + 2 * kPartBytes, kOwnBarriers = 8 + (Sizes::kColumnParts - 1) * 6;
  static constexpr int kDqStages = 1, kDqStageBytes = 0;  // dQ leaves from registers
  static constexpr bool kDeterministic = false;
  static constexpr int kApart = kHeadDim == 256 ? 6 : kHeadDimV == 128 ? 4 : 2;  // products between two additions: add_dq()
  // Columns of dQ that a consumer computes at a time, and how often.
  static constexpr int kColumns[2] = {64, Sizes::kColumnParts > 1 ? 64 : Sizes::kDqColumns / 2 - 64};
  static constexpr int kRounds[2] = {1, Sizes::kColumnParts > 1 ? 3 : 1};
};

// Deterministic mode, a kernel of its own: the key blocks add to a tile of dQ one after the other, each consumer on its own. Above head dim 256,
// with half of the columns each, as the longest turn decides.
template <typename Shape>
struct InOrder : Shape {
  static constexpr bool kDeterministic = true;
  static constexpr int kRounds[2] = {Shape::kColumnParts > 1 ? 2 : 1, Shape::kColumnParts > 1 ? 2 : 1};
};

// The first column of dQ that a consumer computes.
template <typename Shape, int kConsumer>
__device__ __forceinline__ int first_dq_column(int rank) {
  if constexpr (Shape::kColumnParts > 1) return rank * 256 + kConsumer * Shape::kRounds[0] * 64;
  return kConsumer == 0 ? rank * 128 : 64 + rank * (Shape::kDqColumns == 256 ? 128 : 32);
}

// dS, of the keys of this block or, with `peers`, of its peer's.
template <typename Shape>
__device__ __forceinline__ uint32_t wide_ds_buffer(const BackwardShared<Shape>& shared, int stage, int peers = 0) {
  return shared.work() + (stage * Shape::kTaskBlocks + peers) * Shape::kScoreBytes;
}
// P goes to the second consumer in fp16, times 2^12: to 2^-26 it has 11 bits, and 16 is the largest there is. dV is of the same multiple.
// PERF: 1 to 8 % against fp32. In fp16 the errors of dQ and dK are 1.2 times as large, in bf16 as before. TUNING.md, "Clusters".
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
// PERF: the consumers wait for no fence, and a turn is passed on at once: d 256 86 to 94 % of the default's speed, where one warp that watched for
// both left 77 to 82. TUNING.md, "Deterministic mode above head dim 128".
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
__device__ __forceinline__ void issue_dq(float (&dq)[Shape::kColumns[kConsumer] / 8][4], const BackwardShared<Shape>& shared, uint32_t step,
                                         int round = 0) {
  constexpr int kColumns = Shape::kColumns[kConsumer];
  const int stage = step % Shape::kStages, rank = cluster_rank(), column = first_dq_column<Shape, kConsumer>(rank);
  const int panel = Shape::kColumnParts > 1 ? kConsumer * Shape::kRounds[0] + round : column / 64;  // of the K that this block has
  const uint32_t of_panel = column % 64 * 2;
  mbarrier_wait(shared.ds_full(stage), step / Shape::kStages & 1);
  issue_query_gradient<Shape, T, kColumns>(&dq[0][0], wide_ds_buffer(shared, stage),
                                           hidden(shared.k()) + panel * Shape::kKeyPanelBytes + of_panel);
  if constexpr (Shape::kPeerPanels > 0) {
    issue_query_gradient<Shape, T, kColumns, true>(
        &dq[0][0], wide_ds_buffer(shared, stage, 1),
        hidden(shared.peer_k()) + (column / 64 - Shape::first_peer_panel(rank)) * Shape::kKeyPanelBytes + of_panel);
  }
}

// Where a thread adds to a tile of dQ, in bytes, its lane's four floats (reduce_add.cuh, from sm_90 on) included, and where it says that dS has
// been read: the same in every step. PERF: kept in registers; the loop over tasks else finds them in every step anew, from threadIdx and
// blockIdx.
struct DqPlace {
  uint32_t bytes, peer_ds_empty;

  template <typename Shape, int kConsumer>
  static __device__ __forceinline__ DqPlace make(const BackwardShared<Shape>& shared) {
    const uint32_t column = first_dq_column<Shape, kConsumer>(cluster_rank());
    const uint32_t place = column / 64 * Shape::kDqPieceFloats + Shape::dq_place(column % 64 / 8, threadIdx.x % 128);
    return {hidden(place * sizeof(float)), peer_address(shared.ds_empty(0))};
  }
};

// Waits for them and adds them to global memory.
// PERF: additions that follow each other at once keep the other consumer from shared memory: all of them go through one queue. So the
// address of each depends on kApart products behind those of the one before, of some five cycles each: 2 to 8 % at d 256. TUNING.md, "Clusters".
template <typename Shape, int kConsumer>
__device__ __forceinline__ void add_dq(const HfFlash2BackwardParams& params, const BackwardShared<Shape>& shared, const DqPlace& place,
                                       float (&dq)[Shape::kColumns[kConsumer] / 8][4], uint32_t step, int tile, bool first, int round) {
  constexpr int kTiles = Shape::kColumns[kConsumer] / 8, kRounds = Shape::kRounds[kConsumer];
  const bool is_first = round == 0, is_last = round == kRounds - 1;
  wgmma_wait<0>();
  wgmma_use<kTiles * 4>(&dq[0][0]);
  if (is_last && threadIdx.x % 32 == 0) {
    if constexpr (Shape::kTaskBlocks > 1)
      peer_mbarrier_arrive(place.peer_ds_empty + step % Shape::kStages * 8);
    else
      mbarrier_arrive(shared.ds_empty(step % Shape::kStages));
  }
  if (Shape::kDeterministic && is_first) named_barrier_sync(turn_has_come(kConsumer), kTurnThreads);
  const Workspace workspace(params, Shape::kBlockM, Shape::kDqColumns);
  char* const columns =
      reinterpret_cast<char*>(workspace.dq + static_cast<int64_t>(tile) * (Shape::kBlockM * Shape::kDqColumns)) + place.bytes;
  uint32_t zero = __float_as_uint(dq[kTiles - 1][3]) & params.forward.head_dim >> 31;  // which the compiler does not know
  // From the first of this consumer's tiles, which begin with a piece or are of one alone.
  const auto apart = [](int tile) { return tile / 8 * Shape::kDqPieceFloats + Shape::dq_place(tile % 8, 0); };
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    float* const four = reinterpret_cast<float*>(columns + zero + apart(round * kTiles + n) * sizeof(float));
    if (Shape::kDeterministic && first)
      store_reduced(four, 0, dq[n]);
    else
      reduce_add(four, 0, dq[n]);
    for (int i = 0; i < Shape::kApart; ++i) zero = zero * zero + zero;
  }
  if (Shape::kDeterministic && is_last) named_barrier_arrive(has_added(kConsumer), kTurnThreads);
}

// dQ of a step, of which the first columns are under way, to global memory. read(): behind the last product.
template <typename Shape, typename T, int kConsumer, typename F>
__device__ __forceinline__ void finish_dq(const HfFlash2BackwardParams& params, const BackwardShared<Shape>& shared, const DqPlace& place,
                                          float (&dq)[Shape::kColumns[kConsumer] / 8][4], uint32_t step, int tile, bool first,
                                          const F& read) {
  constexpr int kRounds = Shape::kRounds[kConsumer];
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    if (round > 0) issue_dq<Shape, T, kConsumer>(dq, shared, step, round);
    if (round == kRounds - 1) read();
    add_dq<Shape, kConsumer>(params, shared, place, dq, step, tile, first, round);
  }
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
    wgmma_wait<Shape::kTaskBlocks>();
    mbarrier_arrive(done);
    finish_dq<Shape, T, kConsumer>(params, shared, place, dq, step - 1, last_tile, first, [] {});
  }
}

// Calls f(step, at), which ends with a product of its own under way, for every step of a task, and finishes each. Steps are counted on
// from `step`.
template <typename Shape, typename T, int kConsumer, typename F>
__device__ __forceinline__ void for_each_wide_step(const HfFlash2BackwardParams& params, const BackwardShared<Shape>& shared,
                                                   const BackwardTask& task, uint32_t& step, uint32_t keys_parity, const F& f) {
  if (!task.has_steps()) return;
  mbarrier_wait(shared.keys_full(), keys_parity);
  const DqPlace place = DqPlace::make<Shape, kConsumer>(shared);
  BackwardTask::Step at = task.first();
  int last_tile = 0;
  bool first = false;  // deterministic mode: it was the first key block there
  const auto advance = [&](auto is_first) {
    const int tile = task.first_tile + at.head * task.head_tiles + at.query_block;
    f(step, at);
    finish_step<Shape, T, kConsumer, decltype(is_first)::value>(params, shared, place, step++, last_tile, first);
    last_tile = tile;
    if constexpr (Shape::kDeterministic) first = task.template turn<Shape>(params.forward, at.query_block) == 0;
  };
  advance(std::true_type{});
  while (task.advance(at)) advance(std::false_type{});
  float dq[Shape::kColumns[kConsumer] / 8][4];
  issue_dq<Shape, T, kConsumer>(dq, shared, step - 1);
  finish_dq<Shape, T, kConsumer>(params, shared, place, dq, step - 1, last_tile, first, [&] {
    wgmma_wait<0>();
    mbarrier_arrive(shared.keys_empty());
  });
}
}  // namespace hf_flash2::sm90
