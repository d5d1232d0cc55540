// The kernel of gemm(), for one type of weights.
//
// A block computes a tile of y, kRows x kOuts, and iterates over the columns of x and w in stages
// of kDepth. A stage of both is in shared memory as 16-bit rows, double-buffered, so that the next
// stage is loaded while tensor cores multiply the current one:
//
//   x and 16-bit weights:  cp.async, directly into the other buffer.
//   quantized weights:     each thread loads one group of 32 of a stage into registers, up to
//                          three stages further ahead, and unpacks it into the other buffer.
//
// Warps divide the tile by rows and outputs, and the depth of a stage into shares, which are summed
// at the end in a fixed order: deterministic.
#pragma once

#include "cuda/matmul/expert_rows.cuh"
#include "cuda/matmul/gemm.h"
#include "cuda/matmul/half_values.cuh"
#include "cuda/runtime/in_flight.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {

struct Gemm : DeviceProduct {
  const uint16_t* x;  // [n_rows, w.cols]
  int n_rows;
  bool add;
};

namespace {

template <int kRows_, int kOuts_, int kGroups, int kRowWarps_, int kOutWarps_, int kShares_,
          int kBlocks_>
struct GemmShape {
  static constexpr int kRows = kRows_, kOuts = kOuts_, kDepth = kGroups * kGroup;
  static constexpr int kRowWarps = kRowWarps_, kOutWarps = kOutWarps_, kShares = kShares_;
  static constexpr int kThreads = kRowWarps * kOutWarps * kShares * kWarp;
  static constexpr int kBlocks = kBlocks_;                // per SM, limited by registers
  static constexpr int kStrips = kRows / kRowWarps / 16;  // of 16 rows per warp
  static constexpr int kPairs = kOuts / kOutWarps / 16;   // of twice 8 outputs per warp
  static constexpr int kOwnDepth = kDepth / kShares;      // per warp
  // eight consecutive rows start in different banks
  static constexpr int kStride = kDepth * 2 + 16;
  static constexpr int kStageBytes = (kRows + kOuts) * kStride;
  static constexpr int kSumStride = kOuts + 1;  // floats
  static constexpr int kSharedBytes = 2 * kStageBytes;
  static_assert(kThreads == kOuts * kGroups, "a thread unpacks a group of a stage");
  static_assert(kThreads % kOuts == 0, "all sums that a thread writes are of one output");
  static_assert(kShares * kRows * kSumStride * 4 <= kSharedBytes, "sums take the place of stages");
};

// Up to 64 rows are bound by reading the weights, and x once per block: the fewer rows, the
// narrower the tiles, for more blocks. More rows are bound by tensor cores.
using Rows16 = GemmShape<16, 32, 8, 1, 1, 8, 2>;
using Rows64 = GemmShape<64, 64, 4, 2, 2, 2, 2>;
using ManyRows = GemmShape<128, 128, 2, 4, 2, 1, 2>;

template <class S>
constexpr bool kBoundByWeights = S::kRows <= 64;

// Copies columns [k, k + kDepth) of rows [first, first + kCount) of `rows` [n, n_cols], 16 bits, to
// shared memory; zeros past the end.
template <class S, int kCount>
__device__ inline void copy_halves(uint32_t to, const uint16_t* rows, int64_t first, int64_t n,
                                   int64_t n_cols, int k) {
  constexpr int kPerRow = S::kDepth / 8;  // 16-byte pieces
  static_assert(kCount * kPerRow % S::kThreads == 0);
#pragma unroll 2
  for (int i = 0; i < kCount * kPerRow / S::kThreads; ++i) {
    const int piece = threadIdx.x + i * S::kThreads;
    const int64_t row = first + piece / kPerRow;
    const int column = k + piece % kPerRow * 8;
    const bool exists = row < n && column < n_cols;
    copy_16_async(to + piece / kPerRow * S::kStride + piece % kPerRow * 16,
                  exists ? rows + row * n_cols + column : rows, exists);
  }
}

// How weights are loaded into shared memory: the block's Tile has kOuts rows of them, from `first`
// on. load(i, stage) starts loading a stage, the i-th of kAhead; store(i, stage, to) writes it to a
// buffer.
template <bool kBf16_>
struct Plain {
  static constexpr bool kBf16 = kBf16_;

  template <class S>
  struct Tile {
    static constexpr int kAhead = 1;
    static_assert(!kBoundByWeights<S> ||
                  latency_hidden(size_t{S::kBlocks} * S::kOuts * S::kDepth * 2, 0) >= 90);
    const Weights& w;
    int64_t first;

    __device__ void load(int, int) {}
    __device__ void store(int, int stage, std::byte* to) const {
      copy_halves<S, S::kOuts>(shared_address(to), reinterpret_cast<const uint16_t*>(w.data), first,
                               w.rows, w.cols, stage * S::kDepth);
    }
  };
};

// The latency hidden with `n_ahead` groups per thread in registers, see in_flight.cuh. An element
// takes at least four operations: to extract, to convert, to scale and to round it.
template <class S, class Format>
constexpr size_t unpacking_hides(int n_ahead) {
  const size_t n_groups = size_t{S::kBlocks} * S::kThreads * n_ahead;
  return latency_hidden(n_groups * Format::kBytesOf8 / 8, n_groups * kGroup * 4);
}

template <class Format>
struct Unpacked {
  static constexpr bool kBf16 = false;

