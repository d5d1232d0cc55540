#include "text/draft_model.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "text/draft_cost.h"

namespace h2o {
namespace {

constexpr int32_t kAhead = 0;  // the sequence that reads proposals
constexpr int32_t kFirstText = 1;

constexpr GuessRate kUnknown{4, 5};  // a guess that weighs little

// Steps without proposals after proposals did not pay; each time twice as many.
constexpr int32_t kFirstPause = 32;
constexpr int32_t kLongestPause = 1024;

// The time of a proposal is measured if this many tokens at most were read before.
constexpr size_t kFewTokens = 8;

SessionOptions with_ahead(SessionOptions options) {
  options.max_sequences = std::max(options.n_sequences, options.max_sequences) + 1;
  options.n_sequences = kFirstText;
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
    count_guesses(draft_, tokens.subspan(std::min(n_seen_, tokens.size())),
                  [this](size_t) -> GuessRate& { return rate_; });
    draft_.clear();
    n_seen_ = tokens.size();
    // The first step has no drafts, so that its time is known.
    if (is_retired_ || step.seconds == 0 || --pause_ > 0) return {};
    try {
      guess(tokens, step);
    } catch (...) {  // out of memory, or the device has failed: the text goes on without
      draft_.clear();
      retire();
    }
    return draft_;
  }

 private:
  void guess(std::span<const int32_t> tokens, const DraftStep& step) {
    const std::vector<double> right(step.most, rate_.share());
    const int32_t n = best_draft_length(step, right, seconds_.median() / step.seconds);
    if (n == 0) return rest();
    if (sequence_ < 0) sequence_ = model_->take();
    if (sequence_ < 0) return;
    const auto started = std::chrono::steady_clock::now();
    Session& session = model_->session_;
    const std::span<const int32_t> unread = tokens.subspan(session.tokens_seen(sequence_));
    if (std::ssize(unread) >= session.room(sequence_)) return retire();
    const auto n_read =
        static_cast<size_t>(std::min(session.chunk(sequence_), session.options().n_batch));
    if (unread.size() > n_read) {  // the others in the next steps: texts beside it go on
      read(sequence_, unread.first(n_read));
      return;
    }
    add(read(sequence_, unread));
    if (n > 1) session.copy(sequence_, kAhead);
    while (!draft_.empty() && std::ssize(draft_) < n && session.room(kAhead) > 0) {
      const size_t before = draft_.size();
      add(read(kAhead, std::span(draft_).last(1)));
      if (draft_.size() == before) break;
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
    if (unread.size() <= kFewTokens) {
      seconds_.add(seconds.count() / static_cast<double>(std::max<size_t>(1, draft_.size())));
      pause_length_ = kFirstPause;
    }
  }

  // Reads tokens and returns the most likely next one.
  int32_t read(int32_t sequence, std::span<const int32_t> tokens) {
    const Input input{sequence, tokens};
    return model_->session_.greedy({&input, 1})[0];
  }

  void add(int32_t token) {
    if (token < model_->n_vocab_) draft_.push_back(token);
  }

  // Tries again after a while, when the text may have become easier.
  void rest() {
    pause_ = std::exchange(pause_length_, std::min(2 * pause_length_, kLongestPause));
    rate_ = kUnknown;
  }

  void retire() noexcept {
    is_retired_ = true;
    if (sequence_ >= 0) model_->give_back(std::exchange(sequence_, -1));
  }

  std::shared_ptr<DraftModel> model_;
  int32_t sequence_ = -1;
  GuessRate rate_ = kUnknown;
  TypicalTime seconds_;  // of a proposed token
  int32_t pause_ = 0;
  int32_t pause_length_ = kFirstPause;
  bool is_retired_ = false;
  std::vector<int32_t> draft_;
  size_t n_seen_ = 0;  // tokens before the draft
};

DraftModel::DraftModel(std::shared_ptr<Model> model, SessionOptions options, int32_t n_vocab)
    : n_vocab_(n_vocab), session_(std::move(model), with_ahead(std::move(options))) {}

std::shared_ptr<Drafter> DraftModel::drafter() {
  return std::make_shared<ModelDrafter>(shared_from_this());
}

int32_t DraftModel::take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    const int32_t n = session_.options().n_sequences;
    if (n == session_.options().max_sequences) return -1;
    free_.reserve(session_.options().max_sequences);  // give_back() needs no memory
    session_.reserve_sequences(n + 1);
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
