// New keys and values into a cache, behind those that it has of each sequence, on pages or not: in one kernel, and where the lengths and the
// block table are known, on the device. One block per token. Called by api.cpp.
// PERF: it takes 3 to 5 us of a step. Tried and left: the Hopper forward launched early behind it: one H200, 32/8 heads of 128 and 64, 1 and 8
// sequences of 1k 0 to 1 us faster, 8 of 8k 81 54 -> 84 58 us.
#include "append.h"
#include "attention/pages.cuh"
#include "launch.h"

namespace hf_flash2 {
namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;  // elements of one 16-byte access

__device__ void copy_token(const HfFlash2Tensor& from, int batch, int token, const HfFlash2Tensor& to, const KeyPlace& place, int heads,
                           int head_dim) {
  const uint16_t* const source = static_cast<const uint16_t*>(from.data) + batch * from.batch_stride + token * from.token_stride;
  uint16_t* const destination = static_cast<uint16_t*>(to.data) + place.page * to.batch_stride + place.token * to.token_stride;
  const int vectors = head_dim / kVector;
  for (int i = threadIdx.x; i < heads * vectors; i += kThreads) {
    const int head = i / vectors, column = i % vectors * kVector;
    *reinterpret_cast<uint4*>(destination + head * to.head_stride + column) =
        *reinterpret_cast<const uint4*>(source + head * from.head_stride + column);
  }
}

__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ HfFlash2AppendParams p) {
  const int batch = blockIdx.x / p.seqlen, token = blockIdx.x % p.seqlen;
  const int length = p.lengths[batch], key = length + token;
  if (token == 0 && threadIdx.x == 0) {
    p.ranges[batch] = 0;
    p.ranges[p.batch + batch] = min(max(length + p.seqlen, 0), p.capacity);
  }
  if (key < 0 || key >= p.capacity) return;
  const KeyPlace place =
      p.block_table == nullptr ? KeyPlace{batch, key} : find_key(p.block_table, p.block_table_stride, p.page_size, batch, key);
  copy_token(p.k, batch, token, p.k_cache, place, p.heads, p.head_dim);
  copy_token(p.v, batch, token, p.v_cache, place, p.heads, p.head_dim_v);
}

}  // namespace

void run_append(const HfFlash2AppendParams& params) {
  launch<append_kernel>(params, int64_t{params.batch} * params.seqlen, kThreads, 0, params.device, params.stream, "append to a cache");
}

}  // namespace hf_flash2
