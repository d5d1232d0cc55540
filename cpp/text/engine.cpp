#include "text/engine.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace h2o {
namespace {

SessionOptions with_rows(SessionOptions options) {
  require(options.n_batch > 0 && options.n_batch <= 65536, "n_batch is ", options.n_batch,
          ", expected 1 to 65536");
  const int32_t n = std::max({options.n_sequences, options.max_sequences, 1});
  require(n <= 65536 - options.n_batch + 1, "max_sequences is ", n, " with n_batch ",
          options.n_batch, ", expected at most ", 65536 - options.n_batch + 1);
  options.n_batch += n - 1;  // one chunk, plus a token of every other sequence
  return options;
}

}  // namespace

Engine::Engine(std::shared_ptr<Model> model, std::shared_ptr<const Tokenizer> tokenizer,
               SessionOptions options, const PrefixCacheOptions& prefixes)
    : model_(std::move(model)),
      tokenizer_(std::move(tokenizer)),
      n_batch_(options.n_batch),
      session_(std::make_shared<Session>(model_, with_rows(std::move(options)))),
      scheduler_(std::in_place, *session_, *tokenizer_,
                 std::min(n_batch_, session_->options().n_ctx), prefixes),
      n_sequences_(session_->options().max_sequences),
      n_ctx_(session_->options().n_ctx),
      n_vocab_(model_->config.n_vocab),
      limit_(scheduler_->limit()),
      endless_(session_->can_roll(0)),
      monitor_(std::make_shared<EngineMonitor>()),
      n_allocated_(session_->options().n_sequences) {}

Engine::~Engine() { close(); }

void Engine::check_process() const {
  if (!forked()) return;
  throw std::runtime_error(
      "the model was opened by another process, which this one was forked from: open it again");
}

Engine::Handle Engine::submit(Request request, bool begin) {
  check_process();
  const auto generation = std::make_shared<Generation>(monitor_, std::move(request));
  Generation& g = *generation;
  {
    const Lock lock(monitor_->mutex);
    if (closed_) throw std::runtime_error("the engine is closed");
  }
  check(g.request_, g);
  // Other generations start when their first piece is requested.
  if (g.request_.eager && begin) this->begin({&generation, 1});
  return generation;
}

void Engine::begin(std::span<const Handle> generations) {
  check_process();
  const Lock lock(monitor_->mutex);
  if (closed_) throw std::runtime_error("the engine is closed");
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  for (const Handle& generation : generations) {
    if (!generation->submitted_ && !generation->ended()) enqueue(generation);
  }
  monitor_->changed.notify_all();
}

void Engine::check(Request& request, Generation& generation) const {
  request.sampling.check(n_vocab_);
  require(!request.max_tokens || *request.max_tokens >= kEndless, "max_tokens is ",
          request.max_tokens.value_or(0), ", expected 0 or more, or -1 (endless)");
  size_t n_read = 0;
  if (!request.after.bytes.empty()) {
    SnapshotText text = open_snapshot(request.after.bytes).text;
    if (!request.seeded && !text.random_state.empty()) {
      Sampler({}, 1).set_random_state(text.random_state);  // throws if invalid
    }
    n_read = text.n_read;
    generation.tokens_ = std::move(text.tokens);
    generation.logits_ = std::move(text.logits);
    generation.random_state_ = std::move(text.random_state);
    request.held = text.held_text + text.held_bytes + request.held;
  }
  const bool empty = request.prompt.empty() && generation.tokens_.size() == n_read;
  require(!empty || !generation.logits_.empty() || request.max_tokens == 0, "the prompt is empty",
          n_read > 0 ? ", and the snapshot has no unprocessed token" : "");
  if (generation.tokens_.empty()) {
    generation.tokens_ = std::move(request.prompt);
  } else {
    generation.tokens_.insert(generation.tokens_.end(), request.prompt.begin(),
                              request.prompt.end());
  }
  for (const int32_t token : generation.tokens_) {
    require(token >= 0 && token < n_vocab_, "token ", token, " is not in the vocabulary of ",
            n_vocab_);
  }
  const size_t n = generation.n_input_tokens_ = generation.tokens_.size();
  generation.progress_.n_prompt = static_cast<int32_t>(n - n_read);
  const auto n_ctx = static_cast<size_t>(n_ctx_);
  if (n > n_ctx && request.policies.empty() && !endless_) {
    throw ContextFull(text("the prompt has ", n, " tokens, ", limit_));
  }
  if (!request.max_tokens) {
    // the last token is not processed
    generation.max_new_tokens_ = n <= n_ctx ? n_ctx - n + 1 : n_ctx;
  } else {
    generation.max_new_tokens_ = *request.max_tokens == kEndless ? SIZE_MAX : *request.max_tokens;
  }
}

