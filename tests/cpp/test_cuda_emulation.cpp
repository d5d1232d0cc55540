// Calls of the CUDA runtime on the emulated device: kernels wait for preceding ones, and execution
// continues if graphs fail.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "control.h"
#include "core/error.h"
#include "cuda/cuda_backend.h"
#include "cuda/runtime/captured_graph.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/parallel_copy.h"
#include "session_rig.h"
#include "setting.h"

namespace h2o {
namespace {

using namespace cuda::emulation;

TEST_CASE("before wait_for_previous(), a kernel does not see writes of preceding kernels" *
          doctest::skip(!on_cuda())) {
  const auto backend = test_backend();
  const Buffer memory = backend->allocate(2 * sizeof(float));
  auto* const x = reinterpret_cast<float*>(memory.data());
  const auto write = [&](int i) {
    return [x, i] {
      wait_for_previous();
      x[i] = 1;
    };
  };
  float early[2] = {}, late[2] = {};
  const auto read = [&] {
    std::copy_n(x, 2, early);
    wait_for_previous();
    std::copy_n(x, 2, late);
  };
  run_chain({write(0), read});
  CHECK(std::isnan(early[0]));
  CHECK(early[1] == 0);
  CHECK(late[0] == 1);
  run_chain({write(1), [] { wait_for_previous(); }, read});  // nor of earlier ones
  CHECK(std::isnan(early[1]));
  CHECK(early[0] == 1);  // from a chain that has ended
  CHECK(late[1] == 1);
  x[0] = x[1] = 0;
  CHECK_THROWS_AS(run_chain({[] {}}), std::logic_error);
}

TEST_CASE("before wait_for_previous(), a kernel does not write" * doctest::skip(!on_cuda())) {
  const auto backend = test_backend();
  const Buffer memory = backend->allocate(2 * sizeof(float));
  auto* const x = reinterpret_cast<float*>(memory.data());
  float found = 0;
  const auto copy = [&] {
    wait_for_previous();
    x[1] = x[0];
  };
  const auto overwrite = [&](int i, bool early) {
    return [&found, x, i, early] {
      if (early) x[i] = 2;
      wait_for_previous();
      x[i] = 2;
      found = x[1];
    };
  };
  const char* const message = "a kernel writes before it has waited for the preceding kernels";
  for (const int i : {0, 1}) {  // what the preceding kernel reads, and what it writes
    CAPTURE(i);
    for (const float before : {1.0f, 2.0f}) {  // also a value that is already there
      x[0] = x[1] = before;
      CHECK_THROWS_WITH_AS(run_chain({copy, overwrite(i, true)}), message, std::logic_error);
    }
    x[0] = x[1] = 1;
    run_chain({copy, overwrite(i, false)});
    CHECK(found == (i == 0 ? 1 : 2));
  }
}

constexpr char kSmallModel[] = H2O_SOURCE_DIR "/tests/data/golden/llama_gqa2_tied.gguf";

// Logits of steps of a model, with an error when the second is captured.
std::vector<float> logits_of_steps(Session& session, const Model& model, const Call* fails) {
  Random random(3);
  std::vector<float> all;
  feed(session, 0, random_tokens(random, model, 5));
  for (int step = 0; step < 4; ++step) {
    if (step == 1 && fails != nullptr) fail_next(*fails);
    const std::vector<float> logits = feed(session, 0, random_tokens(random, model, 1));
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

// The back end's name after steps of a small model, if all launches overlap or none does; and their
// logits.
std::pair<std::string, std::vector<float>> run_steps(bool overlaps, const Call* fails = nullptr) {
  take_launches();
  const std::shared_ptr<Model> model = load(kSmallModel, 1);
  Session session(model, {.policies = {KvPolicy{.sinks = 0, .heavy = 3, .recent = 2}}});
  std::vector<float> logits = logits_of_steps(session, *model, fails);
  for (const Launch& launch : take_launches()) CHECK(launch.overlaps == overlaps);
  return {model->backend->name(), std::move(logits)};
}

TEST_CASE("a step that cannot be captured runs without a graph, and so do later ones" *
          doctest::skip(!on_cuda())) {
  const auto [name, expected] = run_steps(true);
  CHECK(name.find("no graphs") == std::string::npos);
  for (const auto& [call, reason] : {std::pair(Call::end_capture, "record: unknown error"),
                                     std::pair(Call::instantiate, "make a graph: unknown error"),
                                     std::pair(Call::replay, "replay a graph: unknown error")}) {
    CAPTURE(reason);
    const auto [name_then, logits] = run_steps(true, &call);
    CHECK(same_bits(logits, expected));
    CHECK(name_then.ends_with(std::string("no graphs: [cuda] ") + reason + ")"));
  }
}

// Each number of rows is a kind of step.
TEST_CASE("the graphs of the last 32 kinds of steps are kept" * doctest::skip(!on_cuda())) {
  constexpr int kMost = cuda::GraphCache::kMaxGraphs, kKinds = kMost + 4;
  const auto backend = test_backend();
  Random random(1);
  const DeviceMatrix x(*backend, random.reals(32), 1, 32);
  const int before = n_graphs();
  std::unique_ptr<CapturedGraph> graph;
  // The number of launches, 0 if they were captured before.
  const auto run = [&](int n_rows) {
    Batch batch;
    for (int s = 0; s < n_rows; ++s) batch.add(s, 0, std::vector<int32_t>(1));
    take_launches();
    backend->run(batch, graph, [&] { backend->relu(x); });
    return take_launches().size();
  };
  const auto kept = [&] { return n_graphs() - before; };
  for (int n_rows = 1; n_rows <= kKinds; ++n_rows) {
    CHECK(run(n_rows) == 1);
    CHECK(run(n_rows) == 1);
    CHECK(run(n_rows) == 0);
    CHECK(kept() == std::min(n_rows, kMost));
  }
  CHECK(run(kKinds - kMost + 1) == 0);  // the oldest; now used last
  CHECK(run(1) == 1);                   // takes the place of the next
  CHECK(run(kKinds - kMost + 1) == 0);
  CHECK(run(kKinds - kMost + 2) == 1);
  CHECK(kept() == kMost);
  graph.reset();
  CHECK(kept() == 0);
}

TEST_CASE("graphs and overlapping launches can be switched off" * doctest::skip(!on_cuda())) {
  const auto [name, expected] = run_steps(true);
  CHECK(name.find(", launches") == std::string::npos);
  {
    const Setting setting("H2O_CUDA_OVERLAP", "0");
    const auto [name_then, logits] = run_steps(false);
    CHECK(name_then.ends_with(", launches do not overlap)"));
    CHECK(same_bits(logits, expected));
  }
  const Call call = Call::end_capture;
  {
    const Setting setting("H2O_CUDA_GRAPHS", "0");
    const auto [name_then, logits] = run_steps(true, &call);
    CHECK(name_then.ends_with(", no graphs: H2O_CUDA_GRAPHS=0)"));
    CHECK(same_bits(logits, expected));
  }
  CHECK(run_steps(true).first.ends_with("record: unknown error)"));  // the next capture fails
}

// Kernels that the driver has compiled from PTX for compute capability 8.0 do not wait for others.
TEST_CASE("kernels of a build for older devices do not overlap" * doctest::skip(!on_cuda())) {
  set_ptx_version(80);
  const std::string name = run_steps(false).first;
  set_ptx_version(90);
  CHECK(name.ends_with(", launches do not overlap)"));
}

TEST_CASE("free memory of a device" * doctest::skip(!on_cuda())) {
  const auto backend = test_backend();
  const size_t before = cuda_free_memory(0);
  const Buffer buffer = backend->allocate(1 << 20);
  CHECK(before - cuda_free_memory(0) == 1 << 20);
  CHECK_THROWS_WITH_AS(cuda_free_memory(1), "[cuda] device 1, this machine has 1", InvalidArgument);
}

TEST_CASE("device auto is the GPU if what is needed is free there" * doctest::skip(!on_cuda())) {
  CHECK(auto_device().name == "cpu");
  CHECK(auto_device().reason.empty());
  const Setting setting("H2O_CUDA_AUTO", "1");
  const size_t free = cuda_free_memory(0);
  CHECK(auto_device(free).name == "cuda");
  const AutoDevice too_large = auto_device(free + 1);
  CHECK(too_large.name == "cpu");
  CHECK(too_large.reason == concat(free + 1, " bytes are needed, ", free, " are free on the GPU"));
  CHECK(too_large.warns);
  fail_next(Call::memory_info);
  const AutoDevice broken = auto_device();
  CHECK(broken.name == "cpu");
  CHECK(broken.reason == "[cuda] memory: unknown error");
  CHECK(broken.warns);
  const Setting off("H2O_CUDA_AUTO", "0");
  CHECK(auto_device().name == "cpu");
}

TEST_CASE("a parallel copy copies every byte, and no other") {
  constexpr size_t kPart = 1 << 20;
  constexpr std::byte kGuard{7};
  for (const size_t bytes : {size_t{0}, size_t{1}, kPart, 2 * kPart - 1, 2 * kPart, 2 * kPart + 1,
                             3 * kPart + 2, 4 * kPart + 3, 9 * kPart - 5}) {
    CAPTURE(bytes);
    std::vector<std::byte> from(bytes), to(bytes + 1, kGuard);
    // A prime period: a part in another's place is noticed.
    for (size_t i = 0; i < bytes; ++i) from[i] = static_cast<std::byte>(i % 251);
    cuda::parallel_copy(to.data(), from.data(), bytes);
    CHECK(std::equal(from.begin(), from.end(), to.begin()));
    CHECK(to.back() == kGuard);
  }
}

TEST_CASE("cuBLAS that cannot start is not used" *
          doctest::skip(!on_cuda() || std::getenv("H2O_EMULATION_CUBLAS") == nullptr)) {
  CHECK(test_backend()->name().find("cuBLAS 13.0") != std::string::npos);
  const Setting fails("H2O_EMULATION_CUBLAS", "fails");
  CHECK(test_backend()->name().find("no cuBLAS: not initialized") != std::string::npos);
}

TEST_CASE("an error of the driver is one sentence" * doctest::skip(!on_cuda())) {
  for (const cudaError_t error :
       {cudaErrorInsufficientDriver, cudaErrorNoKernelImageForDevice, cudaErrorIllegalAddress,
        cudaErrorECCUncorrectable, cudaErrorUnknown, cudaErrorMemoryAllocation}) {
    const std::string said = cuda::describe(error);
    CAPTURE(said);
    CHECK(said.size() > 10);
    CHECK(said.find('\n') == std::string::npos);
    CHECK(said.find(". ") == std::string::npos);
  }
  CHECK_THROWS_WITH_AS(cuda::check(cudaErrorUnknown, "launch"), "[cuda] launch: unknown error",
                       DeviceError);
  CHECK_THROWS_AS(cuda::check(cudaErrorMemoryAllocation, "launch"), OutOfMemory);
}

}  // namespace
}  // namespace h2o
