// The extern "C" surface: check the params, choose kernel family and template instance, launch, report. See api.h.
#include "api.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <string>
#include <type_traits>

#include "append.h"
#include "cross_entropy.h"
#include "dispatch.h"
#include "rotary.h"
#include "sm80/run.h"
#include "sm90/run.h"
#include "sm90/tensor_map.h"

#ifndef HF_FLASH2_VERSION
#define HF_FLASH2_VERSION "unknown"
#endif
#ifndef HF_FLASH2_ARCHS
#define HF_FLASH2_ARCHS "unknown"
#endif
#ifndef HF_FLASH2_SOURCES
#define HF_FLASH2_SOURCES "unknown"
#endif
#ifndef HF_FLASH2_TOOLKIT
#define HF_FLASH2_TOOLKIT "unknown"
#endif

namespace hf_flash2 {
namespace {

thread_local std::string last_error;

int fail(int code, const std::string& message) {
  last_error = message;
  return code;
}

std::string version_name(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

// Makes `device` current for this thread and restores the previous one. Also where it is current already: a thread that has not used it yet,
// such as autograd's, has no context before, and the driver calls behind tensor maps need one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) : device_(device) {
    check_cuda(cudaGetDevice(&previous_), "reading the current device");
    check_cuda(cudaSetDevice(device), "selecting the device");
  }
  ~DeviceGuard() {
    if (previous_ != device_) cudaSetDevice(previous_);
  }

