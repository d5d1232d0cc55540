// Tables of Unicode, each sorted by its first column. tools/unicode_tables writes them.
#pragma once

#include <span>

namespace h2o::unicode {

struct Range {
  char32_t first, last;
};
struct CombiningRange {
  char32_t first, last;
  unsigned char combining_class;
};
struct Decomposition {
  char32_t whole, first, second;  // second: 0 if there is only one part
};
struct LowerCase {
  char32_t code, lower;
};
struct Composition {
  char32_t first, second, whole;
};

extern const std::span<const Range> letters;                 // \p{L}
extern const std::span<const Range> upper;                   // [\p{Lu}\p{Lt}]
extern const std::span<const Range> lower;                   // \p{Ll}
extern const std::span<const Range> marks;                   // \p{M}
extern const std::span<const Range> numbers;                 // \p{N}
extern const std::span<const Range> decimals;                // \d
extern const std::span<const Range> more_words;              // \w without \p{L}, \p{M} and \d
extern const std::span<const Range> punctuation;             // \p{P}
extern const std::span<const Range> symbols;                 // \p{S}
extern const std::span<const Range> controls;                // that BERT's tokenizer removes
extern const std::span<const Range> ideographs;              // that are words there
extern const std::span<const Range> nonspacing;              // that it removes as accents
extern const std::span<const Range> signs;                   // that it makes words of their own
extern const std::span<const LowerCase> lowercase;           // but for U+0130, which becomes two
extern const std::span<const CombiningRange> combining;      // those whose class is not 0
extern const std::span<const Decomposition> decompositions;  // canonical, but for Hangul
extern const std::span<const Composition> compositions;      // by first, then second

}  // namespace h2o::unicode
