#include "text/step_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace h2o {
namespace {

// A generation that was not read for this long may be parked.
constexpr std::chrono::milliseconds kIdleTime{100};

}  // namespace

StepRunner::StepRunner(std::shared_ptr<EngineMonitor> monitor, Session& session,
                       const Tokenizer& tokenizer, int32_t n_batch,
                       const PrefixCacheOptions& prefixes)
    : monitor_(std::move(monitor)),
      scheduler_(std::in_place, session, tokenizer, n_batch, prefixes),
      stats_{.n_sequences = session.options().max_sequences,
             .n_allocated = session.options().n_sequences} {}

bool StepRunner::run(Lock& lock) {
  Work work = collect();
  if (work.generations.empty()) return false;
  Handle last = last_;  // until the end of this function
  begin_step();
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
  // Goes in reverse, because deferred generations return to the front of the queue.
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
  stats_.evictions = scheduler_->evictions();
  stats_.prefix_bytes = static_cast<int64_t>(scheduler_->prefix_bytes());
  stats_.n_allocated = scheduler_->n_sequences();
  end_step();
  // Releases them without the lock, as drop_ended() does.
  lock.unlock();
  work = {};
  outputs.clear();
  last = nullptr;
  error = not_parked = nullptr;
  lock.lock();
  return true;
}

