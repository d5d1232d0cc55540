#include "cuda/matmul/formats.cuh"
#include "cuda/matmul/matvec.cuh"

namespace h2o::cuda {
namespace {

// Adds the four products of signed bytes to `sum`.
__device__ int dot(uint32_t w, uint32_t x, int sum) {
  return __dp4a(static_cast<int>(w), static_cast<int>(x), sum);
}

template <class Format>
struct Quantized {
  using Raw = typename Format::Raw;
  using Unpacked = Group<typename Format::Scales>;
  using X = QuantizedRows;
  static constexpr int kUnit = kGroup;
  static constexpr int kScales = Format::Scales::kScales;
  static constexpr int kBytesOf8 = Format::kBytesOf8;
  // Unpacking; then for each row 8 dot products, and of each sum a conversion, which counts as
  // four, and two products, or four with minima.
  static constexpr int operations(int n) {
    return 20 + n * (8 + kScales * (Format::Scales::kMins ? 8 : 6));
  }

  template <int n>
  static constexpr int kWide = n <= 1   ? 1
                               : n <= 4 ? 2
                                        : 4;
  template <int n>
  static constexpr int kAhead = n > 1                ? 4 / kWide<n>
                                : kBytesOf8 < 8 * 12 ? 3
                                                     : 2;
  static constexpr int blocks(int n) { return n == 1 ? 9 : n == 2 ? 4 : 3; }
  static constexpr int kExpertBlocks = 8;

  template <int>
  __device__ static Raw load(const std::byte* row, int n_units, int i) {
    return Format::load_raw(row, n_units, i);
  }
  // For invalid units it is enough that i % 8 is the lane's, and x is zero there.
  __device__ static Unpacked unpack(const Raw& raw, int i, bool) { return Format::unpack(raw, i); }

  template <int n, int wide>
  __device__ static void multiply(float* sums, const Unpacked* w, const QuantizedRows& x, int,
                                  int chunk, int lane) {
    // Addresses relative to the first row with 32-bit offsets: eight 64-bit addresses would take
    // too many registers.
    const int at = min(chunk, x.n_chunks - 1);
    const int8_t* const half = x.half(0, at, lane, 0);
    const RoundedGroup* const group = x.group(0, at, lane);
    const int row_groups = x.n_chunks * QuantizedRows::kChunk;
#pragma unroll
    for (int r = 0; r < n; ++r) {
      const int8_t* const q_r = half + r * (row_groups * kGroup);
      const auto a = *reinterpret_cast<const uint4*>(q_r);
      const auto b = *reinterpret_cast<const uint4*>(q_r + QuantizedRows::kChunk * 16);
      const auto packed = *reinterpret_cast<const int2*>(group + r * row_groups);
      const float d = __int_as_float(packed.x);
      const int first_sum = static_cast<int16_t>(packed.y);
      const int second_sum = packed.y >> 16;
      const int sum = first_sum + second_sum;
#pragma unroll
      for (int j = 0; j < wide; ++j) {
        float& total = sums[j * n + r];
        const uint32_t* q = w[j].q;
        if constexpr (kScales == 1) {
          int products = -Format::kOffset * sum;
          products = dot(q[3], a.w, dot(q[2], a.z, dot(q[1], a.y, dot(q[0], a.x, products))));
          products = dot(q[7], b.w, dot(q[6], b.z, dot(q[5], b.y, dot(q[4], b.x, products))));
          total += static_cast<float>(products) * (w[j].scale[0] * d);
          if constexpr (Format::Scales::kMins) total += w[j].min[0] * (d * static_cast<float>(sum));
        } else {
          int first = -Format::kOffset * first_sum;
          int second = -Format::kOffset * second_sum;
          first = dot(q[3], a.w, dot(q[2], a.z, dot(q[1], a.y, dot(q[0], a.x, first))));
          second = dot(q[7], b.w, dot(q[6], b.z, dot(q[5], b.y, dot(q[4], b.x, second))));
          total += static_cast<float>(first) * (w[j].scale[0] * d);
          total += static_cast<float>(second) * (w[j].scale[1] * d);
          if constexpr (Format::Scales::kMins) {
            total += w[j].min[0] * (d * static_cast<float>(first_sum));
            total += w[j].min[1] * (d * static_cast<float>(second_sum));
          }
        }
      }
    }
  }
};

}  // namespace

void matvec(const Stream& stream, std::span<const DeviceProduct> products, const MatvecRows& rows,
            const QuantizedRows& x) {
  with_format(products.front().w.dtype, [&]<class Format>() {
    if (rows.experts) {
      launch_experts<Quantized<Format>>(stream, products, rows, x);
    } else {
      launch_matvec<Quantized<Format>>(stream, products, rows, x);
    }
  });
}

}  // namespace h2o::cuda
