#include "model/session.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "kv/budget.h"
#include "kv/fill.h"
#include "kv/serialized_sequence.h"
#include "model/forward.h"
#include "model/layer_policies.h"
#include "model/output_gram.h"

namespace h2o {
namespace {

constexpr int32_t kLogitsRows = 32;  // rows whose logits are computed at a time by score()

const char* positions_name(uint8_t positions) {
  static constexpr const char* kNames[] = {"original", "rolling", "auto"};
  return positions < std::size(kNames) ? kNames[positions] : "unknown";
}

std::vector<KvPolicy> sequence_policies(const KvCache& cache, int32_t sequence) {
  std::vector<KvPolicy> policies;
  for (int32_t l = 0; l < cache.shape().n_layers; ++l) {
    policies.push_back(cache.policy(l, sequence));
  }
  return policies;
}

KvCache make_cache(const Model& model, const SessionOptions& options, const Buffer& output_gram) {
  KvShape shape = cache_shape(model, options);
  if (output_gram.size() > 0) shape.output_gram = output_gram.as<float>();
  try {
    return KvCache(*model.backend, options.policies, shape);
  } catch (const OutOfMemory& error) {
    throw OutOfMemory(concat("the cache of ", options.n_sequences, " x n_ctx ", options.n_ctx,
                             " tokens cannot be allocated (", error.what(),
                             "); a smaller n_ctx or a budget hh takes less"));
  }
}

}  // namespace

Session::Session(std::shared_ptr<Model> model, const SessionOptions& options)
    : Session(model, options, std::lock_guard(model->mutex)) {}

Session::Session(const std::shared_ptr<Model>& model, const SessionOptions& options,
                 const std::lock_guard<std::mutex>&)
    : model_(model),
      options_(resolve(*model_, options)),
      output_gram_(compute_output_gram(*model_, options_.policies)),
      cache_(make_cache(*model_, options_, output_gram_)) {
  const int32_t n_logits = std::min(
      options_.n_batch, std::max(options_.max_sequences + options_.max_drafts, kLogitsRows));
  activations_ =
      allocate_activations(*model_->backend, model_->config, options_.n_batch, n_logits, storage_);
  const Config& c = model_->config;
  const int32_t n_values =
      std::max({c.family->encoder ? 0 : c.n_vocab, c.n_embd, c.n_dense_3, c.n_labels});
  logits_ = model_->backend->allocate_host(sizeof(float) * n_logits * n_values);
  picks_ = model_->backend->allocate(sizeof(int32_t) * n_logits);
  picks_read_.resize(n_logits);
  if (selects()) {
    largest_ = model_->backend->allocate(sizeof(LargestLogits) * n_logits);
    largest_read_ = model_->backend->allocate_host(sizeof(LargestLogits) * n_logits);
    batch_.temperatures.reserve(n_logits);
  }
  batch_.tokens.reserve(options_.n_batch);
  batch_.positions.reserve(options_.n_batch);
  batch_.logits_rows.reserve(n_logits);
  batch_.segments.reserve(std::max(options_.max_sequences, replays() ? options_.n_batch : 0) +
                          options_.max_drafts);
  batch_.turns.reserve(options_.max_drafts);
  batch_.journal = cache_.journal();
  for (int32_t s = 0; s < options_.n_sequences; ++s) start(s);
}

std::span<const float> Session::step(std::span<const Input> inputs) {
  const std::lock_guard lock(model_->mutex);
  compute_logits(inputs, {}, steps_, [] {});
  const size_t n = batch_.logits_rows.size() * model_->config.n_vocab;
  model_->backend->read(logits_.data(), activations_.logits.data, n * sizeof(float));
  return {logits_.as<float>(), n};
}

std::span<const int32_t> Session::greedy(std::span<const Input> inputs) {
  const std::lock_guard lock(model_->mutex);
  Backend& b = *model_->backend;
  compute_logits(inputs, {}, greedy_, [&] {
    b.argmax(picks_.as<int32_t>(),
             activations_.logits.first(static_cast<int64_t>(batch_.logits_rows.size())));
  });
  const size_t n = batch_.logits_rows.size();
  b.read(picks_read_.data(), picks_.data(), n * sizeof(int32_t));
  return {picks_read_.data(), n};
}

std::span<const LargestLogits> Session::select(std::span<const Input> inputs,
                                               std::span<const float> temperatures) {
  const std::lock_guard lock(model_->mutex);
  Backend& b = *model_->backend;
  const Tensor logits = activations_.logits.first(static_cast<int64_t>(inputs.size()));
  auto* const largest = largest_.as<LargestLogits>();
  compute_logits(inputs, temperatures, select_, [&] { b.select_largest(largest, logits, batch_); });
  b.read(largest_read_.data(), largest, inputs.size() * sizeof(LargestLogits));
  return {largest_read_.as<LargestLogits>(), inputs.size()};
}

std::span<const float> Session::selected_row(size_t i) {
  const std::lock_guard lock(model_->mutex);
  const Tensor row = activations_.logits.first(static_cast<int64_t>(i) + 1);
  const auto n_vocab = static_cast<size_t>(row.cols);
  float* const to = logits_.as<float>() + i * n_vocab;
  model_->backend->read(to, row.row(row.rows - 1), n_vocab * sizeof(float));
  return {to, n_vocab};
}

void Session::compute_logits(std::span<const Input> inputs, std::span<const float> temperatures,
                             std::unique_ptr<CapturedGraph>& graph,
                             const std::function<void()>& then) {
  check_decodes();
  prepare(inputs);
  batch_.temperatures.assign(temperatures.begin(), temperatures.end());
  // Captures two pointers, which std::function stores without allocating.
  const std::function<void()> pass = [this, &then] {
    Backend& b = *model_->backend;
    forward(b, model_->config, model_->weights, batch_, cache_, activations_);
    unembed(b, model_->config, model_->weights, batch_, activations_);
    then();
  };
  // Resident layers change from pass to pass, so these passes are not captured. They are bound by
  // transfers, not by kernel launches.
  const WeightResidency* const residency = model_->weights.residency.get();
  if (residency != nullptr && residency->n_streamed() > 0) {
    model_->backend->run(batch_, pass);
  } else {
    model_->backend->run(batch_, graph, pass);
  }
  advance();
}

void Session::read_every_row(const Input& input, Values wanted, const Sink& sink) {
  const std::lock_guard lock(model_->mutex);
  check_decodes();
  prepare({&input, 1});
  Backend& b = *model_->backend;
  b.run(batch_, [&] { forward(b, model_->config, model_->weights, batch_, cache_, activations_); });
  advance();
  std::vector<int32_t> rows(batch_.n_rows());
  std::iota(rows.begin(), rows.end(), 0);
  read_rows(rows, wanted, sink);
}

void Session::encode(std::span<const Input> texts, Values wanted, Tokens tokens, const Sink& sink) {
  const std::lock_guard lock(model_->mutex);
  const Config& c = model_->config;
  require(c.family->encoder, c.family->architecture, " is no encoder");
  prepare(texts);
  place_token_types(texts);
  Backend& b = *model_->backend;
  b.run(batch_, [&] { forward(b, c, model_->weights, batch_, cache_, activations_); });
  std::vector<int32_t> rows, text_of;
  for (size_t i = 0; i < texts.size(); ++i) {
    const int32_t begin = batch_.segments[i].row, end = begin + batch_.segments[i].n_rows;
    const int32_t first = tokens == Tokens::last ? end - 1 : begin;
    for (int32_t row = first; row < (tokens == Tokens::first ? begin + 1 : end); ++row) {
      rows.push_back(row);
      text_of.push_back(static_cast<int32_t>(i));
    }
  }
  read_rows(rows, wanted,
            [&](int32_t i, std::span<const float> values) { sink(text_of[i], values); });
}

// Positions are then rows of Weights::position_embd with types added.
void Session::place_token_types(std::span<const Input> texts) {
  const Config& c = model_->config;
  if (c.n_token_types == 0) return;
  const bool learned = c.family->learned_positions;
  const int32_t second = c.n_token_types < 2 ? 0 : learned ? c.n_ctx_train : 1;
  for (size_t i = 0; i < texts.size(); ++i) {
    const Segment& segment = batch_.segments[i];
    for (int32_t row = 0; row < segment.n_rows; ++row) {
      const bool is_second = static_cast<size_t>(row) >= texts[i].second_part;
      batch_.positions[segment.row + row] = (learned ? row : 0) + (is_second ? second : 0);
    }
  }
}

// Computes read() of the rows [begin, end) of the last pass at a time, and calls use(begin, end)
// after each.
template <class Read, class Use>
void Session::for_rows(std::span<const int32_t> rows, const Read& read, const Use& use) {
  Backend& b = *model_->backend;
  const auto most = static_cast<size_t>(std::min<int64_t>(kLogitsRows, activations_.last.rows));
  for (size_t begin = 0; begin < rows.size(); begin += most) {
    const size_t end = std::min(begin + most, rows.size());
    batch_.logits_rows.assign(rows.begin() + begin, rows.begin() + end);
    b.run(batch_, [&] { read(b, model_->config, model_->weights, batch_, activations_); });
    use(begin, end);
  }
}

// Calls sink(i, values of row rows[i]) after forward().
void Session::read_rows(std::span<const int32_t> rows, Values wanted, const Sink& sink) {
  const auto [read, values] = [&]() -> std::pair<decltype(&unembed), Tensor> {
    switch (wanted) {
      case Values::logits:
        return {unembed, activations_.logits};
      case Values::hidden:
        return {read_hidden,
                model_->weights.dense_3.weight ? activations_.dense_3 : activations_.last};
      case Values::labels:
        return {score_labels, activations_.labels};
    }
    return {};
  }();
  const auto n_values = static_cast<size_t>(values.cols);
  for_rows(rows, read, [&, data = values.data](size_t begin, size_t end) {
    model_->backend->read(logits_.data(), data, (end - begin) * n_values * sizeof(float));
    for (size_t row = begin; row < end; ++row) {
      sink(static_cast<int32_t>(row), {logits_.as<float>() + (row - begin) * n_values, n_values});
    }
  });
}

void Session::retract(int32_t sequence, int32_t n) {
  const std::lock_guard lock(model_->mutex);
  if (n_ahead_ == 0) return cache_.retract(batch_, sequence, n);
  cache_.retract_entries(sequence, n_ahead_ - n, n_ahead_);
  n_ahead_ -= n;
}

void Session::fill(int32_t sequence, const Session& full, int32_t from,
                   std::span<const int32_t> last) {
  const std::lock_guard lock(model_->mutex);
  require(full.model_ == model_ && full.is_plain_unlocked(from) && !last.empty(), "sequence ", from,
          " does not keep all tokens of the same model, so no other can be filled from it");
  const auto n = static_cast<int32_t>(last.size());
  const int32_t length = full.cache_.length(from);
  const int32_t most = std::min({kMostObserved, options_.n_batch, length});
  require(n <= most, n, " last tokens, expected 1 to ", most, ", of ", length);
  Backend& b = *model_->backend;
  if (!observer_) {
    const KvPolicy scored{.heavy = full.options_.n_ctx, .recent = full.options_.n_ctx};
    KvShape shape = full.cache_.shape();
    shape.n_sequences = 1;
    shape.max_rows = std::min(kMostObserved, options_.n_batch);
    shape.max_drafts = 0;
    shape.borrows = true;
    observer_.emplace(b, scored, shape);
  }
  observer_->borrow(full.cache_, from, length - n);
  batch_.clear();
  batch_.add(0, observer_->length(0), last);
  n_ahead_ = 0;
  // Rows of a snapshot, of another machine's kernels, may differ from those that are stored here.
  const std::vector<std::byte> rows = observer_->stored_rows(0, length - n, length);
  try {
    b.run(batch_,
          [&] { forward(b, model_->config, model_->weights, batch_, *observer_, activations_); });
  } catch (...) {
    observer_->restore_rows(0, length - n, length, rows);
    throw;
  }
  observer_->restore_rows(0, length - n, length, rows);
  observer_->advance(batch_);
  fill_sequence(cache_, sequence, *observer_);
}

void Session::read_hidden_states(int32_t sequence, std::vector<float>& to) {
  const std::lock_guard lock(model_->mutex);
  std::vector<int32_t> rows;
  for (const Segment& segment : batch_.segments) {
    for (int32_t i = 0; segment.sequence == sequence && i < segment.n_rows; ++i) {
      rows.push_back(segment.row + i);
    }
  }
  const auto width = static_cast<size_t>(model_->config.n_embd);
  const size_t before = to.size();
  to.resize(before + rows.size() * width);
  // The logits of the last step stay: they may still be sampled from.
  for_rows(rows, read_hidden, [&](size_t begin, size_t end) {
    model_->backend->read(to.data() + before + begin * width, activations_.last.data,
                          (end - begin) * width * sizeof(float));
  });
}

std::span<const float> Session::last_hidden() {
  const std::lock_guard lock(model_->mutex);
  hidden_read_.resize(model_->config.n_embd);
  model_->backend->read(hidden_read_.data(), activations_.last.data,
                        hidden_read_.size() * sizeof(float));
  return hidden_read_;
}

void Session::set_hidden(std::span<const float> states) {
  const std::lock_guard lock(model_->mutex);
  const Config& c = model_->config;
  require(c.predicts, c.family->architecture, " reads no hidden states of another model");
  const int64_t n = std::ssize(states), width = c.n_embd, most = activations_.hidden.rows;
  require(n > 0 && n % width == 0 && n / width <= most, n, " numbers of hidden states, expected ",
          width, " for each of 1 to ", most, " rows");
  model_->backend->write(activations_.hidden.data, states.data(), states.size_bytes());
  n_hidden_ = n / width;
}

bool Session::replays() const {
  const Config& config = model_->config;
  if (config.family->encoder) return false;
  if (!config.kv_sources.empty()) return false;
  for (int32_t l = 0; l < config.n_layers; ++l) {
    if (config.recurrent(l)) return false;
  }
  return model_->backend->capabilities().independent_rows;
}

void Session::reserve_sequences(int32_t n) {
  const std::lock_guard lock(model_->mutex);
  require(n <= options_.max_sequences, n, " sequences, at most ", options_.max_sequences);
  cache_.reserve_sequences(n);
  steps_.reset();  // they were captured with the old addresses
  greedy_.reset();
  select_.reset();
  for (; options_.n_sequences < n; ++options_.n_sequences) start(options_.n_sequences);
}

void Session::parallel_for(int64_t n, const std::function<void(int64_t i)>& body) {
  const std::lock_guard lock(model_->mutex);
  model_->backend->parallel_for(n, body);
}

void Session::reset(int32_t sequence, std::span<const KvPolicy> policies) {
  const std::lock_guard lock(model_->mutex);
  cache_.reset(sequence, layer_policies(model_->config, policies));
  start(sequence);
}

int32_t Session::room(int32_t sequence) const {
  const std::lock_guard lock(model_->mutex);
  return room_unlocked(sequence);
}

int32_t Session::chunk(int32_t sequence) const {
  const std::lock_guard lock(model_->mutex);
  return chunk_unlocked(sequence);
}

bool Session::can_roll(int32_t sequence) const {
  const std::lock_guard lock(model_->mutex);
  return cache_.can_roll(sequence);
}

bool Session::rolling(int32_t sequence) const {
  const std::lock_guard lock(model_->mutex);
  return cache_.rolling(sequence);
}

int32_t Session::tokens_seen(int32_t sequence) const {
  const std::lock_guard lock(model_->mutex);
  return cache_.length(sequence);
}

int32_t Session::tokens_kept(int32_t sequence) const {
  const std::lock_guard lock(model_->mutex);
  return cache_.kept(sequence);
}

int32_t Session::tokens_kept(int32_t sequence, int32_t layer) const {
  const std::lock_guard lock(model_->mutex);
  return cache_.kept(layer, sequence);
}

std::vector<KvEntry> Session::entries(int32_t layer, int32_t sequence, int32_t kv_head) const {
  const std::lock_guard lock(model_->mutex);
  return cache_.entries(layer, sequence, kv_head);
}

std::vector<char> Session::kept_anywhere(int32_t sequence) const {
  const std::lock_guard lock(model_->mutex);
  return cache_.kept_anywhere(sequence);
}

size_t Session::cache_bytes() const {
  const std::lock_guard lock(model_->mutex);
  return cache_.bytes() + (observer_ ? observer_->bytes() : 0);
}

size_t Session::archive_bytes() const {
  const std::lock_guard lock(model_->mutex);
  return cache_.archive_bytes();
}

size_t Session::full_cache_bytes() const {
  const std::lock_guard lock(model_->mutex);
  const KvPolicy full;
  KvShape shape = cache_.shape();
  shape.rope = {};  // a full cache does not roll
  return KvCache::bytes({&full, 1}, shape);
}

int64_t Session::n_clamped() const {
  const std::lock_guard lock(model_->mutex);
  return n_clamped_;
}

int32_t Session::room_unlocked(int32_t sequence) const {
  const int32_t room = cache_.room(sequence);
  if (cache_.can_roll(sequence)) return room;
  return std::min(room, options_.n_ctx - cache_.length(sequence));
}

int32_t Session::chunk_unlocked(int32_t sequence) const {
  const int32_t chunk = std::min(options_.n_batch, room_unlocked(sequence));
  if (!cache_.can_roll(sequence)) return chunk;
  // Positions up to the trained length are equal to ranks until the sequence rolls.
  const int32_t n_ctx_train = model_->config.n_ctx_train;
  const int32_t length = cache_.length(sequence);
  const bool rolls = cache_.rolling(sequence) || length >= n_ctx_train;
  return std::min(chunk, n_ctx_train - (rolls ? cache_.kept(sequence) : length));
}

void Session::start(int32_t sequence) {
  if (options_.positions == Positions::rolling) cache_.roll(sequence);
}

void Session::check_decodes() const {
  const Family& family = *model_->config.family;
  require(
      !family.encoder, family.architecture,
      " is an encoder, which gives embeddings or scores of texts, but no logits of next tokens");
}

void Session::check(std::span<const Input> inputs) const {
  require(!inputs.empty(), "no tokens to process");
  size_t n_rows = 0;
  int64_t n_drafts = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const auto& [sequence, tokens, drafts, one_by_one, second_part, ahead] = inputs[i];
    require(!tokens.empty(), "no tokens for sequence ", sequence);
    require(!one_by_one || replays(), "tokens of sequence ", sequence,
            " are to be read one by one, which this model or device does not support");
    const int64_t left = room_unlocked(sequence);
    require(std::ssize(tokens) <= left, tokens.size(), " more tokens for sequence ", sequence,
            ", it has room for ", left, " (n_ctx ", options_.n_ctx, ")");
    const int64_t chunk = chunk_unlocked(sequence);
    require(std::ssize(tokens) <= chunk, tokens.size(), " tokens of sequence ", sequence,
            " in one step, it can take ", chunk);
    require(drafts >= 0 && drafts < std::ssize(tokens), drafts, " drafts among ", tokens.size(),
            " tokens, expected fewer");
    n_drafts += ahead ? 1 + n_ahead_ : drafts;
    require(!ahead || inputs.size() * tokens.size() == 1, tokens.size(), " tokens of ",
            inputs.size(), " sequences, expected a single one that is ahead");
    for (size_t j = 0; j < i; ++j) {
      require(inputs[j].sequence != sequence, "sequence ", sequence, " appears twice");
    }
    for (int32_t token : tokens) {
      require(token >= 0 && token < model_->config.n_vocab, "token ", token,
              " is not in the vocabulary of ", model_->config.n_vocab);
    }
    n_rows += tokens.size();
  }
  require(n_rows <= static_cast<size_t>(options_.n_batch), n_rows,
          " tokens in one step, at most n_batch = ", options_.n_batch);
  const int32_t draft_rows = model_->backend->capabilities().draft_rows;
  if (n_drafts > 0 && std::cmp_greater(n_rows, draft_rows)) {  // name() takes time: only if needed
    throw InvalidArgument(concat(n_rows, " tokens in one step with drafts, at most ", draft_rows,
                                 " on ", model_->backend->name()));
  }
  require(n_drafts <= options_.max_drafts, n_drafts,
          " drafts in one step, at most max_drafts = ", options_.max_drafts);
  require(!model_->config.predicts || std::cmp_equal(n_rows, n_hidden_), n_rows,
          " tokens in one step, but hidden states of ", n_hidden_);
}

