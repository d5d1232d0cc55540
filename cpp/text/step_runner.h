// StepRunner: runs the steps of an engine. It selects the generations of a step, computes them and
// publishes their results.
//
// At most one thread computes at a time. Member functions require the lock of the engine's monitor;
// those that are given the lock release it while they compute.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "text/admission_queue.h"
#include "text/generation.h"
#include "text/scheduler.h"

namespace h2o {

struct EngineStats {
  int32_t n_sequences = 0;  // maximum at once
  int32_t n_active = 0;     // generations with a sequence
  int32_t n_waiting = 0;    // queued generations
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  int64_t drafted_tokens = 0;   // tokens proposed by drafters
  int64_t accepted_tokens = 0;  // of these, those that were right
  int64_t draft_bytes = 0;      // allocated for the cache that proposes them, if a model does
  int64_t evictions = 0;        // in the layer that keeps most
  int64_t cached_tokens = 0;    // prompt tokens found in the prefix cache
  int64_t prefix_bytes = 0;     // of the prefix cache
  int32_t n_allocated = 0;      // sequences whose caches are allocated
};

class StepRunner {
 public:
  using Handle = std::shared_ptr<Generation>;
  using Lock = std::unique_lock<std::mutex>;

  // n_batch: chunk size of prompts. `session` and `tokenizer` must outlive the scheduler.
  StepRunner(std::shared_ptr<EngineMonitor> monitor, Session& session, const Tokenizer& tokenizer,
             int32_t n_batch, const PrefixCacheOptions& prefixes);

  AdmissionQueue& queue() { return queue_; }

  // Computes one step, if there is anything to compute, and returns whether there was. An error
  // ends the generations it affects. Throws std::bad_alloc before the step.
  bool run(Lock& lock);

  // Calls `body` without the lock, while no other thread computes.
  void between_steps(Lock& lock, const std::function<void()>& body);

  // Is a thread computing? Is it this one?
  bool is_computing() const { return is_computing_; }
  bool is_leader() const { return is_computing_ && leader_ == std::this_thread::get_id(); }

  // Has any generation started or been admitted that is computed without a waiting thread?
  bool has_eager() const;

  // Ends a generation, now or after the current step.
  void cancel(const Handle& generation);

  // Cancels the generations of a group, or all, and waits for the current step, unless this thread
  // computes it.
  void cancel_all(Lock& lock, std::optional<int32_t> only_group);

  // Releases the callbacks and data of ended requests, without the lock, because their destructors
  // may call the engine or wait for a thread that does.
  void drop_ended(Lock& lock);

  // The most recently started generation, or nullptr, and the current or last sequence of it.
  const Handle& last() const { return last_; }
  int32_t last_sequence() const { return last_sequence_; }

  // Makes an ended generation with a sequence the last one; returns the one before, which should be
  // released without the lock.
  Handle replace_last(const Handle& generation);

  EngineStats stats() const;

  // May be used in between_steps() only.
  Scheduler& scheduler() { return *scheduler_; }

  // Frees the scheduler, in between_steps(), when all generations have ended.
  void close() { scheduler_.reset(); }

 private:
  struct Work {
    std::vector<Handle> generations;
    std::vector<Handle> parking;
  };

  Work collect();
  bool park_idle(const Generation& wanted, Work& work);
  void reserve_memory(const Work& work);
  std::exception_ptr park(std::span<const Handle> generations);
  void begin_step();
  void end_step();
  void requeue(const Handle& generation);
  void publish(StepOutput& output);
  void publish(Generation& generation, int32_t token, const std::string& piece);
  void fail(const Handle& generation, const std::exception_ptr& error);
  void finish(const Handle& generation, Finish finish);

  const std::shared_ptr<EngineMonitor> monitor_;
  std::optional<Scheduler> scheduler_;  // used by the leading thread
  AdmissionQueue queue_;
  bool is_computing_ = false;
  std::thread::id leader_;         // the thread that is computing
  std::vector<Handle> active_;     // started, in order of arrival
  std::vector<Handle> beginning_;  // get a sequence in the current step
  Handle ended_;                   // the last to end; see Generation::ended_before_
  Handle last_;
  int32_t last_sequence_ = 0;
  EngineStats stats_;  // n_active and n_waiting are not up to date
};

}  // namespace h2o
