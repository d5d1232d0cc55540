// Engines for the tests: a tiny rotary model, and a vocabulary of letters and partial characters.
#pragma once

#include <doctest/doctest.h>

#include <map>
#include <memory>
#include <optional>
#include <semaphore>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gguf_writer.h"
#include "session_rig.h"
#include "text/engine.h"

namespace h2o {

// 61 tokens: three without text, of which 2 is the end token, then strings over "ab ", and complete
// and partial characters.
class LetterVocabulary {
 public:
  static const LetterVocabulary& get() {
    static const LetterVocabulary kOne;
    return kOne;
  }

  std::shared_ptr<const Tokenizer> tokenizer() const { return tokenizer_; }
  int32_t id(const std::string& name) const { return ids_.at(name); }

  // One token per letter; "🦙" is one too.
  std::vector<int32_t> tokens(const std::vector<std::string>& names) const {
    std::vector<int32_t> out;
    for (const std::string& name : names) out.push_back(id(name));
    return out;
  }

 private:
  LetterVocabulary() : file_(content()), gguf_(file_.path), tokenizer_(make()) {}

  std::shared_ptr<const Tokenizer> make() { return std::make_shared<const Tokenizer>(gguf_, 61); }

  // Bytes are spelled in GPT-2's alphabet: "ð", "Ł", "¦", "Ļ" are those of "🦙".
  std::string content() {
    std::vector<std::string> names = {"<s>", "<pad>", "</s>", "a",  "b",  "Ġ",    "ð",
                                      "Ł",   "¦",     "Ļ",    "Ã",  "©",  "ðŁ¦Ļ", "Ã©",
                                      "aðŁ", "¦Ļa",   "aÃ",   "©b", "ÃÃ", "Ġa",   "bĠ"};
    for (int n = 2; names.size() < 61; ++n) {
      for (int i = 0; i < 1 << n && names.size() < 61; ++i) {
        std::string name;
        for (int j = 0; j < n; ++j) name += (i >> j & 1) != 0 ? 'b' : 'a';
        names.push_back(name);
      }
    }
    std::string tokens = bytes(GgufType::string, uint64_t{61});
    std::string types = bytes(GgufType::i32, uint64_t{61});
    for (size_t i = 0; i < names.size(); ++i) {
      ids_[names[i]] = static_cast<int32_t>(i);
      tokens += bytes(names[i]);
      types += bytes(int32_t{i < 3 ? 3 : 1});
    }
    Writer writer;
    writer.key("tokenizer.ggml.model", GgufType::string, "gpt2")
        .key("tokenizer.ggml.pre", GgufType::string, "gpt-2")
        .key("tokenizer.ggml.eos_token_id", GgufType::u32, uint32_t{2})
        .key("tokenizer.ggml.merges", GgufType::array, GgufType::string, uint64_t{0});
    writer.n_keys += 2;
    writer.keys += bytes("tokenizer.ggml.tokens", GgufType::array) + tokens;
    writer.keys += bytes("tokenizer.ggml.token_type", GgufType::array) + types;
    return writer.file();
  }

