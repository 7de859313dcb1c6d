// What host code throws, up to the extern "C" boundary (api.cpp).
#pragma once
#include <stdexcept>
#include <string>

#include "params.h"

namespace hf_flash2 {

struct LaunchError : std::runtime_error {
  int code;  // HfFlash2Error
  LaunchError(int code, const std::string& message) : std::runtime_error(message), code(code) {}
};

}  // namespace hf_flash2
