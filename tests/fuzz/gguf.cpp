// The GGUF reader: any bytes are either a file whose keys and tensors can all be read, or rejected
// with a FormatError.
#include "io/gguf.h"

#include "core/error.h"
#include "target.h"

namespace {

using namespace h2o;

// Sum of all bytes read, so that AddressSanitizer detects invalid ones.
size_t sum = 0;

void read_value(const GgufFile& file, std::string_view key, const GgufValue& value) {
  sum += type_name(value).size();
  for (const std::byte byte : value.bytes) sum += static_cast<size_t>(byte);
  const bool array = value.type == GgufType::array;
  switch (value.element_type) {
    case GgufType::string:
      if (!array) sum += file.string(key).size();
      if (array) sum += file.strings(key).size();
      break;
    case GgufType::boolean:
      if (!array) sum += file.boolean(key);
      break;
    case GgufType::f32:
    case GgufType::f64:
      if (!array) sum += file.number(key) > 0;
      if (array) sum += file.numbers(key).size();
      break;
    case GgufType::array:
      break;
    default:
      if (!array) sum += file.number(key) > 0;
      if (array) sum += file.numbers(key).size() + file.integers(key).size();
  }
}

}  // namespace

int fuzz(std::span<const std::byte> bytes) {
  try {
    const GgufFile file(MappedFile("fuzz", bytes));
    for (const auto& [key, value] : file.metadata()) {
      try {
        read_value(file, key, value);
      } catch (const FormatError&) {  // an integer too large
      }
      check(file.find(key) == &value, "a key is found");
    }
    for (const GgufTensor& tensor : file.tensors()) {
      check(file.find_tensor(tensor.name) == &tensor, "a tensor is found");
      check(tensor.data.data() + tensor.data.size() <= bytes.data() + bytes.size(),
            "a tensor is inside the file");
      for (const std::byte byte : tensor.data) sum += static_cast<size_t>(byte);
      try {
        sum += file.view(tensor).rows;
      } catch (const FormatError&) {  // an unsupported type
      }
    }
  } catch (const FormatError&) {
  }
  return 0;
}
