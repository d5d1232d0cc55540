#include "vulkan/runtime/pipelines.h"

namespace h2o::vulkan {

Pipelines::Pipelines(const Device& device) : device_(device) {
  const VkPushConstantRange push{VK_SHADER_STAGE_COMPUTE_BIT, 0, kPushBytes};
  auto info = make<VkPipelineLayoutCreateInfo>(VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO);
  info.pushConstantRangeCount = 1;
  info.pPushConstantRanges = &push;
  check(device.vk.CreatePipelineLayout(device.handle, &info, nullptr, &layout_), "prepare shaders");
}

Pipelines::~Pipelines() {
  for (const auto& [key, pipeline] : pipelines_) {
    device_.vk.DestroyPipeline(device_.handle, pipeline, nullptr);
  }
  device_.vk.DestroyPipelineLayout(device_.handle, layout_, nullptr);
}

VkPipeline Pipelines::get(Shader shader, const std::vector<uint32_t>& constants) {
  const std::lock_guard lock(mutex_);
  const auto [found, is_new] = pipelines_.try_emplace({shader, constants});
  if (!is_new) return found->second;
  try {
    found->second = create(shader, constants);
  } catch (...) {
    pipelines_.erase(found);
    throw;
  }
  return found->second;
}

VkPipeline Pipelines::create(Shader shader, const std::vector<uint32_t>& constants) const {
  auto code = make<VkShaderModuleCreateInfo>(VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO);
  code.codeSize = code_of(shader).size_bytes();
  code.pCode = code_of(shader).data();
  VkShaderModule module = nullptr;
  check(device_.vk.CreateShaderModule(device_.handle, &code, nullptr, &module), "load a shader");

  std::vector<VkSpecializationMapEntry> entries;
  for (uint32_t i = 0; i < constants.size(); ++i) entries.push_back({i, 4 * i, 4});
  VkSpecializationInfo values{};
  values.mapEntryCount = static_cast<uint32_t>(entries.size());
  values.pMapEntries = entries.data();
  values.dataSize = constants.size() * sizeof(uint32_t);
  values.pData = constants.data();
  auto info = make<VkComputePipelineCreateInfo>(VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO);
  info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
  info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
  info.stage.module = module;
  info.stage.pName = "main";
  info.stage.pSpecializationInfo = &values;
  info.layout = layout_;
  VkPipeline pipeline = nullptr;
  const VkResult result =
      device_.vk.CreateComputePipelines(device_.handle, nullptr, 1, &info, nullptr, &pipeline);
  device_.vk.DestroyShaderModule(device_.handle, module, nullptr);
  check(result, "compile a shader");
  return pipeline;
}

}  // namespace h2o::vulkan
