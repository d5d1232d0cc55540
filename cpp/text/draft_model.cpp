#include "text/draft_model.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "core/error.h"
#include "model/predictor.h"
#include "text/draft_pace.h"
#include "text/sampler.h"

namespace h2o {
namespace {

constexpr int32_t kCopy = 0;  // the sequence that reads proposals, if they cannot be retracted

// The time of a proposal is measured if this many tokens at most were read before.
constexpr size_t kFewTokens = 8;

// A sequence is filled from the full cache if it has not read more tokens than this, and again
// after so many: the text may have moved on to what was evicted.
constexpr size_t kFewUnread = 32;
constexpr size_t kFilledFor = 256;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point started) {
  return std::chrono::duration<double>(Clock::now() - started).count();
}

bool retracts(const Model& model) {
  return model.backend->capabilities().draft_rows > 0 && model.config.kv_sources.empty() &&
         model.config.recurrent_layers.empty();
}

int32_t most_drafts(const Model& model) { return model.backend->capabilities().draft_rows - 1; }

// With one sequence, kCopy or the first text's.
SessionOptions prepared(SessionOptions options, bool retracts) {
  options.max_sequences = std::max(options.n_sequences, options.max_sequences) + (retracts ? 0 : 1);
  options.n_sequences = 1;
  if (!retracts) options.max_drafts = 0;
  return options;
}

}  // namespace

class ModelDrafter final : public Drafter {
 public:
  explicit ModelDrafter(std::shared_ptr<DraftModel> model) : model_(std::move(model)) {}
  ModelDrafter(const ModelDrafter&) = delete;
  ModelDrafter& operator=(const ModelDrafter&) = delete;
  ~ModelDrafter() override { retire(); }

  std::span<const int32_t> propose(std::span<const int32_t> tokens,
                                   const DraftStep& step) override {
    if (!pace_) pace_.emplace(model_->usual_);
    count_guesses(draft_, tokens.subspan(std::min(n_seen_, tokens.size())),
                  [this](size_t, bool is_right) {
                    pace_->count(is_right);
                    model_->usual_.add(is_right);
                  });
    draft_.clear();
    n_seen_ = tokens.size();
    // The first step has no drafts, so that its time is known.
    if (is_retired_ || step.seconds == 0 || !pace_->is_due()) return {};
    if (predicts() && (sequence_ < 0 || n_unread(tokens) == 0)) return {};
    if (model_->fills_ && tokens.size() < 2 * static_cast<size_t>(most_kept())) return {};
    try {
      guess(tokens, step);
    } catch (...) {  // out of memory, or the device has failed: the text goes on without
      draft_.clear();
      retire();
    }
    return draft_;
  }

  void observe(std::span<const int32_t> tokens, Session& session,
               int32_t sequence) noexcept override {
    if (!predicts() || is_retired_) return;
    try {
      add_hidden_states(session, sequence);
      // Those before the last tokens are read now, as a prompt is; propose() reads the others.
      if (sequence_ >= 0 && n_unread(tokens) > kFewTokens) read_observed(tokens);
    } catch (...) {  // out of memory: the text goes on without
      retire();
    }
  }

 private:
  void guess(std::span<const int32_t> tokens, const DraftStep& step) {
    const int32_t most = std::min(step.most, model_->max_drafts_);
    const int32_t n = pace_->choose(step, most, model_->cost(step.seconds));
    if (n == 0) return;
    if (sequence_ < 0) sequence_ = model_->take();
    if (sequence_ < 0) return;
    auto started = Clock::now();
    const bool is_ready = catch_up(tokens, step);
    pace_->note_preparation(seconds_since(started) / step.seconds);
    if (!is_ready) return;
    started = Clock::now();
    const size_t n_unread = this->n_unread(tokens);
    read_ahead(tokens.last(n_unread), n, step.sampler);
    const double seconds = seconds_since(started);
    pace_->note_proposal(seconds / step.seconds);
    if (n_unread > kFewTokens) return;
    model_->draft_time_.add(seconds / static_cast<double>(std::max<size_t>(1, draft_.size())));
  }

  bool predicts() const { return model_->session_.model().config.predicts; }

  // The last tokens, which the sequence has not read. A predictor never reads the first one.
  size_t n_unread(std::span<const int32_t> tokens) const {
    if (!predicts()) return tokens.size() - model_->session_.tokens_seen(sequence_);
    const size_t n_known = std::min(tokens.size() - 1, first_hidden_ + n_hidden());
    return n_known - first_hidden_;
  }

  size_t n_hidden() const { return hidden_.size() / model_->session_.model().config.n_embd; }

