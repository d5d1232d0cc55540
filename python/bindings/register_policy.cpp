// KvPolicy, named policies and budgets for Python.
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "kv/budget.h"
#include "kv/names.h"
#include "register.h"

namespace py = pybind11;

namespace h2o::python {
namespace {

using NamedScoring = std::pair<std::string_view, Scoring>;
using NamedNorm = std::pair<std::string_view, ValueNorm>;

constexpr std::array<NamedScoring, 5> kScorings = {{{"sum", Scoring::sum},
                                                    {"mean", Scoring::mean},
                                                    {"inverse", Scoring::inverse},
                                                    {"question", Scoring::question},
                                                    {"random", Scoring::random}}};
constexpr std::array<NamedNorm, 2> kNorms = {
    {{"l1", ValueNorm::l1}, {"output", ValueNorm::output}}};

// Python counts the tail apart.
int32_t with_tail(std::optional<int32_t> recent, std::pair<int32_t, int32_t> tail) {
  if (!recent) return KvPolicy::kUnbounded;
  const int64_t n = int64_t{*recent} + tail.second - tail.first;
  return static_cast<int32_t>(std::clamp<int64_t>(n, 0, KvPolicy::kUnbounded));
}

KvPolicy kv_policy(int32_t sinks, int32_t heavy, std::optional<int32_t> recent,
                   const std::string& score, float decay,
                   const std::optional<std::string>& value_norm, std::pair<int32_t, int32_t> tail) {
  KvPolicy policy = {.sinks = sinks,
                     .heavy = heavy,
                     .recent = with_tail(recent, tail),
                     .tail_begin = tail.first,
                     .tail_end = tail.second,
                     .decay = decay};
  const auto scoring = std::ranges::find(kScorings, score, &NamedScoring::first);
  require(scoring != kScorings.end(), "score is '", score,
          "', expected sum, mean, inverse, question or random");
  policy.scoring = scoring->second;
  if (!value_norm) return policy;
  const auto norm = std::ranges::find(kNorms, *value_norm, &NamedNorm::first);
  require(norm != kNorms.end(), "value_norm is '", *value_norm, "', expected l1, output or None");
  policy.value_norm = norm->second;
  return policy;
}

std::optional<int32_t> recent_of(const KvPolicy& policy) {
  if (policy.recent == KvPolicy::kUnbounded) return {};
  return policy.recent - (policy.tail_end - policy.tail_begin);
}

std::string_view score_of(const KvPolicy& policy) {
  return std::ranges::find(kScorings, policy.scoring, &NamedScoring::second)->first;
}

std::optional<std::string_view> value_norm_of(const KvPolicy& policy) {
  const auto norm = std::ranges::find(kNorms, policy.value_norm, &NamedNorm::second);
  if (norm == kNorms.end()) return {};
  return norm->first;
}

}  // namespace

void register_policy(py::module_& m) {
  py::class_<KvPolicy>(m, "KvPolicy", "Which tokens survive a step.")
      .def(py::init(&kv_policy), py::kw_only(), py::arg("sinks"), py::arg("heavy"),
           py::arg("recent"), py::arg("score"), py::arg("decay"), py::arg("value_norm"),
           py::arg("tail"))
      .def_readonly("sinks", &KvPolicy::sinks)
      .def_readonly("heavy", &KvPolicy::heavy)
      .def_property_readonly("recent", &recent_of)
      .def_property_readonly("score", &score_of)
      .def_readonly("decay", &KvPolicy::decay)
      .def_property_readonly("tail",
                             [](const KvPolicy& p) { return std::pair(p.tail_begin, p.tail_end); })
      .def_property_readonly("value_norm", &value_norm_of);

  m.def("policy_names", &policy_names, "Names of policies.");
  m.def("named_policy", &named_policy, py::arg("name"), py::arg("n"),
        "The policy of this name that keeps n tokens.");
  m.def(
      "protected_policy",
      [](const KvPolicy& policy, int32_t n) { return protected_policy(policy, {n, 0}, n); },
      py::arg("policy"), py::arg("n"), "The policy that never evicts the first n tokens.");
  m.def("fraction_of", &fraction_of, py::arg("n"), py::arg("fraction"),
        "A fraction of n tokens, rounded down.");
  m.def(
      "budget_policy",
      [](std::optional<Amount> hh, std::optional<Amount> recent, int32_t n_ctx,
         std::optional<std::string> policy) {
        return budget_policy({.hh = hh, .recent = recent, .policy = std::move(policy)}, n_ctx);
      },
      py::arg("hh"), py::arg("recent"), py::arg("n_ctx"), py::arg("policy"),
      "The policy for numbers of tokens (int) or fractions of n_ctx (float).");
}

}  // namespace h2o::python
