#include "text/tokenizer/tokenizer.h"

#include <algorithm>

#include "core/error.h"
#include "core/utf8.h"
#include "text/tokenizer/byte_pairs.h"
#include "text/tokenizer/sentence_pieces.h"
#include "text/tokenizer/unigram.h"
#include "text/tokenizer/word_pieces.h"

namespace h2o {
namespace {

constexpr size_t kMaxBytes = size_t{1} << 30;  // of a text

std::unique_ptr<const TokenizerModel> make_kind(const GgufFile& file, int32_t n_vocab) {
  const std::string_view model = file.string("tokenizer.ggml.model");
  if (model == "gpt2") return std::make_unique<BytePairs>(file, n_vocab);
  if (model == "llama") return std::make_unique<SentencePieces>(file, n_vocab, false);
  if (model == "gemma4") return std::make_unique<SentencePieces>(file, n_vocab, true);
  if (model == "t5") return std::make_unique<Unigram>(file, n_vocab);
  if (model == "bert") return std::make_unique<WordPieces>(file, n_vocab);
  throw FormatError(concat("tokenizer.ggml.model is ", quoted(model),
                           ", supported: 'gpt2', 'llama', 'gemma4', 'bert', 't5'"));
}

std::vector<int32_t> added(bool add, std::string_view name, int32_t token) {
  if (!add) return {};
  if (token < 0) {
    throw FormatError(
        concat("tokenizer.ggml.add_", name, "_token is true but ", name, "_token_id is missing"));
  }
  return {token};
}

[[noreturn]] void throw_too_many(size_t max_tokens) {
  throw ContextFull(concat("the text has more than ", max_tokens, " tokens"));
}

}  // namespace

Tokenizer::Tokenizer(const GgufFile& file, int32_t n_vocab)
    : kind_(make_kind(file, n_vocab)),
      special_(kind_->vocabulary.table({TokenType::unknown, TokenType::control})),
      before_(added(kind_->add_bos, "bos", bos())),
      after_(added(file.boolean_or("tokenizer.ggml.add_eos_token", kind_->add_eos), "eos", eos())),
      separator_(token_id(file, "seperator", n_vocab, kind_->add_eos ? eos() : -1)) {
  constexpr std::string_view kTemplate = "tokenizer.chat_template";
  if (file.find(kTemplate) != nullptr) chat_template_ = file.string(kTemplate);
  for (const auto& [key, value] : file.metadata()) {
    std::string_view name = key;
    if (!name.starts_with(kTemplate) || value.type != GgufType::string) continue;
    name.remove_prefix(kTemplate.size());
    if (name.starts_with('.')) named_templates_.emplace(name.substr(1), file.string(key));
  }
}

std::vector<int32_t> Tokenizer::encode(std::string_view text, const Options& options) const {
  require(text.size() <= kMaxBytes, text.size(), " bytes, at most ", kMaxBytes);
  require(is_utf8(text), "the text is not valid UTF-8");
  std::vector<int32_t> tokens;
  if (options.add_special) tokens = before_;
  bool begins = options.begins;
  const auto on_text = [&](std::string_view part) {
    if (!kind_->encode(part, begins, options.max_tokens, tokens))
      throw_too_many(options.max_tokens);
    begins = false;
  };
  const auto on_token = [&](int32_t token) {
    tokens.push_back(token);
    begins = true;
  };
  if (options.parse_special) {
    split_special(text, on_text, on_token);
  } else if (!text.empty()) {
    on_text(text);
  }
  if (options.add_special) tokens.insert(tokens.end(), after_.begin(), after_.end());
  if (tokens.size() > options.max_tokens) throw_too_many(options.max_tokens);
  return tokens;
}

std::string Tokenizer::decode(std::span<const int32_t> tokens) const {
  std::string bytes;
  for (const int32_t token : tokens) bytes += token_bytes(token);
  const bool space = kind_->begins_with_space && bytes.starts_with(' ');
  return repaired_utf8(std::string_view(bytes).substr(space ? 1 : 0));
}

std::string_view Tokenizer::token_bytes(int32_t token, bool begins) const {
  require(token >= 0 && token < std::ssize(kind_->bytes), "token ", token,
          " is not in the vocabulary of ", kind_->bytes.size());
  std::string_view bytes = kind_->bytes[token];
  if (begins && kind_->begins_with_space && bytes.starts_with(' ')) bytes.remove_prefix(1);
  return bytes;
}

std::string_view Tokenizer::spelling(int32_t token) const {
  const std::vector<std::string_view>& tokens = kind_->vocabulary.tokens;
  require(token >= 0 && token < std::ssize(tokens), "token ", token,
          " is not in the vocabulary of ", tokens.size());
  return tokens[token];
}

bool Tokenizer::has_text(std::span<const int32_t> tokens) const {
  return std::ranges::any_of(tokens, [this](int32_t token) { return !token_bytes(token).empty(); });
}

size_t Tokenizer::second_part(std::span<const int32_t> tokens) const {
  const auto first = std::ranges::find(tokens, separator_);
  return first == tokens.end() ? SIZE_MAX : first - tokens.begin() + 1;
}

bool Tokenizer::ends(int32_t token) const {
  return std::ranges::binary_search(kind_->vocabulary.end_tokens, token);
}

}  // namespace h2o
