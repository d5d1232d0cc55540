// Compute pipelines, created when they are first used, by any thread.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "vulkan/runtime/device.h"
#include "vulkan/runtime/shaders.h"

namespace h2o::vulkan {

// All shaders read their arguments from push constants, of which every device has these many bytes,
// and the memory that these point to: there are no descriptors.
constexpr uint32_t kPushBytes = 128;

class Pipelines {
 public:
  explicit Pipelines(const Device& device);
  Pipelines(const Pipelines&) = delete;
  Pipelines& operator=(const Pipelines&) = delete;
  ~Pipelines();

  VkPipelineLayout layout() const { return layout_; }

  // The pipeline of a shader with the values of its specialization constants 0, 1, ...
  VkPipeline get(Shader shader, const std::vector<uint32_t>& constants);

 private:
  VkPipeline create(Shader shader, const std::vector<uint32_t>& constants) const;

  const Device& device_;
  VkPipelineLayout layout_ = nullptr;
  std::mutex mutex_;
  std::map<std::pair<Shader, std::vector<uint32_t>>, VkPipeline> pipelines_;
};

}  // namespace h2o::vulkan
