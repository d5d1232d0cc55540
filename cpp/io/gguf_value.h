// GgufValue: a GGUF metadata value, and how its types are encoded.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace h2o {

// The type of a metadata value, numbered as in the file.
enum class GgufType : uint32_t {
  u8,
  i8,
  u16,
  i16,
  u32,
  i32,
  f32,
  boolean,
  string,
  array,
  u64,
  i64,
  f64
};

// A metadata value, still encoded: unaligned, each string preceded by its u64 length.
struct GgufValue {
  GgufType type = GgufType::u8;
  GgufType element_type = GgufType::u8;   // of an array's elements; otherwise equal to `type`
  uint64_t count = 1;                     // number of an array's elements; otherwise 1
  std::span<const std::byte> bytes = {};  // the value, or the elements one after the other
};

std::string type_name(const GgufValue& value);  // "u32", "array of string"

struct GgufTypeInfo {
  std::string_view name;
  // Size of a number or bool, or of an empty string or array.
  uint64_t min_bytes;
  std::optional<int64_t> (*load_integer)(const std::byte*, uint64_t i) = nullptr;  // integers only
  double (*load_number)(const std::byte*, uint64_t i) = nullptr;  // integers and floats only
};

inline constexpr uint32_t kGgufTypes = 13;
const GgufTypeInfo& info(GgufType type);

static_assert(std::endian::native == std::endian::little, "GGUF numbers are read as they are");

// Element i of an unaligned array.
template <class Number>
Number load_unaligned(const std::byte* from, uint64_t i = 0) {
  Number number;
  std::memcpy(&number, from + i * sizeof(number), sizeof(number));
  return number;
}

// A string with its length in front.
std::string_view load_string(const std::byte* from);

}  // namespace h2o
