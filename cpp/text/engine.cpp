#include "text/engine.h"

#include <algorithm>
#include <iterator>
#include <ranges>
#include <utility>

#include "core/error.h"

namespace h2o {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPatience{100};  // then a thread that waits looks at signals
constexpr milliseconds kRetry{10};      // where nothing can be computed now
constexpr milliseconds kIdle{100};      // then a stream that another thread left may be parked

SessionOptions with_rows(SessionOptions options) {
  require(options.n_batch > 0 && options.n_batch <= 65536, "[session] n_batch is ", options.n_batch,
          ", it must be 1 to 65536");
  const int32_t n = std::clamp(std::max(options.n_sequences, options.max_sequences), 1, 65536);
  options.n_batch += n - 1;  // a chunk of one, and a token of each of the others
  return options;
}

thread_local bool closed_here = false;  // has an engine's own thread closed it?

bool wanted(bool eager, int32_t n_waiting) { return eager || n_waiting > 0; }

template <class List>
bool take_out(List& list, const std::shared_ptr<Generation>& generation) {
  const auto found = std::ranges::find(list, generation);
  if (found == list.end()) return false;
  list.erase(found);
  return true;
}

}  // namespace

Engine::Engine(std::shared_ptr<Model> model, std::shared_ptr<const Tokenizer> tokenizer,
               SessionOptions options)
    : model_(std::move(model)),
      tokenizer_(std::move(tokenizer)),
      n_batch_(options.n_batch),
      session_(std::in_place, model_, with_rows(std::move(options))),
      scheduler_(std::in_place, *session_, *tokenizer_,
                 std::min(n_batch_, session_->options().n_ctx)),
      n_sequences_(session_->options().max_sequences),
      n_ctx_(session_->options().n_ctx),
      n_vocab_(model_->config.n_vocab),
      limit_(scheduler_->limit()),
      endless_(session_->can_roll(0)),
      monitor_(std::make_shared<EngineMonitor>()) {}

Engine::~Engine() { close(); }

Engine::Handle Engine::submit(Request request) {
  const auto generation = std::make_shared<Generation>(monitor_, std::move(request));
  Generation& g = *generation;
  {
    const Lock lock(monitor_->mutex);
    if (closed_) throw std::runtime_error("the engine is closed");
  }
  check(g.request_, g);
  if (!g.request_.eager) return generation;  // it begins when its first piece is asked for
  const Lock lock(monitor_->mutex);
  if (closed_) throw std::runtime_error("the engine is closed");
  if (!worker_.joinable()) worker_ = std::thread([this] { work(); });
  enqueue(generation);
  monitor_->changed.notify_all();
  return generation;
}

void Engine::check(Request& request, Generation& generation) const {
  Sampler(request.sampling, 1);  // throws for what is out of range
  require(!request.max_tokens || *request.max_tokens >= 0, "[request] max_tokens is ",
          request.max_tokens.value_or(0), ", expected 0 or more");
  size_t n_read = 0;
  if (!request.after.bytes.empty()) {
    SnapshotText text = open_snapshot(request.after.bytes).text;
    n_read = text.n_read;
    generation.tokens_ = std::move(text.tokens);
    generation.logits_ = std::move(text.logits);
    generation.random_state_ = std::move(text.random_state);
    request.held = text.held_text + text.held_bytes + request.held;
  }
  const bool empty = request.prompt.empty() && generation.tokens_.size() == n_read;
  require(!empty || !generation.logits_.empty() || request.max_tokens == 0, "the prompt is empty",
          n_read > 0 ? ", and the snapshot has no token left to go on from" : "");
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
  const size_t n = generation.n_given_ = generation.tokens_.size();
  generation.progress_.n_prompt = static_cast<int32_t>(n - n_read);
  const auto n_ctx = static_cast<size_t>(n_ctx_);
  if (n > n_ctx && request.policies.empty() && !endless_) {
    throw ContextFull(text("the prompt has ", n, " tokens, ", limit_));
  }
  if (request.ends_at_context && !request.max_tokens) {  // the last one is not fed
    request.max_tokens = static_cast<int32_t>(n <= n_ctx ? n_ctx - n + 1 : n_ctx);
  }
}

