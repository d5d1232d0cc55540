// Compares the test device with the scalar CPU: the same model, step by step from the same state,
// which is transferred between them as a snapshot.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <vector>

#include "cpu/cpu_backend.h"
#include "session_rig.h"

namespace h2o {

// A session of the same model on each.
struct Pair {
  Pair(const std::filesystem::path& path, const SessionOptions& options)
      : cpu(std::make_shared<Model>(path, make_cpu_backend(1, "scalar")), options),
        device(std::make_shared<Model>(path, test_backend(2)), options) {}

  Session cpu, device;
};

inline std::vector<std::byte> save(const Session& session) {
  return session.save(0, {.tokens = std::vector<int32_t>(session.tokens_seen(0)), .note = ""});
}

// The most that one matrix may add to the relative error of the logits: with weights that are not
// F32, rows may be rounded to 8 bits, relative to the largest of 32 or to each number; the cache
// may be rounded to f16; otherwise about 64 roundings in a sum and its surroundings.
inline double matrix_error(const Tensor& weight, DType kv_dtype) {
  if (!weight) return 0;
  if (weight.dtype != DType::f32) return 0x1p-8;
  return kv_dtype != DType::f32 ? 0x1p-11 : 64 * kUnit;
}

// Each matrix of the layers and the 2 outside adds such an error with random sign; 6 standard
// deviations are allowed.
inline double relative_error(const Model& model, DType kv_dtype) {
  const Weights& w = model.weights;
  double squares = 0;
  const auto add = [&](const Tensor& weight) {
    squares += std::pow(matrix_error(weight, kv_dtype), 2);
  };
  add(w.token_embd);
  add(w.output.weight);
  for (const Layer& layer : w.layers) {
    const Mixture& m = layer.mixture;
    const DeltaNetLayer& d = layer.delta;
    const ShortConvLayer& s = layer.short_conv;
    const StateSpaceLayer& p = layer.state_space;
    for (const Affine* one : {&layer.attn_q,   &layer.attn_k,
                              &layer.attn_v,   &layer.attn_output,
                              &layer.ffn_gate, &layer.ffn_up,
                              &layer.ffn_down, &d.qkv,
                              &d.gate,         &d.alpha,
                              &d.beta,         &d.beta_alpha,
                              &d.output,       &m.router,
                              &m.gate,         &m.up,
                              &m.down,         &m.shared_router,
                              &m.shared_gate,  &m.shared_up,
                              &m.shared_down,  &s.input,
                              &s.output,       &p.gate,
                              &p.xbc,          &p.dt,
                              &p.output}) {
      add(one->weight);
    }
  }
  return 6 * std::sqrt(squares);
}

// Are a and b the same kept tokens with the same scores, up to this error, or different ones where
// the error could have decided?
inline bool close_entries(const std::vector<KvEntry>& a, const std::vector<KvEntry>& b,
                          double error) {
  if (a.size() != b.size()) return false;
  const auto find = [](const std::vector<KvEntry>& entries, int32_t position) {
    return std::ranges::find(entries, position, &KvEntry::position);
  };
  for (const KvEntry& x : a) {
    const auto y = find(b, x.position);
    if (y != b.end() && !(std::abs(x.score - y->score) <= error)) return false;
    if (y != b.end()) continue;
    for (const KvEntry& instead : b) {
      const bool new_in_b = find(a, instead.position) == a.end();
      if (new_in_b && !(std::abs(x.score - instead.score) <= 2 * error)) return false;
    }
  }
  return true;
}

// Numbers of tokens per step of check_steps(), chosen by Random(1).
constexpr int32_t kSteps[] = {7, 1, 1, 9, 1, 2, 1, 1};

inline void check_steps(Pair& pair, DType kv_dtype) {
  const Model& model = pair.cpu.model();
  Random random(1);
  for (const int32_t n : kSteps) {
    CAPTURE(n);
    const bool rolls = pair.cpu.rolling(0);
    pair.device.load(0, save(pair.cpu));
    CHECK(pair.device.rolling(0) == rolls);
    const std::vector<int32_t> tokens = random_tokens(random, model, n);
    const std::vector<float> expected = feed(pair.cpu, 0, tokens);
    const std::vector<float> logits = feed(pair.device, 0, tokens);
    double largest = 0, difference = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max<double>(largest, std::abs(expected[i]));
      const double off = std::abs(double{expected[i]} - logits[i]);
      difference = off <= difference ? difference : off;  // or NaN
    }
    const double error = relative_error(model, kv_dtype);
    CHECK(difference <= error * largest);
    // A probability's error is that of two attention logits, of up to 8 here; each row and head of
    // the group adds one.
    const int32_t group = model.config.n_heads / model.config.n_kv_heads;
    for (int32_t layer = 0; layer < model.config.n_layers; ++layer) {
      for (int32_t kv_head = 0; kv_head < model.config.n_kv_heads; ++kv_head) {
        CHECK(close_entries(pair.cpu.entries(layer, 0, kv_head),
                            pair.device.entries(layer, 0, kv_head), 16 * error * n * group));
      }
    }
  }
}

}  // namespace h2o
