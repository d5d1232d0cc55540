#include "text/engine.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "model/layer_policies.h"

namespace h2o {
namespace {

SessionOptions with_rows(SessionOptions options, int32_t n_batch) {
  options.n_batch = n_batch;
  require(options.n_batch > 0 && options.n_batch <= 65536, "n_batch is ", options.n_batch,
          ", expected 1 to 65536");
  const int32_t n = std::max({options.n_sequences, options.max_sequences, 1});
  require(n <= 65536 - options.n_batch + 1, "max_sequences is ", n, " with n_batch ",
          options.n_batch, ", expected at most ", 65536 - options.n_batch + 1);
  // One chunk, plus a token of every other sequence, plus drafts.
  options.n_batch += n - 1 + options.max_drafts;
  return options;
}

// The tokens of a prompt that are read at once; an encoder reads it whole.
int32_t chunk(const Session& session, int32_t n_batch) {
  const int32_t n_ctx = session.options().n_ctx;
  return session.model().config.family->encoder ? n_ctx : std::min(n_batch, n_ctx);
}

}  // namespace

thread_local bool Engine::worker_closed_it_ = false;

Engine::Engine(std::shared_ptr<Model> model, std::shared_ptr<const Tokenizer> tokenizer,
               SessionOptions options, const PrefixCacheOptions& prefixes,
               std::shared_ptr<DraftModel> draft_model)
    : model_(std::move(model)),
      tokenizer_(std::move(tokenizer)),
      n_batch_(batch_rows(*model_, options)),
      session_(std::make_shared<Session>(model_, with_rows(std::move(options), n_batch_))),
      draft_model_(std::move(draft_model)),
      monitor_(std::make_shared<EngineMonitor>()),
      runner_(monitor_, *session_, *tokenizer_, chunk(*session_, n_batch_), prefixes),
      n_ctx_(session_->options().n_ctx),
      n_vocab_(model_->config.n_vocab),
      limit_(runner_.scheduler().limit()),
      endless_(session_->can_roll(0)) {}

Engine::~Engine() { close(); }

void Engine::check_process() const {
  if (!forked()) return;
  throw std::runtime_error(
      "the model was opened by another process, which this one was forked from: open it again");
}

// Requires an engine that is not closed.
std::shared_ptr<Drafter> Engine::make_drafter() const {
  if (session_->options().max_drafts == 0) return nullptr;
  if (draft_model_ != nullptr) return draft_model_->drafter();
  return std::make_shared<LookupDrafter>();
}

Engine::Handle Engine::submit(Request request, bool begin) {
  check_process();
  const auto generation = std::make_shared<Generation>(monitor_, std::move(request));
  Generation& g = *generation;
  {
    const Lock lock(monitor_->mutex);
    if (closed_) throw std::runtime_error("the engine is closed");
    if (g.request_.drafts && g.request_.drafter == nullptr) g.request_.drafter = make_drafter();
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
    if (!generation->submitted_ && !generation->ended()) runner_.queue().add(generation);
  }
  monitor_->changed.notify_all();
}

void Engine::check(Request& request, Generation& generation) const {
  request.sampling.check(n_vocab_);
  require(!request.max_tokens || *request.max_tokens >= kEndless, "max_tokens is ",
          request.max_tokens.value_or(0), ", expected 0 or more, or -1 (endless)");
  const Family& family = *session_->model().config.family;
  require(request.pooling != Pooling::none || !family.encoder, family.architecture,
          " is an encoder, which gives embeddings or scores of texts but generates none");
  constexpr const char* kNoCache = " is an encoder, which has no cache: leave out ";
  require(request.policies.empty() || !family.encoder, family.architecture, kNoCache,
          "the budget and the policy");
  require((request.protect.first == 0 && request.protect.last == 0) || !family.encoder,
          family.architecture, kNoCache, "protect");
  require(request.trace == nullptr || !family.encoder, family.architecture, kNoCache,
          "the record of kept tokens");
  require(request.pooling != Pooling::rank || session_->model().config.n_labels > 0,
          "pooling is 'rank', but the model scores no texts: its file has no cls.output");
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
  size_t end = 0;
  for (const TokenSpan& reply : request.replies) {
    require(end <= reply.begin && reply.begin <= reply.end && reply.end <= n, "a reply is [",
            reply.begin, ", ", reply.end, "), expected it between ", end, " and ", n);
    end = reply.end;
  }
  generation.progress_.n_prompt = static_cast<int32_t>(n - n_read);
  const bool has_own_policies = !request.policies.empty();
  if (request.protect.first > 0 || request.protect.last > 0) {
    const SessionOptions& options = session_->options();
    request.policies = protected_policies(
        model_->config, request.policies.empty() ? options.policies : request.policies,
        request.protect, static_cast<int32_t>(n));
  }
  if (n > static_cast<size_t>(n_ctx_) && !has_own_policies && !endless_) {
    throw ContextFull(concat("the prompt has ", n, " tokens, ", limit_));
  }
  const bool endless = request.max_tokens == kEndless;
  generation.max_new_tokens_ = endless ? SIZE_MAX : request.max_tokens.value_or(n_ctx_);
}

// Throws on the computing thread, which would wait for itself.
void Engine::check_may_wait(const Lock& /*held*/) const {
  if (!runner_.is_leader()) return;
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
  return runner_.is_leader();
}

std::optional<Piece> Engine::next(const Handle& generation, const Between& between) {
  check_process();
  Generation& g = *generation;
  Lock lock(monitor_->mutex);
  check_may_wait(lock);
  if (!g.submitted_ && !g.ended()) {
    if (closed_) throw std::runtime_error("the engine is closed");
    runner_.queue().add(generation);
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
      if (engine.runner_.queue().remove(generation)) g.submitted_ = false;
    }
  };
  ++g.n_waiting_;
  const Waiting waiting{*this, generation, g, lock};
  g.reader_ = std::this_thread::get_id();
  while (true) {
    if (!g.pieces_.empty()) return g.take_piece();
    if (g.error_ != nullptr) std::rethrow_exception(std::exchange(g.error_, nullptr));
    if (g.ended()) return std::nullopt;
    if (runner_.is_computing()) {
      monitor_->changed.wait_for(lock, kPollInterval);
    } else if (!run_step(lock)) {
      monitor_->changed.wait_for(lock, kRetry);
    }
    runner_.drop_ended(lock);
    if (!g.pieces_.empty() || g.ended()) continue;
    lock.unlock();
    between();
    lock.lock();
  }
}

