#include "fiber.h"

#include <stdint.h>

namespace emulator {

#ifdef __x86_64__

// Saves the callee-saved registers of the System V ABI on the stack and the stack pointer at *from; the reverse for `to`.
extern "C" void emulator_switch_stack(void** from, void* to);
asm(R"(
.text
.p2align 4
.local emulator_switch_stack
.type emulator_switch_stack, @function
emulator_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch_stack, .-emulator_switch_stack
)");

void make_context(Context& context, char* stack_end, size_t, void (*entry)()) {
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack_end) & ~uintptr_t{63});
  *--top = nullptr;  // where entry would return to; leaves the stack aligned as after a call
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}

void switch_context(Context& from, Context& to) { emulator_switch_stack(&from.stack_pointer, to.stack_pointer); }

#else

void make_context(Context& context, char* stack_end, size_t bytes, void (*entry)()) {
  getcontext(&context.registers);
  context.registers.uc_stack.ss_sp = stack_end - bytes;
  context.registers.uc_stack.ss_size = bytes;
  context.registers.uc_link = nullptr;
  makecontext(&context.registers, entry, 0);
}

void switch_context(Context& from, Context& to) { swapcontext(&from.registers, &to.registers); }

#endif

}  // namespace emulator
