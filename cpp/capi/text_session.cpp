#include "capi/text_session.h"

#include <utility>

#include "capi/handle.h"
#include "capi/options.h"
#include "text/make_sampler.h"

namespace h2o::capi {
namespace {

struct Cancelled {};

}  // namespace

TextSession::TextSession(const EngineParts& parts)
    : model_(parts.model),
      engine_(parts.core_model(), parts.tokenizer(), parts.session, {}, parts.draft_model),
      sampling_({.seed = random_seed()}),
      sampler_(std::make_shared<Sampler>(sampling_, model_->model.config.n_vocab)) {}

void TextSession::reset() {
  Sampler sampler = sampler_by(sampling_, {});  // no tokens to penalize
  sampler.set_random_state(sampler_->random_state());
  last_ = engine_.restore({}, [] {});
  added_.clear();
  held_text_.clear();
  held_bytes_.clear();
  *sampler_ = std::move(sampler);
  clear_cancel();
}

void TextSession::set_sampling(const SamplerOptions& options, bool seeded) {
  Sampler sampler = sampler_by(options, tokens());
  if (!seeded) sampler.set_random_state(sampler_->random_state());
  SamplerOptions copy = options;  // may fail, the rest does not
  *sampler_ = std::move(sampler);
  sampling_ = std::move(copy);
}

// A sampler that has accepted these tokens.
Sampler TextSession::sampler_by(const SamplerOptions& options,
                                std::span<const int32_t> tokens) const {
  Sampler sampler = make_sampler(options, model_->tokenizer, model_->model.config.n_vocab,
                                 engine_.session().options().n_ctx);
  sampler.accept(tokens);
  return sampler;
}

h2o_generation TextSession::stream(std::string_view prompt, const StreamOptions& options,
                                   const Sink& sink) {
  const bool begins = n_tokens() == 0;
  const std::vector<int32_t> added = model_->tokenizer.encode(
      prompt, {.add_special = begins, .parse_special = options.parse_special, .begins = begins});
  require((!prompt.empty() && !added.empty()) || n_unread() > 0 || !known_logits().empty(),
          "the prompt is empty, and so is the sequence");
  check_room(added.size());
  append(added);
  const Engine::Handle generation = submit({.held = held_text_ + held_bytes_,
                                            .max_tokens = options.max_tokens,
                                            .stop = options.stop,
                                            .ignore_end = options.ignore_end});
  bool is_wanted = true;
  const bool done =
      run(generation, [&](const std::string& piece) { return is_wanted = sink(piece); });
  if (!done && is_wanted) {
    const std::string held = generation->held_back();
    if (!held.empty()) sink(held);
  }
  clear_cancel();  // one that came too late for this stream does not end the next
  h2o_generation result = result_of(*generation);
  if (!done) result.finish = H2O_FINISH_CANCELLED;
  if (!generation->began()) result.n_prompt = static_cast<int32_t>(n_unread());
  return result;
}

void TextSession::feed(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    require(token >= 0 && token < model_->model.config.n_vocab, "token ", token,
            " is not in the vocabulary of ", model_->model.config.n_vocab);
  }
  check_room(tokens.size());
  append(tokens);
  read_all();
}

int32_t TextSession::sample() { return sampler_->sample(logits()); }

std::span<const float> TextSession::logits() {
  read_all();
  const std::span<const float> known = known_logits();
  require(
      !known.empty(),
      "there are no logits: no tokens have been processed since the session was opened or reset, "
      "or the loaded snapshot has none");
  return known;
}

std::span<const float> TextSession::known_logits() const {
  if (last_ == nullptr || !added_.empty()) return {};
  return last_->logits();
}

void TextSession::check_room(size_t n_more) const {
  const size_t n = n_unread() + n_more, room = session().room(0);
  if (n > room) {
    throw Failure{H2O_CONTEXT_FULL, concat(n, " more tokens, there is room for ", room,
                                           "; n_ctx is ", session().options().n_ctx)};
  }
}

void TextSession::append(std::span<const int32_t> tokens) {
  const size_t before = added_.size();
  added_.insert(added_.end(), tokens.begin(), tokens.end());
  try {
    sampler_->accept(tokens);
  } catch (...) {
    added_.resize(before);
    throw;
  }
}

std::vector<int32_t> TextSession::tokens() const {
  std::vector<int32_t> all = last_ == nullptr ? std::vector<int32_t>() : last_->tokens();
  all.insert(all.end(), added_.begin(), added_.end());
  return all;
}

int32_t TextSession::n_tokens() const {
  return (last_ == nullptr ? 0 : last_->n_tokens()) + static_cast<int32_t>(added_.size());
}

// Submits a request that continues after all tokens.
Engine::Handle TextSession::submit(Request request) {
  request.prompt = tokens();
  request.follows = last_;
  request.sampler = sampler_;
  request.allow_logits = true;
  request.drafts = true;
  return engine_.submit(std::move(request));
}

bool TextSession::run(const Engine::Handle& generation, const Sink& sink) {
  struct End {  // in all cases, tokens already processed stay in the sequence
    TextSession& session;
    const Engine::Handle& generation;
    ~End() {
      session.engine_.cancel(generation);  // no-op if it has ended
      session.adopt(generation);
    }
  };
  const End end{*this, generation};
  const auto take_cancel = [this] {
    if (cancelled()) throw Cancelled();
  };
  try {
    take_cancel();
    while (const std::optional<Piece> piece = engine_.next(generation, take_cancel)) {
      adopt(generation);
      if (!sink(piece->text)) return false;
      if (!generation->has_ended()) take_cancel();
    }
  } catch (const Cancelled&) {
    return false;
  }
  return true;
}

// If it has started, the cache holds its tokens.
void TextSession::adopt(const Engine::Handle& generation) {
  if (last_ == generation || !generation->began()) return;
  last_ = generation;
  added_.clear();
  if (generation->request().held.empty()) return;
  held_text_.clear();
  held_bytes_.clear();
}

void TextSession::read_all() {
  bool done = true;
  if (n_unread() > 0) {
    done = run(submit({.max_tokens = 0}), [](const std::string&) { return true; });
  }
  if (!done || cancelled()) throw Failure{H2O_CANCELLED, "cancelled"};
}

std::vector<std::byte> TextSession::save() const {
  SnapshotText text = {.tokens = tokens(),
                       .note = {},
                       .random_state = sampler_->random_state(),
                       .held_text = held_text_,
                       .held_bytes = held_bytes_};
  const std::span<const float> known = known_logits();
  text.logits.assign(known.begin(), known.end());
  return session().save(0, std::move(text));
}

void TextSession::load(std::span<const std::byte> snapshot) {
  SnapshotText found = open_snapshot(snapshot).text;
  Sampler sampler = sampler_by(sampling_, {});
  try {
    const std::string& state = found.random_state;
    sampler.set_random_state(state.empty() ? sampler_->random_state() : state);
    sampler.accept(found.tokens);
  } catch (const InvalidArgument& e) {  // an internal error, not the caller's
    throw FormatError(e.what());
  }
  last_ = engine_.restore(snapshot, [] {});
  added_.clear();
  held_text_ = std::move(found.held_text);
  held_bytes_ = std::move(found.held_bytes);
  *sampler_ = std::move(sampler);
}

}  // namespace h2o::capi
