// Products: which shader computes them.
#include "vulkan/operations.h"

namespace h2o::vulkan {
namespace {

// The tiles of matmul.comp, and the outputs of matvec.comp.
constexpr int64_t kTileOutputs = 64, kTileRows = 32, kOutputs = 4;
constexpr int64_t kFewRows = 8;

// Mirrors Push in shaders/product.glsl.
struct Push {
  uint64_t y, x, weight, codebook, bias, offsets;
  int64_t row_bytes, first, stride;
  int32_t n_rows, n_in, n_out, n_experts;
};

}  // namespace

void multiply(Commands& commands, const Codebooks& codebooks, std::span<const Product> products,
              const Tensor& x, bool adds, const Routes* routes) {
  // A sequence has a row for each expert that it uses.
  const int64_t n_used = routes == nullptr            ? 1
                         : routes->offsets == nullptr ? routes->n_experts
                                                      : routes->n_used;
  commands.barrier();
  for (const Product& product : products) {
    const Tensor& weight = product.w.weight;
    const Push push{
        .y = address_of(product.y),
        .x = address_of(x),
        .weight = address_of(weight),
        .codebook = codebooks.of(weight.dtype),
        .bias = address_of(product.w.bias),
        .offsets = routes != nullptr ? address_of(routes->offsets) : 0,
        .row_bytes = weight.row_bytes(),
        .first = product.first,
        .stride = product.row(1) - product.first,
        .n_rows = static_cast<int32_t>(x.rows),
        .n_in = static_cast<int32_t>(x.cols),
        .n_out = static_cast<int32_t>(product.y.cols),
        .n_experts = routes != nullptr ? routes->n_experts : 0,
    };
    std::vector<uint32_t> constants = {static_cast<uint32_t>(weight.dtype), adds ? 1u : 0u,
                                       routes != nullptr ? 1u : 0u};
    if (x.rows > kFewRows * n_used) {
      const int64_t n_tiles = tiles_of(x.rows, kTileRows) + push.n_experts;
      commands.launch(Shader::matmul, constants, {tiles_of(push.n_out, kTileOutputs), n_tiles},
                      push);
      continue;
    }
    const int64_t rows = routes != nullptr || x.rows == 1 ? 1 : x.rows <= 4 ? 4 : kFewRows;
    constants.push_back(static_cast<uint32_t>(rows));
    commands.launch(Shader::matvec, constants,
                    {groups_of(tiles_of(push.n_out, kOutputs)), tiles_of(x.rows, rows)}, push);
  }
}

}  // namespace h2o::vulkan
