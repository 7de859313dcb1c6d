// New keys and values into a cache, behind those that it has of each sequence, on pages or not: in one kernel, and where the lengths and the
// block table are known, on the device. One block per token. Called by api.cpp.
// PERF: it takes 3 to 5 us of a step. A token is loaded before its place is known, 0.4 to 1 us faster. TUNING.md, "Brief calls".
#include "append.h"
#include "attention/pages.cuh"
#include "launch.h"

namespace hf_flash2 {
namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;  // elements of one 16-byte access

// The 16-byte pieces of a token, over all its heads, and where they lie in a tensor [batch or page, token, heads, head dim].
struct TokenVectors {
  int vectors, count;

  __device__ __forceinline__ TokenVectors(int heads, int head_dim) : vectors(head_dim / kVector), count(heads * vectors) {}
  __device__ __forceinline__ uint4* at(const HfFlash2Tensor& tensor, int batch, int token, int i) const {
    uint16_t* const row = static_cast<uint16_t*>(tensor.data) + batch * tensor.batch_stride + token * tensor.token_stride;
    return reinterpret_cast<uint4*>(row + i / vectors * tensor.head_stride + i % vectors * kVector);
  }
};

__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ HfFlash2AppendParams p) {
  const int batch = blockIdx.x / p.seqlen, token = blockIdx.x % p.seqlen;
  const TokenVectors of_k(p.heads, p.head_dim), of_v(p.heads, p.head_dim_v);
  uint4 k = {}, v = {};
  const auto load = [&](int i) {
    if (i < of_k.count) k = *of_k.at(p.k, batch, token, i);
    if (i < of_v.count) v = *of_v.at(p.v, batch, token, i);
  };
  load(threadIdx.x);
  const int length = p.lengths[batch], key = length + token;
  if (token == 0 && threadIdx.x == 0) {
    p.ranges[batch] = 0;
    p.ranges[p.batch + batch] = length < 0 ? 0 : length > p.capacity - p.seqlen ? p.capacity : length + p.seqlen;
  }
  if (length < 0 || length >= p.capacity - token) return;
  const KeyPlace place =
      p.block_table == nullptr ? KeyPlace{batch, key} : find_key(p.block_table, p.block_table_stride, p.page_size, batch, key);
  for (int i = threadIdx.x; i < max(of_k.count, of_v.count); i += kThreads) {
    if (i >= kThreads) load(i);
    if (i < of_k.count) *of_k.at(p.k_cache, place.page, place.token, i) = k;
    if (i < of_v.count) *of_v.at(p.v_cache, place.page, place.token, i) = v;
  }
}

}  // namespace

void run_append(const HfFlash2AppendParams& params) {
  launch<append_kernel>(params, int64_t{params.batch} * params.seqlen, kThreads, 0, params.device, params.stream, "append to a cache");
}

}  // namespace hf_flash2
