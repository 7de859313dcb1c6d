// Launch of the Hopper backward: preprocess, main kernel, conversion of dQ; tensor maps and the order of key blocks.
#pragma once
#include "attention/preprocess.cuh"
#include "launch.h"
#include "sm90/backward.cuh"
#include "sm90/backward_wide.cuh"
#include "sm90/run.h"
#include "sm90/tensor_map.h"

namespace hf_flash2::sm90 {

template <int kHeadDim, typename T>
int64_t backward_workspace_bytes(const HfFlash2BackwardParams& params) {
  using Sizes = BackwardSizes<kHeadDim>;
  return Workspace::bytes(params.forward, Sizes::kBlockM, Sizes::kDqColumns);
}

template <typename Shape, typename T, auto kKernel>
void launch_backward(const HfFlash2BackwardParams& params) {
  const HfFlash2ForwardParams& forward = params.forward;
  const bool packed = forward.sequences_q.cu_seqlens != nullptr;
  const int tokens_q = packed ? forward.total_q : forward.max_seqlen_q, tokens_k = packed ? forward.total_k : forward.max_seqlen_k;
  const int batch = packed ? 1 : forward.batch;

  BackwardArguments arguments;
  arguments.q = make_tensor_map(forward.q, forward.dtype, forward.head_dim, tokens_q, forward.heads_q, batch, Shape::kBlockM);
  arguments.dout = make_tensor_map(params.dout, forward.dtype, forward.head_dim_v, tokens_q, forward.heads_q, batch, Shape::kBlockM);
  arguments.k = make_tensor_map(forward.k, forward.dtype, forward.head_dim, tokens_k, forward.heads_k, batch, Shape::kBlockN);
  arguments.v = make_tensor_map(forward.v, forward.dtype, forward.head_dim_v, tokens_k, forward.heads_k, batch, Shape::kBlockN);
  arguments.params = params;

  // A key block a thread block. Causal: the first key blocks see the most queries; long ones first, inside groups of heads whose Q, dO and dQ
  // the L2 holds. PERF: groups of 16 query heads are worth 40 % at 1k to 2k, d 128, on an H200.
  // Deterministic: a tile of dQ takes the key blocks of a head in the order of their launch, and they should come in that order by
  // themselves. Below a diagonal each starts at queries of its own, the last keys at the last queries: descending, all of a head at
  // once, nobody waits.
  // PERF: of the default's speed at d 128, causal, 1k and 4k, that is 96 and 90 %; ascending in groups of 16 it was 72 and 80.
  // Descending with a head's blocks in several waves they drift apart, and L2 does not hold what they read (16k in groups of 16: 52 %,
  // of 1: 80).
  const int key_blocks = static_cast<int>(ceil_div(forward.max_seqlen_k, Shape::kBlockN));
  TileOrder order = is_triangular(forward) ? TileOrder::kFirstBlockFirst : TileOrder::kByHead;
  int heads_at_once = std::max(1, 16 * forward.heads_k / forward.heads_q);
  if (params.deterministic) {
    order = forward.window_right >= 0 ? TileOrder::kLastBlockFirst : TileOrder::kFirstBlockFirst;
    heads_at_once = std::max(1, multiprocessors(forward.device) / std::max(1, key_blocks));
  }
  arguments.scheduler = TileScheduler::make(order, key_blocks, forward.heads_k * forward.batch, heads_at_once);

  // PERF: that the kernels overlap and that nothing clears dQ is worth 2 and 6 to 9 % at 512 and 1k, and 2 % at d 128, 4k; at d 64 it costs
  // 3 to 5 % from 4k on, in the main kernel.
  const bool brief = Shape::kHeadDim > 64 || forward.max_seqlen_k < 4096;
  const Start start = brief ? Start::kEarly : Start::kInOrder;
  arguments.first_stores = Shape::kFirstStoresDq && (brief || params.deterministic);

  // The first kernel starts in order, so that all older than the backward is there for the others, too, before they wait for anything.
  const int64_t query_blocks = ceil_div(forward.max_seqlen_q, Shape::kBlockM) * forward.heads_q * forward.batch;
  const auto preprocess = [&](auto clear_dq) {
    launch<preprocess_kernel<kSm90, Shape::kBlockM, Shape::kDqColumns, decltype(clear_dq)::value, T>>(
        params, query_blocks, kPreprocessThreads, 0, forward.device, forward.stream, "attention backward, sm90, preprocess");
  };
  if (arguments.first_stores)
    preprocess(std::false_type{});
  else
    preprocess(std::true_type{});
  const int64_t units = arguments.scheduler.units();
  const int64_t blocks = Shape::kTakesTasks ? std::min<int64_t>(units, multiprocessors(forward.device)) : units;
  launch<kKernel>(arguments, blocks, Shape::kThreads, BackwardShared<Shape>::kBytes, forward.device, forward.stream,
                  "attention backward, sm90", start);
  launch<convert_dq_kernel<Shape, T>>(params, query_blocks, Shape::kDqPieces * 128, 0, forward.device, forward.stream,
                                      "attention backward, sm90, dq", start);
}

template <typename Shape, typename T>
void launch_backward_wide(const HfFlash2BackwardParams& params) {
  launch_backward<Shape, T, backward_wide_kernel<Shape, T>>(params);
}

template <int kHeadDim, typename T>
void run_backward(const HfFlash2BackwardParams& params) {
  if constexpr (kHeadDim <= 128) {
    launch_backward<BackwardShape<kHeadDim>, T, backward_kernel<BackwardShape<kHeadDim>, T>>(params);
  } else {
    if constexpr (kHeadDim == 192) {
      if (params.forward.head_dim_v <= 128) return launch_backward_wide<BackwardWideShape<kHeadDim, 128>, T>(params);
    }
    launch_backward_wide<BackwardWideShape<kHeadDim>, T>(params);
  }
}

}  // namespace hf_flash2::sm90
