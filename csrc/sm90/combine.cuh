// Where several thread blocks share the keys of a query block (forward_launch.cuh says when): the kernel that puts the shares of a row
// together, out = sum_s exp(lse_s - lse) out_s with lse = log sum_s exp(lse_s). Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context
// inference", 2023.
#pragma once
#include <math.h>

#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "sm90/forward_task.cuh"

namespace hf_flash2::sm90 {

// Shares of a row put together so far, in 8 columns: sums of exp(lse_s - max) out_s and of exp(lse_s - max).
struct WeightedSum {
  float max = -INFINITY, sum = 0.f, out[8] = {};

  // A share, divided by its sum.
  __device__ __forceinline__ void add_share(const float* out_of_share, float lse) {
    const float4* columns = reinterpret_cast<const float4*>(out_of_share);
    const float4 a = columns[0], b = columns[1];
    add({lse == INFINITY ? -INFINITY : lse, 1.f, {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}});
  }
  __device__ __forceinline__ void add(const WeightedSum& other) {
    const float larger = fmaxf(max, other.max), base = larger == -INFINITY ? 0.f : larger;  // no key so far: weights of 0, not NaN
    const float weight = exp2_approx((max - base) * kLog2e), other_weight = exp2_approx((other.max - base) * kLog2e);
    max = larger;
    sum = sum * weight + other.sum * other_weight;
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = out[i] * weight + other.out[i] * other_weight;
  }

  // To the results, with the sink of the head, from `column` on; the lse by who has the first.
  template <typename T>
  __device__ __forceinline__ void store(const HfFlash2ForwardParams& params, int batch, int head, int token, int column) {
    if (params.sinks != nullptr && sum != 0.f) add({params.sinks[head], 1.f});
    const float scale = sum == 0.f ? 0.f : 1.f / sum;
    uint32_t rounded[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rounded[i] = pack<T>(out[2 * i] * scale, out[2 * i + 1] * scale);
    T* row = token_pointer<T>(params.out, batch, head, token);
    *reinterpret_cast<uint4*>(row + column) = make_uint4(rounded[0], rounded[1], rounded[2], rounded[3]);
    if (column == 0)
      params.softmax_lse[batch * params.lse_batch_stride + head * params.lse_head_stride + token] =
          sum == 0.f ? INFINITY : max + log2f(sum) * kLn2;
  }
};

struct CombineArguments {
  HfFlash2ForwardParams params;
  ForwardResults shares;
  int splits;
  int ways;  // how many groups of lanes share the splits of a row: a power of 2, at most kGroups
};

template <typename Shape>
struct CombineShape {
  static constexpr int kThreads = 256;
  static constexpr int kLanes = Shape::kHeadDimV > 128 ? 32 : Shape::kHeadDimV > 64 ? 16 : 8;  // of 8 columns each: one row, one split
  static constexpr int kGroups = kThreads / kLanes;
};

// Group g of lanes is way g % ways of row g / ways of the block's rows, which are queries of the longest length each sequence may have.
// The first way adds up what the others leave in shared memory.
template <typename Shape, typename T>
__global__ void __launch_bounds__(CombineShape<Shape>::kThreads) combine_kernel(const __grid_constant__ CombineArguments arguments) {
  constexpr int kThreads = CombineShape<Shape>::kThreads, kLanes = CombineShape<Shape>::kLanes, kGroups = CombineShape<Shape>::kGroups;
  __shared__ float exchanged[10 * kThreads];  // [max, sum and 8 columns][thread]
  const HfFlash2ForwardParams& params = arguments.params;
  const int splits = arguments.splits, ways = arguments.ways;
  const int group = threadIdx.x / kLanes, way = group % ways, column = threadIdx.x % kLanes * 8;
  const int index = blockIdx.x * (kGroups / ways) + group / ways;
  const int query = index % params.max_seqlen_q, head = index / params.max_seqlen_q % params.heads_q;
  const int batch = index / params.max_seqlen_q / params.heads_q;
  const bool inside = batch < params.batch;
  const Sequence seq = find_sequence(params.sequences_q, params.batch, inside ? batch : 0, params.max_seqlen_q);
  const bool valid = inside && query < seq.length && column < params.head_dim_v;
  const int token = seq.start + query;

  wait_for_kernel_before();
  WeightedSum total;
  if (valid) {
    const float* out = token_pointer<float>(arguments.shares.out, batch, head, token) + column;
    const float* lse_of_splits = arguments.shares.lse_of(batch, head, token, splits);
#pragma unroll 4
    for (int split = way; split < splits; split += ways) total.add_share(out + split * params.head_dim_v, lse_of_splits[split]);
  }
  if (ways > 1) {
    float* mine = exchanged + threadIdx.x;
    mine[0] = total.max, mine[kThreads] = total.sum;
#pragma unroll
    for (int i = 0; i < 8; ++i) mine[(2 + i) * kThreads] = total.out[i];
    __syncthreads();
    for (int other = 1; other < (way == 0 ? ways : 0); ++other) {
      const float* theirs = mine + other * kLanes;
      WeightedSum part{theirs[0], theirs[kThreads]};
#pragma unroll
      for (int i = 0; i < 8; ++i) part.out[i] = theirs[(2 + i) * kThreads];
      total.add(part);
    }
  }
  if (valid && way == 0) total.store<T>(params, batch, head, token, column);
}

// Where tiles are shared: the pieces of a row together. As above, each group of lanes has a row.
template <typename Shape, typename T>
__global__ void __launch_bounds__(CombineShape<Shape>::kThreads) combine_pieces_kernel(const __grid_constant__ ForwardArguments arguments) {
  constexpr int kLanes = CombineShape<Shape>::kLanes, kGroups = CombineShape<Shape>::kGroups;
  const HfFlash2ForwardParams& params = arguments.params;
  const SharedTiles& shared = arguments.shared;
  const int index = blockIdx.x * kGroups + threadIdx.x / kLanes, column = threadIdx.x % kLanes * 8;
  const int tile = index / Shape::kBlockM, row = index % Shape::kBlockM;
  int query_block, batch_head;
  arguments.scheduler.tile(arguments.whole_units + tile, 0, query_block, batch_head);
  const int batch = arguments.heads.quotient(batch_head), row_of_head = query_block * Shape::kBlockM + row;
  const int query = row_of_head >> arguments.tile_heads_log2;
  const int head = (arguments.heads.remainder(batch_head) << arguments.tile_heads_log2) + (row & ((1 << arguments.tile_heads_log2) - 1));

  wait_for_kernel_before();
  if (tile >= shared.tiles || query >= params.max_seqlen_q || column >= params.head_dim_v) return;
  WeightedSum total;
  const int last = shared.last_of(tile);
  for (int block = shared.first_of(tile); block <= last; ++block) {
    const int piece_row = (block + tile) * Shape::kBlockM + row;
    total.add_share(shared.out + static_cast<int64_t>(piece_row) * params.head_dim_v + column, shared.lse[piece_row]);
  }
  total.store<T>(params, batch, head, query, column);
}

}  // namespace hf_flash2::sm90
