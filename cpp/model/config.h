// Config: what a model is, read from a GGUF file's metadata and validated once.
#pragma once

#include <cstdint>
#include <string>

#include "io/gguf.h"

namespace h2o {

struct Config {
  std::string architecture;  // general.architecture, the prefix "{a}" of the keys below
  int32_t n_ctx_train = 0;   // {a}.context_length: the longest text it was trained on
  int32_t n_embd = 0;        // {a}.embedding_length
  int32_t n_layers = 0;      // {a}.block_count
  int32_t n_ff = 0;          // {a}.feed_forward_length
  int32_t n_heads = 0;       // {a}.attention.head_count
  int32_t n_kv_heads = 0;    // {a}.attention.head_count_kv, default n_heads
  int32_t head_dim = 0;      // n_embd / n_heads
  int32_t n_vocab = 0;       // rows of token_embd.weight
  float norm_eps = 0;        // {a}.attention.layer_norm_epsilon
};

// Throws FormatError naming the file and the key; for an unknown architecture it lists the known.
Config read_config(const GgufFile& file);

}  // namespace h2o
