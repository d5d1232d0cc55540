#include "text/scheduler.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "core/error.h"
#include "text/make_sampler.h"

namespace h2o {
namespace {

// Pause of a step in which every generation waits for its mask.
constexpr std::chrono::microseconds kMaskPoll{500};

// Describes why a sequence ends at the context limit.
std::string describe_limit(const Session& session) {
  const Config& config = session.model().config;
  const int32_t n_ctx = session.options().n_ctx;
  if (config.rope.layout != RopeLayout::none) {
    return concat("n_ctx is ", n_ctx,
                  "; generation continues past it only if the policy evicts and positions roll");
  }
  if (n_ctx < config.n_ctx_train) return concat("n_ctx is ", n_ctx);
  return concat("n_ctx is ", n_ctx, ", and the model has learned no positions after that");
}

}  // namespace

Scheduler::Scheduler(Session& session, const Tokenizer& tokenizer, int32_t n_batch,
                     const PrefixCacheOptions& prefixes)
    : session_(session),
      tokenizer_(tokenizer),
      n_batch_(n_batch),
      limit_(describe_limit(session)),
      slots_(session),
      draft_cost_(session.options().max_drafts),
      prefixes_(session, n_batch, prefixes) {}

std::vector<StepOutput> Scheduler::step(
    const std::vector<std::shared_ptr<Generation>>& generations) {
  std::vector<StepOutput> outputs(generations.size());
  for (size_t i = 0; i < generations.size(); ++i) {
    outputs[i].generation = generations[i];
    const Generation& g = *generations[i];
    const bool has_sequence = slots_.is_active(g.sequence_) && slots_.holds(g.sequence_, g);
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
    const bool has_output = g.sequence_ >= 0 && g.request_.max_tokens != 0;
    release(g);
    if (output.error != nullptr) continue;
    try {
      SnapshotText text;
      text.tokens = tokens_so_far(output);
      if (has_output) {
        prefixes_.save_end(
            {g.sequence_, text.tokens, policies(g), g.prefixes_, g.request_.replies});
      }
      if (!g.request_.keeps_cache) continue;
      g.parked_ = session_.save(g.sequence_, std::move(text));
    } catch (...) {
      output.error = std::current_exception();
      output.finish = Finish::cancelled;
    }
  }
  return outputs;
}

// Steps that may fail come before the sequence is taken over from the followed generation, which
// can otherwise be followed again.
void Scheduler::start(StepOutput& output, std::span<const StepOutput> outputs) {
  Generation& g = *output.generation;
  const Request& request = g.request_;
  int32_t sequence = -1;
  bool follows = false;
  try {
    sequence = followed_sequence(g);
    follows = sequence >= 0;
    const bool resumes = !g.parked_.empty();
    if (!resumes) g.prefixes_.is_from_beginning = !follows && request.after.bytes.empty();
    if (!session_.replays()) g.request_.replies.clear();
    FoundPrefix prefix;
    if (may_begin_in_prefix(g)) {
      prefix = prefixes_.find(g.tokens_, policies(g), request.replies);
      if (waits_for_prefix(g, prefix.n_tokens, outputs)) {
        output.deferred = true;
        return;
      }
    }
    if (!follows) sequence = slots_.take();
    if (sequence < 0) {
      output.deferred = true;
      return;
    }
    if (!resumes) prepare(g, follows, output);
    if (!follows) slots_.reset(sequence, request.policies);
    const PrefixReader reader{sequence, g.tokens_, policies(g), g.prefixes_, request.replies};
    if (resumes) {
      session_.load(sequence, g.parked_);
      g.parked_.clear();
    } else if (!request.after.bytes.empty()) {
      session_.load(sequence, request.after.bytes);
    } else if (prefix.entry != nullptr && prefixes_.load(prefix, reader, g.logits_)) {
      output.n_cached = static_cast<int32_t>(prefix.n_tokens);
      g.prefixes_.is_from_beginning = prefix.entry->head.kind != PrefixKind::output_end;
    }
    if (!resumes) prefixes_.plan(reader, static_cast<size_t>(output.n_cached));
    if (request.max_tokens == 0) g.prefixes_.is_end_wanted = false;
    const auto n_unread = static_cast<int32_t>(g.tokens_.size()) - session_.tokens_seen(sequence);
    if (n_unread > session_.room(sequence)) {
      throw ContextFull(concat("the prompt has ", g.tokens_.size(), " tokens, ", limit()));
    }
    g.sequence_ = sequence;
    slots_.occupy(sequence, output.generation);
    if (resumes) return;
    g.n_evicted_ = session_.tokens_seen(sequence) - session_.tokens_kept(sequence);
    output.started = true;
    g.request_.follows.reset();  // otherwise a long conversation would keep all its turns alive
    g.request_.after = {};
    output.n_prompt = n_unread;
    if (n_unread > 0) g.logits_.clear();
    if (n_unread == 0 && g.logits_.empty()) output.finish = Finish::length;  // nothing to read
    if (g.detokenizer_.stopped()) output.finish = Finish::stop;
  } catch (...) {
    output.error = std::current_exception();
    if (sequence >= 0 && !follows) slots_.vacate(sequence);
    g.sequence_ = -1;
  }
}

// Sets up everything besides the sequence.
void Scheduler::prepare(Generation& g, bool follows, StepOutput& output) {
  const Request& request = g.request_;
  const int32_t n_vocab = session_.model().config.n_vocab;
  g.sampler_ = request.sampler;
  if (g.sampler_ == nullptr && request.max_tokens != 0) {
    g.sampler_ = std::make_shared<Sampler>(
        make_sampler(request.sampling, tokenizer_, n_vocab, session_.options().n_ctx));
    if (!request.seeded && !g.random_state_.empty()) {
      g.sampler_->set_random_state(g.random_state_);
    }
    g.sampler_->accept(g.tokens_);
  }
  if (follows) g.logits_ = request.follows->logits_;
  if (request.allow_logits || request.constraint_ready) g.logits_.reserve(n_vocab);
  output.piece = g.detokenizer_.push(request.held);
  g.begins_ = !tokenizer_.has_text(g.tokens_);
}

// The sequence in which a generation can continue the one that it follows; -1: none. Requires an
// unprocessed token or known logits after the last one.
int32_t Scheduler::followed_sequence(const Generation& g) const {
  const Generation* const f = g.request_.follows.get();
  if (f == nullptr || !g.parked_.empty()) return -1;
  if (slots_.is_active(f->sequence_) || !slots_.holds(f->sequence_, *f)) return -1;
  const bool same = f->tokens_.size() <= g.tokens_.size() &&
                    std::equal(f->tokens_.begin(), f->tokens_.end(), g.tokens_.begin()) &&
                    std::ranges::equal(policies(*f), policies(g));
  const bool unread = session_.tokens_seen(f->sequence_) < std::ssize(g.tokens_);
  return same && (unread || !f->logits_.empty()) ? f->sequence_ : -1;
}

std::span<const KvPolicy> Scheduler::policies(const Generation& g) const {
  return g.request_.policies.empty() ? session_.options().policies : g.request_.policies;
}

PrefixReader Scheduler::prefix_reader(Generation& g) const {
  return {g.sequence_, g.tokens_, policies(g), g.prefixes_, g.request_.replies};
}

// Can tokens of this generation's prompt be skipped?
bool Scheduler::may_begin_in_prefix(const Generation& g) const {
  return prefixes_.enabled() && g.parked_.empty() && g.prefixes_.is_from_beginning &&
         !needs_every_row(g);
}

// Will another generation of this step soon reach a state that this one can start from?
bool Scheduler::waits_for_prefix(const Generation& g, size_t n_cached,
                                 std::span<const StepOutput> outputs) {
  return std::ranges::any_of(outputs, [&](const StepOutput& output) {
    Generation& o = *output.generation;
    return &o != &g && slots_.is_active(o.sequence_) && output.error == nullptr &&
           !output.deferred && o.reads_prompt() &&
           prefixes_.plan_for(prefix_reader(o), g.tokens_, policies(g), n_cached,
                              g.request_.replies);
  });
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
  foresee(rows);
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
  const auto waits = [](const Row& row) { return row.output->generation->awaits_mask_; };
  if (!rows.empty() && std::ranges::all_of(rows, waits)) std::this_thread::sleep_for(kMaskPoll);
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
    if (output.finish != Finish::none && g.n_evicted_ > 0) output.forgotten = forgotten(g);
    const Trace* const trace = g.request_.trace.get();
    if (trace == nullptr || trace->options().kept_every == 0) continue;
    const size_t n_before = g.tokens_.size() - g.n_input_tokens_;
    const size_t n = output.accepted.size() + (output.token >= 0 ? 1 : 0);
    const size_t every = trace->options().kept_every;
    const bool due = (n_before + n + every - 1) / every > (n_before + every - 1) / every;
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
  int64_t drafts_left = max_drafts();
  const auto n_decoding = static_cast<int32_t>(std::ranges::count_if(
      outputs, [](const StepOutput& output) { return !output.generation->reads_prompt(); }));
  const auto visit = [&](bool prompts) {
    for (StepOutput& output : outputs) {
      const Generation& g = *output.generation;
      if (g.sequence_ < 0 || output.deferred || output.finish != Finish::none) continue;
      if (g.reads_prompt() != prompts) continue;
      Row row = next_row(output);
      const int64_t n = std::ssize(row.part);
      if (n > left) continue;
      if (!prompts) row = with_drafts(row, left - n, drafts_left, n_decoding - 1);
      rows.push_back(row);
      left -= std::ssize(row.part);
      drafts_left -= row.n_drafts;
    }
  };
  visit(false);
  visit(true);
  return rows;
}

// The next chunk of a generation, or its next token.
Scheduler::Row Scheduler::next_row(StepOutput& output) const {
  const Generation& g = *output.generation;
  const size_t begin = session_.tokens_seen(g.sequence_);
  size_t end = g.tokens_.size();
  bool one_by_one = false;
  for (const TokenSpan& reply : g.request_.replies) {
    if (begin >= reply.end) continue;
    one_by_one = begin >= reply.begin && !session_.is_plain(g.sequence_);
    end = begin >= reply.begin ? reply.end : reply.begin;
    break;
  }
  // Zero if the first token is sampled from known logits.
  const int64_t n =
      std::min<int64_t>({static_cast<int64_t>(end - begin), n_batch_, session_.chunk(g.sequence_)});
  return {&output, g.sequence_, std::span(g.tokens_).subspan(begin, n), 0, 0, one_by_one};
}

void Scheduler::forward(std::span<const Row> batch) {
  std::vector<Row> rows(batch.begin(), batch.end());
  std::vector<Input> inputs;
  size_t n_results = 0;
  for (Row& row : rows) {
    row.result = n_results;
    inputs.push_back({row.sequence, row.part, row.n_drafts, row.one_by_one});
    n_results += inputs.back().n_logits();
  }
  Results results{std::vector<std::span<const float>>(n_results),
                  std::vector<int32_t>(n_results, -1)};
  std::vector<float> temperatures(rows.size());
  const auto started = std::chrono::steady_clock::now();
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
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  const auto reads_prompt = [](const Row& row) { return row.output->generation->reads_prompt(); };
  if (std::ranges::none_of(rows, reads_prompt)) {
    draft_cost_.add(static_cast<int32_t>(n_results - rows.size()), seconds.count());
  }
  choose_all(std::move(rows), results);
}

// Are all logits needed for more than sampling?
bool Scheduler::needs_logits(const Generation& g) {
  const Request& request = g.request_;
  return request.constraint != nullptr || request.allow_logits || g.prefixes_.is_end_wanted ||
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
  const size_t n_vocab = logits.size() / results.logits.size();
  for (size_t i = 0; i < results.logits.size(); ++i) {
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
  return session_.tokens_seen(row.sequence) >= std::ssize(row.output->generation->tokens_);
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
    session_.score(
        {row.sequence, row.part, 0, row.one_by_one}, [&](int32_t i, std::span<const float> logits) {
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

// Accumulates the hidden states of a chunk, or keeps the last scores of labels.
void Scheduler::pool(Generation& g, const Row& row) {
  const Pooling pooling = g.request_.pooling;
  const bool begins = g.pooled_.empty();
  const auto wanted = pooling == Pooling::rank ? Session::Values::labels : Session::Values::hidden;
  session_.read_every_row({row.sequence, row.part, 0, row.one_by_one}, wanted,
                          [&](int32_t at, std::span<const float> values) {
                            if (pooling == Pooling::first && (!begins || at > 0)) return;
                            g.pooled_.resize(values.size());
                            for (size_t i = 0; i < values.size(); ++i) {
                              g.pooled_[i] =
                                  values[i] + (pooling == Pooling::mean ? g.pooled_[i] : 0);
                            }
                          });
}

// Starts to compute the masks that will be needed after the pass.
void Scheduler::foresee(std::span<const Row> rows) noexcept {
  for (const Row& row : rows) {
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
bool Scheduler::has_mask(Generation& g, std::span<const int32_t> tokens,
                         std::span<const float> logits) {
  const ConstraintReady& ready = g.request_.constraint_ready;
  if (ready == nullptr || ready(tokens)) return true;
  if (logits.data() != g.logits_.data()) g.logits_.assign(logits.begin(), logits.end());
  g.awaits_mask_ = true;
  return false;
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
    return results.logits.empty() ? std::span<const float>() : results.logits[rows[i].result];
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
    if (!std::exchange(g.awaits_mask_, false)) prefixes_.save(prefix_reader(g), row_logits(i));
    if (!has_read_all(rows[i])) continue;
    masks_[i].clear();
    if (g.request_.constraint != nullptr) {
      try {
        const std::vector<int32_t> tokens = tokens_so_far(*rows[i].output);
        if (!has_mask(g, tokens, row_logits(i))) continue;
        masks_[i].assign((n_vocab + 31) / 32, 0);
        g.request_.constraint(tokens, masks_[i]);
      } catch (...) {
        fail(i);
        continue;
      }
    }
    g.allowed_ = masks_[i];
    choices.push_back({rows[i].output, row_logits(i),
                       results.picks.empty() ? -1 : results.picks[rows[i].result],
                       session_.room(rows[i].sequence) + rows[i].n_drafts > 0});
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

// Does not allocate: start() has reserved the memory.
void Scheduler::keep_logits(StepOutput& output, std::span<const float> logits) noexcept {
  Generation& g = *output.generation;
  if (output.token >= 0) {
    g.logits_.clear();
  } else if (g.request_.allow_logits && logits.data() != g.logits_.data()) {
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

void Scheduler::count_evictions(Generation& g) {
  const int32_t n = session_.tokens_seen(g.sequence_) - session_.tokens_kept(g.sequence_);
  evictions_ += n - std::exchange(g.n_evicted_, n);
}

Forgotten Scheduler::forgotten(const Generation& g) const {
  std::vector<char> kept = session_.kept_anywhere(g.sequence_);
  kept.resize(std::min(kept.size(), g.n_input_tokens_));
  const auto n = static_cast<int32_t>(std::ranges::count(kept, 0));
  return {n, session_.archive_bytes() > 0 ? n : 0,
          std::make_shared<const std::vector<char>>(std::move(kept))};
}

void Scheduler::park(Generation& g) {
  SnapshotText text;
  text.tokens = g.tokens_;
  g.parked_ = session_.save(g.sequence_, std::move(text));
  slots_.vacate(g.sequence_);
  g.sequence_ = -1;
}

void Scheduler::release(Generation& g) {
  g.parked_.clear();
  if (g.sequence_ >= 0) slots_.release(g.sequence_);
}

void Scheduler::forget(Generation& g) {
  g.parked_.clear();
  if (g.sequence_ >= 0) slots_.vacate(g.sequence_);
  g.sequence_ = -1;
}

void Scheduler::restore(const std::shared_ptr<Generation>& generation,
                        std::span<const std::byte> snapshot) {
  Generation& g = *generation;
  const int32_t sequence = slots_.take();
  if (sequence < 0) throw std::runtime_error("all sequences are in use");
  if (snapshot.empty() || slots_.has_own_policies(sequence)) slots_.reset(sequence, {});
  if (!snapshot.empty()) {
    SnapshotText text = session_.load(sequence, snapshot);
    g.tokens_ = std::move(text.tokens);
    g.logits_ = std::move(text.logits);
  }
  g.sequence_ = sequence;
  slots_.occupy(sequence, generation);
  slots_.release(sequence);  // the generation has ended
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
  if (!slots_.holds(g.sequence_, g)) {
    throw std::runtime_error("the cache does not hold this sequence any more");
  }
  return session_.save(g.sequence_, std::move(text));
}

}  // namespace h2o
