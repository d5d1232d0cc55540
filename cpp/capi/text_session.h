// TextSession: an engine with one sequence, and the tokens and random state shared by its requests:
// each continues where the last one ended.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "capi/h2o.h"
#include "capi/text_model.h"
#include "text/engine.h"

namespace h2o::capi {

// The parts of an engine.
struct EngineParts {
  std::shared_ptr<TextModel> model;
  SessionOptions session;
  std::shared_ptr<DraftModel> draft_model;  // nullptr: none

  std::shared_ptr<Model> core_model() const { return {model, &model->model}; }
  std::shared_ptr<const Tokenizer> tokenizer() const { return {model, &model->tokenizer}; }
};

struct StreamOptions {
  std::optional<int32_t> max_tokens = {};  // see Request
  bool ignore_end = false;
  bool parse_special = false;
  std::vector<std::string> stop = {};
};

class TextSession {
 public:
  // Returns whether to continue.
  using Sink = std::function<bool(const std::string& piece)>;

  // Throws InvalidArgument, OutOfMemory.
  explicit TextSession(const EngineParts& parts);

  void reset();

  // Changes the sampling options. Without a seed the random state is kept.
  void set_sampling(const SamplerOptions& options, bool seeded);

  // See the functions of these names in h2o.h. They throw Failure for H2O_CONTEXT_FULL and
  // H2O_CANCELLED.
  h2o_generation stream(std::string_view prompt, const StreamOptions& options, const Sink& sink);
  void feed(std::span<const int32_t> tokens);
  int32_t sample();
  std::span<const float> logits();

  // Cancels the running call, or else the next one. Safe in a signal handler.
  void cancel() noexcept { cancelled_.store(true, std::memory_order_relaxed); }
  void clear_cancel() noexcept { cancelled_.store(false, std::memory_order_relaxed); }

  std::vector<std::byte> save() const;
  void load(std::span<const std::byte> snapshot);

  std::vector<int32_t> tokens() const;
  int32_t n_tokens() const;
  const Session& session() const { return engine_.session(); }

 private:
  // Returns and clears the cancel flag: each cancel ends one call.
  bool cancelled() noexcept { return cancelled_.exchange(false, std::memory_order_relaxed); }
  size_t n_unread() const { return n_tokens() - session().tokens_seen(0); }
  std::span<const float> known_logits() const;  // after the last token; may be empty
  void check_room(size_t n_more) const;         // throws Failure if n_more tokens do not fit
  Sampler sampler_by(const SamplerOptions& options, std::span<const int32_t> tokens) const;
  void append(std::span<const int32_t> tokens);
  Engine::Handle submit(Request request);
  bool run(const Engine::Handle& generation, const Sink& sink);  // false if cancelled
  void adopt(const Engine::Handle& generation);
  void read_all();  // throws Failure if cancelled

  const std::shared_ptr<TextModel> model_;
  Engine engine_;
  Engine::Handle last_;                 // owns the first tokens, in sequence 0; may be nullptr
  std::vector<int32_t> added_;          // further tokens
  std::string held_text_, held_bytes_;  // from a snapshot: emitted first by the next stream
  SamplerOptions sampling_;
  const std::shared_ptr<Sampler> sampler_;  // has accepted all tokens
  std::atomic<bool> cancelled_ = false;
};

}  // namespace h2o::capi
