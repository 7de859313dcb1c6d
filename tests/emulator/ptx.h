// The PTX instructions that csrc uses, each a function of its full name with '_' for '.' and ':' (translate.py makes the calls).
// An instruction that is missing here is a compile error that names it: add it, with the modifiers spelled out.
#pragma once
#include <math.h>
#include <string.h>

#include <array>
#include <type_traits>

#include "machine.h"

namespace emulator::ptx {

// {a, b, ...}: the addresses of registers or values.
template <typename T, typename... Rest>
std::array<std::remove_reference_t<T>*, 1 + sizeof...(Rest)> list(T&& first, Rest&&... rest) {
  return {&first, &rest...};
}

inline uint32_t sink;  // "_"

template <typename To, typename From>
To bits(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <typename T>
T* pointer(T* address) {
  return address;
}
inline void* pointer(uint64_t address) { return reinterpret_cast<void*>(address); }

template <typename T, size_t N>
std::array<std::remove_const_t<T>, N> values(const std::array<T*, N>& registers) {
  std::array<std::remove_const_t<T>, N> result;
  for (size_t i = 0; i < N; ++i) result[i] = *registers[i];
  return result;
}

// ---- Arithmetic ----

template <typename A, typename B>
void setp_ne_b32(bool& predicate, A a, B b) {
  predicate = a != b;
}
inline void selp_b32(uint32_t& d, uint32_t a, uint32_t b, bool predicate) { d = predicate ? a : b; }
inline void cvt_rn_bf16x2_f32(uint32_t& packed, float high, float low) {
  packed = static_cast<uint32_t>(to_bfloat16(high)) << 16 | to_bfloat16(low);
}
inline void cvt_rn_f16x2_f32(uint32_t& packed, float high, float low) {
  packed = static_cast<uint32_t>(to_half(high)) << 16 | to_half(low);
}
inline void cvt_rn_satfinite_f16x2_f32(uint32_t& packed, float high, float low) {
  const auto finite = [](float x) { return x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x; };  // NaN stays
  cvt_rn_f16x2_f32(packed, finite(high), finite(low));
}
// relu: 0 in place of what is negative.
inline void cvt_rn_relu_bf16x2_f32(uint32_t& packed, float high, float low) {
  cvt_rn_bf16x2_f32(packed, high < 0 ? 0.f : high, low < 0 ? 0.f : low);
}
inline void cvt_rn_relu_f16x2_f32(uint32_t& packed, float high, float low) {
  cvt_rn_f16x2_f32(packed, high < 0 ? 0.f : high, low < 0 ? 0.f : low);
}
inline void cvt_rn_relu_satfinite_f16x2_f32(uint32_t& packed, float high, float low) {
  cvt_rn_satfinite_f16x2_f32(packed, high < 0 ? 0.f : high, low < 0 ? 0.f : low);
}
inline void set_lt_u32_f16x2(uint32_t& less, uint32_t a, uint32_t b) {
  const auto of = [&](int shift) { return from_half(a >> shift & 0xffff) < from_half(b >> shift & 0xffff) ? 0xffffu << shift : 0u; };
  less = of(0) | of(16);
}
inline void ex2_approx_ftz_f32(float& y, float x) {
  y = exp2f(x);
  if (y < 1.17549435e-38f) y = 0.f;
}
inline void lg2_approx_ftz_f32(float& y, float x) { y = log2f(x); }
inline void rcp_approx_ftz_f32(float& y, float x) { y = 1.f / x; }

// ---- Global memory ----

inline void ld_global_nc_u8(uint32_t& value, const uint8_t* address) { value = *address; }
inline void ld_acquire_gpu_global_s32(int& value, const int* address) {
  if (*address == -1) fail("ld.acquire of a semaphore that nothing has cleared");  // as tests poison scratch
  if (reads_of_the_past(address)) {
    value = 0;
    return;
  }
  wait_for_change(address);
  value = *address;
  note_acquire();
}
inline void atom_acquire_gpu_global_add_s32(int& before, int* address, int value) {
  check_kernel_before("atom.acquire");
  before = *address;
  *address += value;
  note_acquire();
  announce_change();
}
inline void atom_relaxed_gpu_global_add_s32(int& before, int* address, int value) {
  check_kernel_before("atom.relaxed");
  before = *address;
  *address += value;
}
inline void red_release_gpu_global_add_s32(int* address, int value) {
  check_kernel_before("red.release");
  check_release();
  *address += value;
  note_release(address);
  announce_change();
}
template <typename T>
void red_global_add_v4_f32(float* address, const std::array<T*, 4>& x) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) fail("red.v4.f32 at an address that is not a multiple of 16");
  check_kernel_before("red.v4.f32");
  for (int i = 0; i < 4; ++i) address[i] += *x[i];
}

