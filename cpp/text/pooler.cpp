#include "text/pooler.h"

#include <algorithm>

namespace h2o {
namespace {

Session::Values values_of(Pooling pooling) {
  return pooling == Pooling::rank ? Session::Values::labels : Session::Values::hidden;
}

// sums += values; empty sums are zeros.
void add_to(std::vector<double>& sums, std::span<const float> values) {
  sums.resize(values.size());
  for (size_t i = 0; i < values.size(); ++i) sums[i] += values[i];
}

}  // namespace

void Pooler::encode(std::span<StepRow> rows) {
  const auto pooling = [](const StepRow& row) { return row.output->generation->request_.pooling; };
  std::ranges::stable_sort(rows, {}, pooling);
  while (!rows.empty()) {
    const Pooling kind = pooling(rows[0]);
    const auto end =
        std::ranges::find_if(rows, [&](const StepRow& row) { return pooling(row) != kind; });
    const std::span<StepRow> same = rows.first(end - rows.begin());
    rows = rows.subspan(same.size());
    std::vector<Input> texts;
    for (const StepRow& row : same) {
      texts.push_back({.sequence = row.sequence, .tokens = row.part});
      if (kind == Pooling::rank) texts.back().second_part = tokenizer_.second_part(row.part);
    }
    const auto tokens = kind == Pooling::mean   ? Session::Tokens::all
                        : kind == Pooling::last ? Session::Tokens::last
                                                : Session::Tokens::first;
    try {
      session_.encode(texts, values_of(kind), tokens, [&](int32_t i, auto values) {
        add_to(same[i].output->generation->pooled_, values);
      });
      for (const StepRow& row : same) row.output->finish = Finish::length;
    } catch (...) {
      for (const StepRow& row : same) row.output->error = std::current_exception();
    }
  }
}

void Pooler::read(const StepRow& row) {
  Generation& g = *row.output->generation;
  const Pooling pooling = g.request_.pooling;
  const bool begins = g.pooled_.empty();
  session_.read_every_row({row.sequence, row.part, 0, row.one_by_one}, values_of(pooling),
                          [&](int32_t at, std::span<const float> values) {
                            if (pooling == Pooling::first && (!begins || at > 0)) return;
                            if (pooling != Pooling::mean) g.pooled_.clear();
                            add_to(g.pooled_, values);
                          });
}

}  // namespace h2o
