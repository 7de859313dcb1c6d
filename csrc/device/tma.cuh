// The bulk tensor copy engine (sm_90). PTX ISA: "cp.async.bulk.tensor".
#pragma once
#include <cuda.h>
#include <stdint.h>

#include "device/cache_policy.cuh"

namespace hf_flash2 {

// Copies the box at these coordinates of a 4-D map, the innermost first, into shared memory and counts its bytes on `barrier`. Elements
// outside the tensor arrive as zeros. kStreams: L2 lets it go before other things. Issued by one thread.
template <bool kStreams = false>
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int w) {
  if constexpr (kStreams)
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], "
        "%7;" ::"r"(destination),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "l"(evict_first_policy())
        : "memory");
  else
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(
                     destination),
                 "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
                 : "memory");
}

// The same of a 5-D map.
template <bool kStreams = false>
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map, uint32_t barrier, int x, int y, int z, int w,
                                         int v) {
  if constexpr (kStreams)
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], "
        "[%2], %8;" ::"r"(destination),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "l"(evict_first_policy())
        : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(
            destination),
        "l"(reinterpret_cast<uint64_t>(map)), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
}

// Copies a tile from shared memory to the box at these coordinates. What lies outside the tensor is not written. Joins the group that
// bulk_commit() closes.
template <bool kStreams = false>
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int x, int y, int z, int w) {
  if constexpr (kStreams)
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(
                     reinterpret_cast<uint64_t>(map)),
                 "r"(source), "r"(x), "r"(y), "r"(z), "r"(w), "l"(evict_first_policy())
                 : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(reinterpret_cast<uint64_t>(map)),
        "r"(source), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

// The same to a 5-D map.
template <bool kStreams = false>
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int x, int y, int z, int w, int v) {
  if constexpr (kStreams)
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4, %5, %6}], [%1], %7;" ::"l"(
                     reinterpret_cast<uint64_t>(map)),
                 "r"(source), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v), "l"(evict_first_policy())
                 : "memory");
  else
    asm volatile(
        "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(reinterpret_cast<uint64_t>(map)),
        "r"(source), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
        : "memory");
}

}  // namespace hf_flash2
