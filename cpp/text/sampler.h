// Sampler: picks the next token from logits.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

namespace h2o {

struct SamplerOptions {
  float temperature = 0.8f;     // 0 = greedy
  int32_t top_k = 40;           // keep the k most probable; 0 = all
  float top_p = 0.95f;          // keep the smallest set with this probability; 1 = all
  float min_p = 0.05f;          // keep what is at least this times the most probable; 0 = all
  float repeat_penalty = 1.0f;  // divides positive, multiplies negative logits of recent tokens
  int32_t repeat_last_n = 64;   // how many tokens are recent; -1 = all, 0 = none
  uint64_t seed = 0;
};

// The order is penalty, temperature, top-k, top-p, min-p, as in Hugging Face transformers.
// The same seed, options and logits give the same tokens, up to the rounding of exp().
class Sampler {
 public:
  // Throws InvalidArgument for an option out of range.
  Sampler(const SamplerOptions& options, int32_t n_vocab);

  // The next tokens of the text, prompt or generated. If it throws, none has been accepted.
  void accept(std::span<const int32_t> tokens);
  void accept(int32_t token) { accept({&token, 1}); }

  // What the next random numbers depend on, as text; and back. Throws InvalidArgument for others.
  std::string random_state() const;
  void set_random_state(const std::string& state);

  // The next token from logits [n_vocab]; does not accept it. Greedy ties go to the lower id.
  // A NaN counts as -infinity.
  // allowed: a bit for each token that may be chosen; empty: all.
  int32_t sample(std::span<const float> logits, std::span<const uint32_t> allowed = {});

 private:
  struct Candidate {
    int32_t token;
    float logit;
  };

  void remember(int32_t token);
  void penalise();
  void keep_likely();
  int32_t draw();

  SamplerOptions options_;
  std::mt19937_64 random_;
  std::vector<int32_t> recent_;        // ring of the last repeat_last_n tokens, or all of them
  size_t next_recent_ = 0;             // where the ring goes on
  std::vector<int32_t> counts_;        // [n_vocab] how often each token is in recent_
  std::vector<Candidate> candidates_;  // [n_vocab], reused
  std::vector<float> weights_;         // [n_vocab], reused: exp(logit - largest)
};

}  // namespace h2o
