// Host side of TMA: tensor maps, made from strides. PTX ISA: "Tensor-map"; CUDA driver API: cuTensorMapEncodeTiled.
#pragma once
#include <cuda.h>
#include <cudaTypedefs.h>

#include "launch.h"

namespace hf_flash2::sm90 {

// Taken from the driver at run time, so that the library does not link to libcuda and loads on machines without one.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result),
               "looking for cuTensorMapEncodeTiled");
    if (function == nullptr) fail_launch(kErrorUnsupported, "the NVIDIA driver has no cuTensorMapEncodeTiled: update it");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// How TMA sees the tokens of a tensor: packed, as one row of all; of a paged cache, as pages.
struct Rows {
  int tokens, batch;  // of a row, and rows

  static Rows of_queries(const HfFlash2ForwardParams& p) {
    return p.sequences_q.cu_seqlens != nullptr ? Rows{p.total_q, 1} : Rows{p.max_seqlen_q, p.batch};
  }
  static Rows of_keys(const HfFlash2ForwardParams& p) {
    if (p.block_table != nullptr) return {p.page_size, p.pages};
    return p.sequences_k.cu_seqlens != nullptr ? Rows{p.total_k, 1} : Rows{p.max_seqlen_k, p.batch};
  }
};

// Whether TMA can read a tensor of these sizes: it knows no stride 0 along a dimension with more than one element (expanded tensors).
inline bool tma_can_read(const HfFlash2Tensor& tensor, Rows rows, int heads) {
  return (tensor.token_stride != 0 || rows.tokens == 1) && (tensor.head_stride != 0 || heads == 1) &&
         (tensor.batch_stride != 0 || rows.batch == 1) && rows.tokens > 0 && heads > 0 && rows.batch > 0;
}

struct TensorMapDimension {
  int size;        // elements
  int64_t stride;  // in elements
  int box;         // of these, in one copy
};

// Map over head_dim and more dimensions, the innermost first, whose box is 64 columns of the rows that the others make, with the 128-byte swizzle
// of panel_descriptor().
// A miss brings 128 bytes to L2, a row of the box. PERF: in place of 256, which memory's limit does not bear: copies alone read 4,490 GB/s of an
// H200's memory with 128, 4,190 with 256. TUNING.md, "Brief calls".
template <int kMore>
CUtensorMap encode_tensor_map(void* data, int dtype, int head_dim, const TensorMapDimension (&dimensions)[kMore]) {
  cuuint64_t sizes[kMore + 1] = {static_cast<cuuint64_t>(head_dim)}, strides[kMore];
  cuuint32_t box[kMore + 1] = {64}, steps[kMore + 1] = {1};
  for (int i = 0; i < kMore; ++i) {
    const TensorMapDimension& dimension = dimensions[i];
    sizes[i + 1] = dimension.size;
    // A dimension of one element is never stepped along; TMA still wants a stride that is a positive multiple of 16 bytes.
    strides[i] = dimension.size == 1 || dimension.stride == 0 ? 16 : dimension.stride * 2;
    box[i + 1] = dimension.box, steps[i + 1] = 1;
  }
  CUtensorMap map;
  const CUresult result =
      tensor_map_encoder()(&map, dtype == kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, kMore + 1, data,
                           sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) fail_launch(kErrorCuda, "making a tensor map: driver error ", result);
  return map;
}

// Tiles of `tile_rows` tokens of one head; coordinates (column, token, head, batch).
inline CUtensorMap make_tensor_map(const HfFlash2Tensor& tensor, int dtype, int head_dim, Rows rows, int heads, int tile_rows) {
  return encode_tensor_map(
      tensor.data, dtype, head_dim,
      {{rows.tokens, tensor.token_stride, tile_rows}, {heads, tensor.head_stride, 1}, {rows.batch, tensor.batch_stride, 1}});
}

// Rows of sequences, none longer than `longest`.
struct SequenceRows {
  Rows rows;
  int longest;

  static SequenceRows of_queries(const HfFlash2ForwardParams& p) { return {Rows::of_queries(p), p.max_seqlen_q}; }
  static SequenceRows of_keys(const HfFlash2ForwardParams& p) { return {Rows::of_keys(p), p.max_seqlen_k}; }
  Rows of_longest() const { return {longest, rows.batch}; }
  int64_t token_stride(const HfFlash2Tensor& tensor) const {
    constexpr int kSmallest = 8;  // of one token, which need have none
    return rows.tokens == 1 ? kSmallest : tensor.token_stride;
  }
  void* begin_of_map(const HfFlash2Tensor& tensor) const {
    return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(tensor.data) - static_cast<uintptr_t>(longest * token_stride(tensor) * 2));
  }
};