// Checks the inputs and makes them the batch. Sequences at the trained length start rolling.
void Session::prepare(std::span<const Input> inputs) {
  check(inputs);
  n_hidden_ = 0;
  n_clamped_before_ = model_->backend->n_clamped();
  batch_.clear();
  if (inputs[0].ahead) return prepare_ahead(inputs[0]);
  n_ahead_ = 0;
  size_t n_logits = 0;
  for (const Input& input : inputs) n_logits += input.n_logits();
  batch_.logits_rows.resize(n_logits);  // input by input

  // Appends the tokens [begin, end) of an input, whose logits begin at `logits`.
  const auto add = [&](const Input& input, size_t logits, size_t begin, size_t end,
                       int32_t entry = -1) {
    const size_t first_wanted = input.tokens.size() - input.n_logits();
    for (size_t i = std::max(begin, first_wanted); i < end; ++i) {
      batch_.logits_rows[logits + i - first_wanted] =
          batch_.n_rows() + static_cast<int32_t>(i - begin);
    }
    batch_.add(input.sequence, cache_.length(input.sequence) + static_cast<int32_t>(begin),
               input.tokens.subspan(begin, end - begin), cache_.rolling(input.sequence), entry);
  };
  // The state of a plain sequence does not depend on how its tokens are divided.
  const auto n_in_turns = [&](const Input& input) {
    return input.n_drafts == 0 || is_plain_unlocked(input.sequence) ? 0 : input.n_drafts;
  };
  int32_t n_turns = 0;
  size_t logits = 0;
  for (const Input& input : inputs) {
    if (is_to_roll(input.sequence)) cache_.roll(input.sequence);
    const size_t end = input.tokens.size() - n_in_turns(input);
    const size_t n = input.one_by_one ? 1 : end;
    for (size_t begin = 0; begin < end; begin += n) add(input, logits, begin, begin + n);
    n_turns = std::max(n_turns, n_in_turns(input));
    logits += input.n_logits();
  }
  int32_t n_entries = 0;
  for (int32_t turn = 0; turn < n_turns; ++turn) {
    batch_.begin_turn();
    logits = 0;
    for (const Input& input : inputs) {
      const size_t at = input.tokens.size() - input.n_drafts + turn;
      if (turn < n_in_turns(input)) add(input, logits, at, at + 1, n_entries++);
      logits += input.n_logits();
    }
  }
}

