// Engine: generates text for any number of requests, threads and event loops at once. The only
// driver of a session.
//
// Leader/followers: a thread that waits for a piece while no thread is computing becomes the leader
// and computes a step for all wanted generations; the others wait for its results. Streams of one
// thread, many threads, async tasks and other languages thus progress together. For eager
// generations a thread of the engine leads when no other thread does.
//
// A generation that is not eager is paused while no thread waits for it. When sequences run short,
// a paused generation is parked: its sequence is copied to host memory, and back when it is wanted
// again.
//
// Callbacks of a request run on the computing thread. They may query, submit and cancel; calls that
// would wait for the current step throw std::runtime_error.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/process.h"
#include "text/generation.h"
#include "text/scheduler.h"

namespace h2o {

struct EngineStats {
  int32_t n_sequences;  // maximum at once
  int32_t n_active;     // generations with a sequence
  int32_t n_waiting;    // queued generations
  int64_t prompt_tokens;
  int64_t generated_tokens;
  int64_t evictions;      // in the layer that keeps most
  int64_t cached_tokens;  // prompt tokens found in the prefix cache
  int64_t prefix_bytes;   // of the prefix cache
  int32_t n_allocated;    // sequences whose caches are allocated
};

class Engine {
 public:
  using Handle = std::shared_ptr<Generation>;

  // Called without locks by a waiting thread, between steps and every 100 ms. An exception ends the
  // wait.
  using Between = std::function<void()>;

