// Where several thread blocks share the keys of a query block (forward_launch.cuh says when): the kernels that put the shares of a row
// together, out = sum_s exp(lse_s - lse) out_s with lse = log sum_s exp(lse_s). Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context
// inference", 2023.
#pragma once
#include <math.h>

#include "attention/sinks.cuh"
#include "attention/softmax.cuh"
#include "sm90/forward_task.cuh"

namespace hf_flash2::sm90 {

constexpr int kCombineThreads = 256, kCombineWarps = kCombineThreads / 32;
constexpr int kSharesAtOnce = 4;   // loaded together, by a warp
constexpr int kEarlyBlocks = 128;  // thread blocks that there may be room for beside those of the kernel before

// Shares of a row, each divided by its own sum, so many floats apart: out [Dv], and lse, +inf where a share has seen no key.
struct SharesOfRow {
  const float *out, *lse;
  int count, out_stride, lse_stride;
};

// The shares of a row put together by a warp: lane l has columns 4 l and 128 + 4 l on. `sum` is that of exp(lse_s - max).
template <int kHeadDimV>
struct CombinedRow {
  static constexpr int kPieces = (kHeadDimV + 127) / 128;
  float max = -INFINITY, sum = 0.f;
  float4 out[kPieces] = {};

  static __device__ __forceinline__ int column(int piece) { return piece * 128 + threadIdx.x % 32 * 4; }

  // Without a share, once all the same: combine_kernel says why.
  __device__ __forceinline__ void add(const SharesOfRow& shares, int columns) {
    int first = 0;
#pragma unroll 1
    do {
      float4 x[kSharesAtOnce][kPieces];
#pragma unroll
      for (int i = 0; i < kSharesAtOnce; ++i) {
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) {
          x[i][piece] = make_float4(0.f, 0.f, 0.f, 0.f);
          if (first + i < shares.count && column(piece) < columns)
            x[i][piece] = *reinterpret_cast<const float4*>(shares.out + int64_t{first + i} * shares.out_stride + column(piece));
        }
      }
      const int mine = first + threadIdx.x % kSharesAtOnce;  // a lane has the lse of one, and then its weight
      float lse = mine < shares.count ? shares.lse[int64_t{mine} * shares.lse_stride] : INFINITY;
      if (lse == INFINITY) lse = -INFINITY;
      float larger = fmaxf(lse, max);
#pragma unroll
      for (int offset = kSharesAtOnce / 2; offset > 0; offset /= 2) larger = fmaxf(larger, __shfl_xor_sync(0xffffffffu, larger, offset));
      rescale(larger);
      const float weight = exp2_approx((lse - base()) * kLog2e);
#pragma unroll
      for (int i = 0; i < kSharesAtOnce; ++i) {
        const float weight_of_share = __shfl_sync(0xffffffffu, weight, i);
        sum += weight_of_share;
#pragma unroll
        for (int piece = 0; piece < kPieces; ++piece) add_weighted(out[piece], x[i][piece], weight_of_share);
      }
    } while ((first += kSharesAtOnce) < shares.count);
  }

  // What another warp has put together: its max and sum, and its columns, `stride` apart.
  __device__ __forceinline__ void add_other(float2 max_and_sum, const float4* theirs, int stride) {
    rescale(fmaxf(max, max_and_sum.x));
    const float weight = exp2_approx((max_and_sum.x - base()) * kLog2e);
    sum += max_and_sum.y * weight;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) add_weighted(out[piece], theirs[piece * stride], weight);
  }

  // Without a key so far: weights of 0, not NaN.
  __device__ __forceinline__ float base() const { return max == -INFINITY ? 0.f : max; }
  __device__ __forceinline__ void rescale(float larger) {
    const float before = max;
    max = larger;
    const float factor = exp2_approx((before - base()) * kLog2e);
    sum *= factor;
#pragma unroll
    for (float4& x : out) x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
  }

  // With the sink of the head: out, rounded.
  template <typename T>
  __device__ __forceinline__ void finish(const HfFlash2ForwardParams& params, int head, uint2 (&rounded)[kPieces]) {
    if (params.sinks != nullptr && sum != 0.f) {
      const float sink = params.sinks[head];
      rescale(fmaxf(max, sink));
      sum += exp2_approx((sink - max) * kLog2e);
    }
    const float factor = sum == 0.f ? 0.f : reciprocal_approx(sum);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const float4& x = out[piece];
      rounded[piece] = make_uint2(pack<T>(x.x * factor, x.y * factor), pack<T>(x.z * factor, x.w * factor));
    }
  }
  __device__ __forceinline__ float lse() const { return sum == 0.f ? INFINITY : max + log2_approx(sum) * kLn2; }

  // To the results of a row.
  template <typename T>
  static __device__ __forceinline__ void store(const HfFlash2ForwardParams& params, int batch, int head, int token,
                                               const uint2 (&rounded)[kPieces], float lse) {
    T* const row = token_pointer<T>(params.out, batch, head, token);
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece)
      if (column(piece) < params.head_dim_v) *reinterpret_cast<uint2*>(row + column(piece)) = rounded[piece];
    if (threadIdx.x % 32 == 0) params.softmax_lse[batch * params.lse_batch_stride + head * params.lse_head_stride + token] = lse;
  }

  static __device__ __forceinline__ void add_weighted(float4& total, const float4& x, float weight) {
    total.x += weight * x.x, total.y += weight * x.y, total.z += weight * x.z, total.w += weight * x.w;
  }
};

