// The loader of the Hopper forward, one thread: finds the tiles, hands them over and keeps the rings of K and V filled.
// PERF: each thread block loads for itself. K and V by multicast to a cluster of two lost 6 to 24 %: a stage is free only when both thread blocks
// are done with it. What else was tried for the first loads of a tile, which take 1,000 to 4,000 cycles: TUNING.md, "Loader of the forward".
#pragma once
#include "attention/pages.cuh"
#include "device/tma.cuh"
#include "sm90/forward_parts.cuh"

namespace hf_flash2::sm90 {

// What a forward does beside the usual, in a kernel of its own, which leaves the code of the other as it is.
enum class ForwardExtra { kNone, kCapped, kPaged, kDropout, kPagedCapped, kListed };  // kListed: with a table of its tiles

template <ForwardExtra kExtra>
constexpr bool kIsPaged = kExtra == ForwardExtra::kPaged || kExtra == ForwardExtra::kPagedCapped;
template <ForwardExtra kExtra>
constexpr bool kIsCapped = kExtra == ForwardExtra::kCapped || kExtra == ForwardExtra::kPagedCapped;

// first_batch: the sequence that comes first; at: that of the first tile, where there is a table.
template <typename Shape, ForwardExtra kExtra>
__device__ __forceinline__ void load_tiles(const ForwardArguments& arguments, const ForwardShared<Shape>& shared, int first_batch,
                                           CountedSequence at) {
  constexpr int kStages = Shape::kStages, kUnrolled = Shape::kTaskOutColumns > 256 ? 1 : 4;  // registers
  const HfFlash2ForwardParams& params = arguments.params;
  const bool packed = params.sequences_q.cu_seqlens != nullptr;
  const int first_panel = Shape::first_panel();
  int use = 0, tiles = 0;  // key blocks loaded and tiles handed over so far

  const auto hand_over = [&](const ForwardTask& task) {
    mbarrier_wait(shared.q_empty(tiles, 0), shared.q_parity(tiles) ^ 1);
    task.store(shared.task(tiles));
    mbarrier_arrive(shared.task_full(tiles));
    return tiles++;
  };
  const auto load_queries = [&](const ForwardTask& task, int tile, int map_batch) {
    for (int part = 0; part < Shape::kQueryParts; ++part) {
      const uint32_t full = shared.q_full(tile, part);
      if (part > 0) mbarrier_wait(shared.q_empty(tile, part), shared.q_parity(tile) ^ 1);
      mbarrier_arrive_expect(full, Shape::kPanels * Shape::kQueryPartBytes);
      int row = arguments.map_rows_q - task.q.length + task.query_begin(arguments, part * (Shape::kBlockM / Shape::kQueryParts));
      if constexpr (Shape::kQueryParts > 1) row = min(row, arguments.map_rows_q - 1);  // no box may be all outside
#pragma unroll kUnrolled
      for (int panel = 0; panel < Shape::kPanels; ++panel) {
        const uint32_t to = shared.q(tile) + panel * Shape::kQueryPanelBytes + part * Shape::kQueryPartBytes;
        const int column = (first_panel + panel) * 64;
        const CUtensorMap* map = column == 0 || column < params.head_dim ? &arguments.q : &arguments.zero_queries;
        tma_load<Shape::kStreams>(to, map, full, column, task.head, row, task.q.start + task.q.length, map_batch);
      }
    }
  };

  const auto load = [&](int query_block, int batch_head, int split, const Piece& piece) {
    const ForwardTask task = ForwardTask::make<Shape::kBlockM, Shape::kBlockN>(arguments, query_block, batch_head, split, piece);
    if (task.query_begin(arguments) >= task.q.length) return;
    if (task.key_block_begin == task.key_block_end) {
      // For all parts first: a warpgroup does not wait for Q of such a tile, and may have done with it before the loader asks.
      for (int part = 1; part < Shape::kQueryParts; ++part) mbarrier_wait(shared.q_empty(tiles, part), shared.q_parity(tiles) ^ 1);
      const int tile = hand_over(task);
      for (int part = 0; part < Shape::kQueryParts; ++part) mbarrier_arrive(shared.q_full(tile, part));
      return;
    }
    const int head_k = arguments.group.quotient(task.head), map_batch = packed ? 0 : task.batch;
#pragma unroll 1
    for (int block = task.key_block_end - 1; block >= task.key_block_begin; --block, ++use) {
      const int stage = use % kStages, released = (use / kStages & 1) ^ 1;
      [[maybe_unused]] const int row = arguments.map_rows_k - task.k.length + block * Shape::kBlockN, end = task.k.start + task.k.length;
      [[maybe_unused]] KeyPlace page;
      if constexpr (kIsPaged<kExtra>)
        page = find_key(params.block_table, params.block_table_stride, params.page_size, task.batch, block * Shape::kBlockN);
      const auto load_panels = [&](uint32_t tile, const CUtensorMap* map, uint32_t full, int panels, int columns) {
#pragma unroll kUnrolled
        for (int panel = 0; panel < panels; ++panel) {
          const uint32_t to = tile + panel * Shape::kKeyPanelBytes;
          const int column = (first_panel + panel) * 64;
          if constexpr (kIsPaged<kExtra>)
            tma_load(to, map, full, column, page.token, head_k, page.page);
          else
            tma_load(to, column == 0 || column < columns ? map : &arguments.zero_keys, full, column, row, end, head_k, map_batch);
        }
      };
      mbarrier_wait(shared.k_empty(stage), released);
      mbarrier_arrive_expect(shared.k_full(stage), Shape::kKeyBytes);
      load_panels(shared.k(stage), &arguments.k, shared.k_full(stage), Shape::kPanels, params.head_dim);
      if (block == task.key_block_end - 1) load_queries(task, hand_over(task), map_batch);
      mbarrier_wait(shared.v_empty(stage), released);
      mbarrier_arrive_expect(shared.v_full(stage), Shape::kValueBytes);
      load_panels(shared.v(stage), &arguments.v, shared.v_full(stage), Shape::kValuePanels, params.head_dim_v);
    }
  };
  uint32_t taken = 0;  // from the counter so far
  const auto first = [&] { return gridDim.x / Shape::kColumnParts; };
  const auto take = [&] { return take_unit<Shape::kColumnParts>(shared, arguments.next_tile, first, taken); };
  if constexpr (kExtra == ForwardExtra::kListed) {
    for_each_listed_tile<Shape::kBlockM, Shape::kColumnParts>(arguments, at, take, load);
  } else {
    // PERF: two loops. In one, the d 64 and 128 kernels that do not count lost 3 to 5 % at 512 and 1k: what precedes the loads of a tile
    // delays it.
    if (arguments.next_tile != nullptr)
      for_each_counted_tile<Shape::kBlockM, Shape::kColumnParts>(arguments, first_batch, take, load);
    else
      for_each_tile<Shape::kConsumers == 3, Shape::kSharesTiles, Shape::kColumnParts>(arguments, load);
  }
  hand_over(ForwardTask::none());
}

}  // namespace hf_flash2::sm90