// ---- Shared memory ----

inline void ld_shared_v4_u32(const std::array<uint32_t*, 4>& value, uint32_t address) {
  const unsigned char* bytes = shared_bytes(address, 16, 16, Access::kRead);
  for (int i = 0; i < 4; ++i) memcpy(value[i], bytes + i * 4, 4);
}
inline void ld_shared_f32(float& value, uint32_t address) { memcpy(&value, shared_bytes(address, 4, 4, Access::kRead), 4); }
inline void ld_shared_u32(uint32_t& value, uint32_t address) { memcpy(&value, shared_bytes(address, 4, 4, Access::kRead), 4); }
inline void ld_shared_s32(int& value, uint32_t address) { memcpy(&value, shared_bytes(address, 4, 4, Access::kRead), 4); }
inline void ld_shared_v2_f32(const std::array<float*, 2>& value, uint32_t address) {
  const unsigned char* bytes = shared_bytes(address, 8, 8, Access::kRead);
  for (int i = 0; i < 2; ++i) memcpy(value[i], bytes + i * 4, 4);
}
inline void ld_shared_v4_f32(const std::array<float*, 4>& value, uint32_t address) {
  const unsigned char* bytes = shared_bytes(address, 16, 16, Access::kRead);
  for (int i = 0; i < 4; ++i) memcpy(value[i], bytes + i * 4, 4);
}
inline void st_shared_u32(uint32_t address, uint32_t value) { memcpy(shared_bytes(address, 4, 4, Access::kWrite), &value, 4); }
inline void st_shared_s32(uint32_t address, int value) { memcpy(shared_bytes(address, 4, 4, Access::kWrite), &value, 4); }
inline void st_shared_f32(uint32_t address, float value) { memcpy(shared_bytes(address, 4, 4, Access::kWrite), &value, 4); }
template <typename T>
void st_shared_v4_u32(uint32_t address, const std::array<T*, 4>& value) {
  static_assert(sizeof(T) == 4);
  unsigned char* bytes = shared_bytes(address, 16, 16, Access::kWrite);
  for (int i = 0; i < 4; ++i) memcpy(bytes + i * 4, value[i], 4);
}
template <typename T>
void st_shared_v4_f32(uint32_t address, const std::array<T*, 4>& value) {
  st_shared_v4_u32(address, value);
}
template <typename T>
void st_shared_v2_f32(uint32_t address, const std::array<T*, 2>& value) {
  unsigned char* bytes = shared_bytes(address, 8, 8, Access::kWrite);
  for (int i = 0; i < 2; ++i) memcpy(bytes + i * 4, value[i], 4);
}

struct MatrixAccess {
  uint32_t address;
  uint32_t registers[4];
};

// The 8 rows of one matrix are read or written at once.
inline void count_bank_conflicts(void* const (&lanes)[kLanes], int matrix) {
  uint32_t used = 0;
  for (int row = 0; row < 8; ++row) {
    const uint32_t banks = 1u << (static_cast<MatrixAccess*>(lanes[matrix * 8 + row])->address / 16 % 8);
    bank_conflicts += (used & banks) != 0;
    used |= banks;
  }
}

