// The exported functions of libhf_flash2.so. Each takes plain data (params.h) and returns the kernel family that ran or a negative
// HfFlash2Error; the text of the last error of this thread is hf_flash2_last_error(). Nothing here prints, exits or synchronises.
#pragma once
#include "params.h"

#define HF_FLASH2_API extern "C" __attribute__((visibility("default")))

// Addresses in the params are not read: `addresses` has them.
HF_FLASH2_API int hf_flash2_forward(const HfFlash2ForwardParams* params, const HfFlash2ForwardAddresses* addresses);
HF_FLASH2_API int hf_flash2_backward(const HfFlash2BackwardParams* params, const HfFlash2BackwardAddresses* addresses);

// The family that hf_flash2_forward runs a plain call on (no expanded tensors) when the params ask for `family`,
// kAuto included; negative, as there, when it cannot. `device` has passed hf_flash2_check_device.
HF_FLASH2_API int hf_flash2_forward_family(int device, int family);

// Device scratch that hf_flash2_forward needs for these params, in bytes, whatever the addresses, as long as the same ones are null; negative
// on error. Mostly 0, so that a caller may leave the question until hf_flash2_forward answers kErrorWorkspace.
HF_FLASH2_API int64_t hf_flash2_forward_workspace_bytes(const HfFlash2ForwardParams* params, const HfFlash2ForwardAddresses* addresses);

// The same for hf_flash2_backward, which always needs some.
HF_FLASH2_API int64_t hf_flash2_backward_workspace_bytes(const HfFlash2BackwardParams* params, const HfFlash2BackwardAddresses* addresses);

// New keys and values into a cache; returns 0.
HF_FLASH2_API int hf_flash2_append(const HfFlash2AppendParams* params);

// Rotary position embedding of q and k; returns 0.
HF_FLASH2_API int hf_flash2_rotary(const HfFlash2RotaryParams* params);

// Cross-entropy of rows of logits and its gradient, in their place; returns 0.
HF_FLASH2_API int hf_flash2_cross_entropy(const HfFlash2CrossEntropyParams* params);

// What the library was built from and for, as one JSON object: version, toolkit, archs, head_dims, families.
HF_FLASH2_API const char* hf_flash2_build_info(void);
// 1 when this device can run this library's kernels; else a negative HfFlash2Error, with the reason in hf_flash2_last_error().
HF_FLASH2_API int hf_flash2_check_device(int device);
HF_FLASH2_API const char* hf_flash2_last_error(void);
