// Stacks that can be switched: by hand on x86-64, where it takes a few nanoseconds, with ucontext elsewhere.
#pragma once
#include <stddef.h>

#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace emulator {

struct Context {
#ifdef __x86_64__
  void* stack_pointer;
#else
  ucontext_t registers;
#endif
};

// Makes `context` start in entry(), which must not return, on the `bytes` that end at `stack_end`.
void make_context(Context& context, char* stack_end, size_t bytes, void (*entry)());

// Saves the running context in `from` and goes on where `to` was saved.
void switch_context(Context& from, Context& to);

}  // namespace emulator
