// Launch of the Hopper backward: preprocess, main kernel, conversion of the gradients; tensor maps, the order of key blocks, whether they keep it
// at each tile of dQ, and whether the query heads of a group are split among tasks.
#pragma once
#include <cmath>

#include "attention/preprocess.cuh"
#include "attention/sinks.cuh"
#include "launch.h"
#include "sm90/backward.cuh"
#include "sm90/backward_convert.cuh"
#include "sm90/backward_short_launch.cuh"
#include "sm90/backward_wide.cuh"
#include "sm90/run.h"
#include "sm90/tensor_map.h"

namespace hf_flash2::sm90 {

// Whether heads are so long that tasks, causal ones, had better have several of a group, in an order and with stages of dQ that keep these
// together: with one head each, 32k tokens and 64 heads leave 1 GB of shares of dK and dV.
// PERF: 32/8 heads at 16k 0 to 2 %, 64/8 0 to 1, both at 32k 3 to 7, padded 8 to 10; at 24k 0.5 % slower. At 16k slower: d 96 5 %, padded 3.
// TUNING.md, "Groups split among tasks".
inline bool has_very_long_heads(const HfFlash2ForwardParams& params) {
  const int very_long = params.head_dim > 96 && !have_lengths(params.sequences_k) ? 16384 : 32768;
  return params.head_dim > 64 && params.head_dim <= 128 && params.max_seqlen_q >= very_long;
}

// Among how many tasks the query heads of a group are split: a divisor of them, more than 1 where tasks are so few, or some so long, that
// multiprocessors have nothing to do. Time is counted in query blocks of a task; the constants are estimates for an H200 at d 128. A task
// takes those of its heads, and kTaskTime for its beginning and end. Equal tasks go in rounds over the multiprocessors; unequal ones, the long
// first, end together if none is longer than what each multiprocessor has. Splits cost kSumTime for the sum of their shares, and kShareTime
// for each share that a multiprocessor leaves; a twentieth of the time has to be saved.
// Long causal tasks have at most most_heads heads: those that run at once drift apart over more, and L2 does not hold what they read and add.
// In order (deterministic mode), below a diagonal, the long tasks of a head come last (choose_order): each has one query head.
// PERF: 64/8 heads of 128 at 1k, 2k, 4k, 16k, TFLOP/s: 262 345 477 549 -> 353 473 562 585 (64/64 heads 357 493 575 570); 31 to 37 % for 32/8. In
// order 2 to 8 %, 32/8 heads of 256 23 to 30. TUNING.md, "Groups split among tasks", also for what was tried.
inline int choose_group_splits(const HfFlash2ForwardParams& params, bool in_order, int block_m, int block_n, int multiprocessors) {
  constexpr double kTaskTime = 3, kShareTime = 3, kSumTime = 1;
  constexpr int kLongTask = 1024, kManyShares = 16384;
  const bool others = params.head_dim <= 64 || params.head_dim > 128, very_long = has_very_long_heads(params);
  const int most_heads = others || very_long ? 4 : params.max_seqlen_q < kManyShares ? 2 : 1;
  const int most_shares = very_long || most_heads == 1 ? 8 : 4;  // for most_heads' sake
  const int group = params.heads_q / params.heads_k;
  if (in_order && params.window_right >= 0) return group;
  const bool packed = params.sequences_k.cu_seqlens != nullptr;
  const int64_t key_blocks = packed ? ceil_div(params.total_k, block_n) : params.batch * ceil_div(params.max_seqlen_k, block_n);
  const double tasks = static_cast<double>(key_blocks * params.heads_k) / multiprocessors;  // for each of them
  const double longest = static_cast<double>(most_blocks_seen(params, params.max_seqlen_q, block_n, block_m) * group);
  const double length = packed ? static_cast<double>(params.total_q) / (static_cast<double>(params.batch) * params.max_seqlen_q) : 1;
  const double average = longest * (is_triangular(params) ? 0.5 : 1) * length;
  if (!(tasks * average > 0)) return 1;
  int splits = 1;
  if (is_triangular(params) && params.max_seqlen_q >= kLongTask) {
    for (int n = 2; n <= most_shares && group / splits > most_heads; ++n) splits = group % n == 0 ? n : splits;
  }
  double least = 0;
  for (int n = splits; n <= group; ++n) {
    if (group % n != 0) continue;
    double time = average < longest ? std::max(longest / n + kTaskTime, tasks * n * (average / n + kTaskTime))
                                    : std::ceil(tasks * n) * (longest / n + kTaskTime);
    time += n > 1 ? tasks * n * kShareTime + kSumTime : 0;
    if (least == 0) least = time * 0.95;
    if (time < least) splits = n, least = time;
  }
  return splits;
}

// How many key heads, counted over the batch, keep their groups whole, though the others, the last, are split among tasks of one query head each;
// zero where all are split alike. Whole groups leave no shares, and a task of several heads begins once; but they take long, and multiprocessors
// would wait for the last of them: those of one and a half rounds are split. Of very long heads groups of four, to 24k.
// PERF: groups of 2 to 4 1 to 4 %, of 5 and 7 1 to 21; at 16k 32/8 0 to 1. TUNING.md, "Groups split among tasks", also for where not.
template <typename Shape>
int choose_whole_groups(const HfFlash2ForwardParams& params, int multiprocessors) {
  constexpr double kSplitRounds = 1.5;
  constexpr int kShortest = 1024, kLong = 4096, kTooLong = 24576, kMostHeads = 7, kVeryLongGroup = 4;
  const int group = params.heads_q / params.heads_k, key_heads = params.heads_k * params.batch;
  const int seqlen = std::min(params.max_seqlen_q, params.max_seqlen_k);
  if (Shape::kHeadDim != 128 || !is_triangular(params) || have_lengths(params.sequences_k)) return 0;
  if (group == 1 || group > kMostHeads || seqlen < kShortest) return 0;
  if (has_very_long_heads(params) && (group != kVeryLongGroup || params.max_seqlen_q >= kTooLong)) return 0;
  const double key_blocks = static_cast<double>(ceil_div(params.max_seqlen_k, Shape::kBlockN));
  const int64_t split = std::max<int64_t>(1, std::lround(kSplitRounds * multiprocessors / key_blocks));
  return seqlen >= kLong || key_heads >= 4 * split ? static_cast<int>(std::max<int64_t>(0, key_heads - split)) : 0;
}

// Whether a call is long enough for the kernel with code for rounding beside (Rounds), also where nothing is rounded there.
inline bool has_many_tasks(int64_t tasks, int multiprocessors) { return tasks >= int64_t{4} * multiprocessors; }

// How many multiprocessors round dQ while the others compute (rounding.cuh), so that they keep up: a tile takes them kRoundingTime, the others
// one for each key block that comes to it. None where half of one would do. Not for few tasks: what ends with the last is not rounded there.
// Nor in padded batches above d 64, where zeros are in the way of both (to 1k, 4k, 8k 1 to 3 % slower with some, to 2k level), and behind whole
// groups (0 to 2 %).
// PERF: one multiprocessor rounds 60 GB of sums a second, all of them, in the last kernel, 2500: memory's limit. 1 to 8 %, the shorter the more.
// TUNING.md, "dQ rounded beside", also for what was tried; of split groups "Groups split among tasks".
template <typename Shape>
int choose_rounding_blocks(const HfFlash2ForwardParams& params, int multiprocessors) {
  constexpr double kRoundingTime = 0.21;  // of a tile, in that of a query block of a task
  constexpr int kMost = Workspace::kMostRoundingWarps / RoundingSizes<Shape>::kWarps;
  if (Shape::kHeadDim > 64 && params.sequences_k.ranges != nullptr) return 0;
  const bool packed = params.sequences_k.cu_seqlens != nullptr;
  const double keys = packed ? static_cast<double>(params.total_k) / params.batch : params.max_seqlen_k;
  const double longest =
      std::min<double>(keys / Shape::kBlockN, most_blocks_seen(params, params.max_seqlen_k, Shape::kBlockM, Shape::kBlockN));
  const double key_blocks = std::max(1.0, is_triangular(params) ? (longest + 1) / 2 : longest);
  return std::min(kMost, static_cast<int>(std::lround(kRoundingTime * multiprocessors / key_blocks)));
}

// Whether so many query blocks see the first key block alone that the kernel with code for them pays (StoresLone).
// PERF: causal, at 256, 384, 512 d 64 157 206 258 -> 164 209 256, d 128 167 225 287 -> 182 234 295. TUNING.md, "dQ of one task".
template <typename Shape>
bool has_many_lone(const HfFlash2BackwardParams& params) {
  constexpr int kShort = Shape::kHeadDim > 64 ? 512 : 384, kShortPadded = Shape::kHeadDim > 64 ? 2048 : 1024;
  return is_triangular(params.forward) && params.forward.max_seqlen_k <= (may_have_gaps(params) ? kShortPadded : kShort);
}

// Whether tasks had better add to dQ in order, as in deterministic mode, where nobody asks for that: then, among how many of them the query heads
// of a group are split, else 0. Above head dim 128 nothing need clear the accumulator then, and the last kernel begins with the tiles that all have
// added to; but they wait for each other, the longer a head is, and the more of them work on one. So: for short sequences, and where each
// cluster has heads of its own, in as few splits as that takes, as each costs; none of one query head each, nor of many.
// PERF: causal at 512, 1k, 2k, d 256 180 306 411 -> 215 327 425 TFLOP/s, at 4k 1 % slower; with groups 1 to 37 %. Slower: fewer heads than
// clusters, splits of one head each, tasks of many. TUNING.md, "In order though nobody asks".
template <typename Shape>
int choose_splits_in_order(const HfFlash2ForwardParams& params) {
  constexpr int kShort = 2048, kShortSplit = 1024, kShortFull = 768, kShortFullGroup = 128;
  const bool full = params.window_left < 0 && params.window_right < 0;
  if (Shape::kHeadDim <= 128 || Shape::kColumnParts > 1 || !(full || is_triangular(params))) return 0;
  const int group = params.heads_q / params.heads_k, clusters = multiprocessors(params.device) / Shape::kCluster;
  // And for long heads of 256 with all keys, however many. PERF: at 8k and 16k 554 551 -> 579 588.
  constexpr int kLongFull = 8192;
  if (Shape::kHeadDim == 256 && full && group == 1 && !have_lengths(params.sequences_k) &&
      std::min(params.max_seqlen_q, params.max_seqlen_k) >= kLongFull)
    return 1;
  const int seqlen = std::max(params.max_seqlen_q, params.max_seqlen_k), most_heads = seqlen <= 512 ? 4 : 2;  // a task
  for (int splits = 1; splits == 1 || splits < group; ++splits) {
    if (group % splits != 0 || group / splits > most_heads) continue;
    if (int64_t{16} * params.heads_k * splits * params.batch < int64_t{15} * clusters) continue;
    const int longest = full ? (group > 1 ? kShortFullGroup : kShortFull) : (splits > 1 ? kShortSplit : kShort);
    return seqlen <= longest ? splits : 0;
  }
  return 0;
}

// What is decided from shapes alone.
struct BackwardPlan {
  bool in_order;         // key blocks add to a tile of dQ one after the other
  int splits, whole;     // of a group's query heads, and for how many key heads not: GroupSplits
  int64_t rest;          // the other key heads, counted over the batch
  int64_t key_blocks;    // of one head: GroupSplits::blocks
  int64_t parts;         // of all sequences
  int64_t share_blocks;  // thread blocks that add shares
  int64_t units;         // tasks there may be, as the scheduler counts them
  bool may_round;        // by the kernel for that (Rounds)
  bool stores_lone;      // by the kernel for short sequences (StoresLone)
  bool has_table;        // of key blocks, as that takes one where only the device knows them: SequenceTable
  int most_blocks;       // that may stand there
  int64_t table_at;      // bytes of the workspace before it
  int64_t shares_at;     // and before the shares of dK and dV
  int64_t workspace_bytes;