  // Keeps the hidden states of the last step. A predictor begins where they begin.
  void add_hidden_states(Session& session, int32_t sequence) {
    std::vector<float> states;
    session.read_hidden_states(sequence, states);
    const size_t width = model_->session_.model().config.n_embd;
    const size_t begin = session.tokens_seen(sequence) - states.size() / width;
    const bool follows =
        sequence_ >= 0 && begin >= first_hidden_ && begin <= first_hidden_ + n_hidden();
    if (!follows) {
      if (sequence_ >= 0) model_->give_back(std::exchange(sequence_, -1));
      sequence_ = model_->take();
      first_hidden_ = begin;
      hidden_.clear();
    }
    hidden_.resize((begin - first_hidden_) * width);  // without those of retracted drafts
    hidden_.insert(hidden_.end(), states.begin(), states.end());
  }

  // Forgets the first n hidden states, which the predictor has read.
  void drop_hidden_states(size_t n) {
    const size_t width = model_->session_.model().config.n_embd;
    hidden_.erase(hidden_.begin(), hidden_.begin() + static_cast<std::ptrdiff_t>(n * width));
    first_hidden_ += n;
  }

  // Reads the next tokens of a text whose hidden states are known.
  void read_observed(std::span<const int32_t> tokens) {
    Session& session = model_->session_;
    while (n_unread(tokens) > kFewTokens) {
      const size_t n = std::min(n_unread(tokens), most_rows());
      if (n == 0) return retire();
      session.set_hidden(std::span(hidden_).first(n * session.model().config.n_embd));
      const Input input{sequence_, tokens.subspan(first_hidden_ + 1, n)};
      session.greedy({&input, 1});
      drop_hidden_states(n);
    }
  }

  // The most tokens that the sequence can read in one step.
  size_t most_rows() const {
    const Session& session = model_->session_;
    return std::max(std::min(session.chunk(sequence_), session.options().n_batch), 0);
  }

  // The most tokens that a layer keeps.
  int64_t most_kept() const {
    int64_t most = 0;
    for (const KvPolicy& policy : model_->session_.options().policies) {
      most = std::max(most, policy.budget());
    }
    return most;
  }

  // Leaves only few unread tokens. Returns false if there are still more, or no room for them.
  bool catch_up(std::span<const int32_t> tokens, const DraftStep& step) {
    Session& session = model_->session_;
    if (static_cast<int64_t>(n_unread(tokens)) >= session.room(sequence_)) {
      retire();
      return false;
    }
    const size_t n_read = most_rows();
    if (predicts()) {
      if (n_unread(tokens) > n_read) read_observed(tokens);
      return !is_retired_;
    }
    const std::span<const int32_t> unread = tokens.subspan(session.tokens_seen(sequence_));
    if (model_->fills_) {
      const bool is_old = tokens.size() >= filled_at_ + kFilledFor;
      if (unread.size() <= std::min(kFewUnread, n_read) && !is_old) return true;
      fill(tokens.first(tokens.size() - 1), n_read, step);
      filled_at_ = tokens.size();
      return true;
    }
    if (unread.size() <= n_read) return true;
    // The others in the next steps: texts beside it go on.
    const Input input{sequence_, unread.first(n_read)};
    session.greedy({&input, 1});
    return false;
  }

  // Fills the sequence from the full cache, by the attention of at most n_read tokens.
  void fill(std::span<const int32_t> read, size_t n_read, const DraftStep& step) {
    const auto started = Clock::now();
    const size_t n = std::min({static_cast<size_t>(Session::kMostObserved), n_read, read.size()});
    model_->session_.fill(sequence_, *step.session, step.sequence, read.last(n));
    model_->fill_time_.add(seconds_since(started));
    model_->cache_bytes_ = model_->session_.cache_bytes();
  }

  // Reads the last tokens of the text and proposes n tokens after them.
  void read_ahead(std::span<const int32_t> unread, int32_t n, const Sampler* sampler) {
    Session& session = model_->session_;
    const bool same_vocabulary = session.model().config.n_vocab == model_->n_vocab_;
    std::optional<Sampler> copy;
    if (sampler != nullptr && !sampler->is_argmax() && same_vocabulary) copy = *sampler;
    draft_.reserve(n);
    if (predicts()) {
      const size_t n_states = unread.size() * session.model().config.n_embd;
      session.set_hidden(std::span(hidden_).first(n_states));
    }
    add(next({sequence_, unread}, copy));
    if (predicts()) drop_hidden_states(unread.size());
    const bool retracts = model_->retracts_;
    const int32_t ahead = retracts ? sequence_ : kCopy;
    if (!retracts && n > 1) session.copy(sequence_, kCopy);
    int32_t n_ahead = 0;
    while (!draft_.empty() && std::ssize(draft_) < n && has_room(ahead, n_ahead)) {
      const size_t before = draft_.size();
      Input input{ahead, std::span(draft_).last(1)};
      input.ahead = retracts;
      if (predicts()) session.set_hidden(session.last_hidden());
      add(next(input, copy));
      ++n_ahead;
      if (draft_.size() == before) break;
    }
    if (retracts && n_ahead > 0) session.retract(sequence_, n_ahead);
  }

