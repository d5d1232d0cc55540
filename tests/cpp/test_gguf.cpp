// GGUF files, built here byte by byte: valid ones read back as written, and each kind of error is
// rejected with a message that says where and why.
#include <doctest/doctest.h>

#include <cerrno>

#include "gguf_writer.h"
#include "io/gguf.h"
#include "io/gguf_shards.h"

namespace h2o {
namespace {

using enum GgufType;

constexpr uint32_t kF32 = 0, kF16 = 1, kI8 = 24, kQ8_0 = 8;  // tensor types

constexpr uint64_t operator""_u64(unsigned long long number) { return number; }
constexpr uint64_t kHuge = 1_u64 << 60;

// The message of the FormatError that an action throws, without its prefix; empty if it throws
// none.
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

// The error of opening a file.
std::string error_of(const std::string& content) {
  const TempFile temp(content);
  return error_in(temp.path, [&] { GgufFile{temp.path}; });
}

std::string error_of(const Writer& writer) { return error_of(writer.file()); }

// A file with every value type.
Writer good() {
  Writer out;
  out.key("u8", u8, uint8_t{255});
  out.key("i8", i8, int8_t{-128});
  out.key("u16", u16, uint16_t{65535});
  out.key("i16", i16, int16_t{-32768});
  out.key("u32", u32, uint32_t{4294967295});
  out.key("i32", i32, INT32_MIN);
  out.key("f32", f32, 0.5f);
  out.key("true", boolean, '\1');
  out.key("false", boolean, '\0');
  out.key("string", string, "h\xc3\xa9llo");
  out.key("empty", string, "");
  out.key("u64", u64, ~0_u64);
  out.key("small u64", u64, 7_u64);
  out.key("i64", i64, INT64_MIN);
  out.key("f64", f64, 1e300);
  out.key("strings", array, string, 3_u64, "a", "", "bc");
  out.key("u16s", array, u16, 2_u64, uint16_t{1}, uint16_t{2});
  out.key("big", array, u64, 2_u64, 1_u64, ~0_u64);
  out.key("f32s", array, f32, 2_u64, 0.25f, -2.f);
  out.key("bools", array, boolean, 2_u64, '\1', '\0');
  out.key("none", array, string, 0_u64);
  out.key("nested", array, array, 2_u64, u16, 1_u64, uint16_t{5}, string, 1_u64, "x");
  out.key("depth 4", array, array, 1_u64, array, 1_u64, array, 1_u64, i8, 1_u64, int8_t{5});

  // 96 bytes; 68 and 28 of padding; 48 and 16 of padding; 17.
  out.tensor("matrix", {8, 3}, kF32, 0);
  out.tensor("vector", {64}, kQ8_0, 96);
  out.tensor("cube", {2, 3, 4}, kF16, 192);
  out.tensor("new", {17}, kI8, 256);
  out.tensor("tesseract", {1, 1, 1, 2}, kF16, 288);
  for (int i = 0; i < 292; ++i) out.data += static_cast<char>(i);
  return out;
}

TEST_CASE("MappedFile maps the whole file, or says why the operating system refused") {
  const TempFile temp(std::string("a\0b", 3));
  MappedFile file(temp.path);
  REQUIRE(file.bytes().size() == 3);
  CHECK(file.bytes()[2] == std::byte{'b'});
  MappedFile moved(std::move(file));
  CHECK(moved.bytes()[0] == std::byte{'a'});
  const TempFile empty("");
  moved = MappedFile(empty.path);
  CHECK(moved.bytes().empty());
  CHECK(moved.path() == empty.path.string());

  const auto error_number = [](const std::filesystem::path& path) {
    try {
      return GgufFile(path), 0;
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
  const GgufFile file = std::move(opened);  // views must remain valid after a move
  CHECK(file.path() == temp.path.string());
  REQUIRE(file.metadata().size() == good().n_keys);
  CHECK(file.metadata()[0].first == "u8");
  CHECK(file.find("u8") == &file.metadata()[0].second);
  CHECK(file.find("missing") == nullptr);

  const std::pair<std::string_view, int64_t> integers[] = {
      {"u8", 255},         {"i8", -128},       {"u16", 65535},   {"i16", -32768},
      {"u32", 4294967295}, {"i32", INT32_MIN}, {"small u64", 7}, {"i64", INT64_MIN}};
  for (const auto& [key, integer] : integers) CHECK(file.integer(key) == integer);
  CHECK(file.number("f32") == 0.5);
  CHECK(file.number("f64") == 1e300);
  CHECK(file.number("u64") == 18446744073709551615.0);
  CHECK(file.boolean("true"));
  CHECK_FALSE(file.boolean("false"));
  CHECK(file.string("string") == "h\xc3\xa9llo");
  CHECK(file.strings("strings") == std::vector<std::string_view>{"a", "", "bc"});
  CHECK(file.integers("u16s") == std::vector<int64_t>{1, 2});
  CHECK(file.numbers("u16s") == std::vector<double>{1, 2});
  CHECK(file.numbers("f32s") == std::vector<double>{0.25, -2});

  const GgufValue& nested = *file.find("nested");
  CHECK(type_name(nested) == "array of array");
  CHECK(nested.count == 2);
  CHECK(nested.bytes.size() == (12 + 2) + (12 + 9));

  CHECK(file.integer_or("x", 5) == 5);
  CHECK(file.integer_or("u8", 5) == 255);
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

    REQUIRE(file.tensors().size() == 5);
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
    CHECK(vector.data[0] == std::byte{96});

    const GgufTensor& cube = *file.find_tensor("cube");
    CHECK(cube.dims == std::array<int64_t, 4>{2, 3, 4, 1});
    CHECK(file.view(cube, 4).rows == 12);
    CHECK(file.view(cube, 4).cols == 2);
    CHECK(error_in(temp.path, [&] { file.view(cube); }) == "tensor 'cube': 4 matrices, expected 1");
    CHECK(error_in(temp.path, [&] { file.view(*file.find_tensor("tesseract")); }) ==
          "tensor 'tesseract': 4 dimensions, expected 1 to 3");
    CHECK(error_in(temp.path, [&] { file.view(*file.find_tensor("new")); }) ==
          "tensor 'new': type I8 is not supported; supported: " + dtype_names(computable_dtypes()));
  }
}

TEST_CASE("getters reject missing keys and other types") {
  const TempFile temp(good().file());
  const GgufFile file(temp.path);
  const auto check = [&](auto getter, std::string_view expected) {
    CHECK(error_in(temp.path, getter) == expected);
  };
  check([&] { file.integer("x"); }, "key 'x': missing, expected an integer");
  check([&] { file.integer("f32"); }, "key 'f32': f32, expected an integer");
  check([&] { file.integer("u16s"); }, "key 'u16s': array of u16, expected an integer");
  check([&] { file.number("empty"); }, "key 'empty': string, expected a number");
  check([&] { file.boolean("u8"); }, "key 'u8': u8, expected a bool");
  check([&] { file.string("nested"); }, "key 'nested': array of array, expected a string");
  check([&] { file.strings("empty"); }, "key 'empty': string, expected an array of strings");
  check([&] { file.integers("f32s"); }, "key 'f32s': array of f32, expected an array of integers");
  check([&] { file.numbers("bools"); }, "key 'bools': array of bool, expected an array of numbers");
  check([&] { file.integer_or("f32", 5); }, "key 'f32': f32, expected an integer");
  check([&] { file.string_or("u8", "x"); }, "key 'u8': u8, expected a string");
  check([&] { file.integer("u64"); }, "key 'u64': too large, expected at most 9223372036854775807");
  check([&] { file.integers("big"); },
        "key 'big': too large, expected at most 9223372036854775807");
}

TEST_CASE("a bad header is rejected") {
  CHECK(error_of("") == "header: the file is empty");
  CHECK(error_of("GG") == "header: the file is truncated, 4 bytes needed and 2 left");
  CHECK(error_of("ggml....") == "header: the file starts with 'ggml', expected 'GGUF'");
  CHECK(error_of(Writer{}) == "");  // no keys and no tensors: valid
  CHECK(error_of(Writer{.version = 0}) == "header: version 0, expected 2 or 3");
  CHECK(error_of(Writer{.version = 4}) == "header: version 4, expected 2 or 3");
  CHECK(error_of(Writer{.version = 3u << 24}) == "header: byte-swapped files are not supported");

  CHECK(error_of(Writer{.n_tensors = kHuge}) ==
        "header: the file is truncated, tensor_count is 1152921504606846976 and 16 bytes are left");
  CHECK(error_of(Writer{.n_keys = kHuge}) ==
        "header: the file is truncated, kv_count is 1152921504606846976 and 8 bytes are left");
}

TEST_CASE("bad names are rejected") {
  const auto key = [](std::string_view name) { return Writer{}.key(name, u8, 'x'); };
  CHECK(error_of(key(std::string(65535, 'k'))) == "");
  CHECK(error_of(key(std::string(65536, 'k'))) ==
        "key 1 of 1: a name of 65536 bytes, expected 1 to 65535");
  CHECK(error_of(key("")) == "key 1 of 1: a name of 0 bytes, expected 1 to 65535");

  const auto tensor = [](std::string_view name) {
    return Writer{.data = "1234"}.tensor(name, {1}, kF32, 0);
  };
  CHECK(error_of(tensor(std::string(64, 't'))) == "");
  CHECK(error_of(tensor(std::string(65, 't'))) ==
        "tensor 1 of 1: a name of 65 bytes, expected 1 to 64");
  CHECK(error_of(tensor("")) == "tensor 1 of 1: a name of 0 bytes, expected 1 to 64");
  CHECK(error_of(tensor("t").tensor("t", {1}, kF32, 32)) == "tensor 't': it appears twice");

  // Messages are printable, whatever the name.
  CHECK(error_of(key("a\nb\xff").key("a\nb\xff", u8, 'x')) == "key 'a?b?': it appears twice");
}

TEST_CASE("bad values are rejected") {
  const auto error = [](GgufType type, const auto&... value) {
    return error_of(Writer{}.key("k", type, value...));
  };
  CHECK(error(GgufType{13}, kHuge) == "key 'k': value type 13, expected 0 to 12");
  CHECK(error(array, 99, kHuge, kHuge) == "key 'k': value type 99, expected 0 to 12");
  CHECK(error(boolean, '\2') == "key 'k': bool 2, expected 0 or 1");
  CHECK(error(array, boolean, 2_u64, '\1', '\xff') == "key 'k': bool 255, expected 0 or 1");
  CHECK(error(array, array, 1_u64, array, 1_u64, array, 1_u64, array, 1_u64, u8, 1_u64, 'x') ==
        "key 'k': arrays nested deeper than 4");
  for (const GgufType type : {u8, f64, boolean, string, array}) {
    CHECK(error(array, type, kHuge, 0_u64)
              .starts_with("key 'k': the file is truncated, array length is 1152921504606846976"));
  }
  for (const uint64_t length : {1000_u64, kHuge, ~0_u64}) {
    CHECK(error(string, length).starts_with("key 'k': the file is truncated, "));
    const Writer cut{.n_keys = 1, .keys = bytes(length, "key")};
    CHECK(error_of(cut).starts_with("key 1 of 1: the file is truncated, "));
  }
}

TEST_CASE("general.alignment is a u32, a power of two and at least 8") {
  for (const uint32_t alignment : {8u, 16u, 32u, 64u, 4096u}) {
    Writer writer{.alignment = alignment, .data = std::string(alignment + 4, 'x')};
    writer.key("general.alignment", u32, alignment);
    writer.tensor("a", {1}, kF32, 0).tensor("b", {1}, kF32, alignment);
    CHECK(error_of(writer) == "");
    CHECK(error_of(writer.tensor("c", {1}, kF32, alignment / 2)).starts_with("tensor 'c': offset"));
  }
  for (const uint32_t alignment : {0u, 1u, 4u, 24u, 33u, ~0u}) {
    CHECK(error_of(Writer{}.key("general.alignment", u32, alignment)) ==
          concat("key 'general.alignment': ", alignment, ", expected a power of two >= 8"));
  }
  CHECK(error_of(Writer{}.key("general.alignment", u64, 32_u64)) ==
        "key 'general.alignment': u64, expected u32");
  CHECK(error_of(Writer{}.key("general.alignment", u32, 1u << 31).tensor("t", {1}, kF32, 0)) ==
        "tensor 't': the file is truncated, 4 bytes needed at offset 0 of 0 bytes of tensor data");
}

TEST_CASE("bad tensors are rejected") {
  const auto error = [](const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset) {
    const auto writer = Writer{.data = std::string(128, 'x')}.tensor("t", dims, type, offset);
    const std::string message = error_of(writer);
    CHECK(message.starts_with("tensor 't': "));
    return message.substr(message.find(':') + 2);
  };
  CHECK(error({}, kF32, 0) == "0 dimensions, expected 1 to 4");
  CHECK(error({1, 1, 1, 1, 1}, kF32, 0) == "5 dimensions, expected 1 to 4");
  CHECK(error({1, 0}, kF32, 0) == "dimension 1 is 0, expected 1 or more");
  CHECK(error({kHuge, 8}, kF32, 0) == "dimension 1 is 8, too many elements");
  CHECK(error({kHuge * 8}, kF32, 0) == "dimension 0 is 9223372036854775808, too many elements");
  CHECK(error({kHuge * 4}, kF32, 0) ==  // 2^64 bytes, which wraps around to 0
        "the file is truncated, 4611686018427387904 elements needed");
  CHECK(error({1}, 4, 0) == "tensor type 4 is not known");
  CHECK(error({33}, kQ8_0, 0) == "dimension 0 is 33, expected a multiple of 32 for Q8_0");
  CHECK(error({1}, kF32, 4) == "offset 4, expected a multiple of 32");
  for (const uint64_t offset : {32_u64, 128_u64, 160_u64, kHuge, ~31_u64}) {
    CHECK(error({32}, kF32, offset) == concat("the file is truncated, 128 bytes needed at offset ",
                                              offset, " of 128 bytes of tensor data"));
  }

  Writer writer{.data = std::string(128, 'x')};
  writer.tensor("late", {16}, kF32, 64).tensor("early", {16}, kF32, 0);
  CHECK(error_of(writer) == "");
  CHECK(error_of(writer.tensor("between", {9}, kF32, 32)) ==
        "tensor 'between': its data overlap the data of tensor 'early'");
}

TEST_CASE("numbers of split files that are out of range are rejected") {
  const auto error_with = [](const char* key, int64_t value) {
    const TempFile temp(Writer().key(key, i64, value).file());
    return error_in(temp.path, [&] { GgufShards{temp.path}; });
  };
  for (const int64_t value : {INT64_MIN, int64_t{-1}, int64_t{100'000}, INT64_MAX}) {
    CHECK(error_with("split.no", value) == concat("split.no is ", value));
    CHECK(error_with("split.count", value) == concat("split.count is ", value));
  }
  CHECK(error_with("split.no", 1) == "is file 2 of 1 of a split model, open the first one");
  CHECK(error_with("split.no", 0).empty());
}

TEST_CASE("a file truncated anywhere is rejected") {
  const std::string content = good().file();
  for (size_t length = 1; length < content.size(); ++length) {
    CAPTURE(length);
    CHECK(error_of(content.substr(0, length)).find("the file is truncated") != std::string::npos);
  }
  CHECK(error_of(content) == "");
  CHECK(error_of(content + std::string(14, '\0')) == "");  // padding after the last tensor
}

// Reads all of a file, so that an invalid span causes a crash or another exception.
void read_all(const GgufFile& file) {
  for (const auto& entry : file.metadata()) {
    const std::string_view key = entry.first;
    error_in(file.path(), [&] { file.integer(key); });
    error_in(file.path(), [&] { file.string(key); });
    error_in(file.path(), [&] { file.integers(key); });
    error_in(file.path(), [&] { file.numbers(key); });
    error_in(file.path(), [&] { file.strings(key); });
  }
  for (const GgufTensor& tensor : file.tensors()) {
    error_in(file.path(), [&] { file.view(tensor); });
    const std::vector<std::byte> copy(tensor.data.begin(), tensor.data.end());
  }
}

TEST_CASE("a file with any one byte changed is accepted or rejected") {
  const std::string content = good().file();
  std::mt19937 random(1);
  int n_refused = 0;
  for (int i = 0; i < 2000; ++i) {
    std::string mutant = content;
    char& byte = mutant[random() % mutant.size()];
    byte = static_cast<char>(byte + 1 + random() % 255);
    const TempFile temp(mutant);
    n_refused += error_in(temp.path, [&] { read_all(GgufFile(temp.path)); }) != "";
  }
  CHECK(n_refused > 200);
  CHECK(n_refused < 1800);
}

}  // namespace
}  // namespace h2o
