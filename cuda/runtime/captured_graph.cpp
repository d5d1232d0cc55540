#include "cuda/runtime/captured_graph.h"

#include <utility>

#include "core/error.h"

namespace h2o::cuda {
namespace {

cudaGraph_t record(const Stream& stream, const std::function<void()>& pass) {
  check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "record");
  cudaGraph_t graph = nullptr;
  try {
    pass();
  } catch (...) {
    cudaStreamEndCapture(stream.get(), &graph);  // ignore errors: the stream must remain usable
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  check(cudaStreamEndCapture(stream.get(), &graph), "record");
  return graph;
}

cudaGraphExec_t instantiate(cudaGraph_t graph) {
  cudaGraphExec_t instance = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&instance, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "make a graph");
  return instance;
}

}  // namespace

GraphSwitch::GraphSwitch() {
  if (!is_switched_on("H2O_CUDA_GRAPHS")) reason_ = "H2O_CUDA_GRAPHS=0";
}

void GraphSwitch::turn_off(std::string reason) {
  const std::lock_guard lock(mutex_);
  if (reason_.empty()) reason_ = std::move(reason);
}

std::string GraphSwitch::reason() const {
  const std::lock_guard lock(mutex_);
  return reason_;
}

GraphCache::~GraphCache() {
  for (const auto& [step, entry] : entries_) {
    if (entry.graph != nullptr) cudaGraphExecDestroy(entry.graph);
  }
}

void GraphCache::run(const Stream& stream, GraphSwitch& graphs, const StepKind& step,
                     const std::function<void()>& pass) {
  if (!graphs.reason().empty()) return pass();
  const auto [found, is_first] = entries_.try_emplace(step);
  if (is_first) return pass();
  Entry& entry = found->second;
  try {
    if (entry.graph == nullptr) {
      if (n_graphs_ == kMaxGraphs) drop_oldest(stream);
      entry.graph = instantiate(record(stream, pass));
      ++n_graphs_;
    }
    entry.last_run = ++n_runs_;
    return check(cudaGraphLaunch(entry.graph, stream.get()), "replay a graph");
  } catch (const std::exception& error) {
    graphs.turn_off(error.what());
  }
  pass();  // runs without capture first, so that errors of the pass itself are thrown here
}

void GraphCache::drop_oldest(const Stream& stream) {
  Entry* oldest = nullptr;
  for (auto& [step, entry] : entries_) {
    if (entry.graph == nullptr) continue;
    if (oldest == nullptr || entry.last_run < oldest->last_run) oldest = &entry;
  }
  stream.synchronize();  // it may still run
  check(cudaGraphExecDestroy(std::exchange(oldest->graph, nullptr)), "drop a graph");
  --n_graphs_;
}

}  // namespace h2o::cuda
