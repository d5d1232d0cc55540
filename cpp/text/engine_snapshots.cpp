// Engine: saving and restoring sequences, between steps.
#include <utility>

#include "text/engine.h"

namespace h2o {

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
  between_steps(lock, [&] { bytes = scheduler_->save(g, std::move(text)); });
  return bytes;
}

Engine::Handle Engine::restore(std::span<const std::byte> snapshot, const Between& between) {
  check_process();
  const auto generation = std::make_shared<Generation>(monitor_, Request{.max_tokens = 0});
  Handle before;  // destroyed without the lock
  Lock lock(monitor_->mutex);
  await_step(lock, between);
  if (closed_) throw std::runtime_error("the engine is closed");
  between_steps(lock, [&] { scheduler_->restore(generation, snapshot); });
  generation->n_input_tokens_ = generation->tokens_.size();
  generation->submitted_ = generation->began_ = true;
  generation->progress_.finish = Finish::length;  // it has no callbacks to release
  before = std::exchange(last_, generation);
  last_sequence_ = generation->sequence_;
  return generation;
}

// Calls `body` without the lock, while no other thread computes.
void Engine::between_steps(Lock& lock, const std::function<void()>& body) {
  leading_ = true;
  leader_ = std::this_thread::get_id();
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
  while (leading_) {
    monitor_->changed.wait_for(lock, kPollInterval);
    lock.unlock();
    between();
    lock.lock();
  }
}

}  // namespace h2o