  // A sequence that has begun to roll cannot go back.
  bool has_room(int32_t sequence, int32_t n_ahead) const {
    const Session& session = model_->session_;
    const bool may_roll = n_ahead == 0 || session.rolling(sequence) ||
                          session.tokens_seen(sequence) < session.model().config.n_ctx_train;
    return session.room(sequence) > 0 && (may_roll || !session.can_roll(sequence));
  }

  // Reads tokens and returns the next one.
  int32_t next(const Input& input, std::optional<Sampler>& sampler) {
    Session& session = model_->session_;
    if (!sampler) return session.greedy({&input, 1})[0];
    const int32_t token = sampler->sample(session.step({&input, 1}));
    sampler->accept(token);
    return token;
  }

  void add(int32_t token) {
    if (token < model_->n_vocab_) draft_.push_back(token);
  }

  void retire() noexcept {
    is_retired_ = true;
    hidden_ = {};
    if (sequence_ >= 0) model_->give_back(std::exchange(sequence_, -1));
  }

  std::shared_ptr<DraftModel> model_;
  int32_t sequence_ = -1;
  std::optional<DraftPace> pace_;  // from the first step on
  bool is_retired_ = false;
  std::vector<int32_t> draft_;
  size_t n_seen_ = 0;     // tokens before the draft
  size_t filled_at_ = 0;  // tokens when the sequence was filled
  // A predictor has the verifying model's hidden states of tokens from first_hidden_ on, each of
  // which is read with the token after it.
  std::vector<float> hidden_;
  size_t first_hidden_ = 0;
};

DraftModel::DraftModel(std::shared_ptr<Model> model, SessionOptions options, int32_t n_vocab)
    : n_vocab_(n_vocab),
      retracts_(retracts(*model)),
      max_drafts_(retracts_ ? std::min(options.max_drafts, most_drafts(*model))
                            : options.max_drafts),
      session_(std::move(model), prepared(std::move(options), retracts_)),
      cache_bytes_(session_.cache_bytes()) {
  free_.reserve(session_.options().max_sequences);  // give_back() needs no memory
  if (retracts_) free_.push_back(0);
}

std::shared_ptr<DraftModel> DraftModel::of_full_cache(std::shared_ptr<Model> model,
                                                      SessionOptions options) {
  const Config& config = model->config;
  require(options.archive.n_recalled == 0,
          "a full cache archives nothing: leave archive out, or lossless");
  require(options.positions != Positions::rolling,
          "the positions of a full cache do not roll: leave positions at auto");
  require(config.sliding_window.size == 0, config.family->architecture,
          " has layers that attend to a window only, which lossless does not support");
  require(
      model->backend->capabilities().independent_rows, model->backend->name(),
      " would read a full cache for each token, as without drafts; use lossless with device=cpu");
  require(retracts(*model), config.family->architecture, " on ", model->backend->name(),
          " has recurrent layers or shared caches, which lossless does not support");
  require(std::ranges::none_of(options.policies, &KvPolicy::weighs_values),
          "lossless does not support a policy that weighs values: choose h2o, mean or sinks");
  options.positions = Positions::original;
  const int32_t n_vocab = config.n_vocab;
  auto made = std::make_shared<DraftModel>(std::move(model), std::move(options), n_vocab);
  made->fills_ = true;
  return made;
}

std::shared_ptr<DraftModel> DraftModel::of_predictor(const std::shared_ptr<Model>& model,
                                                     SessionOptions options) {
  return std::make_shared<DraftModel>(next_token_predictor(model), std::move(options),
                                      model->config.n_vocab);
}

ProposalCost DraftModel::cost(double step_seconds) const {
  return {draft_time_.median() / step_seconds,
          fill_time_.median() / step_seconds / static_cast<double>(kFilledFor)};
}

std::shared_ptr<Drafter> DraftModel::drafter() {
  return std::make_shared<ModelDrafter>(shared_from_this());
}

int32_t DraftModel::take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    const int32_t n = session_.options().n_sequences;
    if (n == session_.options().max_sequences) return -1;
    session_.reserve_sequences(n + 1);
    cache_bytes_ = session_.cache_bytes();
    free_.push_back(n);
  }
  const int32_t sequence = free_.back();
  session_.reset(sequence);
  free_.pop_back();
  return sequence;
}

void DraftModel::give_back(int32_t sequence) noexcept {
  if (process_id() != process_) return;
  const std::lock_guard lock(mutex_);
  free_.push_back(sequence);
}

}  // namespace h2o
