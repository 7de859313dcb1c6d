// Launch of the Hopper forward: tensor maps, tile order, grid, and the second kernel where keys are split.
#pragma once
#include "launch.h"
#include "sm90/combine.cuh"
#include "sm90/forward.cuh"
#include "sm90/run.h"
#include "sm90/tensor_map.h"

namespace hf_flash2::sm90 {

// Query heads whose rows share a tile: a whole group where that saves at least a tenth of the tiles (one query and a group of 8: 7 of 8),
// else 1. Fewer tiles also read K and V less often; a tenth leaves long prompts, which gain next to nothing, with whole heads in L2 order.
// Groups that do not divide the rows of a warpgroup stay apart, as do all under dropout, which is drawn for 16 queries of one head.
inline int choose_tile_heads(const HfFlash2ForwardParams& params, int block_rows) {
  const int group = params.heads_q / params.heads_k;
  if (64 % group != 0 || params.dropout_p > 0.f) return 1;
  const int64_t together = ceil_div(int64_t{params.max_seqlen_q} * group, block_rows);
  return together * 10 <= ceil_div(params.max_seqlen_q, block_rows) * group * 9 ? group : 1;
}

// Whether only the device knows how many queries, or keys, a sequence has.
inline bool is_ragged(const HfFlash2ForwardParams& params) { return have_lengths(params.sequences_q) || have_lengths(params.sequences_k); }

// What times are made of in choose_splits and choose_run.
constexpr double kTileTime = 1, kCombineTime = 1.1, kScratchBytes = 3e6;

// How many thread blocks share the key blocks of a tile: more than 1 where tiles are so few that multiprocessors have nothing to do, from
// the start or in a last round, and a tenth of the time is saved. Time is counted in blocks of 128 keys at d 128 (block_time: of one of these
// tiles), the constants are of an H200. A round over the multiprocessors takes those of one share, and kTileTime for its beginning and end;
// longer where two thirds of the multiprocessors read keys of their own, which is all that the memory gives. The second kernel takes
// kCombineTime, and one more for every kScratchBytes that go through memory. Only splits that fill a number of rounds can be best. Under a
// causal mask the tiles of a head are unequal: without splits they go in pairs where there are more than multiprocessors, and with splits they
// make no rounds: one, with all of them in it, may do.
// PERF: TUNING.md, "Splits and tile order", here and below.
inline int choose_splits(int query_blocks, int64_t heads, int key_blocks, double block_time, int64_t bytes_of_split, bool unequal,
                         int multiprocessors) {
  constexpr int kMostRounds = 4;
  const int64_t tiles = query_blocks * heads;
  if (tiles == 0) return 1;
  const auto time_of_rounds = [&](int64_t rounds, int share, int64_t blocks) {
    const double reading = query_blocks == 1 ? 1.5 * std::min<int64_t>(blocks, multiprocessors) / multiprocessors : 1.0;
    return rounds * (share * block_time * std::max(1.0, reading) + kTileTime);
  };
  int splits = 1;
  double least = unequal && tiles > multiprocessors ? (key_blocks + ceil_div(key_blocks, query_blocks)) * block_time + 2 * kTileTime
                                                    : time_of_rounds(ceil_div(tiles, multiprocessors), key_blocks, tiles);
  least *= 0.9;
  for (int rounds = 1; rounds <= (unequal ? 1 : kMostRounds); ++rounds) {
    const int64_t most = std::min<int64_t>(rounds * multiprocessors / tiles, key_blocks);
    if (most < 2) continue;
    const int share = static_cast<int>(ceil_div(key_blocks, most)), so_many = static_cast<int>(ceil_div(key_blocks, share));
    const double time = time_of_rounds(rounds, share, tiles * so_many) + kCombineTime + so_many * bytes_of_split / kScratchBytes;
    if (time < least) splits = so_many, least = time;
  }
  return splits;
}

// How many key blocks of the tiles that make no whole round each thread block takes (SharedTiles), or 0 where these are not shared: for equal
// tiles, one thread block on a multiprocessor, and where it saves a hundredth of the time, counted as above. A round takes all its
// multiprocessors as long as a tile takes one, however few tiles it has: of 2048 tiles at 132, as in the papers' shapes at d 128, the last 68.
// PERF: full at 4k to 16k 1 to 3 %.
template <typename Shape>
int choose_run(const HfFlash2ForwardParams& params, int64_t tiles, int key_blocks, double block_time, int multiprocessors) {
  const int rest = static_cast<int>(tiles % multiprocessors);
  if (!Shape::kSharesTiles || is_ragged(params) || params.window_left >= 0 || params.window_right >= 0 || rest == 0) return 0;
  const int run = static_cast<int>(ceil_div(int64_t{rest} * key_blocks, multiprocessors));
  const double whole = key_blocks * block_time + kTileTime;
  const double scratch_bytes = double(multiprocessors + rest) * Shape::kBlockM * (params.head_dim_v + 1) * 4;
  const double shared = run * block_time + 2 * kTileTime + kCombineTime + scratch_bytes / kScratchBytes;
  return whole - shared >= 0.01 * ceil_div(tiles, multiprocessors) * whole ? run : 0;
}

// Whether thread blocks take one tile after another from a counter, in place of an equal share each: where only the device knows how many
// there are, and under a causal mask where a head has many: then the long ones go first and the short fill up at the end, where pairs of equal
// work, which need no counter, may leave a last round nearly empty.
// PERF: ragged tiles to 2k, filled to 30 %, 39 % faster at d 128 than with a thread block for every one there may be; long dense ones 1 to 4 %.
// Below, d 128 loses 3 % at 1k.
inline bool wants_counter(const HfFlash2ForwardParams& params, int query_blocks) {
  constexpr int kMany = 16;
  return is_ragged(params) || (is_triangular(params) && query_blocks > kMany);
}

// Heads whose tiles take turns, in tiles' heads: their K and V stay in L2. PERF: 4 in place of 16 at d 128 causal, 16k, 4 %.
inline int choose_heads_at_once(const HfFlash2ForwardParams& params, int tile_heads) {
  const int64_t key_heads = heads_in_l2(int64_t{2} * params.max_seqlen_k * (params.head_dim + params.head_dim_v));
  return static_cast<int>(std::min(kMostHeadsAtOnce, key_heads * (params.heads_q / params.heads_k / tile_heads)));
}

static_assert(kMostDropout <= DropoutRate::kMost, "the Hopper kernels do not ask whether a rate keeps few");

// What is decided from shapes alone.
struct ForwardPlan {
  int tile_heads;
  int query_blocks;  // of one head, or of one group where its heads share tiles
  int heads;         // or groups, of the whole batch
  int splits;
  int resident;  // thread blocks, or clusters, that run at once
  bool counts_tiles;
  bool has_table;  // of query blocks: SequenceTable
  SharedTiles shared;

