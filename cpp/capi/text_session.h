// TextSession: a text that is read and continued, with its cache, sampler and random numbers.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "capi/h2o.h"
#include "capi/text_model.h"
#include "model/session.h"
#include "text/sampler.h"

namespace h2o::capi {

struct StreamOptions {
  int32_t max_tokens = 0;  // 0: no limit
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
  void set_sampling(SamplerOptions options, bool seeded);

  // The calls of these names in h2o.h. They throw Failure for H2O_CONTEXT_FULL and H2O_CANCELLED.
  h2o_generation stream(std::string_view prompt, const StreamOptions& options, const Sink& sink);
  void feed(std::span<const int32_t> tokens);
  int32_t sample();
  std::span<const float> logits();

  // Ends what another thread is at, or else what is begun next. Safe in a signal handler.
  void cancel() noexcept { cancelled_.store(true, std::memory_order_relaxed); }

  std::vector<std::byte> save() const;
  void load(std::span<const std::byte> snapshot);

  const std::vector<int32_t>& tokens() const { return tokens_; }
  const Session& session() const { return session_; }

 private:
  // Takes a cancel, if there is one: it ends one call.
  bool cancelled() noexcept { return cancelled_.exchange(false, std::memory_order_relaxed); }
  size_t n_unread() const { return tokens_.size() - session_.tokens_seen(0); }
  void check_room(size_t n_more) const;  // throws Failure if so many more cannot be read
  Sampler sampler_by(const SamplerOptions& options, std::span<const int32_t> tokens) const;
  void append(std::span<const int32_t> tokens);
  bool read();  // what is unread; false if it was cancelled
  int32_t generate(const StreamOptions& options, const Sink& sink, h2o_generation& generation);

  std::shared_ptr<TextModel> model_;
  Session session_;
  std::vector<int32_t> tokens_;    // of the text
  std::span<const float> logits_;  // after the last of them; empty where they are not known
  std::vector<float> loaded_;      // those of a snapshot
  SamplerOptions sampling_;
  Sampler sampler_;
  std::atomic<bool> cancelled_ = false;
};

}  // namespace h2o::capi
