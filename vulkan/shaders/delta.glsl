// Arguments of the shaders of a DeltaNet, as Delta in recurrent.cpp.
layout(push_constant, scalar) uniform Push {
  uint64_t result, qkv, alpha, beta, states, a, dt_bias, segments;
  int64_t state_floats;
  int n_channels, n_k_heads, n_v_heads, head_dim, adjacent;
};
