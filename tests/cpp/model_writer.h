// Files of small models with random weights.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "gguf_writer.h"
#include "random_weights.h"

namespace h2o {

class ModelWriter {
 public:
  ModelWriter(std::string architecture, uint64_t seed)
      : random(seed), architecture_(std::move(architecture)) {
    writer_.key("general.architecture", GgufType::string, architecture_);
  }

  Random random;  // of the weights

  // Key with the architecture as prefix.
  void key(const char* name, const char* value) {
    writer_.key(concat(architecture_, ".", name), GgufType::string, std::string_view(value));
  }
  void key(const char* name, uint32_t value) {
    writer_.key(concat(architecture_, ".", name), GgufType::u32, value);
  }
  void key(const char* name, float value) {
    writer_.key(concat(architecture_, ".", name), GgufType::f32, value);
  }

  void key(const char* name, const std::vector<uint32_t>& values) {
    std::string numbers;
    for (const uint32_t value : values) numbers += bytes(value);
    writer_.array(concat(architecture_, ".", name), GgufType::u32, values.size(), numbers);
  }

  // dims: fastest first.
  void add(const std::string& name, DType dtype, const std::vector<uint64_t>& dims,
           const std::vector<std::byte>& data) {
    writer_.tensor(name, dims, static_cast<uint32_t>(dtype), writer_.data.size());
    writer_.data.append(reinterpret_cast<const char*>(data.data()), data.size());
    while (writer_.data.size() % writer_.alignment != 0) writer_.data += '\0';
  }

  std::string file() const { return writer_.file(); }

 private:
  std::string architecture_;
  Writer writer_;
};

}  // namespace h2o