template <int kCount, bool kTranspose>
void ldmatrix(const char* name, const std::array<uint32_t*, kCount>& registers, uint32_t address) {
  MatrixAccess access{address, {}};
  collective(name, &access, [](void* const(&lanes)[kLanes]) {
    for (int matrix = 0; matrix < kCount; ++matrix) {
      count_bank_conflicts(lanes, matrix);
      for (int row = 0; row < 8; ++row) {
        uint16_t elements[8];
        memcpy(elements, shared_bytes(static_cast<MatrixAccess*>(lanes[matrix * 8 + row])->address, 16, 16, Access::kRead), 16);
        for (int column = 0; column < 8; ++column) {
          const int owner = kTranspose ? column * 4 + row / 2 : row * 4 + column / 2, half = kTranspose ? row % 2 : column % 2;
          uint32_t& target = static_cast<MatrixAccess*>(lanes[owner])->registers[matrix];
          target =
              half == 0 ? (target & 0xffff0000u) | elements[column] : (target & 0xffffu) | static_cast<uint32_t>(elements[column]) << 16;
        }
      }
    }
  });
  for (int i = 0; i < kCount; ++i) *registers[i] = access.registers[i];
}
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(const std::array<uint32_t*, 4>& registers, uint32_t address) {
  ldmatrix<4, false>("ldmatrix.x4", registers, address);
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(const std::array<uint32_t*, 4>& registers, uint32_t address) {
  ldmatrix<4, true>("ldmatrix.x4.trans", registers, address);
}
inline void ldmatrix_sync_aligned_m8n8_x2_shared_b16(const std::array<uint32_t*, 2>& registers, uint32_t address) {
  ldmatrix<2, false>("ldmatrix.x2", registers, address);
}
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(const std::array<uint32_t*, 2>& registers, uint32_t address) {
  ldmatrix<2, true>("ldmatrix.x2.trans", registers, address);
}

template <int kCount, bool kTranspose, typename T>
void stmatrix(const char* name, uint32_t address, const std::array<T*, kCount>& registers) {
  MatrixAccess access{address, {}};
  for (int i = 0; i < kCount; ++i) access.registers[i] = *registers[i];
  collective(name, &access, [](void* const(&lanes)[kLanes]) {
    for (int matrix = 0; matrix < kCount; ++matrix) {
      count_bank_conflicts(lanes, matrix);
      for (int row = 0; row < 8; ++row) {
        uint16_t elements[8];
        for (int column = 0; column < 8; ++column) {
          const int owner = kTranspose ? column * 4 + row / 2 : row * 4 + column / 2, half = kTranspose ? row % 2 : column % 2;
          elements[column] = static_cast<MatrixAccess*>(lanes[owner])->registers[matrix] >> (16 * half);
        }
        const int writer = matrix * 8 + row;
        memcpy(shared_bytes(static_cast<MatrixAccess*>(lanes[writer])->address, 16, 16, Access::kWrite, writer), elements, 16);
      }
    }
  });
}
template <typename T>
void stmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t address, const std::array<T*, 4>& registers) {
  stmatrix<4, false>("stmatrix.x4", address, registers);
}
template <typename T>
void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t address, const std::array<T*, 4>& registers) {
  stmatrix<4, true>("stmatrix.x4.trans", address, registers);
}
template <typename T>
void stmatrix_sync_aligned_m8n8_x2_shared_b16(uint32_t address, const std::array<T*, 2>& registers) {
  stmatrix<2, false>("stmatrix.x2", address, registers);
}
template <typename T>
void stmatrix_sync_aligned_m8n8_x2_trans_shared_b16(uint32_t address, const std::array<T*, 2>& registers) {
  stmatrix<2, true>("stmatrix.x2.trans", address, registers);
}

// ---- cp.async ----

inline void cp_async_cg_shared_global(uint32_t destination, const void* source, int bytes, int source_bytes) {
  cp_async(destination, source, bytes, source_bytes);
}
inline void cp_async_commit_group() { cp_async_commit(); }
inline void cp_async_wait_group(int pending) { cp_async_wait(pending); }
inline void cp_async_wait_all() { cp_async_commit(), cp_async_wait(0); }

// ---- mma.sync ----

struct MmaFragments {
  uint32_t a[4], b[2];
  float c[4];
};

void multiply_fragments(void* const (&lanes)[kLanes], bool bf16);  // c += a * b

template <typename A, typename B, typename C>
void mma(bool bf16, const std::array<float*, 4>& d, const std::array<A*, 4>& a, const std::array<B*, 2>& b, const std::array<C*, 4>& c) {
  MmaFragments fragments;
  for (int i = 0; i < 4; ++i) fragments.a[i] = *a[i], fragments.c[i] = *c[i];
  for (int i = 0; i < 2; ++i) fragments.b[i] = *b[i];
  if (bf16)
    collective("mma.sync.bf16", &fragments, [](void* const(&lanes)[kLanes]) { multiply_fragments(lanes, true); });
  else
    collective("mma.sync.f16", &fragments, [](void* const(&lanes)[kLanes]) { multiply_fragments(lanes, false); });
  for (int i = 0; i < 4; ++i) *d[i] = fragments.c[i];
}
template <typename A, typename B, typename C>
void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(const std::array<float*, 4>& d, const A& a, const B& b, const C& c) {
  mma(false, d, a, b, c);
}
template <typename A, typename B, typename C>
void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(const std::array<float*, 4>& d, const A& a, const B& b, const C& c) {
  mma(true, d, a, b, c);
}

// ---- Barriers ----