// Adds the rows of the batch to their sequences, after a pass.
void Session::advance() {
  cache_.advance(batch_);
  n_clamped_ += model_->backend->n_clamped() - n_clamped_before_;
}

// Has a sequence reached the trained length, and can it go on with rolling positions?
bool Session::is_to_roll(int32_t sequence) const {
  return cache_.length(sequence) >= model_->config.n_ctx_train && !cache_.rolling(sequence) &&
         cache_.can_roll(sequence);
}

// Makes a batch whose first turn is empty.
void Session::prepare_ahead(const Input& input) {
  if (is_to_roll(input.sequence)) {
    require(n_ahead_ == 0, "a sequence cannot begin to roll after ", n_ahead_,
            " tokens that may be retracted");
    cache_.roll(input.sequence);
  }
  batch_.begin_turn();
  batch_.add(input.sequence, cache_.length(input.sequence), input.tokens,
             cache_.rolling(input.sequence), n_ahead_++);
  batch_.want_last();
}

void Session::copy(int32_t from, int32_t to) {
  const std::lock_guard lock(model_->mutex);
  cache_.copy_sequence(from, to);
}

// Sequences that cannot roll have original positions.
Positions Session::positions_of(int32_t sequence) const {
  return cache_.can_roll(sequence) ? options_.positions : Positions::original;
}

