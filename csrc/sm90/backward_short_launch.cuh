// Launch of the Hopper backward of short sequences (backward_short.cuh): when, preprocess and kernel.
#pragma once
#include <algorithm>

#include "launch.h"
#include "sm90/backward_short.cuh"
#include "sm90/backward_short_preprocess.cuh"
#include "sm90/scheduler.h"
#include "sm90/tensor_map.h"

namespace hf_flash2::sm90 {

// What is decided from shapes alone: the Workspace, then whose the query blocks and the key blocks are.
template <int kHeadDim>
struct BackwardShortPlan {
  using Shape = BackwardShortShape<kHeadDim>;
  int query_blocks, key_blocks;  // of one head
  int64_t owners_at;             // bytes of the workspace before them
  int64_t workspace_bytes;
  int64_t thread_blocks, at_once;  // at_once: how many the GPU has at a time

  static BackwardShortPlan make(const HfFlash2ForwardParams& params) {
    const int64_t query_blocks = Workspace::query_blocks(params, Shape::kBlockM);
    const bool packed = params.sequences_k.cu_seqlens != nullptr;
    const int64_t key_blocks = GroupSplits::count_blocks(params, Shape::kBlockN) * (packed ? 1 : params.batch);
    check_count(std::max(query_blocks * params.heads_q, key_blocks * params.heads_k), "attention backward, sm90, short");
    const int64_t owners_at = ceil_div(Workspace::bytes(params, Shape::kBlockM, Shape::kDqColumns), 16) * 16;
    const int64_t owners = packed ? query_blocks + key_blocks : 0;
    return {static_cast<int>(query_blocks),
            static_cast<int>(key_blocks),
            owners_at,
            owners_at + owners * int64_t{sizeof(int4)},
            std::max(query_blocks, key_blocks) * params.heads_k,
            int64_t{Shape::kBlocksPerSm} * multiprocessors(params.device)};
  }
};

// Sequences are short up to this length, packed ones up to this average too.
struct ShortLimits {
  int longest, average;

