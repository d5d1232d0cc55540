// Scheduler: continuous batching. Selects the tokens of the next forward pass and processes its
// results.
//
// A step decodes one token for each generation whose prompt has been processed, or more if its
// drafter has proposed them, and processes chunks of prompts in order of arrival, as many as fit in
// the batch (at least one). Chunks have n_batch tokens, except for the last of a prompt or before a
// reply in it; one that does not fit is postponed, not shortened: chunk ends determine what is
// evicted, so they must not depend on other generations. Since rows of a batch are independent,
// each generation gets bit for bit the tokens that it would get alone.
//
// It is not thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/session.h"
#include "text/draft_cost.h"
#include "text/pooler.h"
#include "text/prefix_planner.h"
#include "text/row_sampler.h"
#include "text/slot_table.h"
#include "text/step.h"
#include "text/tokenizer/tokenizer.h"

namespace h2o {

class Scheduler {
 public:
  // n_batch: chunk size of prompts.
  Scheduler(Session& session, const Tokenizer& tokenizer, int32_t n_batch,
            const PrefixCacheOptions& prefixes = {});

  // The maximum number of generations with a sequence.
  int32_t max_sequences() const { return slots_.max_sequences(); }
  int32_t n_active() const { return slots_.n_active(); }
  int32_t n_sequences() const { return session_.options().n_sequences; }  // allocated
  int32_t max_drafts() const { return session_.options().max_drafts; }    // of a step

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
  const std::string& limit() const { return sampler_.limit(); }

 private:
  void start(StepOutput& output, std::span<const StepOutput> outputs);
  void prepare(Generation& generation, bool follows, StepOutput& output);
  int32_t followed_sequence(const Generation& generation) const;
  std::span<const KvPolicy> policies(const Generation& generation) const;
  PrefixReader prefix_reader(Generation& generation) const;
  bool may_begin_in_prefix(const Generation& generation) const;
  bool waits_for_prefix(const Generation& generation, size_t n_cached,
                        std::span<const StepOutput> outputs);
  static bool needs_every_row(const Generation& generation);
  void compute(std::vector<StepOutput>& outputs);
  std::vector<StepRow> next_rows(std::vector<StepOutput>& outputs);
  StepRow with_drafts(const StepRow& row, int64_t n_rows, int64_t n_drafts, int32_t n_others);
  StepRow next_row(StepOutput& output) const;
  void decode(std::span<StepRow> rows);
  void forward(std::span<const StepRow> rows);
  void score(StepRow& row);
  void observe(const StepRow& row);
  void sample(std::span<StepRow> rows, const StepResults& results);
  void count_evictions(Generation& generation);
  Forgotten forgotten(const Generation& generation) const;

  Session& session_;
  const Tokenizer& tokenizer_;
  const int32_t n_batch_;
  SlotTable slots_;
  DraftCost draft_cost_;
  PrefixPlanner prefixes_;
  Pooler pooler_;
  RowSampler sampler_;
  int64_t evictions_ = 0;
};

}  // namespace h2o