StepRunner::Work StepRunner::collect() {
  Work work;
  const auto has_sequence = [](const Generation& g) { return g.sequence_ >= 0; };
  // Selects generations without a sequence that are wanted, as long as sequences are available.
  // Reserves all memory first: generations taken from the queue must not be lost.
  work.generations.reserve(active_.size() + queue_.n_admitted());
  work.parking.reserve(active_.size());
  beginning_.reserve(active_.size() + queue_.n_admitted());
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
  while (queue_.has_admitted() && take(queue_.front())) queue_.pop_front();
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
bool StepRunner::park_idle(const Generation& wanted_one, Work& work) {
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

// Allocates before computing, so that no result is lost if memory runs out.
void StepRunner::reserve_memory(const Work& work) {
  active_.reserve(active_.size() + work.generations.size());
  for (const Handle& generation : work.generations) {
    std::vector<int32_t>& tokens = generation->tokens_;
    const size_t needed = tokens.size() + 1 + scheduler_->max_drafts();
    if (needed > tokens.capacity()) tokens.reserve(needed + tokens.size() / 2 + 16);
  }
}

// Generations that could not be saved keep their sequences; returns the error.
std::exception_ptr StepRunner::park(std::span<const Handle> generations) {
  try {
    for (const Handle& generation : generations) scheduler_->park(*generation);
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

// Puts back a generation that could not get a sequence.
void StepRunner::requeue(const Handle& generation) {
  Generation& g = *generation;
  if (g.began_) return;  // it stays parked
  if (!g.wanted() && !g.cancelled_) {
    // Its thread was interrupted in the meantime.
    g.submitted_ = false;
    return;
  }
  queue_.push_front(generation);
}

void StepRunner::publish(StepOutput& output) {
  Generation& g = *output.generation;
  if (output.started) {
    active_.push_back(output.generation);
    g.began_ = true;
    g.progress_.n_prompt = output.n_prompt;
    g.progress_.n_cached = output.n_cached;
    stats_.cached_tokens += output.n_cached;
    last_ = output.generation;
  }
  if (g.sequence_ >= 0) last_sequence_ = g.sequence_;
  Progress& progress = g.progress_;
  (progress.n_generated > 0 ? progress.decode_seconds : progress.prompt_seconds) += output.seconds;
  stats_.prompt_tokens += output.n_read;
  progress.n_read += output.n_read;
  const size_t n_unread = g.pieces_.size();
  for (const Written& written : output.accepted) publish(g, written.token, written.piece);
  publish(g, output.token, output.piece);
  const auto n_accepted = static_cast<int32_t>(output.accepted.size());
  progress.n_drafted += output.n_drafts;
  progress.n_accepted += n_accepted;
  stats_.drafted_tokens += output.n_drafts;
  stats_.accepted_tokens += n_accepted;
  progress.forgotten = std::move(output.forgotten);
  progress.finish_message = std::move(output.finish_message);
  if (output.error != nullptr) g.error_ = output.error;
  if (output.finish != Finish::none) {
    progress.stop_string = g.detokenizer_.stop_string();
    finish(output.generation, output.finish);
    std::erase(active_, output.generation);
  }
  if (g.pieces_.size() > n_unread || g.ended()) Generation::notify(output.generation);
}

void StepRunner::publish(Generation& g, int32_t token, const std::string& piece) {
  if (token >= 0) {
    g.tokens_.push_back(token);
    ++g.progress_.n_generated;
    ++stats_.generated_tokens;
  }
  if (piece.empty()) return;
  g.text_ += piece;
  g.pieces_.push_back({g.text_.size(), g.progress_.n_generated});
}

void StepRunner::fail(const Handle& generation, const std::exception_ptr& error) {
  scheduler_->release(*generation);
  std::erase(active_, generation);
  generation->error_ = error;
  finish(generation, Finish::cancelled);
  Generation::notify(generation);
}

void StepRunner::finish(const Handle& generation, Finish finish) {
  generation->progress_.finish = finish;
  generation->admitted_ = true;
  generation->ended_before_ = std::exchange(ended_, generation);  // needs no memory
}

void StepRunner::begin_step() {
  is_computing_ = true;
  leader_ = std::this_thread::get_id();
}

// Ends the generations that were cancelled during the step.
void StepRunner::end_step() {
  is_computing_ = false;
  for (size_t i = active_.size(); i-- > 0;) {
    // Keeps it alive when it is removed from the list. NOLINTNEXTLINE(performance-*)
    const Handle generation = active_[i];
    if (generation->cancelled_) cancel(generation);
  }
  const auto is_cancelled = [](const Handle& generation) { return generation->cancelled_; };
  while (const Handle generation = queue_.find(is_cancelled)) cancel(generation);
  queue_.admit();
  monitor_->changed.notify_all();
}

void StepRunner::between_steps(Lock& lock, const std::function<void()>& body) {
  begin_step();
  lock.unlock();
  std::exception_ptr error;
  try {
    body();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  end_step();
  drop_ended(lock);
  if (error != nullptr) std::rethrow_exception(error);
}

void StepRunner::cancel(const Handle& generation) {
  Generation& g = *generation;
  if (g.ended()) return;
  const bool has_begun = g.submitted_ && !queue_.remove(generation);
  if (has_begun && is_computing_) {
    g.cancelled_ = true;  // it may be part of the current step
    return;
  }
  if (std::erase(active_, generation) > 0) scheduler_->release(g);
  finish(generation, Finish::cancelled);
  queue_.admit();
  Generation::notify(generation);
}

void StepRunner::cancel_all(Lock& lock, std::optional<int32_t> only_group) {
  const auto belongs = [&](const Handle& generation) {
    return !only_group || generation->request_.group == *only_group;
  };
  const auto is_running = [&](const Handle& g) { return belongs(g) && !g->cancelled_; };
  const auto cancel_in = [&](const std::vector<Handle>& list) {
    while (true) {
      const auto found = std::ranges::find_if(list, is_running);
      if (found == list.end()) return;
      cancel(Handle(*found));  // removes it from the list, or sets cancelled_
    }
  };
  while (const Handle generation = queue_.find(is_running)) cancel(generation);
  cancel_in(active_);
  cancel_in(beginning_);
  monitor_->changed.notify_all();
  if (is_leader()) return;
  const auto ends = [&](const Handle& g) { return belongs(g) && g->cancelled_; };
  monitor_->changed.wait(lock, [&] {  // for the current step
    return std::ranges::none_of(active_, ends) && std::ranges::none_of(beginning_, ends);
  });
}

void StepRunner::drop_ended(Lock& lock) {
  if (ended_ == nullptr) return;
  Handle ended = std::exchange(ended_, nullptr);
  lock.unlock();
  while (ended != nullptr) {
    Request& request = ended->request_;
    request.after = {};
    request.follows = nullptr;
    request.prompt_logits = nullptr;
    request.constraint = nullptr;
    request.constraint_ready = nullptr;
    request.drafter = nullptr;
    ended = std::exchange(ended->ended_before_, nullptr);
  }
  lock.lock();
}

bool StepRunner::has_eager() const {
  const auto is_eager = [](const Handle& generation) { return generation->request_.eager; };
  return std::ranges::any_of(active_, is_eager) || queue_.n_admitted_eager() > 0;
}

StepRunner::Handle StepRunner::replace_last(const Handle& generation) {
  last_sequence_ = generation->sequence_;
  return std::exchange(last_, generation);
}

EngineStats StepRunner::stats() const {
  EngineStats stats = stats_;
  stats.n_active = static_cast<int32_t>(active_.size());
  stats.n_waiting = queue_.n_admitted_eager() + queue_.n_unadmitted();
  return stats;
}

}  // namespace h2o
