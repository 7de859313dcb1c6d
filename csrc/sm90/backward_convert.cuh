// The last kernel of the Hopper backward: gradients to their dtype, dQ from its accumulator where that has not been done beside the backward
// (rounding.cuh), dK and dV from their shares where there are some.
#pragma once
#include "sm90/rounding.cuh"

namespace hf_flash2::sm90 {

// In so many pieces the shares of dK and dV are added up.
template <typename Shape>
__host__ __device__ int share_pieces(const HfFlash2ForwardParams& params) {
  const int key_blocks = (params.max_seqlen_k + Shape::kBlockN - 1) / Shape::kBlockN;
  return key_blocks * params.heads_k * params.batch * (Shape::kKeyGradientFloats / (64 * 32));
}

// dK or dV = the sum of its shares, from the first split to the last, rounded to T. 128 threads a piece of 64 keys x 32 columns, each with
// the elements that it held as a consumer; `index` counts pieces.
template <typename Shape, typename T>
__device__ __forceinline__ void add_shares(const HfFlash2BackwardParams& params, const KeyGradientShares& shares, int index) {
  constexpr int kColumns = 32, kPieceFloats = 64 * kColumns, kPieces = Shape::kKeyGradientFloats / kPieceFloats;
  const HfFlash2ForwardParams& forward = params.forward;
  const int key_blocks = (forward.max_seqlen_k + Shape::kBlockN - 1) / Shape::kBlockN, tile = index / kPieces, piece = index % kPieces;
  const int key_block = tile % key_blocks, head = tile / key_blocks % forward.heads_k, batch = tile / key_blocks / forward.heads_k;
  const int thread = threadIdx.x % 128;
  const Sequence seq = find_sequence(forward.sequences_k, forward.batch, batch, forward.max_seqlen_k);
  if (key_block * Shape::kBlockN >= seq.length) return;

  float sum[kColumns / 8][4] = {};
  for (int split = 0; split < static_cast<int>(shares.splits.divisor); ++split) {
    const int part = head * shares.splits.divisor + split;
    const float* share = shares.tile<Shape>(forward, batch, part, key_block) + piece * kPieceFloats;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      const float4 x = reinterpret_cast<const float4*>(share)[n * 128 + thread];
      sum[n][0] += x.x, sum[n][1] += x.y, sum[n][2] += x.z, sum[n][3] += x.w;
    }
  }
  constexpr int kPiecesDk = Shape::kBlockN * Shape::kHeadDim / kPieceFloats;
  const bool is_dk = piece < kPiecesDk;
  const int of_gradient = is_dk ? piece : piece - kPiecesDk, across = (is_dk ? Shape::kHeadDim : Shape::kHeadDimV) / kColumns;
  const int row_begin = key_block * Shape::kBlockN + of_gradient / across * 64, column = of_gradient % across * kColumns;
  const HfFlash2Tensor& tensor = is_dk ? params.dk : params.dv;
  T* rows = token_pointer<T>(tensor, batch, head, seq.start) + column;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row_begin + thread / 32 * 16 + thread % 32 / 4 + half * 8;
    store_row(sum, half, rows + row * tensor.token_stride, row < seq.length, (is_dk ? forward.head_dim : forward.head_dim_v) - column);
  }
}

template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads) convert_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  Rounder<Shape, T> rounder(arguments, shared_address(memory), blockIdx.x, gridDim.x);
  wait_for_kernel_before();
  while (rounder.has_more()) rounder.template round<false>(32);
  if (!arguments.shares.split()) return;
  const int pieces = share_pieces<Shape>(arguments.params.forward), groups = Shape::kThreads / 128;
  for (int index = blockIdx.x * groups + threadIdx.x / 128; index < pieces; index += gridDim.x * groups)
    add_shares<Shape, T>(arguments.params, arguments.shares, index);
}

}  // namespace hf_flash2::sm90
