// dQ = softmax_scale * its accumulator, rounded: from the accumulation order of the backward to rows. Some thread blocks of backward_kernel do
// nothing else: while the others compute, they round the heads that are done, which L2 still holds. round_rest_kernel does what is left when there
// are no more tasks.
#pragma once
#include "device/convert.cuh"
#include "sm90/backward_load.cuh"

namespace hf_flash2::sm90 {

// What a warp rounds at a time: 32 queries x 64 columns of dQ, half a piece. Chunks are counted by QueryBlock, and in a tile.
template <typename Shape>
struct RoundingSizes {
  static constexpr int kFloats = Shape::kDqPieceFloats / 2, kBytes = kFloats * 4, kOfTile = Shape::kDqPieces * 2;
  static constexpr int kWarps = Shape::kThreads / 32, kStages = 2;
  static constexpr int kSharedBytes = kWarps * kStages * (kBytes + 8);  // chunks, then a barrier for each
};

// A chunk, and whether to round it.
template <typename T>
struct RoundingChunk {
  bool here, done;  // it has queries and columns, and neither a task nor one of these has rounded it; no key block will add to it any more
  bool written;     // or no key has been seen: then it is zero, and nothing was stored
  int queries, columns;  // from its first on, which rows points to
  int stride;            // columns of its sums
  T* rows;
  const float* sums;

  // kBeside: in a thread block beside those that compute. Each lane looks for itself.
  template <typename Shape, bool kBeside>
  static __device__ __forceinline__ RoundingChunk look(const BackwardArguments& arguments, int chunk) {
    using Sizes = RoundingSizes<Shape>;
    const HfFlash2ForwardParams& forward = arguments.params.forward;
    RoundingChunk found{};
    if (chunk >= arguments.query_blocks * Sizes::kOfTile) return found;
    const Workspace workspace(arguments.params, Shape::kBlockM, Shape::kDqColumns);
    const QueryBlock at(forward, Shape::kBlockM, chunk / Sizes::kOfTile);
    const int part = chunk % Sizes::kOfTile;
    const int first_query = at.number * Shape::kBlockM + (Shape::kDqByRows ? part : part % 2) * 32;
    const int first_column = Shape::kDqByRows ? 0 : part / 2 * 64;
    const Sequence q = find_sequence(forward.sequences_q, forward.batch, at.batch, forward.max_seqlen_q);
    found.queries = q.length - first_query, found.columns = forward.head_dim - first_column;
    found.here = found.queries > 0 && found.columns > 0, found.done = true;
    if constexpr (Shape::kStoresLone) found.here &= !is_stored_by_task<Shape>(forward, at.batch, q, at.number);
    if (!found.here) return found;

    if constexpr (kBeside) {
      found.done = have_all<Shape>(kAdded, arguments.params, arguments.groups, at.batch, at.head);
    } else {
      found.here = chunk >= workspace.rounded[chunk % (arguments.rounding_blocks * Sizes::kWarps)];
    }
    const int64_t tile = workspace.first_block(forward, at.batch, at.head, Shape::kBlockM) + at.number;
    found.written = *workspace.semaphore(tile) != 0;
    found.rows = token_pointer<T>(arguments.params.dq, at.batch, at.head, q.start + first_query) + first_column;
    found.stride = Shape::dq_columns(Shape::kDqByRows ? 0 : part / 2);
    found.sums = workspace.dq + (tile * Sizes::kOfTile + part) * Sizes::kFloats - part % 2 * 32 * (64 - found.stride);
    return found;
  }
};

// A warp's chunks: every `stride`-th from `chunk` on, of 32 that its lanes look at those before the first that is not done, `most` at once.
// PERF: by the copy engine, as what ordinary loads may have under way is limited by the L1 that shared memory leaves: 32 -> 60 GB/s a
// multiprocessor that rounds while others compute.
template <typename Shape, typename T>
struct Rounder {
  using Sizes = RoundingSizes<Shape>;
  const BackwardArguments& arguments;
  uint32_t base;      // of shared memory
  int chunk, stride;  // chunk: the first that has not been rounded
  uint32_t at = 0;    // how many have been
  static constexpr uint32_t kAll = 0xffffffffu;

  __device__ __forceinline__ Rounder(const BackwardArguments& arguments, uint32_t base, int block, int blocks)
      : arguments(arguments), base(base), chunk(threadIdx.x / 32 * blocks + block), stride(blocks * Sizes::kWarps) {
    if (threadIdx.x % 32 == 0) {
      for (int stage = 0; stage < Sizes::kStages; ++stage) mbarrier_init(full(stage), 1);
      mbarrier_init_fence();
    }
    __syncwarp();
  }

  __device__ __forceinline__ uint32_t slot(uint32_t i) const { return threadIdx.x / 32 * Sizes::kStages + i % Sizes::kStages; }
  __device__ __forceinline__ uint32_t buffer(uint32_t i) const { return base + slot(i) * Sizes::kBytes; }
  __device__ __forceinline__ uint32_t full(uint32_t i) const { return base + Sizes::kWarps * Sizes::kStages * Sizes::kBytes + slot(i) * 8; }
  __device__ __forceinline__ bool has_more() const { return chunk < arguments.query_blocks * Sizes::kOfTile; }

