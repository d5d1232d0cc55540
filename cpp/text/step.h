// A step of the scheduler: its rows, the results of the forward pass, and what each generation
// gets.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "text/generation.h"

namespace h2o {

// A generated token and the text that it completed.
struct Written {
  int32_t token;
  std::string piece;
};

// The results of a step for a generation.
struct StepOutput {
  std::shared_ptr<Generation> generation;
  int32_t n_prompt = 0;                // prompt tokens to process, set when it starts
  int32_t n_cached = 0;                // prompt tokens found in the prefix cache
  int32_t n_read = 0;                  // prompt tokens processed by this step
  int32_t n_drafts = 0;                // tokens that its drafter proposed
  std::vector<Written> accepted = {};  // the proposed tokens that were right
  int32_t token = -1;                  // generated after them; -1: none
  std::string piece = {};
  Finish finish = Finish::none;
  std::string finish_message = {};
  std::exception_ptr error = nullptr;
  double seconds = 0;
  Forgotten forgotten = {};
  bool started = false;   // it has a sequence now
  bool deferred = false;  // no sequence was available

  // All tokens of the generation, with the drafts that were accepted in this step.
  std::vector<int32_t> tokens() const;
};

// The tokens of one generation in a forward pass.
struct StepRow {
  StepOutput* output;
  int32_t sequence;
  std::span<const int32_t> part;
  int32_t n_drafts = 0;     // the last tokens of the part, as far as they are not accepted
  size_t result = 0;        // index of its next result
  bool one_by_one = false;  // see Input
};

// The results of a forward pass, in the form that copies least.
struct StepResults {
  std::vector<std::span<const float>> logits;  // [n], empty where not needed; or none
  std::vector<int32_t> picks;                  // [n] sampled tokens, or -1; or none

  std::span<const float> logits_of(const StepRow& row) const {
    return logits.empty() ? std::span<const float>() : logits[row.result];
  }
  int32_t pick_of(const StepRow& row) const { return picks.empty() ? -1 : picks[row.result]; }
};

}  // namespace h2o
