// Operations other than attention; see backend/backend.h. Each begins with a barrier.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>

#include "backend/backend.h"
#include "vulkan/codebooks.h"
#include "vulkan/runtime/commands.h"
#include "vulkan/runtime/device_batch.h"

namespace h2o::vulkan {

inline uint64_t address_of(const void* data) { return reinterpret_cast<uint64_t>(data); }
inline uint64_t address_of(const Tensor& tensor) { return address_of(tensor.data); }

// The number of tiles of `size` that n have, the last of which may be shorter.
inline int64_t tiles_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Workgroups for n tiles, of a shader in which a workgroup computes several if there are more than
// a device can launch.
inline int64_t groups_of(int64_t n) { return std::min<int64_t>(n, kMostGroups); }

// The functions of shaders/map.comp, by its OPERATION.
enum class Map : uint32_t {
  relu,
  relu_squared,
  gelu_tanh,
  gelu_erf,
  xielu,
  clamp,
  scale,
  softcap,
  add,
  swiglu,
  swiglu_clamped,
  geglu,
  sigmoid_gate,
  multiply,
};

// Up to four parameters of a Map.
struct MapParameters {
  float f[4];
};

void map(Commands& commands, Map kind, const Tensor& x, const Tensor& gate = {},
         const MapParameters& parameters = {});

// bias: of a layer_norm; empty: rms_norm, whose weights may have several rows, which rows of x use
// in turn.
void norm(Commands& commands, const Tensor& y, const Tensor& x, const Affine& norm, float eps);

// to[i] (+)= table[rows[i]]; `rows` is a device address, and so is the codebook of the table's
// type.
void look_up(Commands& commands, const Tensor& to, const Tensor& table, uint64_t rows, bool adds,
             uint64_t codebook = 0);

void copy_heads(Commands& commands, const Heads& to, const Heads& from, int64_t n_rows,
                int64_t n_heads, int64_t width);
void scale_by_position(Commands& commands, const Tensor& x, float scale, int32_t length,
                       int32_t offset, uint64_t positions);
void rotate(Commands& commands, const Tensor& x, int64_t head_dim, const Rope& rope,
            const DeviceBatch& batch);
void compute_rope_table(Commands& commands, const Tensor& rope_table, const Rope& rope);
void argmax(Commands& commands, int32_t* tokens, const Tensor& x);
void select_largest(Commands& commands, LargestLogits* to, const Tensor& x, uint64_t temperatures);

// y (+)= x w^T + bias for each product; with `routes`, of the experts' rows.
void multiply(Commands& commands, const Codebooks& codebooks, std::span<const Product> products,
              const Tensor& x, bool adds, const Routes* routes = nullptr);

void route(Commands& commands, const Routes& routes, const Tensor& logits, const Tensor& bias);
void dispatch(Commands& commands, const Tensor& y, const Tensor& x, const Routes& routes);
void combine_add(Commands& commands, const Tensor& y, const Tensor& x, const Routes& routes);
void gate_rows(Commands& commands, const Tensor& x, const Tensor& gate);

void delta_net(Commands& commands, const DeltaNet& layer, const KvView& cache,
               const DeviceBatch& batch, int64_t n_segments);
void short_conv(Commands& commands, const ShortConv& layer, const KvView& cache,
                const DeviceBatch& batch, int64_t n_segments);
void state_space(Commands& commands, const StateSpace& layer, const KvView& cache,
                 const DeviceBatch& batch, int64_t n_segments);

}  // namespace h2o::vulkan