  // Returns false if the first is not done.
  template <bool kBeside>
  __device__ __forceinline__ bool round(int most) {
    const int lane = threadIdx.x % 32;
    const auto found = RoundingChunk<T>::template look<Shape, kBeside>(arguments, chunk + lane * stride);
    const uint32_t done = __ballot_sync(kAll, found.done);
    uint32_t end = ~done & (done + 1);  // a lane's bit, or 0 behind the last
    uint32_t chunks = __ballot_sync(kAll, found.here) & (end - 1), behind = chunks;
    for (int i = 0; i < most; ++i) behind &= behind - 1;
    if (behind != 0) end = behind & (0u - behind);
    chunks &= end - 1;
    chunk += (end == 0 ? 32 : __ffs(end) - 1) * stride;

    uint32_t rest = chunks;  // to be loaded
    const auto load = [&](uint32_t i) {
      __syncwarp();  // all have read what was there
      if (rest != 0 && lane == __ffs(rest) - 1) {
        const int bytes = min(32 * found.stride, Shape::dq_floats(found.queries, found.stride)) * 4;
        mbarrier_arrive_expect(full(i), bytes);
        bulk_load(buffer(i), found.sums, bytes, full(i));
      }
      rest &= rest - 1;
    };
    bulk_global_fence();  // what the copy engine added, and what semaphores say of it
    for (int i = 0; i < Sizes::kStages; ++i) load(at + i);
#pragma unroll 1
    for (; chunks != 0; chunks &= chunks - 1, ++at) {
      mbarrier_wait(full(at), at / Sizes::kStages & 1);
      const int owner = __ffs(chunks) - 1;
      const bool written = __shfl_sync(kAll, int{found.written}, owner) != 0;
      const int queries = __shfl_sync(kAll, found.queries, owner), columns = __shfl_sync(kAll, found.columns, owner);
      const int stride = __shfl_sync(kAll, found.stride, owner);
      T* const rows = reinterpret_cast<T*>(__shfl_sync(kAll, reinterpret_cast<unsigned long long>(found.rows), owner));
      uint32_t rounded[4][2][4];
      load_rounded(rounded, written, stride);
      load(at + Sizes::kStages);
      store(rounded, rows, queries, columns);
    }
    return end != 1;
  }

  // Parts are of 16 queries x 32 columns, of which there may be less: what is read behind them is not stored. A lane has rows r and r + 8 of each, and 8 columns: four vectors side by side, of two columns of both
  // rows. Lanes of other columns begin with another vector, so that they meet in no bank: element v is that of columns 2 (v + lane) % 8.
  __device__ __forceinline__ void load_rounded(uint32_t (&rounded)[4][2][4], bool written, int stride) const {
    const int row = threadIdx.x % 32 / 4, tile = threadIdx.x % 4;
    const float scale = arguments.params.forward.softmax_scale;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
#pragma unroll
      for (int v = 0; v < 4; ++v) {
        const uint4 x =
            load_shared_uint4(buffer(at) + ((part / 2 * (stride / 8) + part % 2 * 4 + tile) * 32 + row * 4 + (v + tile) % 4) * 16);
        const uint32_t low = pack<T>(__uint_as_float(x.x) * scale, __uint_as_float(x.y) * scale);
        const uint32_t high = pack<T>(__uint_as_float(x.z) * scale, __uint_as_float(x.w) * scale);
        rounded[part][0][v] = written ? low : 0, rounded[part][1][v] = written ? high : 0;
      }
    }
  }

  __device__ __forceinline__ void store(const uint32_t (&rounded)[4][2][4], T* rows, int queries, int columns) const {
    const int tile = threadIdx.x % 4;
#pragma unroll
    for (int part = 0; part < 4; ++part) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t (&x)[4] = rounded[part][half];
        const bool odd = tile & 1;
        const uint32_t y[4] = {odd ? x[3] : x[0], odd ? x[0] : x[1], odd ? x[1] : x[2], odd ? x[2] : x[3]};
        const uint4 in_order = tile & 2 ? make_uint4(y[2], y[3], y[0], y[1]) : make_uint4(y[0], y[1], y[2], y[3]);
        const int query = part / 2 * 16 + half * 8 + threadIdx.x % 32 / 4, column = part % 2 * 32 + tile * 8;
        if (query < queries && column < columns)
          *reinterpret_cast<uint4*>(rows + query * arguments.params.dq.token_stride + column) = in_order;
      }
    }
  }
};

// By the thread blocks behind those that compute, until nobody will take a task any more: what ends with the last tasks is for the last kernel,
// which has all multiprocessors. Waiting ends even if those that compute could not begin.
template <typename Shape, typename T>
__device__ __forceinline__ void round_beside_tasks(const BackwardArguments& arguments, uint32_t base) {
  static_assert(RoundingSizes<Shape>::kSharedBytes <= BackwardShared<Shape>::kBytes);
  constexpr int kMostAtOnce = 16, kMostLooks = 1 << 16;  // some 0.1 s
  const Workspace workspace(arguments.params, Shape::kBlockM, Shape::kDqColumns);
  const int tasks = arguments.count_units<Shape>() - (arguments.params.deterministic ? 0 : arguments.task_blocks);
  Rounder<Shape, T> rounder(arguments, base, blockIdx.x - arguments.task_blocks, arguments.rounding_blocks);
  const int number = rounder.chunk;
  wait_for_kernel_before();  // it clears the semaphores
  let_next_kernel_begin();
  for (int look = 0; look < kMostLooks && rounder.has_more(); ++look) {
    if (!__all_sync(0xffffffffu, semaphore_read(workspace.next_unit) < tasks)) break;
    if (rounder.template round<true>(kMostAtOnce))
      look = 0;
    else
      __nanosleep(500);
  }
  if (threadIdx.x % 32 == 0) workspace.rounded[number] = rounder.chunk;
}

// The last kernel: what is left, for all multiprocessors.
template <typename Shape, typename T>
__global__ void __launch_bounds__(Shape::kThreads) round_rest_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  Rounder<Shape, T> rounder(arguments, shared_address(memory), blockIdx.x, gridDim.x);
  wait_for_kernel_before();
  while (rounder.has_more()) rounder.template round<false>(32);
}

}  // namespace hf_flash2::sm90
