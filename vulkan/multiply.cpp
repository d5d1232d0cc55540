// Products: which shader computes them.
#include "vulkan/operations.h"

namespace h2o::vulkan {
namespace {

constexpr DType kWeights[] = {DType::f32,  DType::f16,    DType::bf16,   DType::q8_0,
                              DType::q4_0, DType::q4_1,   DType::q5_0,   DType::q5_1,
                              DType::q2_k, DType::q3_k,   DType::q4_k,   DType::q5_k,
                              DType::q6_k, DType::iq4_nl, DType::iq4_xs, DType::mxfp4};

// The tiles of matmul.comp, and the outputs of matvec.comp.
constexpr int64_t kTileOutputs = 64, kTileRows = 32, kOutputs = 4;
constexpr int64_t kFewRows = 8;

// Mirrors Push in shaders/product.glsl.
struct Push {
  uint64_t y, x, weight, bias, offsets;
  int64_t row_bytes, first, stride;
  int32_t n_rows, n_in, n_out, n_experts;
};

}  // namespace

std::span<const DType> weight_dtypes() { return kWeights; }

void multiply(Commands& commands, std::span<const Product> products, const Tensor& x, bool adds,
              const Routes* routes) {
  commands.barrier();
  for (const Product& product : products) {
    const Tensor& weight = product.w.weight;
    const Push push{
        .y = address_of(product.y),
        .x = address_of(x),
        .weight = address_of(weight),
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
    if (x.rows > kFewRows * (routes != nullptr ? routes->n_used : 1)) {
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