void Engine::enqueue(const Handle& generation) {
  const bool eager = generation->request_.eager;
  if (eager && (n_queued_ >= max_queue_ || !unadmitted_.empty())) {
    unadmitted_.push_back(generation);
    generation->admitted_ = false;
  } else {
    waiting_.push_back(generation);
    n_queued_ += eager;
  }
  generation->submitted_ = true;
}

// Throws on the computing thread, which would wait for itself.
void Engine::check_may_wait(const Lock& /*held*/) const {
  if (!is_leader()) return;
  throw std::runtime_error(
      "a constraint called the engine that is waiting for it; there it may look, submit and "
      "cancel, nothing else");
}

void Engine::check_may_wait() const {
  check_process();
  check_may_wait(Lock(monitor_->mutex));
}

bool Engine::in_callback() const {
  if (forked()) return false;
  const Lock lock(monitor_->mutex);
  return is_leader();
}

std::optional<Piece> Engine::next(const Handle& generation, const Between& between) {
  check_process();
  Generation& g = *generation;
  Lock lock(monitor_->mutex);
  check_may_wait(lock);
  if (!g.submitted_ && !g.ended()) {
    if (closed_) throw std::runtime_error("the engine is closed");
    enqueue(generation);
  }
  struct Waiting {
    Engine& engine;
    const Handle& generation;
    Generation& g;
    Lock& lock;
    ~Waiting() {
      if (!lock.owns_lock()) lock.lock();
      // Interrupted in the queue: it is queued again when it is wanted again.
      if (--g.n_waiting_ > 0 || g.request_.eager) return;
      if (remove(engine.waiting_, generation)) g.submitted_ = false;
    }
  };
  ++g.n_waiting_;
  const Waiting waiting{*this, generation, g, lock};
  g.reader_ = std::this_thread::get_id();
  while (true) {
    if (!g.pieces_.empty()) return g.take_piece();
    if (g.error_ != nullptr) std::rethrow_exception(std::exchange(g.error_, nullptr));
    if (g.ended()) return std::nullopt;
    if (leading_) {
      monitor_->changed.wait_for(lock, kPollInterval);
    } else if (!run_step(lock)) {
      monitor_->changed.wait_for(lock, kRetry);
    }
    drop_ended(lock);
    if (!g.pieces_.empty() || g.ended()) continue;
    lock.unlock();
    between();
    lock.lock();
  }
}

std::optional<Piece> Engine::poll(const Handle& generation) {
  check_process();
  Generation& g = *generation;
  const Lock lock(monitor_->mutex);
  if (!g.pieces_.empty()) return g.take_all();
  if (g.error_ != nullptr) std::rethrow_exception(std::exchange(g.error_, nullptr));
  return std::nullopt;
}

void Engine::subscribe(const Handle& generation, const std::shared_ptr<Mailbox>& mailbox) {
  check_process();
  const Lock lock(monitor_->mutex);
  Generation& g = *generation;
  // Admission has already been posted to a mailbox that was subscribed before.
  const bool is_new = g.mailbox_.lock() != mailbox;
  g.mailbox_ = mailbox;
  if (!g.pieces_.empty() || g.ended() || (is_new && g.admitted_)) post(generation);
}

bool Engine::wait_admitted(const Handle& generation, double seconds, const Between& between) {
  check_process();
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;  // may be infinite
  const auto limit = Clock::now() + Seconds(std::max(seconds, 0.0));
  Lock lock(monitor_->mutex);
  while (!generation->admitted_ && !generation->ended()) {
    const Seconds left = limit - Clock::now();
    if (seconds >= 0 && left.count() <= 0) return false;
    check_may_wait(lock);
    monitor_->changed.wait_for(
        lock, seconds < 0 ? kPollInterval : std::min<Seconds>(kPollInterval, left));
    lock.unlock();
    between();
    lock.lock();
  }
  return generation->admitted_;
}

void Engine::cancel(const Handle& generation) {
  if (forked()) return;
  Lock lock(monitor_->mutex);
  end_cancelled(generation);
  monitor_->changed.notify_all();
  drop_ended(lock);
}

