// Launch of the Hopper forward: tensor maps, tile order and grid.
#pragma once
#include "launch.h"
#include "sm90/forward.cuh"
#include "sm90/run.h"
#include "sm90/tensor_map.h"

namespace hf_flash2::sm90 {

// Query heads whose rows share a tile: a whole group where that saves at least a tenth of the tiles (one query and a group of 8: 7 of 8),
// else 1. Fewer tiles also read K and V less often; a tenth leaves long prompts, which gain next to nothing, with whole heads in L2 order.
// Groups that do not divide the rows of a warpgroup stay apart.
inline int choose_tile_heads(const HfFlash2ForwardParams& params, int block_rows) {
  const int group = params.heads_q / params.heads_k;
  if (64 % group != 0) return 1;
  const int64_t together = ceil_div(int64_t{params.max_seqlen_q} * group, block_rows);
  return together * 10 <= ceil_div(params.max_seqlen_q, block_rows) * group * 9 ? group : 1;
}

template <typename Shape, typename T>
void launch_forward(const HfFlash2ForwardParams& params) {
  const bool packed = params.sequences_q.cu_seqlens != nullptr, ragged = packed || params.sequences_q.ranges || params.sequences_k.ranges;
  const int tokens_q = packed ? params.total_q : params.max_seqlen_q, tokens_k = packed ? params.total_k : params.max_seqlen_k;
  const int batch = packed ? 1 : params.batch, tile_heads = choose_tile_heads(params, Shape::kBlockM);

  ForwardArguments arguments;
  arguments.q =
      make_tensor_map_heads_first(params.q, params.dtype, params.head_dim, tokens_q, params.heads_q, batch, Shape::kBlockM, tile_heads);
  arguments.k = make_tensor_map(params.k, params.dtype, params.head_dim, tokens_k, params.heads_k, batch, Shape::kBlockN);
  arguments.v = make_tensor_map(params.v, params.dtype, params.head_dim_v, tokens_k, params.heads_k, batch, Shape::kBlockN);
  arguments.params = params;
  arguments.tile_heads_log2 = __builtin_ctz(tile_heads);

  // Dense: one thread block per multiprocessor walks equal shares. Ragged: lengths are known on the device only, so every query block gets a
  // thread block and the hardware balances. Causal work grows with the row: pairs make it equal, longest first lets the short fill up.
  const bool triangular = is_triangular(params);
  arguments.heads = Divisor::of(params.heads_q / tile_heads);
  arguments.group = Divisor::of(params.heads_q / params.heads_k);
  arguments.scheduler = TileScheduler::make(!triangular ? TileOrder::kByHead
                                            : ragged    ? TileOrder::kLastBlockFirst
                                                        : TileOrder::kPairs,
                                            static_cast<int>(ceil_div(int64_t{params.max_seqlen_q} * tile_heads, Shape::kBlockM)),
                                            params.heads_q / tile_heads * params.batch, 16);
  const int64_t units = arguments.scheduler.units();
  const int64_t blocks = ragged ? units : std::min<int64_t>(units, multiprocessors(params.device));
  launch<forward_kernel<Shape, T>>(arguments, blocks, Shape::kThreads, Shape::kSharedBytes, params.device, params.stream,
                                   "attention forward, sm90");
}

template <int kHeadDim, typename T>
void run_forward(const HfFlash2ForwardParams& params) {
  if constexpr (kHeadDim == 64) {
    if (is_triangular(params) && params.max_seqlen_q <= 2048) return launch_forward<ForwardShape<kHeadDim, TileLength::kShort>, T>(params);
  }
  if constexpr (kHeadDim == 192) {
    if (params.head_dim_v <= 128) return launch_forward<ForwardShape<kHeadDim, TileLength::kLong, 128>, T>(params);
  }
  launch_forward<ForwardShape<kHeadDim, TileLength::kLong>, T>(params);
}

}  // namespace hf_flash2::sm90
