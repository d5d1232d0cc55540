// Sizes of launches on the emulated device: they are valid for every shape, and use a whole GPU.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <functional>
#include <set>

#include "attention_rig.h"
#include "control.h"
#include "random_weights.h"
#include "skipping.h"

namespace h2o {
namespace {

using namespace cuda::emulation;

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

// Blocks of decode attention per (sequence, kv_head).
uint64_t splits_of(Rig& rig, int32_t n_tokens) {
  const KvShape& shape = rig.cache().shape();
  std::vector<Piece> pieces;
  for (int32_t i = 0; i < shape.n_sequences; ++i) {
    rig.cache().set_length(i, n_tokens);
    pieces.push_back({i, 1});
  }
  Random random(1);
  take_launches();
  rig.attend(pieces, random_qkv(random, shape, shape.n_sequences));
  return take_launches().at(1).grid[2];
}

TEST_CASE("blocks of decode attention follow the slots in use" * doctest::skip(!on_cuda())) {
  KvShape shape{.n_layers = 1,
                .n_sequences = 1,
                .n_heads = 8,
                .n_kv_heads = 8,
                .head_dim = 64,
                .max_tokens = 100'000,
                .max_rows = 24};
  const Skipping skipping;
  Rig one(KvPolicy{}, shape), bounded({.sinks = 0, .heavy = 150, .recent = 149}, shape);
  CHECK(splits_of(one, 10) == 1);
  CHECK(splits_of(one, 63) == 1);
  CHECK(splits_of(one, 64) == 4);      // for up to 256 slots
  CHECK(splits_of(one, 4096) == 128);  // 65 of them have slots
  CHECK(splits_of(one, 90'000) == 128);
  CHECK(splits_of(bounded, 100) == 4);
  CHECK(splits_of(bounded, 90'000) == 5);
  shape.n_sequences = 24;
  shape.max_tokens = 10'000;
  Rig many(KvPolicy{}, shape);
  CHECK(splits_of(many, 100) == 4);
  CHECK(splits_of(many, 8000) == 20);  // of 512 slots
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
    const Affine w = uploaded_weights(b, owner, random, dtype, kOut, kIn);
    CHECK(std::ssize(launches_of([&] { b.matmul({{y, w}}, x); })) == n_launches);
  }
}

}  // namespace
}  // namespace h2o