void Engine::wait_ended(const Handle& generation) {
  if (forked()) return;
  Lock lock(monitor_->mutex);
  if (!generation->ended()) check_may_wait(lock);
  monitor_->changed.wait(lock, [&] { return generation->ended(); });
}

void Engine::end_cancelled(const Handle& generation) {
  Generation& g = *generation;
  if (g.ended()) return;
  const bool waits = remove(waiting_, generation);
  if (waits) n_queued_ -= g.request_.eager;
  const bool begun = g.submitted_ && !waits && !remove(unadmitted_, generation);
  if (begun && leading_) {
    g.cancelled_ = true;  // it may be part of the current step
    return;
  }
  if (remove(active_, generation)) scheduler_->release(g);
  finish(generation, Finish::cancelled);
  admit();
  post(generation);
}

Engine::Handle Engine::last() const {
  check_process();
  const Lock lock(monitor_->mutex);
  return last_;
}

std::shared_ptr<Session> Engine::shared_session() const {
  check_process();
  const Lock lock(monitor_->mutex);
  if (closed_) throw std::runtime_error("the engine is closed");
  return session_;
}

int32_t Engine::last_sequence() const {
  check_process();
  const Lock lock(monitor_->mutex);
  return last_sequence_;
}

void Engine::set_max_queue(int32_t n) {
  if (forked()) return;
  const Lock lock(monitor_->mutex);
  max_queue_ = n;
  admit();
  monitor_->changed.notify_all();
}

void Engine::cancel_all(std::optional<int32_t> only_group) {
  if (forked()) return;
  Lock lock(monitor_->mutex);
  const auto belongs = [&](const Handle& generation) {
    return !only_group || generation->request_.group == *only_group;
  };
  const auto cancel_in = [&](const auto& list) {
    const auto goes_on = [&](const Handle& g) { return belongs(g) && !g->cancelled_; };
    while (true) {
      const auto found = std::ranges::find_if(list, goes_on);
      if (found == list.end()) return;
      end_cancelled(Handle(*found));  // removes it from the list, or sets cancelled_
    }
  };
  cancel_in(unadmitted_);  // first: ending others admits them
  cancel_in(waiting_);
  cancel_in(active_);
  cancel_in(beginning_);
  monitor_->changed.notify_all();
  if (is_leader()) return;
  const auto ends = [&](const Handle& g) { return belongs(g) && g->cancelled_; };
  monitor_->changed.wait(lock, [&] {  // for the current step
    return std::ranges::none_of(active_, ends) && std::ranges::none_of(beginning_, ends);
  });
}

void Engine::cancel_group(int32_t group) {
  cancel_all(group);
  if (forked()) return;
  Lock lock(monitor_->mutex);
  drop_ended(lock);
}

void Engine::close() noexcept {
  if (forked()) {
    // Leak what other threads used at the time of the fork; it cannot be destroyed.
    new std::shared_ptr(monitor_);
    if (worker_.joinable()) new std::thread(std::move(worker_));
    return;
  }
  {
    const Lock lock(monitor_->mutex);
    closed_ = true;
  }
  cancel_all({});
  if (in_callback()) return;
  std::thread worker;  // if several threads call close(), only one joins it
  {
    const Lock lock(monitor_->mutex);
    if (!is_leader()) worker.swap(worker_);
  }
  if (worker.get_id() == std::this_thread::get_id()) {  // a callback held the last reference
    worker.detach();
    worker_closed_it_ = true;
  } else if (worker.joinable()) {
    worker.join();
  }
  Lock lock(monitor_->mutex);
  monitor_->changed.wait(lock, [this] { return !leading_; });
  std::shared_ptr<Session> session = std::move(session_);
  // What they own may wait for a thread that waits for the lock.
  between_steps(lock, [&] {
    scheduler_.reset();
    session.reset();
    model_.reset();
  });
}

bool Engine::closed() const {
  if (forked()) return closed_;
  const Lock lock(monitor_->mutex);
  return closed_;
}

EngineStats Engine::stats() const {
  check_process();
  const Lock lock(monitor_->mutex);
  return {n_sequences_,
          static_cast<int32_t>(active_.size()),
          n_queued_ + static_cast<int32_t>(unadmitted_.size()),
          prompt_tokens_,
          generated_tokens_,
          evictions_,
          cached_tokens_,
          prefix_bytes_,
          n_allocated_};
}

}  // namespace h2o
