// The kernel of products of a few rows with weights. A launch computes several products of the same
// rows; each has blocks of its own, and the same bits as alone.
//
// A warp has kWide rows of weights, or a share of their columns, and all rows of x. A row is
// divided into units, which are what 16 or 32 bytes of weights hold, and chunks of 32 units: a lane
// has a unit. What a lane multiplies later is always being loaded; and the first of it is loaded
// before the kernel ahead has ended, since no kernel writes weights. A sum is over the units of a
// lane, then over lanes, then over the shares, always in that order.
//
// `Type` is a type of weights:
//   kUnit                          elements of a unit
//   kWide<n>, kAhead<n>            for n rows of x: as above, and how many units are being loaded
//   blocks(n), kExpertBlocks       that a multiprocessor holds: what that leaves of its registers
//   Raw load(row, n_units, i)      unit i of a row of weights
//   Unpacked unpack(raw, i, valid)
//   X                              rows of x, X from(first) those from one of them on, and
//   multiply<n, wide>(sums, w, x, n_units, chunk, lane)
//                                  sums[j][r] += w[j] * row r of x, j < wide, r < n
// With a gate, half of a warp's rows of weights are those of the gate: the halves of its lanes end
// up with the two sums of one result.
//
// Where there is no unit, the last one is loaded, but is not valid: it adds nothing. That is
// without a branch, so that what is loaded of x for one unit does not wait for another.
#pragma once

#include <algorithm>
#include <climits>

#include "cuda/gates.cuh"
#include "cuda/matmul/expert_rows.cuh"
#include "cuda/matmul/matvec.h"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {

constexpr int kMatvecWarps = 4;  // in a block: few, so that blocks end, and begin, one by one
constexpr int kMatvecThreads = kMatvecWarps * kWarp;

// Of n values in each lane, the sum over all lanes of value i, in lanes [i, i + 1) * 32 / n.
template <int n, int apart = kWarp / 2>
__device__ inline float sum_each(const float* values) {
  if constexpr (n == 1) {
    return warp_sum<2 * apart>(values[0]);
  } else {
    // Each of two lanes goes on with one half of the values, and gives away the other.
    const bool upper = threadIdx.x & apart;
    float mine[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float given = upper ? values[i] : values[i + n / 2];
      mine[i] = (upper ? values[i + n / 2] : values[i]) + __shfl_xor_sync(kAllLanes, given, apart);
    }
    return sum_each<n / 2, apart / 2>(mine);
  }
}

// What a warp has of a launch: kWide rows of weights, for kOuts columns of y, of which each lane
// loads kAhead units at a time.
template <class Type, int n, bool kGated>
struct WarpShare {
  static constexpr int kAlone = Type::template kWide<n>;  // without a gate
  static constexpr int kWide = kGated ? std::max(kAlone, 2) : kAlone;
  static constexpr int kOuts = kGated ? kWide / 2 : kWide;
  static constexpr int kAhead = Type::template kAhead<n> * kAlone / kWide;
  // That a multiprocessor holds: what that leaves of its registers.
  static constexpr int kBlocks = !kGated  ? Type::blocks(n)
                                 : n == 1 ? Type::blocks(n) - 2
                                 : n == 8 ? 2
                                          : Type::blocks(n);

  // Bytes of weights that it is loading at once: with one row of x memory is the limit, and less
  // would not keep it busy.
  static constexpr size_t kInFlight =
      size_t{kMatvecThreads} * kBlocks * kWide * kAhead * sizeof(typename Type::Raw);
  static_assert(n > 1 || Type::kUnit == 1 || kInFlight >= size_t{32} << 10);
};

// One of the products of a launch.
struct MatvecPart {
  float* y;               // its first row
  const float* bias;      // [rows] or nullptr
  const std::byte* data;  // of the weights
  int64_t rows;           // of the weights, and columns of y
  unsigned first_block;   // of the grid
  int log_shares;         // a row of weights is divided among 2^log_shares warps of a block
};

struct MatvecParts {
  MatvecPart parts[kMostProducts];  // those that are not there begin after the last block
  int64_t cols;
  int64_t row_bytes;
  int n_rows;
  bool add;
  Gate gate;
};

// What the product has that a block belongs to.
__device__ inline MatvecPart part_of(const MatvecParts& m, unsigned block) {
  MatvecPart w = m.parts[0];
#pragma unroll
  for (int i = 1; i < kMostProducts; ++i) {
    if (block >= m.parts[i].first_block) w = m.parts[i];
  }
  return w;
}

