// What csrc uses of CUDA C++ and its runtime, on the emulated GPU.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../machine.h"
#include "../ptx.h"

// ---- The language ----
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __builtin_assume(condition) ((condition) ? void() : __builtin_trap())

#define threadIdx (::emulator::current->index)
#define blockIdx (::emulator::current->block_index)
static const dim3 &gridDim = emulator::grid_size, &blockDim = emulator::block_size;  // no macros: members of cudaLaunchConfig_t, too

struct int2 {
  int x, y;
};
struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <typename T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<uint64_t>(a) * b >> 32; }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(nearbyintf(x)); }
inline float __uint_as_float(unsigned x) { return emulator::ptx::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::ptx::bits<unsigned>(x); }
inline float __int_as_float(int x) { return emulator::ptx::bits<float>(x); }
inline int __float_as_int(float x) { return emulator::ptx::bits<int>(x); }
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}

inline uint32_t __cvta_generic_to_shared(const void* pointer) { return emulator::shared_address(pointer); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}
inline void __syncthreads() { emulator::barrier_sync(0, emulator::block_size.x); }
inline void __threadfence() {}
template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address += value;
  return old;
}

namespace emulator {
inline void whole_warp(unsigned mask, const char* operation) {
  if (mask != 0xffffffffu) fail("%s of part of a warp: not emulated", operation);
}
struct Shuffle {
  uint32_t value;
  int source;
};
// The value of lane source(lane).
template <typename T>
T shuffle_word(unsigned mask, const char* operation, T value, int source) {
  static_assert(sizeof(T) == 4);
  whole_warp(mask, operation);
  Shuffle exchange{ptx::bits<uint32_t>(value), source};
  collective(operation, &exchange, [](void* const(&lanes)[kLanes]) {
    uint32_t values[kLanes];
    for (int i = 0; i < kLanes; ++i) values[i] = static_cast<Shuffle*>(lanes[i])->value;
    for (int i = 0; i < kLanes; ++i) static_cast<Shuffle*>(lanes[i])->value = values[static_cast<Shuffle*>(lanes[i])->source];
  });
  return ptx::bits<T>(exchange.value);
}
template <typename T>
T shuffle(unsigned mask, const char* operation, T value, int source) {
  if constexpr (sizeof(T) == 8) {
    const uint64_t low = shuffle_word(mask, operation, static_cast<uint32_t>(value), source);
    return static_cast<uint64_t>(shuffle_word(mask, operation, static_cast<uint32_t>(value >> 32), source)) << 32 | low;
  } else {
    return shuffle_word(mask, operation, value, source);
  }
}
inline uint32_t ballot(unsigned mask, const char* operation, bool predicate) {
  whole_warp(mask, operation);
  uint32_t vote = predicate;
  collective(operation, &vote, [](void* const(&lanes)[kLanes]) {
    uint32_t all = 0;
    for (int i = 0; i < kLanes; ++i) all |= *static_cast<uint32_t*>(lanes[i]) << i;
    for (int i = 0; i < kLanes; ++i) *static_cast<uint32_t*>(lanes[i]) = all;
  });
  return vote;
}
inline int reduce_add(unsigned mask, const char* operation, int value) {
  whole_warp(mask, operation);
  collective(operation, &value, [](void* const(&lanes)[kLanes]) {
    int sum = 0;
    for (int i = 0; i < kLanes; ++i) sum += *static_cast<int*>(lanes[i]);
    for (int i = 0; i < kLanes; ++i) *static_cast<int*>(lanes[i]) = sum;
  });
  return value;
}
}  // namespace emulator

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulator::whole_warp(mask, "__syncwarp");
  emulator::collective("__syncwarp", nullptr, nullptr);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
  return emulator::shuffle(mask, "__shfl_sync", value, lane & 31);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int lanes) {
  const int lane = emulator::current->lane;
  return emulator::shuffle(mask, "__shfl_up_sync", value, lane >= lanes ? lane - lanes : lane);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emulator::shuffle(mask, "__shfl_xor_sync", value, (emulator::current->lane ^ lanes) & 31);
}
inline int __any_sync(unsigned mask, int predicate) { return emulator::ballot(mask, "__any_sync", predicate != 0) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return emulator::ballot(mask, "__all_sync", predicate != 0) == 0xffffffffu; }
inline unsigned __ballot_sync(unsigned mask, int predicate) { return emulator::ballot(mask, "__ballot_sync", predicate != 0); }
inline int __reduce_add_sync(unsigned mask, int value) { return emulator::reduce_add(mask, "__reduce_add_sync", value); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline void __nanosleep(unsigned) { emulator::let_others_run(); }

// ---- The runtime ----
enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorUnsupportedPtxVersion = 222,
  cudaErrorLaunchFailure = 719
};
using cudaStream_t = void*;
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor
};
enum { cudaEnableDefault = 0 };
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaSharedmemCarveoutMaxL1 = 0 };
enum cudaLaunchAttributeID {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6,
  cudaLaunchAttributePreferredSharedMemoryCarveout = 14
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  union {
    int programmaticStreamSerializationAllowed, sharedMemCarveout;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
};

cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void** arguments);
cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)());