  template <class S>
  struct Tile {
    static constexpr int kAhead = !kBoundByWeights<S>                   ? 1
                                  : unpacking_hides<S, Format>(2) >= 90 ? 2
                                                                        : 3;
    static_assert(!kBoundByWeights<S> || unpacking_hides<S, Format>(kAhead) >= 90);
    static constexpr int kGroups = S::kDepth / kGroup;
    const Weights& w;
    int64_t first;
    typename Format::Raw raw[kAhead]{};

    static __device__ int own_row() { return threadIdx.x / kGroups; }
    static __device__ int own_group() { return threadIdx.x % kGroups; }

    __device__ int n_groups() const { return static_cast<int>(w.cols / kGroup); }
    __device__ int group(int stage) const {
      return min(stage * kGroups + own_group(), n_groups() - 1);
    }

    // Past the end the last row or group is repeated: it is not written to y, or x is zero there.
    __device__ void load(int i, int stage) {
      raw[i] =
          Format::load_raw(w.row(min(first + own_row(), w.rows - 1)), n_groups(), group(stage));
    }
    __device__ void store(int i, int stage, std::byte* to) const {
      const auto unpacked = Format::unpack(raw[i], group(stage));
      auto* out = reinterpret_cast<uint4*>(to + own_row() * S::kStride + own_group() * kGroup * 2);
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = half_values<Format>(unpacked, j);
    }
  };
};

// A warp's part of the tile: rows from `row`, outputs from `out`, and columns from `depth` of each
// stage. `sums` of strip s and outputs 8 j have the layout of multiply_add().
template <class S>
struct WarpTile {
  int row, out, depth, share;
  float sums[S::kStrips][S::kPairs * 2][4] = {};

  __device__ WarpTile() {
    const int warp = threadIdx.x / kWarp;
    row = warp % S::kRowWarps * S::kStrips * 16;
    out = warp / S::kRowWarps % S::kOutWarps * S::kPairs * 16;
    share = warp / (S::kRowWarps * S::kOutWarps);
    depth = share * S::kOwnDepth;
  }

  // Skips strips from row n_rows on.
  template <bool kBf16>
  __device__ void multiply(uint32_t x_tile, uint32_t w_tile, int n_rows) {
    const int lane = threadIdx.x % kWarp;
    const uint32_t x = x_tile + (row + lane % 16) * S::kStride + depth * 2 + lane / 16 * 16;
    const uint32_t w =
        w_tile + (out + lane % 8 + lane / 16 * 8) * S::kStride + depth * 2 + lane / 8 % 2 * 16;
#pragma unroll
    for (int k = 0; k < S::kOwnDepth; k += 16) {
      uint32_t b[S::kPairs][4];
#pragma unroll
      for (int j = 0; j < S::kPairs; ++j) load_matrices(b[j], w + j * 16 * S::kStride + k * 2);
#pragma unroll
      for (int s = 0; s < S::kStrips; ++s) {
        if (row + s * 16 >= n_rows) break;
        uint32_t a[4];
        load_matrices(a, x + s * 16 * S::kStride + k * 2);
#pragma unroll
        for (int j = 0; j < S::kPairs; ++j) {
          multiply_add<kBf16>(sums[s][2 * j], a, b[j][0], b[j][1]);
          multiply_add<kBf16>(sums[s][2 * j + 1], a, b[j][2], b[j][3]);
        }
      }
    }
  }

  // Stores to [kShares, kRows, kSumStride].
  __device__ void store(float* to) const {
    const int lane = threadIdx.x % kWarp;
    to += (share * S::kRows + row + lane / 4) * S::kSumStride + out + lane % 4 * 2;
#pragma unroll
    for (int s = 0; s < S::kStrips; ++s) {
#pragma unroll
      for (int j = 0; j < S::kPairs * 2; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          to[(s * 16 + i / 2 * 8) * S::kSumStride + j * 8 + i % 2] = sums[s][j][i];
        }
      }
    }
  }
};

// Sums the shares, and writes the part of the tile that is inside y.
template <class S>
__device__ inline void write_tile(const Gemm& g, const float* sums, float bias, int64_t first_row,
                                  int64_t first_out) {
  const int own = threadIdx.x % S::kOuts;
  const int64_t out = first_out + own;
  if (out >= g.w.rows) return;
  const auto n_rows = static_cast<int>(min(g.n_rows - first_row, int64_t{S::kRows}));
  for (int row = threadIdx.x / S::kOuts; row < n_rows; row += S::kThreads / S::kOuts) {
    float* const y = g.y + (first_row + row) * g.w.rows + out;
    float sum = bias;
    if (g.add) sum += *y;
#pragma unroll
    for (int share = 0; share < S::kShares; ++share) {
      sum += sums[(share * S::kRows + row) * S::kSumStride + own];
    }
    *y = sum;
  }
}

