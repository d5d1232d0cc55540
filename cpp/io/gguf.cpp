// The GGUF parser. A Reader scans the file front to back and checks every count and length against
// the remaining bytes before using it, so a corrupt file cannot cause large allocations or long
// loops.
#include "io/gguf.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/dtype.h"
#include "core/error.h"

namespace h2o {
namespace {

// Files that people take for GGUF, by how they begin.
struct OtherFile {
  std::string_view begin, what;
};
constexpr std::string_view kPacked = "packed or compressed; unpack it";
constexpr std::string_view kCheckpoint = "weights of a checkpoint; convert its directory";
constexpr std::string_view kOld =
    "in the format before GGUF, of 2023; take a GGUF file of the model";
constexpr OtherFile kOtherFiles[] = {
    {"version https://git-lfs",
     "a Git LFS pointer, without the data; run git lfs pull, or download it again"},
    {"# xet", "a pointer of the Hub, without the data; download it again"},
    {"<", "a page of the web, not the model; download the file itself"},
    {"{", "JSON, such as the answer of a server, not the model; download the file itself"},
    {"FROM ", "a Modelfile; take the model that it names"},
    {"MZqF", "a llamafile, a program with the model inside; take the model's GGUF file"},
    {"PK\3\4", "a zip archive, such as PyTorch's weights; unpack it, or convert the checkpoint"},
    {"\x80\2", kCheckpoint},
    {"\x1f\x8b", kPacked},
    {"BZh", kPacked},
    {"\3757zXZ", kPacked},
    {"7z\xbc\xaf", kPacked},
    {"Rar!", kPacked},
    {"\x28\xb5\x2f\xfd", kPacked},
    {"lmgg", kOld},
    {"tjgg", kOld},
    {"fmgg", kOld},
    {"algg", kOld},
};

constexpr uint64_t kMaxKeyBytes = 65535;
constexpr uint64_t kMaxTensorNameBytes = 64;
constexpr int kMaxArrayDepth = 4;
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMinAlignment = 8;  // no tensor type needs more
constexpr uint64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

// The smallest possible entries, which bound the counts in the header.
constexpr uint64_t kMinKeyEntry = 8 + 1 + 4 + 1;             // name, value type, value
constexpr uint64_t kMinTensorEntry = 8 + 1 + 4 + 8 + 4 + 8;  // name, n_dims, dim, type, offset

bool is_array(const GgufValue& v) { return v.type == GgufType::array; }
bool is_u32(const GgufValue& v) { return v.type == GgufType::u32; }
bool is_bool(const GgufValue& v) { return v.type == GgufType::boolean; }
bool is_string(const GgufValue& v) { return v.type == GgufType::string; }
bool is_integer(const GgufValue& v) { return info(v.type).load_integer; }
bool is_number(const GgufValue& v) { return info(v.type).load_number; }
bool is_booleans(const GgufValue& v) { return is_array(v) && v.element_type == GgufType::boolean; }
bool is_strings(const GgufValue& v) { return is_array(v) && v.element_type == GgufType::string; }
bool is_integers(const GgufValue& v) { return is_array(v) && info(v.element_type).load_integer; }
bool is_numbers(const GgufValue& v) { return is_array(v) && info(v.element_type).load_number; }

template <class... Parts>
[[noreturn]] void fail(const std::string& path, const Parts&... message) {
  throw FormatError(concat("[gguf] ", path, ": ", message...));
}

// The value of a required key, if `accepts` it.
const GgufValue& get(const GgufFile& file, std::string_view key, std::string_view expected,
                     bool (*accepts)(const GgufValue&)) {
  const GgufValue* value = file.find(key);
  if (value == nullptr || !accepts(*value)) {
    fail(file.path(), "key ", quoted(key), ": ", value ? type_name(*value) : "missing",
         ", expected ", expected);
  }
  return *value;
}

// Element i of an integer value or array.
int64_t integer_at(const GgufFile& file, std::string_view key, const GgufValue& value, uint64_t i) {
  const auto integer = info(value.element_type).load_integer(value.bytes.data(), i);
  if (!integer) fail(file.path(), "key ", quoted(key), ": too large, expected at most ", kMaxInt64);
  return *integer;
}

}  // namespace

// Scans the file front to back.
class GgufFile::Reader {
 public:
  // Where a tensor is in the data section, whose offset is known only after the last tensor entry.
  struct Extent {
    uint64_t offset;
    uint64_t bytes;
  };

