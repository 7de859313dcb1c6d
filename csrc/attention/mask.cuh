// Which keys a query sees: window (causal is a window with right = 0), sequence length, and the key mask of sequences with holes.
// Row i of a sequence sees key j if i + shift - left <= j <= i + shift + right with shift = len_k - len_q (bottom-right alignment).
// Blocks nobody sees are never visited; masks are applied only on blocks that a limit crosses.
#pragma once
#include <limits.h>
#include <math.h>

#include "attention/sequence.cuh"

namespace hf_flash2 {

// The byte at `pointer`, or `otherwise` when `valid` is false; without a branch.
__device__ __forceinline__ uint32_t load_or(const uint8_t* pointer, bool valid, uint32_t otherwise) {
  uint32_t value = otherwise;
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p ld.global.nc.u8 %0, [%1];\n}" : "+r"(value) : "l"(pointer), "r"(int(valid)));
  return value;
}

struct Mask {
  const HfFlash2ForwardParams& params;  // in constant memory: what is read from it costs no registers
  int len_q;
  int len_k;
  const uint8_t* visible;  // key mask from the first key of the range on, or null when every key of the range is real

  __device__ __forceinline__ Mask(const HfFlash2ForwardParams& params, int batch, Sequence q, Sequence k)
      : Mask(params, batch, q, k, params.key_mask != nullptr && params.sequences_k.ranges[2 * params.batch + batch] != 0) {}

  // For who knows already whether the key mask has to be read.
  __device__ __forceinline__ Mask(const HfFlash2ForwardParams& params, int batch, Sequence q, Sequence k, bool has_holes)
      : params(params), len_q(q.length), len_k(k.length), visible(nullptr) {
    if (has_holes) visible = params.key_mask + batch * params.key_mask_batch_stride + k.start;
  }

  // Keys visible left and right of the diagonal; "all" is far beyond any length and far from overflow.
  __device__ __forceinline__ int left() const { return params.window_left < 0 ? INT_MAX / 4 : params.window_left; }
  __device__ __forceinline__ int right() const { return params.window_right < 0 ? INT_MAX / 4 : params.window_right; }
  __device__ __forceinline__ int shift() const { return len_k - len_q; }

  // First and last key (inclusive) row i may see; empty when first > last.
  __device__ __forceinline__ int first_key(int row) const { return max(0, row + shift() - left()); }
  __device__ __forceinline__ int last_key(int row) const { return min(len_k - 1, row + shift() + right()); }

  // Key blocks [begin, end) that some row of [row_begin, row_end) sees.
  __device__ __forceinline__ int key_block_begin(int row_begin, int block_n) const { return first_key(row_begin) / block_n; }
  __device__ __forceinline__ int key_block_end(int row_end, int block_n) const {
    return max(0, last_key(min(row_end, len_q) - 1) + block_n) / block_n;
  }

  // First and last query (inclusive) that may see key j; empty when first > last, as it is for a hole and for keys past the end.
  __device__ __forceinline__ int first_query(int key) const { return key - shift() - right(); }
  __device__ __forceinline__ int last_query(int key) const {
    const bool real = key < len_k && (visible == nullptr || visible[key] != 0);
    return real ? key - shift() + left() : -1;
  }

  // Query blocks [begin, end) with some row that sees a key of [key_begin, key_end).
  __device__ __forceinline__ int query_block_begin(int key_begin, int block_m) const {
    return max(0, key_begin - shift() - right()) / block_m;
  }
  __device__ __forceinline__ int query_block_end(int key_end, int block_m) const {
    const int last_row = min(len_q - 1, min(key_end, len_k) - 1 - shift() + left());
    return max(0, last_row + block_m) / block_m;
  }

  // Query blocks before this one see no key but of the first block.
  __device__ __forceinline__ int lone_query_block_end(int block_n, int block_m) const {
    return len_k <= block_n ? INT_MAX : query_block_begin(block_n, block_m);
  }
  // Whether some row of a query block sees a key of the first block, and none any other.
  __device__ __forceinline__ bool is_lone(int query_block, int block_n, int block_m) const {
    return len_k > 0 && query_block < lone_query_block_end(block_n, block_m) && query_block >= query_block_begin(0, block_m) &&
           query_block < query_block_end(block_n, block_m);
  }

  // Key blocks [begin, end) that every row of [row_begin, row_end) sees whole, holes apart.
  __device__ __forceinline__ int unmasked_block_begin(int row_end, int block_n) const {
    return (max(0, row_end - 1 + shift() - left()) + block_n - 1) / block_n;
  }
  // NOTE: without the one that the first row might see before any other, where a window ends: softmax needs a maximum to begin with.
  __device__ __forceinline__ int unmasked_block_end(int row_begin, int block_n) const {
    return max(0, last_key(row_begin) + (params.window_right < 0)) / block_n;
  }