// Tiles of `tile_rows` tokens of one head that end with their sequence: what lies behind it, another sequence or padding, arrives as zeros, as
// NaN and infinities there would survive a multiplication with probability 0; a store leaves it as it is. Two dimensions step from token to token.
// The rows of one are limited and counted from the end: row `longest` - n is n tokens before the end of the sequence. The other says where that
// end is. So the tensor begins `longest` rows before its data, where nothing is read, unless a box is all outside: that is an illegal access, and
// none may be. Coordinates (column, row, end, head, batch).
// PERF: in place of zeros stored by those that compute, who wait for each other for that. Backward of batches padded to 512, 2k, 4k, filled to 30 %,
// d 64 9 3 3 %, d 128 4 1 1. TUNING.md, "Rows behind a sequence".
inline CUtensorMap make_sequence_map(const HfFlash2Tensor& tensor, int dtype, int head_dim, SequenceRows sequences, int heads,
                                     int tile_rows) {
  return encode_tensor_map(sequences.begin_of_map(tensor), dtype, head_dim,
                           {{sequences.longest, sequences.token_stride(tensor), tile_rows},
                            {sequences.rows.tokens + 1, sequences.token_stride(tensor), 1},
                            {heads, tensor.head_stride, 1},
                            {sequences.rows.batch, tensor.batch_stride, 1}});
}

// The same of tiles of `tile_rows` rows, those of `tile_heads` heads of one token after another; coordinates (column, head, row, end, batch).
inline CUtensorMap make_sequence_map_heads_first(const HfFlash2Tensor& tensor, int dtype, int head_dim, SequenceRows sequences, int heads,
                                                 int tile_rows, int tile_heads) {
  return encode_tensor_map(sequences.begin_of_map(tensor), dtype, head_dim,
                           {{heads, tensor.head_stride, tile_heads},
                            {sequences.longest, sequences.token_stride(tensor), tile_rows / tile_heads},
                            {sequences.rows.tokens + 1, sequences.token_stride(tensor), 1},
                            {sequences.rows.batch, tensor.batch_stride, 1}});
}

// Of one place of 8 columns, for boxes of `tile_rows` rows behind these: zeros, whatever the other coordinates are.
inline CUtensorMap make_zero_map(const HfFlash2Tensor& tensor, int dtype, int tile_rows) {
  return encode_tensor_map(tensor.data, dtype, 8, {{1, 0, tile_rows}, {1, 0, 1}, {1, 0, 1}, {1, 0, 1}});
}

// Whether there are as many addresses before the tensor as those maps begin earlier. Some allocators begin low, at 13 GB.
inline bool has_room_before(const HfFlash2Tensor& tensor, int longest) {
  return reinterpret_cast<uintptr_t>(tensor.data) / 2 > static_cast<uintptr_t>(longest * tensor.token_stride);
}

// Those of a backward, in blocks of so many tokens; arguments: of its kernel.
template <typename Arguments>
void make_backward_maps(Arguments& arguments, const HfFlash2BackwardParams& params, int block_m, int block_n) {
  const HfFlash2ForwardParams& forward = params.forward;
  const SequenceRows queries = SequenceRows::of_queries(forward), keys = SequenceRows::of_keys(forward);
  arguments.q = make_sequence_map(forward.q, forward.dtype, forward.head_dim, queries, forward.heads_q, block_m);
  arguments.dout = make_sequence_map(params.dout, forward.dtype, forward.head_dim_v, queries, forward.heads_q, block_m);
  arguments.k = make_sequence_map(forward.k, forward.dtype, forward.head_dim, keys, forward.heads_k, block_n);
  arguments.v = make_sequence_map(forward.v, forward.dtype, forward.head_dim_v, keys, forward.heads_k, block_n);
  arguments.zero_queries = make_tensor_map(forward.q, forward.dtype, forward.head_dim, queries.of_longest(), forward.heads_q, block_m);
  arguments.zero_keys = make_tensor_map(forward.k, forward.dtype, forward.head_dim, keys.of_longest(), forward.heads_k, block_n);
  arguments.map_rows_q = queries.longest, arguments.map_rows_k = keys.longest;
}

}  // namespace hf_flash2::sm90
