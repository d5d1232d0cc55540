#include "kv/names.h"

#include <algorithm>
#include <array>
#include <string>

#include "core/error.h"
#include "kv/shape.h"

namespace h2o {
namespace {

constexpr int32_t kFirstTokens = 4;      // as in StreamingLLM (arXiv 2309.17453)
constexpr float kDecay = 0.99f;          // scores halve after 69 tokens
constexpr float kQuestionDecay = 0.95f;  // after 14: the end of a question tells best what the
                                         // answer needs

// The sinks, then half of the rest as heavy hitters and half, rounded up, as recent tokens.
constexpr KvPolicy halves(int32_t n, int32_t sinks = 0) {
  sinks = std::min(sinks, n - 1);
  const int32_t heavy = (n - sinks) / 2;
  return {.sinks = sinks, .heavy = heavy, .recent = n - sinks - heavy};
}

constexpr KvPolicy scored(KvPolicy policy, Scoring scoring, ValueNorm norm = ValueNorm::none) {
  policy.scoring = scoring;
  policy.value_norm = norm;
  return policy;
}

constexpr KvPolicy streaming(int32_t n) {
  const int32_t sinks = std::min(kFirstTokens, n - 1);
  return {.sinks = sinks, .recent = n - sinks};
}

constexpr KvPolicy decaying(int32_t n) {
  KvPolicy policy = halves(n);
  policy.decay = kDecay;
  return policy;
}

constexpr KvPolicy question(int32_t n) {
  const int32_t recent = std::min(std::max(32, n / 4), n - n / 2);
  return {.heavy = n - recent,
          .recent = recent,
          .scoring = Scoring::question,
          .decay = kQuestionDecay,
          .value_norm = ValueNorm::output};
}

struct Named {
  std::string_view name;
  KvPolicy (*make)(int32_t n);
};

constexpr std::array kNamed = {
    Named{"h2o", [](int32_t n) { return halves(n); }},
    Named{"window", [](int32_t n) { return KvPolicy{.recent = n}; }},
    Named{"sinks", streaming},
    Named{"mean", [](int32_t n) { return scored(halves(n), Scoring::mean); }},
    Named{"decay", decaying},
    Named{"contribution",
          [](int32_t n) { return scored(halves(n), Scoring::mean, ValueNorm::output); }},
    Named{"random",  // with sinks: losing them would hide what scores are worth
          [](int32_t n) { return scored(halves(n, kFirstTokens), Scoring::random); }},
    Named{"question", question},
};

std::string listed_names() {
  std::string list;
  for (const Named& one : kNamed) list.append(list.empty() ? "" : ", ").append(one.name);
  return list;
}

std::string lower(std::string_view name) {
  std::string lower(name);
  for (char& c : lower) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
  return lower;
}

DType named_dtype(std::string_view name, std::span<const DType> dtypes, std::string_view argument) {
  for (const DType dtype : dtypes) {
    if (name == lower(info(dtype).name)) return dtype;
  }
  throw InvalidArgument(
      concat(argument, " is ", quoted(name), ", expected one of ", lower(dtype_names(dtypes))));
}

}  // namespace

std::vector<std::string_view> policy_names() {
  std::vector<std::string_view> names;
  for (const Named& one : kNamed) names.push_back(one.name);
  return names;
}

KvPolicy named_policy(std::string_view name, int32_t n) {
  const auto found = std::ranges::find(kNamed, name, &Named::name);
  require(found != kNamed.end(), "policy=", quoted(name), ", expected one of ", listed_names());
  require(n >= 1, "policy=", quoted(name), " keeps ", n, " tokens, expected at least 1");
  return found->make(n);
}

DType kv_dtype(std::string_view name, std::string_view argument) {
  return named_dtype(name, kv_dtypes(), argument);
}

DType archive_k_dtype(std::string_view name) {
  return named_dtype(name, archive_k_dtypes(), "archive");
}

DType archive_v_dtype(std::string_view name) {
  return named_dtype(name, archive_v_dtypes(), "archive, as the type of values,");
}

}  // namespace h2o
