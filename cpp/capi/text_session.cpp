#include "capi/text_session.h"

#include <chrono>
#include <random>

#include "capi/handle.h"
#include "text/detokenizer.h"

namespace h2o::capi {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

SamplerOptions seeded_differently() {
  std::random_device device;
  return {.seed = uint64_t{device()} << 32 | device()};
}

// What a snapshot holds besides text and cache, as h2o_cpp.Snapshot writes it.
constexpr std::string_view kNoteBegins = "{\"random_state\": ";

std::string note_of(const Sampler& sampler) {
  return text(kNoteBegins, '"', sampler.random_state(), "\", \"note\": null}");
}

// The random state in a note; empty if it has none.
std::string random_state_of(std::string_view note) {
  if (!note.starts_with(kNoteBegins)) throw FormatError("[snapshot] it was not saved by h2o");
  note.remove_prefix(kNoteBegins.size());
  if (!note.starts_with('"')) return "";
  note.remove_prefix(1);
  return std::string(note.substr(0, note.find('"')));
}

}  // namespace

TextSession::TextSession(std::shared_ptr<TextModel> model, const SessionOptions& options)
    : model_(std::move(model)),
      session_(std::shared_ptr<Model>(model_, &model_->model), options),
      sampling_(seeded_differently()),
      sampler_(sampling_, model_->model.config.n_vocab) {}

void TextSession::reset() {
  Sampler sampler = sampler_by(sampling_, {});  // no token has been repeated
  sampler.set_random_state(sampler_.random_state());
  session_.reset(0);
  tokens_.clear();
  logits_ = {};
  sampler_ = std::move(sampler);
  cancelled();
}

void TextSession::set_sampling(SamplerOptions options, bool seeded) {
  Sampler sampler = sampler_by(options, tokens_);
  if (!seeded) sampler.set_random_state(sampler_.random_state());
  sampler_ = std::move(sampler);
  sampling_ = options;
}

// A sampler of a text with these tokens.
Sampler TextSession::sampler_by(const SamplerOptions& options,
                                std::span<const int32_t> tokens) const {
  Sampler sampler(options, model_->model.config.n_vocab);
  sampler.accept(tokens);
  return sampler;
}

h2o_generation TextSession::stream(std::string_view prompt, const StreamOptions& options,
                                   const Sink& sink) {
  const bool begins = tokens_.empty();
  const std::vector<int32_t> added = model_->tokenizer.encode(
      prompt, {.add_special = begins, .parse_special = options.parse_special, .begins = begins});
  require((!prompt.empty() && !added.empty()) || n_unread() > 0 || !logits_.empty(),
          "the prompt is empty, and there is no text to go on from");
  check_room(added.size());
  append(added);
  h2o_generation generation = H2O_GENERATION;
  generation.n_prompt = static_cast<int32_t>(n_unread());
  const Clock::time_point started = Clock::now();
  const bool done = read();
  generation.prompt_seconds = seconds_since(started);
  generation.finish = done ? generate(options, sink, generation) : H2O_FINISH_CANCELLED;
  cancelled();  // what came too late for this stream is not meant for the next
  return generation;
}

// Token after token, until the text ends; returns why it did.
int32_t TextSession::generate(const StreamOptions& options, const Sink& sink,
                              h2o_generation& generation) {
  const Tokenizer& tokenizer = model_->tokenizer;
  Detokenizer pieces(options.stop);
  bool begins = !tokenizer.has_text(tokens_);  // no text yet
  int32_t finish = 0;
  std::string piece;
  while (finish == 0) {
    const int32_t token = sampler_.sample(logits_);
    if (tokenizer.ends(token) && !options.ignore_end) {
      finish = H2O_FINISH_STOP;
      break;
    }
    append({&token, 1});  // the last one need not be read, so there may be no room for it
    ++generation.n_generated;
    const std::string_view bytes = tokenizer.token_bytes(token, begins);
    begins = begins && tokenizer.token_bytes(token).empty();
    piece = pieces.push(bytes);
    if (pieces.stopped()) {
      finish = H2O_FINISH_STOP;
    } else if (generation.n_generated == options.max_tokens || session_.room(0) == 0) {
      finish = H2O_FINISH_LENGTH;
    }
    if (!piece.empty() && !sink(piece)) return H2O_FINISH_CANCELLED;
    if (finish != 0) break;
    const Clock::time_point started = Clock::now();
    if (!read()) finish = H2O_FINISH_CANCELLED;
    generation.decode_seconds += seconds_since(started);
  }
  piece = pieces.finish();
  if (!piece.empty() && !sink(piece)) return H2O_FINISH_CANCELLED;
  return finish;
}

void TextSession::feed(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    require(token >= 0 && token < model_->model.config.n_vocab, "token ", token,
            " is not in the vocabulary of ", model_->model.config.n_vocab);
  }
  check_room(tokens.size());
  append(tokens);
  if (!read()) throw Failure{H2O_CANCELLED, "cancelled"};
}

int32_t TextSession::sample() { return sampler_.sample(logits()); }

std::span<const float> TextSession::logits() {
  if (!read()) throw Failure{H2O_CANCELLED, "cancelled"};
  require(
      !logits_.empty(),
      "there are no logits: nothing has been read since the session was opened or reset, or what "
      "was loaded was saved without them");
  return logits_;
}

void TextSession::check_room(size_t n_more) const {
  const size_t n = n_unread() + n_more, room = session_.room(0);
  if (n > room) {
    throw Failure{H2O_CONTEXT_FULL, text(n, " more tokens, there is room for ", room, "; n_ctx is ",
                                         session_.options().n_ctx)};
  }
}

void TextSession::append(std::span<const int32_t> tokens) {
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  try {
    sampler_.accept(tokens);
  } catch (...) {
    tokens_.resize(tokens_.size() - tokens.size());
    throw;
  }
}

bool TextSession::read() {
  while (const size_t n = n_unread()) {
    if (cancelled()) return false;
    logits_ = {};
    const size_t chunk = std::min<size_t>(n, session_.chunk(0));
    const Input input{0, std::span(tokens_).subspan(session_.tokens_seen(0), chunk)};
    logits_ = session_.step({&input, 1});
  }
  return !cancelled();
}

std::vector<std::byte> TextSession::save() const {
  SnapshotText text = {.tokens = tokens_, .note = note_of(sampler_)};
  text.logits.assign(logits_.begin(), logits_.end());
  return session_.save(0, std::move(text));
}

void TextSession::load(std::span<const std::byte> snapshot) {
  const SnapshotText found = open_snapshot(snapshot).text;
  const std::string state = random_state_of(found.note);
  Sampler sampler = sampler_by(sampling_, {});
  try {
    sampler.set_random_state(state.empty() ? sampler_.random_state() : state);
    sampler.accept(found.tokens);
  } catch (const InvalidArgument& e) {  // not the caller's mistake
    throw FormatError(e.what());
  }
  SnapshotText text = session_.load(0, snapshot);
  tokens_ = std::move(text.tokens);
  loaded_ = std::move(text.logits);
  logits_ = loaded_;
  sampler_ = std::move(sampler);
}

}  // namespace h2o::capi
