// Two products and their gate as one operation, on the test device.
#include <doctest/doctest.h>

#include "random_weights.h"

namespace h2o {
namespace {

TEST_CASE("gated products are bit-identical to two products and a gate") {
  const auto backend = test_backend(2);
  Random random(9);
  constexpr int64_t kRows[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 70};
  constexpr Gate kKinds[] = {Gate::swiglu, Gate::swiglu_clamped, Gate::geglu};
  // Columns that warps share; rows of 16 bits that are not aligned to 16 bytes; more rows of
  // weights than warps share.
  constexpr std::pair<int64_t, int64_t> kShapes[] = {{38, 2112}, {33, 60}, {4300, 64}};
  size_t turn = 0;
  for (const DType dtype : device_dtypes()) {
    const int64_t block = info(dtype).block_size;
    for (const auto& shape : kShapes) {
      const int64_t n_out = shape.first, columns = shape.second;
      if (block > 1 && columns > 60) continue;  // no kernel of their own
      const int64_t n_in = (columns + block - 1) / block * block;
      std::vector<Buffer> owner;
      std::vector<std::byte> bytes[2];
      Affine weights[2];
      for (int i = 0; i < 2; ++i) {
        bytes[i] = random_weights(random, dtype, n_out * n_in, real_scales);
        weights[i].weight = backend->upload(tensor_of(bytes[i], dtype, n_out, n_in), owner);
      }
      const DeviceMatrix bias(*backend, random.reals(n_out), 1, n_out);
      weights[1].bias = bias;  // of the gate, then of the gated product
      for (const int64_t n_rows : kRows) {
        if (n_out > 4096 && n_rows != 1 && n_rows != 8) continue;
        const DeviceMatrix x(*backend, random.reals(n_rows * n_in, -0.1f, 0.1f), n_rows, n_in);
        for (int i = 0; i < 2; ++i) {
          if (brief() && n_rows % 2 != i) continue;
          const Gate kind = kKinds[turn++ % 3];
          CAPTURE(info(dtype).name);
          CAPTURE(n_out);
          CAPTURE(n_rows);
          CAPTURE(static_cast<int>(kind));
          const DeviceMatrix up(*backend, n_rows, n_out), gate(*backend, n_rows, n_out);
          const DeviceMatrix fused(*backend, n_rows, n_out), scratch(*backend, n_rows, n_out);
          run_rows(*backend, n_rows, [&](const Batch&) {
            backend->matmul({{up, weights[i]}, {gate, weights[1 - i]}}, x);
            backend->apply_gate(kind, up, gate);
            backend->matmul_gated(kind, {fused, weights[i]}, {scratch, weights[1 - i]}, x);
          });
          const std::vector<float> y = fused.read();
          CHECK(std::ranges::all_of(y, [](float value) { return std::isfinite(value); }));
          CHECK(same_bits(y, up.read()));
          scratch.read();  // checks that guards are unchanged
        }
      }
    }
  }
}

}  // namespace
}  // namespace h2o
