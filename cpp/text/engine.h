// Engine: generates text for any number of requests, threads and event loops at once. The only
// driver of its session.
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

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/process.h"
#include "text/draft_model.h"
#include "text/generation.h"
#include "text/step_runner.h"

namespace h2o {

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
  // options.n_batch: chunk size of prompts. draft_model: proposes drafts; nullptr: earlier text
  // does. Throws InvalidArgument, OutOfMemory.
  Engine(std::shared_ptr<Model> model, std::shared_ptr<const Tokenizer> tokenizer,
         SessionOptions options, const PrefixCacheOptions& prefixes = {},
         std::shared_ptr<DraftModel> draft_model = nullptr);
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
  // Must not be called after close().
  const Session& session() const { return *session_; }
  // May be called during close(), and outlives the engine. Throws std::runtime_error after close().
  std::shared_ptr<Session> shared_session() const;
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  int32_t n_batch() const { return n_batch_; }
  bool endless() const { return endless_; }

 private:
  using Lock = StepRunner::Lock;

  bool forked() const { return process_id() != process_; }
  void check_process() const;
  // How often a waiting thread calls `between`.
  static constexpr std::chrono::milliseconds kPollInterval{100};
  static constexpr std::chrono::milliseconds kRetry{10};  // delay before trying again
  // Is set if the engine's thread itself destroyed its engine.
  static thread_local bool worker_closed_it_;

  void check(Request& request, Generation& generation) const;
  std::shared_ptr<Drafter> make_drafter() const;
  void check_may_wait(const Lock& lock) const;
  bool run_step(Lock& lock);
  bool try_step(Lock& lock) noexcept;  // run_step(); false if out of memory
  void await_step(Lock& lock, const Between& between);
  void cancel_all(std::optional<int32_t> only_group);
  void work();

  const int64_t process_ = process_id();
  std::shared_ptr<Model> model_;
  const std::shared_ptr<const Tokenizer> tokenizer_;
  const int32_t n_batch_;
  std::shared_ptr<Session> session_;
  std::shared_ptr<DraftModel> draft_model_;

  // Its mutex guards the members below that are not const.
  const std::shared_ptr<EngineMonitor> monitor_;
  StepRunner runner_;
  const int32_t n_ctx_, n_vocab_;
  const std::string limit_;  // describes why a sequence ends at the context limit
  const bool endless_;       // can sequences continue past n_ctx?
  int32_t n_saving_ = 0;     // threads waiting to save; no step starts before them
  bool closed_ = false;
  std::thread worker_;
};

}  // namespace h2o
