// What consumers of both Hopper backward kernels do: the products, and the steps between them. backward.cuh serves head dims to 128,
// backward_wide.cuh those above.
//
// Scores are computed keys x queries, so that P and dS are A operands of dV and dK as they come out of the accumulators:
//   S^T = K Q^T,  P^T = exp2(S^T - lse),  dP^T = V dO^T,  dS^T = P^T (dP^T - delta),  dV += P^T dO,  dK += dS^T Q,  dQ += dS K
#pragma once
#include "attention/softcap.cuh"
#include "sm90/backward_load.cuh"
#include "sm90/store.cuh"
#include "wgmma.cuh"

namespace hf_flash2::sm90 {

// Capped scores: a kernel of their own, which leaves the code of the other as it is.
template <typename Shape>
struct Capped : Shape {
  static constexpr bool kCapped = true;
};

// Dropout, likewise.
template <typename Shape>
struct Dropping : Shape {
  static constexpr bool kDropout = true;
};

// x, as a value that the compiler knows nothing about. PERF: what depends on it is computed where it is used; else, in a loop over tasks, the
// descriptors of every step are computed ahead and spilled.
__device__ __forceinline__ uint32_t hidden(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// S^T or dP^T [64 keys, kBlockM queries] = keys queries^T, over kColumns.
template <typename Shape, typename T, int kColumns = Shape::kHeadDim>
__device__ __forceinline__ void issue_scores(float* scores, uint32_t keys, uint32_t queries) {
  const uint64_t a = panel_descriptor(keys), b = panel_descriptor(queries);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kColumns / 16; ++k)
    WgmmaShared<T, Shape::kBlockM>::multiply(scores, advance_descriptor(a, k / 4 * Shape::kKeyPanelBytes + k % 4 * 32),
                                             advance_descriptor(b, k / 4 * Shape::kQueryPanelBytes + k % 4 * 32), k > 0);
  wgmma_commit();
}

// dV or dK [64 keys, kColumns] += P^T or dS^T times kQueries rows of dO or Q.
template <typename Shape, typename T, int kQueries = Shape::kBlockM, int kColumns = Shape::kHeadDim>
__device__ __forceinline__ void issue_key_gradient(float* gradient, const uint32_t* scores, uint32_t queries) {
  const uint64_t b = panel_descriptor(queries, Shape::kQueryPanelBytes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kQueries / 16; ++k)
    WgmmaRegisters<T, kColumns>::multiply(gradient, scores + k * 4, advance_descriptor(b, k * 2048), 1);
  wgmma_commit();
}

// dQ [64 queries, kColumns] = dS K, of one panel of dS and columns of a panel of K. kAdds: to what the product before left.
template <typename Shape, typename T, int kColumns, bool kAdds = false>
__device__ __forceinline__ void issue_query_gradient(float* dq, uint32_t ds, uint32_t keys) {
  const uint64_t a = panel_descriptor(ds), b = panel_descriptor(keys, Shape::kKeyPanelBytes);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < Shape::kBlockN / 16; ++k)
    WgmmaSharedByRows<T, kColumns>::multiply(dq, advance_descriptor(a, k * 2048), advance_descriptor(b, k * 2048), kAdds || k > 0);
  wgmma_commit();
}

// Where this thread's elements of S^T lie: two keys, `key` and key + 8, and of every 8 queries `query` and query + 1.
struct ScoreLane {
  int key, last_query[2];  // last_query: of each key, see Mask

  __device__ __forceinline__ ScoreLane(const Mask& mask, int first_key)
      : key(first_key + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4), last_query{mask.last_query(key), mask.last_query(key + 8)} {}

  static __device__ __forceinline__ int query() { return threadIdx.x % 4 * 2; }

  template <int kTiles>
  __device__ __forceinline__ void apply_mask(float (&scores)[kTiles][4], const Mask& mask, int row_begin) const {
    const int row = row_begin + query();
    const int first[2] = {mask.first_query(key) - row, mask.first_query(key + 8) - row};
    const int last[2] = {last_query[0] - row, last_query[1] - row};
    Mask::apply_transposed(scores, first, last);
  }
};

// One number of each query row of this thread's elements, two rows of every 8: of lse_log2 or delta.
template <int kTiles>
struct RowValues {
  float2 rows[kTiles];
  __device__ __forceinline__ explicit RowValues(uint32_t address) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) rows[n] = load_shared_float2(address + (n * 8 + ScoreLane::query()) * 4);
  }
};