inline void bar_sync(int id, int threads) { barrier_sync(id, threads); }
inline void bar_arrive(int id, int threads) { barrier_arrive(id, threads); }
inline void mbarrier_init_shared__cta_b64(uint32_t barrier, uint32_t count) { mbarrier_init(barrier, count); }
inline void fence_mbarrier_init_release_cluster() {}
inline void mbarrier_arrive_shared__cta_b64(uint32_t&, uint32_t barrier) { mbarrier_arrive(barrier, 0); }
inline void mbarrier_arrive_expect_tx_shared__cta_b64(uint32_t&, uint32_t barrier, uint32_t bytes) { mbarrier_arrive(barrier, bytes); }
inline void mapa_shared__cluster_u32(uint32_t& mapped, uint32_t address, uint32_t rank) { mapped = map_to_rank(address, rank); }
inline void mbarrier_arrive_relaxed_cluster_shared__cluster_b64(uint32_t&, uint32_t barrier) { peer_mbarrier_arrive(barrier); }
inline void barrier_cluster_arrive_release() { cluster_arrive(); }
inline void barrier_cluster_wait_acquire() { cluster_wait(); }
inline void mbarrier_expect_tx_shared__cta_b64(uint32_t barrier, uint32_t bytes) { mbarrier_expect(barrier, bytes); }
inline void mbarrier_test_wait_parity_shared__cta_b64(bool& done, uint32_t barrier, uint32_t parity) {
  done = mbarrier_completed(barrier, parity);
}
inline void mbarrier_try_wait_parity_shared__cta_b64(bool& done, uint32_t barrier, uint32_t parity) {
  mbarrier_wait(barrier, parity);  // may take any time, says the specification
  done = true;
}
inline void fence_proxy_async_shared__cta() { proxy_fence(); }
inline void fence_proxy_async() { proxy_fence(), global_proxy_fence(); }
inline void fence_proxy_async_global() { global_proxy_fence(); }
inline void griddepcontrol_wait() { wait_for_kernel_before(); }
inline void griddepcontrol_launch_dependents() { let_next_kernel_begin(); }
inline void elect_sync(uint32_t& lane, bool& elected, uint32_t) {
  collective("elect.sync", nullptr, nullptr);
  lane = 0, elected = current->lane == 0;
}

// ---- Copy engine ----

template <typename Map>
void prefetch_tensormap(Map) {}

#define EMULATOR_TENSOR_LOAD(name)                                                                                                  \
  template <int kRank, typename Map, typename T>                                                                                    \
  void name(uint32_t destination, Map map, const std::array<T*, kRank>& coordinates, uint32_t barrier) {                            \
    tensor_load(destination, pointer(map), barrier, values(coordinates).data(), kRank);                                             \
  }                                                                                                                                 \
  template <int kRank, typename Map, typename T>                                                                                    \
  void name##_L2__cache_hint(uint32_t destination, Map map, const std::array<T*, kRank>& coordinates, uint32_t barrier, uint64_t) { \
    tensor_load(destination, pointer(map), barrier, values(coordinates).data(), kRank);                                             \
  }
EMULATOR_TENSOR_LOAD(cp_async_bulk_tensor_Nd_shared__cluster_global_mbarrier__complete_tx__bytes)
EMULATOR_TENSOR_LOAD(cp_async_bulk_tensor_Nd_shared__cluster_global_tile_mbarrier__complete_tx__bytes)
#undef EMULATOR_TENSOR_LOAD

#define EMULATOR_TENSOR_STORE(name, add)                                                                     \
  template <int kRank, typename Map, typename T>                                                             \
  void name(Map map, const std::array<T*, kRank>& coordinates, uint32_t source) {                            \
    tensor_store(pointer(map), source, values(coordinates).data(), kRank, add);                              \
  }                                                                                                          \
  template <int kRank, typename Map, typename T>                                                             \
  void name##_L2__cache_hint(Map map, const std::array<T*, kRank>& coordinates, uint32_t source, uint64_t) { \
    tensor_store(pointer(map), source, values(coordinates).data(), kRank, add);                              \
  }
EMULATOR_TENSOR_STORE(cp_async_bulk_tensor_Nd_global_shared__cta_bulk_group, false)
EMULATOR_TENSOR_STORE(cp_async_bulk_tensor_Nd_global_shared__cta_tile_bulk_group, false)
EMULATOR_TENSOR_STORE(cp_reduce_async_bulk_tensor_Nd_global_shared__cta_add_bulk_group, true)
EMULATOR_TENSOR_STORE(cp_reduce_async_bulk_tensor_Nd_global_shared__cta_add_tile_bulk_group, true)
#undef EMULATOR_TENSOR_STORE

