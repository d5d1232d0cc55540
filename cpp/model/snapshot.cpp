#include "model/snapshot.h"

#include <algorithm>
#include <string_view>

namespace h2o {
namespace {

constexpr std::string_view kMagic = "h2o snap";
constexpr size_t kHeader = kMagic.size() + sizeof(uint32_t) + 2 * sizeof(uint64_t);
constexpr size_t kSample = 4096;  // at each end of a tensor

// Splits {"random_state": "...", "note": ...} of version 2; the state may be null.
void split_note(SnapshotText& text) {
  constexpr std::string_view kState = "{\"random_state\": ", kNote = ", \"note\": ";
  const std::string_view note = text.note;
  const size_t end = note.find(kNote);
  if (!note.starts_with(kState) || end == note.npos || !note.ends_with('}')) {
    throw FormatError("the snapshot was not saved by h2o");
  }
  std::string_view state = note.substr(kState.size(), end - kState.size());
  if (state == "null") state = {};
  if (state.size() >= 2 && state.front() == '"') state = state.substr(1, state.size() - 2);
  text.random_state = state;
  text.note = note.substr(end + kNote.size(), note.size() - 1 - end - kNote.size());
}

}  // namespace

uint64_t fingerprint(const GgufShards& model) {
  uint64_t sum = 0;
  for (const GgufFile& file : model.files()) {
    for (const auto& [key, value] : file.metadata()) {
      if (key.starts_with("general.") || key == "h2o.retrieval_heads") continue;
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
  writer.put_text(text.random_state);
  writer.put_text(text.held_text);
  writer.put_text(text.held_bytes);
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

OpenSnapshot open_snapshot(std::span<const std::byte> bytes, Damage damage) {
  ByteReader reader("the snapshot", bytes);
  const std::span<const std::byte> magic = reader.take(std::min(kMagic.size(), bytes.size()));
  if (!std::ranges::equal(magic, std::as_bytes(std::span(kMagic)))) {
    throw FormatError("this is no snapshot");
  }
  const auto version = reader.get<uint32_t>();
  if (version != 2 && version != kSnapshotVersion) {
    throw FormatError(
        concat("the snapshot has version ", version, ", expected 2 or ", kSnapshotVersion));
  }
  const auto size = reader.get<uint64_t>();
  const auto sum = reader.get<uint64_t>();
  if (size != reader.left() ||
      (damage == Damage::possible && sum != checksum(bytes.last(reader.left())))) {
    throw FormatError("the snapshot is damaged: size or checksum is wrong");
  }
  const auto model = reader.get<uint64_t>();
  SnapshotText text;
  text.tokens = reader.get<int32_t>(reader.get<uint64_t>());
  text.note = reader.get_text();
  text.n_read = reader.get<int32_t>();
  text.logits = reader.get<float>(reader.get<uint64_t>());
  if (version == 2) {
    split_note(text);
  } else {
    text.random_state = reader.get_text();
    text.held_text = reader.get_text();
    text.held_bytes = reader.get_text();
  }
  const auto positions = reader.get<uint8_t>();
  if (text.n_read < 0 || text.n_read > std::ssize(text.tokens)) {
    throw FormatError(
        concat("the snapshot has read ", text.n_read, " of ", text.tokens.size(), " tokens"));
  }
  return {model, std::move(text), positions, reader};
}

void check_model(const OpenSnapshot& snapshot, uint64_t fingerprint, int32_t n_vocab) {
  if (snapshot.model != fingerprint) throw FormatError("the snapshot belongs to another model");
  for (const int32_t token : snapshot.text.tokens) {
    if (token < 0 || token >= n_vocab) {
      throw FormatError(concat("the snapshot has token ", token, ", the vocabulary has ", n_vocab));
    }
  }
  const size_t n_logits = snapshot.text.logits.size();
  if (n_logits != 0 && n_logits != static_cast<size_t>(n_vocab)) {
    throw FormatError(
        concat("the snapshot has ", n_logits, " logits, the vocabulary has ", n_vocab));
  }
}

}  // namespace h2o
