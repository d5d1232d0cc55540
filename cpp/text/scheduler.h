// Scheduler: continuous batching. Which tokens of which sequences make up the next forward pass,
// and what becomes of its results.
//
// A step decodes a token of every generation that it is given whose prompt has been read. Beside
// them it reads chunks of prompts, in the order of arrival, as many as the batch has room for; one
// always fits. Chunks are n_batch tokens long, but for the last of a prompt, and one that does not
// fit is read later, not shortened: where a prompt is cut decides what is evicted, so it must not
// depend on the other generations. As the results of a row do not depend on the other rows either,
// each generation gets the tokens that it gets alone, bit for bit.
//
// For one thread at a time.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/session.h"
#include "text/generation.h"
#include "text/prefix_cache.h"
#include "text/tokenizer/tokenizer.h"

namespace h2o {

// What a step has done for a generation.
struct StepOutput {
  std::shared_ptr<Generation> generation;
  int32_t n_prompt = 0;  // prompt tokens to be read, told when it starts
  int32_t n_cached = 0;  // and those before them that the prefix cache had
  int32_t n_read = 0;    // of them, by this step
  int32_t token = -1;    // generated; -1: none
  std::string piece = {};
  Finish finish = Finish::none;
  std::string finish_message = {};
  std::exception_ptr error = nullptr;
  double seconds = 0;
  bool started = false;   // it has a sequence now
  bool deferred = false;  // it could not get one
};

class Scheduler {
 public:
  // n_batch: prompt tokens of a sequence that are read at a time.
  Scheduler(Session& session, const Tokenizer& tokenizer, int32_t n_batch,
            const PrefixCacheOptions& prefixes = {});

  // The most generations that can have sequences at once.
  int32_t max_sequences() const { return max_sequences_; }
  int32_t n_active() const;

  // One forward pass for generations that have a sequence or, from now on, get one. What fails ends
  // a generation with its error; what it has read can still be followed.
  std::vector<StepOutput> step(const std::vector<std::shared_ptr<Generation>>& generations);

  // Copies its sequence to the host's memory, so that another one can use it.
  void park(Generation& generation);

  // Gives its sequence away; it can still be saved or followed until that is used again.
  void release(Generation& generation);

  // Gives its sequence away where nobody knows what that holds.
  void forget(Generation& generation);

  // Gives a generation that has ended what a snapshot holds, or an empty sequence if there is none.
  // Throws FormatError, std::bad_alloc, and has then changed nothing.
  void restore(const std::shared_ptr<Generation>& generation, std::span<const std::byte> snapshot);

  // A snapshot; `text` has everything but the tokens. Throws InvalidArgument if the cache does not
  // hold it any more.
  std::vector<std::byte> save(const Generation& generation, SnapshotText text) const;

  // Tokens evicted since the beginning, in the layer that keeps most.
  int64_t evictions() const { return evictions_; }

  // Of the states that are kept.
  size_t prefix_bytes() const { return prefixes_.bytes(); }

  // Why a text ends.
  const std::string& limit() const { return limit_; }

 private:
  struct Slot {
    std::weak_ptr<Generation> owner;  // who used it last
    bool active = false;
    bool own_policies = false;  // its sequence has others than the session
    uint64_t used_at = 0;
  };
  struct Row {
    StepOutput* output;
    int32_t sequence;
    std::span<const int32_t> part;
  };

  int32_t followed_slot(const Generation& generation) const;
  int32_t take_slot();
  bool grow();
  void vacate(int32_t sequence);
  void start(StepOutput& output, std::span<const StepOutput> outputs);
  std::span<const KvPolicy> policies_of(const Generation& generation) const;
  static bool needs_every_row(const Generation& generation);
  static bool needs_logits(const Generation& generation);
  bool has_read_all(const Row& row) const;
  static uint64_t prefix_scope(const Session& session, int32_t n_batch, const std::string& build);
  bool load_prefix(Generation& generation, const FoundPrefix& prefix, int32_t sequence);
  bool may_begin_in_prefix(const Generation& generation) const;
  void plan_prefixes(Generation& generation, int32_t sequence, size_t n_cached);
  bool waits_for_prefix(const Generation& generation, size_t n_cached,
                        std::span<const StepOutput> outputs);
  void save_prefixes(Generation& generation, std::span<const float> logits) noexcept;
  void save_end(const Generation& generation) noexcept;
  void save_prefix(const Generation& generation, PrefixKind kind, std::span<const float> logits);
  void prepare(Generation& generation, bool goes_on, StepOutput& output);
  void compute(std::vector<StepOutput>& outputs);
  std::vector<Row> next_rows(std::vector<StepOutput>& outputs);
  // A step of the session, by the way that copies least.
  struct Results {
    std::vector<std::span<const float>> logits;  // [n_rows], empty where nobody needs them; or none
    std::vector<int32_t> picks;                  // [n_rows] tokens chosen by then, or -1; or none
  };
  void forward(std::span<const Row> rows);
  void pass(std::span<const Row> rows, std::span<const Input> inputs, std::span<float> temperatures,
            Results& results);
  void select(std::span<const Row> rows, std::span<const Input> inputs,
              std::span<float> temperatures, Results& results);
  void score(const Row& row);
  void pool(Generation& g, const Row& row);
  void choose(std::span<const Row> rows, const Results& results);
  void choose_one(StepOutput& output, std::span<const float> logits, int32_t pick, bool has_room);
  static void keep_logits(StepOutput& output, std::span<const float> logits) noexcept;
  void count_evictions(Generation& generation);

  Session& session_;
  const Tokenizer& tokenizer_;
  const int32_t n_batch_;
  const std::string limit_;  // made once: the session is locked while tokens are chosen
  int32_t max_sequences_;
  std::vector<Slot> slots_;
  PrefixCache prefixes_;
  std::vector<std::vector<uint32_t>> masks_;  // of constrained rows
  uint64_t clock_ = 0;
  int64_t evictions_ = 0;
};

}  // namespace h2o
