#include "vulkan/runtime/shaders.h"

#include "built_shaders/code.h"

namespace h2o::vulkan {

std::span<const uint32_t> code_of(Shader shader) {
  switch (shader) {
#define H2O_VK_CODE(name) \
  case Shader::name:      \
    return name##_code;
    H2O_FOR_EACH_SHADER(H2O_VK_CODE)
#undef H2O_VK_CODE
  }
  return {};
}

}  // namespace h2o::vulkan
