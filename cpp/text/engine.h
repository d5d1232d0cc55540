// Engine: from prompts to texts, for any number of threads and event loops at once. The only driver
// of a session.
//
// Leader and followers: a thread that waits for a piece and finds nobody computing takes the lead
// and computes a step for all generations that are wanted; the others wait for what it brings. So
// streams of one thread, of many threads, of tasks and of other languages go on together. Eager
// generations have a thread of the engine that leads when nobody else does.
//
// A generation that is not eager is paused when nobody waits for it. When sequences are short, a
// paused one is parked: its sequence is copied to the host's memory, and back when it is wanted.
//
// A callback of a request, called by the thread that computes, may look, submit and cancel. What
// would wait for the step that it is part of throws std::runtime_error.
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
  int32_t n_sequences;  // the most at once
  int32_t n_active;     // generations that have a sequence
  int32_t n_waiting;    // in the queue
  int64_t prompt_tokens;
  int64_t generated_tokens;
  int64_t evictions;      // in the layer that keeps most
  int64_t cached_tokens;  // of prompts, that the prefix cache had
  int64_t prefix_bytes;   // of the prefix cache
};

class Engine {
 public:
  using Handle = std::shared_ptr<Generation>;

  // Called between steps and every tenth of a second by a thread that waits, without any lock. What
  // it throws ends the wait.
  using Between = std::function<void()>;

  // It belongs to the process that made it. In a forked child, which has none of its threads and
  // perhaps a lock that one of them held, calls throw std::runtime_error, and those that end
  // something do nothing.

  // options.n_batch: prompt tokens of one sequence that are read at a time. Throws InvalidArgument,
  // OutOfMemory.
  Engine(std::shared_ptr<Model> model, std::shared_ptr<const Tokenizer> tokenizer,
         SessionOptions options, const PrefixCacheOptions& prefixes = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Takes a request; an eager one begins as soon as there is a sequence for it. Throws
  // InvalidArgument for what can be seen to be wrong now, ContextFull for a prompt that is too
  // long.
  // `begin`: false for an eager one that begin() begins, with others.
  Handle submit(Request request, bool begin = true);

  // No step comes between their beginnings: prompts that begin alike are read once.
  void begin(std::span<const Handle> generations);

  // Waits for the next piece; none when it has ended. Throws what has ended it, once.
  std::optional<Piece> next(const Handle& generation, const Between& between);

  // All text that is ready, without waiting; none if there is nothing new. Throws as next() does.
  std::optional<Piece> poll(const Handle& generation);

  // From now on the mailbox hears of its pieces, its admission and its end; what has happened
  // already is posted at once. The mailbox is the caller's to keep.
  void subscribe(const Handle& generation, const std::shared_ptr<Mailbox>& mailbox);

  // Waits until the queue has room for an eager generation; false when `seconds` are over
  // (negative: never).
  bool wait_admitted(const Handle& generation, double seconds, const Between& between);

  // Ends it, now or after the step that is being computed.
  void cancel(const Handle& generation);

  // Waits until it has ended; only for one that was cancelled.
  void wait_ended(const Handle& generation);

  // A snapshot of what has been computed; what has not been taken of the text is held in it.
  // `note`: JSON, or "". Throws std::runtime_error if the cache does not hold it any more.
  std::vector<std::byte> save(const Handle& generation, std::string note, const Between& between);

  // A generation that has ended and left in a sequence what a snapshot holds, or nothing where
  // there is none: to be followed. Throws FormatError, and has then changed nothing.
  Handle restore(std::span<const std::byte> snapshot, const Between& between);

  // The generation that began last; nullptr before the first.
  Handle last() const;
  int32_t last_sequence() const;  // where it is or was

  // Requests that may wait for a sequence; more wait to be admitted.
  void set_max_queue(int32_t n);

  // Ends all generations whose requests are of this group, after the step that is being computed.
  // Does not wait for that in a callback.
  void cancel_group(int32_t group) { cancel_all(group); }

  // Ends all generations, and frees the model and the caches. Nothing can be submitted any more.
  // In a callback it does not wait, and frees nothing: the destructor does, which must not run
  // there.
  void close();
  bool closed() const;

  // Is this called in a callback, by the thread that computes?
  bool in_callback() const;
  // Throws std::runtime_error if so: for those who wait for a mailbox.
  void check_may_wait() const;

  EngineStats stats() const;
  // Not after close().
  const Session& session() const { return *session_; }
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  int32_t n_batch() const { return n_batch_; }
  bool endless() const { return endless_; }

 private:
  using Lock = std::unique_lock<std::mutex>;

  bool forked() const { return process_id() != process_; }
  void check_process() const;
  static constexpr std::chrono::milliseconds kRetry{10};  // where nothing can be computed now
  static thread_local bool worker_closed_it_;             // its own thread has closed an engine

  template <class List>
  static bool take_out(List& list, const Handle& generation) {
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
  bool lead(Lock& lock);
  bool leads(Lock& lock) noexcept;  // lead(); false where there is no memory for it
  bool is_leader() const { return leading_ && leader_ == std::this_thread::get_id(); }
  void check_may_wait(const Lock& lock) const;
  void make_space(const Work& work);
  std::exception_ptr park(std::span<const Handle> generations);
  void end_lead();
  void put_back(const Handle& generation);
  void fail(const Handle& generation, const std::exception_ptr& error);
  Work collect();
  bool make_room(const Generation& wanted, Work& work);
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
  std::optional<Session> session_;
  std::optional<Scheduler> scheduler_;  // of the thread that leads

  const int32_t n_sequences_;  // the most at once
  const int32_t n_ctx_, n_vocab_;
  const std::string limit_;  // why a text ends
  const bool endless_;       // can a text go on past n_ctx?

  // Guarded by the monitor's mutex.
  const std::shared_ptr<EngineMonitor> monitor_;
  bool leading_ = false;    // a thread computes
  std::thread::id leader_;  // which one
  int32_t n_saving_ = 0;    // threads that wait to save; no step begins before them
  bool closed_ = false;
  std::vector<Handle> active_;     // that began, in order of arrival
  std::vector<Handle> beginning_;  // that get a sequence in the step that is being computed
  std::deque<Handle> waiting_;     // for a sequence
  std::deque<Handle> outside_;     // to be admitted
  std::vector<Handle> ended_;      // whose callbacks are still there
  int32_t max_queue_ = 1 << 30;
  int32_t n_queued_ = 0;  // eager ones in waiting_
  Handle last_;
  int32_t last_sequence_ = 0;
  int64_t prompt_tokens_ = 0, generated_tokens_ = 0, evictions_ = 0, cached_tokens_ = 0;
  int64_t prefix_bytes_ = 0;
  std::thread worker_;
};

}  // namespace h2o
