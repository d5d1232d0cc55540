#include "cpu/attention/whole.h"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <span>
#include <utility>

#include "cpu/attention/rotate.h"

namespace h2o {
namespace {

constexpr int64_t kQueries = 24;  // of a unit of work
constexpr int64_t kKeys = 256;    // of a part of the softmax

// Consecutive rows of one head of a text.
struct Unit {
  const Segment& segment;
  int64_t head;
  int64_t first, n;  // rows of the segment
};

class AttendWhole {
 public:
  AttendWhole(const CpuKernels& kernels, ThreadPool& pool, const Attention& attention,
              int64_t head_dim, const Batch& batch)
      : kernels_(kernels),
        pool_(pool),
        attention_(attention),
        head_dim_(head_dim),
        n_heads_(attention.q.cols / head_dim),
        group_(attention.q.cols / attention.k.cols),
        segments_(batch.segments) {}

  void run() {
    if (attention_.rope.layout != RopeLayout::none) rotate();
    int64_t n_units = 0, n_products = 0;
    for (const Segment& segment : segments_) {
      n_units += units(segment);
      n_products += int64_t{segment.n_rows} * segment.n_rows * attention_.q.cols;
    }
    pool_.parallel_for(n_units, n_products, [&](int, int64_t begin, int64_t end) {
      for_units(begin, end, [&](const Unit& unit) { attend(unit); });
    });
  }

 private:
  // The sums of a unit's queries, and their queries packed.
  struct Scratch {
    alignas(64) float q[kQueries * kMostWholeHead];
    alignas(64) float out[kQueries * kMostWholeHead];
    alignas(64) float part[kQueries * kMostWholeHead];
    alignas(64) float exps[kQueries * kKeys];
    float largest[kQueries], total[kQueries];
    float part_largest[kQueries], part_total[kQueries];
    float keep[kQueries], take[kQueries];
  };

  int64_t blocks(const Segment& segment) const {
    return (segment.n_rows + kQueries - 1) / kQueries;
  }
  int64_t units(const Segment& segment) const { return n_heads_ * blocks(segment); }

  template <class Body>
  void for_units(int64_t begin, int64_t end, const Body& body) const {
    int64_t before = 0;
    for (const Segment& segment : segments_) {
      const int64_t after = before + units(segment);
      for (int64_t i = std::max(begin, before); i < std::min(end, after); ++i) {
        const int64_t first = (i - before) % blocks(segment) * kQueries;
        body(Unit{segment, (i - before) / blocks(segment), first,
                  std::min(kQueries, segment.n_rows - first)});
      }
      before = after;
    }
  }

  void rotate() const {
    const Tensor &q = attention_.q, &k = attention_.k;
    const auto row = [](const Tensor& x, int64_t i) {
      return std::span(x.floats() + i * x.cols, static_cast<size_t>(x.cols));
    };
    for (const Segment& segment : segments_) {
      pool_.parallel_for(
          segment.n_rows, segment.n_rows * q.cols, [&](int, int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
              const std::span<float> rows[] = {row(q, segment.row + i), row(k, segment.row + i)};
              rotate_heads(rows, head_dim_, attention_.rope,
                           segment.position + static_cast<int32_t>(i));
            }
          });
    }
  }

  // The keys [begin, end) that rows [first, first + n) attend to.
  std::pair<int64_t, int64_t> keys(const Segment& segment, int64_t first, int64_t n) const {
    if (attention_.window == 0) return {0, segment.n_rows};
    const int64_t reach = attention_.window - 1;
    return {std::max<int64_t>(0, first - reach),
            std::min<int64_t>(segment.n_rows, first + n + reach)};
  }

  float* head(const Tensor& x, const Segment& segment, int64_t row, int64_t head) const {
    return x.floats() + (segment.row + row) * x.cols + head * head_dim_;
  }

