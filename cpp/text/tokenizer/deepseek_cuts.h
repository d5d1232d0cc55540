// The cuts of DeepSeek's pre-tokenizers.
#pragma once

#include "text/tokenizer/cut.h"

namespace h2o::deepseek {

size_t newline(Text text);
size_t letters(Text text);
size_t punctuation(Text text);
size_t cased_letters(Text text);
size_t signs(Text text);
size_t until_last_spaces(Text text);
size_t beyond_latin(Text text);
size_t kana_and_ideographs(Text text);
size_t words(Text text);

}  // namespace h2o::deepseek
