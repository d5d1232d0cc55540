// Models with weights repacked on load, and read in place: bit-identical results.
#include <doctest/doctest.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>

#include "cpu/allocate.h"
#include "cpu/cpu_backend.h"
#include "session_rig.h"

namespace h2o {
namespace {

constexpr const char* kModel = H2O_SOURCE_DIR "/models/tiny-opt.gguf";  // Q8_0, tied embeddings

std::vector<float> logits_of(const std::shared_ptr<Model>& model) {
  Session session(model, {.policies = {{}}, .n_ctx = 64});
  Random random(1);
  const std::vector<int32_t> prompt = random_tokens(random, *model, 20);
  std::vector<float> all = feed(session, 0, prompt);
  for (int i = 0; i < 5; ++i) {
    const std::vector<float> next = feed(session, 0, random_tokens(random, *model, 1));
    all.insert(all.end(), next.begin(), next.end());
  }
  return all;
}

TEST_CASE("repacked weights are bit-identical to those in the file") {
  const auto open = [](int n_threads, Repack repack, size_t max_resident = 0) {
    return std::make_shared<Model>(kModel, make_cpu_backend(n_threads, "", repack), nullptr,
                                   max_resident);
  };
  const auto repacked = open(3, Repack::always), in_place = open(1, Repack::never);
  INFO(repacked->backend->name());
  const auto is_repacked = [](const Model& model) {
    const Weights& w = model.weights;
    CHECK(w.token_embd.interleaved == w.output.weight.interleaved);
    CHECK(w.layers[0].ffn_down.weight.interleaved == w.output.weight.interleaved);
    CHECK_FALSE(w.position_embd.interleaved);
    return w.output.weight.interleaved;
  };
  CHECK(is_repacked(*repacked));
  CHECK_FALSE(is_repacked(*in_place));
  CHECK(same_bits(logits_of(repacked), logits_of(in_place)));
#ifndef _WIN32  // which cannot release pages
  // Copies would be in memory regardless of the limit.
  CHECK_FALSE(is_repacked(*open(1, Repack::always, size_t{1} << 40)));
#endif
}

#ifdef __linux__

// The "VmFlags" of the mapping that contains `address`; empty if the system does not tell.
std::string mapping_flags(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  const auto at = reinterpret_cast<uintptr_t>(address);
  bool found = false;
  for (std::string line; std::getline(maps, line);) {
    uintptr_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR " ", &begin, &end) == 2) {
      found = begin <= at && at < end;
    }
    if (found && line.starts_with("VmFlags:")) return line;
  }
  return {};
}

TEST_CASE("small tensors of repacked weights share huge pages" *
          doctest::skip(!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"))) {
  const auto model = std::make_shared<Model>(kModel, make_cpu_backend(1, "", Repack::always));
  INFO(model->backend->name());
  const std::byte* const weights = model->weights.layers[0].ffn_down.weight.data;
  // An emulator may ignore advice, or leave out the flags.
  const Buffer advised = allocate_huge(4 << 20);
  const auto is_huge = [](const void* address) {
    return mapping_flags(address).find(" hg") != std::string::npos;
  };
  CHECK(is_huge(weights) == is_huge(advised.data() + (1 << 20)));
  CHECK(reinterpret_cast<uintptr_t>(weights) % 64 == 0);
  CHECK(std::abs(weights - model->weights.layers[1].ffn_down.weight.data) < 5 << 20);
}

#endif

TEST_CASE("weights are not repacked if there is not enough memory") {
  const auto backend = make_cpu_backend(1, "");
  CHECK(backend->expect_weights(0));
  CHECK_FALSE(backend->expect_weights(std::numeric_limits<size_t>::max()));
  CHECK_FALSE(make_cpu_backend(1, "", Repack::never)->expect_weights(0));
}

}  // namespace
}  // namespace h2o
