// Launch of the Hopper backward: preprocess, main kernel, conversion of the gradients; tensor maps, the order of key blocks, whether they keep it
// at each tile of dQ, and whether the query heads of a group are split among tasks.
#pragma once
#include <cmath>

#include "attention/preprocess.cuh"
#include "attention/sinks.cuh"
#include "launch.h"
#include "sm90/backward.cuh"
#include "sm90/backward_convert.cuh"
#include "sm90/backward_wide.cuh"
#include "sm90/run.h"
#include "sm90/tensor_map.h"

namespace hf_flash2::sm90 {

// Among how many tasks the query heads of a group are split: a divisor of them, more than 1 where tasks are so few, or some so long, that
// multiprocessors have nothing to do. Time is counted in query blocks of a task; the constants are estimates for an H200 at d 128. A task
// takes those of its heads, and kTaskTime for its beginning and end. Equal tasks go in rounds over the multiprocessors; unequal ones, the long
// first, end together if none is longer than what each multiprocessor has. Splits cost kSumTime for the sum of their shares, and kShareTime
// for each share that a multiprocessor leaves; a twentieth of the time has to be saved.
// Long causal tasks have at most most_heads heads: those that run at once drift apart over more, and L2 does not hold what they read and add.
// PERF: what splits bring, and that groups in launch order are at least a round (below). One H200, d 128, causal, batch 2, at 1k, 2k, 4k, 16k,
// TFLOP/s: 64/8 heads 262 345 477 549 -> 353 473 562 585, 64/64 in the same run 357 493 575 570; unsplit 260 416 509 550. 32/8, at 1k, 2k: 201 303
// -> 275 396. Shares in T, not in fp32, and at d 128 two heads a task in place of four: 64/8 at 1k, 2k, 4k, 16k 353 469 493 570 -> 372 498 518 582,
// 32/8 at 1k, 2k, 4k 315 478 512 -> 335 490 534 (64/64 in the same run 381 500 544); d 64 and d 256 lose 2 % with two heads. One head at 16k, one
// H100, 32/8 in two runs 615 608 -> 621 619; at 4k 551 -> 544. In 8 splits in place of 4, one H200, 64/8 at 16k 616 -> 620 (64/64 in the same run
// 618), batch 1, 32/4, 16/2, 16/1 at 16k 608 606 593 -> 616 629 612.
// Tried and left: all heads of a query block before the next, from the last block down, so that tasks stay together and L2 needs no splits:
// 64/8 at 4k, 16k, in any number of splits, 4 to 20 % slower, full 17 %: all add to the same tiles at a time. Shares added in registers by
// whichever of two splits comes later, in place of in the last kernel: 64/8 at 1k, 4k 233 2367 -> 232 2351 us, 32/8 at 1k, in 4 splits, 128 ->
// 142, as the later waits some 4 us for memory. Shares of heads that have ended added beside, by a spare warp of each thread block: one H100, 64/8,
// 32/8 at 4k, 16k 555 623 538 620 -> 553 618 529 598. With splits, blocks that round dQ beside, 1, 2, 3, 4 of them: 64/8 at 4k 570 -> 565 569 566
// 561, at 1k 390 -> 372 376 378 379, as the main kernel takes 74 us more of the 90 that the last one saves.
// In order (deterministic mode), below a diagonal, the long tasks of a head come last (choose_order): each has one query head.
// PERF: one H100, 64/8 and 32/8 heads, batch 2, at 1k, 2k, 4k, deterministic: d 128 309 437 495, 254 391 480 -> 315 448 525, 274 416 512; d 96 236
// 326 379, 195 297 374 -> 248 348 398, 217 321 398; d 64 248 356 447, 217 309 420 -> 270 401 478, 232 366 483; 32/8 heads, d 256 232 314 353 -> 286
// 405 458, d 192 230 333 396 -> 274 394 453.
inline int choose_group_splits(const HfFlash2ForwardParams& params, bool in_order, int block_m, int block_n, int multiprocessors) {
  constexpr double kTaskTime = 3, kShareTime = 3, kSumTime = 1;
  constexpr int kLongTask = 1024, kVeryLongTask = 16384;
  const int most_heads = params.head_dim <= 64 || params.head_dim > 128 ? 4 : params.max_seqlen_q < kVeryLongTask ? 2 : 1;
  const int most_shares = most_heads == 1 ? 8 : 4;  // for most_heads' sake
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

// How many multiprocessors round dQ while the others compute (rounding.cuh), so that they keep up: a tile takes them kRoundingTime, the others
// one for each key block that comes to it. None where half of one would do, or tasks are few: what ends with the last is not rounded there.
// PERF: one multiprocessor rounds 60 GB of sums a second, all of them, in the last kernel, 2500: memory's limit. One H200, at 512, 1k, 2k, 4k,
// without -> with, TFLOP/s: d 64 full 398 504 572 586 -> 422 524 581 589, causal 239 356 466 525 -> 257 378 486 528; d 128 full 440 549 627 674 ->
// 446 566 649 691, causal 267 406 525 612 -> 279 425 541 622; deterministic 0 to 7 % more as well, but d 128 causal at 512, 1 % less. Of 54 us that
// the last kernel takes at 1k, 45 are saved; the others take 15 to 30 more.
// Tried and left: dQ rounded by a warp of the block that adds to a tile last: d 128 at 512, 1k, 4k, full 419 530 665 -> 398 533 659, causal 255
// 390 600 -> 232 370 588, as shared memory is what the consumers lack, and the warp has 24 registers. By the consumers, between two tasks:
// level to 2 % slower. L2 told to forget what has been rounded (discard.global.L2): 1 % slower than without.
template <typename Shape>
int choose_rounding_blocks(const HfFlash2ForwardParams& params, int64_t tasks, int multiprocessors) {
  constexpr double kRoundingTime = 0.21;  // of a tile, in that of a query block of a task
  constexpr int kFewTasks = 4;            // for each multiprocessor
  constexpr int kMost = Workspace::kMostRoundingWarps / RoundingSizes<Shape>::kWarps;
  if (Shape::kHeadDim > 128 || tasks < int64_t{kFewTasks} * multiprocessors) return 0;
  const bool packed = params.sequences_k.cu_seqlens != nullptr;
  const double keys = packed ? static_cast<double>(params.total_k) / params.batch : params.max_seqlen_k;
  const double longest =
      std::min<double>(keys / Shape::kBlockN, most_blocks_seen(params, params.max_seqlen_k, Shape::kBlockM, Shape::kBlockN));
  const double key_blocks = std::max(1.0, is_triangular(params) ? (longest + 1) / 2 : longest);
  return std::min(kMost, static_cast<int>(std::lround(kRoundingTime * multiprocessors / key_blocks)));
}

// Whether tasks had better add to dQ in order, as in deterministic mode, where nobody asks for that: then, among how many of them the query heads
// of a group are split, else 0. Above head dim 128 nothing need clear the accumulator then, and the last kernel begins with the tiles that all have
// added to; but they wait for each other, the longer a head is, and the more of them work on one. So: for short sequences, and where each
// cluster has heads of its own, in as few splits as that takes, as each costs; none of one query head each, nor of many.
// PERF: one H100, 16k tokens, hidden size 2048, at 128, 256, 512, 768, 1k, 1.5k, 2k, 4k, TFLOP/s: causal d 256 49 98 180 252 306 372 411 477 -> 65
// 123 215 280 327 388 425 470, d 192 50 97 178 248 302 367 407 483 -> 65 120 206 270 315 377 414 473, 192/128 56 108 198 275 335 404 443 516 -> 77
// 139 235 304 354 416 449 516; full d 256 99 181 302 373 415 460 -> 130 191 312 384 413 462, d 192 100 182 310 380 416 456 -> 129 201 322 388 412
// 462, 192/128 112 200 342 418 458 -> 153 241 371 434 465. Filled to 30 %, d 256, to 512, 1k, 2k, padded 19 16 6 % faster, packed 18 12 7. 32
// heads, batch 1 and 2, d 256 at 1k 267 291 -> 264 307, d 192 262 283 -> 251 291.
// PERF: groups, d 256 causal, one H200: 16/8 heads at 8 x 512, 32 x 512, 16 x 1k, 8 x 2k 225 244 357 439 -> 241 276 378 445; 32/8 at 8 x 512 240
// -> 264; in splits 16/2 at 16 x 512 219 -> 258, 8/1 at 32 x 512, 16 x 1k 219 344 -> 259 355. One H100: 16/8 at 8 x 512, 16 x 1k, 8 x 2k 185 312
// 403 -> 213 349 428, 32/8 at 8 x 512, 4 x 1k 191 298 -> 210 321, 16/2 at 16 x 512 167 -> 206, 8/1 at 32 x 512, 16 x 1k 168 290 -> 207 324. d 192
// as much; at 128 and 256 11 to 37 %; full, at 128 15 to 42 %. Slower: fewer heads than clusters, 3 to 65 %; splits of one head each, 1 to 11;
// others at 2k, 0 to 5; and on an H100, perhaps as more heads are under way than L2 holds, tasks of 4 heads at 1k and 2k, 3 to 8 (an H200 3 to 7 %
// faster), full from 256 on, 2 to 28. Above head dim 256, one H200, 4/4, 32/4 and 8/1 heads at 256 to 8k: level to 16 % slower.
template <typename Shape>
int choose_splits_in_order(const HfFlash2ForwardParams& params) {
  constexpr int kShort = 2048, kShortSplit = 1024, kShortFull = 768, kShortFullGroup = 128;
  const bool full = params.window_left < 0 && params.window_right < 0;
  if (Shape::kHeadDim <= 128 || Shape::kColumnParts > 1 || !(full || is_triangular(params))) return 0;
  const int group = params.heads_q / params.heads_k, clusters = multiprocessors(params.device) / Shape::kCluster;
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
  bool in_order;       // key blocks add to a tile of dQ one after the other
  int splits;          // of a group's query heads
  int64_t key_blocks;  // of one head, over all sequences: KeyGradientShares::blocks
  int64_t shares_at;   // bytes of the workspace before the shares of dK and dV
  int64_t workspace_bytes;

  template <typename Shape>
  static BackwardPlan make(const HfFlash2BackwardParams& backward) {
    const HfFlash2ForwardParams& params = backward.forward;
    BackwardPlan plan;
    const int splits_in_order = backward.deterministic ? 0 : choose_splits_in_order<Shape>(params);
    plan.in_order = backward.deterministic || splits_in_order > 0;
    const int64_t query_tiles = ceil_div(params.max_seqlen_q, Shape::kBlockM) * params.heads_q * params.batch;
    check_count(query_tiles * Shape::kDqPieces * 2, "attention backward, sm90");  // chunks: rounding.cuh
    plan.splits = splits_in_order > 0 ? splits_in_order
                                      : choose_group_splits(params, plan.in_order, Shape::kBlockM, Shape::kBlockN,
                                                            multiprocessors(params.device) / Shape::kColumnParts);
    plan.key_blocks = KeyGradientShares::count_blocks(params, Shape::kBlockN);
    check_count(ceil_div(params.max_seqlen_k, Shape::kBlockN) * params.heads_k * plan.splits * params.batch, "attention backward, sm90");
    plan.workspace_bytes = Workspace::bytes(params, Shape::kBlockM, Shape::kDqColumns);
    plan.shares_at = ceil_div(plan.workspace_bytes, 128) * 128;
    if (plan.splits > 1)
      plan.workspace_bytes = plan.shares_at + params.heads_k * plan.splits * plan.key_blocks * Shape::kKeyGradientElements * 2;
    return plan;
  }
};

// The order of tasks. parts: key heads, or splits of their groups; counted: only the device knows the key blocks there are; rounds: some thread
// blocks round dQ beside; computing: tasks at once.
//
// A task is a key block, or one for each block of a cluster. Causal: the first key blocks see the most queries, and long tasks go first, inside
// groups of heads. Short ones load and write as much of K, V, dK and dV as long ones: many of them at once wait for memory, while the long ones
// do not use it. So groups are small: a quarter of a round over the multiprocessors, half of one where heads have few key blocks. The last two
// rounds are one group, as short ones are left for the end; the last only, if multiprocessors that have no task left find something to convert
// (convert_kernel), which the last group is not. Of long heads the last three, as each multiprocessor then has one of the last, and
// those that come late, as no two tasks take the same time, have the others wait. Of few groups fewer, as L2 holds less of what these heads read
// and add.
// PERF: one H100, causal at 512, 1k, 1.5k, 2k, 4k, 8k, TFLOP/s, groups of 16 heads, or what L2 holds, or a round of tasks -> a quarter of a
// round: d 64 226 345 404 445 499 515 -> 234 364 427 458 510 518, d 96 197 301 339 356 397 424 -> 199 312 367 383 424 447, d 128 229 375 442 473
// 535 572 -> 230 374 454 483 539 572, d 192 at 1k 291 -> 300, d 256 at 512, 1k 178 295 -> 182 304, above and at 16k level; d 128 at 12k 588 ->
// 578, d 96 440 -> 447. Half a round: d 96 and 128 at 512, 1k 202 314 235 378, at 2k and 4k 1 % slower. Without the last rounds as one group: d
// 128 at 512, 1k 225 369. One H200, the last three of 16 heads: at 16k 620 -> 644, at 12k 586 -> 599.
// Where a head has a third of a round or more, the last four rounds, as fewer heads are left to even out their ends. PERF: one H200, 16 heads,
// batch 1 at 6k, 8k, 12k, 2 at 8k, d 128 581 599 612 625 -> 625 637 636 648, d 96 448 468 465 462 -> 469 486 474 474, 32 heads, d 64 533 532 544
// 533 -> 553 548 551 541; in other runs batch 4 at 8k 1 %.
// Where it has one and a half or more, above d 64, four heads take turns: short tasks of one head would run beside the long ones of the next, and
// L2 hold neither's dQ. PERF: one H200, at 32k, batch 1 and 2, and 64k, 16 and 8 heads, d 128 581 562 571 -> 610 619 638, d 96 437 422 431 -> 460
// 459 456; 32/8 and 16/2 heads at 32k 563 600 -> 627 617; packed 577 -> 629; d 192 and 256 level. At 16k 2 to 9 % slower, d 96 at 20k 6 %, d 64 at
// 32k 1 %.
// PERF: the last two rounds as one group -> the last, one H100, batch 1, 16 heads at 1k, 2k, 4k, d 64 216 369 491 -> 222 381 515, d 128 291 447 563
// -> 304 456 584; batch 2, d 128, 64 heads at 512 206 -> 211, 32 at 1k 327 -> 331.
// Where a task has several query heads, at d 96 and 128, a little more than the last round is one group, if there are three.
// PERF: groups of 16 query heads (below) -> a quarter of a round, one H100, 64/8 heads at 1k, 2k, 4k, 32/8 at 1k, 2k, 4k, 16/2 at 4k, d 128 360 489
// 535 326 467 562 560 -> 360 495 548 331 482 571 568, with the last round as one group 361 496 548 331 465 560 546; d 96 275 373 415 255 359 427
// 425 -> 273 375 426 257 363 436 423.
// Else, or where only the device knows the key blocks there are (then groups are those of one sequence), it pays less, and the end, or what L2
// holds, counts for more: groups of 16 query heads, fewer where L2 does not hold their Q, dO and dQ, at least a round of tasks; of one head, to d
// 128, where it has a task for nearly every multiprocessor; and the last are one group if they are no more than a round each.
// PERF: these -> as above, one H100, 64/8 and 32/8 heads, batch 2, at 2k, 4k, d 64 455 510 437 527 -> 441 504 437 500; at 1k, 2k, 4k, d 192 300 413
// 432, 292 414 487 -> 281 400 475, 271 395 472. Filled to 30 %, d 128, in groups of 4 heads: padded at 1k, 2k, 4k 153 288 413 -> 147 281 403,
// packed 220 365 453 -> 216 364 444. One H200, groups of two heads -> one at 16k, d 128, batch 1 and 2: 618 584 -> 629 623, packed 616 606
// -> 626 630; the last as one group, 64/8 and 32/8 heads at 4k 551 557 -> 567 573, at 16k 598 599 -> 618 623, of which 0 to 2 % are shares which
// leave L2 first.
//
// Deterministic: a tile of dQ takes the key blocks of a head in the order of their launch, and they should come in that order by themselves.
// Below a diagonal each starts at queries of its own, the last keys at the last queries: descending, all of a head at once, nobody waits. One
// head after another, for memory's sake as above; at d 64, which loads half as much, a round of heads.
// PERF: one H100, causal at 512, 1k, 2k, 4k, 8k, TFLOP/s, a round, of d 192 three, -> one head: d 96 at 512, 1k, 4k 170 257 391 -> 189 293 401, d
// 128 196 308 445 508 526 -> 219 352 467 517 550, d 192 169 256 352 421 -> 202 307 391 431, d 256 199 309 394 440 -> 208 313 392 437; 64/8 heads at
// 1k, 2k, 4k, d 128 272 373 455 -> 304 421 480, d 192 196 225 240 -> 267 358 404; packed, to 1k, 2k, 4k, d 128 175 288 359 -> 184 296 372; d 64 220
// 341 450 497 -> 226 333 435 488. Waits for turns and passing them on cost 1 % at 512, 1k, d 128, the order 12 %. Ascending, each task from the
// last queries down, so that long ones are first and turns follow each other from tile to tile: d 128 at 512, 1k, 2k, 4k 224 336 444 487, d 64 199
// 256 294 304, and the other direction costs the default 1 to 3 %.
// With all keys, blocks of two rounds in turn wait less for each other: one H200, d 64 at 2k, 4k, 8k, 16k 449 458 434 450 -> 471 495 486 522, d
// 256 324 337 340 379 -> 340 364 377 379; d 128 loses up to 6 %.
template <typename Shape>
TileScheduler choose_order(const HfFlash2BackwardParams& params, int key_blocks, int parts, bool counted, bool rounds, int computing) {
  const HfFlash2ForwardParams& forward = params.forward;
  const auto heads_of_rounds = [&](double n) { return std::max(1, static_cast<int>(n * computing / std::max(1, key_blocks))); };
  TileOrder order = is_triangular(forward) ? TileOrder::kFirstBlockFirst : TileOrder::kByHead;
  int heads_at_once = heads_of_rounds(1), together = 1;
  constexpr int kLongHeadsAtOnce = 4;
  const bool is_long = Shape::kHeadDim > 64 && 2 * key_blocks > 3 * computing;  // rounds of one head
  const auto few_groups = [&] {
    return 1 + static_cast<int>(std::min<int64_t>(2, ceil_div(int64_t{parts} * forward.batch, heads_at_once) / 8));
  };
  if (params.deterministic) {
    const bool descends = forward.window_right >= 0;
    order = descends ? TileOrder::kLastBlockFirst : TileOrder::kFirstBlockFirst;
    if (descends && Shape::kHeadDim > 64) heads_at_once = 1;
    if (!descends && Shape::kHeadDim != 128) heads_at_once = heads_of_rounds(2);
  } else if (!counted && (parts == forward.heads_q || (Shape::kHeadDim > 64 && Shape::kHeadDim <= 128))) {
    constexpr int kFewKeyBlocks = 8;
    const bool one_head = parts == forward.heads_q;  // a task
    const bool half_round = Shape::kTellsEnds && one_head && 3 * key_blocks >= computing && 20 * key_blocks < 19 * computing;
    double last_rounds = one_head || parts * forward.batch < heads_of_rounds(3) ? 1 : 1.25;
    if (!Shape::kTellsEnds || rounds) last_rounds = 2;
    if (half_round) last_rounds = 4;
    heads_at_once = is_long ? kLongHeadsAtOnce : heads_of_rounds(one_head && key_blocks <= kFewKeyBlocks ? 0.5 : 0.25);
    together = std::max(static_cast<int>(ceil_div(heads_of_rounds(last_rounds), heads_at_once)), few_groups());
  } else {
    const int64_t query_heads =
        heads_in_l2(int64_t{forward.max_seqlen_q} * (2 * (forward.head_dim + forward.head_dim_v) + 4 * Shape::kDqColumns));
    heads_at_once = std::max(static_cast<int>(std::min(kMostHeadsAtOnce, query_heads) * parts / forward.heads_q), heads_at_once);
    if (Shape::kHeadDim <= 128 && 20 * key_blocks >= 19 * computing) heads_at_once = 1;
    if (is_long) heads_at_once = kLongHeadsAtOnce;
    if (int64_t{heads_at_once} * key_blocks <= computing) together = few_groups();
  }
  return TileScheduler::make(order, key_blocks, parts * forward.batch, heads_at_once, together);
}

// Of the heads of an order, as it counts them, the first so many that have probably no task left when the first of `computing` thread blocks finds
// none any more: not those of the last group, nor any that have tasks at once at the end. At least so many come last whatever the order.
inline int count_early_heads(const TileScheduler& scheduler, int computing, int last_heads) {
  const int at_once = static_cast<int>(ceil_div(computing, std::max(1, scheduler.blocks)));
  return std::max(0, std::min(scheduler.last_group * scheduler.group, scheduler.heads - std::max(at_once, last_heads)));
}

// dQ, dK and dV. kInOrder: the kernel of deterministic mode.
template <typename Shape, typename T, auto kKernel, auto kInOrder = kKernel>
void launch_backward(HfFlash2BackwardParams params) {
  const HfFlash2ForwardParams& forward = params.forward;
  const Rows rows_q = Rows::of_queries(forward), rows_k = Rows::of_keys(forward);
  const BackwardPlan plan = BackwardPlan::make<Shape>(params);
  params.deterministic = plan.in_order;

  BackwardArguments arguments;
  arguments.q = make_tensor_map(forward.q, forward.dtype, forward.head_dim, rows_q, forward.heads_q, Shape::kBlockM);
  arguments.dout = make_tensor_map(params.dout, forward.dtype, forward.head_dim_v, rows_q, forward.heads_q, Shape::kBlockM);
  arguments.k = make_tensor_map(forward.k, forward.dtype, forward.head_dim, rows_k, forward.heads_k, Shape::kBlockN);
  arguments.v = make_tensor_map(forward.v, forward.dtype, forward.head_dim_v, rows_k, forward.heads_k, Shape::kBlockN);
  arguments.params = params;
  arguments.cap = ScoreCap::of(forward);
  arguments.dropout = DropoutRate::of(forward.dropout_p);

  const int key_blocks = static_cast<int>(ceil_div(forward.max_seqlen_k, Shape::kTaskKeys)), parts = forward.heads_k * plan.splits;
  const int64_t units = int64_t{key_blocks} * parts * forward.batch;
  const bool rounds = plan.splits == 1 && forward.softcap == 0.f && forward.dropout_p == 0.f;
  const int rounding = rounds ? choose_rounding_blocks<Shape>(forward, units, multiprocessors(forward.device)) : 0;
  const int computing = std::max(1, (multiprocessors(forward.device) - rounding) / Shape::kCluster);  // tasks at once
  arguments.scheduler = choose_order<Shape>(params, key_blocks, parts, arguments.counts_units(), rounding > 0, computing);
  char* const shares = static_cast<char*>(params.workspace) + plan.shares_at;
  arguments.shares = {plan.splits > 1 ? shares : nullptr, Divisor::of(plan.splits), plan.key_blocks};

  // PERF: that the kernels overlap and that nothing clears dQ is worth 2 and 6 to 9 % at 512 and 1k, and 2 % at d 128, 4k. One H200, d 64 at
  // 4k, 8k, 16k, TFLOP/s: full 588 617 610 -> 608 629 616, causal 528 582 613 -> 548 593 607.
  const bool brief = Shape::kHeadDim > 64 || forward.max_seqlen_k < 16384;
  const Start start = brief ? Start::kEarly : Start::kInOrder;
  arguments.first_stores = (Shape::kFirstStoresDq && brief) || params.deterministic;

  // The first kernel starts in order, so that all older than the backward is there for the others, too, before they wait for anything.
  const int64_t query_blocks = ceil_div(forward.max_seqlen_q, Shape::kBlockM) * forward.heads_q * forward.batch;
  arguments.query_blocks = static_cast<int>(query_blocks), arguments.rounding_blocks = rounding;
  arguments.task_blocks = static_cast<int>(std::min<int64_t>(units, computing)) * Shape::kCluster;
  const auto preprocess = [&](auto clear_dq) {
    launch<preprocess_kernel<kSm90, Shape::kBlockM, Shape::kDqColumns, decltype(clear_dq)::value, T>>(
        params, query_blocks, kPreprocessThreads, 0, forward.device, forward.stream, "attention backward, sm90, preprocess");
  };
  if (arguments.first_stores)
    preprocess(std::false_type{});
  else
    preprocess(std::true_type{});
  constexpr int kSharedBytes = BackwardShared<Shape>::kBytes;
  const int shared_bytes = kSharedBytes + (may_have_gaps(params) ? kZeroBytes : 0), most_shared_bytes = kSharedBytes + kZeroBytes;
  constexpr const char* kName = "attention backward, sm90";
  if constexpr (Shape::kHeadDim <= 128) {
    if (rounding > 0) {
      launch<backward_kernel<Rounds<Shape>, T>>(arguments, arguments.task_blocks + rounding, Shape::kThreads, shared_bytes, forward.device,
                                                forward.stream, kName, start, most_shared_bytes);
      return launch<round_rest_kernel<Shape, T>>(arguments, std::min<int64_t>(query_blocks, multiprocessors(forward.device)),
                                                 Shape::kThreads, RoundingSizes<Shape>::kSharedBytes, forward.device, forward.stream,
                                                 "attention backward, sm90, round", start);
    }
  }
  const auto compute =
      params.deterministic ? launch<kInOrder, BackwardArguments, Shape::kCluster> : launch<kKernel, BackwardArguments, Shape::kCluster>;
  compute(arguments, arguments.task_blocks, Shape::kThreads, shared_bytes, forward.device, forward.stream, kName, start, most_shared_bytes);
  const int64_t share_tiles = ceil_div(forward.max_seqlen_k, Shape::kBlockN) * forward.heads_k * forward.batch;
  const int64_t share_blocks = plan.splits > 1 ? share_tiles * Shape::kShareThreadBlocks : 0;
  const bool asks = (Shape::kTellsEnds || params.deterministic) && start == Start::kEarly;
  const int early_heads = asks ? count_early_heads(arguments.scheduler, computing, arguments.counts_units() ? parts : 1) : 0;
  const int early_blocks = static_cast<int>(query_blocks / std::max(1, arguments.scheduler.heads) * early_heads);
  const ConvertArguments convert{params, arguments.shares, arguments.query_blocks, early_blocks, asks};
  launch<convert_kernel<Shape, T>>(convert, query_blocks + share_blocks, Shape::kDqPieces * 128, 0, forward.device, forward.stream,
                                   "attention backward, sm90, convert", start);
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
  return with_backward_shape<kHeadDim>(params.forward,
                                       [&](auto shape) { return BackwardPlan::make<decltype(shape)>(params).workspace_bytes; });
}

template <int kHeadDim, typename T>
void run_backward(const HfFlash2BackwardParams& params) {
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
    if (params.dsinks != nullptr)
      launch<sink_gradient_kernel<kSm90, Shape::kBlockM, Shape::kDqColumns>>(
          params, params.forward.heads_q, kSinkThreads, 0, params.forward.device, params.forward.stream, "attention backward, sm90, sinks");
  });
}

}  // namespace hf_flash2::sm90
