#include "text/row_sampler.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace h2o {

std::vector<int32_t> StepOutput::tokens() const {
  std::vector<int32_t> tokens = generation->tokens_;
  for (const Written& written : accepted) tokens.push_back(written.token);
  return tokens;
}

namespace {

// Describes why a sequence ends at the context limit.
std::string describe_limit(const Session& session) {
  const Config& config = session.model().config;
  const int32_t n_ctx = session.options().n_ctx;
  if (config.rope.layout != RopeLayout::none) {
    return concat("n_ctx is ", n_ctx,
                  "; generation continues past it only if the policy evicts and positions roll");
  }
  if (n_ctx < config.n_ctx_train) return concat("n_ctx is ", n_ctx);
  return concat("n_ctx is ", n_ctx,
                config.family->learned_positions || config.alibi_max_bias > 0
                    ? ", and the model has learned no positions after that"
                    : ", and the model was trained on no longer texts");
}

}  // namespace

RowSampler::RowSampler(Session& session, const Tokenizer& tokenizer)
    : session_(session), tokenizer_(tokenizer), limit_(describe_limit(session)) {}

// Are all logits needed for more than sampling?
bool RowSampler::needs_logits(const Generation& g) {
  const Request& request = g.request_;
  return request.constraint != nullptr || request.allow_logits || g.prefixes_.is_end_wanted ||
         (request.trace != nullptr && request.trace->wants_logits());
}

void RowSampler::pass(std::span<const StepRow> rows, std::span<const Input> inputs,
                      std::span<float> temperatures, StepResults& results) {
  const auto may = [](bool (Sampler::*draw)() const) {
    return [draw](const StepRow& row) {
      const Generation& g = *row.output->generation;
      return g.sampler_ != nullptr && !needs_logits(g) && ((*g.sampler_).*draw)();
    };
  };
  if (std::ranges::all_of(rows, may(&Sampler::is_argmax))) {
    std::ranges::copy(session_.greedy(inputs), results.picks.begin());
    return;
  }
  const bool has_drafts = std::ranges::any_of(rows, &StepRow::n_drafts);
  if (session_.selects() && !has_drafts &&
      std::ranges::any_of(rows, may(&Sampler::may_draw_from_largest))) {
    return select(rows, inputs, temperatures, results);
  }
  const std::span<const float> logits = session_.step(inputs);
  const size_t n_vocab = logits.size() / results.logits.size();
  for (size_t i = 0; i < results.logits.size(); ++i) {
    results.logits[i] = logits.subspan(i * n_vocab, n_vocab);
  }
}

// Samples from the largest logits where possible; reads the whole row otherwise.
void RowSampler::select(std::span<const StepRow> rows, std::span<const Input> inputs,
                        std::span<float> temperatures, StepResults& results) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const Sampler* const sampler = rows[i].output->generation->sampler_.get();
    if (sampler != nullptr) temperatures[i] = sampler->rest_temperature();
  }
  const std::span<const LargestLogits> largest = session_.select(inputs, temperatures);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Generation& g = *rows[i].output->generation;
    const bool chooses = has_read_all(rows[i]) && g.request_.max_tokens != 0;
    if (chooses && !needs_logits(g)) {
      results.picks[i] = g.sampler_->sample(largest[i]).value_or(-1);
    }
    if (needs_logits(g) || (chooses && results.picks[i] < 0)) {
      results.logits[i] = session_.selected_row(i);
    }
  }
}

bool RowSampler::has_read_all(const StepRow& row) const {
  return session_.tokens_seen(row.sequence) >= std::ssize(row.output->generation->tokens_);
}

// Starts to compute the masks that will be needed after the pass.
void RowSampler::foresee(std::span<const StepRow> rows) noexcept {
  for (const StepRow& row : rows) {
    const Generation& g = *row.output->generation;
    const bool reads_last =
        row.n_drafts > 0 || (!row.part.empty() && &row.part.back() == &g.tokens_.back());
    if (g.request_.constraint_ready == nullptr || !reads_last) continue;
    try {
      g.request_.constraint_ready(g.tokens_);
    } catch (...) {  // has_mask() will report it
    }
  }
}

// Is the mask for its next token known? If not, keeps the logits for a later step.
bool RowSampler::has_mask(Generation& g, std::span<const int32_t> tokens,
                          std::span<const float> logits) {
  const ConstraintReady& ready = g.request_.constraint_ready;
  if (ready == nullptr || ready(tokens)) return true;
  if (logits.data() != g.logits_.data()) g.logits_.assign(logits.begin(), logits.end());
  g.awaits_mask_ = true;
  return false;
}

