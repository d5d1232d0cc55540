// How well a forward pass would use many threads, from a recording of its parts on one.
//
// Each pass runs divided as for T threads, on one thread, and the time of every part is recorded:
// the least of several rounds, in which the numbers of threads take turns, so that other programs
// matter little. Then the parts are handed out to T threads as the pool hands them out, to
// whichever is free first, and the time until the last one ends is the pass's. Efficiency is the
// time with one thread / (T * that). Threads that share memory bandwidth or caches, and what waking
// them takes, are not in it.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <queue>
#include <span>
#include <vector>

#include "cpu/cpu_backend.h"
#include "model/session.h"
#include "traced_pool.h"

namespace h2o {
namespace {

constexpr int kThreads[] = {1, 2, 4, 8, 16, 32, 64};
constexpr int kRounds = 3;  // of a chunk; of a single token, whose parts are short, many more
constexpr int kDecodeRounds = 50;
constexpr int32_t kChunk = 512;
constexpr int32_t kPrompt = 4096;
constexpr int32_t kDecodeAfter = 8191;  // the next is the last of 8192

double makespan(const Trace& trace, int n_threads) {
  double now = 0;
  for (const TracedJob& job : trace.jobs) {
    now += job.before;
    std::priority_queue<double, std::vector<double>, std::greater<>> free;
    for (int i = 0; i < n_threads; ++i) free.push(now);
    double finished = now;
    double last = now;
    for (size_t i = 0; i < job.parts.size(); ++i) {
      double end = free.top() + job.parts[i];
      free.pop();
      if (!job.finish.empty()) end = finished = std::max(end, finished) + job.finish[i];
      free.push(end);
      last = std::max(last, end);
    }
    now = last;
  }
  return now + trace.after;
}

// The least that each part took.
void keep_least(Trace& least, const Trace& other) {
  if (least.jobs.empty() && least.after == 0) {
    least = other;
    return;
  }
  const auto lower = [](double& a, double b) { a = std::min(a, b); };
  for (size_t i = 0; i < std::min(least.jobs.size(), other.jobs.size()); ++i) {
    TracedJob& to = least.jobs[i];
    const TracedJob& from = other.jobs[i];
    lower(to.before, from.before);
    for (size_t j = 0; j < std::min(to.parts.size(), from.parts.size()); ++j) {
      lower(to.parts[j], from.parts[j]);
    }
    for (size_t j = 0; j < std::min(to.finish.size(), from.finish.size()); ++j) {
      lower(to.finish[j], from.finish[j]);
    }
  }
  lower(least.after, other.after);
}

class Bench {
 public:
  Bench(const char* path, const char* policy)
      : model_(std::make_shared<Model>(path, make_cpu_backend(64, ""))),
        session_(model_, options(policy)) {}

  void run() {
    std::printf("%s\n", model_->backend->name().c_str());
    std::printf("                 1 thread |    2 |    4 |    8 |   16 |   32 |   64 |\n");
    std::vector<double> prefill(std::size(kThreads));
    record(kChunk, prefill);  // the first chunk and the last
    for (int32_t i = 0; i < kPrompt - kChunk; i += kChunk) step(kChunk);
    record(kChunk, prefill);
    while (std::ssize(tokens_) < kDecodeAfter) {
      step(std::min(kChunk, kDecodeAfter - static_cast<int32_t>(tokens_.size())));
    }
    std::vector<double> decode(std::size(kThreads));
    record(1, decode);
    print("prefill", prefill);
    print("decode", decode);
  }

 private:
  static SessionOptions options(const char* policy) {
    SessionOptions options;
    const int32_t heavy = std::atoi(policy);
    if (heavy > 0) options.policies = {{.sinks = 0, .heavy = heavy, .recent = heavy}};
    options.n_ctx = kDecodeAfter + 1;
    options.n_batch = kChunk;
    return options;
  }

  void step(int32_t n) {
    for (int32_t i = 0; i < n; ++i) tokens_.push_back(i % model_->config.n_vocab);
    const Input input{0, std::span(tokens_).last(n)};
    session_.step({&input, 1});
  }

  // Adds the pass of the next n tokens with each number of threads; the session stays as it is.
  void record(int32_t n, std::vector<double>& seconds) {
    const auto n_before = std::ssize(tokens_);
    SnapshotText text;
    text.tokens = tokens_;
    text.n_read = static_cast<int32_t>(n_before);
    const std::vector<std::byte> before = session_.save(0, text);
    std::vector<Trace> least(std::size(kThreads));
    for (int round = 0; round < (n == 1 ? kDecodeRounds : kRounds); ++round) {
      for (size_t i = 0; i < std::size(kThreads); ++i) {
        keep_least(least[i], trace(kThreads[i], [&] { step(n); }));
        session_.load(0, before);
        tokens_.resize(n_before);
      }
    }
    for (size_t i = 0; i < std::size(kThreads); ++i) seconds[i] += makespan(least[i], kThreads[i]);
  }

  static void print(const char* name, const std::vector<double>& seconds) {
    std::printf("%-8s %10.3f ms |", name, seconds[0] * 1e3);
    for (size_t i = 1; i < std::size(kThreads); ++i) {
      std::printf(" %3.0f%% |", 100 * seconds[0] / (kThreads[i] * seconds[i]));
    }
    std::printf("\n");
  }

  std::shared_ptr<Model> model_;
  Session session_;
  std::vector<int32_t> tokens_;  // that it has read
};

}  // namespace
}  // namespace h2o

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: h2o_bench_efficiency MODEL.gguf [HEAVY]\n");
    return 2;
  }
  h2o::Bench(argv[1], argc > 2 ? argv[2] : "0").run();
}