std::vector<std::byte> Session::save(int32_t sequence, SnapshotText text) const {
  const std::lock_guard lock(model_->mutex);
  text.n_read = cache_.length(sequence);
  require(std::ssize(text.tokens) >= text.n_read, text.tokens.size(), " tokens for sequence ",
          sequence, ", which has read ", text.n_read);
  const auto positions = static_cast<uint8_t>(positions_of(sequence));
  ByteWriter writer = begin_snapshot(model_->fingerprint, text, positions);
  writer.reserve(sequence_bytes(cache_, sequence));
  write_sequence(cache_, sequence, writer);
  return end_snapshot(std::move(writer));
}

SnapshotText Session::load(int32_t sequence, std::span<const std::byte> snapshot) {
  return load(sequence, open_snapshot(snapshot), std::nullopt);
}

bool Session::is_plain(int32_t sequence) const {
  const std::lock_guard lock(model_->mutex);
  return is_plain_unlocked(sequence);
}

bool Session::is_plain_unlocked(int32_t sequence) const {
  if (!model_->backend->capabilities().independent_rows || cache_.archive() != nullptr)
    return false;
  if (model_->config.family->encoder) return false;
  if (!model_->config.recurrent_layers.empty()) return false;  // a state has no prefixes
  for (int32_t l = 0; l < model_->config.n_layers; ++l) {
    const KvPolicy& policy = cache_.policy(l, sequence);
    if (policy.keeps_scores() || policy.budget() < options_.n_ctx) return false;
  }
  return true;
}

