#include "vulkan/operations.h"

namespace h2o::vulkan {
namespace {

constexpr int64_t kMapThreads = 128;

struct RowsPush {
  uint64_t to, from, codebook, rows;
  int64_t row_bytes;
  int32_t n, n_rows, n_used;
};

struct ScalePush {
  uint64_t x, values;
  int32_t n, n_rows, length, offset;
  float scale;
};

int32_t narrow(int64_t n) { return static_cast<int32_t>(n); }

}  // namespace

void map(Commands& commands, Map kind, const Tensor& x, const Tensor& gate,
         const MapParameters& parameters) {
  const struct {
    uint64_t x, gate;
    int64_t n;
    MapParameters f;
  } push{address_of(x), address_of(gate), x.rows * x.cols, parameters};
  commands.barrier();
  commands.launch(Shader::map, {static_cast<uint32_t>(kind)},
                  {groups_of(tiles_of(push.n, kMapThreads))}, push);
}

void norm(Commands& commands, const Tensor& y, const Tensor& x, const Affine& norm, float eps) {
  const struct {
    uint64_t y, x, weight, bias;
    int32_t n, n_rows, n_weights;
    float eps;
  } push{address_of(y),  address_of(x),  address_of(norm.weight),  address_of(norm.bias),
         narrow(x.cols), narrow(x.rows), narrow(norm.weight.rows), eps};
  commands.barrier();
  commands.launch(Shader::norm, {norm.bias ? 1u : 0u}, {groups_of(x.rows)}, push);
}

void look_up(Commands& commands, const Tensor& to, const Tensor& table, uint64_t rows, bool adds,
             uint64_t codebook) {
  const RowsPush push{address_of(to),    address_of(table), codebook,        rows,
                      table.row_bytes(), narrow(to.cols),   narrow(to.rows), 1};
  commands.barrier();
  commands.launch(Shader::rows, {static_cast<uint32_t>(table.dtype), adds ? 1u : 0u, 0},
                  {groups_of(to.rows)}, push);
}

void copy_heads(Commands& commands, const Heads& to, const Heads& from, int64_t n_rows,
                int64_t n_heads, int64_t width) {
  const struct {
    uint64_t to, from;
    int64_t to_row, to_head, from_row, from_head;
    int32_t n_heads, width;
  } push{address_of(to.first), address_of(from.first), to.row_step,     to.head_step,
         from.row_step,        from.head_step,         narrow(n_heads), narrow(width)};
  commands.launch(Shader::copy_heads, {}, {n_rows, groups_of(n_heads)}, push);
}

void scale_by_position(Commands& commands, const Tensor& x, float scale, int32_t length,
                       int32_t offset, uint64_t positions) {
  const ScalePush push{address_of(x), positions, narrow(x.cols), narrow(x.rows),
                       length,        offset,    scale};
  commands.barrier();
  commands.launch(Shader::scale_rows, {1}, {groups_of(x.rows)}, push);
}

void gate_rows(Commands& commands, const Tensor& x, const Tensor& gate) {
  const ScalePush push{address_of(x), address_of(gate), narrow(x.cols), narrow(x.rows), 1, 0, 1};
  commands.barrier();
  commands.launch(Shader::scale_rows, {0}, {groups_of(x.rows)}, push);
}

void rotate(Commands& commands, const Tensor& x, int64_t head_dim, const Rope& rope,
            const DeviceBatch& batch) {
  const struct {
    uint64_t x, segments, segment_of, frequencies;
    int32_t n, head_dim, pairs, n_half;
    float magnitude;
  } push{address_of(x),
         batch.segments,
         batch.segment_of,
         address_of(rope.frequencies),
         narrow(x.cols),
         narrow(head_dim),
         rope.layout == RopeLayout::pairs,
         narrow(rope.frequencies.cols),
         rope.magnitude};
  commands.launch(Shader::rotate, {}, {x.rows}, push);
}

void compute_rope_table(Commands& commands, const Tensor& rope_table, const Rope& rope) {
  const struct {
    uint64_t rope_table, frequencies;
    int32_t n_rows, n_half;
    float magnitude;
  } push{address_of(rope_table), address_of(rope.frequencies), narrow(rope_table.rows),
         narrow(rope.frequencies.cols), rope.magnitude};
  commands.barrier();
  commands.launch(Shader::rope_table, {}, {groups_of(rope_table.rows)}, push);
}

void argmax(Commands& commands, int32_t* tokens, const Tensor& x) {
  const struct {
    uint64_t tokens, x;
    int32_t n;
  } push{address_of(tokens), address_of(x), narrow(x.cols)};
  commands.barrier();
  commands.launch(Shader::argmax, {}, {x.rows}, push);
}

void select_largest(Commands& commands, LargestLogits* to, const Tensor& x, uint64_t temperatures) {
  static_assert(LargestLogits::kMax == 256 && sizeof(LargestLogits) == 8 + 8 * 256);
  const struct {
    uint64_t to, x, temperatures;
    int32_t n;
  } push{address_of(to), address_of(x), temperatures, narrow(x.cols)};
  commands.barrier();
  commands.launch(Shader::largest, {}, {x.rows}, push);
}

void route(Commands& commands, const Routes& routes, const Tensor& logits, const Tensor& bias) {
  const struct {
    uint64_t logits, bias, weights, selected, expert_scales;
    int32_t n_experts, n_used, by_sigmoid, n_groups, n_groups_used, normalized;
    float scale;
  } push{address_of(logits),
         address_of(bias),
         address_of(routes.weights),
         address_of(routes.copy_rows),
         address_of(routes.expert_scales),
         routes.n_experts,
         routes.n_used,
         routes.sigmoid,
         routes.n_groups,
         routes.n_groups_used,
         routes.normalized,
         routes.scale};
  commands.barrier();
  commands.launch(Shader::route, {}, {logits.rows}, push);
  const struct {
    uint64_t experts, copy_rows, offsets;
    int32_t n_rows, n_experts, n_used;
  } place{address_of(logits),         address_of(routes.copy_rows),
          address_of(routes.offsets), narrow(logits.rows),
          routes.n_experts,           routes.n_used};
  commands.barrier();
  commands.launch(Shader::place, {}, {routes.n_experts}, place);
}

void dispatch(Commands& commands, const Tensor& y, const Tensor& x, const Routes& routes) {
  const RowsPush push{
      address_of(y),  address_of(x), 0, address_of(routes.copy_rows), x.row_bytes(), narrow(y.cols),
      narrow(y.rows), routes.n_used};
  commands.barrier();
  commands.launch(Shader::rows, {static_cast<uint32_t>(DType::f32), 0, 1}, {groups_of(y.rows)},
                  push);
}

void combine_add(Commands& commands, const Tensor& y, const Tensor& x, const Routes& routes) {
  const struct {
    uint64_t y, x, weights, copy_rows;
    int32_t n, n_used;
  } push{address_of(y),  address_of(x), address_of(routes.weights), address_of(routes.copy_rows),
         narrow(y.cols), routes.n_used};
  commands.barrier();
  commands.launch(Shader::combine, {}, {y.rows}, push);
}

}  // namespace h2o::vulkan
