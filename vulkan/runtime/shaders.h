// The compute shaders, compiled to SPIR-V by the build.
#pragma once

#include <cstdint>
#include <span>

#include "built_shaders/names.h"

namespace h2o::vulkan {

// Named as their files, shaders/name.comp.
enum class Shader {
#define H2O_VK_NAME(name) name,
  H2O_FOR_EACH_SHADER(H2O_VK_NAME)
#undef H2O_VK_NAME
};

std::span<const uint32_t> code_of(Shader shader);

}  // namespace h2o::vulkan