void Session::load_plain(int32_t sequence, std::span<const std::byte> snapshot, int32_t n_tokens) {
  load(sequence, open_snapshot(snapshot, Damage::none), n_tokens);
}

SnapshotText Session::load(int32_t sequence, OpenSnapshot open, std::optional<int32_t> n_tokens) {
  const std::lock_guard lock(model_->mutex);
  check_model(open, model_->fingerprint, model_->config.n_vocab);
  if (const auto here = static_cast<uint8_t>(positions_of(sequence)); open.positions != here) {
    check_shape(cache_, sequence, open.cache);  // positions also differ with the policy
    throw FormatError(concat("the snapshot has ", positions_name(open.positions),
                             " positions, this session ", positions_name(here)));
  }
  const int32_t n_read = open.text.n_read;
  if (n_read > options_.n_ctx && !cache_.can_roll(sequence)) {
    throw FormatError(concat("the snapshot has ", n_read, " tokens, n_ctx is ", options_.n_ctx));
  }
  // A prompt that was protected stays so.
  const std::vector<KvPolicy> own = sequence_policies(cache_, sequence);
  const std::vector<KvPolicy> saved = read_policies(cache_, open.cache);
  const auto are_protected = [&](const std::vector<KvPolicy>& policies) {
    for (size_t l = 0; l < policies.size(); ++l) {
      if (!is_protected(policies[l], options_.policies[options_.policies.size() == 1 ? 0 : l]))
        return false;
    }
    return true;
  };
  const bool is_adopted = are_protected(own) && are_protected(saved);
  if (is_adopted) cache_.set_policies(sequence, saved);
  try {
    read_sequence(cache_, sequence, n_read, open.cache, n_tokens);
  } catch (...) {
    if (is_adopted) cache_.set_policies(sequence, own);
    throw;
  }
  return std::move(open.text);
}

}  // namespace h2o
