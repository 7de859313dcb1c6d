// The last kernel of the Hopper backward: gradients to their dtype, dQ from its accumulator, dK and dV from their shares where there are some.
// Where thread blocks of the main kernel have rounded dQ, round_rest_kernel (rounding.cuh) does the rest of it, and this one, before that, only
// has the shares.
#pragma once
#include "device/grid_dependency.cuh"
#include "sm90/backward_task.cuh"
#include "sm90/store.cuh"

namespace hf_flash2::sm90 {

struct ConvertArguments {
  HfFlash2BackwardParams params;
  GroupSplits groups;
  int query_blocks;  // thread blocks for dQ, or none; those behind them are for dK and dV
  int early_blocks;  // the first of these, by QueryBlock: probably no task will add to them when the last tasks still run
  bool stores_lone;  // the main kernel has stored dQ of lone query blocks
  bool asks;         // which thread blocks ask (have_all, is_complete) that begin before all tasks have ended
};

// In order, above head dim 128: whether all key blocks that come to a tile have added to all parts of it, and passed on their turns.
template <typename Shape>
__device__ __forceinline__ bool is_complete(const HfFlash2ForwardParams& forward, const Workspace& workspace, int batch, const Sequence& q,
                                            int row_begin, int64_t tile) {
  const Sequence k = find_sequence(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k);
  const Mask mask(forward, batch, q, k);
  const int turns = mask.key_block_end(row_begin + Shape::kBlockM, Shape::kTaskKeys) - mask.key_block_begin(row_begin, Shape::kTaskKeys);
  bool complete = true;
  for (int part = 0; part < Workspace::kSemaphores; ++part) complete &= semaphore_read(workspace.semaphore(tile, part)) >= turns;
  return complete;
}

// dQ = softmax_scale * accumulator, rounded to T, from the accumulation order of backward_kernel to rows. 128 threads a piece, each with the
// elements that it held as a consumer. A tile whose queries see no key is zero, and was never written where the
// first key block stores (BackwardArguments::first_stores).
template <typename Shape, typename T>
__device__ __forceinline__ void convert_query_gradient(const ConvertArguments& arguments, int block) {
  constexpr int kBlockM = Shape::kBlockM;
  const HfFlash2BackwardParams& params = arguments.params;
  const HfFlash2ForwardParams& forward = params.forward;
  const QueryBlock at(forward, kBlockM, block);
  const int row_begin = at.number * kBlockM, head = at.head, batch = at.batch;
  const Sequence seq = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q);
  if (row_begin >= seq.length) return;
  if (arguments.stores_lone && is_stored_by_task<Shape>(forward, batch, seq, at.number)) return;

  const int piece = threadIdx.x / 128, thread = threadIdx.x % 128, lane = threadIdx.x % 32;
  const Workspace workspace(params, kBlockM, Shape::kDqColumns);
  const int64_t tile = workspace.first_block(forward, batch, head, kBlockM) + at.number;
  if (arguments.asks && !(Shape::kTellsEnds ? have_all<Shape>(kAdded, params, arguments.groups, batch, head)
                                            : is_complete<Shape>(forward, workspace, batch, seq, row_begin, tile)))
    wait_for_kernel_before();
  const float* accumulated = workspace.dq + tile * kBlockM * Shape::kDqColumns + piece * Shape::kDqPieceFloats;
  const bool written = *workspace.semaphore(tile) != 0;
  float dq[8][4];
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const int columns = Shape::dq_columns(piece);
    const float4 x = n * 8 < columns ? *reinterpret_cast<const float4*>(accumulated + Shape::dq_place(n, thread, columns)) : float4{};
    dq[n][0] = written ? x.x * forward.softmax_scale : 0.f, dq[n][1] = written ? x.y * forward.softmax_scale : 0.f;
    dq[n][2] = written ? x.z * forward.softmax_scale : 0.f, dq[n][3] = written ? x.w * forward.softmax_scale : 0.f;
  }
  const int column = Shape::kDqByRows ? 0 : piece * 64;
  T* gdQ = token_pointer<T>(params.dq, batch, head, seq.start) + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_begin + (Shape::kDqByRows ? piece * 64 : 0) + thread / 32 * 16 + lane / 4 + half * 8;
    store_row(dq, half, gdQ + row * params.dq.token_stride, row < seq.length, forward.head_dim - column);
  }
}