  // Query blocks [begin, end) every row of which sees every key of [key_begin, key_end).
  __device__ __forceinline__ int unmasked_query_block_begin(int key_end, int block_m) const {
    if (visible != nullptr || key_end > len_k) return INT_MAX;
    return (max(0, key_end - 1 - shift() - right()) + block_m - 1) / block_m;
  }
  __device__ __forceinline__ int unmasked_query_block_end(int key_begin, int block_m) const {
    return max(0, key_begin - shift() + left() + 1) / block_m;
  }

  // Whether some pair of the block (rows from row_begin on, keys from key_begin on) is masked, holes apart.
  __device__ __forceinline__ bool needed(int row_begin, int row_end, int key_begin, int key_end) const {
    return key_end > len_k || key_end - 1 > row_begin + shift() + right() || key_begin < row_end - 1 + shift() - left();
  }

  // Of the columns 0, 1, 8, 9, 16, 17 .. of an accumulator row, in this order: a bit for each of the first 32 that is at most `last`.
  static __device__ __forceinline__ uint32_t columns_up_to(int last) {
    const int count = last < 0 ? 0 : min((last >> 3) * 2 + min(last & 7, 1) + 1, 32);
    return static_cast<uint32_t>((uint64_t{1} << count) - 1);
  }

  // Of the same columns of the keys from `key_begin` on: a bit for each that the key mask shows, all where there is none. By a whole warp.
  // PERF: a lane reads four bytes for all lanes, where those of its own columns are up to 32.
  __device__ __forceinline__ uint32_t visible_columns(int key_begin) const {
    if (visible == nullptr) return ~0u;
    const int lane = threadIdx.x % 32, t = lane % 4;
    uint32_t seen[4];  // bit l of seen[i]: key 4 l + i
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = key_begin + lane * 4 + i;
      seen[i] = __ballot_sync(0xffffffffu, key < len_k && visible[key] != 0);
    }
    // Of tile n, this lane has keys 8 n + 2 t and the next.
    const uint32_t even = t % 2 == 0 ? seen[0] : seen[2], odd = t % 2 == 0 ? seen[1] : seen[3];
    return (even >> t / 2 & 0x55555555) | (odd >> t / 2 & 0x55555555) << 1;
  }

  // Sets the scores of a row, one half of an accumulator's, to -inf in columns without a bit in `seen`, in the order of columns_up_to().
  // PERF: bits go to predicates seven at a time, where a comparison each, with both limits, takes three instructions an element for one.
  template <int kNTiles>
  static __device__ __forceinline__ void keep_columns(float (&scores)[kNTiles][4], int half, uint32_t seen) {
    static_assert(kNTiles <= 16, "32 columns a row");
#pragma unroll
    for (int i = 0; i < 2 * kNTiles; ++i) {
      if (!(seen & 1u << i)) scores[i / 2][half * 2 + i % 2] = -INFINITY;
    }
  }

  // Sets the masked scores of one mma.sync accumulator tile array to -inf: kMTiles x kNTiles tiles of 16 x 8 whose first row and column
  // in this thread are `row` (lane / 4 added) and `key` (2 * (lane % 4) added); and those of columns without a bit in `visible`.
  // 2^heads_log2 rows, those of as many heads, are one query.
  template <int kMTiles, int kNTiles>
  __device__ __forceinline__ void apply(float (&scores)[kMTiles][kNTiles][4], int row, int key, uint32_t visible = ~0u,
                                        int heads_log2 = 0) const {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int query = (row + m * 16 + half * 8) >> heads_log2;
        keep_columns(scores[m], half, columns_up_to(last_key(query) - key) & ~columns_up_to(first_key(query) - key - 1) & visible);
      }
    }
  }

  // The same for scores computed the other way round: rows are keys, columns queries. `first` and `last` are first_query and last_query of
  // this thread's two keys, holes included, relative to its first column (2 * (lane % 4) of the tile).
  template <int kNTiles>
  static __device__ __forceinline__ void apply_transposed(float (&scores)[kNTiles][4], const int (&first)[2], const int (&last)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) keep_columns(scores, half, columns_up_to(last[half]) & ~columns_up_to(first[half] - 1));
  }

  // The same for the holes of a sequence that has some (visible != null), in the mma.sync kernels. PERF: with visible_columns() they
  // lost 4 % at d 256, forward, without any hole, as ptxas places all else differently. TUNING.md, "Other GPUs".
  template <int kMTiles, int kNTiles>
  __device__ __forceinline__ void apply_holes(float (&scores)[kMTiles][kNTiles][4], int key) const {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int j = key + n * 8 + c;
        if (load_or(visible + j, j < len_k, 1) != 0) continue;
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) scores[m][n][c] = scores[m][n][2 + c] = -INFINITY;
      }
    }
  }
};

}  // namespace hf_flash2