 private:
  int device_, previous_ = 0;
};

[[noreturn]] void reject(const std::string& name, const std::string& expected, const std::string& got) {
  throw LaunchError(kErrorArgument, name + " must be " + expected + ", got " + got);
}

template <typename Params>
void check_size(const Params& p) {
  if (p.struct_size != sizeof p)
    throw LaunchError(kErrorAbi, "libhf_flash2.so and the Python package are of different versions (params of " +
                                     std::to_string(p.struct_size) + " bytes, library expects " + std::to_string(sizeof p) +
                                     "); run `hf-flash2 build`");
}

void check_address(const char* name, const void* address, size_t alignment, HfFlash2Error code = kErrorArgument) {
  if (reinterpret_cast<uintptr_t>(address) % alignment != 0)
    throw LaunchError(code,
                      std::string("address of ") + name + " must be a multiple of " + std::to_string(alignment) + ", got one that is not");
}

void check_tensor(const char* name, const HfFlash2Tensor& tensor, bool packed) {
  const int64_t strides[] = {tensor.batch_stride, tensor.token_stride, tensor.head_stride};
  for (int64_t stride : strides)
    if (stride % 8 != 0) reject(std::string("strides of ") + name, "multiples of 8 elements", std::to_string(stride));
  check_address(name, tensor.data, 16, kErrorMisaligned);
  if (packed && tensor.batch_stride != 0) reject(std::string("batch stride of packed ") + name, "0", std::to_string(tensor.batch_stride));
}

void check_head_dim(const char* name, int head_dim) {
  if (head_dim <= 0 || head_dim > kMostHeadDim || head_dim % 8 != 0)
    reject(name, "a multiple of 8, at most " + std::to_string(kMostHeadDim), std::to_string(head_dim));
}

// Checks what the kernels rely on; shapes against each other are the caller's business (functional.py).
void check_forward(const HfFlash2ForwardParams& p) {
  if (p.dtype != kFloat16 && p.dtype != kBFloat16) reject("dtype", "float16 (0) or bfloat16 (1)", std::to_string(p.dtype));
  if (p.batch < 0 || p.heads_q < 0 || p.max_seqlen_q < 0 || p.max_seqlen_k < 0)
    reject("sizes", "non-negative", std::to_string(std::min({p.batch, p.heads_q, p.max_seqlen_q, p.max_seqlen_k})));
  if (p.heads_k <= 0 || p.heads_q % p.heads_k != 0)
    reject("heads_q", "a multiple of heads_k", std::to_string(p.heads_q) + " and " + std::to_string(p.heads_k));
  check_head_dim("head_dim", p.head_dim);
  check_head_dim("head_dim_v", p.head_dim_v);
  if (!(p.softmax_scale > 0.f) || p.softmax_scale > 1e38f)
    reject("softmax_scale", "finite and positive (negate q instead)", std::to_string(p.softmax_scale));
  if (!(p.dropout_p >= 0.f && p.dropout_p < 1.f)) reject("dropout_p", "at least 0 and below 1", std::to_string(p.dropout_p));
  if (!(p.softcap >= 0.f && p.softcap < 1e38f)) reject("softcap", "finite, at least 0", std::to_string(p.softcap));
  if (p.dropout_p > 0.f && p.rng_state == nullptr) reject("rng_state", "given with dropout", "none");
  if ((p.sequences_q.cu_seqlens == nullptr) != (p.sequences_k.cu_seqlens == nullptr))
    reject("q and k", "both packed or both dense", "one of each");
  if (p.key_mask != nullptr && p.sequences_k.ranges == nullptr) reject("key_mask", "given with ranges of k", "one without");
  if (p.block_table != nullptr) {
    if (p.sequences_k.ranges == nullptr || p.key_mask != nullptr || p.dropout_p > 0.f)
      reject("block_table", "given with ranges of k, without key_mask and dropout", "another call");
    if (p.page_size <= 0 || p.page_size % kPageMultiple != 0)
      reject("page_size", "a multiple of " + std::to_string(kPageMultiple), std::to_string(p.page_size));
    check_address("block_table", p.block_table, sizeof *p.block_table);
  }
  const bool packed = p.sequences_q.cu_seqlens != nullptr;
  check_tensor("q", p.q, packed);
  check_tensor("k", p.k, packed);
  check_tensor("v", p.v, packed);
  check_tensor("out", p.out, packed);
  check_address("sinks", p.sinks, sizeof *p.sinks);
}

void check_backward(const HfFlash2BackwardParams& p) {
  const bool packed = p.forward.sequences_q.cu_seqlens != nullptr;
  check_tensor("dout", p.dout, packed);
  check_tensor("dq", p.dq, packed);
  check_tensor("dk", p.dk, packed);
  check_tensor("dv", p.dv, packed);
  if (p.forward.block_table != nullptr) reject("block_table", "none in a backward", "one");
  if ((p.forward.sinks == nullptr) != (p.dsinks == nullptr)) reject("dsinks", "given with sinks, and only then", "one without the other");
}

void check_append(const HfFlash2AppendParams& p) {
  check_size(p);
  check_head_dim("head_dim", p.head_dim);
  check_head_dim("head_dim_v", p.head_dim_v);
  if (p.batch < 0 || p.heads < 0 || p.capacity < 0)
    reject("sizes", "non-negative", std::to_string(std::min({p.batch, p.heads, p.capacity})));
  if (p.seqlen < 1) reject("seqlen", "at least 1", std::to_string(p.seqlen));  // a thread block for each token writes the ranges, too
  if ((p.block_table != nullptr) != (p.page_size > 0))
    reject("page_size", "given with a block_table, and only then", "one without the other");
  check_tensor("k", p.k, false);
  check_tensor("v", p.v, false);
  check_tensor("k_cache", p.k_cache, false);
  check_tensor("v_cache", p.v_cache, false);
  check_address("lengths", p.lengths, sizeof *p.lengths);
  check_address("ranges", p.ranges, sizeof *p.ranges);
  check_address("block_table", p.block_table, sizeof *p.block_table);
}

void check_rotary(const HfFlash2RotaryParams& p) {
  check_size(p);
  if (p.dtype != kFloat16 && p.dtype != kBFloat16) reject("dtype", "float16 (0) or bfloat16 (1)", std::to_string(p.dtype));
  if (p.head_dim <= 0 || p.head_dim % 8 != 0) reject("head_dim", "a multiple of 8", std::to_string(p.head_dim));
  if (p.rotary_dim <= 0 || p.rotary_dim > p.head_dim || p.rotary_dim % 16 != 0)
    reject("rotary_dim", "a multiple of 16, at most head_dim", std::to_string(p.rotary_dim));
  if (p.batch < 0 || p.seqlen < 0 || p.heads_q < 0 || p.heads_k < 0)
    reject("sizes", "non-negative", std::to_string(std::min({p.batch, p.seqlen, p.heads_q, p.heads_k})));
  check_tensor("q", p.q, false);
  check_tensor("k", p.k, false);
  check_tensor("q_out", p.q_out, false);
  check_tensor("k_out", p.k_out, false);
  for (const void* angles : {p.cos, p.sin})
    check_tensor("cos and sin", {const_cast<void*>(angles), p.angle_batch_stride, p.rotary_dim, 0}, false);
}

void check_cross_entropy(const HfFlash2CrossEntropyParams& p) {
  check_size(p);
  if (p.dtype != kFloat16 && p.dtype != kBFloat16 && p.dtype != kFloat32)
    reject("dtype", "float16 (0), bfloat16 (1) or float32 (2)", std::to_string(p.dtype));
  if (p.rows < 0 || p.columns < 0) reject("sizes", "non-negative", std::to_string(std::min(p.rows, p.columns)));
  if (p.rows > 1 && p.row_stride < p.columns)
    reject("row stride of logits", "at least the number of columns, " + std::to_string(p.columns), std::to_string(p.row_stride));
  check_address("logits", p.logits, p.dtype == kFloat32 ? 4 : 2);
  check_address("labels", p.labels, sizeof *p.labels);
  check_address("losses", p.losses, sizeof *p.losses);
}

// The Hopper family is there when its architecture was built.
constexpr bool contains(const char* text, const char* word) {
  for (; *text != '\0'; ++text) {
    const char *t = text, *w = word;
    while (*w != '\0' && *t == *w) ++t, ++w;
    if (*w == '\0') return true;
  }
  return false;
}
constexpr bool kHasSm90 = contains(HF_FLASH2_ARCHS, "sm_90a");

// Why the Hopper forward cannot run any call on this device, or null when it can run a plain one.
const char* reason_not_sm90(int device) {
  if (!kHasSm90) return "it was not built (sm_90a is not among the architectures of this library)";
  if (compute_capability(device) != 90) return "it needs a Hopper GPU (compute capability 9.0)";
  return nullptr;
}

// The same for this call.
const char* reason_not_sm90(const HfFlash2ForwardParams& p) {
  if (const char* reason = reason_not_sm90(p.device)) return reason;
  if (p.dropout_p > sm90::kMostDropout) return "it has no dropout above 0.9";
  if (p.dropout_p > 0.f && p.softcap > 0.f) return "it has no dropout of capped scores";
  // Of the kernels that run it: a build may lack those of its own head dim, and take larger ones.
  const int head_dim = dispatch_head_dim<int>(p, [](auto built) { return decltype(built)::value; });
  if (head_dim > 256 && (p.dropout_p > 0.f || p.softcap > 0.f)) return "it has neither dropout nor capped scores above head dim 256";
  if (p.max_seqlen_q == 0 || p.max_seqlen_k == 0) return "there are no queries, or no keys";
  const bool paged = p.block_table != nullptr;
  if (paged && p.head_dim_v > 128 && head_dim == 192) return "its blocks of 112 keys at head dim 192 cross pages";
  const sm90::Rows rows_k = sm90::Rows::of_keys(p);
  if (!sm90::tma_can_read(p.q, sm90::Rows::of_queries(p), p.heads_q) || !sm90::tma_can_read(p.k, rows_k, p.heads_k) ||
      !sm90::tma_can_read(p.v, rows_k, p.heads_k))
    return "TMA cannot read q, k or v (empty, or expanded with stride 0)";
  if (!sm90::has_room_before(p.q, p.max_seqlen_q) || !sm90::has_room_before(p.out, p.max_seqlen_q) ||
      (!paged && (!sm90::has_room_before(p.k, p.max_seqlen_k) || !sm90::has_room_before(p.v, p.max_seqlen_k))))
    return "a sequence of q, k, v or out spans more bytes than its address, before which its tensor map would begin";
  return nullptr;
}

// The family that serves a request for `family`, given the reason why sm90 cannot (null when it can).
HfFlash2Family choose_family(int family, const char* reason) {
  if (family == kSm80) return kSm80;
  if (reason != nullptr && family == kSm90)
    throw LaunchError(kErrorUnsupported, std::string("HF_FLASH2_FAMILY=sm90, but the Hopper family cannot run this: ") + reason);
  return reason == nullptr ? kSm90 : kSm80;
}

// Why the Hopper backward cannot run this call, or null when it can.
const char* reason_not_sm90_backward(const HfFlash2BackwardParams& p) {
  if (const char* reason = reason_not_sm90(p.forward)) return reason;
  if (!sm90::tma_can_read(p.dout, sm90::Rows::of_queries(p.forward), p.forward.heads_q))
    return "TMA cannot read dout (expanded with stride 0)";
  if (!sm90::has_room_before(p.dout, p.forward.max_seqlen_q))
    return "a sequence of dout spans more bytes than its address, before which its tensor map would begin";
  return nullptr;
}

struct ForwardKernels {
  HfFlash2Family family;
  void (*run)(const HfFlash2ForwardParams&);
  int64_t (*workspace_bytes)(const HfFlash2ForwardParams&);
};

ForwardKernels choose_forward(const HfFlash2ForwardParams& params) {
  const HfFlash2Family family = choose_family(params.family, reason_not_sm90(params));
  return dispatch_head_dim<ForwardKernels>(params, [&](auto head_dim) {
    return dispatch_dtype(params.dtype, [&](auto dtype) -> ForwardKernels {
      constexpr int kHeadDim = decltype(head_dim)::value;
      using T = decltype(dtype);
      if constexpr (kHasSm90) {
        if (family == kSm90) return {kSm90, sm90::run_forward<kHeadDim, T>, sm90::forward_workspace_bytes<kHeadDim, T>};
      }
      return {kSm80, sm80::run_forward<sm80::kBuilt<kHeadDim>, T>, [](const HfFlash2ForwardParams&) -> int64_t { return 0; }};
    });
  });
}

struct BackwardKernels {
  HfFlash2Family family;
  void (*run)(const HfFlash2BackwardParams&);
  int64_t (*workspace_bytes)(const HfFlash2BackwardParams&);
};

// Unlike in the forward, a forced Hopper family gives way to sm80 where it has no backward.
BackwardKernels choose_backward(const HfFlash2BackwardParams& params) {
  return dispatch_head_dim<BackwardKernels>(params.forward, [&](auto head_dim) {
    return dispatch_dtype(params.forward.dtype, [&](auto dtype) -> BackwardKernels {
      constexpr int kHeadDim = decltype(head_dim)::value;
      using T = decltype(dtype);
      if constexpr (kHasSm90) {
        if (params.forward.family != kSm80 && reason_not_sm90_backward(params) == nullptr)
          return {kSm90, sm90::run_backward<kHeadDim, T>, sm90::backward_workspace_bytes<kHeadDim, T>};
      }
      return {kSm80, sm80::run_backward<sm80::kBuilt<kHeadDim>, T>, sm80::backward_workspace_bytes<sm80::kBuilt<kHeadDim>, T>};
    });
  });
}

// The same call in the numbers that the kernels are made for.
void normalise(HfFlash2ForwardParams& p) {
  if (p.sequences_q.cu_seqlens != nullptr) {  // no sequence is longer than all
    p.max_seqlen_q = std::min(p.max_seqlen_q, p.total_q);
    p.max_seqlen_k = std::min(p.max_seqlen_k, p.total_k);
  }
  // Limits that reach the first or the last key from everywhere are none: so they stay far from overflow, and causal attention without a left
  // one is spread more evenly.
  if (p.window_left >= p.max_seqlen_k - 1) p.window_left = -1;
  if (p.window_right > 0 && p.window_right >= p.max_seqlen_q - 1) p.window_right = -1;
}

// What Mask can count: it takes as many tokens to either side of a query for all there are.
void check_lengths(const HfFlash2ForwardParams& p) {
  constexpr int kMost = 1 << 29;
  const int longest = std::max(p.max_seqlen_q, p.max_seqlen_k);
  if (longest > kMost)
    reject("max_seqlen_q and max_seqlen_k", "at most 2^29, or closer to the longest sequence if packed", std::to_string(longest));
}

HfFlash2ForwardParams complete(const HfFlash2ForwardParams& layout, const HfFlash2ForwardAddresses& addresses) {
  check_size(layout);
  HfFlash2ForwardParams params = layout;
  params.stream = addresses.stream;
  params.workspace = addresses.workspace;
  params.q.data = addresses.q;
  params.k.data = addresses.k;
  params.v.data = addresses.v;
  params.out.data = addresses.out;
  params.softmax_lse = addresses.softmax_lse;
  params.sequences_q = addresses.sequences_q;
  params.sequences_k = addresses.sequences_k;
  params.key_mask = addresses.key_mask;
  params.rng_state = addresses.rng_state;
  params.sinks = addresses.sinks;
  params.block_table = addresses.block_table;
  check_forward(params);
  normalise(params);
  check_lengths(params);
  return params;
}

HfFlash2BackwardParams complete(const HfFlash2BackwardParams& layout, const HfFlash2BackwardAddresses& addresses) {
  check_size(layout);
  HfFlash2BackwardParams params = layout;
  params.forward = complete(layout.forward, addresses.forward);
  params.dout.data = addresses.dout;
  params.dq.data = addresses.dq;
  params.dk.data = addresses.dk;
  params.dv.data = addresses.dv;
  params.dlse = addresses.dlse;
  params.dsinks = addresses.dsinks;
  params.workspace = addresses.workspace;
  check_backward(params);
  return params;
}

// Runs f() and turns what it throws into an error code.
template <typename F>
auto guarded(const F& f) -> decltype(f()) {
  try {
    return f();
  } catch (const LaunchError& error) {
    return fail(error.code, error.what());
  } catch (const std::exception& error) {
    return fail(kErrorCuda, error.what());
  }
}

// An operation of one kernel, on its params' device. Returns 0.
template <typename Params>
int run_operation(const Params& params, void (*check)(const Params&), void (*run)(const Params&)) {
  return guarded([&]() -> int {
    check(params);
    const DeviceGuard guard(params.device);
    run(params);
    return 0;
  });
}

// A device attribute, asked of the runtime once per device.
int device_attribute(cudaDeviceAttr attribute, int device, std::atomic<int> (&known)[64], const char* name) {
  std::atomic<int>& entry = known[device % 64];  // plus one; 0 before it is known
  int value = entry.load(std::memory_order_relaxed) - 1;
  if (value < 0) {
    check_cuda(cudaDeviceGetAttribute(&value, attribute, device), name);
    entry.store(value + 1, std::memory_order_relaxed);
  }
  return value;
}

}  // namespace

