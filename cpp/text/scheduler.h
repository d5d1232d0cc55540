// Scheduler: continuous batching. Selects the tokens of the next forward pass and processes its
// results.
//
// A step decodes one token for each generation whose prompt has been processed, and processes
// chunks of prompts in order of arrival, as many as fit in the batch (at least one). Chunks have
// n_batch tokens, except for the last of a prompt; one that does not fit is postponed, not
// shortened: chunk ends determine what is evicted, so they must not depend on other generations.
// Since rows of a batch are independent, each generation gets bit for bit the tokens that it would
// get alone.
//
// Not thread-safe.
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

// What a step did for a generation.
struct StepOutput {
  std::shared_ptr<Generation> generation;
  int32_t n_prompt = 0;  // prompt tokens to process, set when it starts
  int32_t n_cached = 0;  // prompt tokens found in the prefix cache
  int32_t n_read = 0;    // prompt tokens processed by this step
  int32_t token = -1;    // generated; -1: none
  std::string piece = {};
  Finish finish = Finish::none;
  std::string finish_message = {};
  std::exception_ptr error = nullptr;
  double seconds = 0;
  bool started = false;   // it has a sequence now
  bool deferred = false;  // no sequence was available
};

class Scheduler {
 public:
  // n_batch: chunk size of prompts.
  Scheduler(Session& session, const Tokenizer& tokenizer, int32_t n_batch,
            const PrefixCacheOptions& prefixes = {});

  // The maximum number of generations with a sequence.
  int32_t max_sequences() const { return max_sequences_; }
  int32_t n_active() const;

  // One forward pass for generations that have a sequence or can get one. An error ends the
  // generation it affects; its processed tokens can still be followed.
  std::vector<StepOutput> step(const std::vector<std::shared_ptr<Generation>>& generations);

  // Copies its sequence to host memory, and frees it for other generations.
  void park(Generation& generation);

  // Frees its sequence, which can be saved or followed until it is reused.
  void release(Generation& generation);

  // Frees its sequence, whose content is unknown.
  void forget(Generation& generation);

  // Loads a snapshot (or an empty sequence) for a generation that has ended. Throws FormatError or
  // std::bad_alloc without changing anything.
  void restore(const std::shared_ptr<Generation>& generation, std::span<const std::byte> snapshot);

  // `text` has everything except the tokens. Throws std::runtime_error if the cache no longer holds
  // the sequence.
  std::vector<std::byte> save(const Generation& generation, SnapshotText text) const;

  // Evicted tokens since the start, in the layer that keeps most.
  int64_t evictions() const { return evictions_; }

  // Size of the cached states.
  size_t prefix_bytes() const { return prefixes_.bytes(); }

  // Describes why a sequence ends at the context limit.
  const std::string& limit() const { return limit_; }

 private:
  struct Slot {
    std::weak_ptr<Generation> owner;  // last user
    bool active = false;
    bool own_policies = false;  // its policies differ from the session's
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
  // The results of a pass, in the form that copies least.
  struct Results {
    std::vector<std::span<const float>> logits;  // [n_rows], empty where not needed; or none
    std::vector<int32_t> picks;                  // [n_rows] sampled tokens, or -1; or none
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
  const std::string limit_;  // built once: the session is locked while tokens are sampled
  int32_t max_sequences_;
  std::vector<Slot> slots_;
  PrefixCache prefixes_;
  std::vector<std::vector<uint32_t>> masks_;  // of constrained rows
  uint64_t clock_ = 0;
  int64_t evictions_ = 0;
};

}  // namespace h2o
