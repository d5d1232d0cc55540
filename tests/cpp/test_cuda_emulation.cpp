// Calls of the CUDA runtime on the emulated device: launch sizes are valid for every shape, and
// execution continues if graphs fail.
#include <algorithm>
#include <cmath>
#include <set>
#include <stdexcept>

#include "attention_rig.h"
#include "control.h"
#include "core/error.h"
#include "cuda/cuda_backend.h"
#include "cuda/runtime/captured_graph.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/parallel_copy.h"
#include "random_weights.h"
#include "session_rig.h"
#include "setting.h"

namespace h2o {
namespace {

using namespace cuda::emulation;

// Skips the execution of kernels, for shapes that are too large to compute here. Invalid launches
// throw.
class Skipping {
 public:
  Skipping() {
    take_launches();
    skip_kernels(true);
  }
  Skipping(const Skipping&) = delete;
  Skipping& operator=(const Skipping&) = delete;
  ~Skipping() { skip_kernels(false); }
};

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

uint64_t most_along_x() {
  uint64_t most = 0;
  for (const Launch& launch : take_launches()) most = std::max(most, launch.grid[0]);
  return most;
}

TEST_CASE("a context of a million tokens, in batches of 65,536 rows" * doctest::skip(!on_cuda())) {
  constexpr int32_t kTokens = 1 << 20, kRows = 1 << 16;
  // Tensor-core tiles, and f32 kernels.
  for (const auto& [dtype, head_dim] : {std::pair(DType::q4_0, 64), std::pair(DType::f32, 4)}) {
    const KvShape shape{.n_layers = 1,
                        .n_sequences = 1,
                        .n_heads = 1,
                        .n_kv_heads = 1,
                        .head_dim = head_dim,
                        .max_tokens = kTokens,
                        .max_rows = kRows,
                        .k_dtype = dtype,
                        .v_dtype = dtype};
    const Skipping skipping;
    Rig rig({.sinks = 0, .heavy = kTokens / 2, .recent = kTokens / 2}, shape);
    Random random(1);
    const Qkv rows = random_qkv(random, shape, kRows);
    for (int32_t i = 0; i < kTokens / kRows - 1; ++i) rig.attend({{0, kRows}}, rows);
    rig.attend({{0, kRows - 1}}, rows.rows(shape, 0, kRows - 1));
    CHECK(most_along_x() > 65535);
    rig.attend({{0, 1}}, rows.rows(shape, 0, 1));
    CHECK(most_along_x() > 0);
  }
}

// The attention to 32,768 keys of a chunk of `n_rows`: its blocks, and launches of the whole pass.
std::pair<uint64_t, size_t> attention_to_many_keys(Rig& rig, int32_t n_rows) {
  constexpr int32_t kKeys = 1 << 15;
  Random random(1);
  rig.cache().set_length(0, kKeys);
  const Qkv rows = random_qkv(random, rig.cache().shape(), n_rows);
  take_launches();
  rig.attend({{0, n_rows}}, rows);
  const std::vector<Launch> launches = take_launches();
  const auto& [x, y, z] = launches.at(1).grid;  // the first stores K and V
  return {x * y * z, launches.size()};
}

TEST_CASE("short chunks over a long cache fill 132 multiprocessors" * doctest::skip(!on_cuda())) {
  constexpr uint64_t kMultiprocessors = 132;
  constexpr int32_t kHeads = 32;
  // Tensor-core tiles, and f32 kernels.
  for (const auto& [dtype, head_dim] : {std::pair(DType::f16, 64), std::pair(DType::f32, 4)}) {
    for (const int32_t n_kv_heads : {1, 8, 32}) {
      CAPTURE(info(dtype).name);
      CAPTURE(n_kv_heads);
      const KvShape shape{.n_layers = 1,
                          .n_sequences = 1,
                          .n_heads = kHeads,
                          .n_kv_heads = n_kv_heads,
                          .head_dim = head_dim,
                          .max_tokens = 36'000,
                          .max_rows = 2048,
                          .k_dtype = dtype,
                          .v_dtype = dtype};
      const Skipping skipping;
      Rig rig(KvPolicy{}, shape);
      for (const uint64_t n_rows : {2, 16, 100, 2048}) {
        CAPTURE(n_rows);
        const uint64_t tile = dtype == DType::f16 ? 128 : 16;  // queries
        const uint64_t n_tiles = (n_rows * kHeads / n_kv_heads + tile - 1) / tile * n_kv_heads;
        const auto [n_blocks, n_launches] = attention_to_many_keys(rig, n_rows);
        CHECK(n_blocks >= kMultiprocessors);
        if (n_tiles >= kMultiprocessors) {  // not split
          CHECK(n_blocks == n_tiles);
          CHECK(n_launches == 4);  // stores, attends, and the two of admit()
        } else {
          CHECK(n_blocks <= 2 * kMultiprocessors);
          CHECK(n_launches == 5);  // and merges
        }
      }
      // A single row: decode.
      CHECK(attention_to_many_keys(rig, 1).first >= kMultiprocessors);
    }
  }
}

// The kernel that reads keys and values to decode one token.
const void* decode_kernel(DType k, DType v, int32_t head_dim, bool rolls) {
  const KvShape shape{.n_layers = 1,
                      .n_sequences = 1,
                      .n_heads = 1,
                      .n_kv_heads = 1,
                      .head_dim = head_dim,
                      .max_tokens = 4,
                      .max_rows = 1,
                      .k_dtype = k,
                      .v_dtype = v,
                      .rope = rolls ? rope_of(head_dim) : Rope{}};
  const Skipping skipping;
  Rig rig({.sinks = 0, .heavy = 1, .recent = 1}, shape);
  Random random(1);
  take_launches();
  rig.attend({{0, 1}}, random_qkv(random, shape, 1));
  return take_launches().at(1).kernel;  // the first stores K and V
}

TEST_CASE("decode attention has a kernel for every type of keys and values" *
          doctest::skip(!on_cuda())) {
  std::set<const void*> kernels = {decode_kernel(DType::f16, DType::f16, 60, false)};  // any type
  CHECK(kernels.contains(decode_kernel(DType::f32, DType::bf16, 64, false)));
  const std::pair<DType, DType> types[] = {{DType::f32, DType::f32},   {DType::f16, DType::f16},
                                           {DType::bf16, DType::bf16}, {DType::q8_0, DType::q8_0},
                                           {DType::q8_0, DType::q4_0}, {DType::q4_0, DType::q4_0}};
  for (const auto& [k, v] : types) {
    for (const bool rolls : {false, true}) {
      CAPTURE(info(k).name);
      CAPTURE(info(v).name);
      CAPTURE(rolls);
      CHECK(kernels.insert(decode_kernel(k, v, 64, rolls)).second);
    }
  }
}

TEST_CASE("a token of each of 65,536 sequences" * doctest::skip(!on_cuda())) {
  constexpr int32_t kSequences = 1 << 16;
  const KvShape shape{.n_layers = 1,
                      .n_sequences = kSequences,
                      .n_heads = 1,
                      .n_kv_heads = 1,
                      .head_dim = 8,
                      .max_tokens = 2,
                      .max_rows = kSequences};
  const Skipping skipping;
  Rig rig(KvPolicy{}, shape);
  std::vector<Piece> pieces;
  for (int32_t s = 0; s < kSequences; ++s) pieces.push_back({s, 1});
  Random random(1);
  rig.attend(pieces, random_qkv(random, shape, kSequences));
  CHECK(most_along_x() == kSequences);
}

TEST_CASE("embeddings of 65,536 rows" * doctest::skip(!on_cuda())) {
  constexpr int32_t kRows = 1 << 16, kCols = 32;
  const auto backend = test_backend();
  Random random(1);
  const std::vector<float> values = random.reals(2 * kCols);
  auto* data = reinterpret_cast<std::byte*>(const_cast<float*>(values.data()));
  const Tensor host{data, DType::f32, 2, kCols};
  const Buffer memory = backend->allocate(backend->upload_bytes(host));
  const Tensor table = backend->upload(host, memory.data());
  const DeviceMatrix x(*backend, kRows, kCols);
  const Skipping skipping;
  run_rows(*backend, kRows, [&](const Batch& batch) { backend->embed(x, table, batch); });
  CHECK(most_along_x() == kRows);
}

TEST_CASE("products, norms, gates and the largest logits of 65,536 rows" *
          doctest::skip(!on_cuda())) {
  constexpr int64_t kRows = 1 << 16, kIn = 256, kOut = 8;
  const auto backend = test_backend();
  Backend& b = *backend;
  Random random(1);
  const DeviceMatrix x(b, kRows, kIn), gate(b, kRows, kIn), y(b, kRows, kOut);
  const DeviceMatrix norm(b, random.reals(kIn), 1, kIn);
  const Buffer largest = b.allocate(kRows * sizeof(LargestLogits));
  const Buffer tokens = b.allocate(kRows * sizeof(int32_t));
  const Skipping skipping;
  Batch batch;
  batch.add(0, 0, std::vector<int32_t>(kRows));
  const auto launches_of = [&](const auto& operation) {
    take_launches();
    b.run(batch, operation);
    return take_launches();
  };
  const std::function<void()> by_row[] = {
      [&] { b.rms_norm(x, x, norm, 1e-5f); }, [&] { b.layer_norm(x, x, {norm, norm}, 1e-5f); },
      [&] { b.argmax(tokens.as<int32_t>(), y); },
      [&] { b.select_largest(largest.as<LargestLogits>(), y, batch); }};
  for (const auto& operation : by_row) {
    const std::vector<Launch> launches = launches_of(operation);
    REQUIRE(launches.size() == 1);
    CHECK(launches[0].grid == std::array<uint64_t, 3>{kRows, 1, 1});
  }
  CHECK(launches_of([&] { b.apply_gate(Gate::swiglu, x, gate); }).size() == 1);
  // f32 takes 8 rows per launch, f16 and quantized types 2048, and a conversion.
  for (const auto& [dtype, n_launches] :
       {std::pair(DType::f32, kRows / 8), std::pair(DType::f16, 2 * kRows / 2048),
        std::pair(DType::q4_k, 2 * kRows / 2048)}) {
    CAPTURE(info(dtype).name);
    std::vector<Buffer> owner;
    const std::vector<std::byte> bytes = random_weights(random, dtype, kOut * kIn, real_scales);
    const Affine w{b.upload(tensor_of(bytes, dtype, kOut, kIn), owner), {}};
    CHECK(std::ssize(launches_of([&] { b.matmul({{y, w}}, x); })) == n_launches);
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
  CHECK(auto_device().name == "cpu");  // CUDA has not been measured
  CHECK(auto_device().reason.empty());
  const Setting setting("H2O_CUDA_AUTO", "1");
  const size_t free = cuda_free_memory(0);
  CHECK(auto_device(free).name == "cuda");
  const AutoDevice too_large = auto_device(free + 1);
  CHECK(too_large.name == "cpu");
  CHECK(too_large.reason == text(free + 1, " bytes are needed, ", free, " are free on the GPU"));
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

// To be lowered when kernels are fused. Quantized models have one more: SwiGLU, which rounds its
// output; see below.
TEST_CASE("launches of a decode step" * doctest::skip(!on_cuda())) {
  constexpr int kPerLayer = 9;  // 2 norms, 4 of products, the third with SwiGLU, 3 of attention
  constexpr int kOthers = 4;    // embeddings, and the last norm, rows and product
  const auto model = load(kSmallModel, 1);
  Session session(model, {});
  Random random(4);
  feed(session, 0, random_tokens(random, *model, 3));
  for (int step = 0; step < 2; ++step) {  // without capture, and captured
    take_launches();
    feed(session, 0, random_tokens(random, *model, 1));
    CHECK(take_launches().size() == kPerLayer * model->config.n_layers + kOthers);
  }
}

// Weights are read once for up to 64 rows, and activations are rounded once.
TEST_CASE("launches of products of many rows" * doctest::skip(!on_cuda())) {
  const auto backend = test_backend();
  Random random(6);
  constexpr int64_t kIn = 256, kOut = 40;
  for (const DType dtype : {DType::f16, DType::bf16, DType::q4_k}) {
    std::vector<Buffer> owner;
    const std::vector<std::byte> bytes = random_weights(random, dtype, kOut * kIn, real_scales);
    const Affine w{backend->upload(tensor_of(bytes, dtype, kOut, kIn), owner), {}};
    for (const int64_t n_rows : {9, 64, 65, 2048}) {
      CAPTURE(info(dtype).name);
      CAPTURE(n_rows);
      const Skipping skipping;
      const DeviceMatrix x(*backend, n_rows, kIn);
      const DeviceMatrix first(*backend, n_rows, kOut), second(*backend, n_rows, kOut);
      take_launches();
      run_rows(*backend, n_rows, [&](const Batch&) {
        backend->matmul(first, x, w);
        backend->matmul(second, x, w);
      });
      CHECK(take_launches().size() == 3);
    }
  }
}

// The host does not know the routing: the launches are the same in every case.
TEST_CASE("launches of a mixture of experts" * doctest::skip(!on_cuda())) {
  constexpr int32_t kExperts = 5, kUsed = 2;
  constexpr int64_t kWidth = 256, kInner = 64;
  Random random(8);
  for (const DType dtype : {DType::f16, DType::mxfp4}) {
    const auto backend = test_backend();
    Backend& b = *backend;
    std::vector<Buffer> owner;
    const auto weights = [&](DType type, int64_t n_out, int64_t n_in) {
      const std::vector<std::byte> bytes = random_weights(random, type, n_out * n_in, real_scales);
      return Affine{b.upload(tensor_of(bytes, type, n_out, n_in), owner), {}};
    };
    const Affine router = weights(DType::f32, kExperts, kWidth);
    const Affine up = weights(dtype, kExperts * kInner, kWidth);
    const Affine gate = weights(dtype, kExperts * kInner, kWidth);
    const Affine down = weights(dtype, kExperts * kWidth, kInner);
    const DeviceMatrix norm(b, random.reals(kWidth, -0.05f, 0.05f), 1, kWidth);
    const bool rounds = dtype == DType::mxfp4;
    const std::pair<int64_t, size_t> launches_of[] = {
        // Norm, router, routes, dispatch, products, gate, product, sum. Rounding to 8 bits is fused
        // for up to 8 copies; otherwise it has its own launch.
        {1, 8},
        {4, 8},
        {8, rounds ? 10 : 8},
        // The router, in f32, takes 8 rows per launch; routes take 2; up and gate one product each;
        // and the inputs of up and down are rounded.
        {40, 16}};
    for (const auto& [n_rows, expected] : launches_of) {
      CAPTURE(info(dtype).name);
      CAPTURE(n_rows);
      const int64_t n_copies = n_rows * kUsed;
      const std::vector<float> start = random.reals(n_rows * kWidth);
      DeviceMatrix x(b, n_rows, kWidth);
      const DeviceMatrix h(b, n_rows, kWidth), logits(b, n_rows, kExperts);
      const DeviceMatrix copies(b, n_copies, kWidth);
      const DeviceMatrix ups(b, n_copies, kInner), gates(b, n_copies, kInner);
      const Buffer arrays = b.allocate(4 * (2 * n_copies + kExperts + 1));
      const Routes routes{.n_experts = kExperts,
                          .n_used = kUsed,
                          .normalized = true,
                          .scale = 1,
                          .weights = arrays.as<float>(),
                          .copy_rows = arrays.as<int32_t>() + n_copies,
                          .offsets = arrays.as<int32_t>() + 2 * n_copies};
      const std::function<void()> operations[] = {
          [&] { b.rms_norm(h, x, norm, 1e-5f); },
          [&] { b.matmul(logits, h, router); },
          [&] { b.route(routes, logits); },
          [&] { b.dispatch(copies, h, routes); },
          [&] { b.matmul_experts({{ups, up}, {gates, gate}}, copies, routes); },
          [&] { b.apply_gate(Gate::swiglu_clamped, ups, gates); },
          [&] { b.matmul_experts({{copies, down}}, ups, routes); },
          [&] { b.combine_add(x, copies, routes); }};
      x.write(start);
      take_launches();
      run_rows(b, n_rows, [&](const Batch&) {
        for (const auto& operation : operations) operation();
      });
      CHECK(take_launches().size() == expected);
      const std::vector<float> together = x.read();
      CHECK(std::ranges::all_of(together, [](float value) { return std::isfinite(value); }));
      x.write(start);
      for (const auto& operation : operations) {
        run_rows(b, n_rows, [&](const Batch&) { operation(); });
      }
      CHECK(same_bits(x.read(), together));
    }
  }
}

// Three tokens of two sequences through one layer; and the launches of each step.
std::pair<std::vector<float>, std::vector<size_t>> quantized_layer(bool one_pass,
                                                                   DType v_type = DType::q8_0) {
  constexpr int64_t kRows = 2, kWidth = 128, kKvWidth = 64, kInner = 160;
  const KvShape shape{.n_layers = 1,
                      .n_sequences = kRows,
                      .n_heads = 4,
                      .n_kv_heads = 2,
                      .head_dim = 32,
                      .max_tokens = 8,
                      .max_rows = kRows};
  const auto backend = test_backend();
  Backend& b = *backend;
  const KvPolicy policy;
  KvCache cache(b, {&policy, 1}, shape);
  Random random(5);
  std::vector<Buffer> owner;
  const auto weights = [&](int64_t n_out, int64_t n_in, DType dtype = DType::q8_0) {
    const auto bytes = random_weights(random, dtype, n_out * n_in, real_scales);
    return Affine{b.upload(tensor_of(bytes, dtype, n_out, n_in), owner), {}};
  };
  const Affine wq = weights(kWidth, kWidth), wk = weights(kKvWidth, kWidth);
  const Affine wv = weights(kKvWidth, kWidth, v_type), wo = weights(kWidth, kWidth);
  const Affine w_up = weights(kInner, kWidth), w_gate = weights(kInner, kWidth);
  const Affine w_down = weights(kWidth, kInner);
  const DeviceMatrix norm(b, random.reals(kWidth, -0.05f, 0.05f), 1, kWidth);
  const DeviceMatrix x(b, random.reals(kRows * kWidth), kRows, kWidth);
  const DeviceMatrix h(b, kRows, kWidth), q(b, kRows, kWidth), out(b, kRows, kWidth);
  const DeviceMatrix k(b, kRows, kKvWidth), v(b, kRows, kKvWidth);
  const DeviceMatrix up(b, kRows, kInner), gate(b, kRows, kInner);
  const Attention attention{.out = out,
                            .q = q,
                            .k = k,
                            .v = v,
                            .rope = {},
                            .scale = attention_scale(shape),
                            .sinks = {},
                            .slopes = {}};
  std::vector<size_t> launches;
  for (int32_t position = 0; position < 3; ++position) {
    Batch batch;
    for (int32_t s = 0; s < kRows; ++s) batch.add(s, position, std::vector<int32_t>(1), false);
    const std::function<void()> operations[] = {
        [&] { b.rms_norm(h, x, norm, 1e-5f); },
        [&] { b.matmul({{q, wq}, {k, wk}, {v, wv}}, h); },
        [&] { b.attend(attention, cache.layer(0), batch); },
        [&] { b.matmul_add(x, out, wo); },
        [&] { b.rms_norm(h, x, norm, 1e-5f); },
        [&] { b.matmul_gated(Gate::swiglu, {up, w_up}, {gate, w_gate}, h); },
        [&] { b.matmul_add(x, up, w_down); }};
    take_launches();
    if (one_pass) {
      b.run(batch, [&] {
        for (const auto& operation : operations) operation();
      });
    } else {
      for (const auto& operation : operations) b.run(batch, operation);
    }
    launches.push_back(take_launches().size());
    cache.advance(batch);
  }
  return {x.read(), launches};
}

TEST_CASE("a layer of quantized weights fuses the rounding of activations" *
          doctest::skip(!on_cuda())) {
  const auto [fused, launches] = quantized_layer(true);
  const auto [alone, more] = quantized_layer(false);
  CHECK(launches == std::vector<size_t>(3, 10));
  CHECK(more == std::vector<size_t>(3, 14));
  CHECK(std::ranges::all_of(fused, [](float value) { return std::isfinite(value); }));
  CHECK(same_bits(fused, alone));
  // V of another type, as in half of the layers of Q4_K_M, takes a launch of its own.
  CHECK(quantized_layer(true, DType::q4_0).second == std::vector<size_t>(3, 11));
}

// Of rows shorter and longer than what a block has in registers.
TEST_CASE("norms round their output as a launch of its own does" * doctest::skip(!on_cuda())) {
  constexpr int64_t kRows = 2, kOut = 3;
  Random random(10);
  for (const int64_t n : {32, 1056, 8192, 9248}) {
    CAPTURE(n);
    const auto backend = test_backend();
    Backend& b = *backend;
    std::vector<Buffer> owner;
    const auto bytes = random_weights(random, DType::q8_0, kOut * n, real_scales);
    const Affine w{b.upload(tensor_of(bytes, DType::q8_0, kOut, n), owner), {}};
    const DeviceMatrix weight(b, random.reals(n), 1, n), bias(b, random.reals(n), 1, n);
    const DeviceMatrix x(b, random.reals(kRows * n), kRows, n);
    const DeviceMatrix h(b, kRows, n), y(b, kRows, kOut);
    const std::function<void()> norms[] = {[&] { b.rms_norm(h, x, weight, 1e-5f); },
                                           [&] { b.layer_norm(h, x, {weight, bias}, 1e-5f); }};
    for (const auto& norm : norms) {
      const auto multiply = [&] { b.matmul({{y, w}}, h); };
      take_launches();
      run_rows(b, kRows, [&](const Batch&) {
        norm();
        multiply();
      });
      CHECK(take_launches().size() == 2);
      const std::vector<float> fused = y.read();
      run_rows(b, kRows, [&](const Batch&) { norm(); });
      run_rows(b, kRows, [&](const Batch&) { multiply(); });
      CHECK(take_launches().size() == 3);
      CHECK(std::ranges::all_of(fused, [](float value) { return std::isfinite(value); }));
      CHECK(same_bits(y.read(), fused));
    }
  }
}

}  // namespace
}  // namespace h2o