// Computes the tile of y at (first_row, first_out).
template <class S, class Kind>
__device__ __forceinline__ void multiply_tile(const Gemm& g, int64_t first_row, int64_t first_out) {
  using Tile = typename Kind::template Tile<S>;
  constexpr int kAhead = Tile::kAhead;
  std::byte* const shared = dynamic_shared<std::byte>();
  const int n_stages = static_cast<int>((g.w.cols + S::kDepth - 1) / S::kDepth);
  const auto x_tile = [&](int stage) { return shared + stage % 2 * S::kStageBytes; };
  const auto w_tile = [&](int stage) { return x_tile(stage) + S::kRows * S::kStride; };
  const auto copy_x = [&](int stage) {
    copy_halves<S, S::kRows>(shared_address(x_tile(stage)), g.x, first_row, g.n_rows, g.w.cols,
                             stage * S::kDepth);
    commit_copies();
  };

  Tile weights{g.w, first_out};
#pragma unroll
  for (int i = 0; i < kAhead; ++i) weights.load(i, i);
  const int64_t own_out = min(first_out + threadIdx.x % S::kOuts, g.w.rows - 1);
  const float bias = g.bias != nullptr ? g.bias[own_out] : 0;
  weights.store(0, 0, w_tile(0));
  weights.load(0, kAhead);
  wait_for_previous();
  copy_x(0);
  WarpTile<S> own;
  for (int first = 0; first < n_stages; first += kAhead) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {  // unrolled: weights.raw[i] is in registers
      const int stage = first + i;
      if (stage >= n_stages) break;
      wait_for_copies<0>();
      __syncthreads();  // this stage has been loaded, and no thread reads the previous one
      if (const int next = stage + 1; next < n_stages) {
        weights.store((i + 1) % kAhead, next, w_tile(next));
        copy_x(next);
        weights.load((i + 1) % kAhead, next + kAhead);
      }
      own.template multiply<Kind::kBf16>(shared_address(x_tile(stage)),
                                         shared_address(w_tile(stage)),
                                         static_cast<int>(g.n_rows - first_row));
    }
  }
  __syncthreads();  // no thread reads the last stage
  auto* const sums = reinterpret_cast<float*>(shared);
  own.store(sums);
  __syncthreads();
  write_tile<S>(g, sums, bias, first_row, first_out);
}

template <class S, class Kind>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks) gemm_kernel(Gemm g) {
  let_next_start();
  multiply_tile<S, Kind>(g, int64_t{blockIdx.y} * S::kRows, int64_t{blockIdx.x} * S::kOuts);
}

// For rows grouped by expert: rows of x correspond to rows of y from `begin` on.
template <class S, class Kind>
__global__ void __launch_bounds__(S::kThreads, S::kBlocks)
    experts_gemm_kernel(Gemm g, ExpertRows experts, int begin) {
  let_next_start();
  wait_for_previous();
  const auto [expert, first, n] =
      expert_tile<S::kRows>(experts, begin, g.n_rows, static_cast<int>(blockIdx.y));
  if (n == 0) return;
  g.w.data += expert * g.w.rows * g.w.row_bytes;
  if (g.bias != nullptr) g.bias += expert * g.w.rows;
  g.y += first * g.w.rows;
  g.x += (first - begin) * g.w.cols;
  g.n_rows = n;
  multiply_tile<S, Kind>(g, 0, int64_t{blockIdx.x} * S::kOuts);
}

template <class S>
unsigned out_tiles(const Gemm& g) {
  return static_cast<unsigned>((g.w.rows + S::kOuts - 1) / S::kOuts);
}

template <class S, class Kind>
void launch_tiles(const Stream& stream, const Gemm& g) {
  const dim3 grid(out_tiles<S>(g), static_cast<unsigned>((g.n_rows + S::kRows - 1) / S::kRows));
  launch(stream, gemm_kernel<S, Kind>, grid, dim3(S::kThreads), S::kSharedBytes, g);
}

template <class Kind>
void launch_gemm(const Stream& stream, const Gemm& g) {
  if (g.n_rows <= Rows16::kRows) {
    launch_tiles<Rows16, Kind>(stream, g);
  } else if (g.n_rows <= Rows64::kRows) {
    launch_tiles<Rows64, Kind>(stream, g);
  } else {
    launch_tiles<ManyRows, Kind>(stream, g);
  }
}

template <class Kind>
void launch_experts_gemm(const Stream& stream, const Gemm& g, const ExpertRows& experts,
                         int begin) {
  using S = Rows64;  // an expert rarely has more
  const dim3 grid(out_tiles<S>(g), n_expert_tiles<S::kRows>(experts, g.n_rows));
  launch(stream, experts_gemm_kernel<S, Kind>, grid, dim3(S::kThreads), S::kSharedBytes, g, experts,
         begin);
}

}  // namespace
// gemm() and gemm_experts() for quantized weights, in a separate file for parallel compilation.
void gemm_quantized(const Stream& stream, const Gemm& g);
void gemm_quantized_experts(const Stream& stream, const Gemm& g, const ExpertRows& experts,
                            int begin);

}  // namespace h2o::cuda