int shared_memory_per_block(int device) {
  static std::atomic<int> known[64];
  static const char* limit = std::getenv("HF_FLASH2_SHARED_MEMORY_LIMIT");
  const int bytes = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device, known, "reading the shared memory size");
  return limit != nullptr ? std::min(bytes, std::atoi(limit)) : bytes;
}

int multiprocessors(int device) {
  static std::atomic<int> known[64];
  return device_attribute(cudaDevAttrMultiProcessorCount, device, known, "counting multiprocessors");
}

int compute_capability(int device) {
  static std::atomic<int> major[64], minor[64];
  return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device, major, "reading the compute capability") +
         device_attribute(cudaDevAttrComputeCapabilityMinor, device, minor, "reading the compute capability");
}

}  // namespace hf_flash2

using namespace hf_flash2;

int hf_flash2_forward(const HfFlash2ForwardParams* layout, const HfFlash2ForwardAddresses* addresses) {
  return guarded([&]() -> int {
    const HfFlash2ForwardParams params = complete(*layout, *addresses);
    const ForwardKernels kernels = choose_forward(params);
    if (params.workspace_bytes < static_cast<uint64_t>(kernels.workspace_bytes(params)))
      return fail(kErrorWorkspace, "workspace_bytes is less than hf_flash2_forward_workspace_bytes()");
    const DeviceGuard guard(params.device);
    kernels.run(params);
    return kernels.family;
  });
}

