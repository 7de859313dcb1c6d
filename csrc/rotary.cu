// Rotary position embedding of q and k in one kernel, forward and backward: what eager attention does in a dozen elementwise ones.
//   out = x * cos + rotate(x) * sin, where rotate(x1, x2) = (-x2, x1) for each pair (RoFormer, arXiv:2104.09864).
// Pairs are (i, i + rotary_dim / 2); elements from rotary_dim on are copied. Every product and sum is rounded to the tensors' type, as eager's are,
// so that the result is bit for bit eager's. The inverse, for gradients, multiplies by the transposed matrix. One block per token; a thread's item
// is two vectors of one head. Called by api.cpp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/convert.cuh"
#include "launch.h"
#include "rotary.h"

namespace hf_flash2 {
namespace {

constexpr int kThreads = 128;
constexpr int kVector = 8;  // elements of one 16-byte access

struct Vector {
  uint32_t pairs[kVector / 2];
};

template <typename T>
__device__ Vector load(const void* tensor, int64_t offset) {
  const uint4 loaded = *reinterpret_cast<const uint4*>(static_cast<const T*>(tensor) + offset);
  return {{loaded.x, loaded.y, loaded.z, loaded.w}};
}

template <typename T>
__device__ void store(void* tensor, int64_t offset, const Vector& v) {
  *reinterpret_cast<uint4*>(static_cast<T*>(tensor) + offset) = make_uint4(v.pairs[0], v.pairs[1], v.pairs[2], v.pairs[3]);
}

// round(round(a * c) + round(b * s)), two elements at a time
template <typename T>
__device__ uint32_t rotate(float2 a, float2 c, float2 b, float2 s) {
  const float2 ac = unpack<T>(pack<T>(a.x * c.x, a.y * c.y));
  const float2 bs = unpack<T>(pack<T>(b.x * s.x, b.y * s.y));
  return pack<T>(ac.x + bs.x, ac.y + bs.y);
}

__device__ float2 negative(float2 x) { return make_float2(-x.x, -x.y); }

// first, second: the two halves of the pairs. Forward: (x1 c1 - x2 s1, x2 c2 + x1 s2); inverse: (y1 c1 + y2 s2, y2 c2 - y1 s1).
template <typename T>
__device__ void rotate_halves(Vector& first, Vector& second, const Vector (&cos)[2], const Vector (&sin)[2], bool inverse) {
#pragma unroll
  for (int i = 0; i < kVector / 2; ++i) {
    const float2 x1 = unpack<T>(first.pairs[i]), x2 = unpack<T>(second.pairs[i]);
    const float2 c1 = unpack<T>(cos[0].pairs[i]), c2 = unpack<T>(cos[1].pairs[i]);
    const float2 s1 = unpack<T>(sin[0].pairs[i]), s2 = unpack<T>(sin[1].pairs[i]);
    first.pairs[i] = inverse ? rotate<T>(x1, c1, x2, s2) : rotate<T>(x1, c1, negative(x2), s1);
    second.pairs[i] = inverse ? rotate<T>(x2, c2, negative(x1), s1) : rotate<T>(x2, c2, x1, s2);
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) rotary_kernel(const __grid_constant__ HfFlash2RotaryParams p) {
  const int batch = blockIdx.x / p.seqlen, token = blockIdx.x % p.seqlen;
  const int64_t angles = batch * p.angle_batch_stride + int64_t{token} * p.rotary_dim;
  const int rotated_items = p.rotary_dim / (2 * kVector), items = rotated_items + (p.head_dim - p.rotary_dim) / kVector;

  for (int index = threadIdx.x; index < (p.heads_q + p.heads_k) * items; index += kThreads) {
    const int head = index / items, item = index % items;
    const bool is_q = head < p.heads_q;
    const HfFlash2Tensor &in = is_q ? p.q : p.k, &out = is_q ? p.q_out : p.k_out;
    const int head_of_tensor = is_q ? head : head - p.heads_q;
    const int64_t from = batch * in.batch_stride + token * in.token_stride + head_of_tensor * in.head_stride;
    const int64_t to = batch * out.batch_stride + token * out.token_stride + head_of_tensor * out.head_stride;

    if (item >= rotated_items) {
      const int d = p.rotary_dim + (item - rotated_items) * kVector;
      store<T>(out.data, to + d, load<T>(in.data, from + d));
      continue;
    }
    const int d1 = item * kVector, d2 = d1 + p.rotary_dim / 2;
    Vector first = load<T>(in.data, from + d1), second = load<T>(in.data, from + d2);
    const Vector cos[2] = {load<T>(p.cos, angles + d1), load<T>(p.cos, angles + d2)};
    const Vector sin[2] = {load<T>(p.sin, angles + d1), load<T>(p.sin, angles + d2)};
    rotate_halves<T>(first, second, cos, sin, p.inverse);
    store<T>(out.data, to + d1, first);
    store<T>(out.data, to + d2, second);
  }
}

}  // namespace

void run_rotary(const HfFlash2RotaryParams& params) {
  const int64_t tokens = int64_t{params.batch} * params.seqlen;
  if (params.dtype == kBFloat16) {
    launch<rotary_kernel<__nv_bfloat16>>(params, tokens, kThreads, 0, params.device, params.stream, "rotary");
  } else {
    launch<rotary_kernel<__half>>(params, tokens, kThreads, 0, params.device, params.stream, "rotary");
  }
}

}  // namespace hf_flash2