void Engine::enqueue(const Handle& generation) {
  const bool eager = generation->request_.eager;
  if (eager && (n_queued_ >= max_queue_ || !outside_.empty())) {
    outside_.push_back(generation);
    generation->admitted_ = false;
  } else {
    waiting_.push_back(generation);
    n_queued_ += eager;
  }
  generation->submitted_ = true;
}

std::optional<Piece> Engine::next(const Handle& generation, const Between& between) {
  Generation& g = *generation;
  Lock lock(monitor_->mutex);
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
      // Interrupted in the queue: it gets in line again when it is wanted again.
      if (--g.n_waiting_ > 0 || g.request_.eager) return;
      if (take_out(engine.waiting_, generation)) g.submitted_ = false;
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
      monitor_->changed.wait_for(lock, kPatience);
    } else if (!lead(lock)) {
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
  Generation& g = *generation;
  const Lock lock(monitor_->mutex);
  if (!g.pieces_.empty()) return g.take_all();
  if (g.error_ != nullptr) std::rethrow_exception(std::exchange(g.error_, nullptr));
  return std::nullopt;
}

void Engine::subscribe(const Handle& generation, const std::shared_ptr<Mailbox>& mailbox) {
  const Lock lock(monitor_->mutex);
  Generation& g = *generation;
  // One that it is known to already has heard of the admission.
  const bool is_new = g.mailbox_.lock() != mailbox;
  g.mailbox_ = mailbox;
  if (!g.pieces_.empty() || g.ended() || (is_new && g.admitted_)) post(generation);
}

bool Engine::wait_admitted(const Handle& generation, double seconds, const Between& between) {
  using Clock = std::chrono::steady_clock;
  const auto limit = Clock::now() + std::chrono::duration<double>(std::max(seconds, 0.0));
  Lock lock(monitor_->mutex);
  while (!generation->admitted_ && !generation->ended()) {
    const std::chrono::duration<double> left = limit - Clock::now();
    if (seconds >= 0 && left.count() <= 0) return false;
    monitor_->changed.wait_for(
        lock, seconds < 0 ? kPatience : std::min(kPatience, std::chrono::ceil<milliseconds>(left)));
    lock.unlock();
    between();
    lock.lock();
  }
  return generation->admitted_;
}

void Engine::cancel(const Handle& generation) {
  Lock lock(monitor_->mutex);
  end_cancelled(generation);
  monitor_->changed.notify_all();
  drop_ended(lock);
}

void Engine::wait_ended(const Handle& generation) {
  Lock lock(monitor_->mutex);
  monitor_->changed.wait(lock, [&] { return generation->ended(); });
}

void Engine::end_cancelled(const Handle& generation) {
  Generation& g = *generation;
  if (g.ended()) return;
  const bool waits = take_out(waiting_, generation);
  if (waits) n_queued_ -= g.request_.eager;
  const bool begun = g.submitted_ && !waits && !take_out(outside_, generation);
  if (begun && leading_) {
    g.cancelled_ = true;  // it may be in the step that is being computed
    return;
  }
  if (take_out(active_, generation)) scheduler_->release(g);
  finish(generation, Finish::cancelled);
  admit();
  post(generation);
}

std::vector<std::byte> Engine::save(const Handle& generation, std::string note,
                                    const Between& between) {
  Generation& g = *generation;
  Lock lock(monitor_->mutex);
  await_step(lock, between);
  if (closed_) throw std::runtime_error("the engine is closed");
  if (!g.began_) throw std::runtime_error("nothing has been read yet");
  SnapshotText text;
  text.note = std::move(note);
  if (g.sampler_ != nullptr) text.random_state = g.sampler_->random_state();
  if (g.ended()) text.logits = g.logits_;
  text.held_text = g.text_.substr(g.text_read_) + g.detokenizer_.held_text();
  text.held_bytes = g.detokenizer_.held_bytes();
  std::vector<std::byte> bytes;
  between_steps(lock, [&] { bytes = scheduler_->save(g, std::move(text)); });
  return bytes;
}