int64_t hf_flash2_forward_workspace_bytes(const HfFlash2ForwardParams* layout, const HfFlash2ForwardAddresses* addresses) {
  return guarded([&]() -> int64_t {
    const HfFlash2ForwardParams params = complete(*layout, *addresses);
    return choose_forward(params).workspace_bytes(params);
  });
}

int hf_flash2_forward_family(int device, int family) {
  return guarded([&]() -> int { return choose_family(family, reason_not_sm90(device)); });
}

int64_t hf_flash2_backward_workspace_bytes(const HfFlash2BackwardParams* layout, const HfFlash2BackwardAddresses* addresses) {
  return guarded([&]() -> int64_t {
    const HfFlash2BackwardParams params = complete(*layout, *addresses);
    return choose_backward(params).workspace_bytes(params);
  });
}

int hf_flash2_backward(const HfFlash2BackwardParams* layout, const HfFlash2BackwardAddresses* addresses) {
  return guarded([&]() -> int {
    const HfFlash2BackwardParams params = complete(*layout, *addresses);
    const DeviceGuard guard(params.forward.device);
    const BackwardKernels kernels = choose_backward(params);
    if (params.workspace_bytes < static_cast<uint64_t>(kernels.workspace_bytes(params)))
      return fail(kErrorWorkspace, "workspace_bytes is less than hf_flash2_backward_workspace_bytes()");
    kernels.run(params);
    return kernels.family;
  });
}

