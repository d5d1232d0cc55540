// Scheduler: drafts of next tokens.
#include <algorithm>
#include <utility>

#include "text/scheduler.h"

namespace h2o {

// The row of a generation's next token, with drafts of those after it: at most n_rows, and
// n_drafts, which are left in the step. It generates n_others tokens for others.
Scheduler::Row Scheduler::with_drafts(const Row& row, int64_t n_rows, int64_t n_drafts,
                                      int32_t n_others) {
  Generation& g = *row.output->generation;
  // A state that is to be saved must be reached.
  if (g.request_.drafter == nullptr || row.part.size() != 1 || !g.prefixes_.save_at.empty()) {
    return row;
  }
  const size_t n_after = g.max_new_tokens_ - (g.tokens_.size() - g.n_input_tokens_);  // this token
  int64_t most = std::min<int64_t>({n_rows, n_drafts, session_.chunk(row.sequence) - 1});
  if (n_after <= static_cast<size_t>(most)) most = static_cast<int64_t>(n_after) - 1;
  if (most <= 0) return row;
  // Earlier texts of the step have the other drafts.
  const std::span<const double> times = draft_cost_.shares().subspan(max_drafts() - n_drafts);
  std::span<const int32_t> drafts =
      g.request_.drafter->propose(g.tokens_, {static_cast<int32_t>(most), n_others, times});
  drafts = drafts.first(std::min(drafts.size(), static_cast<size_t>(most)));
  g.drafted_.assign(row.part.begin(), row.part.end());
  g.drafted_.insert(g.drafted_.end(), drafts.begin(), drafts.end());
  row.output->accepted.reserve(drafts.size());
  row.output->n_drafts = static_cast<int32_t>(drafts.size());
  return {row.output, row.sequence, g.drafted_, row.output->n_drafts};
}

// All tokens of a generation, with the drafts that were accepted in this step.
std::vector<int32_t> Scheduler::tokens_so_far(const StepOutput& output) {
  std::vector<int32_t> tokens = output.generation->tokens_;
  for (const Written& written : output.accepted) tokens.push_back(written.token);
  return tokens;
}

// Samples the next token of each row, and the ones after it while the drafts are right. Retracts
// the others. Does not allocate.
void Scheduler::choose_all(std::vector<Row> rows, const Results& results) {
  while (!rows.empty()) {
    choose(rows, results);
    const auto left = std::remove_if(rows.begin(), rows.end(), [this](const Row& row) {
      if (row.n_drafts == 0) return true;
      const StepOutput& output = *row.output;
      const int32_t draft = row.part[row.part.size() - row.n_drafts];
      const bool goes_on = output.error == nullptr && output.finish == Finish::none;
      if (goes_on && output.token == draft) return false;
      session_.retract(row.sequence, row.n_drafts);
      return true;
    });
    rows.erase(left, rows.end());
    for (Row& row : rows) {
      StepOutput& output = *row.output;
      output.accepted.push_back({std::exchange(output.token, -1), std::exchange(output.piece, {})});
      --row.n_drafts;
      ++row.result;
    }
  }
}

}  // namespace h2o