// One step, unless a thread waits to save.
bool Engine::run_step(Lock& lock) { return !closed_ && n_saving_ == 0 && runner_.run(lock); }

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
  if (!g.pieces_.empty() || g.ended() || (is_new && g.admitted_)) Generation::notify(generation);
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
  runner_.cancel(generation);
  monitor_->changed.notify_all();
  runner_.drop_ended(lock);
}

void Engine::wait_ended(const Handle& generation) {
  if (forked()) return;
  Lock lock(monitor_->mutex);
  if (!generation->ended()) check_may_wait(lock);
  monitor_->changed.wait(lock, [&] { return generation->ended(); });
}

Engine::Handle Engine::last() const {
  check_process();
  const Lock lock(monitor_->mutex);
  return runner_.last();
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
  return runner_.last_sequence();
}

std::vector<std::byte> Engine::save(const Handle& generation, std::string note,
                                    const Between& between) {
  check_process();
  Generation& g = *generation;
  Lock lock(monitor_->mutex);
  await_step(lock, between);
  if (closed_) throw std::runtime_error("the engine is closed");
  if (!g.began_)
    throw std::runtime_error("nothing has been read yet: ask for a piece of the text first");
  SnapshotText text;
  text.note = std::move(note);
  if (g.sampler_ != nullptr) text.random_state = g.sampler_->random_state();
  if (g.ended()) text.logits = g.logits_;
  text.held_text = g.text_.substr(g.text_read_) + g.detokenizer_.held_text();
  text.held_bytes = g.detokenizer_.held_bytes();
  std::vector<std::byte> bytes;
  runner_.between_steps(lock, [&] { bytes = runner_.scheduler().save(g, std::move(text)); });
  return bytes;
}