template <typename P>
void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(uint32_t destination, P source, uint32_t bytes, uint32_t barrier) {
  bulk_load(destination, pointer(source), bytes, barrier);
}
template <typename P>
void cp_async_bulk_shared__cta_global_mbarrier__complete_tx__bytes(uint32_t destination, P source, uint32_t bytes, uint32_t barrier) {
  bulk_load(destination, pointer(source), bytes, barrier);
}
template <typename P>
void cp_async_bulk_global_shared__cta_bulk_group(P destination, uint32_t source, uint32_t bytes) {
  bulk_store(pointer(destination), source, bytes, false);
}
template <typename P>
void cp_async_bulk_global_shared__cta_bulk_group_L2__cache_hint(P destination, uint32_t source, uint32_t bytes, uint64_t) {
  bulk_store(pointer(destination), source, bytes, false);
}
inline void cp_async_bulk_shared__cluster_shared__cta_mbarrier__complete_tx__bytes(uint32_t destination, uint32_t source, uint32_t bytes,
                                                                                   uint32_t barrier) {
  copy_to_peer(destination, source, bytes, barrier);
}
template <typename T>
void st_async_shared__cluster_mbarrier__complete_tx__bytes_v4_f32(uint32_t destination, const std::array<T*, 4>& value, uint32_t barrier) {
  static_assert(sizeof(T) == 4);
  unsigned char bytes[16];
  for (int i = 0; i < 4; ++i) memcpy(bytes + i * 4, value[i], 4);
  store_to_peer(destination, bytes, sizeof bytes, barrier);
}
inline void createpolicy_fractional_L2__evict_first_b64(uint64_t& policy) { policy = 0; }  // there is no L2
template <typename P>
void cp_reduce_async_bulk_global_shared__cta_bulk_group_add_f32(P destination, uint32_t source, uint32_t bytes) {
  bulk_store(pointer(destination), source, bytes, true);
}
inline void cp_async_bulk_commit_group() { bulk_commit(); }
inline void cp_async_bulk_wait_group(int pending) { bulk_wait(pending); }
inline void cp_async_bulk_wait_group_read(int pending) { bulk_wait_read(pending); }

// ---- wgmma ----

inline void wgmma_fence_sync_aligned() { wgmma_fence(); }
inline void wgmma_commit_group_sync_aligned() { wgmma_commit(); }
inline void wgmma_wait_group_sync_aligned(int pending) { wgmma_wait(pending); }
inline void setmaxnreg_inc_sync_aligned_u32(int) { collective("setmaxnreg.inc", nullptr, nullptr); }
inline void setmaxnreg_dec_sync_aligned_u32(int) { collective("setmaxnreg.dec", nullptr, nullptr); }

// The accumulators of a thread, which the emulator wants in one array.
template <size_t N>
float* accumulators(const std::array<float*, N>& d) {
  for (size_t i = 1; i < N; ++i)
    if (d[i] != d[0] + i) fail("wgmma accumulators must lie in one array, in order");
  return d[0];
}

template <int kN>
void wgmma_product(bool bf16, const std::array<float*, kN / 2>& d, uint64_t a, uint64_t b, bool accumulate, int scale_a, int scale_b,
                   int transpose_a, int transpose_b) {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256);
  wgmma(accumulators(d), {kN, bf16, nullptr, a, b, accumulate, scale_a, scale_b, transpose_a != 0, transpose_b != 0});
}
template <int kN, typename A>
void wgmma_product(bool bf16, const std::array<float*, kN / 2>& d, const std::array<A*, 4>& a, uint64_t b, bool accumulate, int scale_a,
                   int scale_b, int transpose_b) {
  static_assert(kN % 8 == 0 && kN >= 8 && kN <= 256);
  const uint32_t registers[4] = {*a[0], *a[1], *a[2], *a[3]};
  wgmma(accumulators(d), {kN, bf16, registers, 0, b, accumulate, scale_a, scale_b, false, transpose_b != 0});
}
template <int kN, typename D, typename... Rest>
void wgmma_mma_async_sync_aligned_m64nNk16_f32_bf16_bf16(const D& d, const Rest&... rest) {
  wgmma_product<kN>(true, d, rest...);
}
template <int kN, typename D, typename... Rest>
void wgmma_mma_async_sync_aligned_m64nNk16_f32_f16_f16(const D& d, const Rest&... rest) {
  wgmma_product<kN>(false, d, rest...);
}

}  // namespace emulator::ptx
