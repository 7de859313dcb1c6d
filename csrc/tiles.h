// Tile shapes of every kernel, each with its reason; the numbers behind these, and what was tried, are in docs/TUNING.md. M = query rows, N = key
// columns, a block is kNWarps warps.
// Shared memory is what decides: 99 KB a block on sm_86, sm_89 and sm_120, 163 KB on sm_80, 227 KB on sm_90.
#pragma once

namespace hf_flash2 {
constexpr int kMostValueColumns = 256;  // of O, that the registers of a warp, or of a warpgroup, hold
}

namespace hf_flash2::sm80 {

// Both directions have two sets of tiles: kLarge for GPUs with the shared memory of Hopper and Blackwell data-center parts (forward) or of
// sm_80 and up (backward), kSmall for all others.
enum class TileVariant { kLarge, kSmall };

// Forward. Shared memory: Q + 2 stages of K and V = (M + 4 N) * D * 2 bytes: kLarge fits kBlocksPerSm times into 227 KB, kSmall once into
// 99 KB and, up to d 128, twice into the 164 KB of an A100.
// 32 query rows a warp halve the shared-memory reads of K and V against 16; from d 192 on the O accumulator leaves room for 16 only.
template <int kHeadDim>
constexpr bool kForwardHasSmall = kHeadDim >= 128;  // below, one shape fits everywhere
template <int kHeadDim, TileVariant kVariant>
struct ForwardTile;
template <TileVariant kVariant>
struct ForwardTile<64, kVariant> {
  static constexpr int kBlockM = 128, kBlockN = 64, kNWarps = 4, kBlocksPerSm = 2;
};
template <TileVariant kVariant>
struct ForwardTile<96, kVariant> {
  static constexpr int kBlockM = 128, kBlockN = 64, kNWarps = 4, kBlocksPerSm = 2;
};
template <>
struct ForwardTile<128, TileVariant::kLarge> {
  static constexpr int kBlockM = 128, kBlockN = 64, kNWarps = 4, kBlocksPerSm = 2;
};
template <>
struct ForwardTile<128, TileVariant::kSmall> {
  static constexpr int kBlockM = 128, kBlockN = 32, kNWarps = 4, kBlocksPerSm = 2;
};
template <>
struct ForwardTile<192, TileVariant::kLarge> {
  static constexpr int kBlockM = 128, kBlockN = 64, kNWarps = 8, kBlocksPerSm = 1;
};
template <>
struct ForwardTile<192, TileVariant::kSmall> {
  static constexpr int kBlockM = 128, kBlockN = 32, kNWarps = 8, kBlocksPerSm = 1;
};
template <>
struct ForwardTile<256, TileVariant::kLarge> {
  static constexpr int kBlockM = 128, kBlockN = 64, kNWarps = 8, kBlocksPerSm = 1;
};
template <>
struct ForwardTile<256, TileVariant::kSmall> {
  static constexpr int kBlockM = 64, kBlockN = 32, kNWarps = 4, kBlocksPerSm = 2;
};

// O takes as many registers as at d 256, as half of its columns are computed at a time (run_forward): Q + 2 stages of K and half of V
// = (M D + 3 N D) * 2 bytes.
template <>
struct ForwardTile<512, TileVariant::kLarge> {
  static constexpr int kBlockM = 64, kBlockN = 32, kNWarps = 4, kBlocksPerSm = 1;
};
template <>
struct ForwardTile<512, TileVariant::kSmall> {
  static constexpr int kBlockM = 32, kBlockN = 16, kNWarps = 2, kBlocksPerSm = 1;
};

// Backward. Shared memory: K + V + kStages (Q + dO) + P + dS = (2 N D + 2 kStages M D + 2 M N) * 2 bytes.
// The warps are laid out kWarpsM x kWarpsN over S and dP [M, N], kWarpsKeys x kWarpsDim over dK and dV [N, D], kWarpsM x (the rest) over
// dQ [M, D]. Registers of a thread: S + dP = M N / 128, dK + dV = N D / 128, of 255.
// kLarge fits 163 KB, kSmall 99 KB.
template <int kHeadDim, TileVariant kVariant>
struct BackwardTile;
template <>
struct BackwardTile<64, TileVariant::kLarge> {
  static constexpr int kBlockM = 128, kBlockN = 128, kStages = 2, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<64, TileVariant::kSmall> {
  static constexpr int kBlockM = 64, kBlockN = 128, kStages = 1, kWarpsM = 2, kWarpsN = 4, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<96, TileVariant::kLarge> {
  static constexpr int kBlockM = 64, kBlockN = 128, kStages = 2, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<96, TileVariant::kSmall> {
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 2, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<128, TileVariant::kLarge> {
  static constexpr int kBlockM = 64, kBlockN = 128, kStages = 2, kWarpsM = 2, kWarpsN = 4, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<128, TileVariant::kSmall> {
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 1, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<192, TileVariant::kLarge> {
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 2, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<192, TileVariant::kSmall> {
  static constexpr int kBlockM = 32, kBlockN = 64, kStages = 1, kWarpsM = 2, kWarpsN = 4, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<256, TileVariant::kLarge> {
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 1, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<256, TileVariant::kSmall> {
  static constexpr int kBlockM = 32, kBlockN = 32, kStages = 1, kWarpsM = 2, kWarpsN = 2, kWarpsKeys = 2, kWarpsDim = 2;
};
// One tile of S and dP a warp: products in pairs (sm80/paired_products.cuh), which exchange 4 M N bytes: kLarge beside P and dS, kSmall, for
// which there is no room, in their place.
template <>
struct BackwardTile<512, TileVariant::kLarge> {
  static constexpr int kBlockM = 32, kBlockN = 32, kStages = 1, kWarpsM = 2, kWarpsN = 4, kWarpsKeys = 2, kWarpsDim = 4;
};
template <>
struct BackwardTile<512, TileVariant::kSmall> {
  static constexpr int kBlockM = 32, kBlockN = 16, kStages = 1, kWarpsM = 2, kWarpsN = 2, kWarpsKeys = 1, kWarpsDim = 4;
};

}  // namespace hf_flash2::sm80

namespace hf_flash2::sm90 {

// Forward. A block is kConsumers warpgroups of 64 query rows each and one that loads. Shared memory: (64 kConsumers kQueryStages D' + kStages N (D'
// + Dv')) * 2 bytes of 227 KB, D' and Dv' = the head dims of Q, K and of V, O rounded up to 64; and 1 KB of zeros in padded batches.
// Accumulator registers of a consumer thread: S = N / 2, P = N / 4, O = Dv / 2, of 240 with two consumers, of 160 with three. Dv is D, or 128 at
// d 192, as in multi-head latent attention.
// kOutApart: O leaves through shared memory of its own, 128 kConsumers Dv' bytes more. Where nothing is left for it, it leaves through the
// stage of the ring that the last keys of the tile had: K's for one warpgroup, V's for the other. PERF: d 256 full at 1k 3 %. TUNING.md,
// "How O leaves".
// TileSize::kSmall: what the launcher takes for short triangles, few queries and few tiles. PERF: TUNING.md, "Forward tiles".
// - At d 64, 64 rows a block in place of 192 fit short triangles, and with three blocks on a multiprocessor (65 KB each, 120 registers a
//   consumer thread) one begins or ends a tile while others compute: causal at 512 some 1.7 times as fast, at 4k 10 % slower.
// - At d 128, two blocks on a multiprocessor: with few tiles there are twice as many, 8 to 13 % faster. With many tiles it loses 6 to 16 %.
// - At d 96, the same: with few tiles 8 to 19 % faster, ragged batches to 512 up to twice as fast.
// - Few queries (a tile is not full): more blocks have more loads in flight, 1 to 28 % faster.
// - At d 256, 64 keys in place of 80 cover the diagonal closer, 7 % at 1k. Full, they are taken where they cover a twentieth less.
// TileSize::kMedium: where neither queries nor keys are more than 512. There, at d 128, a tile has some two blocks of 128 keys, and waits for Q and
// the first keys take as long as its products: Q of the next tile has a buffer of its own, and 64 keys cover the diagonal, and an end, closer. At d
// 80, which vision towers have, where 192 rows, three warpgroups, would be too empty; and for dropout and pages.
enum class TileSize { kSmall, kMedium, kLarge };
template <int kHeadDim>
constexpr bool kForwardHasSmall = kHeadDim != 192;
template <int kHeadDim>
constexpr bool kForwardHasMedium = kHeadDim == 80 || kHeadDim == 128;
// Of a paged cache: for few queries. PERF: d 96, one query of 32/8 heads, 32 sequences of 8k 203 us, by small tiles 232; one of 1k, 8k 13.3 20.8, by
// small ones 11.0 19.4 (of rows; pages not measured).
template <int kHeadDim>
constexpr TileSize kPagedTiles = kHeadDim == 80                                 ? TileSize::kMedium
                                 : kForwardHasSmall<kHeadDim> && kHeadDim != 96 ? TileSize::kSmall
                                                                                : TileSize::kLarge;

template <int kHeadDim, TileSize kSize = TileSize::kLarge, int kHeadDimV = kHeadDim>
struct ForwardTile;
template <>
struct ForwardTile<64, TileSize::kSmall> {
  static constexpr int kConsumers = 1, kBlockN = 64, kStages = 3, kBlocksPerSm = 3, kQueryStages = 1;
  static constexpr bool kOutApart = true;
};
template <>
struct ForwardTile<64> {
  static constexpr int kConsumers = 3, kBlockN = 128, kStages = 2, kBlocksPerSm = 1, kQueryStages = 1;
  static constexpr bool kOutApart = true;
};
template <>
struct ForwardTile<96, TileSize::kSmall> {
  static constexpr int kConsumers = 1, kBlockN = 64, kStages = 2, kBlocksPerSm = 2, kQueryStages = 1;
  static constexpr bool kOutApart = true;
};
template <>
struct ForwardTile<96> {
  static constexpr int kConsumers = 2, kBlockN = 128, kStages = 2, kBlocksPerSm = 1, kQueryStages = 1;
  static constexpr bool kOutApart = true;
};
// With 128 keys, O of 80 columns leaves three warpgroups too few registers (C7512).
template <>
struct ForwardTile<80> {
  static constexpr int kConsumers = 3, kBlockN = 112, kStages = 2, kBlocksPerSm = 1, kQueryStages = 1;
  static constexpr bool kOutApart = true;
};
template <>
struct ForwardTile<80, TileSize::kMedium> : ForwardTile<96> {};
template <>
struct ForwardTile<80, TileSize::kSmall> : ForwardTile<96, TileSize::kSmall> {};
template <>
struct ForwardTile<128> {
  static constexpr int kConsumers = 2, kBlockN = 128, kStages = 2, kBlocksPerSm = 1, kQueryStages = 1;
  static constexpr bool kOutApart = true;
};
template <>
struct ForwardTile<128, TileSize::kMedium> {
  static constexpr int kConsumers = 2, kBlockN = 64, kStages = 4, kBlocksPerSm = 1, kQueryStages = 2;
  static constexpr bool kOutApart = true;
};
template <>
struct ForwardTile<128, TileSize::kSmall> {
  static constexpr int kConsumers = 1, kBlockN = 64, kStages = 2, kBlocksPerSm = 2, kQueryStages = 1;
  static constexpr bool kOutApart = true;
};
template <>
struct ForwardTile<192> {
  static constexpr int kConsumers = 2, kBlockN = 112, kStages = 2, kBlocksPerSm = 1, kQueryStages = 1;
  static constexpr bool kOutApart = false;
};
template <>
struct ForwardTile<192, TileSize::kLarge, 128> {
  static constexpr int kConsumers = 2, kBlockN = 128, kStages = 2, kBlocksPerSm = 1, kQueryStages = 1;
  static constexpr bool kOutApart = false;
};
template <>
struct ForwardTile<256> {
  static constexpr int kConsumers = 2, kBlockN = 80, kStages = 2, kBlocksPerSm = 1, kQueryStages = 1;
  static constexpr bool kOutApart = false;
};
template <>
struct ForwardTile<256, TileSize::kSmall> {
  static constexpr int kConsumers = 2, kBlockN = 64, kStages = 2, kBlocksPerSm = 1, kQueryStages = 1;
  static constexpr bool kOutApart = false;
};

// Above head dim 256, kLarge: two thread blocks, a cluster, have 128 rows together, each half of the columns of all there is, as in a tile of d
// 256. Of S a block makes the part of its columns, and gets the other from its peer (PartOfPeer): no product twice. 224 KB: Q 64, K and V 32 a
// stage, parts of S 32.
// PERF: 34 to 40 % faster than a block of 128 rows that makes all of S twice, once for each half of the columns of O; without the exchange it would
// be 25 to 31 % more. TUNING.md, "Forward tiles".
// kSmall, for few queries and few tiles: 64 rows, a warpgroup makes half of the columns of O, and all of S: 1.5 times the products, but K is read
// once.
template <>
struct ForwardTile<512> {
  static constexpr int kConsumers = 2, kBlockN = 64, kStages = 2, kBlocksPerSm = 1, kQueryStages = 1;
  static constexpr bool kOutApart = false;
};
template <>
struct ForwardTile<512, TileSize::kSmall> {
  static constexpr int kConsumers = 2, kBlockN = 32, kStages = 2, kBlocksPerSm = 1, kQueryStages = 1;
  static constexpr bool kOutApart = false;
};

// Backward. A block is two warpgroups that compute and one that loads. Shared memory, of 227 KB, D' = D rounded up to 64:
// (4 N + 4 kStages M) D' bytes for K, V, Q and dO, and to d 128 2 kStages M N for dS and 4 M D' for dQ in fp32 on its way out; above, 4 kStages M
// N for dS of both blocks of a cluster, 2 M N for P and 256 N for what a block needs of its peer's K: 194, 193, 193, 201 and 217 KB (at d 256
// with one stage of dO); 177 KB at d 192 with 128 of V. And 1 KB of zeros in padded batches, and at d 96 and 128 where there are two stages of dQ
// (choose_dq_stages in backward_launch.cuh) 32 KB for the second. PERF: at d 64 that is no faster.
// To d 128 a warpgroup has 64 of 128 keys. Accumulator registers of a thread, of 240: S and dP = M / 2 each, dK and dV = D / 2 each: 192 at
// d 64 and 128; dQ takes the place of dP. M is what D' leaves for dQ in two pieces of 64 x 64.
// Above, both warpgroups have the same 64 keys: one S and dV, the other dP and dK: M / 2 and D / 2, and 32 of dQ: 192 at d 256. Two thread
// blocks, kCluster, have a task together. Above d 256 each has half the columns: D is 256 there, and in place of the peer's dS and K it holds
// what comes from the peer of S and dP, 8 M N: 217 KB.
template <int kHeadDim>
struct BackwardTile;
template <>
struct BackwardTile<64> {
  static constexpr int kBlockM = 128, kBlockN = 128, kStages = 2, kDoutStages = 2, kDqStages = 1, kCluster = 1;
};
template <>
struct BackwardTile<96> {
  static constexpr int kBlockM = 64, kBlockN = 128, kStages = 2, kDoutStages = 2, kDqStages = 2, kCluster = 1;
};
template <>
struct BackwardTile<80> : BackwardTile<96> {};
template <>
struct BackwardTile<128> {
  static constexpr int kBlockM = 64, kBlockN = 128, kStages = 2, kDoutStages = 2, kDqStages = 2, kCluster = 1;
};
template <>
struct BackwardTile<192> {
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 2, kDoutStages = 2, kCluster = 2;
};
template <>
struct BackwardTile<256> {
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 2, kDoutStages = 1, kCluster = 2;
};
template <>
struct BackwardTile<512> : BackwardTile<256> {};

// Backward of short sequences: a block is one warpgroup. Shared memory: three pairs of tiles, dS and rows, 58 and 106 KB. Accumulator registers of
// a thread: S and dP 32 each, dK and dV D / 2 each: 128 of 168 at d 64, 192 of 255 at d 128. PERF: three blocks on a multiprocessor, not two, 11 to
// 19 %. TUNING.md, "Small thread blocks".
template <int kHeadDim>
struct BackwardShortTile {
  static constexpr int kBlockM = 64, kBlockN = 64, kBlocksPerSm = kHeadDim > 64 ? 2 : 3;
};

}  // namespace hf_flash2::sm90
