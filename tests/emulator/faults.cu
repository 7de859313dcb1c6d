// One small kernel that uses every kind of waiting, right or wrong in one way: what tests/test_emulator.py asks the emulator to notice.
// out [64, 64] = A B^T with A, B [64, 64] bf16: A by cp.async and ordinary stores, B by TMA, the product by wgmma.
#include <cuda_bf16.h>

#include "device/bulk_copy.cuh"
#include "device/cp_async.cuh"
#include "device/grid_dependency.cuh"
#include "device/mbarrier.cuh"
#include "device/semaphore.cuh"
#include "device/swizzle.cuh"
#include "device/tma.cuh"
#include "device/warpgroup.cuh"
#include "errors.h"
#include "launch.h"
#include "sm90/tensor_map.h"
#include "wgmma.cuh"

namespace {

using namespace hf_flash2;

enum Fault {
  kNone,
  kNoCopyWait,        // the copies of A are not waited for
  kNoThreadBarrier,   // the copies of other threads are not waited for; what is read goes to rows 64 and 65 of out
  kNoProxyFence,      // wgmma reads ordinary stores without a fence
  kNoTensorWait,      // wgmma reads B before it has arrived
  kWrongByteCount,    // the barrier waits for bytes that nobody sends
  kNoWgmmaFence,      //
  kNoWgmmaWait,       // accumulators are read at once
  kEarlyRelease,      // B is loaded anew before the product is complete
  kLeftArrival,       // of one warp at a named barrier that nobody waits at
  kTooManyArrivals,   // at an mbarrier of one
  kMissingArrival,    // of one warp at a named barrier
  kDifferentCounts,   // of threads at one named barrier
  kDivergedWarp,      // lanes in different warp operations
  kOutsideShared,     // an address behind the shared memory of the block
  kMisaligned,        //
  kNoKernelWait,      // the kernel, which is launched early, ends without a wait for the one before
  kUnheeded,          // the same, of a kernel that reads a semaphore first
  kIdleBlock,         // no fault: another thread block, which has nothing to do, ends without that wait, and this one waits
  kIdleBlocks,        // both end without it
  kBusyBlock,         // the other one meets at a barrier before it ends without it
  kBusyWarps,         // or its warps do
  kBusyMemory,        // or it writes shared memory
  kEarlyAccess,       // or reads a semaphore before that wait, and the one before has let it begin before it had waited itself
  kUncleared,         // or reads a semaphore that holds what scratch is poisoned with
  kNoReadWait,        // a thread ends while the copy engine still has to read its shared memory
  kNoProductBarrier,  // wgmma reads what other warps have stored, and no barrier says that they have
  kUntoldReload,      // B is loaded anew when one warp is done with it, and no barrier says that another is
  kAllOutside,        // a box of a tensor that begins before its data, and none of the box is inside
  kFaults
};

struct Arguments {
  CUtensorMap b, b_of_sequence;
  const __nv_bfloat16* a;
  float* out;
  Fault fault;
};

// A semaphore behind the result.
__device__ int32_t* semaphore_of(const Arguments& arguments) { return reinterpret_cast<int32_t*>(arguments.out + 66 * 64 - 1); }

__global__ void before_kernel(const __grid_constant__ Arguments arguments) {
  if (arguments.fault != kEarlyAccess) wait_for_kernel_before();
  let_next_kernel_begin();
  wait_for_kernel_before();
  if (arguments.fault == kUncleared)
    *semaphore_of(arguments) = -1;
  else if (threadIdx.x == 0)
    semaphore_pass(semaphore_of(arguments));
}

constexpr int kTileBytes = 64 * 128, kSharedBytes = 2 * kTileBytes + 16;

__global__ void __launch_bounds__(128) product_kernel(const __grid_constant__ Arguments arguments) {
  extern __shared__ __align__(1024) char memory[];
  const Fault fault = arguments.fault;
  const uint32_t sA = shared_address(memory), sB = sA + kTileBytes, b_full = sB + kTileBytes;
  const int thread = threadIdx.x, lane = thread % 32;
  if (fault == kIdleBlocks) return;
  if (blockIdx.x < gridDim.x - 1) {
    if (fault == kBusyBlock) __syncthreads();
    if (fault == kBusyWarps) __syncwarp();
    if (fault == kBusyMemory) asm volatile("st.shared.u32 [%0], %1;" ::"r"(sA + thread * 4), "r"(0u));
    return;
  }
  if (fault != kNoKernelWait && fault != kIdleBlock) semaphore_read(semaphore_of(arguments));
  if (fault != kNoKernelWait && fault != kUnheeded) wait_for_kernel_before();
  if (thread == 0) {
    mbarrier_init(b_full, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  const auto load_b = [&](uint32_t bytes) {
    mbarrier_arrive_expect(b_full, bytes);
    const bool outside = fault == kAllOutside;
    if (outside || fault == kNone)
      tma_load(sB, &arguments.b_of_sequence, b_full, 0, outside ? 64 : 0, 64, 0, 0);
    else
      tma_load(sB, &arguments.b, b_full, 0, 0, 0, 0);
  };
  if (thread == 0) load_b(fault == kWrongByteCount ? kTileBytes + 16 : kTileBytes);
  if (thread == 0 && fault == kTooManyArrivals) mbarrier_arrive(b_full), mbarrier_arrive(b_full);

  // A: a thread copies chunks of one column to every 16th row; the last chunk of a row goes through a register.
  for (int row = thread / 8; row < 64; row += 16)
    cp_async_16(sA + Swizzle<64>::offset(row, thread % 8) + (fault == kMisaligned ? 8 : 0), arguments.a + row * 64 + thread % 8 * 8, true);
  cp_async_commit();
  if (fault != kNoCopyWait) cp_async_wait<0>();
  if (fault != kNoThreadBarrier) __syncthreads();
  if (fault == kNoThreadBarrier || fault == kNoCopyWait) {
    uint4 chunk;  // of another thread
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w)
                 : "r"(sA + (kTileBytes - 16 - thread * 16)));
    arguments.out[64 * 64 + thread] = __uint_as_float(chunk.x << 16);
  }
  const uint32_t copied = *reinterpret_cast<uint32_t*>(memory + Swizzle<64>::offset(thread / 2, 7));
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(sA + Swizzle<64>::offset(thread / 2, 7) + (fault == kOutsideShared ? 1 << 17 : 0)),
               "r"(copied));
  if (fault != kNoProxyFence) async_proxy_fence();
  if (fault == kDivergedWarp && lane == 5)
    __syncwarp();
  else if (fault == kDivergedWarp)
    __any_sync(0xffffffffu, 1);
  if (fault == kMissingArrival && thread / 32 == 2) return;
  if (fault != kNoProductBarrier) named_barrier_sync(3, fault == kDifferentCounts && thread / 32 == 1 ? 64 : 128);