// P = exp2(scale_log2 S - lse_log2), in place.
template <int kTiles>
__device__ __forceinline__ void exponentiate(float (*scores)[4], const RowValues<kTiles>& lse_log2, float scale_log2) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 lse = lse_log2.rows[n];
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[n][c] = exp2_approx(fmaf(scores[n][c], scale_log2, c % 2 == 0 ? -lse.x : -lse.y));
  }
}

// Dropout: the bits of this thread's elements of a step. key: its first.
template <typename Shape>
__device__ __forceinline__ auto draw_bits(const Dropout<Shape::kDropout, true>& dropout, const BackwardArguments& arguments,
                                          const BackwardTask& task, const BackwardTask::Step& at, int key) {
  const int batch_head = task.batch * arguments.params.forward.heads_q + task.first_head + at.head;
  return dropout.template draw<1, Shape::kBlockM / 8>(batch_head, at.query_block * Shape::kBlockM, key - threadIdx.x % 32 / 4);
}

// Elements of P that are dropped are negative from here on: as dV takes them, 0, and with their size in dS.
template <int kTiles>
__device__ __forceinline__ void mark_dropped(float (*p)[4], const DropoutBits<true, 1, kTiles>& bits, const DropoutRate& rate) {
  constexpr uint32_t kSign = 1u << 31;
  bits.for_each_pair(rate.threshold, [&](int, int n, int half, uint32_t dropped) {
    float* const pair = p[n] + half * 2;
    pair[0] = __uint_as_float(__float_as_uint(pair[0]) | (dropped << 16 & kSign));
    pair[1] = __uint_as_float(__float_as_uint(pair[1]) | (dropped & kSign));
  });
}

// P times the slope of the cap, in place of P: dS is that times (dP - delta) then.
template <int kTiles>
__device__ __forceinline__ void multiply_by_slope(float (*p)[4], const RowValues<kTiles>& lse_log2, const ScoreCap& cap) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 lse = lse_log2.rows[n];
#pragma unroll
    for (int c = 0; c < 4; ++c) p[n][c] *= slope_of_cap(p[n][c], c % 2 == 0 ? lse.x : lse.y, cap.inverse_log2);
  }
}

// dS = P (dP - delta), in place of dP; kDropout: with dP = 0 where P is negative.
template <bool kDropout, int kTiles>
__device__ __forceinline__ void differentiate(float (*scores)[4], const float (*p)[4], const RowValues<kTiles>& delta_rows) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float2 delta = delta_rows.rows[n];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float delta_of_row = c % 2 == 0 ? delta.x : delta.y;
      if constexpr (kDropout)
        scores[n][c] = fmaf(fmaxf(p[n][c], 0.f), scores[n][c], -fabsf(p[n][c]) * delta_of_row);
      else
        scores[n][c] = p[n][c] * (scores[n][c] - delta_of_row);
    }
  }
}

// dK or dV of 64 keys to global memory, this block's columns: rounded, to their rows, or where other tasks have shares of it, to the task's share,
// where the first column of these keys is at element `first`.
// PERF: rows that this kernel will not read again stream through L2, which then holds more of dQ: 2 to 7 % at 512 and 1k, 1 to 2 at 4k. The same
// for dQ, K, V, O: no faster, for Q and dO 4 to 5 % slower. TUNING.md, "Tasks".
template <typename Shape, typename T, int kTiles>
__device__ __forceinline__ void store_key_gradient(const BackwardArguments& arguments, const HfFlash2Tensor& tensor, int first,
                                                   const float (&gradient)[kTiles][4], const BackwardTask& task, int key, int columns) {
  const int first_column = Shape::first_panel() * 64;
  const GroupSplits& groups = arguments.groups;
  // PERF: the same for a warp, as ptxas can see: groups at 1k 1 % faster.
  const int heads = __shfl_sync(0xffffffffu, task.heads, 0);
  if (groups.splits.divisor > 1 && heads < static_cast<int>(groups.group.divisor)) {
    if (Shape::kTaskBlocks > 1 && task.key_block * Shape::kBlockN >= task.k.length) return;  // the share there is of another sequence
    T* share = groups.share<Shape, T>(arguments.params.forward, task.batch, task.first_head, task.key_block) + first + first_column * 64;
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
      __stcs(reinterpret_cast<uint2*>(share) + n * 128 + threadIdx.x % 128,
             make_uint2(pack<T>(gradient[n][0], gradient[n][1]), pack<T>(gradient[n][2], gradient[n][3])));
    return;
  }
  T* rows = token_pointer<T>(tensor, task.batch, groups.group.quotient(task.first_head), task.k.start) + first_column;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    store_row<true>(gradient, half, rows + (key + half * 8) * tensor.token_stride, key + half * 8 < task.k.length, columns - first_column);
}
}  // namespace hf_flash2::sm90