int hf_flash2_append(const HfFlash2AppendParams* params) { return run_operation(*params, check_append, run_append); }

int hf_flash2_rotary(const HfFlash2RotaryParams* params) { return run_operation(*params, check_rotary, run_rotary); }

int hf_flash2_cross_entropy(const HfFlash2CrossEntropyParams* params) {
  return run_operation(*params, check_cross_entropy, run_cross_entropy);
}

int hf_flash2_check_device(int device) {
  return guarded([&]() -> int {
    int driver = 0, runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0) throw LaunchError(kErrorUnsupported, "no NVIDIA driver is installed; attention runs on CUDA GPUs only with one");
    if (driver / 1000 < runtime / 1000)
      throw LaunchError(kErrorUnsupported, "the NVIDIA driver supports CUDA " + version_name(driver) +
                                               ", but libhf_flash2.so was built with CUDA " + version_name(runtime) +
                                               ": update the driver, or set CUDA_HOME to a toolkit of CUDA " +
                                               std::to_string(driver / 1000) + " (from 12.5 on) and run `hf-flash2 build`");
    int count = 0;
    check_cuda(cudaGetDeviceCount(&count), "looking for GPUs");
    if (device < 0 || device >= count)
      throw LaunchError(kErrorUnsupported, "there is no GPU " + std::to_string(device) + " (" + std::to_string(count) + " found)");
    const int version = compute_capability(device);
    const std::string capability = std::to_string(version / 10) + "." + std::to_string(version % 10);
    if (version < 80)
      throw LaunchError(kErrorUnsupported, "GPU " + std::to_string(device) + " has compute capability " + capability +
                                               "; the kernels need 8.0 (Ampere) or newer: use attn_implementation='sdpa' on this GPU");
    const DeviceGuard guard(device);
    const Code code = code_for_current_device();
    if (code == Code::kNewerPtx)
      throw LaunchError(kErrorUnsupported, "libhf_flash2.so was built with CUDA " + version_name(runtime) +
                                               " and has PTX alone for compute capability " + capability +
                                               "; the NVIDIA driver compiles PTX up to CUDA " + version_name(driver) +
                                               ": update the driver, or run `HF_FLASH2_ARCHS=" + std::to_string(version) +
                                               " hf-flash2 build`, which makes machine code");
    if (code == Code::kNone)
      throw LaunchError(kErrorUnsupported, "libhf_flash2.so was built for " HF_FLASH2_ARCHS " and has no code for compute capability " +
                                               capability + "; run `hf-flash2 build` without HF_FLASH2_ARCHS");
    return 1;
  });
}

const char* hf_flash2_build_info(void) {
  static const std::string info =
      std::string("{\"version\": \"" HF_FLASH2_VERSION "\", \"sources\": \"" HF_FLASH2_SOURCES "\", \"toolkit\": \"" HF_FLASH2_TOOLKIT
                  "\", \"archs\": \"" HF_FLASH2_ARCHS "\", \"head_dims\": [" HF_FLASH2_HEAD_DIMS "], \"families\": [\"sm80\"") +
      (kHasSm90 ? ", \"sm90\"]}" : "]}");
  return info.c_str();
}

const char* hf_flash2_last_error(void) { return last_error.c_str(); }
