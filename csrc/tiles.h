// Tile shapes of every kernel, each with its reason. M = query rows, N = key columns, a block is kNWarps warps.
// Shared memory is what decides: 99 KB a block on sm_86, sm_89 and sm_120, 163 KB on sm_80, 227 KB on sm_90.
#pragma once

namespace hf_flash2::sm80 {

// Forward. Shared memory: Q + K + V = (M + 2 N) * D * 2 bytes; every shape fits 99 KB.
// 32 query rows a warp halve the shared-memory reads of K and V against 16; from d 192 on the O accumulator leaves room for 16 only.
template <int kHeadDim>
struct ForwardTile;
template <>
struct ForwardTile<64> {
  static constexpr int kBlockM = 128, kBlockN = 64, kNWarps = 4, kBlocksPerSm = 2;
};
template <>
struct ForwardTile<96> {
  static constexpr int kBlockM = 128, kBlockN = 64, kNWarps = 4, kBlocksPerSm = 2;
};
template <>
struct ForwardTile<128> {
  static constexpr int kBlockM = 128, kBlockN = 64, kNWarps = 4, kBlocksPerSm = 2;
};
template <>
struct ForwardTile<192> {
  static constexpr int kBlockM = 128, kBlockN = 64, kNWarps = 8, kBlocksPerSm = 1;
};
template <>
struct ForwardTile<256> {
  static constexpr int kBlockM = 64, kBlockN = 64, kNWarps = 4, kBlocksPerSm = 2;
};

// Backward. Shared memory: K + V + kStages (Q + dO) + P + dS = (2 N D + 2 kStages M D + 2 M N) * 2 bytes.
// The warps are laid out kWarpsM x kWarpsN over S and dP [M, N], kWarpsKeys x kWarpsDim over dK and dV [N, D], kWarpsM x (the rest) over
// dQ [M, D]. Registers of a thread: S + dP = M N / 128, dK + dV = N D / 128, of 255.
enum class BackwardVariant { kLarge, kSmall };  // kLarge needs 163 KB of shared memory, kSmall 99 KB

template <int kHeadDim, BackwardVariant kVariant>
struct BackwardTile;
template <>
struct BackwardTile<64, BackwardVariant::kLarge> {
  static constexpr int kBlockM = 128, kBlockN = 128, kStages = 2, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<64, BackwardVariant::kSmall> {
  static constexpr int kBlockM = 64, kBlockN = 128, kStages = 1, kWarpsM = 2, kWarpsN = 4, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<96, BackwardVariant::kLarge> {
  static constexpr int kBlockM = 64, kBlockN = 128, kStages = 2, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<96, BackwardVariant::kSmall> {
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 2, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<128, BackwardVariant::kLarge> {
  static constexpr int kBlockM = 64, kBlockN = 128, kStages = 2, kWarpsM = 2, kWarpsN = 4, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<128, BackwardVariant::kSmall> {
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 1, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<192, BackwardVariant::kLarge> {
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 2, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<192, BackwardVariant::kSmall> {
  static constexpr int kBlockM = 32, kBlockN = 64, kStages = 1, kWarpsM = 2, kWarpsN = 4, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<256, BackwardVariant::kLarge> {
  static constexpr int kBlockM = 64, kBlockN = 64, kStages = 1, kWarpsM = 4, kWarpsN = 2, kWarpsKeys = 4, kWarpsDim = 2;
};
template <>
struct BackwardTile<256, BackwardVariant::kSmall> {
  static constexpr int kBlockM = 32, kBlockN = 32, kStages = 1, kWarpsM = 2, kWarpsN = 2, kWarpsKeys = 2, kWarpsDim = 2;
};

}  // namespace hf_flash2::sm80
