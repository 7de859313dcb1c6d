// Kernels of one stream that overlap: launched with Start::kEarly (launch.h), a kernel begins while the one before it still runs.
// PTX ISA: "griddepcontrol" (sm_90).
#pragma once

namespace hf_flash2 {

// The next kernel may begin as soon as every block of this one has got here, or has ended, and leaves room. What it may read is another
// matter: see below. Where every block has waited for the kernel before this one first, all that it wrote, and what of it this one has changed by
// semaphores.
__device__ __forceinline__ void let_next_kernel_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernel before has ended; all it wrote can be seen. By every block of a kernel that is launched early, but for those that have
// nothing to do, or ask semaphores what they may read and may. By one in any case, even if none reads anything of the kernel before: a kernel
// whose blocks all end without can end first, and its end is what tells those behind it, launched early or not, that both have ended.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

}  // namespace hf_flash2
