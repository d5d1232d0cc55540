// Layers with a recurrent state.
#include "backend/recurrent_limits.h"
#include "kv/view.h"
#include "vulkan/operations.h"

namespace h2o::vulkan {
namespace {

constexpr int64_t kChannels = 64;  // of a workgroup of convolve.comp
constexpr int32_t kGroups = 16;    // of rows of a state, in scan.comp

// Mirrors Push in shaders/convolve.comp.
struct Convolution {
  uint64_t to, from, states, conv, bias, segments;
  int64_t state_floats, first;
  int32_t width, n_taps;
};

// Convolves `from`, the inputs of a ShortConv, or x itself.
void convolve(Commands& commands, const Tensor& x, const Tensor* from, const Tensor& conv,
              const Tensor& bias, int64_t first, const KvView& cache, const DeviceBatch& batch,
              int64_t n_segments) {
  static_assert(kMaxTaps == 8);  // MOST_TAPS of the shader
  const Convolution push{address_of(x),
                         address_of(from != nullptr ? *from : x),
                         address_of(cache.states),
                         address_of(conv),
                         address_of(bias),
                         batch.segments,
                         cache.state_floats,
                         first,
                         static_cast<int32_t>(x.cols),
                         static_cast<int32_t>(conv.rows)};
  commands.barrier();
  commands.launch(Shader::convolve, {from != nullptr ? 1u : 0u},
                  {n_segments, tiles_of(x.cols, kChannels)}, push);
}

// Mirrors Push in shaders/scan.glsl.
struct Scan {
  uint64_t out, inputs, decay, rate, states, a, dt_bias, d, segments;
  int64_t state_floats;
  int32_t n_channels, first_q, first_k, first_v, n_k_heads, n_heads, head_dim, d_state, adjacent;
};

void scan(Commands& commands, const Scan& scan, bool is_delta, int64_t n_rows, int64_t n_segments) {
  static_assert(kDeltaColumns == 16);  // COLUMNS of the shader
  const uint32_t delta = is_delta ? 1 : 0;
  if (is_delta) commands.barrier();  // q and k have been convolved
  commands.launch(Shader::scan_gates, {delta}, {n_rows, is_delta ? 2 * scan.n_k_heads + 1 : 1},
                  scan);
  commands.barrier();
  commands.launch(Shader::scan, {delta, static_cast<uint32_t>(tiles_of(scan.d_state, kGroups))},
                  {n_segments, scan.n_heads, scan.head_dim / kDeltaColumns}, scan);
}

}  // namespace

void delta_net(Commands& commands, const DeltaNet& layer, const KvView& cache,
               const DeviceBatch& batch, int64_t n_segments) {
  convolve(commands, layer.qkv, nullptr, layer.conv, {}, layer.matrix_floats(), cache, batch,
           n_segments);
  const int32_t k_width = layer.n_k_heads * layer.head_dim;
  scan(commands,
       {.out = address_of(layer.out),
        .inputs = address_of(layer.qkv),
        .decay = address_of(layer.alpha),
        .rate = address_of(layer.beta),
        .states = address_of(cache.states),
        .a = address_of(layer.a),
        .dt_bias = address_of(layer.dt_bias),
        .d = 0,
        .segments = batch.segments,
        .state_floats = cache.state_floats,
        .n_channels = static_cast<int32_t>(layer.qkv.cols),
        .first_q = 0,
        .first_k = k_width,
        .first_v = 2 * k_width,
        .n_k_heads = layer.n_k_heads,
        .n_heads = layer.n_v_heads,
        .head_dim = layer.head_dim,
        .d_state = layer.head_dim,
        .adjacent = layer.adjacent},
       true, layer.out.rows, n_segments);
}

void state_space(Commands& commands, const StateSpace& layer, const KvView& cache,
                 const DeviceBatch& batch, int64_t n_segments) {
  convolve(commands, layer.xbc, nullptr, layer.conv, layer.conv_bias, layer.matrix_floats(), cache,
           batch, n_segments);
  const int32_t width = layer.n_heads * layer.head_dim;
  scan(commands,
       {.out = address_of(layer.out),
        .inputs = address_of(layer.xbc),
        .decay = address_of(layer.decay),
        .rate = address_of(layer.dt),
        .states = address_of(cache.states),
        .a = address_of(layer.a),
        .dt_bias = address_of(layer.dt_bias),
        .d = address_of(layer.d),
        .segments = batch.segments,
        .state_floats = cache.state_floats,
        .n_channels = static_cast<int32_t>(layer.xbc.cols),
        .first_q = width + layer.n_groups * layer.d_state,
        .first_k = width,
        .first_v = 0,
        .n_k_heads = layer.n_groups,
        .n_heads = layer.n_heads,
        .head_dim = layer.head_dim,
        .d_state = layer.d_state,
        .adjacent = 1},
       false, layer.out.rows, n_segments);
  map(commands, Map::swiglu, layer.out, layer.gate);
  if (!layer.norm) return;
  const Tensor parts{layer.out.data, DType::f32, layer.out.rows * layer.n_groups, layer.norm.cols};
  norm(commands, parts, parts, {layer.norm, {}}, layer.norm_eps);
}

void short_conv(Commands& commands, const ShortConv& layer, const KvView& cache,
                const DeviceBatch& batch, int64_t n_segments) {
  convolve(commands, layer.out, &layer.bcx, layer.conv, {}, 0, cache, batch, n_segments);
}

}  // namespace h2o::vulkan
