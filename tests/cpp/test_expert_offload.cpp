// Which experts of a mixture stay in memory.
#include <doctest/doctest.h>

#include <array>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "gguf_writer.h"
#include "io/mapped_file.h"
#include "model/residency.h"
#include "session_rig.h"

namespace h2o {
namespace {

constexpr int32_t kExperts = 4;
constexpr int64_t kRows = 16 * 1024;  // of an expert's only matrix, 64 KiB

// Three layers with one matrix per expert, and a dense matrix.
class Mixtures {
 public:
  Mixtures() {
    const std::byte* at = mapped_.bytes().data();
    for (Tensor& tensor : tensors_) {
      tensor = {const_cast<std::byte*>(at), DType::f32, kExperts * kRows, 1};
      at += tensor.bytes();
    }
  }

  // Besides one layer and the dense matrix, some experts of each layer fit.
  std::unique_ptr<WeightResidency> open(int32_t n_kept, int64_t more = 0) {
    const auto size = static_cast<size_t>(tensors_[0].bytes());
    return make_residency(*backend_, {layers_, {&tensors_[3]}, layers_, kExperts},
                          2 * size + 3 * size * n_kept / kExperts + more);
  }

 private:
  TempFile file_{std::string(4 * kExperts * kRows * sizeof(float), 'x')};
  MappedFile mapped_{file_.path};
  std::array<Tensor, 4> tensors_;
  std::vector<LayerTensors> layers_ = {{&tensors_[0]}, {&tensors_[1]}, {&tensors_[2]}};
  std::unique_ptr<Backend> backend_ = test_backend();
};

// Number of experts read when this many rows are routed to each of a layer's.
int64_t n_read(WeightResidency& experts, int32_t layer, std::array<int32_t, kExperts> rows) {
  std::array<int32_t, kExperts + 1> offsets{};
  for (int32_t e = 0; e < kExperts; ++e) offsets[e + 1] = offsets[e] + rows[e];
  const int64_t before = experts.n_read();
  experts.prepare_experts(layer, offsets);
  return experts.n_read() - before;
}

TEST_CASE("the most used experts stay" * doctest::skip(on_gpu())) {
  Mixtures mixtures;
  const std::unique_ptr<WeightResidency> experts = mixtures.open(2);
  CHECK(experts->n_kept_experts() == 2);
  CHECK(n_read(*experts, 0, {3, 1, 0, 2}) == 3);
  CHECK(n_read(*experts, 1, {1, 0, 0, 0}) == 1);
  // The second had the fewest rows; it is read again, with the third, and both are released again.
  CHECK(n_read(*experts, 0, {1, 0, 0, 1}) == 0);
  CHECK(n_read(*experts, 1, {1, 0, 0, 0}) == 0);
  CHECK(n_read(*experts, 0, {0, 1, 1, 0}) == 2);
  CHECK(n_read(*experts, 1, {0, 1, 0, 0}) == 1);
  CHECK(n_read(*experts, 0, {1, 0, 0, 1}) == 0);
  // Among experts with equally many rows the most recently used one stays.
  CHECK(n_read(*experts, 0, {0, 1, 2, 0}) == 2);
  CHECK(n_read(*experts, 1, {1, 1, 0, 0}) == 0);
  CHECK(n_read(*experts, 0, {1, 0, 0, 0}) == 0);
  CHECK(n_read(*experts, 0, {0, 0, 1, 0}) == 1);
  CHECK(n_read(*experts, 1, {1, 0, 0, 0}) == 0);
  CHECK(n_read(*experts, 0, {0, 0, 1, 0}) == 0);
  CHECK(experts->n_needed() == 20);
}

TEST_CASE("experts used long ago are replaced by recently used ones" * doctest::skip(on_gpu())) {
  Mixtures mixtures;
  const std::unique_ptr<WeightResidency> experts = mixtures.open(1);
  n_read(*experts, 0, {100'000, 0, 0, 0});
  int passes = 0;
  do {
    n_read(*experts, 0, {0, 0, 64, 0});
    n_read(*experts, 1, {1, 0, 0, 0});
    ++passes;
  } while (n_read(*experts, 0, {0, 0, 1, 0}) == 1 && passes < 1000);
  CHECK(passes > 1);
  CHECK(passes < 20);
}

TEST_CASE("with memory for all experts nothing is read again" * doctest::skip(on_gpu())) {
  Mixtures mixtures;
  CHECK(mixtures.open(kExperts - 2)->n_kept_experts() == kExperts - 2);
  const std::unique_ptr<WeightResidency> experts = mixtures.open(kExperts - 2, 2 * kRows * 4);
  CHECK(experts->n_kept_experts() == kExperts);
  CHECK(n_read(*experts, 1, {1, 1, 1, 1}) == 0);
  CHECK_THROWS_AS(mixtures.open(0, -1), InvalidArgument);
}

}  // namespace
}  // namespace h2o