  // An engine belongs to the process that created it. In a forked child, where its threads are
  // missing and its locks may be held, calls throw std::runtime_error, and close() and cancel() do
  // nothing.
  //
  // options.n_batch: chunk size of prompts. Throws InvalidArgument, OutOfMemory.
  Engine(std::shared_ptr<Model> model, std::shared_ptr<const Tokenizer> tokenizer,
         SessionOptions options, const PrefixCacheOptions& prefixes = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Adds a request; an eager one starts as soon as a sequence is available. Throws InvalidArgument
  // for invalid options, ContextFull for a prompt that is too long.
  // `begin`: false: an eager request waits for begin().
  Handle submit(Request request, bool begin = true);

  // Starts several eager generations in the same step, so that common prefixes are processed once.
  void begin(std::span<const Handle> generations);

  // Waits for the next piece; nullopt after the end. Throws the error of a failed generation, once.
  std::optional<Piece> next(const Handle& generation, const Between& between);

  // All text that is ready, without waiting; nullopt if there is none. Throws as next() does.
  std::optional<Piece> poll(const Handle& generation);

  // Posts the generation to the mailbox on each piece, on admission and on its end, including past
  // events. The caller owns the mailbox.
  void subscribe(const Handle& generation, const std::shared_ptr<Mailbox>& mailbox);

  // Waits until an eager generation is admitted to the queue; false after `seconds` (negative: no
  // timeout).
  bool wait_admitted(const Handle& generation, double seconds, const Between& between);

  // Ends it, now or after the current step.
  void cancel(const Handle& generation);

  // Waits until a cancelled generation has ended.
  void wait_ended(const Handle& generation);

  // A snapshot of the sequence, including text not yet returned. `note`: JSON, or "". Throws
  // std::runtime_error if the cache no longer holds the sequence.
  std::vector<std::byte> save(const Handle& generation, std::string note, const Between& between);

  // Loads a snapshot (or nothing, if empty) into a sequence; returns an ended generation to be
  // followed. Throws FormatError without changing anything.
  Handle restore(std::span<const std::byte> snapshot, const Between& between);

  // The most recently started generation; nullptr if none.
  Handle last() const;
  int32_t last_sequence() const;  // its current or last sequence

  // Limits the queue of requests that wait for a sequence; others wait for admission.
  void set_max_queue(int32_t n);

  // Cancels all generations of a group, after the current step. Does not wait in a callback.
  void cancel_group(int32_t group);

  // Cancels all generations and frees the model and the caches, without allocating memory; submit()
  // throws from then on. In a callback it neither waits nor frees: the destructor does, which must
  // not run in a callback.
  void close() noexcept;
  bool closed() const;

  // Is this called from a callback, on the computing thread?
  bool in_callback() const;
  // Throws std::runtime_error if so. Call before waiting for a mailbox.
  void check_may_wait() const;

  EngineStats stats() const;
  // Not after close().
  const Session& session() const { return *session_; }
  // May be called during close(), and outlives the engine. Throws std::runtime_error after close().
  std::shared_ptr<Session> shared_session() const;
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  int32_t n_batch() const { return n_batch_; }
  bool endless() const { return endless_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  bool forked() const { return process_id() != process_; }
  void check_process() const;
  // How often a waiting thread calls `between`.
  static constexpr std::chrono::milliseconds kPollInterval{100};
  static constexpr std::chrono::milliseconds kRetry{10};  // delay before trying again
  // set if the engine's thread itself destroyed its engine
  static thread_local bool worker_closed_it_;

  template <class List>
  static bool remove(List& list, const Handle& generation) {
    const auto found = std::find(list.begin(), list.end(), generation);
    if (found == list.end()) return false;
    list.erase(found);
    return true;
  }

  struct Work {
    std::vector<Handle> generations;
    std::vector<Handle> parking;
  };

  void check(Request& request, Generation& generation) const;
  void enqueue(const Handle& generation);
  bool run_step(Lock& lock);
  bool try_step(Lock& lock) noexcept;  // run_step(); false if out of memory
  bool is_leader() const { return leading_ && leader_ == std::this_thread::get_id(); }
  void check_may_wait(const Lock& lock) const;
  void reserve_memory(const Work& work);
  std::exception_ptr park(std::span<const Handle> generations);
  void end_step();
  void requeue(const Handle& generation);
  void fail(const Handle& generation, const std::exception_ptr& error);
  Work collect();
  bool park_idle(const Generation& wanted, Work& work);
  void publish(StepOutput& output);
  void finish(const Handle& generation, Finish finish);
  void drop_ended(Lock& lock);
  void cancel_all(std::optional<int32_t> only_group);
  void end_cancelled(const Handle& generation);
  void admit() noexcept;
  void post(const Handle& generation) const noexcept;
  bool wants_worker() const;
  void work();
  void await_step(Lock& lock, const Between& between);
  void between_steps(Lock& lock, const std::function<void()>& body);

  const int64_t process_ = process_id();
  std::shared_ptr<Model> model_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  const int32_t n_batch_;
  std::shared_ptr<Session> session_;
  std::optional<Scheduler> scheduler_;  // used by the leading thread

  const int32_t n_sequences_;  // maximum at once
  const int32_t n_ctx_, n_vocab_;
  const std::string limit_;  // describes why a sequence ends at the context limit
  const bool endless_;       // can sequences continue past n_ctx?

  // Guarded by the monitor's mutex.
  const std::shared_ptr<EngineMonitor> monitor_;
  bool leading_ = false;    // a thread is computing
  std::thread::id leader_;  // which one
  int32_t n_saving_ = 0;    // threads waiting to save; no step starts before them
  bool closed_ = false;
  std::vector<Handle> active_;     // started, in order of arrival
  std::vector<Handle> beginning_;  // get a sequence in the current step
  std::deque<Handle> waiting_;     // for a sequence
  std::deque<Handle> unadmitted_;  // waiting for admission
  Handle ended_;                   // the last to end; see Generation::ended_before_
  int32_t max_queue_ = 1 << 30;
  int32_t n_queued_ = 0;  // eager generations in waiting_
  Handle last_;
  int32_t last_sequence_ = 0;
  int64_t prompt_tokens_ = 0, generated_tokens_ = 0, evictions_ = 0, cached_tokens_ = 0;
  int64_t prefix_bytes_ = 0;
  int32_t n_allocated_;
  std::thread worker_;
};

}  // namespace h2o
