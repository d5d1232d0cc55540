#include "model/retrieval_heads.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"

namespace h2o {
namespace {

constexpr const char* kKey = "h2o.retrieval_heads";

// Each head of a layer that keeps tokens from far back at most once.
std::vector<int32_t> read_ranking(const GgufFile& file, const Config& config) {
  std::vector<bool> ranked(size_t{1} * config.n_layers * config.n_kv_heads);
  std::vector<int32_t> heads;
  for (const int64_t head : file.integers(kKey)) {
    const bool exists = head >= 0 && head < std::ssize(ranked);
    const auto layer = static_cast<int32_t>(exists ? head / config.n_kv_heads : 0);
    if (!exists || ranked[head] || config.window(layer) > 0 || !config.attends(layer)) {
      throw FormatError(concat("[model] ", file.path(), ": ", kKey, " has head ", head,
                               !exists                  ? ", which does not exist"
                               : ranked[head]           ? " twice"
                               : !config.attends(layer) ? ", whose layer has no cache"
                                                        : ", whose layer has a window"));
    }
    ranked[head] = true;
    heads.push_back(static_cast<int32_t>(head));
  }
  return heads;
}

}  // namespace

std::vector<int32_t> retrieval_heads(const GgufFile& file, const Config& config, double share) {
  require(share > 0 && share <= 1, "archive_heads is ", share,
          ", expected a share above 0 and up to 1");
  if (share == 1) return {};
  require(file.find(kKey) != nullptr, "archive_heads is ", share,
          ", but the model file does not rank its heads; `h2o-cpp heads MODEL --write` does");
  const std::vector<int32_t> ranked = read_ranking(file, config);
  require(!ranked.empty(), "archive_heads is ", share, ", but ", kKey, " is empty");
  const auto n = std::max(std::lround(share * static_cast<double>(ranked.size())), 1L);
  return {ranked.begin(), ranked.begin() + n};
}

}  // namespace h2o
