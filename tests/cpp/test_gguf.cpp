// GGUF files: good ones read back as written; each way to be wrong is refused, saying where and
// why. The files are built here, byte by byte.
#include <doctest/doctest.h>

#include <cerrno>
#include <fstream>
#include <limits>
#include <random>

#include "core/error.h"
#include "io/gguf.h"

namespace h2o {
namespace {

using enum GgufType;

constexpr auto kF32 = static_cast<uint32_t>(DType::f32);
constexpr auto kF16 = static_cast<uint32_t>(DType::f16);
constexpr auto kQ8_0 = static_cast<uint32_t>(DType::q8_0);
constexpr uint32_t kQ4_0 = 2;
constexpr auto kMinInt32 = std::numeric_limits<int32_t>::min();
constexpr auto kMinInt64 = std::numeric_limits<int64_t>::min();

constexpr uint64_t operator""_u64(unsigned long long number) { return number; }
constexpr uint64_t kHuge = 1_u64 << 60;

struct TempFile {
  explicit TempFile(const std::string& content) {
    static const unsigned kRun = std::random_device{}();
    static int count = 0;
    path = std::filesystem::temp_directory_path() / text("h2o_test_gguf_", kRun, "_", count++);
    std::ofstream(path, std::ios::binary) << content;
  }
  TempFile(const TempFile&) = delete;
  ~TempFile() { std::filesystem::remove(path); }

  std::filesystem::path path;
};

// Numbers as they are in memory, strings with their length in front.
template <class... Parts>
std::string bytes(const Parts&... parts) {
  std::string out;
  const auto add = [&out](const auto& part) {
    if constexpr (std::is_convertible_v<decltype(part), std::string_view>) {
      const std::string_view characters(part);
      out.append(bytes(uint64_t{characters.size()})).append(characters);
    } else {
      out.append(reinterpret_cast<const char*>(&part), sizeof(part));
    }
  };
  (add(parts), ...);
  return out;
}

struct Writer {
  uint32_t version = 3;
  uint64_t n_tensors = 0;
  uint64_t n_keys = 0;
  uint64_t alignment = 32;
  std::string keys = {};
  std::string infos = {};
  std::string data = {};

  template <class... Parts>
  void key(std::string_view name, GgufType type, const Parts&... value) {
    ++n_keys;
    keys += bytes(name, type, value...);
  }

  void tensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
              uint64_t offset) {
    ++n_tensors;
    infos += bytes(name, static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) infos += bytes(dim);
    infos += bytes(type, offset);
  }

