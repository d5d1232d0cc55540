#include "text/scheduler.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"

namespace h2o {
namespace {

// Describes why a sequence ends at the context limit.
std::string describe_limit(const Session& session) {
  const Config& config = session.model().config;
  const int32_t n_ctx = session.options().n_ctx;
  if (session.can_roll(0))
    return text("n_ctx is ", n_ctx, "; max_tokens -1 (--endless) goes past it");
  if (config.family->rope != RopeLayout::none) {
    return text("n_ctx is ", n_ctx,
                "; generation continues past it only if the policy evicts and positions roll");
  }
  if (n_ctx < config.n_ctx_train) return text("n_ctx is ", n_ctx);
  return text("n_ctx is ", n_ctx, ", and the model has learned no positions after that");
}

}  // namespace

Scheduler::Scheduler(Session& session, const Tokenizer& tokenizer, int32_t n_batch,
                     const PrefixCacheOptions& prefixes)
    : session_(session),
      tokenizer_(tokenizer),
      n_batch_(n_batch),
      limit_(describe_limit(session)),
      max_sequences_(session.options().max_sequences),
      slots_(session.options().n_sequences),
      prefixes_(prefixes, prefix_scope(session, n_batch, prefixes.disk.build)) {}

int32_t Scheduler::n_active() const {
  return static_cast<int32_t>(std::ranges::count_if(slots_, &Slot::active));
}

std::vector<StepOutput> Scheduler::step(
    const std::vector<std::shared_ptr<Generation>>& generations) {
  std::vector<StepOutput> outputs(generations.size());
  for (size_t i = 0; i < generations.size(); ++i) {
    outputs[i].generation = generations[i];
    const int32_t sequence = generations[i]->sequence_;
    const bool has_sequence =
        sequence >= 0 && slots_[sequence].active && slots_[sequence].owner.lock() == generations[i];
    if (!has_sequence) start(outputs[i], std::span(outputs).first(i));
  }
  try {
    compute(outputs);
  } catch (...) {  // out of memory for its lists
    for (StepOutput& output : outputs) {
      if (output.error == nullptr && !output.deferred) output.error = std::current_exception();
    }
  }
  for (StepOutput& output : outputs) {
    if (output.error != nullptr) {
      output.finish = Finish::cancelled;
      output.piece.clear();
    }
    if (output.finish == Finish::none) continue;
    Generation& g = *output.generation;
    if (output.error == nullptr && g.sequence_ >= 0) save_end(g);
    release(g);
    if (!g.request_.keeps_cache || output.error != nullptr) continue;
    try {
      SnapshotText text;
      text.tokens = g.tokens_;
      g.parked_ = session_.save(g.sequence_, std::move(text));
    } catch (...) {
      output.error = std::current_exception();
      output.finish = Finish::cancelled;
    }
  }
  return outputs;
}

// Are results of every prompt token needed?
bool Scheduler::needs_every_row(const Generation& g) {
  const Request& request = g.request_;
  return request.prompt_logits != nullptr || request.pooling != Pooling::none ||
         (request.trace != nullptr && request.trace->options().prompt);
}

void Scheduler::compute(std::vector<StepOutput>& outputs) {
  const auto started = std::chrono::steady_clock::now();
  const std::vector<Row> rows = next_rows(outputs);
  std::vector<Row> batch;
  for (const Row& row : rows) {
    Generation& g = *row.output->generation;
    if (row.part.empty()) {
      choose({&row, 1}, {{g.logits_}, {}});
    } else if (needs_every_row(g) && g.reads_prompt()) {
      score(row);
    } else {
      batch.push_back(row);
    }
  }
  if (!batch.empty()) forward(batch);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  for (const Row& row : rows) {
    StepOutput& output = *row.output;
    Generation& g = *output.generation;
    output.seconds = seconds.count();
    if (output.error != nullptr) continue;
    if (g.reads_prompt()) {
      output.n_read = static_cast<int32_t>(row.part.size());
    }
    count_evictions(g);
    const Trace* const trace = g.request_.trace.get();
    if (trace == nullptr || trace->options().kept_every == 0) continue;
    const auto n_before = static_cast<int32_t>(g.tokens_.size() - g.n_input_tokens_);
    const bool due = output.token >= 0 && n_before % trace->options().kept_every == 0;
    if (!due && output.finish == Finish::none) continue;
    try {
      g.request_.trace->observe(session_, g.sequence_);
    } catch (...) {
      output.error = std::current_exception();
    }
  }
}

std::vector<Scheduler::Row> Scheduler::next_rows(std::vector<StepOutput>& outputs) {
  std::vector<Row> rows;
  int64_t left = session_.options().n_batch;
  const auto visit = [&](bool prompts) {
    for (StepOutput& output : outputs) {
      const Generation& g = *output.generation;
      if (g.sequence_ < 0 || output.deferred || output.finish != Finish::none) continue;
      if (g.reads_prompt() != prompts) continue;
      const std::span<const int32_t> unread =
          std::span(g.tokens_).subspan(session_.tokens_seen(g.sequence_));
      // Zero if the first token is sampled from known logits.
      const int64_t n =
          std::min<int64_t>({std::ssize(unread), n_batch_, session_.chunk(g.sequence_)});
      if (n > left) continue;
      rows.push_back({&output, g.sequence_, unread.first(n)});
      left -= n;
    }
  };
  visit(false);
  visit(true);
  return rows;
}

void Scheduler::forward(std::span<const Row> rows) {
  std::vector<Input> inputs;
  for (const Row& row : rows) inputs.push_back({row.sequence, row.part});
  Results results{std::vector<std::span<const float>>(rows.size()),
                  std::vector<int32_t>(rows.size(), -1)};
  std::vector<float> temperatures(rows.size());
  try {
    pass(rows, inputs, temperatures, results);
  } catch (const InvalidArgument&) {  // nothing has changed; find the generation that caused it
    if (rows.size() == 1) {
      rows[0].output->error = std::current_exception();
    } else {
      for (const Row& row : rows) forward({&row, 1});
    }
    return;
  } catch (...) {
    for (const Row& row : rows) {
      row.output->error = std::current_exception();
      forget(*row.output->generation);
    }
    return;
  }
  choose(rows, results);
}

// Are all logits needed for more than sampling?
bool Scheduler::needs_logits(const Generation& g) {
  const Request& request = g.request_;
  return request.constraint != nullptr || request.keeps_logits || g.saves_whole_ ||
         (request.trace != nullptr && request.trace->wants_logits());
}

// `results` belongs to the caller. After an exception the content of the sequences is unknown.
void Scheduler::pass(std::span<const Row> rows, std::span<const Input> inputs,
                     std::span<float> temperatures, Results& results) {
  const auto may = [](bool (Sampler::*draw)() const) {
    return [draw](const Row& row) {
      const Generation& g = *row.output->generation;
      return g.sampler_ != nullptr && !needs_logits(g) && ((*g.sampler_).*draw)();
    };
  };
  if (std::ranges::all_of(rows, may(&Sampler::is_argmax))) {
    std::ranges::copy(session_.greedy(inputs), results.picks.begin());
    return;
  }
  if (session_.selects() && std::ranges::any_of(rows, may(&Sampler::may_draw_from_largest))) {
    return select(rows, inputs, temperatures, results);
  }
  const std::span<const float> logits = session_.step(inputs);
  const size_t n_vocab = logits.size() / rows.size();
  for (size_t i = 0; i < rows.size(); ++i) {
    results.logits[i] = logits.subspan(i * n_vocab, n_vocab);
  }
}

// Samples from the largest logits where possible; reads the whole row otherwise.
void Scheduler::select(std::span<const Row> rows, std::span<const Input> inputs,
                       std::span<float> temperatures, Results& results) {
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

bool Scheduler::has_read_all(const Row& row) const {
  return session_.tokens_seen(row.sequence) == std::ssize(row.output->generation->tokens_);
}

// Processes a chunk of a prompt with the logits of every token.
void Scheduler::score(const Row& row) {
  const Generation& g = *row.output->generation;
  const Request& request = g.request_;
  const int32_t begin = session_.tokens_seen(row.sequence);
  const auto n_tokens = static_cast<int32_t>(g.tokens_.size());
  std::vector<float> last;
  try {
    if (request.pooling != Pooling::none) {
      pool(*row.output->generation, row);
      return choose({&row, 1}, {});
    }
    session_.score({row.sequence, row.part}, [&](int32_t i, std::span<const float> logits) {
      const int32_t at = begin + i;
      if (request.prompt_logits != nullptr) request.prompt_logits(at, logits);
      if (request.trace != nullptr && request.trace->options().prompt && at + 1 < n_tokens) {
        request.trace->add(logits, g.tokens_[at + 1]);
      }
      if (at + 1 == n_tokens) last.assign(logits.begin(), logits.end());
    });
    choose({&row, 1}, {{last}, {}});
  } catch (...) {
    row.output->error = std::current_exception();
    if (session_.tokens_seen(row.sequence) == begin) forget(*row.output->generation);
  }
}

// Accumulates the hidden states of a chunk.
void Scheduler::pool(Generation& g, const Row& row) {
  const bool mean = g.request_.pooling == Pooling::mean;
  g.pooled_.resize(session_.model().config.n_embd);
  session_.hidden({row.sequence, row.part}, [&](int32_t, std::span<const float> hidden) {
    for (size_t i = 0; i < hidden.size(); ++i) {
      g.pooled_[i] = hidden[i] + (mean ? g.pooled_[i] : 0);
    }
  });
}

// Samples the next token of each row whose sequence has no unprocessed tokens.
void Scheduler::choose(std::span<const Row> rows, const Results& results) {
  const size_t n_vocab = session_.model().config.n_vocab;
  struct Choice {
    StepOutput* output;
    std::span<const float> logits;
    int32_t pick;
    bool has_room;
  };
  std::vector<Choice> choices;
  const auto row_logits = [&](size_t i) {
    return results.logits.empty() ? std::span<const float>() : results.logits[i];
  };
  const auto fail = [&](size_t i) {
    rows[i].output->error = std::current_exception();
    keep_logits(*rows[i].output, row_logits(i));
  };
  try {
    choices.reserve(rows.size());
    if (masks_.size() < rows.size()) masks_.resize(rows.size());
  } catch (...) {
    for (size_t i = 0; i < rows.size(); ++i) {
      if (has_read_all(rows[i])) fail(i);
    }
    return;
  }
  for (size_t i = 0; i < rows.size(); ++i) {
    Generation& g = *rows[i].output->generation;
    save_prefixes(g, row_logits(i));
    if (!has_read_all(rows[i])) continue;
    masks_[i].clear();
    if (g.request_.constraint != nullptr) {
      try {
        masks_[i].assign((n_vocab + 31) / 32, 0);
        g.request_.constraint(g.tokens_, masks_[i]);
      } catch (...) {
        fail(i);
        continue;
      }
    }
    g.allowed_ = masks_[i];
    choices.push_back({rows[i].output, row_logits(i), results.picks.empty() ? -1 : results.picks[i],
                       session_.room(rows[i].sequence) > 0});
  }
  const auto choose_at = [&](int64_t i) {
    const auto& [output, row, pick, has_room] = choices[i];
    try {
      choose_one(*output, row, pick, has_room);
    } catch (...) {
      output->error = std::current_exception();
    }
    keep_logits(*output, row);
  };
  if (choices.size() == 1) {
    choose_at(0);
  } else if (!choices.empty()) {
    session_.parallel_for(std::ssize(choices), choose_at);
  }
}

// Without allocating: start() has reserved the memory.
void Scheduler::keep_logits(StepOutput& output, std::span<const float> logits) noexcept {
  Generation& g = *output.generation;
  if (output.token >= 0) {
    g.logits_.clear();
  } else if (g.request_.keeps_logits && logits.data() != g.logits_.data()) {
    g.logits_.assign(logits.begin(), logits.end());
  }
}

void Scheduler::choose_one(StepOutput& output, std::span<const float> logits, int32_t pick,
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
  const size_t n_generated = g.tokens_.size() - g.n_input_tokens_ + 1;
  if (g.detokenizer_.stopped()) {
    end(Finish::stop);
  } else if (n_generated == g.max_new_tokens_ || !has_room) {
    const bool asked = request.max_tokens && n_generated == g.max_new_tokens_;
    if (!asked) output.finish_message = text("the context is full: ", limit());
    end(Finish::length);
  }
}

void Scheduler::count_evictions(Generation& g) {
  const int32_t n = session_.tokens_seen(g.sequence_) - session_.tokens_kept(g.sequence_);
  evictions_ += n - std::exchange(g.n_evicted_, n);
}

}  // namespace h2o
