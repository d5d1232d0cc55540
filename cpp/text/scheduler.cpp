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

}  // namespace

Scheduler::Scheduler(Session& session, const Tokenizer& tokenizer, int32_t n_batch,
                     const PrefixCacheOptions& prefixes)
    : session_(session),
      tokenizer_(tokenizer),
      n_batch_(n_batch),
      slots_(session),
      draft_cost_(session.options().max_drafts),
      prefixes_(session, n_batch, prefixes),
      pooler_(session, tokenizer),
      sampler_(session, tokenizer) {}

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
      text.tokens = output.tokens();
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
    if (request.trace != nullptr) request.trace->begin(session_, sequence);
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
  std::vector<StepRow> rows = next_rows(outputs);
  session_.model().config.family->encoder ? pooler_.encode(rows) : decode(rows);
  const auto waits = [](const StepRow& row) { return row.output->generation->awaits_mask_; };
  if (!rows.empty() && std::ranges::all_of(rows, waits)) std::this_thread::sleep_for(kMaskPoll);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  for (const StepRow& row : rows) {
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

void Scheduler::decode(std::span<StepRow> rows) {
  std::vector<StepRow> batch;
  RowSampler::foresee(rows);
  for (StepRow& row : rows) {
    Generation& g = *row.output->generation;
    if (row.part.empty()) {
      sample({&row, 1}, {{g.logits_}, {}});
    } else if (needs_every_row(g) && g.reads_prompt()) {
      score(row);
    } else {
      batch.push_back(row);
    }
  }
  if (!batch.empty()) forward(batch);
}

std::vector<StepRow> Scheduler::next_rows(std::vector<StepOutput>& outputs) {
  std::vector<StepRow> rows;
  int64_t left = session_.options().n_batch;
  int64_t drafts_left = max_drafts();
  const auto n_decoding = static_cast<int32_t>(std::ranges::count_if(
      outputs, [](const StepOutput& output) { return !output.generation->reads_prompt(); }));
  // With the drafts of the step. A prompt leaves no room, unless there is no limit.
  const int64_t draft_rows = session_.model().backend->capabilities().draft_rows;
  int64_t draft_rows_left = draft_rows - n_decoding;
  if (n_decoding < std::ssize(outputs)) draft_rows_left -= session_.options().n_batch;
  const auto visit = [&](bool prompts) {
    for (StepOutput& output : outputs) {
      const Generation& g = *output.generation;
      if (g.sequence_ < 0 || output.deferred || output.finish != Finish::none) continue;
      if (g.reads_prompt() != prompts) continue;
      StepRow row = next_row(output);
      const int64_t n = std::ssize(row.part);
      if (n > left) continue;
      if (!prompts) {
        row = with_drafts(row, std::min(left - n, draft_rows_left), drafts_left, n_decoding - 1);
      }
      rows.push_back(row);
      left -= std::ssize(row.part);
      drafts_left -= row.n_drafts;
      draft_rows_left -= row.n_drafts;
    }
  };
  visit(false);
  visit(true);
  return rows;
}

// The row of a generation's next token, with drafts of those after it: at most n_rows, and
// n_drafts, which are left in the step. It generates n_others tokens for others.
StepRow Scheduler::with_drafts(const StepRow& row, int64_t n_rows, int64_t n_drafts,
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
  std::span<const int32_t> drafts = g.request_.drafter->propose(
      g.tokens_, {static_cast<int32_t>(most), n_others, times, draft_cost_.seconds(), &session_,
                  row.sequence, g.sampler_.get()});
  drafts = drafts.first(std::min(drafts.size(), static_cast<size_t>(most)));
  g.drafted_.assign(row.part.begin(), row.part.end());
  g.drafted_.insert(g.drafted_.end(), drafts.begin(), drafts.end());
  row.output->accepted.reserve(drafts.size());
  row.output->n_drafts = static_cast<int32_t>(drafts.size());
  return {row.output, row.sequence, g.drafted_, row.output->n_drafts};
}

// The next chunk of a generation, or its next token.
StepRow Scheduler::next_row(StepOutput& output) const {
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

void Scheduler::forward(std::span<const StepRow> batch) {
  std::vector<StepRow> rows(batch.begin(), batch.end());
  std::vector<Input> inputs;
  size_t n_results = 0;
  for (StepRow& row : rows) {
    row.result = n_results;
    inputs.push_back({row.sequence, row.part, row.n_drafts, row.one_by_one});
    n_results += inputs.back().n_logits();
  }
  StepResults results{std::vector<std::span<const float>>(n_results),
                      std::vector<int32_t>(n_results, -1)};
  std::vector<float> temperatures(rows.size());
  const auto started = std::chrono::steady_clock::now();
  try {
    sampler_.pass(rows, inputs, temperatures, results);
  } catch (const InvalidArgument&) {  // nothing has changed; find the generation that caused it
    if (rows.size() == 1) {
      rows[0].output->error = std::current_exception();
    } else {
      for (const StepRow& row : rows) forward({&row, 1});
    }
    return;
  } catch (...) {
    for (const StepRow& row : rows) {
      row.output->error = std::current_exception();
      forget(*row.output->generation);
    }
    return;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - started;
  for (const StepRow& row : rows) observe(row);
  const auto reads_prompt = [](const StepRow& row) {
    return row.output->generation->reads_prompt();
  };
  if (std::ranges::none_of(rows, reads_prompt)) {
    draft_cost_.add(static_cast<int32_t>(n_results - rows.size()), seconds.count());
  }
  sample(rows, results);
}

// Processes a chunk of a prompt with the logits of every token.
void Scheduler::score(StepRow& row) {
  const Generation& g = *row.output->generation;
  const Request& request = g.request_;
  const int32_t begin = session_.tokens_seen(row.sequence);
  const auto n_tokens = static_cast<int32_t>(g.tokens_.size());
  std::vector<float> last;
  try {
    if (request.pooling != Pooling::none) {
      pooler_.read(row);
      return sample({&row, 1}, {});
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
    observe(row);
    sample({&row, 1}, {{last}, {}});
  } catch (...) {
    row.output->error = std::current_exception();
    if (session_.tokens_seen(row.sequence) == begin) forget(*row.output->generation);
  }
}

// Lets the drafter of a row see its step.
void Scheduler::observe(const StepRow& row) {
  const Generation& g = *row.output->generation;
  if (g.request_.drafter != nullptr) {
    g.request_.drafter->observe(g.tokens_, session_, row.sequence);
  }
}

// Saves the states that were planned for the ends of the rows, and samples the next tokens.
void Scheduler::sample(std::span<StepRow> rows, const StepResults& results) {
  for (const StepRow& row : rows) {
    Generation& g = *row.output->generation;
    if (std::exchange(g.awaits_mask_, false)) continue;  // they are saved
    prefixes_.save(prefix_reader(g), results.logits_of(row));
  }
  sampler_.sample(rows, results);
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