  explicit Reader(const MappedFile& file) : path_(file.path()), bytes_(file.bytes()) {}

  uint64_t position() const { return position_; }

  // Sets the context for error messages: entry i of n ("key" or "tensor"), or the named entry.
  void set_section(const char* kind, uint64_t i, uint64_t n) { section_ = {kind, {}, i, n}; }
  void set_section(const char* kind, std::string_view name) { section_ = {kind, name, 0, 0}; }

  template <class... Parts>
  [[noreturn]] void fail(const Parts&... message) const {
    const auto& [kind, name, i, n] = section_;
    const std::string place = n > 0           ? concat(kind, ' ', i + 1, " of ", n)
                              : !name.empty() ? concat(kind, ' ', quoted(name))
                                              : kind;
    h2o::fail(path_, place, ": ", message...);
  }

  uint32_t read_version() {
    if (bytes_.empty()) fail("the file is empty");
    for (const auto& [begin, what] : kOtherFiles) {
      if (left() > begin.size() && load_text(begin.size()) == begin) fail("the file is ", what);
    }
    constexpr size_t kSize = 8;  // of the number before the JSON in safetensors
    if (left() > kSize + 2 && load_text(kSize + 2).substr(kSize) == "{\"") {
      fail("the file is ", kCheckpoint);
    }
    const std::string_view magic = take_text(4);
    if (magic != "GGUF") fail("the file starts with ", quoted(magic), ", expected 'GGUF'");
    const auto version = read<uint32_t>();
    if (version == 2 || version == 3) return version;
    if (version != 0 && (version & 0xffff) == 0) fail("byte-swapped files are not supported");
    fail("version ", version, ", expected 2 or 3", version == 1 ? "; take a newer file" : "");
  }

  // Reads a count of items that take at least `min_bytes` each.
  uint64_t read_count(std::string_view name, uint64_t min_bytes) {
    const auto count = read<uint64_t>();
    if (count > left() / min_bytes) {
      fail("the file is truncated, ", name, " is ", count, " and ", left(), " bytes are left");
    }
    return count;
  }

  std::string_view read_name(uint64_t max_bytes) {
    const std::string_view name = read_string();
    if (name.empty() || name.size() > max_bytes) {
      fail("a name of ", name.size(), " bytes, expected 1 to ", max_bytes);
    }
    return name;
  }

  GgufType read_type() {
    const auto id = read<uint32_t>();
    if (id >= kGgufTypes) fail("value type ", id, ", expected 0 to ", kGgufTypes - 1);
    return static_cast<GgufType>(id);
  }

  // Reads a value nested inside `depth` arrays.
  GgufValue read_value(GgufType type, int depth = 0) {
    GgufValue value = {.type = type, .element_type = type};
    if (type == GgufType::array) {
      if (depth == kMaxArrayDepth) fail("arrays nested deeper than ", kMaxArrayDepth);
      value.element_type = read_type();
      value.count = read_count("array length", info(value.element_type).min_bytes);
    }
    const uint64_t start = position_;
    switch (value.element_type) {
      case GgufType::boolean:
        for (const std::byte flag : take(value.count)) {
          if (flag > std::byte{1}) fail("bool ", static_cast<int>(flag), ", expected 0 or 1");
        }
        break;
      case GgufType::string:
        for (uint64_t i = 0; i < value.count; ++i) read_string();
        break;
      case GgufType::array:
        for (uint64_t i = 0; i < value.count; ++i) read_value(GgufType::array, depth + 1);
        break;
      default:
        take(value.count * info(value.element_type).min_bytes);
    }
    value.bytes = bytes_.subspan(start, position_ - start);
    return value;
  }