Engine::Handle Engine::restore(std::span<const std::byte> snapshot, const Between& between) {
  const auto generation = std::make_shared<Generation>(monitor_, Request{.max_tokens = 0});
  Lock lock(monitor_->mutex);
  await_step(lock, between);
  if (closed_) throw std::runtime_error("the engine is closed");
  between_steps(lock, [&] { scheduler_->restore(generation, snapshot); });
  generation->n_given_ = generation->tokens_.size();
  generation->submitted_ = generation->began_ = true;
  generation->progress_.finish = Finish::length;  // it has no callbacks to drop
  last_ = generation;
  last_sequence_ = generation->sequence_;
  return generation;
}

// Calls `body` with the scheduler, without the lock and while nobody computes.
void Engine::between_steps(Lock& lock, const std::function<void()>& body) {
  leading_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  end_lead();
  drop_ended(lock);
  if (error != nullptr) std::rethrow_exception(error);
}

void Engine::await_step(Lock& lock, const Between& between) {
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
  while (leading_) {
    monitor_->changed.wait_for(lock, kPatience);
    lock.unlock();
    between();
    lock.lock();
  }
}

Engine::Handle Engine::last() const {
  const Lock lock(monitor_->mutex);
  return last_;
}

int32_t Engine::last_sequence() const {
  const Lock lock(monitor_->mutex);
  return last_sequence_;
}

void Engine::set_max_queue(int32_t n) {
  const Lock lock(monitor_->mutex);
  max_queue_ = n;
  admit();
  monitor_->changed.notify_all();
}

void Engine::cancel_all(bool only_eager) {
  std::vector<Handle> all;  // destroyed without the lock
  Lock lock(monitor_->mutex);
  const auto collect_from = [&](const auto& list) {
    std::ranges::copy_if(list, std::back_inserter(all), [&](const Handle& generation) {
      return generation->request_.eager || !only_eager;
    });
  };
  collect_from(active_);
  collect_from(beginning_);
  collect_from(waiting_);
  collect_from(outside_);
  for (const Handle& generation : all) end_cancelled(generation);
  monitor_->changed.notify_all();
  monitor_->changed.wait(
      lock, [&] { return std::ranges::all_of(all, [](const Handle& g) { return g->ended(); }); });
}

void Engine::close() {
  std::thread worker;  // of several threads that close, one joins it
  {
    const Lock lock(monitor_->mutex);
    closed_ = true;
    worker.swap(worker_);
  }
  cancel_all(false);
  if (worker.get_id() == std::this_thread::get_id()) {  // the last to hold it was a callback
    worker.detach();
    closed_here = true;
  } else if (worker.joinable()) {
    worker.join();
  }
  Lock lock(monitor_->mutex);
  monitor_->changed.wait(lock, [this] { return !leading_; });
  scheduler_.reset();
  session_.reset();
  model_.reset();
  drop_ended(lock);
}

bool Engine::closed() const {
  const Lock lock(monitor_->mutex);
  return closed_;
}

EngineStats Engine::stats() const {
  const Lock lock(monitor_->mutex);
  return {n_sequences_,
          static_cast<int32_t>(active_.size()),
          n_queued_ + static_cast<int32_t>(outside_.size()),
          prompt_tokens_,
          generated_tokens_,
          evictions_};
}

