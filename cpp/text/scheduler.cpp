#include "text/scheduler.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/error.h"

namespace h2o {
Scheduler::Scheduler(Session& session, const Tokenizer& tokenizer, int32_t n_batch)
    : session_(session),
      tokenizer_(tokenizer),
      n_batch_(n_batch),
      max_sequences_(session.options().max_sequences),
      slots_(session.options().n_sequences) {}

int32_t Scheduler::n_active() const {
  return static_cast<int32_t>(std::ranges::count_if(slots_, &Slot::active));
}

std::vector<StepOutput> Scheduler::step(
    const std::vector<std::shared_ptr<Generation>>& generations) {
  const auto started = std::chrono::steady_clock::now();
  std::vector<StepOutput> outputs(generations.size());
  for (size_t i = 0; i < generations.size(); ++i) {
    outputs[i].generation = generations[i];
    const int32_t sequence = generations[i]->sequence_;
    const bool has_sequence =
        sequence >= 0 && slots_[sequence].active && slots_[sequence].owner.lock() == generations[i];
    if (!has_sequence) start(outputs[i]);
  }
  const std::vector<Row> rows = next_rows(outputs);
  std::vector<Row> batch;
  for (const Row& row : rows) {
    const Generation& g = *row.output->generation;
    const bool every_row = g.request_.prompt_logits != nullptr ||
                           (g.request_.trace != nullptr && g.request_.trace->options().prompt);
    if (every_row && g.reads_prompt()) {
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
    const auto n_before = static_cast<int32_t>(g.tokens_.size() - g.n_given_);
    const bool due = output.token >= 0 && n_before % trace->options().kept_every == 0;
    if (!due && output.finish == Finish::none) continue;
    try {
      g.request_.trace->observe(session_, g.sequence_);
    } catch (...) {
      output.error = std::current_exception();
    }
  }
  for (StepOutput& output : outputs) {
    if (output.error != nullptr) {
      output.finish = Finish::cancelled;
      output.piece.clear();
      forget(*output.generation);
    } else if (output.finish != Finish::none) {
      release(*output.generation);
    }
  }
  return outputs;
}

void Scheduler::park(Generation& g) {
  SnapshotText text;
  text.tokens = g.tokens_;
  g.parked_ = session_.save(g.sequence_, std::move(text));
  slots_[g.sequence_] = {};
  g.sequence_ = -1;
}

void Scheduler::release(Generation& g) {
  g.parked_.clear();
  if (g.sequence_ < 0) return;
  slots_[g.sequence_].active = false;
  slots_[g.sequence_].used_at = ++clock_;
}

void Scheduler::forget(Generation& g) {
  g.parked_.clear();
  if (g.sequence_ >= 0) slots_[g.sequence_] = {};
  g.sequence_ = -1;
}

std::vector<std::byte> Scheduler::save(const Generation& g, SnapshotText text) const {
  text.tokens = g.tokens_;
  if (!g.parked_.empty()) {
    OpenSnapshot parked = open_snapshot(g.parked_);
    text.n_read = parked.text.n_read;
    ByteWriter writer = begin_snapshot(parked.model, text, parked.positions);
    writer.put(parked.cache.take(parked.cache.left()));
    return end_snapshot(std::move(writer));
  }
  if (g.sequence_ < 0 || slots_[g.sequence_].owner.lock().get() != &g) {
    throw std::runtime_error("the cache does not hold this sequence any more");
  }
  return session_.save(g.sequence_, std::move(text));
}

std::string Scheduler::limit() const {
  const Config& config = session_.model().config;
  const int32_t n_ctx = session_.options().n_ctx;
  if (config.family->rope != RopeLayout::none) {
    return text("n_ctx is ", n_ctx,
                "; a text goes on only where the policy evicts and positions roll");
  }
  if (n_ctx < config.n_ctx_train) return text("n_ctx is ", n_ctx);
  return text("n_ctx is ", n_ctx, ", and the model has learned no positions after that");
}

// The sequence in which a generation can go on from the one that it follows; -1: none. A token has
// to be left to read.
int32_t Scheduler::followed_slot(const Generation& g) const {
  const Generation* const f = g.request_.follows.get();
  if (f == nullptr || f->sequence_ < 0 || !g.parked_.empty()) return -1;
  const Slot& slot = slots_[f->sequence_];
  if (slot.active || slot.owner.lock().get() != f) return -1;
  const bool same = f->tokens_.size() <= g.tokens_.size() &&
                    std::equal(f->tokens_.begin(), f->tokens_.end(), g.tokens_.begin()) &&
                    f->request_.policies.empty() && g.request_.policies.empty();
  const bool unread = session_.tokens_seen(f->sequence_) < std::ssize(g.tokens_);
  return same && unread ? f->sequence_ : -1;
}

// A sequence that nobody wants, else the one that was used longest ago, else a new one; or -1.
int32_t Scheduler::take_slot() {
  int32_t best = -1;
  const auto key = [this](int32_t i) {
    return std::pair(!slots_[i].owner.expired(), slots_[i].used_at);
  };
  for (int32_t i = 0; i < std::ssize(slots_); ++i) {
    if (!slots_[i].active && (best < 0 || key(i) < key(best))) best = i;
  }
  if (best >= 0) return best;
  const auto n = static_cast<int32_t>(slots_.size());
  return grow() ? n : -1;
}

bool Scheduler::grow() {
  const auto n = static_cast<int32_t>(slots_.size());
  if (n >= max_sequences_) return false;
  try {
    session_.reserve_sequences(std::min(2 * n, max_sequences_));
  } catch (const std::bad_alloc&) {
    max_sequences_ = n;
    return false;
  }
  slots_.resize(std::min(2 * n, max_sequences_));
  return true;
}

void Scheduler::start(StepOutput& output) {
  Generation& g = *output.generation;
  const Request& request = g.request_;
  int32_t sequence = -1;
  try {
    sequence = followed_slot(g);
    const bool goes_on = sequence >= 0;
    if (!goes_on) sequence = take_slot();
    if (sequence < 0) {
      output.deferred = true;
      return;
    }
    Slot& slot = slots_[sequence];
    if (!goes_on) {
      slot.owner.reset();
      session_.reset(sequence,
                     request.policies.empty() ? session_.options().policies : request.policies);
    }
    g.sequence_ = sequence;
    if (!g.parked_.empty()) {
      session_.load(sequence, g.parked_);
      g.parked_.clear();
      slot = {.owner = output.generation, .active = true};
      return;
    }
    const Config& config = session_.model().config;
    g.sampler_.emplace(request.sampling, config.n_vocab);
    std::string random_state = request.random_state;
    if (!request.after.bytes.empty()) {
      const SnapshotText text = session_.load(sequence, request.after.bytes);
      if (!request.seeded && random_state.empty()) random_state = text.random_state;
      output.piece = g.detokenizer_.push(text.held_text);
      output.piece += g.detokenizer_.push(text.held_bytes);
    }
    if (!random_state.empty()) g.sampler_->set_random_state(random_state);
    g.sampler_->accept(g.tokens_);
    g.begins_ = !tokenizer_.has_text(g.tokens_);
    const auto n_unread = static_cast<int32_t>(g.tokens_.size()) - session_.tokens_seen(sequence);
    if (n_unread > session_.room(sequence)) {
      throw ContextFull(text("the prompt has ", g.tokens_.size(), " tokens, ", limit()));
    }
    g.n_evicted_ = session_.tokens_seen(sequence) - session_.tokens_kept(sequence);
    slot = {.owner = output.generation, .active = true};
    output.started = true;
    g.request_.follows.reset();  // or a long conversation would keep all its turns
    g.request_.after = {};
    output.n_prompt = n_unread;
    if (n_unread == 0) output.finish = Finish::length;  // there is nothing to read
    if (g.detokenizer_.stopped()) output.finish = Finish::stop;
  } catch (...) {
    output.error = std::current_exception();
    if (sequence >= 0) slots_[sequence] = {};
    g.sequence_ = -1;
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
  const bool greedy = std::ranges::all_of(rows, [](const Row& row) {
    const Request& request = row.output->generation->request();
    const SamplerOptions& o = request.sampling;
    return o.temperature == 0 && (o.repeat_penalty == 1 || o.repeat_last_n == 0) &&
           request.constraint == nullptr && !request.keeps_logits &&
           (request.trace == nullptr || !request.trace->wants_logits());
  });
  try {
    if (greedy) {
      choose(rows, {}, session_.greedy(inputs));
    } else {
      choose(rows, session_.step(inputs), {});
    }
  } catch (const InvalidArgument&) {  // nothing has changed, and it may be about one of them
    if (rows.size() == 1) {
      rows[0].output->error = std::current_exception();
    } else {
      for (const Row& row : rows) forward({&row, 1});
    }
  } catch (...) {
    for (const Row& row : rows) row.output->error = std::current_exception();
  }
}

// A chunk of a prompt the logits of whose every token are wanted.
void Scheduler::score(const Row& row) {
  const Generation& g = *row.output->generation;
  const Request& request = g.request_;
  const int32_t begin = session_.tokens_seen(row.sequence);
  const auto n_tokens = static_cast<int32_t>(g.tokens_.size());
  std::vector<float> last;
  try {
    session_.score({row.sequence, row.part}, [&](int32_t i, std::span<const float> logits) {
      const int32_t at = begin + i;
      if (request.prompt_logits != nullptr) request.prompt_logits(at, logits);
      if (request.trace != nullptr && request.trace->options().prompt && at + 1 < n_tokens) {
        request.trace->add(logits, g.tokens_[at + 1]);
      }
      if (at + 1 == n_tokens) last.assign(logits.begin(), logits.end());
    });
    choose({&row, 1}, last, {});
  } catch (...) {
    row.output->error = std::current_exception();
  }
}

// The next token of each row whose sequence has read all its tokens.
void Scheduler::choose(std::span<const Row> rows, std::span<const float> logits,
                       std::span<const int32_t> picks) {
  const size_t n_vocab = session_.model().config.n_vocab;
  struct Choice {
    StepOutput* output;
    std::span<const float> logits;
    int32_t pick;
    bool has_room;
  };
  std::vector<Choice> choices;
  masks_.resize(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    Generation& g = *rows[i].output->generation;
    if (session_.tokens_seen(rows[i].sequence) < std::ssize(g.tokens_)) continue;
    masks_[i].clear();
    if (g.request_.constraint != nullptr) {
      masks_[i].assign((n_vocab + 31) / 32, 0);
      try {
        g.request_.constraint(g.tokens_, masks_[i]);
      } catch (...) {
        rows[i].output->error = std::current_exception();
        continue;
      }
    }
    g.allowed_ = masks_[i];
    choices.push_back({rows[i].output,
                       picks.empty() ? logits.subspan(i * n_vocab, n_vocab) : logits,
                       picks.empty() ? -1 : picks[i], session_.room(rows[i].sequence) > 0});
  }
  const auto choose_at = [&](int64_t i) {
    const auto& [output, row, pick, has_room] = choices[i];
    try {
      choose_one(*output, row, pick, has_room);
    } catch (...) {
      output->error = std::current_exception();
    }
  };
  if (choices.size() == 1) {
    choose_at(0);
  } else {
    session_.parallel_for(std::ssize(choices), choose_at);
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
  const auto keep_logits = [&] {
    if (request.keeps_logits) output.logits.assign(logits.begin(), logits.end());
  };
  if (request.max_tokens == 0) {
    keep_logits();
    output.finish = Finish::length;
    return;
  }
  const int32_t token = pick >= 0 ? pick : g.sampler_->sample(logits, g.allowed_);
  if (tokenizer_.ends(token) && !request.ignore_end) {
    keep_logits();
    return end(Finish::stop);
  }
  g.sampler_->accept(token);
  if (request.trace != nullptr && request.trace->wants_logits()) request.trace->add(logits, token);
  output.token = token;
  output.piece += g.detokenizer_.push(tokenizer_.token_bytes(token, g.begins_));
  g.begins_ = g.begins_ && tokenizer_.token_bytes(token).empty();
  const size_t n_generated = g.tokens_.size() - g.n_given_ + 1;
  if (g.detokenizer_.stopped()) {
    end(Finish::stop);
  } else if (request.max_tokens && n_generated == static_cast<size_t>(*request.max_tokens)) {
    end(Finish::length);
  } else if (!has_room) {
    output.finish_message = text("the context is full: ", limit());
    end(Finish::length);
  }
}

void Scheduler::count_evictions(Generation& g) {
  const int32_t n = session_.tokens_seen(g.sequence_) - session_.tokens_kept(g.sequence_);
  evictions_ += n - std::exchange(g.n_evicted_, n);
}

}  // namespace h2o
