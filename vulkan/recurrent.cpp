// Layers with a recurrent state.
#include "backend/recurrent_limits.h"
#include "kv/view.h"
#include "vulkan/operations.h"

namespace h2o::vulkan {
namespace {

constexpr int64_t kChannels = 64;  // of a workgroup of convolve.comp

// Mirrors Push in shaders/convolve.comp.
struct Convolution {
  uint64_t to, from, states, conv, segments;
  int64_t state_floats, first;
  int32_t width, n_taps;
};

}  // namespace

void delta_net(Commands& commands, const DeltaNet& layer, const KvView& cache,
               const DeviceBatch& batch, int64_t n_segments) {
  static_assert(kDeltaColumns == 16 && kMaxDeltaHead == 256 && kMaxTaps == 8);  // of the shaders
  const Convolution convolution{address_of(layer.qkv),
                                address_of(layer.qkv),
                                address_of(cache.states),
                                address_of(layer.conv),
                                batch.segments,
                                cache.state_floats,
                                layer.matrix_floats(),
                                static_cast<int32_t>(layer.qkv.cols),
                                static_cast<int32_t>(layer.conv.rows)};
  commands.barrier();
  commands.launch(Shader::convolve, {0}, {n_segments, tiles_of(layer.qkv.cols, kChannels)},
                  convolution);
  // Mirrors Push in shaders/delta.glsl.
  const struct {
    uint64_t result, qkv, alpha, beta, states, a, dt_bias, segments;
    int64_t state_floats;
    int32_t n_channels, n_k_heads, n_v_heads, head_dim, adjacent;
  } push{address_of(layer.out),
         address_of(layer.qkv),
         address_of(layer.alpha),
         address_of(layer.beta),
         address_of(cache.states),
         address_of(layer.a),
         address_of(layer.dt_bias),
         batch.segments,
         cache.state_floats,
         convolution.width,
         layer.n_k_heads,
         layer.n_v_heads,
         layer.head_dim,
         layer.adjacent};
  commands.barrier();
  commands.launch(Shader::delta_prepare, {}, {layer.out.rows, 2 * layer.n_k_heads + 1}, push);
  commands.barrier();
  commands.launch(Shader::delta_net, {},
                  {n_segments, layer.n_v_heads, layer.head_dim / kDeltaColumns}, push);
}

void short_conv(Commands& commands, const ShortConv& layer, const KvView& cache,
                const DeviceBatch& batch, int64_t n_segments) {
  const Convolution push{address_of(layer.out),
                         address_of(layer.bcx),
                         address_of(cache.states),
                         address_of(layer.conv),
                         batch.segments,
                         cache.state_floats,
                         0,
                         static_cast<int32_t>(layer.out.cols),
                         static_cast<int32_t>(layer.conv.rows)};
  commands.barrier();
  commands.launch(Shader::convolve, {1}, {n_segments, tiles_of(layer.out.cols, kChannels)}, push);
}

}  // namespace h2o::vulkan