// Block `block` of a launch, which has a part of the product w; m.n_rows <= n.
template <class Type, int n, bool kGated>
__device__ __forceinline__ void multiply_part(const MatvecParts& m, const MatvecPart& w,
                                              const typename Type::X& x, unsigned block) {
  using Share = WarpShare<Type, n, kGated>;
  constexpr int kWide = Share::kWide;
  constexpr int kAhead = Share::kAhead;
  constexpr int kSums = kWide * n;
  const int warp = threadIdx.x / kWarp;
  int lane = threadIdx.x % kWarp;
  const int share = warp & ((1 << w.log_shares) - 1);
  const int64_t first_warp = int64_t{block - w.first_block} * kMatvecWarps;
  const int64_t first_row = ((first_warp + warp) >> w.log_shares) * Share::kOuts;
  const std::byte* rows[kWide];
#pragma unroll
  for (int j = 0; j < kWide; ++j) {
    const std::byte* const data = j < Share::kOuts ? w.data : m.parts[1].data;
    rows[j] = data + min(first_row + j % Share::kOuts, w.rows - 1) * m.row_bytes;
    asm volatile("" : "+l"(rows[j]));  // it is not to be computed again for every load
  }

  const int n_units = static_cast<int>(m.cols / Type::kUnit);
  const int n_chunks = (n_units + kWarp - 1) / kWarp;
  const int step = 1 << w.log_shares;
  typename Type::Raw raw[kAhead][kWide];
  const auto load = [&](int a, int chunk) {
    const int i = min((chunk + a * step) * kWarp + lane, n_units - 1);
#pragma unroll
    for (int j = 0; j < kWide; ++j) raw[a][j] = Type::load(rows[j], n_units, i);
  };
  float sums[kSums] = {};
  const auto multiply = [&](int a, int chunk) {
    const int i = (chunk + a * step) * kWarp + lane;
    typename Type::Unpacked unpacked[kWide];
#pragma unroll
    for (int j = 0; j < kWide; ++j) unpacked[j] = Type::unpack(raw[a][j], i, i < n_units);
    Type::template multiply<n, kWide>(sums, unpacked, x, n_units, chunk + a * step, lane);
  };

  int chunk = share;
#pragma unroll
  for (int a = 0; a < kAhead; ++a) load(a, chunk);
  // What this lane is to write: a sum, if it is the first of those that know it.
  constexpr int kLanes = kWarp / kSums;
  const int64_t o = first_row + lane / kLanes / n % Share::kOuts;
  const int r = lane / kLanes % n;
  const bool writes = share == 0 && lane % kLanes == 0 && o < w.rows && r < m.n_rows;
  float* y = writes ? w.y + r * w.rows + o : nullptr;
  const float* const bias = kGated && lane >= kWarp / 2 ? m.parts[1].bias : w.bias;
  float start = writes && bias != nullptr ? bias[o] : 0;
  wait_for_previous();
  if (!kGated && writes && m.add) start += *y;
  // There are too few registers to keep these during the loop.
  __shared__ float* outputs[kMatvecThreads];
  __shared__ float starts[kMatvecThreads];
  outputs[threadIdx.x] = y;
  starts[threadIdx.x] = start;

  for (; chunk + kAhead * step < n_chunks; chunk += kAhead * step) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      multiply(a, chunk);
      load(a, chunk + kAhead * step);
    }
  }
  // Nor to keep the indices of the last loads: they are computed again.
  asm volatile("" : "+r"(lane));
  if constexpr (n == 1) asm volatile("" : "+r"(chunk));
#pragma unroll
  for (int a = 0; a < kAhead; ++a) multiply(a, chunk);

  float sum = sum_each<kSums>(sums);
  const int thread = warp * kWarp + lane;
  y = outputs[thread];
  start = starts[thread];
  if (w.log_shares > 0) {
    starts[threadIdx.x] = sum;  // those of other shares
    __syncthreads();
    if (y != nullptr) {
      for (int s = 1; s < 1 << w.log_shares; ++s) sum += starts[threadIdx.x + s * kWarp];
    }
  }
  sum += start;
  if constexpr (kGated) {
    const float gate = __shfl_xor_sync(kAllLanes, sum, kWarp / 2);
    if (lane < kWarp / 2 && y != nullptr) *y = gated(m.gate, sum, gate);
  } else {
    if (y != nullptr) *y = sum;
  }
}

