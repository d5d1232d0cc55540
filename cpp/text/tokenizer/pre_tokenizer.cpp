#include "text/tokenizer/pre_tokenizer.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "text/tokenizer/deepseek_cuts.h"

namespace h2o {
namespace {

using enum CodePoint::Kind;

bool is_digit(const CodePoint& c) { return c.code >= '0' && c.code <= '9'; }

// 's|'t|'re|'ve|'m|'ll|'d
template <bool any_case>
size_t contraction(Text text) {
  if (!is(text, 0, U'\'')) return 0;
  const auto letter = [&](size_t i) -> char32_t {
    if (i >= text.size()) return 0;
    const char32_t c = text[i].code;
    if (!any_case) return c;
    if (c == 0x17f) return 's';  // U+017F (long s) is an s, ignoring case
    return c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c;
  };
  const char32_t first = letter(1), second = letter(2);
  if (first == 's' || first == 't' || first == 'm' || first == 'd') return 2;
  const bool two = (first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
                   (first == 'l' && second == 'l');
  return two ? 3 : 0;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
size_t gpt_2(Text text) {
  if (const size_t n = contraction<false>(text)) return n;
  const size_t begin = is(text, 0, U' ') ? 1 : 0;
  if (begin == text.size() || text[begin].kind == space) return spaces(text);
  return run(text, begin, text[begin].kind);
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,most_digits}
// | ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
// newlines: whether [\r\n]* is part of it; with_marks: [\p{L}\p{M}] instead of \p{L}, except in
// [^\r\n\p{L}\p{N}].
template <size_t most_digits, bool newlines = true, bool with_marks = false>
size_t llama_3(Text text) {
  const auto in_word = [](const CodePoint& c) {
    return c.kind == letter || (with_marks && c.is_mark());
  };
  const auto in_symbols = [&](const CodePoint& c) { return c.kind == other && !in_word(c); };
  if (const size_t n = contraction<true>(text)) return n;
  if (in_word(text[0])) return run(text, 0, in_word);
  if (!is_newline(text[0]) && !is(text, 0, number) && text.size() > 1 && in_word(text[1])) {
    return run(text, 1, in_word);
  }
  if (is(text, 0, number)) return run(text, 0, number, most_digits);
  const size_t begin = is(text, 0, U' ') ? 1 : 0;
  const size_t end = run(text, begin, in_symbols);
  if (end == begin) return lines(text);
  return newlines ? run(text, end, is_newline) : end;
}

// \p{Han}, of Unicode 16
bool is_han(const CodePoint& c) {
  constexpr std::pair<char32_t, char32_t> kRanges[] = {
      {0x2e80, 0x2e99},   {0x2e9b, 0x2ef3},   {0x2f00, 0x2fd5},   {0x3005, 0x3005},
      {0x3007, 0x3007},   {0x3021, 0x3029},   {0x3038, 0x303b},   {0x3400, 0x4dbf},
      {0x4e00, 0x9fff},   {0xf900, 0xfa6d},   {0xfa70, 0xfad9},   {0x16fe2, 0x16fe3},
      {0x16ff0, 0x16ff1}, {0x20000, 0x2a6df}, {0x2a700, 0x2b739}, {0x2b740, 0x2b81d},
      {0x2b820, 0x2cea1}, {0x2ceb0, 0x2ebe0}, {0x2ebf0, 0x2ee5d}, {0x2f800, 0x2fa1d},
      {0x30000, 0x3134a}, {0x31350, 0x323af}};
  return std::ranges::any_of(
      kRanges, [&](const auto& range) { return c.code >= range.first && c.code <= range.second; });
}

// Parts of words, divided at capitals: B = [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}], E =
// [\p{Ll}\p{Lm}\p{Lo}\p{M}]; of Kimi both without \p{Han}.
template <bool kimi>
bool in_word(const CodePoint& c) {
  return (c.kind == letter || c.is_mark()) && !(kimi && is_han(c));
}
template <bool kimi>
bool can_begin(const CodePoint& c) {
  return in_word<kimi>(c) && !c.is_lower();
}
template <bool kimi>
bool can_follow(const CodePoint& c) {
  return in_word<kimi>(c) && !c.is_upper();
}

// The end of B*E+ from `at`; 0 if there is no match. B* may have to give back its last character to
// E.
template <bool kimi>
size_t word_in_lower_case(Text text, size_t at) {
  for (size_t i = run(text, at, can_begin<kimi>);; --i) {
    if (i < text.size() && can_follow<kimi>(text[i])) return run(text, i, can_follow<kimi>);
    if (i == at) return 0;
  }
}
// B+E*
template <bool kimi>
size_t word_in_capitals(Text text, size_t at) {
  const size_t end = run(text, at, can_begin<kimi>);
  return end > at ? run(text, end, can_follow<kimi>) : 0;
}

// [^\r\n\p{L}\p{N}]?B*E+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?B+E*(?i:...)?
// |\p{N}{1,most_digits}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+
// kimi: before these \p{Han}+, and [\r\n]* instead of [\r\n/]*.
template <size_t most_digits, bool contractions, bool kimi = false>
size_t gpt_4o(Text text) {
  if (kimi && is_han(text[0])) return run(text, 0, is_han);
  const bool prefix = !is_newline(text[0]) && !is(text, 0, letter) && !is(text, 0, number);
  for (const auto word : {word_in_lower_case<kimi>, word_in_capitals<kimi>}) {
    size_t end = prefix ? word(text, 1) : 0;
    if (end == 0) end = word(text, 0);
    if (end > 0) return end + (contractions ? contraction<true>(text.subspan(end)) : 0);
  }
  if (is(text, 0, number)) return run(text, 0, number, most_digits);
  const size_t begin = is(text, 0, U' ') ? 1 : 0;
  if (is(text, begin, other)) {
    return run(text, run(text, begin, other),
               [](const CodePoint& c) { return is_newline(c) || (!kimi && c.code == '/'); });
  }
  return lines(text);
}

// (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}
// | ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+
size_t exaone_moe(Text text) {
  if (const size_t n = contraction<true>(text)) return n;
  const bool prefix = !is_newline(text[0]) && !is(text, 0, letter) && !is(text, 0, number);
  size_t end = prefix ? 1 : 0;
  if (is(text, end, letter)) {
    do {
      end = run(text, end + 1, &CodePoint::is_mark);
      if (is(text, end, U' ') && is(text, end + 1, letter)) ++end;
    } while (is(text, end, letter));
    return end;
  }
  if (is(text, 0, number)) return 1;
  const size_t begin = is(text, 0, U' ') ? 1 : 0;
  if (!is(text, begin, other)) return lines(text);
  return run(
      text, run(text, begin, other),
      [](const CodePoint& c) { return is_newline(c) || c.code == '/'; }, 1);
}

// \p{N}{1,most}
template <size_t most>
size_t numbers(Text text) {
  return run(text, 0, number, most);
}

// [0-9][0-9][0-9]
size_t three_digits(Text text) { return run(text, 0, is_digit, 3) == 3 ? 3 : 0; }

// [\p{P}\$\+<=>\^~\|]+
size_t punctuation(Text text) {
  return run(text, 0, [](const CodePoint& c) {
    constexpr std::u32string_view kMore = U"$+<=>^~|";
    return kMore.find(c.code) != kMore.npos || c.is_punctuation();
  });
}

// Matches them with a backtick too.
size_t falcon_punctuation(Text text) {
  return run(text, 0, [](const CodePoint& c) {
    constexpr std::u32string_view kMore = U"$+<=>^~|`";
    return kMore.find(c.code) != kMore.npos || c.is_punctuation();
  });
}

//  ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+
size_t bloom(Text text) {
  const size_t begin = is(text, 0, U' ') ? 1 : 0;
  const size_t end = run(text, begin, [](const CodePoint& c) {
    constexpr std::u32string_view kNot = U"(|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)";
    return c.kind != space && kNot.find(c.code) == kNot.npos;
  });
  return end > begin ? end : 0;
}

// Divides runs of digits into groups of three from the right. isolated: \d{1,3}(?=(?:\d{3})*\b), so
// only runs before a boundary of words, and a group is a piece; else (?=(\d{3})+(?!\d)), so a piece
// begins with a group.
template <bool isolated>
void by_thousands(Text text, const std::function<void(Text)>& sink) {
  size_t begin = 0;
  const auto piece_until = [&](size_t end) {
    if (begin < end) sink(text.subspan(begin, end - begin));
    begin = end;
  };
  for (size_t at = 0; at < text.size();) {
    const size_t end = run(text, at, &CodePoint::is_decimal);
    const bool counts = !isolated || end == text.size() || !text[end].is_word();
    if (end > at && counts) {
      if (isolated) piece_until(at);
      for (size_t group = at + (end - at) % 3; group < end; group += 3) piece_until(group);
      if (isolated) piece_until(end);
    }
    at = std::max(end, at + 1);
  }
  piece_until(text.size());
}

void apply(std::span<const Cut> cuts, Text text, const std::function<void(Text)>& sink) {
  if (cuts.empty()) return sink(text);
  size_t begin = 0;  // start of text not yet assigned to a piece
  const auto rest = [&](size_t end) {
    if (begin < end) apply(cuts.subspan(1), text.subspan(begin, end - begin), sink);
  };
  for (size_t at = 0; at < text.size();) {
    const size_t n = cuts.front()(text.subspan(at));
    if (n == 0) {
      ++at;
      continue;
    }
    rest(at);
    begin = at;
    rest(at += n);
    begin = at;
  }
  rest(text.size());
}

constexpr Cut kGpt2Cuts[] = {gpt_2};
constexpr Cut kLlama3Cuts[] = {llama_3<3>};
constexpr Cut kQwen2Cuts[] = {llama_3<1>};
constexpr Cut kSeedCuts[] = {llama_3<1, false>};
constexpr Cut kMiniCpm5Cuts[] = {numbers<3>, llama_3<SIZE_MAX>};
constexpr Cut kQwen35Cuts[] = {llama_3<1, true, true>};
constexpr Cut kGpt4oCuts[] = {gpt_4o<3, true>};
constexpr Cut kKimiCuts[] = {gpt_4o<3, true, true>};
constexpr Cut kSuperBpeCuts[] = {numbers<SIZE_MAX>};
constexpr Cut kTekkenCuts[] = {gpt_4o<1, false>};
constexpr Cut kDigitsCuts[] = {numbers<1>, gpt_2};
constexpr Cut kBloomCuts[] = {bloom};
constexpr Cut kVikingCuts[] = {bloom, numbers<1>};
constexpr Cut kFalconCuts[] = {falcon_punctuation, gpt_2, three_digits};
constexpr Cut kExaoneMoeCuts[] = {exaone_moe};
constexpr Cut kDeepSeek3Cuts[] = {numbers<3>, deepseek::kana_and_ideographs, deepseek::words};
constexpr Cut kDeepSeekCoderCuts[] = {deepseek::newline, deepseek::letters, deepseek::punctuation,
                                      deepseek::beyond_latin, numbers<1>};
constexpr Cut kDeepSeekLlmCuts[] = {deepseek::newline,      deepseek::cased_letters,
                                    deepseek::signs,        deepseek::until_last_spaces,
                                    deepseek::beyond_latin, numbers<1>};
constexpr Cut kDefaultCuts[] = {punctuation, gpt_2, numbers<SIZE_MAX>, three_digits};

constexpr PreTokenizer kGpt2 = {.cuts = kGpt2Cuts};
constexpr PreTokenizer kGptNeoX = {.cuts = kGpt2Cuts, .nfc = true};
constexpr PreTokenizer kLlamaBpe = {.cuts = kLlama3Cuts, .ignore_merges = true, .add_bos = true};
constexpr PreTokenizer kDbrx = {.cuts = kLlama3Cuts};
constexpr PreTokenizer kGlm4 = {.cuts = kLlama3Cuts, .ignore_merges = true};
constexpr PreTokenizer kTekken = {.cuts = kTekkenCuts, .ignore_merges = true, .add_bos = true};
constexpr PreTokenizer kStableLm2 = {.cuts = kQwen2Cuts};
constexpr PreTokenizer kQwen2 = {.cuts = kQwen2Cuts, .nfc = true};
constexpr PreTokenizer kSeed = {.cuts = kSeedCuts};
constexpr PreTokenizer kMiniCpm5 = {.cuts = kMiniCpm5Cuts, .ignore_merges = true};
constexpr PreTokenizer kQwen35 = {.cuts = kQwen35Cuts, .nfc = true};
constexpr PreTokenizer kGpt4o = {.cuts = kGpt4oCuts};
constexpr PreTokenizer kKimi = {.cuts = kKimiCuts};
constexpr PreTokenizer kTinyAya = {.cuts = kGpt4oCuts, .divide = by_thousands<true>};
constexpr PreTokenizer kSuperBpe = {.cuts = kSuperBpeCuts, .divide = by_thousands<false>};
constexpr PreTokenizer kDigits = {.cuts = kDigitsCuts};
constexpr PreTokenizer kCommandR = {.cuts = kDigitsCuts, .nfc = true};
constexpr PreTokenizer kBloom = {.cuts = kBloomCuts};
constexpr PreTokenizer kViking = {.cuts = kVikingCuts};
constexpr PreTokenizer kFalcon = {.cuts = kFalconCuts};
constexpr PreTokenizer kExaoneMoe = {.cuts = kExaoneMoeCuts};
constexpr PreTokenizer kDeepSeek3 = {.cuts = kDeepSeek3Cuts};
constexpr PreTokenizer kDeepSeekCoder = {.cuts = kDeepSeekCoderCuts};
constexpr PreTokenizer kDeepSeekLlm = {.cuts = kDeepSeekLlmCuts};
constexpr PreTokenizer kDefault = {.cuts = kDefaultCuts};

struct Named {
  std::string_view name;
  const PreTokenizer& pre;
};
constexpr Named kByName[] = {
    {"default", kDefault},
    {"gpt-2", kGpt2},
    {"phi-2", kGpt2},
    {"exaone4", kGpt2},
    {"trillion", kGpt2},
    {"gigachat", kGpt2},
    {"mellum", kGpt2},
    {"a.x-4.0", kGpt2},
    {"granite-docling", kGpt2},
    {"roberta-bpe", kGpt2},
    {"jina-v1-en", kGpt2},
    {"jina-v2-es", kGpt2},
    {"jina-v2-de", kGpt2},
    {"jina-v2-code", kGpt2},
    {"modern-bert", kGptNeoX},
    {"mpt", kGptNeoX},
    {"olmo", kGptNeoX},
    {"llama-bpe", kLlamaBpe},
    {"llama3", kLlamaBpe},
    {"llama-v3", kLlamaBpe},
    {"pixtral", kLlamaBpe},
    {"falcon3", kLlamaBpe},
    {"midm-2.0", kLlamaBpe},
    {"lfm2", kLlamaBpe},
    {"falcon-h1", kLlamaBpe},
    {"dbrx", kDbrx},
    {"smaug-bpe", kDbrx},
    {"glm4", kGlm4},
    {"glm5", kGlm4},
    {"chatglm-bpe", kDbrx},
    {"minicpm5", kMiniCpm5},
    {"qwen2", kQwen2},
    {"f2llmv2", kQwen2},
    {"deepseek-r1-qwen", kQwen2},
    {"hunyuan", kQwen2},
    {"stablelm2", kStableLm2},
    {"qwen35", kQwen35},
    {"bailingmoe", kStableLm2},
    {"bailingmoe2", kStableLm2},
    {"llada-moe", kStableLm2},
    {"megrez", kStableLm2},
    {"kormo", kStableLm2},
    {"solar-open", kStableLm2},
    {"grok-2", kStableLm2},
    {"seed-coder", kSeed},
    {"smollm", kDigits},
    {"starcoder", kDigits},
    {"refact", kDigits},
    {"exaone", kDigits},
    {"minerva-7b", kDigits},
    {"codeshell", kDigits},
    {"mellum2", kDigits},
    {"command-r", kCommandR},
    {"gpt-4o", kGpt4o},
    {"minimax-m2", kGpt4o},
    {"llama4", kGpt4o},
    {"kanana2", kGpt4o},
    {"kimi-k2", kKimi},
    {"tiny_aya", kTinyAya},
    {"cohere2moe", kTinyAya},
    {"superbpe", kSuperBpe},
    {"tekken", kTekken},
    {"bloom", kBloom},
    {"poro-chat", kBloom},
    {"gpt3-finnish", kBloom},
    {"viking", kViking},
    {"falcon", kFalcon},
    {"deepseek-v3", kDeepSeek3},
    {"hunyuan-dense", kDeepSeek3},
    {"joyai-llm", kDeepSeek3},
    {"deepseek-coder", kDeepSeekCoder},
    {"deepseek-llm", kDeepSeekLlm},
    {"exaone-moe", kExaoneMoe},
};

}  // namespace

void PreTokenizer::pieces(Text text, const std::function<void(Text)>& sink) const {
  if (text.empty()) return;
  if (divide == nullptr) return apply(cuts, text, sink);
  divide(text, [&](Text part) { apply(cuts, part, sink); });
}

const PreTokenizer& pre_tokenizer(std::string_view name) {
  std::string names;
  for (const auto& [known, pre] : kByName) {
    if (known == name) return pre;
    names += concat(names.empty() ? "" : ", ", known);
  }
  throw FormatError(concat("tokenizer.ggml.pre is ", quoted(name), ", supported: ", names));
}

const PreTokenizer* only_pre_tokenizer(std::string_view architecture) {
  if (architecture == "gpt2") return &kGpt2;
  if (architecture == "gptneox" || architecture == "mpt") return &kGptNeoX;
  return nullptr;
}

}  // namespace h2o
