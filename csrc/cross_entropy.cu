// Cross-entropy of rows of logits, its gradient in their place: loss = log(sum(exp(x))) - x[label], gradient = softmax(x) - one_hot(label).
// One block per row. The first pass over the row finds maximum and sum at once (online softmax: Milakov and Gimelshein, arXiv:1805.02867),
// the second replaces each logit; both in float32 and base 2, with one exponential per element. A row with NaN or +inf and one of -inf alone
// end as NaN, loss and gradient, as in torch's log_softmax; so does one whose label is no class. Called by api.cpp.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <float.h>

#include <type_traits>

#include "attention/softmax.cuh"
#include "cross_entropy.h"
#include "launch.h"

namespace hf_flash2 {
namespace {

constexpr int kWarp = 32, kMaxThreads = 1024;
constexpr int kAtOnce = 32;  // elements that a thread has in flight

template <typename T>
constexpr int kVector = 16 / sizeof(T);  // elements of one 16-byte access
template <typename T>
constexpr int kVectorsAtOnce = kAtOnce / kVector<T>;

// What a thread, a warp or the block has seen of the row.
struct Seen {
  float max;  // NOTE: -FLT_MAX before anything else, so that -inf is a number like others: exp(-inf - max) = 0, also where all are -inf
  float sum;  // of exp(x - max)
};

// fmaxf passes over NaN, the sum does not.
template <int kCount>
__device__ __forceinline__ void see(Seen& seen, const float (&x)[kCount]) {
  float max = seen.max;
#pragma unroll
  for (int i = 0; i < kCount; ++i) max = fmaxf(max, x[i]);
  float sum = seen.sum * exp2_approx((seen.max - max) * kLog2e);
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum += exp2_approx((x[i] - max) * kLog2e);
  seen = {max, sum};
}

// By all lanes together, the same bits in each of them.
__device__ __forceinline__ Seen seen_by_warp(Seen seen) {
  float max = seen.max;
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) max = fmaxf(max, __shfl_xor_sync(0xffffffffu, max, lanes));
  float sum = seen.sum * exp2_approx((seen.max - max) * kLog2e);
#pragma unroll
  for (int lanes = 1; lanes < kWarp; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  return {max, sum};
}

__device__ __forceinline__ float load(const float* x) { return *x; }
__device__ __forceinline__ float load(const __half* x) { return __half2float(*x); }
__device__ __forceinline__ float load(const __nv_bfloat16* x) { return __bfloat162float(*x); }

__device__ __forceinline__ void store(float* element, float x) { *element = x; }
__device__ __forceinline__ void store(__half* element, float x) { *element = __float2half_rn(x); }
__device__ __forceinline__ void store(__nv_bfloat16* element, float x) { *element = __float2bfloat16_rn(x); }

// The vectors first, first + blockDim.x, ... of the row; -inf beyond its end.
template <typename T>
__device__ __forceinline__ void load(const uint4* body, int vectors, int first, float (&x)[kAtOnce]) {
  const uint32_t beyond = std::is_same_v<T, float> ? 0xff800000u : std::is_same_v<T, __half> ? 0xfc00fc00u : 0xff80ff80u;
  uint4 loaded[kVectorsAtOnce<T>];
#pragma unroll
  for (int j = 0; j < kVectorsAtOnce<T>; ++j) {
    loaded[j] = make_uint4(beyond, beyond, beyond, beyond);
    const int index = first + j * static_cast<int>(blockDim.x);
    if (index < vectors) loaded[j] = body[index];
  }
#pragma unroll
  for (int j = 0; j < kVectorsAtOnce<T>; ++j) {
    const uint32_t words[4] = {loaded[j].x, loaded[j].y, loaded[j].z, loaded[j].w};
    float* elements = x + j * kVector<T>;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        elements[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack<T>(words[i]);
        elements[2 * i] = pair.x, elements[2 * i + 1] = pair.y;
      }
    }
  }
}

// As above. Evicted first from the cache: nobody comes back to it in this kernel.
template <typename T>
__device__ __forceinline__ void store(uint4* body, int vectors, int first, const float (&x)[kAtOnce]) {
#pragma unroll
  for (int j = 0; j < kVectorsAtOnce<T>; ++j) {
    uint32_t words[4];
    const float* elements = x + j * kVector<T>;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        words[i] = __float_as_uint(elements[i]);
      } else {
        words[i] = pack<T>(elements[2 * i], elements[2 * i + 1]);
      }
    }
    const int index = first + j * static_cast<int>(blockDim.x);
    if (index < vectors) __stcs(body + index, make_uint4(words[0], words[1], words[2], words[3]));
  }
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads) cross_entropy_kernel(const __grid_constant__ HfFlash2CrossEntropyParams p) {
  __shared__ Seen of_warps[kMaxThreads / kWarp];
  const int thread = threadIdx.x, threads = blockDim.x, lane = thread % kWarp;
  const int64_t label = p.labels[blockIdx.x];
  const bool is_class = label >= 0 && label < p.columns;

  // The row is `head` elements up to the first multiple of 16 bytes, vectors, and fewer elements than one vector has. The elements on both
  // sides have a thread each.
  T* row = static_cast<T*>(p.logits) + blockIdx.x * p.row_stride;
  const int head = min(p.columns, static_cast<int>(-reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T)));
  const int vectors = (p.columns - head) / kVector<T>;
  uint4* body = reinterpret_cast<uint4*>(row + head);
  T* edge = row + (thread < head ? thread : thread + vectors * kVector<T>);
  const bool has_edge = thread < p.columns - vectors * kVector<T>;
  const int step = kVectorsAtOnce<T> * threads;

  const float edge_logit[1] = {has_edge ? load(edge) : -INFINITY};
  float x[kAtOnce];
  Seen seen{-FLT_MAX, 0.f};
  for (int first = thread; first < vectors; first += step) {
    load<T>(body, vectors, first, x);
    see(seen, x);
  }
  see(seen, edge_logit);

  seen = seen_by_warp(seen);
  if (lane == 0) of_warps[thread / kWarp] = seen;
  const float label_logit = is_class ? load(row + label) : NAN;
  __syncthreads();  // the row's sum is complete, and all have read the label's logit before it is replaced
  seen = seen_by_warp(lane < threads / kWarp ? of_warps[lane] : Seen{-FLT_MAX, 0.f});
  const float log2_sum = is_class ? log2f(seen.sum) : NAN;
  const auto probability = [&](float logit) { return exp2_approx(fmaf(logit - seen.max, kLog2e, -log2_sum)); };

  // PERF: backwards, as what was read last is still in the caches. On an H200, 2,048 rows of 128,256 in bfloat16 take 0.32 ms, a plain copy
  // of them 0.25, and torch's functions 2.36.
  for (int first = thread + (vectors - 1) / step * step; first >= 0; first -= step) {
    load<T>(body, vectors, first, x);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) x[i] = probability(x[i]);
    store<T>(body, vectors, first, x);
  }
  if (has_edge) store(edge, probability(edge_logit[0]));
  __syncthreads();  // whoever has the label's column has written it
  if (thread == 0) {
    const float log_p = fmaf(log2_sum, -kLn2, label_logit - seen.max);
    p.losses[blockIdx.x] = -log_p;
    if (is_class) store(row + label, expm1f(log_p));  // before rounding: p - 1 cancels where p is near 1
  }
}

template <typename T>
void run(const HfFlash2CrossEntropyParams& p) {
  // Blocks that share a multiprocessor (four, two or one, at 64 registers a thread) hold about 256 KB of rows: what its L1 keeps between the
  // passes, and with all multiprocessors L2. Rows above that have one block.
  const int64_t row_bytes = int64_t{p.columns} * sizeof(T);
  const int threads = row_bytes <= 64 * 1024 ? 256 : row_bytes <= 128 * 1024 ? 512 : kMaxThreads;
  launch<cross_entropy_kernel<T>>(p, p.rows, threads, 0, p.device, p.stream, "cross-entropy");
}

}  // namespace

void run_cross_entropy(const HfFlash2CrossEntropyParams& params) {
  if (params.dtype == kFloat32) return run<float>(params);
  if (params.dtype == kBFloat16) return run<__nv_bfloat16>(params);
  run<__half>(params);
}

}  // namespace hf_flash2
