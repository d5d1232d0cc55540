// TextSession: an engine with one sequence, and the tokens and random numbers that its requests
// share: each goes on where the last one ended.
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

struct StreamOptions {
  std::optional<int32_t> max_tokens = {};  // as Request has it
  bool ignore_end = false;
  bool parse_special = false;
  std::vector<std::string> stop = {};
};

class TextSession {
 public:
  // Returns whether to go on.
  using Sink = std::function<bool(const std::string& piece)>;

  // Throws InvalidArgument, OutOfMemory.
  TextSession(std::shared_ptr<TextModel> model, const SessionOptions& options);

  void reset();

  // Chooses by other options from now on. Without a seed the random numbers go on.
  void set_sampling(const SamplerOptions& options, bool seeded);

  // The calls of these names in h2o.h. They throw Failure for H2O_CONTEXT_FULL and H2O_CANCELLED.
  h2o_generation stream(std::string_view prompt, const StreamOptions& options, const Sink& sink);
  void feed(std::span<const int32_t> tokens);
  int32_t sample();
  std::span<const float> logits();

  // Ends the call of another thread, or else the next one. Safe in a signal handler.
  void cancel() noexcept { cancelled_.store(true, std::memory_order_relaxed); }

  std::vector<std::byte> save() const;
  void load(std::span<const std::byte> snapshot);

  std::vector<int32_t> tokens() const;
  int32_t n_tokens() const;
  const Session& session() const { return engine_.session(); }

 private:
  // Takes a cancel, if there is one: it ends one call.
  bool cancelled() noexcept { return cancelled_.exchange(false, std::memory_order_relaxed); }
  size_t n_unread() const { return n_tokens() - session().tokens_seen(0); }
  std::span<const float> known_logits() const;  // after the last token; or none
  void check_room(size_t n_more) const;         // throws Failure if so many more cannot be read
  Sampler sampler_by(const SamplerOptions& options, std::span<const int32_t> tokens) const;
  void append(std::span<const int32_t> tokens);
  Engine::Handle submit(Request request);
  bool run(const Engine::Handle& generation, const Sink& sink);  // false if it was cancelled
  void adopt(const Engine::Handle& generation);
  void read_all();  // throws Failure if it was cancelled

  const std::shared_ptr<TextModel> model_;
  Engine engine_;
  Engine::Handle last_;         // whose tokens are the first, and are read in sequence 0; or none
  std::vector<int32_t> added_;  // the others
  std::string held_text_, held_bytes_;  // by a snapshot: they come first in the next stream
  SamplerOptions sampling_;
  const std::shared_ptr<Sampler> sampler_;  // has accepted all tokens
  std::atomic<bool> cancelled_ = false;
};

}  // namespace h2o::capi
