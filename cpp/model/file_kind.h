// Recognizes GGUF files that are no model of text, or a model in a layout of the past.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "io/gguf_shards.h"

namespace h2o {

// Throws FormatError that says what the file is, and what to take instead, unless it may be a
// model.
void expect_text_model(const GgufShards& file);

// Tensors of an encoder of images or sound: v.patch_embd.weight, mm.0.bias, a.blk.0.attn_q.weight.
bool is_of_encoder(std::string_view tensor);

// Names the parts of a file that are not used.
std::vector<std::string> unused_parts(const GgufShards& file);

// Throws FormatError for a file of a known architecture that has only a vocabulary.
void expect_weights(const GgufShards& file);

}  // namespace h2o