template <class Type, int n, bool kGated>
__global__ void __launch_bounds__(kMatvecThreads, (WarpShare<Type, n, kGated>::kBlocks))
    matvec_kernel(MatvecParts m, typename Type::X x) {
  let_next_start();
  const MatvecPart w = kGated ? m.parts[0] : part_of(m, blockIdx.x);
  multiply_part<Type, n, kGated>(m, w, x, blockIdx.x);
}

// The same of rows that each are an expert's: a block has one row, from row `first_row` on. What
// experts share lies side by side in the grid, so that their weights are read from memory once.
template <class Type>
__global__ void __launch_bounds__(kMatvecThreads, Type::kExpertBlocks)
    experts_kernel(MatvecParts m, typename Type::X x, ExpertRows experts, int first_row) {
  let_next_start();
  wait_for_previous();
  MatvecPart w = part_of(m, blockIdx.y);
  const int64_t e = expert_of(experts, first_row + static_cast<int>(blockIdx.x));
  w.data += e * w.rows * m.row_bytes;
  if (w.bias != nullptr) w.bias += e * w.rows;
  w.y += blockIdx.x * w.rows;
  multiply_part<Type, 1, false>(m, w, x.from(blockIdx.x), blockIdx.y);
}

// A quarter of the warps that a device can hold keep its memory busy: with fewer rows than that
// they share, as long as each has its units to load ahead. With a gate as many as without, for the
// same bits.
template <class Type, int n>
int log_shares(const Stream& stream, const Weights& w) {
  constexpr int kWide = Type::template kWide<n>;
  constexpr int64_t kUnits = Type::template kAhead<n> * kWarp;
  const int64_t enough = int64_t{stream.n_multiprocessors()} * 16;
  const int64_t n_warps = (w.rows + kWide - 1) / kWide;
  int log = 0;
  while (1 << log < kMatvecWarps && n_warps << log < enough &&
         w.cols / Type::kUnit > kUnits << log) {
    ++log;
  }
  return log;
}

// The products as parts of a launch of n_blocks blocks.
template <class Type, bool kGated, int n>
MatvecParts parts_of(const Stream& stream, std::span<const Matvec> products, const MatvecRows& rows,
                     unsigned* n_blocks) {
  constexpr int kOuts = WarpShare<Type, n, kGated>::kOuts;
  const Weights& first = products.front().w;
  MatvecParts m{{}, first.cols, first.row_bytes, static_cast<int>(rows.n), rows.add, {}};
  for (MatvecPart& part : m.parts) part.first_block = UINT_MAX;
  *n_blocks = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    const auto& [y, bias, w] = products[i];
    const int log = log_shares<Type, n>(stream, w);
    m.parts[i] = {y + rows.begin * w.rows, bias, w.data, w.rows, *n_blocks, log};
    if (kGated && i > 0) break;  // in the blocks of the first
    const int64_t of_block = int64_t{kOuts} * (kMatvecWarps >> log);
    *n_blocks += static_cast<unsigned>((w.rows + of_block - 1) / of_block);
  }
  if constexpr (kGated) m.gate = *rows.gate;
  return m;
}

template <class Type, bool kGated, int n>
void launch_matvec(const Stream& stream, std::span<const Matvec> products, const MatvecRows& rows,
                   const typename Type::X& x) {
  unsigned n_blocks = 0;
  const MatvecParts m = parts_of<Type, kGated, n>(stream, products, rows, &n_blocks);
  launch(stream, matvec_kernel<Type, n, kGated>, n_blocks, kMatvecThreads, 0, m, x);
}

template <class Type, bool kGated = false>
void launch_matvec(const Stream& stream, std::span<const Matvec> products, const MatvecRows& rows,
                   const typename Type::X& x) {
  if (rows.n <= 1) {
    launch_matvec<Type, kGated, 1>(stream, products, rows, x);
  } else if (rows.n <= 2) {
    launch_matvec<Type, kGated, 2>(stream, products, rows, x);
  } else if (rows.n <= 4) {
    launch_matvec<Type, kGated, 4>(stream, products, rows, x);
  } else {
    launch_matvec<Type, kGated, 8>(stream, products, rows, x);
  }
}

template <class Type>
void launch_experts(const Stream& stream, std::span<const Matvec> products, const MatvecRows& rows,
                    const typename Type::X& x) {
  unsigned n_blocks = 0;
  const MatvecParts m = parts_of<Type, false, 1>(stream, products, rows, &n_blocks);
  const dim3 grid(static_cast<unsigned>(rows.n), n_blocks);
  launch(stream, experts_kernel<Type>, grid, dim3(kMatvecThreads), 0, m, x, *rows.experts,
         static_cast<int>(rows.begin));
}

}  // namespace h2o::cuda