  // Reads the rest of a tensor entry, after its name. Sets everything except the data.
  Extent read_layout(GgufTensor& tensor) {
    const auto n_dims = read<uint32_t>();
    if (n_dims < 1 || n_dims > 4) fail(n_dims, " dimensions, expected 1 to 4");
    tensor.n_dims = static_cast<int>(n_dims);
    uint64_t n_elements = 1;
    for (uint32_t i = 0; i < n_dims; ++i) {
      const auto dim = read<uint64_t>();
      if (dim == 0) fail("dimension ", i, " is 0, expected 1 or more");
      if (dim > kMaxInt64 / n_elements) fail("dimension ", i, " is ", dim, ", too many elements");
      n_elements *= dim;
      tensor.dims[i] = static_cast<int64_t>(dim);
    }

    tensor.type = read<uint32_t>();
    const DTypeInfo* layout = find_dtype(tensor.type);
    if (layout == nullptr) fail("tensor type ", tensor.type, " is not known");
    if (tensor.dims[0] % layout->block_size != 0) {
      fail("dimension 0 is ", tensor.dims[0], ", expected a multiple of ", layout->block_size,
           " for ", layout->name);
    }
    const uint64_t n_blocks = n_elements / layout->block_size;
    const uint64_t max_blocks = bytes_.size() / layout->block_bytes;
    if (n_blocks > max_blocks) fail("the file is truncated, ", n_elements, " elements needed");
    return {.offset = read<uint64_t>(), .bytes = n_blocks * layout->block_bytes};
  }

 private:
  uint64_t left() const { return bytes_.size() - position_; }

  std::span<const std::byte> take(uint64_t n) {
    if (n > left()) fail("the file is truncated, ", n, " bytes needed and ", left(), " left");
    position_ += n;
    return bytes_.subspan(position_ - n, n);
  }

  std::string_view load_text(uint64_t n) const {
    return {reinterpret_cast<const char*>(bytes_.data() + position_), n};
  }

  std::string_view take_text(uint64_t n) {
    return {reinterpret_cast<const char*>(take(n).data()), n};
  }

  template <class Number>
  Number read() {
    return load_unaligned<Number>(take(sizeof(Number)).data());
  }

  std::string_view read_string() { return take_text(read<uint64_t>()); }

  const std::string& path_;
  std::span<const std::byte> bytes_;
  uint64_t position_ = 0;
  struct {
    const char* kind;
    std::string_view name;
    uint64_t i, n;
  } section_ = {"header", {}, 0, 0};
};

GgufFile::GgufFile(MappedFile file) : file_(std::move(file)) {
  Reader reader(file_);
  version_ = reader.read_version();
  const uint64_t n_tensors = reader.read_count("tensor_count", kMinTensorEntry);
  const uint64_t n_keys = reader.read_count("kv_count", kMinKeyEntry);
  read_metadata(reader, n_keys);
  read_tensors(reader, n_tensors);
}

void GgufFile::read_metadata(Reader& reader, uint64_t n_keys) {
  for (uint64_t i = 0; i < n_keys; ++i) {
    reader.set_section("key", i, n_keys);
    const std::string_view key = reader.read_name(kMaxKeyBytes);
    reader.set_section("key", key);
    if (!metadata_index_.emplace(key, i).second) reader.fail("it appears twice");
    metadata_.emplace_back(key, reader.read_value(reader.read_type()));
  }
}

void GgufFile::read_tensors(Reader& reader, uint64_t n_tensors) {
  std::vector<Reader::Extent> extents;
  for (uint64_t i = 0; i < n_tensors; ++i) {
    reader.set_section("tensor", i, n_tensors);
    GgufTensor tensor;
    tensor.name = reader.read_name(kMaxTensorNameBytes);
    reader.set_section("tensor", tensor.name);
    if (!tensor_index_.emplace(tensor.name, i).second) reader.fail("it appears twice");
    extents.push_back(reader.read_layout(tensor));
    tensors_.push_back(tensor);
  }

  // The data section starts at the next multiple of the alignment.
  const uint64_t step = alignment();
  const uint64_t start = (reader.position() + step - 1) / step * step;
  const auto data = file_.bytes().subspan(std::min<uint64_t>(start, file_.bytes().size()));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto [offset, bytes] = extents[i];
    reader.set_section("tensor", tensors_[i].name);
    if (offset % step != 0) reader.fail("offset ", offset, ", expected a multiple of ", step);
    if (offset > data.size() || bytes > data.size() - offset) {
      reader.fail("the file is truncated, ", bytes, " bytes needed at offset ", offset, " of ",
                  data.size(), " bytes of tensor data");
    }
    tensors_[i].data = data.subspan(offset, bytes);
  }

