// Arguments of the products y = x w^T + bias, or y += that.
layout(constant_id = 0) const int TYPE = 0;
layout(constant_id = 1) const bool ADDS = false;
layout(constant_id = 2) const bool EXPERTS = false;  // rows are grouped by expert

layout(push_constant, scalar) uniform Push {
  uint64_t y, x, weight, codebook, bias;
  uint64_t offsets;        // of experts; 0: they have equally many rows
  int64_t row_bytes;       // of weight
  int64_t first, stride;   // of experts: e has the rows from first + e * stride on
  int n_rows, n_in, n_out, n_experts;
};

int first_row_of(int expert) {
  return offsets != 0 ? Ints(offsets).at[expert] : n_rows / n_experts * expert;
}

// The expert of a row: the number of experts that end at or before it.
int expert_of(int row) {
  int low = 0, high = n_experts - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (first_row_of(middle + 1) <= row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

void put(int row, int column, int64_t weight_row, float sum) {
  if (bias != 0) sum += floats(bias, weight_row).at[0];
  Floats to = floats(y, int64_t(row) * n_out + column);
  to.at[0] = ADDS ? to.at[0] + sum : sum;
}
