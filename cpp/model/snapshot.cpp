#include "model/snapshot.h"

#include <algorithm>
#include <string_view>

namespace h2o {
namespace {

constexpr std::string_view kMagic = "h2o snap";
constexpr size_t kHeader = kMagic.size() + sizeof(uint32_t) + 2 * sizeof(uint64_t);
constexpr size_t kSample = 4096;  // bytes at each end of a tensor

}  // namespace

uint64_t fingerprint(const GgufShards& model) {
  uint64_t sum = 0;
  for (const GgufFile& file : model.files()) {
    for (const auto& [key, value] : file.metadata()) {
      if (key.starts_with("general.")) continue;
      sum = checksum(std::as_bytes(std::span(key)), sum);
      sum = checksum(value.bytes, sum);
    }
    for (const GgufTensor& tensor : file.tensors()) {
      sum = checksum(std::as_bytes(std::span(tensor.name)), sum);
      sum = checksum(std::as_bytes(std::span(tensor.dims)), sum + tensor.type);
      const size_t n = std::min(kSample, tensor.data.size());
      sum = checksum(tensor.data.first(n), sum);
      sum = checksum(tensor.data.last(n), sum);
    }
  }
  return sum;
}

ByteWriter begin_snapshot(uint64_t model, const SnapshotText& text, uint8_t positions) {
  ByteWriter writer;
  writer.extend(kHeader);
  writer.put(model);
  writer.put(uint64_t{text.tokens.size()});
  writer.put(std::span<const int32_t>(text.tokens));
  writer.put_text(text.note);
  writer.put(text.n_read);
  writer.put(uint64_t{text.logits.size()});
  writer.put(std::span<const float>(text.logits));
  writer.put(positions);
  return writer;
}

std::vector<std::byte> end_snapshot(ByteWriter writer) {
  std::vector<std::byte> bytes = std::move(writer.bytes());
  const std::span<const std::byte> rest = std::span(bytes).subspan(kHeader);
  ByteWriter header;
  header.put(std::span(kMagic));
  header.put(kSnapshotVersion);
  header.put(uint64_t{rest.size()});
  header.put(checksum(rest));
  std::copy(header.bytes().begin(), header.bytes().end(), bytes.begin());
  return bytes;
}

OpenSnapshot open_snapshot(std::span<const std::byte> bytes) {
  ByteReader reader("[snapshot] it", bytes);
  const std::span<const std::byte> magic = reader.take(std::min(kMagic.size(), bytes.size()));
  if (!std::ranges::equal(magic, std::as_bytes(std::span(kMagic)))) {
    throw FormatError("[snapshot] it is no snapshot");
  }
  const auto version = reader.get<uint32_t>();
  if (version != kSnapshotVersion) {
    throw FormatError(
        h2o::text("[snapshot] it has version ", version, ", expected ", kSnapshotVersion));
  }
  const auto size = reader.get<uint64_t>();
  const auto sum = reader.get<uint64_t>();
  if (size != reader.left() || sum != checksum(bytes.last(reader.left()))) {
    throw FormatError("[snapshot] it is damaged: size or checksum is wrong");
  }
  const auto model = reader.get<uint64_t>();
  std::vector<int32_t> tokens = reader.get<int32_t>(reader.get<uint64_t>());
  std::string note(reader.get_text());
  const auto n_read = reader.get<int32_t>();
  std::vector<float> logits = reader.get<float>(reader.get<uint64_t>());
  const auto positions = reader.get<uint8_t>();
  if (n_read < 0 || n_read > std::ssize(tokens)) {
    throw FormatError(
        h2o::text("[snapshot] it has read ", n_read, " of ", tokens.size(), " tokens"));
  }
  SnapshotText text = {std::move(tokens), std::move(note), n_read, std::move(logits)};
  return {model, std::move(text), positions, reader};
}

}  // namespace h2o