  // Tensor data must not overlap.
  std::vector<GgufTensor> sorted = tensors_;
  std::ranges::sort(sorted, {}, [](const GgufTensor& tensor) { return tensor.data.data(); });
  for (size_t i = 1; i < sorted.size(); ++i) {
    const GgufTensor& before = sorted[i - 1];
    if (sorted[i].data.data() < before.data.data() + before.data.size()) {
      reader.set_section("tensor", sorted[i].name);
      reader.fail("its data overlap the data of tensor ", quoted(before.name));
    }
  }
}

uint64_t GgufFile::alignment() const {
  constexpr std::string_view kKey = "general.alignment";
  if (!find(kKey)) return kDefaultAlignment;
  const auto alignment = load_unaligned<uint32_t>(get(*this, kKey, "u32", is_u32).bytes.data());
  if (alignment < kMinAlignment || !std::has_single_bit(alignment)) {
    fail(path(), "key '", kKey, "': ", alignment, ", expected a power of two >= ", kMinAlignment);
  }
  return alignment;
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto found = metadata_index_.find(key);
  return found == metadata_index_.end() ? nullptr : &metadata_[found->second].second;
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

int64_t GgufFile::integer(std::string_view key) const {
  return integer_at(*this, key, get(*this, key, "an integer", is_integer), 0);
}

double GgufFile::number(std::string_view key) const {
  const GgufValue& value = get(*this, key, "a number", is_number);
  return info(value.type).load_number(value.bytes.data(), 0);
}

bool GgufFile::boolean(std::string_view key) const {
  return get(*this, key, "a bool", is_bool).bytes.front() != std::byte{0};
}

std::string_view GgufFile::string(std::string_view key) const {
  return load_string(get(*this, key, "a string", is_string).bytes.data());
}

std::vector<int64_t> GgufFile::integers(std::string_view key) const {
  const GgufValue& value = get(*this, key, "an array of integers", is_integers);
  std::vector<int64_t> out(value.count);
  for (size_t i = 0; i < out.size(); ++i) out[i] = integer_at(*this, key, value, i);
  return out;
}

std::vector<double> GgufFile::numbers(std::string_view key) const {
  const GgufValue& value = get(*this, key, "an array of numbers", is_numbers);
  std::vector<double> out(value.count);
  const auto load_number = info(value.element_type).load_number;
  for (size_t i = 0; i < out.size(); ++i) out[i] = load_number(value.bytes.data(), i);
  return out;
}

std::vector<bool> GgufFile::booleans(std::string_view key) const {
  const GgufValue& value = get(*this, key, "an array of bools", is_booleans);
  std::vector<bool> out(value.count);
  for (size_t i = 0; i < out.size(); ++i) out[i] = value.bytes[i] != std::byte{0};
  return out;
}

std::vector<std::string_view> GgufFile::strings(std::string_view key) const {
  const GgufValue& value = get(*this, key, "an array of strings", is_strings);
  std::vector<std::string_view> out(value.count);
  const std::byte* from = value.bytes.data();
  for (std::string_view& element : out) {
    element = load_string(from);
    from += sizeof(uint64_t) + element.size();
  }
  return out;
}

Tensor GgufFile::view(const GgufTensor& tensor, int64_t n_matrices) const {
  const std::string label = concat("tensor ", quoted(tensor.name), ": ");
  if (!is_computable(tensor.type)) {
    fail(path(), label, "type ", find_dtype(tensor.type)->name,
         " is not supported; supported: ", dtype_names(computable_dtypes()));
  }
  if (tensor.n_dims > 3) fail(path(), label, tensor.n_dims, " dimensions, expected 1 to 3");
  if (tensor.dims[2] != n_matrices) {
    fail(path(), label, tensor.dims[2], " matrices, expected ", n_matrices);
  }
  std::byte* data = const_cast<std::byte*>(tensor.data.data());
  const int64_t rows = tensor.dims[1] * tensor.dims[2];
  return {data, static_cast<DType>(tensor.type), rows, tensor.dims[0]};
}

}  // namespace h2o