  std::string file() const {
    std::string out = "GGUF" + bytes(version, n_tensors, n_keys) + keys + infos;
    while (out.size() % alignment != 0) out += '\0';
    return out + data;
  }
};

// The FormatError that an action throws, without its prefix. Empty where it throws none.
template <class Action>
std::string error_in(const std::filesystem::path& path, Action action) {
  try {
    action();
    return "";
  } catch (const FormatError& error) {
    const std::string message = error.what();
    const std::string prefix = "[gguf] " + path.string() + ": ";
    REQUIRE(message.starts_with(prefix));
    return message.substr(prefix.size());
  }
}

// What is wrong with a file.
std::string error_of(const std::string& content) {
  const TempFile temp(content);
  return error_in(temp.path, [&] { GgufFile{temp.path}; });
}

std::string error_of(const Writer& writer) { return error_of(writer.file()); }

// What is wrong with key 'k' of this type and value.
template <class... Parts>
std::string key_error(GgufType type, const Parts&... value) {
  Writer writer;
  writer.key("k", type, value...);
  return error_of(writer);
}

// What is wrong with tensor 't' of this layout, in a file with 128 bytes of data.
std::string tensor_error(const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset) {
  Writer writer{.data = std::string(128, 'x')};
  writer.tensor("t", dims, type, offset);
  return error_of(writer);
}

// A file with every type in it.
Writer good() {
  Writer out;
  out.key("u8", u8, uint8_t{255});
  out.key("i8", i8, int8_t{-128});
  out.key("u16", u16, uint16_t{65535});
  out.key("i16", i16, int16_t{-32768});
  out.key("u32", u32, uint32_t{4294967295});
  out.key("i32", i32, kMinInt32);
  out.key("f32", f32, 0.5f);
  out.key("true", boolean, '\1');
  out.key("false", boolean, '\0');
  out.key("string", string, "h\xc3\xa9llo");
  out.key("empty", string, "");
  out.key("u64", u64, ~0_u64);
  out.key("small u64", u64, 7_u64);
  out.key("i64", i64, kMinInt64);
  out.key("f64", f64, 1e300);
  out.key("strings", array, string, 3_u64, "a", "", "bc");
  out.key("u16s", array, u16, 2_u64, uint16_t{1}, uint16_t{2});
  out.key("u64s", array, u64, 2_u64, 1_u64, ~0_u64);
  out.key("f32s", array, f32, 2_u64, 0.25f, -2.f);
  out.key("bools", array, boolean, 2_u64, '\1', '\0');
  out.key("none", array, string, 0_u64);
  out.key("nested", array, array, 2_u64, u16, 1_u64, uint16_t{5}, string, 1_u64, "x");
  out.key("depth 4", array, array, 1_u64, array, 1_u64, array, 1_u64, i8, 1_u64, int8_t{5});

  // 96 bytes; 68 and 28 of padding; 48 and 16 of padding; 18.
  out.tensor("matrix", {8, 3}, kF32, 0);
  out.tensor("vector", {64}, kQ8_0, 96);
  out.tensor("cube", {2, 3, 4}, kF16, 192);
  out.tensor("old", {32, 1}, kQ4_0, 256);
  for (int i = 0; i < 274; ++i) out.data += static_cast<char>(i);
  return out;
}

TEST_CASE("MappedFile maps the whole file") {
  const TempFile temp(std::string("a\0b", 3));
  MappedFile file(temp.path);
  CHECK(file.path() == temp.path.string());
  REQUIRE(file.bytes().size() == 3);
  CHECK(file.bytes()[2] == std::byte{'b'});
  MappedFile moved(std::move(file));
  CHECK(moved.bytes()[0] == std::byte{'a'});
  const TempFile empty("");
  moved = MappedFile(empty.path);
  CHECK(moved.bytes().empty());
  CHECK(moved.path() == empty.path.string());
}

TEST_CASE("MappedFile says why the operating system refused") {
  const auto error_number = [](const std::filesystem::path& path) {
    try {
      const GgufFile file(path);
      return 0;
    } catch (const FileError& error) {
      CHECK(error.path() == path.string());
      return error.error_number();
    }
  };
  const auto directory = std::filesystem::temp_directory_path();
  CHECK(error_number(directory / "h2o_test_no_such_file") == ENOENT);
  CHECK(error_number(directory) == EISDIR);
}

TEST_CASE("metadata read back as written") {
  const TempFile temp(good().file());
  GgufFile opened(temp.path);
  const GgufFile file = std::move(opened);  // views must survive a move
  CHECK(file.path() == temp.path.string());
  REQUIRE(file.metadata().size() == good().n_keys);
  CHECK(file.metadata()[0].first == "u8");
  CHECK(file.find("u8") == &file.metadata()[0].second);
  CHECK(file.find("missing") == nullptr);

  CHECK(file.integer("u8") == 255);
  CHECK(file.integer("i8") == -128);
  CHECK(file.integer("u16") == 65535);
  CHECK(file.integer("i16") == -32768);
  CHECK(file.integer("u32") == 4294967295);
  CHECK(file.integer("i32") == kMinInt32);
  CHECK(file.integer("small u64") == 7);
  CHECK(file.integer("i64") == kMinInt64);
  CHECK(file.number("f32") == 0.5);
  CHECK(file.number("f64") == 1e300);
  CHECK(file.number("i8") == -128.0);
  CHECK(file.number("u64") == 18446744073709551615.0);
  CHECK(file.boolean("true"));
  CHECK_FALSE(file.boolean("false"));
  CHECK(file.string("string") == "h\xc3\xa9llo");
  CHECK(file.string("empty") == "");
  CHECK(file.strings("strings") == std::vector<std::string_view>{"a", "", "bc"});
  CHECK(file.strings("none").empty());
  CHECK(file.integers("u16s") == std::vector<int64_t>{1, 2});
  CHECK(file.numbers("u16s") == std::vector<double>{1, 2});
  CHECK(file.numbers("f32s") == std::vector<double>{0.25, -2});

  const GgufValue& nested = *file.find("nested");
  CHECK(type_name(nested) == "array of array");
  CHECK(nested.count == 2);
  CHECK(nested.bytes.size() == (12 + 2) + (12 + 9));
  CHECK(type_name(*file.find("bools")) == "array of bool");

  CHECK(file.integer_or("x", 5) == 5);
  CHECK(file.integer_or("u8", 5) == 255);
  CHECK(file.number_or("x", 1.5) == 1.5);
  CHECK(file.boolean_or("x", true));
  CHECK(file.string_or("x", "none") == "none");
}

TEST_CASE("tensors read back as written, in both versions") {
  for (const uint32_t version : {2u, 3u}) {
    Writer writer = good();
    writer.version = version;
    const TempFile temp(writer.file());
    const GgufFile file(temp.path);
    CHECK(file.version() == version);

    REQUIRE(file.tensors().size() == 4);
    const GgufTensor& matrix = file.tensors()[0];
    CHECK(file.find_tensor("matrix") == &matrix);
    CHECK(file.find_tensor("missing") == nullptr);
    CHECK(matrix.n_dims == 2);
    CHECK(matrix.dims == std::array<int64_t, 4>{8, 3, 1, 1});
    CHECK(matrix.data.size() == 96);
    CHECK(matrix.data[95] == std::byte{95});
    const Tensor view = file.view(matrix);
    CHECK(view.data == matrix.data.data());
    CHECK(view.rows == 3);
    CHECK(view.cols == 8);

    const Tensor vector = file.view(*file.find_tensor("vector"));
    CHECK(vector.dtype == DType::q8_0);
    CHECK(vector.rows == 1);
    CHECK(vector.cols == 64);
    CHECK(vector.data[0] == std::byte{96});

    const GgufTensor& cube = *file.find_tensor("cube");
    CHECK(cube.dims == std::array<int64_t, 4>{2, 3, 4, 1});
    CHECK(cube.data.size() == 48);
    CHECK(error_in(temp.path, [&] { file.view(cube); }) ==
          "tensor 'cube': 3 dimensions, expected 1 or 2");
    CHECK(error_in(temp.path, [&] { file.view(*file.find_tensor("old")); }) ==
          "tensor 'old': Q4_0, expected F32, F16, BF16 or Q8_0");
  }
}

TEST_CASE("getters refuse what is missing or of another type") {
  const TempFile temp(good().file());
  const GgufFile file(temp.path);
  const auto check = [&](auto getter, std::string_view expected) {
    CHECK(error_in(temp.path, getter) == expected);
  };
  check([&] { file.integer("x"); }, "key 'x': missing, expected an integer");
  check([&] { file.strings("x"); }, "key 'x': missing, expected an array of strings");
  check([&] { file.integer("f32"); }, "key 'f32': f32, expected an integer");
  check([&] { file.integer("true"); }, "key 'true': bool, expected an integer");
  check([&] { file.integer("u16s"); }, "key 'u16s': array of u16, expected an integer");
  check([&] { file.number("empty"); }, "key 'empty': string, expected a number");
  check([&] { file.boolean("u8"); }, "key 'u8': u8, expected a bool");
  check([&] { file.string("nested"); }, "key 'nested': array of array, expected a string");
  check([&] { file.strings("empty"); }, "key 'empty': string, expected an array of strings");
  check([&] { file.integers("u8"); }, "key 'u8': u8, expected an array of integers");
  check([&] { file.integers("f32s"); }, "key 'f32s': array of f32, expected an array of integers");
  check([&] { file.numbers("bools"); }, "key 'bools': array of bool, expected an array of numbers");
  check([&] { file.integer_or("f32", 5); }, "key 'f32': f32, expected an integer");
  check([&] { file.string_or("u8", "x"); }, "key 'u8': u8, expected a string");

  const std::string limit = "too large, expected at most 9223372036854775807";
  check([&] { file.integer("u64"); }, "key 'u64': " + limit);
  check([&] { file.integers("u64s"); }, "key 'u64s': " + limit);
}

TEST_CASE("a bad header is refused") {
  CHECK(error_of("") == "header: the file is empty");
  CHECK(error_of("GG") == "header: the file is truncated, 4 bytes needed and 2 left");
  CHECK(error_of("ggml....") == "header: the file starts with 'ggml', expected 'GGUF'");

  CHECK(error_of(Writer{}) == "");  // no keys and no tensors: good, if useless
  CHECK(error_of(Writer{.version = 0}) == "header: version 0, expected 2 or 3");
  CHECK(error_of(Writer{.version = 1}) == "header: version 1, expected 2 or 3");
  CHECK(error_of(Writer{.version = 4}) == "header: version 4, expected 2 or 3");
  CHECK(error_of(Writer{.version = 3u << 24}) == "header: byte-swapped files are not supported");

  CHECK(error_of(Writer{.n_tensors = kHuge}) ==
        "header: the file is truncated, tensor_count is 1152921504606846976 and 16 bytes are left");
  CHECK(error_of(Writer{.n_keys = kHuge}) ==
        "header: the file is truncated, kv_count is 1152921504606846976 and 8 bytes are left");
}

TEST_CASE("bad names are refused") {
  const auto with_key = [](std::string_view name) {
    Writer writer;
    writer.key(name, u8, 'x');
    return error_of(writer);
  };
  CHECK(with_key(std::string(65535, 'k')) == "");
  CHECK(with_key(std::string(65536, 'k')) ==
        "key 1 of 1: a name of 65536 bytes, expected 1 to 65535");
  CHECK(with_key("") == "key 1 of 1: a name of 0 bytes, expected 1 to 65535");

  const auto with_tensor = [](std::string_view name) {
    Writer writer{.data = "1234"};
    writer.tensor(name, {1}, kF32, 0);
    return error_of(writer);
  };
  CHECK(with_tensor(std::string(64, 't')) == "");
  CHECK(with_tensor(std::string(65, 't')) == "tensor 1 of 1: a name of 65 bytes, expected 1 to 64");
  CHECK(with_tensor("") == "tensor 1 of 1: a name of 0 bytes, expected 1 to 64");

  // Messages must be printable, whatever the file says.
  Writer strange;
  strange.key(std::string("\0\n\xff", 3) + std::string(100, 'k'), boolean, '\2');
  CHECK(error_of(strange) == "key '???" + std::string(77, 'k') + "...': bool 2, expected 0 or 1");
}

TEST_CASE("bad values are refused") {
  CHECK(key_error(GgufType{13}, kHuge) == "key 'k': value type 13, expected 0 to 12");
  CHECK(key_error(array, 99, kHuge, kHuge) == "key 'k': value type 99, expected 0 to 12");
  CHECK(key_error(boolean, '\2') == "key 'k': bool 2, expected 0 or 1");
  CHECK(key_error(array, boolean, 2_u64, '\1', '\xff') == "key 'k': bool 255, expected 0 or 1");
  CHECK(key_error(array, array, 1_u64, array, 1_u64, array, 1_u64, array, 1_u64, u8, 1_u64, 'x') ==
        "key 'k': arrays nested deeper than 4");
  for (const GgufType type : {u8, f64, boolean, string, array}) {
    CHECK(key_error(array, type, kHuge, 0_u64)
              .starts_with("key 'k': the file is truncated, array length is 1152921504606846976"));
  }
  for (const uint64_t length : {1000_u64, kHuge, ~0_u64}) {
    CHECK(key_error(string, length).starts_with("key 'k': the file is truncated, "));
    const Writer writer{.n_keys = 1, .keys = bytes(length, "key")};
    CHECK(error_of(writer).starts_with("key 1 of 1: the file is truncated, "));
  }
}

TEST_CASE("general.alignment is a u32, a power of two and at least 8") {
  for (const uint32_t alignment : {8u, 16u, 32u, 64u, 4096u}) {
    Writer writer{.alignment = alignment, .data = std::string(alignment + 4, 'x')};
    writer.key("general.alignment", u32, alignment);
    writer.tensor("a", {1}, kF32, 0);
    writer.tensor("b", {1}, kF32, alignment);
    CHECK(error_of(writer) == "");
    writer.tensor("c", {1}, kF32, alignment / 2);
    CHECK(error_of(writer).starts_with("tensor 'c': offset "));
  }
  for (const uint32_t alignment : {0u, 1u, 4u, 24u, 33u, ~0u}) {
    Writer writer;
    writer.key("general.alignment", u32, alignment);
    CHECK(error_of(writer) ==
          text("key 'general.alignment': ", alignment, ", expected a power of two >= 8"));
  }
  Writer wrong_type;
  wrong_type.key("general.alignment", u64, 32_u64);
  CHECK(error_of(wrong_type) == "key 'general.alignment': u64, expected u32");
  Writer past_the_end{.data = std::string(64, 'x')};
  past_the_end.key("general.alignment", u32, 1u << 31);
  past_the_end.tensor("t", {1}, kF32, 0);
  CHECK(error_of(past_the_end).starts_with("tensor 't': the file is truncated, "));
}

TEST_CASE("bad tensors are refused") {
  CHECK(tensor_error({32}, kF32, 0) == "");
  CHECK(tensor_error({1, 1, 1, 1, 1}, kF32, 0) == "tensor 't': 5 dimensions, expected 1 to 4");
  CHECK(tensor_error({}, kF32, 0) == "tensor 't': 0 dimensions, expected 1 to 4");
  CHECK(tensor_error({1, 0}, kF32, 0) == "tensor 't': dimension 1 is 0, expected 1 or more");
  CHECK(tensor_error({kHuge, 8}, kF32, 0) == "tensor 't': dimension 1 is 8, too many elements");
  CHECK(tensor_error({kHuge * 8}, kF32, 0) ==
        "tensor 't': dimension 0 is 9223372036854775808, too many elements");
  CHECK(tensor_error({kHuge * 4}, kF32, 0) ==  // 2^64 bytes, which are 0 in 64 bits
        "tensor 't': the file is truncated, 4611686018427387904 elements needed");
  CHECK(tensor_error({1}, 4, 0) == "tensor 't': tensor type 4 is not known");
  CHECK(tensor_error({33}, kQ8_0, 0) ==
        "tensor 't': dimension 0 is 33, expected a multiple of 32 for Q8_0");
  CHECK(tensor_error({1}, kF32, 4) == "tensor 't': offset 4, expected a multiple of 32");
  for (const uint64_t offset : {32_u64, 128_u64, 160_u64, kHuge, ~31_u64}) {
    CHECK(tensor_error({32}, kF32, offset) ==
          text("tensor 't': the file is truncated, 128 bytes needed at offset ", offset,
               " of 128 bytes of tensor data"));
  }
}

TEST_CASE("what is there twice is refused") {
  Writer key;
  key.key("k", u8, 'x');
  key.key("k", string, "other");
  CHECK(error_of(key) == "key 'k': it appears twice");

  Writer good{.data = std::string(128, 'x')};
  good.tensor("late", {8}, kF32, 64);   // bytes 64 to 96
  good.tensor("early", {16}, kF32, 0);  // bytes 0 to 64
  CHECK(error_of(good) == "");
  Writer name = good;
  name.tensor("late", {1}, kF32, 96);
  CHECK(error_of(name) == "tensor 'late': it appears twice");
  Writer data = good;
  data.tensor("between", {9}, kF32, 32);  // bytes 32 to 68
  CHECK(error_of(data) == "tensor 'between': its data overlap the data of tensor 'early'");
}

TEST_CASE("a file cut anywhere is refused") {
  const std::string content = good().file();
  for (size_t length = 0; length < content.size(); ++length) {
    CAPTURE(length);
    CHECK(error_of(content.substr(0, length)) != "");
  }
  CHECK(error_of(content) == "");
  CHECK(error_of(content + std::string(14, '\0')) == "");  // padding after the last tensor
}

// Uses all of a file: any bad span or view shows under a sanitizer, or as another exception.
void use(const GgufFile& file) {
  for (const auto& [key, value] : file.metadata()) {
    const std::string name(key);
    error_in(file.path(), [&] { file.integer(name); });
    error_in(file.path(), [&] { file.number(name); });
    error_in(file.path(), [&] { file.string(name); });
    error_in(file.path(), [&] { file.integers(name); });
    error_in(file.path(), [&] { file.numbers(name); });
    error_in(file.path(), [&] { file.strings(name); });
  }
  for (const GgufTensor& tensor : file.tensors()) {
    error_in(file.path(), [&] { file.view(tensor); });
    const std::vector<std::byte> copy(tensor.data.begin(), tensor.data.end());
  }
}

TEST_CASE("a file with any one byte changed is read or refused") {
  const std::string content = good().file();
  std::mt19937 random(1);
  int n_refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string mutant = content;
    const size_t at = random() % mutant.size();
    mutant[at] = static_cast<char>(mutant[at] + 1 + random() % 255);
    CAPTURE(at);
    const TempFile temp(mutant);
    try {
      use(GgufFile(temp.path));
    } catch (const FormatError&) {
      ++n_refused;
    }
  }
  CHECK(n_refused > 200);
  CHECK(n_refused < 1800);
}

}  // namespace
}  // namespace h2o