  std::map<std::string, int32_t> ids_;
  TempFile file_;
  GgufFile gguf_;
  std::shared_ptr<const Tokenizer> tokenizer_;
};

inline std::shared_ptr<Model> rotary_model() {
  return load(H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf", 1);
}

// Prompts are processed in chunks of four; positions roll.
inline SessionOptions engine_options(int32_t n_sequences, int32_t max_sequences = 0) {
  return {.policies = {{.sinks = 1, .heavy = 3, .recent = 4}},
          .n_ctx = 40,
          .n_batch = 4,
          .n_sequences = n_sequences,
          .max_sequences = max_sequences};
}

inline std::shared_ptr<Engine> make_engine(const std::shared_ptr<Model>& model,
                                           const SessionOptions& options) {
  return std::make_shared<Engine>(model, LetterVocabulary::get().tokenizer(), options);
}

// For waits that are not interrupted.
inline void no_interrupt() {}

// The result of a request.
struct Outcome {
  std::vector<int32_t> tokens;
  std::string text;
  Finish finish;
  bool operator==(const Outcome&) const = default;
};

inline Outcome outcome(const Generation& generation) {
  return {generation.tokens(), generation.text(), generation.progress().finish};
}

inline Outcome finished(Engine& engine, const Engine::Handle& generation) {
  while (engine.next(generation, no_interrupt)) {
  }
  return outcome(*generation);
}

// The outcome with an engine of its own.
inline Outcome alone(const std::shared_ptr<Model>& model, Request request,
                     SessionOptions options = engine_options(1)) {
  options.n_sequences = options.max_sequences = 1;
  request.eager = false;
  request.follows = nullptr;
  const auto engine = make_engine(model, options);
  return finished(*engine, engine->submit(std::move(request)));
}

// Has a random length and random options, and is valid.
inline Request random_request(Random& random) {
  Request request;
  request.prompt.resize(random.integer(1, 30));
  for (int32_t& token : request.prompt) token = random.integer(0, 60);
  SamplerOptions& sampling = request.sampling;
  sampling.temperature = random.flip() ? 0.0f : random.real(0.5f, 1.5f);
  sampling.top_k = random.integer(0, 30);
  sampling.repeat_penalty = random.flip() ? 1.0f : 1.3f;
  sampling.repeat_last_n = random.integer(-1, 8);
  sampling.seed = random.bits();
  request.max_tokens = random.integer(1, 24);
  request.ignore_end = random.flip();
  const char* const stops[] = {"a b", "🦙", "a🦙a", "bbb", "é", "\ufffda"};
  for (int n = random.integer(0, 3); n > 0; --n) request.stop.push_back(stops[random.bits() % 6]);
  const KvPolicy policies[] = {{.sinks = 0, .heavy = 2, .recent = 3},
                               {.sinks = 2, .heavy = 0, .recent = 4},
                               {.sinks = 1, .heavy = 3, .recent = 4}};
  if (random.flip()) request.policies = {policies[random.bits() % 3]};
  return request;
}

// Allows only the tokens of a script, one after another, then the end token.
inline Constraint scripted(std::vector<int32_t> script, size_t n_prompt) {
  return [=](std::span<const int32_t> tokens, std::span<uint32_t> allowed) {
    const size_t at = tokens.size() - n_prompt;
    const int32_t token = at < script.size() ? script[at] : 2;
    allowed[token / 32] |= 1u << token % 32;
  };
}

// Always "a".
inline Constraint only_a() {
  return
      [a = LetterVocabulary::get().id("a")](std::span<const int32_t>, std::span<uint32_t> allowed) {
        allowed[a / 32] |= 1u << a % 32;
      };
}

// Starts a generation and abandons it after one step.
inline void start_and_abandon(Engine& engine, const Engine::Handle& generation) {
  struct Interrupted {};
  try {
    engine.next(generation, [] { throw Interrupted(); });
  } catch (const Interrupted&) {
  }
}

// Random requests, with their outcomes when run alone.
struct Expected {
  Request request;
  Outcome outcome;
};

inline std::vector<Expected> expected_requests(const std::shared_ptr<Model>& model, uint64_t seed,
                                               int n) {
  Random random(seed);
  std::vector<Expected> all(n);
  for (Expected& one : all) {
    one.request = random_request(random);
    one.outcome = alone(model, one.request);
  }
  return all;
}

// Runs `body(i)` on n threads, and waits.
template <class Body>
void in_threads(int n, const Body& body) {
  std::vector<std::jthread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back([&body, i] { body(i); });
}

// Generates "a" without a limit.
inline Request endless() {
  Request request;
  request.prompt = {3, 4};
  request.max_tokens = kEndless;
  request.constraint = only_a();
  return request;
}

// A request whose first token blocks until it is released.
struct PausedRequest {
  std::counting_semaphore<> computing{0}, may_go_on{0};

  Request request() {
    Request request = endless();
    request.max_tokens = 3;
    request.constraint = [this, n = 0](auto tokens, std::span<uint32_t> allowed) mutable {
      only_a()(tokens, allowed);
      if (n++ > 0) return;
      computing.release();
      may_go_on.acquire();
    };
    return request;
  }
};

}  // namespace h2o