Engine::Handle Engine::restore(std::span<const std::byte> snapshot, const Between& between) {
  check_process();
  const auto generation = std::make_shared<Generation>(monitor_, Request{.max_tokens = 0});
  Handle before;  // destroyed without the lock
  Lock lock(monitor_->mutex);
  await_step(lock, between);
  if (closed_) throw std::runtime_error("the engine is closed");
  runner_.between_steps(lock, [&] { runner_.scheduler().restore(generation, snapshot); });
  generation->n_input_tokens_ = generation->tokens_.size();
  generation->submitted_ = generation->began_ = true;
  generation->progress_.finish = Finish::length;  // it has no callbacks to release
  before = runner_.replace_last(generation);
  return generation;
}

// Waits until no thread computes. No step starts before the caller is done with the lock.
void Engine::await_step(Lock& lock, const Between& between) {
  check_may_wait(lock);
  struct Saving {
    Engine& engine;
    Lock& lock;
    ~Saving() {
      if (!lock.owns_lock()) lock.lock();
      --engine.n_saving_;
    }
  };
  ++n_saving_;
  const Saving saving{*this, lock};
  while (runner_.is_computing()) {
    monitor_->changed.wait_for(lock, kPollInterval);
    lock.unlock();
    between();
    lock.lock();
  }
}

void Engine::set_max_queue(int32_t n) {
  if (forked()) return;
  const Lock lock(monitor_->mutex);
  runner_.queue().set_max_eager(n);
  monitor_->changed.notify_all();
}

void Engine::cancel_all(std::optional<int32_t> only_group) {
  if (forked()) return;
  Lock lock(monitor_->mutex);
  runner_.cancel_all(lock, only_group);
}

void Engine::cancel_group(int32_t group) {
  cancel_all(group);
  if (forked()) return;
  Lock lock(monitor_->mutex);
  runner_.drop_ended(lock);
}

void Engine::close() noexcept {
  if (forked()) {
    // Leaks what other threads used at the time of the fork; it cannot be destroyed.
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
  std::thread worker;  // joined by only one of the threads that call close()
  {
    const Lock lock(monitor_->mutex);
    if (!runner_.is_leader()) worker.swap(worker_);
  }
  if (worker.get_id() == std::this_thread::get_id()) {  // a callback held the last reference
    worker.detach();
    worker_closed_it_ = true;
  } else if (worker.joinable()) {
    worker.join();
  }
  Lock lock(monitor_->mutex);
  monitor_->changed.wait(lock, [this] { return !runner_.is_computing(); });
  std::pair freed(std::move(session_), std::move(draft_model_));
  // Their members may wait for a thread that waits for the lock.
  runner_.between_steps(lock, [&] {
    runner_.close();
    freed = {};
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
  EngineStats stats = runner_.stats();
  if (draft_model_ != nullptr)
    stats.draft_bytes = static_cast<int64_t>(draft_model_->cache_bytes());
  return stats;
}

bool Engine::try_step(Lock& lock) noexcept {
  try {
    return run_step(lock);
  } catch (const std::bad_alloc&) {  // for the lists of a step that has not started
    return false;
  }
}

// Computes eager generations while no other thread computes, on the engine's thread.
void Engine::work() {
  const auto monitor = monitor_;
  Lock lock(monitor->mutex);
  while (true) {
    runner_.drop_ended(lock);  // these may hold the last reference to the engine
    if (worker_closed_it_ || closed_) return;
    if (runner_.is_computing() || !runner_.has_eager()) {
      monitor->changed.wait(lock);
      continue;
    }
    const bool stepped = try_step(lock);
    if (worker_closed_it_) return;
    if (!stepped) monitor->changed.wait_for(lock, kRetry);
  }
}

}  // namespace h2o