void RowSampler::sample(std::span<StepRow> rows, const StepResults& results) {
  while (!rows.empty()) {
    sample_next(rows, results);
    const auto left = std::remove_if(rows.begin(), rows.end(), [this](const StepRow& row) {
      if (row.n_drafts == 0) return true;
      const StepOutput& output = *row.output;
      const int32_t draft = row.part[row.part.size() - row.n_drafts];
      const bool goes_on = output.error == nullptr && output.finish == Finish::none;
      if (goes_on && output.token == draft) return false;
      session_.retract(row.sequence, row.n_drafts);
      return true;
    });
    rows = rows.first(left - rows.begin());
    for (StepRow& row : rows) {
      StepOutput& output = *row.output;
      output.accepted.push_back({std::exchange(output.token, -1), std::exchange(output.piece, {})});
      --row.n_drafts;
      ++row.result;
    }
  }
}

// Samples the next token of each row whose sequence has no unprocessed tokens.
void RowSampler::sample_next(std::span<const StepRow> rows, const StepResults& results) {
  const size_t n_vocab = session_.model().config.n_vocab;
  struct Choice {
    StepOutput* output;
    std::span<const float> logits;
    int32_t pick;
    bool has_room;
  };
  std::vector<Choice> choices;
  const auto fail = [&](const StepRow& row) {
    row.output->error = std::current_exception();
    keep_logits(*row.output, results.logits_of(row));
  };
  try {
    choices.reserve(rows.size());
    if (masks_.size() < rows.size()) masks_.resize(rows.size());
  } catch (...) {
    for (const StepRow& row : rows) {
      if (has_read_all(row)) fail(row);
    }
    return;
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    const StepRow& row = rows[i];
    if (!has_read_all(row)) continue;
    Generation& g = *row.output->generation;
    const std::span<const float> logits = results.logits_of(row);
    masks_[i].clear();
    if (g.request_.constraint != nullptr) {
      try {
        const std::vector<int32_t> tokens = row.output->tokens();
        if (!has_mask(g, tokens, logits)) continue;
        masks_[i].assign((n_vocab + 31) / 32, 0);
        g.request_.constraint(tokens, masks_[i]);
      } catch (...) {
        fail(row);
        continue;
      }
    }
    g.allowed_ = masks_[i];
    const bool has_room = session_.room(row.sequence) + row.n_drafts > 0;
    choices.push_back({row.output, logits, results.pick_of(row), has_room});
  }
  const auto sample_at = [&](int64_t i) {
    const auto& [output, row, pick, has_room] = choices[i];
    try {
      sample_one(*output, row, pick, has_room);
    } catch (...) {
      output->error = std::current_exception();
    }
    keep_logits(*output, row);
  };
  if (choices.size() == 1) {
    sample_at(0);
  } else if (!choices.empty()) {
    session_.parallel_for(std::ssize(choices), sample_at);
  }
}

// Does not allocate: the scheduler has reserved the memory.
void RowSampler::keep_logits(StepOutput& output, std::span<const float> logits) noexcept {
  Generation& g = *output.generation;
  if (output.token >= 0) {
    g.logits_.clear();
  } else if (g.request_.allow_logits && logits.data() != g.logits_.data()) {
    g.logits_.assign(logits.begin(), logits.end());
  }
}

void RowSampler::sample_one(StepOutput& output, std::span<const float> logits, int32_t pick,
                            bool has_room) {
  Generation& g = *output.generation;
  const Request& request = g.request_;
  const auto end = [&](Finish finish) {
    output.finish = finish;
    output.piece += g.detokenizer_.finish();
  };
  if (request.max_tokens == 0) {
    output.finish = Finish::length;
    return;
  }
  const int32_t token = pick >= 0 ? pick : g.sampler_->sample(logits, g.allowed_);
  if (tokenizer_.ends(token) && !request.ignore_end) return end(Finish::stop);
  g.sampler_->accept(token);
  output.token = token;
  if (request.trace != nullptr && request.trace->wants_logits()) request.trace->add(logits, token);
  const bool spelled = std::ranges::find(request.spelled, token) != request.spelled.end();
  output.piece += g.detokenizer_.push(spelled ? tokenizer_.spelling(token)
                                              : tokenizer_.token_bytes(token, g.begins_));
  g.begins_ = g.begins_ && tokenizer_.token_bytes(token).empty();
  const size_t n_generated = g.tokens_.size() + output.accepted.size() - g.n_input_tokens_ + 1;
  if (g.detokenizer_.stopped()) {
    end(Finish::stop);
  } else if (n_generated == g.max_new_tokens_) {
    if (!request.max_tokens) {
      output.finish_message =
          concat("max_tokens is ", n_generated, " (n_ctx) by default; -1 has no limit");
    }
    end(Finish::length);
  } else if (!has_room) {
    output.finish_message = concat("the context is full: ", limit());
    end(Finish::length);
  }
}

}  // namespace h2o