  static constexpr ShortLimits of(int head_dim, bool triangular, bool groups) {
    const bool narrow = head_dim <= 64;
    if (groups) return triangular ? ShortLimits{narrow ? 320 : 240, narrow ? 256 : 224} : ShortLimits{192, 112};
    return triangular ? ShortLimits{narrow ? 448 : 384, 448 - 2 * head_dim} : ShortLimits{narrow ? 320 : 256, narrow ? 176 : 144};
  }
};

// Whether sequences are so short that thread blocks of one warpgroup are faster (backward_short.cuh), though what their blocks see of each other is
// computed twice. To greater lengths where so few thread blocks are there that all begin at once, and none has most of the work, as with few queries
// of many keys. Not where few thread blocks would have the query heads of whole groups one after another.
// PERF: packed, causal, to 64, 128, 256, 512 tokens, 12 heads of 64 125 73 50 34 % faster, 16 of 128 40 25 17 6; 154 on average, to 1k, 32/8 heads of
// 64 21 to 28, of 128 27 to 38; one sequence, causal, of 512, 1k, 12 heads of 64 28 10, 8 of 128 29 23. TUNING.md, "Small thread blocks".
template <int kHeadDim>
bool takes_short(const HfFlash2BackwardParams& backward) {
  constexpr bool kNarrow = kHeadDim <= 64;
  constexpr int kTriangleAtOnce = 1024, kAllKeysAtOnce = kNarrow ? 512 : 320, kPadded = 256, kLongest = 1024, kRounds = 4;
  const HfFlash2ForwardParams& params = backward.forward;
  if (params.softcap != 0.f || params.dropout_p != 0.f || params.batch == 0 || params.max_seqlen_q == 0) return false;
  const bool triangular = is_triangular(params), groups = params.heads_q > params.heads_k;
  const int longest = std::max(params.max_seqlen_q, params.max_seqlen_k), shortest = std::min(params.max_seqlen_q, params.max_seqlen_k);
  if (longest > kLongest) return false;
  const auto plan = BackwardShortPlan<kHeadDim>::make(params);
  if (groups && plan.key_blocks * int64_t{params.heads_k} < int64_t{kRounds} * multiprocessors(params.device)) return false;
  const bool at_once = plan.thread_blocks <= plan.at_once && longest <= 2 * shortest;
  if (at_once && !groups && longest <= (triangular ? kTriangleAtOnce : kAllKeysAtOnce)) return true;
  if (may_have_gaps(backward)) return longest <= (triangular && kNarrow && !groups ? 2 * kPadded : kPadded);  // nobody knows the average
  const ShortLimits limits = ShortLimits::of(kHeadDim, triangular, groups);
  const bool packed = params.sequences_q.cu_seqlens != nullptr;
  return longest <= limits.longest || (packed && std::max(params.total_q, params.total_k) <= int64_t{limits.average} * params.batch);
}

// Dynamic shared memory of a thread block: where there are fewer than the GPU could have at once, so much that multiprocessors, among which these
// would be shared out unevenly, have no room for more than their part of them.
// PERF: one sequence, causal, of 512, 1k, 12 heads of 64 11 14 % faster, 8 of 128 -1 20. TUNING.md, "Small thread blocks".
constexpr int kMultiprocessorShared = 228 * 1024;
template <typename Shape>
int choose_shared_bytes(int64_t thread_blocks, int device) {
  const int64_t part = ceil_div(thread_blocks, multiprocessors(device));
  return part < Shape::kBlocksPerSm ? kMultiprocessorShared / static_cast<int>(part + 1) : BackwardShortShared<Shape>::kBytes;
}

// How many of the last sequences BlockOwners puts in order: those of the last rounds of thread blocks.
// PERF: packed, causal, to 128, 256, 512, 1k tokens, 12 heads of 64 -1 0 6 6 % faster, 32/8 3 7 8 12, 16 of 128 -1 2 3 1. All: mostly slower.
// TUNING.md, "Small thread blocks".
template <int kHeadDim>
int count_ordered(const BackwardShortPlan<kHeadDim>& plan, const HfFlash2ForwardParams& params) {
  constexpr int kRounds = 2, kMost = 512;
  return static_cast<int>(
      std::min<int64_t>(ceil_div(kRounds * plan.at_once * params.batch, plan.thread_blocks), std::min(params.batch, kMost)));
}

// Heads of a thread block of the first kernel: as many as have 512 bytes of a token, where that leaves enough thread blocks.
// PERF: packed, causal, to 64, 128, 256, 512 tokens, d 64 7 6 5 4 % faster than one head each, d 128 2 1 0. TUNING.md, "Small thread blocks".
template <int kHeadDim>
int choose_log2_heads(const HfFlash2ForwardParams& params, int64_t blocks) {
  constexpr int kAtOnce = 8;  // thread blocks, of a multiprocessor
  int log2_heads = kHeadDim <= 64 ? 2 : 1;
  while (log2_heads > 0 && blocks * ceil_div(params.heads_q, 1 << log2_heads) < int64_t{kAtOnce} * multiprocessors(params.device))
    --log2_heads;
  return log2_heads;
}

template <int kHeadDim, typename T>
void launch_backward_short(const HfFlash2BackwardParams& params) {
  using Plan = BackwardShortPlan<kHeadDim>;
  using Shape = typename Plan::Shape;
  const HfFlash2ForwardParams& forward = params.forward;
  const Plan plan = Plan::make(forward);
  const bool packed = forward.sequences_q.cu_seqlens != nullptr;
  int4* const owners = reinterpret_cast<int4*>(static_cast<char*>(params.workspace) + plan.owners_at);
  const int64_t blocks_q = ceil_div(forward.max_seqlen_q, Shape::kBlockM), blocks_k = ceil_div(forward.max_seqlen_k, Shape::kBlockN);
  BackwardShortArguments arguments;
  make_backward_maps(arguments, params, Shape::kBlockM, Shape::kBlockN);
  const SequenceRows queries = SequenceRows::of_queries(forward), keys = SequenceRows::of_keys(forward);
  arguments.dq = make_sequence_map(params.dq, forward.dtype, forward.head_dim, queries, forward.heads_q, Shape::kBlockM);
  arguments.dk = make_sequence_map(params.dk, forward.dtype, forward.head_dim, keys, forward.heads_k, Shape::kBlockN);
  arguments.dv = make_sequence_map(params.dv, forward.dtype, forward.head_dim_v, keys, forward.heads_k, Shape::kBlockN);
  arguments.tile_rows = Workspace(params, Shape::kBlockM, Shape::kDqColumns).delta;
  arguments.params = params;
  const int ordered = count_ordered(plan, forward);
  arguments.owners_q = {packed ? owners : nullptr, plan.query_blocks, ordered};
  arguments.owners_k = {packed ? owners + plan.query_blocks : nullptr, plan.key_blocks, ordered};
  arguments.blocks_q = Divisor::of(static_cast<int>(blocks_q));
  arguments.blocks_k = Divisor::of(static_cast<int>(std::max<int64_t>(1, blocks_k)));
  arguments.heads_k = Divisor::of(forward.heads_k), arguments.group = Divisor::of(forward.heads_q / forward.heads_k);

  const int log2_heads = choose_log2_heads<kHeadDim>(forward, blocks_q * forward.batch);
  const int64_t parts = ceil_div(forward.heads_q, 1 << log2_heads);
  const ShortPreprocessArguments prepared{
      params, arguments.owners_q, arguments.owners_k, arguments.blocks_q, Divisor::of(static_cast<int>(parts)), log2_heads};
  launch<short_preprocess_kernel<Shape::kBlockM, T>>(prepared, blocks_q * forward.batch * parts, kPreprocessThreads, 0, forward.device,
                                                     forward.stream, "attention backward, sm90, preprocess");
  launch<backward_short_kernel<Shape, T>>(arguments, plan.thread_blocks, Shape::kThreads,
                                          choose_shared_bytes<Shape>(plan.thread_blocks, forward.device), forward.device, forward.stream,
                                          "attention backward, sm90, short", Start::kEarly, kMultiprocessorShared / 2);
}

}  // namespace hf_flash2::sm90