struct CombineArguments {
  HfFlash2ForwardParams params;
  ForwardResults shares;
  int splits;
  int ways;  // how many warps share the splits of a row: a power of 2, at most kCombineWarps
};

namespace {  // each file has its own
// Warp w is way w % ways of row w / ways of the block's rows, which are queries of the longest length each sequence may have. The first way
// adds up what the others leave in shared memory.
// PERF: of a brief call this kernel is a third, most of it instructions that come from memory, as other kernels ran since the last time. So
// there are few of them, and while the kernel before still computes, all but the stores run once on no shares. One query, one sequence of 1k: 15.9
// -> 11.3 us. TUNING.md, "Brief calls".
template <int kHeadDimV, typename T>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ CombineArguments arguments) {
  using Row = CombinedRow<kHeadDimV>;
  constexpr int kPieces = Row::kPieces;
  __shared__ float4 out_of_ways[kPieces * kCombineThreads];
  __shared__ float2 sum_of_ways[kCombineWarps];  // max, sum
  const HfFlash2ForwardParams& params = arguments.params;
  const int splits = arguments.splits, ways = arguments.ways, warp = threadIdx.x / 32, way = warp % ways;
  const int index = blockIdx.x * (kCombineWarps / ways) + warp / ways;
  const int query = index % params.max_seqlen_q, head = index / params.max_seqlen_q % params.heads_q;
  const int batch = index / params.max_seqlen_q / params.heads_q;
  const bool inside = batch < params.batch;
  const Sequence seq = find_sequence(params.sequences_q, params.batch, inside ? batch : 0, params.max_seqlen_q);
  const bool valid = inside && query < seq.length;
  const int token = seq.start + query;
  const int of_way = (splits + ways - 1) / ways, first = way * of_way;
  SharesOfRow shares{token_pointer<float>(arguments.shares.out, batch, head, token) + first * params.head_dim_v,
                     arguments.shares.lse_of(batch, head, token, splits) + first, 0, params.head_dim_v, 1};

#pragma unroll 1
  for (bool there = blockIdx.x >= kEarlyBlocks;; there = true) {
    if (there) {
      wait_for_kernel_before();
      shares.count = valid ? max(0, min(of_way, splits - first)) : 0;
    }
    Row row;
    row.add(shares, params.head_dim_v);
    if (ways > 1) {
      sum_of_ways[warp] = make_float2(row.max, row.sum);
#pragma unroll
      for (int piece = 0; piece < kPieces; ++piece) out_of_ways[piece * kCombineThreads + threadIdx.x] = row.out[piece];
      __syncthreads();
#pragma unroll 1
      for (int other = 1; other < (way == 0 ? ways : 0); ++other)
        row.add_other(sum_of_ways[warp + other], &out_of_ways[threadIdx.x + other * 32], kCombineThreads);
      __syncthreads();
    }
    uint2 rounded[kPieces];
    row.template finish<T>(params, head, rounded);
    const float lse = row.lse();
    if (there) {
      if (valid && way == 0) Row::template store<T>(params, batch, head, token, rounded, lse);
      return;
    }
    asm volatile("" ::"f"(lse));  // or nothing of the results would be computed ahead
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) asm volatile("" ::"r"(rounded[piece].x), "r"(rounded[piece].y));
  }
}
}  // namespace

// Where tiles are shared: the pieces of a row together, by a warp.
template <typename Shape, typename T>
__global__ void __launch_bounds__(kCombineThreads) combine_pieces_kernel(const __grid_constant__ ForwardArguments arguments) {
  const HfFlash2ForwardParams& params = arguments.params;
  const SharedTiles& shared = arguments.shared;
  const int index = blockIdx.x * kCombineWarps + threadIdx.x / 32, tile = index / Shape::kBlockM, row = index % Shape::kBlockM;
  int query_block, batch_head;
  arguments.scheduler.tile(arguments.whole_units + tile, 0, query_block, batch_head);
  const int batch = arguments.heads.quotient(batch_head), row_of_head = query_block * Shape::kBlockM + row;
  const int query = row_of_head >> arguments.tile_heads_log2;
  const int head = (arguments.heads.remainder(batch_head) << arguments.tile_heads_log2) + (row & ((1 << arguments.tile_heads_log2) - 1));

  wait_for_kernel_before();
  if (tile >= shared.tiles || query >= params.max_seqlen_q) return;
  const int first = shared.first_of(tile), first_row = (first + tile) * Shape::kBlockM + row;
  CombinedRow<Shape::kTaskOutColumns> combined;
  combined.add({shared.out + static_cast<int64_t>(first_row) * params.head_dim_v, shared.lse + first_row, shared.last_of(tile) - first + 1,
                Shape::kBlockM * params.head_dim_v, Shape::kBlockM},
               params.head_dim_v);
  uint2 rounded[decltype(combined)::kPieces];
  combined.template finish<T>(params, head, rounded);
  combined.template store<T>(params, batch, head, query, rounded, combined.lse());
}

}  // namespace hf_flash2::sm90
