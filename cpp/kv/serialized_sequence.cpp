#include "kv/serialized_sequence.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "kv/serialized_archive.h"

namespace h2o {
namespace {

// The byte that follows the policies.
enum class Kind : uint8_t { original, rolling, archived, archived_heads };

Kind kind_of(const KvCache& cache, int32_t sequence) {
  if (cache.archive() != nullptr) {
    return cache.archive()->archives_all() ? Kind::archived : Kind::archived_heads;
  }
  return cache.rolling(sequence) ? Kind::rolling : Kind::original;
}

// The slots of one kv_head. Arrays that the policy does not use are empty.
struct HeadImage {
  int32_t next_slot = 0;
  std::vector<int32_t> positions;  // [written]
  std::vector<float> scores;
  std::vector<float> value_norms;
  std::vector<int32_t> ranks;
  std::span<const std::byte> k, v;  // [written] rows; v is empty if the values are the keys
};

// Bytes of a value besides its key.
int64_t own_v_bytes(const KvView& view) { return view.v == view.k ? 0 : view.v_row_bytes; }

// The dimensions that two caches must share, with their names.
std::array<std::pair<const char*, int32_t>, 4> sizes(const KvCache& cache) {
  const KvShape& shape = cache.shape();
  return {{{"layers", shape.n_layers},
           {"heads", shape.n_heads},
           {"kv_heads", shape.n_kv_heads},
           {"head_dim", shape.head_dim}}};
}

// The free slot of a full pool, where the next token goes; -1 if none of the n written slots is
// free.
int32_t vacant_slot(const KvHead& head, int32_t n, int32_t next_slot) {
  return head.evicts() && n == head.slots ? next_slot : -1;
}

void check_dtype(const char* what, DType expected, ByteReader& reader) {
  const auto got = reader.get<DType>();
  if (got == expected) return;
  const std::span<const DType> known = kv_dtypes();
  const bool is_known = std::find(known.begin(), known.end(), got) != known.end();
  throw FormatError(concat(reader.what(), " has ", what, " in ", is_known ? info(got).name : "?",
                           ", this cache in ", info(expected).name));
}

constexpr uint8_t kTail = 0x80;  // in the last byte of a policy: its tail follows

std::string describe(const KvPolicy& policy) {
  if (policy.recent == KvPolicy().recent) return "everything";
  const int64_t tail = int64_t{policy.tail_end} - policy.tail_begin;  // the file may have any
  return concat(policy.sinks, " sinks, ", policy.heavy, " heavy hitters and ", policy.recent - tail,
                " recent tokens", tail > 0 ? concat(" and ", tail, " of a prompt's end") : "");
}

void check_policy(const KvPolicy& policy, int32_t layer, ByteReader& reader) {
  const KvPolicy got = read_policy(reader);
  if (got == policy) return;
  const bool same_numbers = got.sinks == policy.sinks && got.heavy == policy.heavy &&
                            got.recent == policy.recent && got.tail_begin == policy.tail_begin &&
                            got.tail_end == policy.tail_end;
  throw FormatError(concat(reader.what(), " has another policy: in layer ", layer, " it keeps ",
                           describe(got), ", this cache ", describe(policy),
                           same_numbers ? ", scored in another way" : "",
                           "; open it with the hh, policy and n_ctx that it was saved with"));
}

// Writes n rows of an array, if it exists; zeros for the free one, which may hold another
// sequence's data.
template <class T>
void write_rows(Backend& backend, const T* array, int64_t n, int64_t row_length, int32_t vacant,
                ByteWriter& writer) {
  if (array == nullptr) return;
  const int64_t row_bytes = row_length * sizeof(T);
  std::byte* const rows = writer.extend(n * row_bytes);
  backend.read(rows, array, n * row_bytes);
  if (vacant >= 0) std::fill_n(rows + vacant * row_bytes, row_bytes, std::byte{0});
}

void write_head(const KvCache& cache, const KvView& view, const KvHead& head, int32_t n,
                bool rolling, ByteWriter& writer) {
  Backend& backend = cache.backend();
  int32_t next_slot = 0;
  backend.read(&next_slot, head.next_slot, sizeof(next_slot));
  writer.put(next_slot);
  const int32_t vacant = vacant_slot(head, n, next_slot);
  write_rows(backend, head.positions, n, 1, vacant, writer);
  write_rows(backend, head.scores, n, 1, vacant, writer);
  write_rows(backend, head.value_norms, n, 1, vacant, writer);
  write_rows(backend, rolling ? head.ranks : nullptr, n, 1, vacant, writer);
  write_rows(backend, head.k, n, view.k_row_bytes, vacant, writer);
  write_rows(backend, head.v, n, own_v_bytes(view), vacant, writer);
}

// Are these the numbers 0 to n - 1, in any order?
bool is_permutation_of_first(std::vector<int32_t> numbers) {
  std::sort(numbers.begin(), numbers.end());
  for (int32_t i = 0; i < std::ssize(numbers); ++i) {
    if (numbers[i] != i) return false;
  }
  return true;
}

template <class T>
std::vector<T> without(std::vector<T> values, int32_t index) {
  if (index >= 0) values.erase(values.begin() + index);
  return values;
}

bool is_valid(const HeadImage& image, const KvHead& head, int32_t n, int32_t length) {
  const bool full = head.evicts() && n == head.slots;
  // The next token goes to the first unused slot, or to the free slot of a full pool.
  if (full ? image.next_slot < 0 || image.next_slot >= n : image.next_slot != n) return false;
  const int32_t vacant = full ? image.next_slot : -1;
  const auto in_text = [&](int32_t position) { return position >= 0 && position < length; };
  std::vector<int32_t> positions = without(image.positions, vacant);
  if (!std::all_of(positions.begin(), positions.end(), in_text)) return false;
  std::sort(positions.begin(), positions.end());
  if (std::adjacent_find(positions.begin(), positions.end()) != positions.end()) return false;
  const auto finite = [](float x) { return std::isfinite(x) && x >= 0; };
  return std::all_of(image.scores.begin(), image.scores.end(), finite) &&
         std::all_of(image.value_norms.begin(), image.value_norms.end(), finite) &&
         is_permutation_of_first(without(image.ranks, image.ranks.empty() ? -1 : vacant));
}

HeadImage read_head(const KvView& view, const KvHead& head, int32_t n, bool rolling,
                    ByteReader& reader) {
  HeadImage image;
  image.next_slot = reader.get<int32_t>();
  image.positions = reader.get<int32_t>(n);
  if (head.scores != nullptr) image.scores = reader.get<float>(n);
  if (head.value_norms != nullptr) image.value_norms = reader.get<float>(n);
  if (rolling) image.ranks = reader.get<int32_t>(n);
  image.k = reader.take(n * view.k_row_bytes);
  image.v = reader.take(n * own_v_bytes(view));
  return image;
}

// Truncates a head whose slots were filled in order to the first n.
bool cut(HeadImage& image, const KvView& view, int32_t n) {
  for (int32_t i = 0; i < std::ssize(image.positions); ++i) {
    if (image.positions[i] != i) return false;
  }
  if (n < 0 || n > image.next_slot || !image.scores.empty() || !image.ranks.empty()) return false;
  image.next_slot = n;
  image.positions.resize(n);
  image.k = image.k.first(n * view.k_row_bytes);
  image.v = image.v.first(n * own_v_bytes(view));
  return true;
}

template <class T>
void restore_array(Backend& backend, T* array, std::span<const T> values) {
  if (!values.empty()) backend.write(array, values.data(), values.size_bytes());
}

void restore_head(Backend& backend, const KvHead& head, const HeadImage& image) {
  restore_array(backend, head.next_slot, std::span(&image.next_slot, 1));
  restore_array<int32_t>(backend, head.positions, image.positions);
  restore_array<float>(backend, head.scores, image.scores);
  restore_array<float>(backend, head.value_norms, image.value_norms);
  restore_array<int32_t>(backend, head.ranks, image.ranks);
  restore_array<std::byte>(backend, head.k, image.k);
  restore_array<std::byte>(backend, head.v, image.v);
}

}  // namespace

void write_policy(const KvPolicy& policy, ByteWriter& writer) {
  static_assert(sizeof(KvPolicy) == 8 * sizeof(int32_t));  // all of its members are written
  const bool has_tail = policy.tail_end > policy.tail_begin;
  writer.put(policy.sinks);
  writer.put(policy.heavy);
  writer.put(policy.recent);
  writer.put(policy.scoring);
  writer.put(policy.decay);
  writer.put(
      static_cast<uint8_t>(static_cast<uint8_t>(policy.value_norm) | (has_tail ? kTail : 0)));
  if (!has_tail) return;
  writer.put(policy.tail_begin);
  writer.put(policy.tail_end);
}

KvPolicy read_policy(ByteReader& reader) {
  KvPolicy policy;
  policy.sinks = reader.get<int32_t>();
  policy.heavy = reader.get<int32_t>();
  policy.recent = reader.get<int32_t>();
  policy.scoring = reader.get<Scoring>();
  policy.decay = reader.get<float>();
  const auto last = reader.get<uint8_t>();
  policy.value_norm = static_cast<ValueNorm>(last & ~kTail);
  if ((last & kTail) == 0) return policy;
  policy.tail_begin = reader.get<int32_t>();
  policy.tail_end = reader.get<int32_t>();
  return policy;
}

size_t sequence_bytes(const KvCache& cache, int32_t sequence) {
  size_t bytes = 1024;
  for (int32_t l = 0; l < cache.shape().n_layers; ++l) {
    const KvView& view = cache.layer(l);
    if (cache.shape().source(l) != l) continue;
    bytes += view.state_floats * sizeof(float);
    const size_t slot = view.k_row_bytes + view.v_row_bytes + 4 * sizeof(int32_t);
    bytes += 64 + view.n_kv_heads * (cache.kept(l, sequence) + 1) * slot;
  }
  return bytes;
}

void write_sequence(const KvCache& cache, int32_t sequence, ByteWriter& writer) {
  const int32_t length = cache.length(sequence);
  const Kind kind = kind_of(cache, sequence);
  for (const auto& [name, value] : sizes(cache)) writer.put(value);
  writer.put(cache.shape().k_dtype);
  writer.put(cache.shape().v_dtype);
  for (int32_t l = 0; l < cache.shape().n_layers; ++l) {
    write_policy(cache.policy(l, sequence), writer);
  }
  writer.put(kind);
  const bool archived = cache.archive() != nullptr;
  if (archived) {
    write_archive_options(*cache.archive(), writer);
    cache.backend().finish();
  }
  for (int32_t l = 0; l < cache.shape().n_layers; ++l) {
    if (cache.shape().source(l) != l) continue;
    const KvView& view = cache.layer(l);
    if (view.states != nullptr) {
      write_rows(cache.backend(), view.state(sequence), 1, view.state_floats, -1, writer);
    }
    if (!cache.shape().attends(l)) continue;
    for (int32_t h = 0; h < view.n_kv_heads; ++h) {
      const KvHead head = view.head(cache.policy(l, sequence), sequence, h);
      write_head(cache, view, head, head.written(length), kind == Kind::rolling, writer);
      if (archived && cache.archive()->archives(l, h)) {
        write_archive(*cache.archive(), cache.archive()->head(l, sequence, h), length, writer);
      }
    }
  }
}

namespace {

void check_sizes(const KvCache& cache, ByteReader& reader) {
  for (const auto& [name, expected] : sizes(cache)) {
    const auto got = reader.get<int32_t>();
    if (got != expected) {
      throw FormatError(
          concat(reader.what(), " has ", name, " ", got, ", this cache has ", expected));
    }
  }
  const KvShape& shape = cache.shape();
  check_dtype("keys", shape.k_dtype, reader);
  check_dtype("values", shape.v_dtype, reader);
}

}  // namespace

std::vector<KvPolicy> read_policies(const KvCache& cache, ByteReader reader) {
  check_sizes(cache, reader);
  std::vector<KvPolicy> policies;
  for (int32_t l = 0; l < cache.shape().n_layers; ++l) policies.push_back(read_policy(reader));
  return policies;
}

void check_shape(const KvCache& cache, int32_t sequence, ByteReader& reader) {
  check_sizes(cache, reader);
  const KvShape& shape = cache.shape();
  for (int32_t l = 0; l < shape.n_layers; ++l) check_policy(cache.policy(l, sequence), l, reader);
}

void read_sequence(KvCache& cache, int32_t sequence, int32_t length, ByteReader& reader,
                   std::optional<int32_t> n_tokens) {
  check_shape(cache, sequence, reader);
  const KvShape& shape = cache.shape();
  const auto kind = reader.get<Kind>();
  if (kind > Kind::archived_heads) throw FormatError(concat(reader.what(), " is invalid"));
  const bool rolling = kind == Kind::rolling;
  const bool archived = kind >= Kind::archived;
  if (archived != (cache.archive() != nullptr)) {
    throw FormatError(concat(reader.what(), archived ? " has an archive, this cache has none"
                                                     : " has no archive, this cache has one"));
  }
  if (archived && kind != kind_of(cache, sequence)) {
    throw FormatError(concat(reader.what(),
                             " has an archive of other heads; use the archive options that it was "
                             "saved with"));
  }
  if (archived) check_archive_options(*cache.archive(), reader);
  if (rolling && !cache.can_roll(sequence)) {
    throw FormatError(
        concat(reader.what(), " has rolling positions, which this cache does not support"));
  }
  // An empty sequence can use the whole capacity.
  const int64_t capacity = int64_t{cache.room(sequence)} + cache.length(sequence);
  if (length < 0 || length > capacity) {
    throw FormatError(
        concat(reader.what(), " has ", length, " tokens, this cache has room for ", capacity));
  }

  if (n_tokens && *n_tokens != length && !shape.state_floats.empty()) {
    throw FormatError(
        concat(reader.what(), " has states of ", length, " tokens, not of the first ", *n_tokens));
  }

  std::vector<HeadImage> images;
  std::vector<ArchiveImage> archives;
  std::vector<std::span<const std::byte>> states;
  for (int32_t l = 0; l < shape.n_layers; ++l) {
    if (shape.source(l) != l) continue;
    const int64_t state_floats = cache.layer(l).state_floats;
    if (state_floats > 0) states.push_back(reader.take(state_floats * sizeof(float)));
    if (!shape.attends(l)) continue;
    for (int32_t h = 0; h < cache.layer(l).n_kv_heads; ++h) {
      const KvHead head = cache.layer(l).head(cache.policy(l, sequence), sequence, h);
      const int32_t n = head.written(length);
      images.push_back(read_head(cache.layer(l), head, n, rolling, reader));
      if (!is_valid(images.back(), head, n, length)) {
        throw FormatError(concat(reader.what(), " is invalid in layer ", l, ", kv_head ", h));
      }
      const int32_t vacant = vacant_slot(head, n, images.back().next_slot);
      if (archived && cache.archive()->archives(l, h)) {
        archives.push_back(read_archive(*cache.archive(), length,
                                        without(images.back().positions, vacant), reader));
      }
      // may have been a position of a longer sequence
      if (vacant >= 0) images.back().positions[vacant] = 0;
      if (n_tokens && !cut(images.back(), cache.layer(l), *n_tokens)) {
        throw FormatError(concat(reader.what(), " has evicted tokens, or too few tokens"));
      }
    }
  }

  if (reader.left() > 0) throw FormatError(concat(reader.what(), " has trailing bytes"));

  cache.reset(sequence);
  if (rolling) cache.roll(sequence);
  cache.set_length(sequence, n_tokens.value_or(length));
  const HeadImage* image = images.data();
  const ArchiveImage* archive_image = archives.data();
  const std::span<const std::byte>* state = states.data();
  for (int32_t l = 0; l < shape.n_layers; ++l) {
    if (shape.source(l) != l) continue;
    const KvView& view = cache.layer(l);
    if (view.states != nullptr) {
      cache.backend().write(view.state(sequence), state->data(), state->size());
      ++state;
    }
    if (!shape.attends(l)) continue;
    for (int32_t h = 0; h < cache.layer(l).n_kv_heads; ++h) {
      const KvHead head = cache.layer(l).head(cache.policy(l, sequence), sequence, h);
      if (archived && cache.archive()->archives(l, h)) {
        restore_archive(*cache.archive(), cache.archive()->head(l, sequence, h), *archive_image++);
      }
      restore_head(cache.backend(), head, *image++);
    }
  }
  if (archived) cache.archive()->update_summaries(sequence);
}

}  // namespace h2o