// One step, if there is anything to compute. What fails ends the generations that it is about.
bool Engine::lead(Lock& lock) {
  if (closed_ || n_saving_ > 0) return false;
  const Work work = collect();
  if (work.generations.empty()) return false;
  leading_ = true;
  std::vector<StepOutput> outputs;
  std::exception_ptr error, not_parked;
  try {
    make_space(work);
    lock.unlock();
    not_parked = park(work.parking);
    outputs = scheduler_->step(work.generations);
  } catch (...) {  // no memory for a step's lists
    error = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  beginning_.clear();
  if (error != nullptr) {
    for (const Handle& generation : work.generations) fail(generation, error);
  }
  // From the last, as those that could not begin go back to the front of the queue.
  for (StepOutput& output : std::views::reverse(outputs)) {
    try {
      if (output.deferred) {
        if (not_parked != nullptr) std::rethrow_exception(not_parked);
        put_back(output.generation);
      }
    } catch (...) {
      output.deferred = false;
      fail(output.generation, std::current_exception());
    }
  }
  for (StepOutput& output : outputs) {
    if (output.deferred || output.generation->ended()) continue;
    try {
      publish(output);
    } catch (...) {
      fail(output.generation, std::current_exception());
    }
  }
  evictions_ = scheduler_->evictions();
  end_lead();
  return true;
}

// Those that could not be copied keep their sequences; says why.
std::exception_ptr Engine::park(std::span<const Handle> generations) {
  try {
    for (const Handle& generation : generations) scheduler_->park(*generation);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// So that a step, once computed, is not lost for want of memory.
void Engine::make_space(const Work& work) {
  active_.reserve(active_.size() + work.generations.size());
  ended_.reserve(ended_.size() + work.generations.size());
  for (const Handle& generation : work.generations) {
    std::vector<int32_t>& tokens = generation->tokens_;
    if (tokens.size() == tokens.capacity()) tokens.reserve(tokens.size() + tokens.size() / 2 + 16);
  }
}

// It could not get a sequence.
void Engine::put_back(const Handle& generation) {
  Generation& g = *generation;
  if (g.began_) return;  // it stays parked
  if (!wanted(g.request_.eager, g.n_waiting_) && !g.cancelled_) {
    // Its thread was interrupted meanwhile.
    g.submitted_ = false;
    return;
  }
  waiting_.push_front(generation);
  n_queued_ += g.request_.eager;
}

void Engine::fail(const Handle& generation, const std::exception_ptr& error) {
  scheduler_->release(*generation);
  take_out(active_, generation);
  generation->error_ = error;
  finish(generation, Finish::cancelled);
  post(generation);
}

// Nobody computes any more: what was cancelled meanwhile ends.
void Engine::end_lead() {
  leading_ = false;
  const auto end_those_of = [this](const auto& list) {
    for (size_t i = list.size(); i-- > 0;) {
      const Handle generation = list[i];  // which is then taken out of the list
      if (generation->cancelled_) end_cancelled(generation);
    }
  };
  end_those_of(active_);
  end_those_of(waiting_);
  admit();
  monitor_->changed.notify_all();
}

Engine::Work Engine::collect() {
  Work work;
  const auto has_sequence = [](const Generation& g) { return g.sequence_ >= 0; };
  // Those that are wanted and parked, or wait for a sequence, if there is one for them.
  // All memory first, or those taken out of the queue might be lost.
  work.generations.reserve(active_.size() + waiting_.size());
  work.parking.reserve(active_.size());
  beginning_.reserve(active_.size() + waiting_.size());
  int32_t n_free = scheduler_->max_sequences() - scheduler_->n_active();
  const auto take = [&](const Handle& generation) {
    if (n_free == 0 && !make_room(*generation, work)) return false;
    n_free = std::max(n_free - 1, 0);
    beginning_.push_back(generation);
    return true;
  };
  for (const Handle& generation : active_) {
    const Generation& g = *generation;
    if (!has_sequence(g) && wanted(g.request_.eager, g.n_waiting_)) take(generation);
  }
  while (!waiting_.empty() && take(waiting_.front())) {
    n_queued_ -= waiting_.front()->request_.eager;
    waiting_.pop_front();
  }
  bool any = !beginning_.empty();
  for (const Handle& generation : active_) {
    const Generation& g = *generation;
    if (!has_sequence(g) || std::ranges::find(work.parking, generation) != work.parking.end()) {
      continue;
    }
    const bool is_wanted = wanted(g.request_.eager, g.n_waiting_);
    if (is_wanted || g.pieces_.empty()) work.generations.push_back(generation);
    any = any || is_wanted;
  }
  if (!any) return {};
  work.generations.insert(work.generations.end(), beginning_.begin(), beginning_.end());
  return work;
}

// Parks a generation that nobody waits for: one that the same thread reads, as it cannot go on
// meanwhile, or one that was left for a while.
bool Engine::make_room(const Generation& wanted_one, Work& work) {
  const auto now = std::chrono::steady_clock::now();
  for (const Handle& generation : active_) {
    const Generation& g = *generation;
    if (g.sequence_ < 0 || wanted(g.request_.eager, g.n_waiting_)) continue;
    if (std::ranges::find(work.parking, generation) != work.parking.end()) continue;
    const bool same_thread = !wanted_one.request_.eager && g.reader_ == wanted_one.reader_;
    if (same_thread || now - g.left_at_ > kIdle) {
      work.parking.push_back(generation);
      return true;
    }
  }
  return false;
}

void Engine::publish(StepOutput& output) {
  Generation& g = *output.generation;
  if (output.started) {
    active_.push_back(output.generation);
    g.began_ = true;
    g.progress_.n_prompt = output.n_prompt;
    last_ = output.generation;
  }
  if (g.sequence_ >= 0) last_sequence_ = g.sequence_;
  Progress& progress = g.progress_;
  (progress.n_generated > 0 ? progress.decode_seconds : progress.prompt_seconds) += output.seconds;
  prompt_tokens_ += output.n_read;
  if (output.token >= 0) {
    g.tokens_.push_back(output.token);
    ++progress.n_generated;
    ++generated_tokens_;
  }
  if (!output.piece.empty()) {
    g.text_ += output.piece;
    g.pieces_.push_back({g.text_.size(), progress.n_generated});
  }
  progress.finish_message = std::move(output.finish_message);
  if (output.error != nullptr) g.error_ = output.error;
  if (output.finish != Finish::none) {
    finish(output.generation, output.finish);
    take_out(active_, output.generation);
  }
  if (!output.piece.empty() || g.ended()) post(output.generation);
}

void Engine::finish(const Handle& generation, Finish finish) {
  generation->progress_.finish = finish;
  generation->admitted_ = true;
  try {
    ended_.push_back(generation);
  } catch (const std::bad_alloc&) {  // its callbacks stay as long as it does
  }
}

// Drops what ended requests hold of the caller. Without the lock: that may call the engine, or wait
// for a thread that does.
void Engine::drop_ended(Lock& lock) {
  if (ended_.empty()) return;
  std::vector<Handle> ended = std::exchange(ended_, {});
  lock.unlock();
  for (const Handle& generation : ended) {
    Request& request = generation->request_;
    request.after = {};
    request.follows = nullptr;
    request.prompt_logits = nullptr;
    request.constraint = nullptr;
  }
  ended.clear();
  lock.lock();
}

// Lets those outside into the queue, as many as it has room for.
void Engine::admit() noexcept {
  while (!outside_.empty() && n_queued_ < max_queue_) {
    const Handle generation = outside_.front();
    try {
      waiting_.push_back(generation);
    } catch (const std::bad_alloc&) {
      return;  // after the next step
    }
    outside_.pop_front();
    generation->admitted_ = true;
    ++n_queued_;
    post(generation);
  }
}

void Engine::post(const Handle& generation) const noexcept {
  const std::shared_ptr<Mailbox> mailbox = generation->mailbox_.lock();
  if (mailbox == nullptr) return;
  try {
    mailbox->post(generation);
  } catch (const std::bad_alloc&) {  // the text is there, but this news is lost
  }
}

bool Engine::wants_worker() const {
  const auto eager = [](const Handle& generation) { return generation->request_.eager; };
  return std::ranges::any_of(active_, eager) || std::ranges::any_of(waiting_, eager);
}

bool Engine::leads(Lock& lock) noexcept {
  try {
    return lead(lock);
  } catch (const std::bad_alloc&) {  // for the lists of a step that has not begun
    return false;
  }
}

// The engine's own thread: computes eager generations while nobody else does.
void Engine::work() {
  const auto monitor = monitor_;
  Lock lock(monitor->mutex);
  while (!closed_) {
    drop_ended(lock);
    if (closed_here) return;  // the engine may be gone
    if (closed_) return;
    if (leading_ || !wants_worker()) {
      monitor_->changed.wait(lock);
    } else if (!leads(lock)) {
      monitor_->changed.wait_for(lock, kRetry);
    }
  }
}

}  // namespace h2o
