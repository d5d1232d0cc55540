// Engine: running steps: selecting generations, publishing results, admission.
#include <algorithm>
#include <utility>

#include "text/engine.h"

namespace h2o {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kIdleTime{
    100};  // a generation that was not read for this long may be parked

}  // namespace

thread_local bool Engine::worker_closed_it_ = false;

// Runs one step if there is anything to compute. An error ends the generations it affects.
bool Engine::run_step(Lock& lock) {
  if (closed_ || n_saving_ > 0) return false;
  Work work = collect();
  if (work.generations.empty()) return false;
  Handle last = last_;  // until the end of this function
  leading_ = true;
  leader_ = std::this_thread::get_id();
  std::vector<StepOutput> outputs;
  std::exception_ptr error, not_parked;
  try {
    reserve_memory(work);
    lock.unlock();
    not_parked = park(work.parking);
    outputs = scheduler_->step(work.generations);
  } catch (...) {  // out of memory for the step's lists
    error = std::current_exception();
  }
  if (!lock.owns_lock()) lock.lock();
  beginning_.clear();
  if (error != nullptr) {
    for (const Handle& generation : work.generations) fail(generation, error);
  }
  // In reverse, because deferred generations return to the front of the queue.
  for (auto it = outputs.rbegin(); it != outputs.rend(); ++it) {
    StepOutput& output = *it;
    try {
      if (output.deferred) {
        if (not_parked != nullptr) std::rethrow_exception(not_parked);
        requeue(output.generation);
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
  prefix_bytes_ = static_cast<int64_t>(scheduler_->prefix_bytes());
  n_allocated_ = session_->options().n_sequences;
  end_step();
  // Unlocked, as in drop_ended().
  lock.unlock();
  work = {};
  outputs.clear();
  last = nullptr;
  error = not_parked = nullptr;
  lock.lock();
  return true;
}

// Generations that could not be saved keep their sequences; returns the error.
std::exception_ptr Engine::park(std::span<const Handle> generations) {
  try {
    for (const Handle& generation : generations) scheduler_->park(*generation);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// Allocate before computing, so that no result is lost if memory runs out.
void Engine::reserve_memory(const Work& work) {
  active_.reserve(active_.size() + work.generations.size());
  for (const Handle& generation : work.generations) {
    std::vector<int32_t>& tokens = generation->tokens_;
    if (tokens.size() == tokens.capacity()) tokens.reserve(tokens.size() + tokens.size() / 2 + 16);
  }
}

// For a generation that could not get a sequence.
void Engine::requeue(const Handle& generation) {
  Generation& g = *generation;
  if (g.began_) return;  // it stays parked
  if (!g.wanted() && !g.cancelled_) {
    // Its thread was interrupted in the meantime.
    g.submitted_ = false;
    return;
  }
  waiting_.push_front(generation);
  n_queued_ += g.request_.eager;
}

void Engine::fail(const Handle& generation, const std::exception_ptr& error) {
  scheduler_->release(*generation);
  remove(active_, generation);
  generation->error_ = error;
  finish(generation, Finish::cancelled);
  post(generation);
}

// After a step: ends generations that were cancelled during it.
void Engine::end_step() {
  leading_ = false;
  const auto end_those_of = [this](const auto& list) {
    for (size_t i = list.size(); i-- > 0;) {
      // Keeps it alive when it is removed from the list. NOLINTNEXTLINE(performance-*)
      const Handle generation = list[i];
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
  // Select generations without a sequence that are wanted, as long as sequences are available.
  // Reserve all memory first: generations taken from the queue must not be lost.
  work.generations.reserve(active_.size() + waiting_.size());
  work.parking.reserve(active_.size());
  beginning_.reserve(active_.size() + waiting_.size());
  int32_t n_free = scheduler_->max_sequences() - scheduler_->n_active();
  const auto take = [&](const Handle& generation) {
    if (n_free == 0 && !park_idle(*generation, work)) return false;
    n_free = std::max(n_free - 1, 0);
    beginning_.push_back(generation);
    return true;
  };
  for (const Handle& generation : active_) {
    const Generation& g = *generation;
    if (!has_sequence(g) && g.wanted()) take(generation);
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
    const bool is_wanted = g.wanted();
    if (is_wanted || g.pieces_.empty()) work.generations.push_back(generation);
    any = any || is_wanted;
  }
  if (!any) return {};
  work.generations.insert(work.generations.end(), beginning_.begin(), beginning_.end());
  return work;
}

// Parks a generation that no thread waits for: one that the same thread reads, since it cannot wait
// for both, or one that has not been read for a while.
bool Engine::park_idle(const Generation& wanted_one, Work& work) {
  const auto now = std::chrono::steady_clock::now();
  for (const Handle& generation : active_) {
    const Generation& g = *generation;
    if (g.sequence_ < 0 || g.wanted()) continue;
    if (std::ranges::find(work.parking, generation) != work.parking.end()) continue;
    const bool same_thread = !wanted_one.request_.eager && g.reader_ == wanted_one.reader_;
    if (same_thread || now - g.last_read_at_ > kIdleTime) {
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
    g.progress_.n_cached = output.n_cached;
    cached_tokens_ += output.n_cached;
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
    progress.stop_string = g.detokenizer_.stop_string();
    finish(output.generation, output.finish);
    remove(active_, output.generation);
  }
  if (!output.piece.empty() || g.ended()) post(output.generation);
}

void Engine::finish(const Handle& generation, Finish finish) {
  generation->progress_.finish = finish;
  generation->admitted_ = true;
  generation->ended_before_ = std::exchange(ended_, generation);  // needs no memory
}

// Releases the callbacks and data of ended requests. Unlocked, because their destructors may call
// the engine or wait for a thread that does.
void Engine::drop_ended(Lock& lock) {
  if (ended_ == nullptr) return;
  Handle ended = std::exchange(ended_, nullptr);
  lock.unlock();
  while (ended != nullptr) {
    Request& request = ended->request_;
    request.after = {};
    request.follows = nullptr;
    request.prompt_logits = nullptr;
    request.constraint = nullptr;
    ended = std::exchange(ended->ended_before_, nullptr);
  }
  lock.lock();
}

// Admits waiting generations while the queue has space.
void Engine::admit() noexcept {
  while (!unadmitted_.empty() && n_queued_ < max_queue_) {
    const Handle generation = unadmitted_.front();
    try {
      waiting_.push_back(generation);
    } catch (const std::bad_alloc&) {
      return;  // after the next step
    }
    unadmitted_.pop_front();
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
  } catch (const std::bad_alloc&) {  // the text is kept, only the notification is lost
  }
}

bool Engine::wants_worker() const {
  const auto eager = [](const Handle& generation) { return generation->request_.eager; };
  return std::ranges::any_of(active_, eager) || std::ranges::any_of(waiting_, eager);
}

bool Engine::try_step(Lock& lock) noexcept {
  try {
    return run_step(lock);
  } catch (const std::bad_alloc&) {  // for the lists of a step that has not started
    return false;
  }
}

// The engine's thread: computes eager generations while no other thread computes.
void Engine::work() {
  const auto monitor = monitor_;
  Lock lock(monitor->mutex);
  while (true) {
    drop_ended(lock);  // these may hold the last reference to the engine
    if (worker_closed_it_ || closed_) return;
    if (leading_ || !wants_worker()) {
      monitor->changed.wait(lock);
      continue;
    }
    const bool stepped = try_step(lock);
    if (worker_closed_it_) return;
    if (!stepped) monitor->changed.wait_for(lock, kRetry);
  }
}

}  // namespace h2o