  template <typename Shape>
  static ForwardPlan make(const HfFlash2ForwardParams& params) {
    ForwardPlan plan;
    plan.tile_heads = choose_tile_heads(params, Shape::kBlockM);
    plan.query_blocks = ceil_div(int64_t{params.max_seqlen_q} * plan.tile_heads, Shape::kBlockM);
    plan.heads = params.heads_q / plan.tile_heads * params.batch;
    const int queries = std::min(params.max_seqlen_q, Shape::kBlockM / plan.tile_heads);
    const double block_time = Shape::kBlockN * (Shape::kHeadDim + Shape::kOutColumns) / (2.0 * 128 * 128);
    const int key_blocks = static_cast<int>(most_blocks_seen(params, params.max_seqlen_k, queries, Shape::kBlockN));
    const int workers = multiprocessors(params.device) / Shape::kColumnParts;  // where there is one on a multiprocessor
    plan.splits = choose_splits(plan.query_blocks, plan.heads, key_blocks, block_time, ForwardResults::share_bytes(params, 1),
                                is_triangular(params) && plan.query_blocks > 1, workers);
    check_count(plan.tiles() * plan.splits, "attention forward, sm90");
    plan.resident = workers * Shape::kBlocksPerSm;
    plan.counts_tiles = plan.splits == 1 && wants_counter(params, plan.query_blocks) && plan.tiles() > plan.resident;
    const bool usual = params.softcap == 0.f && params.dropout_p == 0.f && params.block_table == nullptr;
    plan.has_table = Shape::kHasListed && usual && plan.counts_tiles && have_lengths(params.sequences_q) &&
                     SequenceTable::pays(params.batch, plan.most_blocks(params, Shape::kBlockM), plan.heads / params.batch, plan.resident);
    const int run = plan.splits == 1 ? choose_run<Shape>(params, plan.tiles(), key_blocks, block_time, plan.resident) : 0;
    plan.shared = {run > 0 ? static_cast<int>(plan.tiles() % plan.resident) : 0, key_blocks, run};
    return plan;
  }

