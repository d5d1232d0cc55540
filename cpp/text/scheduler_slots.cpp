// Scheduler: assigning sequences to generations.
#include <algorithm>
#include <utility>

#include "core/error.h"
#include "text/make_sampler.h"
#include "text/scheduler.h"

namespace h2o {

void Scheduler::park(Generation& g) {
  SnapshotText text;
  text.tokens = g.tokens_;
  g.parked_ = session_.save(g.sequence_, std::move(text));
  vacate(g.sequence_);
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
  if (g.sequence_ >= 0) vacate(g.sequence_);
  g.sequence_ = -1;
}

void Scheduler::vacate(int32_t sequence) {
  slots_[sequence].owner.reset();
  slots_[sequence].active = false;
  slots_[sequence].used_at = 0;
}

void Scheduler::restore(const std::shared_ptr<Generation>& generation,
                        std::span<const std::byte> snapshot) {
  Generation& g = *generation;
  const int32_t sequence = take_slot();
  if (sequence < 0) throw std::runtime_error("all sequences are in use");
  Slot& slot = slots_[sequence];
  if (snapshot.empty() || slot.own_policies) {
    session_.reset(sequence, session_.options().policies);
    slot.owner.reset();
    slot.own_policies = false;
  }
  if (!snapshot.empty()) {
    SnapshotText text = session_.load(sequence, snapshot);
    g.tokens_ = std::move(text.tokens);
    g.logits_ = std::move(text.logits);
  }
  slot.owner = generation;
  slot.used_at = ++clock_;
  g.sequence_ = sequence;
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

// The sequence in which a generation can continue the one that it follows; -1: none. Requires an
// unprocessed token or known logits after the last one.
int32_t Scheduler::followed_slot(const Generation& g) const {
  const Generation* const f = g.request_.follows.get();
  if (f == nullptr || f->sequence_ < 0 || !g.parked_.empty()) return -1;
  const Slot& slot = slots_[f->sequence_];
  if (slot.active || slot.owner.lock().get() != f) return -1;
  const bool same = f->tokens_.size() <= g.tokens_.size() &&
                    std::equal(f->tokens_.begin(), f->tokens_.end(), g.tokens_.begin()) &&
                    f->request_.policies.empty() && g.request_.policies.empty();
  const bool unread = session_.tokens_seen(f->sequence_) < std::ssize(g.tokens_);
  return same && (unread || !f->logits_.empty()) ? f->sequence_ : -1;
}

// A free sequence that nothing can continue, else the least recently used, else a new one; -1 if
// all are in use.
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
  } catch (const FileError&) {  // of the archive
    max_sequences_ = n;
    return false;
  }
  slots_.resize(std::min(2 * n, max_sequences_));
  return true;
}

// Steps that may fail come before the sequence is taken over from the followed generation, which
// can otherwise be followed again.
void Scheduler::start(StepOutput& output, std::span<const StepOutput> outputs) {
  Generation& g = *output.generation;
  const Request& request = g.request_;
  int32_t sequence = -1;
  bool goes_on = false;
  try {
    sequence = followed_slot(g);
    goes_on = sequence >= 0;
    const bool resumes = !g.parked_.empty();
    if (!resumes) g.from_beginning_ = !goes_on && request.after.bytes.empty();
    FoundPrefix prefix;
    if (may_begin_in_prefix(g)) {
      prefix = prefixes_.find(g.tokens_, policies_of(g));
      if (waits_for_prefix(g, prefix.n_tokens, outputs)) {
        output.deferred = true;
        return;
      }
    }
    if (!goes_on) sequence = take_slot();
    if (sequence < 0) {
      output.deferred = true;
      return;
    }
    if (!resumes) prepare(g, goes_on, output);
    Slot& slot = slots_[sequence];
    if (!goes_on) {
      slot.owner.reset();
      slot.own_policies = true;  // until the reset succeeds
      session_.reset(sequence,
                     request.policies.empty() ? session_.options().policies : request.policies);
      slot.own_policies = !request.policies.empty();
    }
    if (resumes) {
      session_.load(sequence, g.parked_);
      g.parked_.clear();
    } else if (!request.after.bytes.empty()) {
      session_.load(sequence, request.after.bytes);
    } else if (prefix.entry != nullptr && load_prefix(g, prefix, sequence)) {
      output.n_cached = static_cast<int32_t>(prefix.n_tokens);
      g.from_beginning_ = prefix.entry->head.kind != PrefixKind::output_end;
    }
    if (!resumes) plan_prefixes(g, sequence, static_cast<size_t>(output.n_cached));
    const auto n_unread = static_cast<int32_t>(g.tokens_.size()) - session_.tokens_seen(sequence);
    if (n_unread > session_.room(sequence)) {
      throw ContextFull(text("the prompt has ", g.tokens_.size(), " tokens, ", limit()));
    }
    g.sequence_ = sequence;
    slot.owner = output.generation;
    slot.active = true;
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
    if (sequence >= 0 && !goes_on) vacate(sequence);
    g.sequence_ = -1;
  }
}

// Sets up everything besides the sequence.
void Scheduler::prepare(Generation& g, bool goes_on, StepOutput& output) {
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
  if (goes_on) g.logits_ = request.follows->logits_;
  if (request.keeps_logits) g.logits_.reserve(n_vocab);
  output.piece = g.detokenizer_.push(request.held);
  g.begins_ = !tokenizer_.has_text(g.tokens_);
}

}  // namespace h2o
