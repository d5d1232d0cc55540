// Arguments of the shaders of a DeltaNet or a StateSpace, as Scan in recurrent.cpp. A row of inputs
// has q and k of each of n_k_heads heads, and values of each of n_heads, from these columns on.
layout(constant_id = 0) const bool DELTA = false;
layout(push_constant, scalar) uniform Push {
  uint64_t result, inputs, decay, rate, states, a, dt_bias, d, segments;
  int64_t state_floats;
  int n_channels, first_q, first_k, first_v;
  int n_k_heads, n_heads, head_dim, d_state, adjacent;  // q and k have d_state dimensions
};
