#include "kv/cache.h"

#include <algorithm>
#include <limits>

#include "core/error.h"
#include "core/layout.h"

namespace h2o {
namespace {

const KvPolicy& of_layer(std::span<const KvPolicy> policies, int32_t layer) {
  return policies.size() == 1 ? policies[0] : policies[layer];
}

// Calls visit(member of KvView, bytes per sequence) for each array that a layer needs.
template <class Visit>
void visit_arrays(const KvView& view, const KvPolicy& policy, const KvShape& shape,
                  const Visit& visit) {
  const int64_t heads = view.n_kv_heads;
  const int64_t slots = heads * view.slots;
  if (!shape.borrows) {
    visit(&KvView::k, slots * view.k_row_bytes);
    if (!shape.shared_values) visit(&KvView::v, slots * view.v_row_bytes);
    visit(&KvView::positions, slots * int64_t{sizeof(int32_t)});
  }
  if (policy.keeps_scores()) visit(&KvView::scores, slots * int64_t{sizeof(float)});
  if (policy.weighs_values()) visit(&KvView::value_norms, slots * int64_t{sizeof(float)});
  if (shape.may_roll()) visit(&KvView::ranks, slots * int64_t{sizeof(int32_t)});
  visit(&KvView::next_slot, heads * int64_t{sizeof(int32_t)});
  visit(&KvView::policies, int64_t{sizeof(KvPolicy)});
  if (view.state_floats > 0) {
    visit(&KvView::states, view.state_floats * int64_t{sizeof(float)});
  }
}

// Throws unless the cache supports the policy's scoring.
void check_scoring(const KvPolicy& policy, const KvShape& shape) {
  require(!shape.shared_values || !policy.weighs_values() || policy.weighs_outputs(),
          "the policy weighs values by their own norm (l1), but the cache holds latent vectors "
          "instead of values: weigh them by outputs");
  require(
      !policy.weighs_outputs() || shape.output_gram != nullptr,
      "the policy weighs values by outputs, but this cache was created without the output weights "
      "W_O: create it with such a policy, or with them");
}

// Assigns a layer's arrays to offsets in `layout`; with storage == nullptr only measures them.
KvView place_layer(Layout& layout, std::byte* storage, int32_t layer, const KvPolicy& policy,
                   const KvShape& shape) {
  KvView view{};
  view.k_dtype = shape.k_dtype;
  view.v_dtype = shape.v_dtype;
  view.n_heads = shape.n_heads;
  view.n_kv_heads = shape.heads(layer).n;
  view.head_dim = shape.heads(layer).dim;
  view.largest_head_dim = shape.head_dim;
  view.n_sequences = shape.n_sequences;
  view.k_row_bytes = byte_size(shape.k_dtype, view.head_dim);
  view.v_row_bytes = byte_size(shape.v_dtype, view.head_dim);
  view.state_floats = shape.state_floats.empty() ? 0 : shape.state_floats[layer];
  view.slots = shape.attends(layer) ? policy.slots(shape.max_tokens) : 0;
  view.max_rows = shape.max_rows;
  view.first_head = layer * shape.n_kv_heads;
  if (shape.output_gram != nullptr) {
    view.output_gram =
        shape.output_gram + int64_t{layer} * shape.n_kv_heads * shape.head_dim * shape.head_dim;
  }

  visit_arrays(view, policy, shape, [&](auto array, int64_t bytes_each) {
    const int64_t offset = layout.place(shape.n_sequences * bytes_each);
    if (storage == nullptr) return;
    view.*array =
        reinterpret_cast<std::remove_reference_t<decltype(view.*array)>>(storage + offset);
  });
  if (shape.shared_values) view.v = view.k;
  return view;
}

// Those that read another's slots have its view.
std::vector<KvView> place_layers(std::byte* storage, std::span<const KvPolicy> policies,
                                 const KvShape& shape, int64_t* n_bytes = nullptr) {
  Layout layout;
  std::vector<KvView> layers;
  for (int32_t l = 0; l < shape.n_layers; ++l) {
    const int32_t source = shape.source(l);
    layers.push_back(source < l ? layers[source]
                                : place_layer(layout, storage, l, of_layer(policies, l), shape));
  }
  if (n_bytes != nullptr) *n_bytes = layout.size();
  return layers;
}

void validate(std::span<const KvPolicy> policies, int32_t n_layers) {
  require(policies.size() == 1 || std::ssize(policies) == n_layers, policies.size(),
          " policies for ", n_layers, " layers, expected one, or one for each");
  for (const KvPolicy& policy : policies) validate(policy);
}

}  // namespace

KvCache::KvCache(Backend& backend, std::span<const KvPolicy> policies, const KvShape& shape)
    : backend_(backend), shape_(shape), sizing_(policies.begin(), policies.end()) {
  const size_t n_bytes = bytes(policies, shape);
  for (const KvPolicy& policy : policies) check_scoring(policy, shape);
  const Capabilities& capabilities = backend.capabilities();
  for (const DType dtype : {shape.k_dtype, shape.v_dtype}) {
    require(capabilities.caches(dtype), backend.name(), " does not cache K and V in ",
            info(dtype).name, "; use device=cpu");
  }
  require(shape.head_dim <= capabilities.max_head_dim, "head_dim is ", shape.head_dim,
          ", expected at most ", capabilities.max_head_dim, " on ", backend.name());
  require(!shape.shared_values || capabilities.shared_values, backend.name(),
          " does not support latent vectors instead of keys and values; use device=cpu");
  if (shape.archive.n_recalled > 0) {
    require(capabilities.archives, backend.name(),
            " does not archive evicted tokens: leave out the archive, or use device=cpu");
    for (const DType dtype : {shape.archive.k_dtype, shape.archive.v_dtype}) {
      require(capabilities.caches(dtype), backend.name(), " does not archive K and V in ",
              info(dtype).name, "; use device=cpu");
    }
    require(shape.archive.directory.empty() || capabilities.archive_files, backend.name(),
            " keeps an archive in memory only: leave out archive_dir, or use device=cpu");
    archive_ = std::make_unique<KvArchive>(backend, shape.archive, shape.n_layers, shape.n_kv_heads,
                                           shape.head_dim, shape.max_tokens);
    archive_->reserve_sequences(shape.n_sequences);
  }
  storage_ = backend.allocate(n_bytes);
  lengths_.assign(shape.n_sequences, 0);
  rolling_.assign(shape.n_sequences, false);
  policies_.resize(size_t{1} * shape.n_layers * shape.n_sequences);
  layers_ = place_layers(storage_.data(), policies, shape);
  for (int32_t l = 0; l < shape.n_layers; ++l) {
    const KvPolicy& policy = of_layer(policies, shape.source(l));
    const auto first = policies_.begin() + int64_t{l} * shape.n_sequences;
    std::fill_n(first, shape.n_sequences, policy);
    backend.write(layers_[l].policies, &*first, sizeof(KvPolicy) * shape.n_sequences);
    note_questions(l);
  }
  reserve_rows(shape.max_rows);
  if (shape.max_drafts == 0) return;
  require(capabilities.draft_rows > 0, backend.name(), " does not verify drafts; use device=cpu");
  journal_.emplace(backend, layers_, shape.max_drafts);
  retracted_.reserve(shape.max_drafts);
}

size_t KvCache::bytes(std::span<const KvPolicy> policies, const KvShape& shape) {
  validate(shape);
  validate(policies, shape.n_layers);
  int64_t n_bytes = 0;
  place_layers(nullptr, policies, shape, &n_bytes);
  return n_bytes;
}

void KvCache::reserve_sequences(int32_t n_sequences) {
  const int32_t n_before = shape_.n_sequences;
  if (n_sequences <= n_before) return;
  try {
    if (archive_ != nullptr) archive_->reserve_sequences(n_sequences);
    grow(n_sequences);
  } catch (...) {
    if (archive_ != nullptr) archive_->release_sequences(n_before);
    throw;
  }
}

void KvCache::grow(int32_t n_sequences) {
  const int32_t n_before = shape_.n_sequences;
  KvShape shape = shape_;
  shape.n_sequences = n_sequences;
  Buffer storage = backend_.allocate(bytes(sizing_, shape));
  std::vector<KvView> layers = place_layers(storage.data(), sizing_, shape);
  std::vector<KvPolicy> policies(size_t{1} * shape.n_layers * n_sequences);
  for (int32_t l = 0; l < shape.n_layers; ++l) {
    const KvPolicy& sizing = of_layer(sizing_, shape.source(l));
    const KvView& view = layers[l];
    // The sequence is the first dimension of each array.
    visit_arrays(view, sizing, shape, [&](auto array, int64_t bytes_each) {
      if (shape.source(l) == l) copy(view.*array, layers_[l].*array, n_before * bytes_each);
    });
    for (int32_t s = 0; s < n_sequences; ++s) {
      policies[l * n_sequences + s] = s < n_before ? policy(l, s) : sizing;
      backend_.write(view.policies + s, &policies[l * n_sequences + s], sizeof(KvPolicy));
    }
  }
  lengths_.resize(n_sequences, 0);
  rolling_.resize(n_sequences, false);
  const auto exchange = [&] {
    std::swap(shape_, shape);
    std::swap(storage_, storage);
    std::swap(layers_, layers);
    std::swap(policies_, policies);
  };
  exchange();
  try {
    reserve_rows(shape_.max_rows);
  } catch (...) {
    exchange();
    lengths_.resize(n_before);
    rolling_.resize(n_before);
    throw;
  }
  for (int32_t l = 0; l < shape_.n_layers; ++l) note_questions(l);
}

// Copies within the back end's memory, through the host.
void KvCache::copy(void* to, const void* from, int64_t n_bytes) const {
  std::vector<std::byte> part(std::min(n_bytes, int64_t{1} << 20));
  for (int64_t at = 0; at < n_bytes; at += std::ssize(part)) {
    const int64_t n = std::min<int64_t>(std::ssize(part), n_bytes - at);
    backend_.read(part.data(), static_cast<const std::byte*>(from) + at, n);
    backend_.write(static_cast<std::byte*>(to) + at, part.data(), n);
  }
}

void KvCache::reserve_rows(int32_t max_rows) {
  KvShape shape = shape_;
  shape.max_rows = max_rows;
  validate(shape);
  scratch_ = KvScratch(backend_, layers_, shape, archive_.get());  // unchanged if it throws
  shape_ = shape;
}

int32_t KvCache::length(int32_t sequence) const {
  check_sequence(sequence);
  return lengths_[sequence];
}

int32_t KvCache::kept(int32_t layer, int32_t sequence) const {
  check_sequence(sequence);
  check_layer(layer);
  return shape_.attends(layer) ? policy(layer, sequence).kept(lengths_[sequence]) : 0;
}

int32_t KvCache::kept(int32_t sequence) const {
  int32_t most = 0;
  for (int32_t l = 0; l < shape_.n_layers; ++l) most = std::max(most, kept(l, sequence));
  return most;
}

bool KvCache::unlimited(int32_t layer, int32_t sequence) const {
  return !shape_.attends(layer) || policy(layer, sequence).evicts(layers_[layer].slots);
}

int32_t KvCache::room(int32_t sequence) const {
  check_sequence(sequence);
  int32_t limit = archive_ != nullptr ? shape_.max_tokens : std::numeric_limits<int32_t>::max();
  for (int32_t l = 0; l < shape_.n_layers; ++l) {
    if (!unlimited(l, sequence)) limit = std::min(limit, layers_[l].slots);
  }
  return limit - lengths_[sequence];
}

void KvCache::advance(const Batch& batch) {
  for (const Segment& segment : batch.segments) {
    lengths_[segment.sequence] = segment.position + segment.n_rows;
  }
}

void KvCache::retract(const Batch& batch, int32_t sequence, int32_t n) {
  const auto belongs = [&](const Segment& segment) { return segment.sequence == sequence; };
  retracted_.clear();
  for (int32_t turn = batch.n_turns() - 1; turn > 0 && std::ssize(retracted_) < n; --turn) {
    const std::span<const Segment> segments = batch.turn(turn);
    const auto draft = std::ranges::find_if(segments, belongs);
    if (draft != segments.end()) retracted_.push_back(draft->entry);
  }
  retract_entries(sequence);
  n -= static_cast<int32_t>(retracted_.size());
  // The others are in one segment: they filled free slots, in order.
  if (n > 0) truncate(sequence, lengths_[sequence] - n);
}

void KvCache::retract_entries(int32_t sequence, int32_t begin, int32_t end) {
  retracted_.clear();
  while (end > begin) retracted_.push_back(--end);
  retract_entries(sequence);
}

void KvCache::retract_entries(int32_t sequence) {
  if (retracted_.empty()) return;
  backend_.retract(layers_, *journal_, {sequence, lengths_[sequence], retracted_});
  lengths_[sequence] -= static_cast<int32_t>(retracted_.size());
}

void KvCache::truncate(int32_t sequence, int32_t length) {
  lengths_[sequence] = length;
  for (const KvView& view : layers_) {
    int32_t* const next_slot = view.next_slot + int64_t{sequence} * view.n_kv_heads;
    for (int32_t h = 0; h < view.n_kv_heads; ++h) {
      backend_.write(next_slot + h, &length, sizeof(length));
    }
  }
}

void KvCache::borrow(const KvCache& owner, int32_t sequence, int32_t length) {
  require(length >= 0 && length <= owner.length(sequence), "the first ", length,
          " tokens of sequence ", sequence, ", which has ", owner.length(sequence));
  for (int32_t l = 0; l < shape_.n_layers; ++l) {
    KvView& view = layers_[l];
    const KvView& from = owner.layer(l);
    require(view.slots == from.slots && view.k_dtype == from.k_dtype &&
                view.v_dtype == from.v_dtype && !owner.policy(l, sequence).evicts(from.slots),
            "layer ", l, " of sequence ", sequence, " does not have the same slots, or evicts");
    const int64_t slot = int64_t{sequence} * from.n_kv_heads * from.slots;
    view.k = from.k + slot * from.k_row_bytes;
    view.v = from.v + slot * from.v_row_bytes;
    view.positions = from.positions + slot;
    std::fill_n(view.scores, int64_t{view.n_kv_heads} * view.slots, 0.0f);
  }
  truncate(0, length);
}

template <class F>
void KvCache::for_each_rows(int32_t sequence, int32_t begin, int32_t end, const F& f) const {
  for (const KvView& view : layers_) {
    for (int32_t head = 0; head < view.n_kv_heads; ++head) {
      const int64_t slot = (int64_t{sequence} * view.n_kv_heads + head) * view.slots + begin;
      f(view.k + slot * view.k_row_bytes, (end - begin) * view.k_row_bytes);
      f(view.v + slot * view.v_row_bytes, (end - begin) * view.v_row_bytes);
    }
  }
}

std::vector<std::byte> KvCache::stored_rows(int32_t sequence, int32_t begin, int32_t end) const {
  std::vector<std::byte> rows;
  for_each_rows(sequence, begin, end, [&](const std::byte* from, int64_t n_bytes) {
    const size_t before = rows.size();
    rows.resize(before + n_bytes);
    backend_.read(rows.data() + before, from, n_bytes);
  });
  return rows;
}

void KvCache::restore_rows(int32_t sequence, int32_t begin, int32_t end,
                           std::span<const std::byte> rows) {
  for_each_rows(sequence, begin, end, [&](std::byte* to, int64_t n_bytes) {
    backend_.write(to, rows.data(), n_bytes);
    rows = rows.subspan(n_bytes);
  });
}

void KvCache::set_length(int32_t sequence, int32_t length) {
  check_sequence(sequence);
  lengths_[sequence] = length;
}

bool KvCache::can_roll(int32_t sequence) const {
  check_sequence(sequence);
  for (int32_t l = 0; l < shape_.n_layers; ++l) {
    if (!unlimited(l, sequence)) return false;
  }
  return shape_.may_roll();
}

bool KvCache::rolling(int32_t sequence) const {
  check_sequence(sequence);
  return rolling_[sequence];
}

void KvCache::roll(int32_t sequence) {
  require(can_roll(sequence), "sequence ", sequence,
          " cannot roll: that needs a cache with rolling positions and a policy that evicts");
  if (rolling_[sequence]) return;
  for (int32_t l = 0; l < shape_.n_layers; ++l) {
    if (!shape_.attends(l)) continue;
    backend_.roll(layers_[l], shape_.rope, sequence, lengths_[sequence]);
  }
  rolling_[sequence] = true;
}

void KvCache::reset(int32_t sequence, std::span<const KvPolicy> policies) {
  check_sequence(sequence);
  // allocate before changing anything
  const std::vector<int32_t> zeros(shape_.n_kv_heads, 0);
  const std::vector<float> no_state(
      shape_.state_floats.empty() ? 0 : std::ranges::max(shape_.state_floats), 0.0f);
  if (!policies.empty()) {
    check_policies(policies);
    set_policies(sequence, policies);
  }
  lengths_[sequence] = 0;
  rolling_[sequence] = false;
  if (archive_ != nullptr) archive_->clear(sequence);
  for (const KvView& view : layers_) {
    backend_.write(view.next_slot + int64_t{sequence} * view.n_kv_heads, zeros.data(),
                   view.n_kv_heads * sizeof(int32_t));
    if (view.states == nullptr) continue;
    backend_.write(view.state(sequence), no_state.data(), view.state_floats * sizeof(float));
  }
}

void KvCache::check_policies(std::span<const KvPolicy> policies) const {
  validate(policies, shape_.n_layers);
  for (int32_t l = 0; l < shape_.n_layers; ++l) {
    if (!shape_.has_slots(l)) continue;
    const KvPolicy& policy = of_layer(policies, l);
    const int32_t slots = policy.slots(shape_.max_tokens);
    require(slots <= layers_[l].slots, "the policy needs ", slots, " slots, layer ", l, " has ",
            layers_[l].slots);
    require(
        !policy.keeps_scores() || layers_[l].scores != nullptr,
        "the policy needs scores of heavy hitters, which this cache was created without: create it "
        "with a policy that keeps them");
    require(
        !policy.weighs_values() || layers_[l].value_norms != nullptr,
        "the policy needs norms of values, which this cache was created without: create it with a "
        "policy that weighs them");
    check_scoring(policy, shape_);
    // Callers may have relied on unlimited sequences (see room()).
    require(!shape_.may_roll() || policy.evicts(layers_[l].slots),
            "the policy keeps everything, but sequences of this cache may roll: give it a smaller "
            "budget");
  }
}

void KvCache::set_policies(int32_t sequence, std::span<const KvPolicy> policies) {
  for (int32_t l = 0; l < shape_.n_layers; ++l) {
    const KvPolicy& policy = of_layer(policies, shape_.source(l));
    policies_[l * shape_.n_sequences + sequence] = policy;
    backend_.write(layers_[l].policies + sequence, &policy, sizeof(KvPolicy));
    note_questions(l);
  }
}

void KvCache::note_questions(int32_t layer) {
  const KvPolicy* policies = &policies_[size_t{1} * layer * shape_.n_sequences];
  layers_[layer].scores_questions =
      std::any_of(policies, policies + shape_.n_sequences, [](const KvPolicy& policy) {
        return policy.keeps_scores() && policy.scoring == Scoring::question;
      });
}

std::vector<KvEntry> KvCache::entries(int32_t layer, int32_t sequence, int32_t kv_head) const {
  check_sequence(sequence);
  check_layer(layer);
  const KvView& view = layers_[layer];
  require(kv_head >= 0 && kv_head < shape_.n_kv_heads, "kv_head ", kv_head, ", a layer has ",
          shape_.n_kv_heads);
  if (kv_head >= view.n_kv_heads) return {};

  const KvHead head = view.head(policy(layer, sequence), sequence, kv_head);
  const int32_t written = head.written(lengths_[sequence]);
  std::vector<int32_t> positions(written);
  std::vector<float> scores(written);
  int32_t next_slot = 0;
  backend_.read(positions.data(), head.positions, written * sizeof(int32_t));
  backend_.read(&next_slot, head.next_slot, sizeof(int32_t));
  if (head.scores != nullptr) backend_.read(scores.data(), head.scores, written * sizeof(float));

  std::vector<KvEntry> entries;
  entries.reserve(written);
  for (int32_t slot = 0; slot < written; ++slot) {
    if (slot != next_slot) entries.push_back({positions[slot], scores[slot]});
  }
  std::sort(entries.begin(), entries.end(),
            [](const KvEntry& a, const KvEntry& b) { return a.position < b.position; });
  return entries;
}

void KvCache::copy_sequence(int32_t from, int32_t to) {
  check_sequence(from);
  check_sequence(to);
  require(archive_ == nullptr, "an archive of a sequence cannot be copied");
  for (int32_t l = 0; l < shape_.n_layers; ++l) {
    if (shape_.source(l) != l) continue;  // has another's arrays
    const KvView& view = layers_[l];
    // The sequence is the first dimension of each array.
    visit_arrays(view, of_layer(sizing_, l), shape_, [&](auto array, int64_t bytes_each) {
      auto* const bytes = reinterpret_cast<std::byte*>(view.*array);
      copy(bytes + to * bytes_each, bytes + from * bytes_each, bytes_each);
    });
    policies_[l * shape_.n_sequences + to] = policy(l, from);
    note_questions(l);
  }
  lengths_[to] = lengths_[from];
  rolling_[to] = rolling_[from];
}

std::vector<char> KvCache::kept_anywhere(int32_t sequence) const {
  check_sequence(sequence);
  std::vector<char> found(lengths_[sequence]);
  std::vector<int32_t> positions, next_slots(shape_.n_kv_heads);
  for (int32_t layer = 0; layer < shape_.n_layers; ++layer) {
    const KvView& view = layers_[layer];
    if (!shape_.attends(layer)) continue;
    positions.resize(static_cast<size_t>(view.n_kv_heads) * view.slots);
    const KvHead first = view.head(policy(layer, sequence), sequence, 0);
    backend_.read(positions.data(), first.positions, positions.size() * sizeof(int32_t));
    backend_.read(next_slots.data(), first.next_slot, view.n_kv_heads * sizeof(int32_t));
    const int32_t written = first.written(lengths_[sequence]);
    for (int32_t head = 0; head < view.n_kv_heads; ++head) {
      for (int32_t slot = 0; slot < written; ++slot) {
        if (slot != next_slots[head]) found[positions[head * view.slots + slot]] = 1;
      }
    }
  }
  return found;
}

void KvCache::check_sequence(int32_t sequence) const {
  require(sequence >= 0 && sequence < shape_.n_sequences, "sequence ", sequence, ", the cache has ",
          shape_.n_sequences);
}

void KvCache::check_layer(int32_t layer) const {
  require(layer >= 0 && layer < shape_.n_layers, "layer ", layer, ", the model has ",
          shape_.n_layers);
}

}  // namespace h2o
