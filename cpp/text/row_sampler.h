// RowSampler: turns the results of a forward pass into the next tokens and texts of its
// generations.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "model/session.h"
#include "text/step.h"
#include "text/tokenizer/tokenizer.h"

namespace h2o {

class RowSampler {
 public:
  // `session` and `tokenizer` must outlive it.
  RowSampler(Session& session, const Tokenizer& tokenizer);

  // Describes why a sequence ends at the context limit.
  const std::string& limit() const { return limit_; }

  // Starts to compute the masks that will be needed after the pass.
  static void foresee(std::span<const StepRow> rows) noexcept;

  // Runs the forward pass for `inputs`, one for each row. `temperatures` [n_inputs] and `results`
  // belong to the caller. After an exception the content of the sequences is unknown, unless it is
  // InvalidArgument, which changes nothing.
  void pass(std::span<const StepRow> rows, std::span<const Input> inputs,
            std::span<float> temperatures, StepResults& results);

  // Samples the next token of each row whose sequence has no unprocessed tokens, and further tokens
  // while the drafts are right; retracts the wrong drafts. Reorders `rows`.
  void sample(std::span<StepRow> rows, const StepResults& results);

 private:
  static bool needs_logits(const Generation& generation);
  void select(std::span<const StepRow> rows, std::span<const Input> inputs,
              std::span<float> temperatures, StepResults& results);
  bool has_read_all(const StepRow& row) const;
  static bool has_mask(Generation& generation, std::span<const int32_t> tokens,
                       std::span<const float> logits);
  void sample_next(std::span<const StepRow> rows, const StepResults& results);
  void sample_one(StepOutput& output, std::span<const float> logits, int32_t pick, bool has_room);
  static void keep_logits(StepOutput& output, std::span<const float> logits) noexcept;

  Session& session_;
  const Tokenizer& tokenizer_;
  const std::string limit_;  // built once: the session is locked while tokens are sampled
  std::vector<std::vector<uint32_t>> masks_;  // of constrained rows
};

}  // namespace h2o