  int64_t tiles() const { return int64_t{query_blocks} * heads; }

  // Where tiles are counted: the workspace is their counter and, from kTableAt on, a table of query blocks.
  static constexpr int64_t kTableAt = 16;
  int most_blocks(const HfFlash2ForwardParams& params, int block_m) const {
    return SequenceTable::most_blocks(params.sequences_q, params.batch, query_blocks, int64_t{params.total_q} * tile_heads / block_m);
  }
  int64_t workspace_bytes(const HfFlash2ForwardParams& params, int block_m) const {
    if (shared.any()) return shared.slots() * int64_t{block_m} * (params.head_dim_v + 1) * 4;
    if (has_table) return kTableAt + SequenceTable::bytes(most_blocks(params, block_m));
    return splits > 1 ? ForwardResults::share_bytes(params, splits) : counts_tiles ? sizeof(int32_t) : 0;
  }
};

// Of pairs, those that make whole rounds over the thread blocks; the tiles of the others come one by one (for_each_tile). All of them, where that
// brings nothing: in a last round that is nearly whole, most thread blocks have two tiles anyway, and with several of them on a multiprocessor the
// others fill what one leaves. And where heads have an odd number of tiles, so that pairs are not all of one head.
// PERF: causal at 512 to 2k, d 128, last rounds of 100 of 132, 1 to 2 % faster; d 256, 116 of 132, -2 to 1 %; d 64, with three, level.
template <typename Shape>
int whole_pairs(int pairs, int query_blocks, int resident) {
  const int rest = pairs % resident;
  return Shape::kBlocksPerSm == 1 && query_blocks % 2 == 0 && rest * 5 <= resident * 4 ? pairs - rest : pairs;
}

namespace {  // each file has its own
// Before a forward that counts tiles.
__global__ void clear_counter_kernel(const __grid_constant__ ForwardArguments arguments) {
  let_next_kernel_begin();
  if (threadIdx.x == 0) *arguments.next_tile = 0;
}

// The same, where it has a table.
constexpr int kListThreads = 1024;
template <int kBlockM>
__global__ void __launch_bounds__(kListThreads) list_tiles_kernel(const __grid_constant__ ForwardArguments arguments) {
  let_next_kernel_begin();
  if (threadIdx.x == 0) *arguments.next_tile = 0;
  const HfFlash2ForwardParams& params = arguments.params;
  const int first_batch = arguments.begins_with_longest() ? find_longest(params.sequences_k, params.batch, params.max_seqlen_k) : 0;
  arguments.table.make<kListThreads>(arguments.most_blocks, arguments.counted_sequences<kBlockM>(first_batch));
}
}  // namespace

template <typename Shape, typename T>
void launch_combine(const HfFlash2ForwardParams& params, int splits) {
  CombineArguments arguments{params, ForwardResults::of_shares(params, splits), splits, 1};
  while (arguments.ways < kCombineWarps && arguments.ways * kSharesAtOnce < splits) arguments.ways *= 2;
  const int64_t rows = int64_t{params.batch} * params.heads_q * params.max_seqlen_q;
  launch<combine_kernel<Shape::kTaskOutColumns, T>>(arguments, ceil_div(rows, kCombineWarps / arguments.ways), kCombineThreads, 0,
                                                    params.device, params.stream, "attention forward, sm90, combine", Start::kEarly);
}

template <typename Shape, typename T>
void launch_forward(const HfFlash2ForwardParams& params) {
  const ForwardPlan plan = ForwardPlan::make<Shape>(params);
  const int tile_heads = plan.tile_heads, splits = plan.splits;

  ForwardArguments arguments;
  const bool paged = params.block_table != nullptr;
  const SequenceRows queries = SequenceRows::of_queries(params), keys = SequenceRows::of_keys(params);
  const auto map_of_keys = [&](const HfFlash2Tensor& tensor, int head_dim) {
    return paged ? make_tensor_map(tensor, params.dtype, head_dim, keys.rows, params.heads_k, Shape::kBlockN)
                 : make_sequence_map(tensor, params.dtype, head_dim, keys, params.heads_k, Shape::kBlockN);
  };
  const auto map_of_queries = [&](const HfFlash2Tensor& tensor, int head_dim, int tile_rows) {
    return make_sequence_map_heads_first(tensor, params.dtype, head_dim, queries, params.heads_q, tile_rows, tile_heads);
  };
  arguments.q = map_of_queries(params.q, params.head_dim, Shape::kBlockM / Shape::kQueryParts);
  arguments.out = map_of_queries(params.out, params.head_dim_v, 64);
  arguments.k = map_of_keys(params.k, params.head_dim), arguments.v = map_of_keys(params.v, params.head_dim_v);
  arguments.zero_queries = make_zero_map(params.q, params.dtype, Shape::kBlockM / Shape::kQueryParts);
  arguments.zero_keys = make_zero_map(params.k, params.dtype, Shape::kBlockN);
  arguments.map_rows_q = queries.longest, arguments.map_rows_k = keys.longest;
  arguments.params = params;
  arguments.cap = ScoreCap::of(params);
  arguments.dropout = DropoutRate::of(params.dropout_p);
  arguments.tile_heads_log2 = __builtin_ctz(tile_heads);

  // As many thread blocks as run at once. Causal work grows with the row: where tiles have to wait, pairs of them are equal work, and of those
  // from a counter the long ones come first.
  // PERF: that few tiles are no pairs: 20 %; that they go back: d 64 6 to 9 %.
  arguments.heads = Divisor::of(params.heads_q / tile_heads);
  arguments.group = Divisor::of(params.heads_q / params.heads_k);
  arguments.splits = Divisor::of(splits);
  arguments.results = splits > 1 ? ForwardResults::of_shares(params, splits) : ForwardResults::of(params);
  const bool pairs = splits == 1 && !plan.counts_tiles && plan.tiles() > plan.resident;
  const bool unequal = is_triangular(params) && plan.query_blocks > 1;
  const TileOrder order = !unequal ? TileOrder::kByHead : pairs ? TileOrder::kPairs : TileOrder::kLastBlockFirst;
  arguments.scheduler = TileScheduler::make(order, plan.query_blocks, plan.heads, choose_heads_at_once(params, tile_heads));
  if (order == TileOrder::kLastBlockFirst && splits == 1 && !plan.counts_tiles)
    arguments.scheduler.go_back(plan.resident / Shape::kBlocksPerSm);
  arguments.next_tile = nullptr, arguments.table = {nullptr};
  Start start = Start::kInOrder;
  if (plan.counts_tiles) {
    arguments.next_tile = static_cast<int32_t*>(params.workspace);
    arguments.most_blocks = plan.most_blocks(params, Shape::kBlockM);
    if (plan.has_table) arguments.table = {reinterpret_cast<int2*>(static_cast<char*>(params.workspace) + ForwardPlan::kTableAt)};
    auto* clear = launch<clear_counter_kernel, ForwardArguments>;
    if constexpr (Shape::kHasListed) {
      if (plan.has_table) clear = launch<list_tiles_kernel<Shape::kBlockM>, ForwardArguments>;
    }
    clear(arguments, 1, plan.has_table ? kListThreads : 32, 0, params.device, params.stream, "attention forward, sm90, counter",
          Start::kInOrder, 0, false);
    start = Start::kEarly;
  }
  const int units = static_cast<int>(arguments.scheduler.units() * splits);
  const int64_t blocks = pairs || plan.shared.any() ? plan.resident : std::min(units, plan.resident);
  arguments.whole_units =
      order == TileOrder::kPairs ? whole_pairs<Shape>(units, plan.query_blocks, plan.resident) : units - plan.shared.tiles;
  arguments.shared = plan.shared;
  arguments.shared.out = static_cast<float*>(params.workspace);
  arguments.shared.lse = arguments.shared.out + int64_t{plan.shared.slots()} * Shape::kBlockM * params.head_dim_v;
  const int shared_bytes = may_have_gaps(params) ? ForwardShared<Shape>::kBytesWithGaps : Shape::kSharedBytes;
  auto compute = launch<forward_kernel<Shape, T, ForwardExtra::kNone>, ForwardArguments, Shape::kColumnParts>;
  const bool capped = params.softcap > 0.f;
  if constexpr (Shape::kHasCapped) {
    if (capped) compute = launch<forward_kernel<Shape, T, ForwardExtra::kCapped>, ForwardArguments>;
  }
  if constexpr (Shape::kHasPaged) {
    if (paged && !capped) compute = launch<forward_kernel<Shape, T, ForwardExtra::kPaged>, ForwardArguments>;
    if constexpr (Shape::kHasCapped) {
      if (paged && capped) compute = launch<forward_kernel<Shape, T, ForwardExtra::kPagedCapped>, ForwardArguments>;
    }
  }
  if constexpr (Shape::kHasDropout) {
    if (params.dropout_p > 0.f) compute = launch<forward_kernel<Shape, T, ForwardExtra::kDropout>, ForwardArguments>;
  }
  if constexpr (Shape::kHasListed) {
    if (plan.has_table) compute = launch<forward_kernel<Shape, T, ForwardExtra::kListed>, ForwardArguments>;
  }
  compute(arguments, blocks * Shape::kColumnParts, Shape::kThreads, shared_bytes, params.device, params.stream, "attention forward, sm90",
          start, ForwardShared<Shape>::kBytesWithGaps, false);
  if (splits > 1) launch_combine<Shape, T>(params, splits);
  if constexpr (Shape::kSharesTiles) {
    launch<combine_pieces_kernel<Shape, T>>(arguments, ceil_div(int64_t{plan.shared.tiles} * Shape::kBlockM, kCombineWarps),
                                            kCombineThreads, 0, params.device, params.stream, "attention forward, sm90, combine",
                                            Start::kEarly);
  }
}

template <int kHeadDim>
constexpr bool kIsBetween = kHeadDim > 64 && kHeadDim < 128;  // d 80 and 96

// At d 96 and 128: whether large tiles of 128 rows would be so empty that small ones are faster. Packed sequences of which half, or under a causal
// mask three quarters, of the longest is the average fill them nearly as a dense batch does.
template <int kHeadDim>
bool fills_few_rows(const HfFlash2ForwardParams& params) {
  if (choose_tile_heads(params, 128) > 1) return false;  // rows of a group together fill them
  const bool triangle = is_triangular(params), ragged_queries = have_lengths(params.sequences_q);
  const int longest = std::max(params.max_seqlen_q, params.max_seqlen_k);
  const int64_t quarters = int64_t{params.batch} * params.max_seqlen_q * (triangle ? 3 : 2);
  const bool alike = params.sequences_q.cu_seqlens != nullptr && int64_t{params.total_q} * 4 >= quarters;
  if (!is_ragged(params) || (kIsBetween<kHeadDim> && alike)) {
    const auto covered = [&](int block) { return ceil_div(params.max_seqlen_q, block) * block; };
    const bool fewer_rows = covered(64) * 8 <= covered(128) * 7;
    return longest <= 448 && (kHeadDim == 128 && triangle ? longest > 192 : fewer_rows);
  }
  if (kIsBetween<kHeadDim>) return longest <= (ragged_queries ? 512 : 256);
  return longest <= (triangle ? 512 : !ragged_queries ? 0 : alike ? 128 : 256);
}

// Of head dims that have small tiles: see tiles.h. What counts are the tiles that rows fill: of few keys, of sequences shorter than the longest, or of
// rows that make no whole tiles of 128, small ones have less to compute, and more of them wait at a time for what they load.
// PERF: ragged batches 1.1 to 2.3 times as fast to 512, windows of 128 keys 1.1 to 1.4 times. TUNING.md, "Forward tiles".
template <int kHeadDim>
TileSize choose_tile_size(const HfFlash2ForwardParams& params) {
  if (params.block_table != nullptr) return kPagedTiles<kHeadDim>;
  if (params.dropout_p > 0.f && (kIsBetween<kHeadDim> || kHeadDim == 128)) return kHeadDim == 80 ? TileSize::kMedium : TileSize::kLarge;
  const bool triangle = is_triangular(params), windowed = params.window_left >= 0 && params.window_right >= 0;
  const bool ragged = is_ragged(params);
  const int64_t seen = most_blocks_seen(params, params.max_seqlen_k, 1, 1);  // keys of a query, at most
  const bool few_queries = int64_t{params.max_seqlen_q} * (params.heads_q / params.heads_k) <= 64;
  const int64_t tiles = (few_queries ? params.heads_k : ceil_div(params.max_seqlen_q, 64) * params.heads_q) * int64_t{params.batch};
  const int at_once = multiprocessors(params.device);
  constexpr int kShort = 2048;
  if (kHeadDim == 64) {
    const bool small = (triangle && params.max_seqlen_q <= kShort) || few_queries || seen <= (ragged || windowed ? 1024 : 320);
    return small ? TileSize::kSmall : TileSize::kLarge;
  }
  if (kIsBetween<kHeadDim> || kHeadDim == 128) {
    const bool few = kIsBetween<kHeadDim> ? tiles <= (triangle && !few_queries ? 2 : 1) * at_once : few_queries || tiles <= at_once;
    if (few || (windowed && seen <= 256) || fills_few_rows<kHeadDim>(params)) return TileSize::kSmall;
    if (kHeadDim == 80) {
      const auto covered = [&](int block) { return ceil_div(params.max_seqlen_q, block) * block; };
      const bool emptier = !ragged && covered(192) * 8 > covered(128) * 9;
      return emptier || (triangle && params.max_seqlen_q <= kShort / 2) ? TileSize::kMedium : TileSize::kLarge;
    }
    const bool medium = kHeadDim == 128 && std::max(params.max_seqlen_q, params.max_seqlen_k) <= (ragged ? 1024 : 256);
    return medium ? TileSize::kMedium : TileSize::kLarge;
  }
  if (kHeadDim == 512) return tiles * 5 <= at_once * 2 || few_queries ? TileSize::kSmall : TileSize::kLarge;
  const auto covered = [&](int block) { return ceil_div(params.max_seqlen_k, block) * block; };
  const bool closer = covered(ForwardTile<256, TileSize::kSmall>::kBlockN) * 21 <= covered(ForwardTile<256>::kBlockN) * 20;
  const bool small = (triangle && params.max_seqlen_q <= kShort) || closer || params.softcap > 0.f || params.dropout_p > 0.f;
  return small ? TileSize::kSmall : TileSize::kLarge;
}

// Calls f(shape) with the tiles for this call.
template <int kHeadDim, typename F>
auto with_forward_shape(const HfFlash2ForwardParams& params, const F& f) {
  if constexpr (kForwardHasSmall<kHeadDim>) {
    const TileSize size = choose_tile_size<kHeadDim>(params);
    if (size == TileSize::kSmall) return f(ForwardShape<kHeadDim, TileSize::kSmall>{});
    if constexpr (kForwardHasMedium<kHeadDim>) {
      if (size == TileSize::kMedium) return f(ForwardShape<kHeadDim, TileSize::kMedium>{});
    }
  }
  if constexpr (kHeadDim == 192) {
    if (params.head_dim_v <= 128) return f(ForwardShape<kHeadDim, TileSize::kLarge, 128>{});
  }
  return f(ForwardShape<kHeadDim, TileSize::kLarge>{});
}

template <int kHeadDim, typename T>
int64_t forward_workspace_bytes(const HfFlash2ForwardParams& params) {
  return with_forward_shape<kHeadDim>(params, [&](auto shape) {
    using Shape = decltype(shape);
    return ForwardPlan::make<Shape>(params).workspace_bytes(params, Shape::kBlockM);
  });
}

template <int kHeadDim, typename T>
void run_forward(const HfFlash2ForwardParams& params) {
  with_forward_shape<kHeadDim>(params, [&](auto shape) { launch_forward<decltype(shape), T>(params); });
}

}  // namespace hf_flash2::sm90