  template <typename Shape>
  static BackwardPlan make(const HfFlash2BackwardParams& backward) {
    const HfFlash2ForwardParams& params = backward.forward;
    BackwardPlan plan;
    const int splits_in_order = backward.deterministic ? 0 : choose_splits_in_order<Shape>(params);
    plan.in_order = backward.deterministic || splits_in_order > 0;
    const int64_t query_tiles = ceil_div(params.max_seqlen_q, Shape::kBlockM) * params.heads_q * params.batch;
    check_count(query_tiles * Shape::kDqPieces * 2, "attention backward, sm90");  // chunks: rounding.cuh
    plan.whole = plan.in_order ? 0 : choose_whole_groups<Shape>(params, multiprocessors(params.device));
    if (splits_in_order > 0)
      plan.splits = splits_in_order;
    else if (plan.whole > 0)
      plan.splits = params.heads_q / params.heads_k;
    else
      plan.splits =
          choose_group_splits(params, plan.in_order, Shape::kBlockM, Shape::kBlockN, multiprocessors(params.device) / Shape::kColumnParts);
    plan.rest = int64_t{params.heads_k} * params.batch - plan.whole;
    plan.key_blocks = GroupSplits::count_blocks(params, Shape::kBlockN);
    plan.parts = plan.whole + plan.rest * plan.splits;
    check_count(ceil_div(params.max_seqlen_k, Shape::kBlockN) * plan.parts, "attention backward, sm90");
    const int64_t of_longest = ceil_div(params.max_seqlen_k, Shape::kTaskKeys);
    plan.most_blocks = SequenceTable::most_blocks(params.sequences_k, params.batch, of_longest, params.total_k / Shape::kTaskKeys);
    plan.units = of_longest * plan.parts;
    plan.may_round = Shape::kHeadDim <= 128 && params.softcap == 0.f && params.dropout_p == 0.f &&
                     has_many_tasks(plan.units, multiprocessors(params.device));
    plan.stores_lone = plan.may_round && has_many_lone<Shape>(backward);
    plan.has_table = plan.stores_lone && have_lengths(params.sequences_k);
    plan.workspace_bytes = Workspace::bytes(params, Shape::kBlockM, Shape::kDqColumns);
    plan.table_at = ceil_div(plan.workspace_bytes, 16) * 16;
    if (plan.has_table) plan.workspace_bytes = plan.table_at + SequenceTable::bytes(plan.most_blocks);
    plan.shares_at = ceil_div(plan.workspace_bytes, 128) * 128;
    const int64_t shared = params.sequences_k.cu_seqlens != nullptr ? params.heads_k : plan.rest;  // key heads with shares: GroupSplits
    const int64_t share_tiles = plan.splits > 1 ? ceil_div(params.max_seqlen_k, Shape::kBlockN) * plan.rest : 0;
    plan.share_blocks = share_tiles * Shape::kShareThreadBlocks;
    check_count(query_tiles + plan.share_blocks, "attention backward, sm90, convert");
    if (plan.splits > 1) plan.workspace_bytes = plan.shares_at + shared * plan.splits * plan.key_blocks * Shape::kKeyGradientElements * 2;
    return plan;
  }
};

// Stages of dQ in shared memory: with two, the consumers need not wait until a piece has left, and another warp watches its turns. One where the
// heads of a group are split among tasks, which then come to the same tiles closer after each other, and in short padded batches, where what is
// stored to a tile first waits behind zeros; but two for very long heads and whole groups, whose tasks are far apart, and for few tasks.
// PERF: d 96 and 128 0 to 3 %, few tasks 0 to 6; in these other calls 3 to 8 % slower. TUNING.md, "Who adds to dQ".
template <typename Shape>
int choose_dq_stages(const HfFlash2BackwardParams& params, const BackwardPlan& plan, int64_t tasks) {
  constexpr int kShort = 1024, kFewRounds = 3;
  const bool few = tasks <= int64_t{kFewRounds} * multiprocessors(params.forward.device);
  const bool close = plan.splits > 1 && plan.whole == 0 && !has_very_long_heads(params.forward) && !few;
  return close || (may_have_gaps(params) && params.forward.max_seqlen_k <= kShort) ? 1 : Shape::kDqStages;
}

// The order of tasks. counted: only the device knows the key blocks there are; rounds: some thread blocks round dQ beside; computing: tasks at once.
//
// A task is a key block, or one for each block of a cluster. Causal: the first key blocks see the most queries, and long tasks go first, inside
// groups of heads. Short ones load and write as much of K, V, dK and dV as long ones: many of them at once wait for memory, while the long ones
// do not use it. So groups are small: a quarter of a round over the multiprocessors, half of one where heads have few key blocks. The last groups
// are made one, as short tasks are left for the end:
// - The last two rounds; the last only, if multiprocessors that have no task left find something to convert (convert_kernel), which the last
//   group is not, or, of tasks of several query heads, shares to add.
// - Of long heads the last three, as each multiprocessor then has one of the last, and those that come late, as no two tasks take the same time,
//   have the others wait. Of few groups fewer, as L2 holds less of what these heads read and add.
// - Where a head has a third of a round or more, the last four rounds, as fewer heads are left to even out their ends.
// - Where a task has several query heads, at d 96 and 128, a little more than the last round, if there are three; the last four of very long heads.
//   Behind whole groups three, of their splits.
// Where a head has one and a half rounds or more, above d 64, four heads take turns: short tasks of one would run beside the long ones of the
// next, and L2 hold neither's dQ.
// Else, or where only the device knows the key blocks there are (then groups are those of one sequence), it pays less, and the end, or what L2
// holds, counts for more: groups of 16 query heads, fewer where L2 does not hold their Q, dO and dQ, at least a round of tasks; of one head, to d
// 128, where it has a task for nearly every multiprocessor; and the last are one group if they are no more than a round each.
// PERF: each case is worth 1 to 11 % at the lengths it is for. TUNING.md, "Order of tasks".
//
// Deterministic: a tile of dQ takes the key blocks of a head in the order of their launch, and they should come in that order by themselves.
// Below a diagonal each starts at queries of its own, the last keys at the last queries: descending, all of a head at once, nobody waits. One
// head after another, for memory's sake as above; at d 64, which loads half as much, a round of heads. With all keys, but at d 128, blocks of two
// rounds in turn, which wait less for each other.
// PERF: one head in place of a round of them, d 128 causal 2 to 14 %. TUNING.md, "Deterministic mode".
template <typename Shape>
TileScheduler choose_order(const HfFlash2BackwardParams& params, const BackwardPlan& plan, bool counted, bool rounds, int computing) {
  const HfFlash2ForwardParams& forward = params.forward;
  const int key_blocks = static_cast<int>(ceil_div(forward.max_seqlen_k, Shape::kTaskKeys)), parts = static_cast<int>(plan.parts);
  const bool one_head = parts == forward.heads_q * forward.batch;  // a task
  const auto heads_of_rounds = [&](double n) { return std::max(1, static_cast<int>(n * computing / std::max(1, key_blocks))); };
  TileOrder order = is_triangular(forward) ? TileOrder::kFirstBlockFirst : TileOrder::kByHead;
  int heads_at_once = heads_of_rounds(1), together = 1;
  constexpr int kLongHeadsAtOnce = 4;
  const bool is_long = Shape::kHeadDim > 64 && 2 * key_blocks > 3 * computing;  // rounds of one head
  const bool most_of_round = 20 * key_blocks >= 19 * computing;                 // has one head
  const auto few_groups = [&] { return 1 + static_cast<int>(std::min<int64_t>(2, ceil_div(parts, heads_at_once) / 8)); };
  if (params.deterministic) {
    const bool descends = forward.window_right >= 0;
    order = descends ? TileOrder::kLastBlockFirst : TileOrder::kFirstBlockFirst;
    if (descends && Shape::kHeadDim > 64) heads_at_once = 1;
    if (!descends && Shape::kHeadDim != 128) heads_at_once = heads_of_rounds(2);
  } else if (!counted && (one_head || (Shape::kHeadDim > 64 && Shape::kHeadDim <= 128))) {
    constexpr int kFewKeyBlocks = 8;
    const bool four_rounds = Shape::kTellsEnds && (one_head ? 3 * key_blocks >= computing && !most_of_round : has_very_long_heads(forward));
    double last_rounds = one_head || parts < heads_of_rounds(3) ? 1 : 1.25;
    if (!Shape::kTellsEnds || (rounds && one_head)) last_rounds = 2;
    if (four_rounds) last_rounds = 4;
    if (plan.whole > 0) last_rounds = 3;
    heads_at_once = is_long ? kLongHeadsAtOnce : heads_of_rounds(one_head && key_blocks <= kFewKeyBlocks ? 0.5 : 0.25);
    together = std::max(static_cast<int>(ceil_div(heads_of_rounds(last_rounds), heads_at_once)), few_groups());
  } else {
    const int64_t query_heads =
        heads_in_l2(int64_t{forward.max_seqlen_q} * (2 * (forward.head_dim + forward.head_dim_v) + 4 * Shape::kDqColumns));
    heads_at_once = std::max(static_cast<int>(std::min(kMostHeadsAtOnce, query_heads) * forward.heads_k * plan.splits / forward.heads_q),
                             heads_at_once);
    if (Shape::kHeadDim <= 128 && most_of_round) heads_at_once = 1;
    if (is_long) heads_at_once = kLongHeadsAtOnce;
    if (int64_t{heads_at_once} * key_blocks <= computing) together = few_groups();
  }
  return TileScheduler::make(order, key_blocks, parts, heads_at_once, together);
}

// Of the parts of an order (its heads), the first so many that have probably no task left when the first of `computing` thread blocks finds
// none any more: not those of the last group, nor any that have tasks at once at the end. At least so many come last whatever the order.
inline int count_early_parts(const TileScheduler& scheduler, int computing, int last_parts) {
  const int at_once = static_cast<int>(ceil_div(computing, std::max(1, scheduler.blocks)));
  return std::max(0, std::min(scheduler.last_group * scheduler.group, scheduler.heads - std::max(at_once, last_parts)));
}

// dQ, dK and dV. kInOrder: the kernel of deterministic mode.
template <typename Shape, typename T, auto kKernel, auto kInOrder = kKernel>
void launch_backward(HfFlash2BackwardParams params) {
  const HfFlash2ForwardParams& forward = params.forward;
  const BackwardPlan plan = BackwardPlan::make<Shape>(params);
  params.deterministic = plan.in_order;

  BackwardArguments arguments;
  make_backward_maps(arguments, params, Shape::kBlockM, Shape::kBlockN);
  arguments.delta = Workspace(params, Shape::kBlockM, Shape::kDqColumns).delta;
  arguments.params = params;
  arguments.cap = ScoreCap::of(forward);
  arguments.dropout = DropoutRate::of(forward.dropout_p);

  const int rounding = plan.may_round && plan.whole == 0 ? choose_rounding_blocks<Shape>(forward, multiprocessors(forward.device)) : 0;
  const int computing = std::max(1, (multiprocessors(forward.device) - rounding) / Shape::kCluster);  // tasks at once
  arguments.scheduler = choose_order<Shape>(params, plan, arguments.counts_units(), rounding > 0, computing);
  char* const shares = static_cast<char*>(params.workspace) + plan.shares_at;
  const int group = forward.heads_q / forward.heads_k;
  arguments.groups = {shares, Divisor::of(group), Divisor::of(plan.splits), Divisor::of(group / plan.splits), plan.whole, plan.key_blocks};

  arguments.dq_stages = choose_dq_stages<Shape>(params, plan, plan.units);

  // PERF: that the kernels overlap and that nothing clears dQ is worth 2 and 6 to 9 % at 512 and 1k, 2 % at d 128, 4k.
  // TUNING.md, "First and last kernel".
  const bool brief = Shape::kHeadDim > 64 || forward.max_seqlen_k < 16384;
  const Start start = brief ? Start::kEarly : Start::kInOrder;
  arguments.first_stores = (Shape::kFirstStoresDq && brief) || params.deterministic;

  // The first kernel starts in order, so that all older than the backward is there for the others, too, before they wait for anything.
  const int64_t query_blocks = ceil_div(forward.max_seqlen_q, Shape::kBlockM) * forward.heads_q * forward.batch;
  arguments.query_blocks = static_cast<int>(query_blocks), arguments.rounding_blocks = rounding;
  arguments.tells_stored = rounding > 0 && plan.splits > 1;
  arguments.task_blocks = static_cast<int>(std::min<int64_t>(plan.units, computing)) * Shape::kCluster;
  arguments.table = {nullptr};
  if (plan.has_table) arguments.table = {reinterpret_cast<int2*>(static_cast<char*>(params.workspace) + plan.table_at)};
  const PreprocessArguments prepared{params, arguments.table, plan.most_blocks, Shape::kTaskKeys};
  const auto preprocess = [&](auto clear_dq) {
    launch<preprocess_kernel<kSm90, Shape::kBlockM, Shape::kDqColumns, decltype(clear_dq)::value, T>>(
        prepared, query_blocks + plan.has_table, kPreprocessThreads, 0, forward.device, forward.stream,
        "attention backward, sm90, preprocess");
  };
  if (arguments.first_stores)
    preprocess(std::false_type{});
  else
    preprocess(std::true_type{});
  const int shared_bytes = BackwardShared<Shape>::bytes(arguments.dq_stages, may_have_gaps(params));
  constexpr const char* kName = "attention backward, sm90";
  auto* compute =
      params.deterministic ? launch<kInOrder, BackwardArguments, Shape::kCluster> : launch<kKernel, BackwardArguments, Shape::kCluster>;
  if constexpr (Shape::kHeadDim <= 128) {
    if (plan.stores_lone)
      compute = launch<backward_kernel<StoresLone<Rounds<Shape>>, T>, BackwardArguments, Shape::kCluster>;
    else if (plan.may_round)
      compute = launch<backward_kernel<Rounds<Shape>, T>, BackwardArguments, Shape::kCluster>;
  }
  compute(arguments, arguments.task_blocks + rounding, Shape::kThreads, shared_bytes, forward.device, forward.stream, kName, start,
          BackwardShared<Shape>::kMostBytes, false);
  const bool asks = (Shape::kTellsEnds || params.deterministic) && start == Start::kEarly;
  const int last_parts = arguments.counts_units() ? forward.heads_k * plan.splits : 1;
  const int early_parts = asks ? count_early_parts(arguments.scheduler, computing, last_parts) : 0;
  const int early_blocks = static_cast<int>(ceil_div(forward.max_seqlen_q, Shape::kBlockM)) * arguments.groups.heads_before(early_parts);
  const int convert_blocks = rounding > 0 ? 0 : arguments.query_blocks;
  const ConvertArguments convert{params, arguments.groups, convert_blocks, early_blocks, plan.stores_lone, asks};
  launch<convert_kernel<Shape, T>>(convert, convert_blocks + plan.share_blocks, Shape::kDqPieces * 128, 0, forward.device, forward.stream,
                                   "attention backward, sm90, convert", start, 0, arguments.dq_stages > 1);  // or none
  if constexpr (Shape::kHeadDim <= 128) {
    if (rounding > 0) {
      auto* round = plan.stores_lone ? launch<round_rest_kernel<StoresLone<Shape>, T>, BackwardArguments>
                                     : launch<round_rest_kernel<Shape, T>, BackwardArguments>;
      round(arguments, std::min<int64_t>(query_blocks, multiprocessors(forward.device)), Shape::kThreads,
            RoundingSizes<Shape>::kSharedBytes, forward.device, forward.stream, "attention backward, sm90, round", start, 0, false);
    }
  }
}

// Calls f(shape) with the tiles for this call.
template <int kHeadDim, typename F>
auto with_backward_shape(const HfFlash2ForwardParams& params, const F& f) {
  if constexpr (kHeadDim <= 128) {
    return f(BackwardShape<kHeadDim>{});
  } else {
    if constexpr (kHeadDim == 192) {
      if (params.head_dim_v <= 128) return f(BackwardWideShape<kHeadDim, 128>{});
    }
    return f(BackwardWideShape<kHeadDim>{});
  }
}

template <int kHeadDim, typename T>
int64_t backward_workspace_bytes(const HfFlash2BackwardParams& params) {
  if constexpr (kHeadDim <= 128) {
    if (takes_short<kHeadDim>(params)) return BackwardShortPlan<kHeadDim>::make(params.forward).workspace_bytes;
  }
  return with_backward_shape<kHeadDim>(params.forward,
                                       [&](auto shape) { return BackwardPlan::make<decltype(shape)>(params).workspace_bytes; });
}

template <typename Shape>
void launch_sink_gradient(const HfFlash2BackwardParams& params) {
  if (params.dsinks == nullptr) return;
  launch<sink_gradient_kernel<kSm90, Shape::kBlockM, Shape::kDqColumns>>(
      params, params.forward.heads_q, kSinkThreads, 0, params.forward.device, params.forward.stream, "attention backward, sm90, sinks");
}

template <int kHeadDim, typename T>
void run_backward(const HfFlash2BackwardParams& params) {
  if constexpr (kHeadDim <= 128) {
    if (takes_short<kHeadDim>(params)) {
      launch_backward_short<kHeadDim, T>(params);
      return launch_sink_gradient<BackwardShortShape<kHeadDim>>(params);
    }
  }
  with_backward_shape<kHeadDim>(params.forward, [&](auto shape) {
    using Shape = decltype(shape);
    const auto launch_of = [&](auto computing) {
      using Computes = decltype(computing);
      if constexpr (kHeadDim <= 128)
        launch_backward<Shape, T, backward_kernel<Computes, T>>(params);
      else
        launch_backward<Shape, T, backward_wide_kernel<Computes, T>, backward_wide_kernel<InOrder<Computes>, T>>(params);
    };
    if constexpr (Shape::kColumnParts > 1)
      launch_of(shape);
    else if (params.forward.softcap > 0.f)
      launch_of(Capped<Shape>{});
    else if (params.forward.dropout_p > 0.f)
      launch_of(Dropping<Shape>{});
    else
      launch_of(shape);
    launch_sink_gradient<Shape>(params);
  });
}

}  // namespace hf_flash2::sm90
