// The kernel of gemm(), for one type of weights.
//
// A block computes a tile of y, kRows x kOuts, and iterates over the columns of x and w in stages
// of kDepth. A stage of both is in shared memory as 16-bit rows, double-buffered, so that the next
// stage is loaded while tensor cores multiply the current one:
//
//   x and 16-bit weights:  cp.async, directly into the other buffer.
//   quantized weights:     each thread loads one group of 32 into registers, one stage further
//                          ahead, and unpacks it into the other buffer one stage later.
//
// Warps divide the tile by rows and outputs, and the depth of a stage into shares, which are summed
// at the end in a fixed order: deterministic.
#pragma once

#include "cuda/matmul/expert_rows.cuh"
#include "cuda/matmul/gemm.h"
#include "cuda/matmul/half_values.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {

struct Gemm {
  float* y;           // [n_rows, w.rows]
  const uint16_t* x;  // [n_rows, w.cols]
  const float* bias;  // or nullptr
  Weights w;
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
  static_assert(kShares * kRows * kSumStride * 4 <= kSharedBytes, "sums take the place of stages");
};

// 9 to 64 rows are bound by reading the weights: narrow tiles, for many blocks.
using FewRows = GemmShape<64, 32, 4, 1, 1, 4, 3>;
using ManyRows = GemmShape<128, 128, 2, 4, 2, 1, 2>;

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
// on. load(k) starts loading the stage at column k; store() writes it to a buffer.
template <bool kBf16_>
struct Plain {
  static constexpr bool kBf16 = kBf16_;

  template <class S>
  struct Tile {
    const Weights& w;
    int64_t first;
    int k = 0;

    __device__ void load(int column) { k = column; }
    __device__ void store(std::byte* to) const {
      copy_halves<S, S::kOuts>(shared_address(to), reinterpret_cast<const uint16_t*>(w.data), first,
                               w.rows, w.cols, k);
    }
  };
};

template <class Format>
struct Unpacked {
  static constexpr bool kBf16 = false;

  template <class S>
  struct Tile {
    static constexpr int kGroups = S::kDepth / kGroup;
    const Weights& w;
    int64_t first;
    int group = 0;
    typename Format::Raw raw{};

    static __device__ int own_row() { return threadIdx.x / kGroups; }
    static __device__ int own_group() { return threadIdx.x % kGroups; }

    // Past the end the last row or group is repeated: it is not written to y, or x is zero there.
    __device__ void load(int column) {
      const int n_groups = static_cast<int>(w.cols / kGroup);
      group = min(column / kGroup + own_group(), n_groups - 1);
      raw = Format::load_raw(w.row(min(first + own_row(), w.rows - 1)), n_groups, group);
    }
    __device__ void store(std::byte* to) const {
      const auto unpacked = Format::unpack(raw, group);
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

  // To [kShares, kRows, kSumStride].
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
__device__ inline void write_tile(const Gemm& g, const float* sums, int64_t first_row,
                                  int64_t first_out) {
  for (int i = threadIdx.x; i < S::kRows * S::kOuts; i += S::kThreads) {
    const int64_t row = first_row + i / S::kOuts;
    const int64_t out = first_out + i % S::kOuts;
    if (row >= g.n_rows || out >= g.w.rows) continue;
    float* const y = g.y + row * g.w.rows + out;
    float sum = g.bias != nullptr ? g.bias[out] : 0;
    if (g.add) sum += *y;
#pragma unroll
    for (int share = 0; share < S::kShares; ++share) {
      sum += sums[(share * S::kRows + i / S::kOuts) * S::kSumStride + i % S::kOuts];
    }
    *y = sum;
  }
}

// Computes the tile of y at (first_row, first_out).
template <class S, class Kind>
__device__ __forceinline__ void multiply_tile(const Gemm& g, int64_t first_row, int64_t first_out) {
  std::byte* const shared = dynamic_shared<std::byte>();
  const int n_stages = static_cast<int>((g.w.cols + S::kDepth - 1) / S::kDepth);
  typename Kind::template Tile<S> weights{g.w, first_out};
  const auto x_tile = [&](int stage) { return shared + stage % 2 * S::kStageBytes; };
  const auto w_tile = [&](int stage) { return x_tile(stage) + S::kRows * S::kStride; };
  // Writes a stage to its buffer, and starts loading the weights of the next.
  const auto put = [&](int stage) {
    weights.store(w_tile(stage));
    copy_halves<S, S::kRows>(shared_address(x_tile(stage)), g.x, first_row, g.n_rows, g.w.cols,
                             stage * S::kDepth);
    commit_copies();
    if (stage + 1 < n_stages) weights.load((stage + 1) * S::kDepth);
  };

  weights.load(0);
  wait_for_previous();
  put(0);
  WarpTile<S> own;
  for (int stage = 0; stage < n_stages; ++stage) {
    wait_for_copies<0>();
    __syncthreads();  // this stage has been loaded, and no thread reads the previous one
    if (stage + 1 < n_stages) put(stage + 1);
    own.template multiply<Kind::kBf16>(shared_address(x_tile(stage)), shared_address(w_tile(stage)),
                                       static_cast<int>(g.n_rows - first_row));
  }
  __syncthreads();  // no thread reads the last stage
  auto* const sums = reinterpret_cast<float*>(shared);
  own.store(sums);
  __syncthreads();
  write_tile<S>(g, sums, first_row, first_out);
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
  if (g.n_rows <= FewRows::kRows) {
    launch_tiles<FewRows, Kind>(stream, g);
  } else {
    launch_tiles<ManyRows, Kind>(stream, g);
  }
}

template <class Kind>
void launch_experts_gemm(const Stream& stream, const Gemm& g, const ExpertRows& experts,
                         int begin) {
  using S = FewRows;  // an expert rarely has more
  const dim3 grid(out_tiles<S>(g), n_expert_tiles<S::kRows>(experts, g.n_rows));
  launch(stream, experts_gemm_kernel<S, Kind>, grid, dim3(S::kThreads), S::kSharedBytes, g, experts,
         begin);
}

}  // namespace
}  // namespace h2o::cuda