  if (fault != kNoTensorWait) mbarrier_wait(b_full, 0);
  float d[32];
  if (fault != kNoWgmmaFence) wgmma_fence();
  for (int k = 0; k < 4; ++k)
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0;\n}"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
          "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]),
          "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]),
          "+f"(d[30]), "+f"(d[31])
        : "l"(panel_descriptor(sA + k * 32)), "l"(panel_descriptor(sB + k * 32)), "r"(k > 0));
  wgmma_commit();
  if (fault == kEarlyRelease) {
    __syncthreads();
    if (thread == 0) load_b(kTileBytes);
    __syncthreads();
  }
  if (fault != kNoWgmmaWait) wgmma_wait<0>();
  for (int i = 0; i < 32; ++i) arguments.out[(thread / 32 * 16 + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
  if (fault == kNoWgmmaWait) wgmma_wait<0>();
  if (fault == kUntoldReload && thread == 127) {
    uint4 chunk;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(chunk.x), "=r"(chunk.y), "=r"(chunk.z), "=r"(chunk.w) : "r"(sB));
    arguments.out[64 * 64] = __uint_as_float(chunk.x << 16);
  }
  if (fault == kUntoldReload && thread == 0) load_b(kTileBytes);
  if (fault == kNoReadWait && thread == 0) {
    bulk_global_fence();
    bulk_store(arguments.out + 65 * 64, sA, 16);
    bulk_commit();
  }
  if (fault == kLeftArrival && thread < 32) named_barrier_arrive(3, 128);
}

}  // namespace

// Runs the kernel with one fault on bf16 a, b [64, 64] and float out [66, 64]; returns what went wrong, or an empty text.
extern "C" __attribute__((visibility("default"))) const char* run_with_fault(int fault, void* a, void* b, float* out) {
  static std::string error;
  error.clear();
  try {
    Arguments arguments;
    arguments.b = sm90::make_tensor_map({b, 0, 64, 64}, kBFloat16, 64, {64, 1}, 1, 64);
    arguments.b_of_sequence = sm90::make_sequence_map({b, 0, 64, 64}, kBFloat16, 64, {{64, 1}, 64}, 1, 64);
    arguments.a = static_cast<const __nv_bfloat16*>(a);
    arguments.out = out;
    arguments.fault = static_cast<Fault>(fault);
    launch<before_kernel>(arguments, 1, 32, 0, 0, nullptr, "before", Start::kEarly);
    const int blocks = fault >= kIdleBlock && fault <= kBusyMemory ? 2 : 1;
    launch<product_kernel>(arguments, blocks, 128, kSharedBytes, 0, nullptr, "product", Start::kEarly);
  } catch (const LaunchError& launch_error) {
    error = launch_error.what();
  }
  return error.c_str();
}