  void attend(const Unit& unit) const {
    const Segment& segment = unit.segment;
    const int64_t first = unit.first, n = unit.n;
    Scratch s;
    for (int64_t i = 0; i < n; ++i) {
      std::copy_n(head(attention_.q, segment, first + i, unit.head), head_dim_,
                  s.q + i * head_dim_);
    }
    std::fill_n(s.largest, n, -std::numeric_limits<float>::max());
    std::fill_n(s.total, n, 0.0f);
    std::fill_n(s.out, n * head_dim_, 0.0f);
    const auto [begin, end] = keys(segment, first, n);
    for (int64_t key = begin; key < end; key += kKeys) {
      attend_part(unit, key, std::min(kKeys, end - key), s);
    }
    for (int64_t i = 0; i < n; ++i) {
      float* const out = head(attention_.out, segment, first + i, unit.head);
      std::copy_n(s.out + i * head_dim_, head_dim_, out);
      kernels_.scale(out, head_dim_, 1 / s.total[i]);
    }
  }

  // Merges the attention to keys [key, key + n_keys) into the sums.
  void attend_part(const Unit& unit, int64_t key, int64_t n_keys, Scratch& s) const {
    const int64_t n = unit.n;
    const auto bytes = [&](const Tensor& x) {
      return reinterpret_cast<const std::byte*>(head(x, unit.segment, key, unit.head / group_));
    };
    kernels_.f32.matmul({.y = s.exps,
                         .x = s.q,
                         .w = bytes(attention_.k),
                         .bias = nullptr,
                         .n_rows = n,
                         .n_in = head_dim_,
                         .w_row_bytes = attention_.k.row_bytes(),
                         .y_stride = kKeys,
                         .add = false},
                        0, n_keys);
    for (int64_t i = 0; i < n; ++i) exponentiate(unit, i, key, n_keys, s);
    std::fill_n(s.part, n * head_dim_, 0.0f);
    kernels_.f32.add_rows({.y = s.part,
                           .p = s.exps,
                           .rows = bytes(attention_.v),
                           .n_out = n,
                           .n_rows = n_keys,
                           .n = head_dim_,
                           .row_bytes = attention_.v.row_bytes(),
                           .p_stride = kKeys});
    kernels_.merge_sums({s.largest, s.total}, {s.part_largest, s.part_total}, s.keep, s.take, n,
                        attention_.scale);
    for (int64_t i = 0; i < n; ++i) {
      kernels_.mix(s.out + i * head_dim_, s.part + i * head_dim_, head_dim_, s.keep[i], s.take[i]);
    }
  }

  // Replaces the logits of query i by their exponentials, which are 0 outside its window.
  void exponentiate(const Unit& unit, int64_t i, int64_t key, int64_t n_keys, Scratch& s) const {
    float* const exps = s.exps + i * kKeys;
    const int64_t row = unit.first + i;
    if (attention_.slopes) {
      const float slope = attention_.slopes.floats()[unit.head] / attention_.scale;
      for (int64_t k = 0; k < n_keys; ++k) {
        exps[k] -= slope * static_cast<float>(std::abs(row - key - k));
      }
    }
    const auto [first, last] = keys(unit.segment, row, 1);
    const int64_t begin = std::clamp<int64_t>(first - key, 0, n_keys);
    const int64_t end = std::clamp<int64_t>(last - key, begin, n_keys);
    std::fill(exps, exps + begin, 0.0f);
    std::fill(exps + end, exps + n_keys, 0.0f);
    s.part_largest[i] = -std::numeric_limits<float>::max();
    s.part_total[i] = 0;
    if (begin == end) return;
    s.part_total[i] =
        kernels_.exponentiate(exps + begin, end - begin, attention_.scale, s.part_largest + i);
  }

  const CpuKernels& kernels_;
  ThreadPool& pool_;
  const Attention& attention_;
  const int64_t head_dim_;
  const int64_t n_heads_;
  const int64_t group_;  // query heads per head of keys
  const std::span<const Segment> segments_;
};

}  // namespace

void attend_whole(const CpuKernels& kernels, ThreadPool& pool, const Attention& attention,
                  int64_t head_dim, const Batch& batch) {
  AttendWhole(kernels, pool, attention, head_dim, batch).run();
}

}  // namespace h2o
