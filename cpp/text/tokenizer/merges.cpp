#include "text/tokenizer/merges.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/error.h"

namespace h2o {

PairTable read_merges(const GgufFile& file, const Vocabulary& vocabulary) {
  const TokenTable tokens =
      vocabulary.table({TokenType::normal, TokenType::user_defined, TokenType::byte});
  const TokenTable silent =
      vocabulary.table({TokenType::unknown, TokenType::control, TokenType::unused});
  const auto token_of = [&](std::string_view part) {
    const int32_t token = tokens.find(part);
    if (token < 0 && silent.find(part) < 0) {
      throw FormatError(
          concat("tokenizer.ggml.merges makes ", quoted(part), ", which is not a token"));
    }
    return token;
  };
  std::vector<PairTable::Pair> pairs;
  std::string both;
  for (const std::string_view merge : file.strings("tokenizer.ggml.merges")) {
    const size_t at = merge.find(' ', 1);  // a part may be a space
    if (at == merge.npos || at + 1 == merge.size()) {
      throw FormatError(
          concat("tokenizer.ggml.merges has ", quoted(merge), ", expected two parts and a space"));
    }
    const std::string_view left = merge.substr(0, at), right = merge.substr(at + 1);
    both.assign(left).append(right);
    const PairTable::Pair pair = {token_of(left), token_of(right),
                                  static_cast<int32_t>(pairs.size()), token_of(both)};
    // Text never becomes a special token, so merges of or to one have no effect.
    if (pair.left >= 0 && pair.right >= 0 && pair.token >= 0) pairs.push_back(pair);
  }
  return PairTable(std::move(pairs), vocabulary.size());
}

}  // namespace h2o
