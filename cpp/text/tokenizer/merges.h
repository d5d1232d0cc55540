// The merges of byte-pair encoding in a GGUF file.
#pragma once

#include "io/gguf.h"
#include "text/tokenizer/pair_table.h"
#include "text/tokenizer/vocabulary.h"

namespace h2o {

// tokenizer.ggml.merges, by rank. Throws FormatError.
PairTable read_merges(const GgufFile& file, const Vocabulary& vocabulary);

}  // namespace h2o