// dK or dV = the sum of its shares, from the first split to the last, rounded to T. 128 threads a piece of 64 keys x kShareColumns, each with
// the elements that it held as a consumer; `block` counts thread blocks.
template <typename Shape, typename T>
__device__ __forceinline__ void add_shares(const ConvertArguments& arguments, int block, bool asks) {
  constexpr int kColumns = Shape::kShareColumns, kPieceElements = 64 * kColumns;
  const HfFlash2BackwardParams& params = arguments.params;
  const HfFlash2ForwardParams& forward = params.forward;
  const GroupSplits& groups = arguments.groups;
  const int splits = static_cast<int>(groups.splits.divisor), heads = static_cast<int>(groups.heads.divisor);
  const int key_blocks = (forward.max_seqlen_k + Shape::kBlockN - 1) / Shape::kBlockN, tile = block / Shape::kShareThreadBlocks;
  const int key_block = tile % key_blocks, key_head = groups.whole + tile / key_blocks;
  const int head = key_head % forward.heads_k, batch = key_head / forward.heads_k,
            first_head = head * static_cast<int>(groups.group.divisor);
  const int piece = block % Shape::kShareThreadBlocks * Shape::kDqPieces + threadIdx.x / 128, thread = threadIdx.x % 128;
  const Sequence seq = find_sequence(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k);
  if (key_block * Shape::kBlockN >= seq.length || piece >= Shape::kKeyGradientElements / kPieceElements) return;

  if (Shape::kTellsEnds && asks) {
    // Of a sequence without queries nothing has cleared the semaphores, and no task says anything.
    bool stored = find_sequence(forward.sequences_q, forward.batch, batch, forward.max_seqlen_q).length > 0;
    for (int split = 0; stored && split < splits; ++split)
      stored = have_all<Shape>(kStored, params, groups, batch, first_head + split * heads);
    if (!stored) wait_for_kernel_before();
  }
  float sum[kColumns / 8][4] = {};
#pragma unroll 1  // two at a time take 6 registers more, which dQ pays for as well
  for (int split = 0; split < splits; ++split) {
    const T* share = groups.share<Shape, T>(forward, batch, first_head + split * heads, key_block) + piece * kPieceElements;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const uint2 x = reinterpret_cast<const uint2*>(share)[n * 128 + thread];
      const float2 low = unpack<T>(x.x), high = unpack<T>(x.y);
      sum[n][0] += low.x, sum[n][1] += low.y, sum[n][2] += high.x, sum[n][3] += high.y;
    }
  }
  constexpr int kPiecesDk = Shape::kBlockN * Shape::kTaskHeadDim / kPieceElements;
  const bool is_dk = piece < kPiecesDk;
  const int of_gradient = is_dk ? piece : piece - kPiecesDk, across = (is_dk ? Shape::kTaskHeadDim : Shape::kTaskHeadDimV) / kColumns;
  const int row_begin = key_block * Shape::kBlockN + of_gradient / across * 64, column = of_gradient % across * kColumns;
  const HfFlash2Tensor& tensor = is_dk ? params.dk : params.dv;
  T* rows = token_pointer<T>(tensor, batch, head, seq.start) + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_begin + thread / 32 * 16 + thread % 32 / 4 + half * 8;
    store_row(sum, half, rows + row * tensor.token_stride, row < seq.length, (is_dk ? forward.head_dim : forward.head_dim_v) - column);
  }
}

// Thread blocks come to multiprocessors that have no task left, while others still compute: they begin with what is done, the last of it first, as
// L2 still holds that, and only the others wait: those for dK and dV, if there are some for dQ. The last one waits in any case: the end of this
// kernel says that the main one has ended, also to round_rest_kernel.
// PERF: d 128 causal, 64/8 heads at 1k, 2k, 4k 5 2 1 %. TUNING.md, "First and last kernel".
template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kDqPieces * 128) convert_kernel(const __grid_constant__ ConvertArguments arguments) {
  const int i = blockIdx.x, early = arguments.early_blocks, end = arguments.query_blocks;
  const bool asks = arguments.asks && i != gridDim.x - 1 && (i < end || end == 0);
  if (!asks) wait_for_kernel_before();
  if (i < end)
    convert_query_gradient<Shape, T>(arguments, i < early ? early - 1 - i : end - 1 - (i - early));
  else
    add_shares<Shape, T>(arguments, i - end, asks);
}

}  // namespace hf_flash2::sm90
