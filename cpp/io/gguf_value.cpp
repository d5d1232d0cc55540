#include "io/gguf_value.h"

#include <array>
#include <utility>

#include "core/error.h"

namespace h2o {
namespace {

// Returns the integer as an int64_t, or nullopt if it does not fit.
template <class Integer>
std::optional<int64_t> load_integer(const std::byte* from, uint64_t i) {
  const auto integer = load_unaligned<Integer>(from, i);
  if (!std::in_range<int64_t>(integer)) return std::nullopt;
  return static_cast<int64_t>(integer);
}

template <class Number>
double load_number(const std::byte* from, uint64_t i) {
  return static_cast<double>(load_unaligned<Number>(from, i));
}

template <class Integer>
constexpr GgufTypeInfo integer_type(std::string_view name) {
  return {name, sizeof(Integer), load_integer<Integer>, load_number<Integer>};
}

// Indexed by GgufType.
constexpr std::array kTypes = {
    integer_type<uint8_t>("u8"),
    integer_type<int8_t>("i8"),
    integer_type<uint16_t>("u16"),
    integer_type<int16_t>("i16"),
    integer_type<uint32_t>("u32"),
    integer_type<int32_t>("i32"),
    GgufTypeInfo{"f32", 4, nullptr, load_number<float>},
    GgufTypeInfo{"bool", 1},
    GgufTypeInfo{"string", 8},
    GgufTypeInfo{"array", 12},
    integer_type<uint64_t>("u64"),
    integer_type<int64_t>("i64"),
    GgufTypeInfo{"f64", 8, nullptr, load_number<double>},
};

static_assert(kTypes.size() == kGgufTypes);

}  // namespace

const GgufTypeInfo& info(GgufType type) { return kTypes[static_cast<size_t>(type)]; }

std::string_view load_string(const std::byte* from) {
  return {reinterpret_cast<const char*>(from) + sizeof(uint64_t), load_unaligned<uint64_t>(from)};
}

std::string type_name(const GgufValue& value) {
  return concat(value.type == GgufType::array ? "array of " : "", info(value.element_type).name);
}

}  // namespace h2o
