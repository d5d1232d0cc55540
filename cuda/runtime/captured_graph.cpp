#include "cuda/runtime/captured_graph.h"

namespace h2o::cuda {
namespace {

cudaGraph_t record(const Stream& stream, const std::function<void()>& pass) {
  check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "record");
  cudaGraph_t graph = nullptr;
  try {
    pass();
  } catch (...) {
    cudaStreamEndCapture(stream.get(), &graph);  // whatever it says: the stream must go on
    if (graph != nullptr) cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  check(cudaStreamEndCapture(stream.get(), &graph), "record");
  return graph;
}

}  // namespace

GraphCache::~GraphCache() {
  for (const auto& [n_rows, graph] : graphs_) {
    if (graph != nullptr) cudaGraphExecDestroy(graph);
  }
}

void GraphCache::run(const Stream& stream, int32_t n_rows, const std::function<void()>& pass) {
  const auto entry = graphs_.find(n_rows);
  if (entry == graphs_.end()) {
    pass();
    graphs_[n_rows] = nullptr;
    return;
  }
  if (entry->second == nullptr) {
    cudaGraph_t graph = record(stream, pass);
    const cudaError_t error = cudaGraphInstantiate(&entry->second, graph, 0);
    cudaGraphDestroy(graph);
    check(error, "record");
  }
  check(cudaGraphLaunch(entry->second, stream.get()), "replay");
}

}  // namespace h2o::cuda
