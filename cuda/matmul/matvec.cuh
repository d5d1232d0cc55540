// The kernel for products of a few rows with weights. A launch computes several products of the
// same rows; each has its own blocks, and is bit-identical to computing it alone.
//
// A warp has kWide rows of weights, or a share of their columns, and all rows of x. A row is
// divided into units of 16 or 32 bytes of weights, and chunks of 32 units, one per lane. Loads are
// always in flight ahead of the multiplications; the first are issued before the preceding kernel
// has ended, since no kernel writes weights. A sum is taken over the units of a lane, then over
// lanes, then over the shares, always in that order.
//
// `Type` is a type of weights:
//   kUnit                          elements per unit
//   kWide<n>, kAhead<n>            for n rows of x: see above, and the number of units in flight
//   blocks(n), kExpertBlocks       per multiprocessor: determines the registers available
//   kBytesOf8, operations(n)       bytes of eight units, and what multiply() executes for one
//   Raw load<n>(row, n_units, i)   unit i of a row of weights
//   Unpacked unpack(raw, i, valid)
//   X                              rows of x; X from(first): those from row `first` on
//   multiply<n, wide>(sums, w, x, n_units, chunk, lane)
//                                  sums[j][r] += w[j] * row r of x, j < wide, r < n
// With a gate, half of a warp's rows of weights are those of the gate: the two halves of its lanes
// end up with the two sums of one result.
//
// Past the end the last unit is loaded, but marked invalid so that it adds nothing. This avoids a
// branch, which would make loads of x for one unit wait for another.
#pragma once

#include <algorithm>

#include "cuda/gates.cuh"
#include "cuda/matmul/expert_rows.cuh"
#include "cuda/matmul/parts.cuh"
#include "cuda/runtime/in_flight.cuh"
#include "cuda/runtime/launch.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {

constexpr int kMatvecWarps = 4;  // per block: few, so that blocks start and end at different times
constexpr int kMatvecThreads = kMatvecWarps * kWarp;

// The sum over all lanes of each of n values per lane; lanes [i, i + 1) * 32 / n get value i.
template <int n, int apart = kWarp / 2>
__device__ inline float sum_each(const float* values) {
  if constexpr (n == 1) {
    return warp_sum<2 * apart>(values[0]);
  } else {
    // Each lane of a pair keeps one half of the values and passes the other to its partner.
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

// A warp's part of a launch: kWide rows of weights, for kOuts columns of y, of which each lane
// loads kAhead units at a time.
template <class Type, int n, bool kGated>
struct WarpShare {
  static constexpr int kAlone = Type::template kWide<n>;  // without a gate
  static constexpr int kWide = kGated ? std::max(kAlone, 2) : kAlone;
  static constexpr int kOuts = kGated ? kWide / 2 : kWide;
  static constexpr int kAhead = Type::template kAhead<n> * kAlone / kWide;
  // Blocks per multiprocessor: determines the registers available.
  static constexpr int kBlocks = !kGated  ? Type::blocks(n)
                                 : n == 1 ? Type::blocks(n) - 2
                                 : n == 8 ? 2
                                          : Type::blocks(n);

  // Units per multiprocessor.
  static constexpr size_t kUnitsInFlight = size_t{kMatvecThreads} * kBlocks * kWide * kAhead;
};

// Whether kernels for each number of rows are worth their compilation.
template <class Type>
constexpr bool is_fast = Type::kUnit > 1;

// True for so many units in flight, of products of n rows.
template <class Type>
constexpr bool hides_latency(size_t n_units, int n) {
  if constexpr (is_fast<Type>) {
    return latency_hidden(n_units * Type::kBytesOf8 / 8, n_units * Type::operations(n)) >= 90;
  } else {
    return true;
  }
}

struct MatvecPart : Part {
  int log_shares;  // a row of weights is divided among 2^log_shares warps of a block
};

struct MatvecParts {
  MatvecPart parts[kMaxProducts];
  int64_t cols;
  int64_t row_bytes;
  int n_rows;
  bool add;
  Gate gate;
};

// Computes block `block` of a launch, for a part with product w; m.n_rows <= n.
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
    asm volatile("" : "+l"(rows[j]));  // prevents recomputation for every load
  }

  const int n_units = static_cast<int>(m.cols / Type::kUnit);
  const int n_chunks = (n_units + kWarp - 1) / kWarp;
  const int step = 1 << w.log_shares;
  typename Type::Raw raw[kAhead][kWide];
  const auto load = [&](int a, int chunk) {
    const int i = min((chunk + a * step) * kWarp + lane, n_units - 1);
#pragma unroll
    for (int j = 0; j < kWide; ++j) raw[a][j] = Type::template load<n>(rows[j], n_units, i);
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
  // This lane writes a sum, if it is the first of the lanes that have it.
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
  // Makes the compiler compute the indices of the last loads again, rather than keep them.
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
  const MatvecPart w = kGated ? m.parts[0] : part_of(m.parts, blockIdx.x);
  multiply_part<Type, n, kGated>(m, w, x, blockIdx.x);
}

// The same for rows grouped by expert: one row per block, from row `first_row` on. Blocks that
// share an expert are adjacent in the grid, so that its weights are read from memory once.
template <class Type>
__global__ void __launch_bounds__(kMatvecThreads, Type::kExpertBlocks)
    experts_kernel(MatvecParts m, typename Type::X x, ExpertRows experts, int first_row) {
  let_next_start();
  wait_for_previous();
  MatvecPart w = part_of(m.parts, blockIdx.y);
  const int64_t e = expert_of(experts, first_row + static_cast<int>(blockIdx.x));
  w.data += e * w.rows * m.row_bytes;
  if (w.bias != nullptr) w.bias += e * w.rows;
  w.y += blockIdx.x * w.rows;
  multiply_part<Type, 1, false>(m, w, x.from(blockIdx.x), blockIdx.y);
}

// A quarter of the warps that fit on a device saturate its memory: with fewer rows than that, warps
// share rows, as long as each has units to load ahead. The same number with a gate as without, so
// that results are bit-identical.
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
MatvecParts parts_of(const Stream& stream, std::span<const DeviceProduct> products,
                     const MatvecRows& rows, unsigned* n_blocks) {
  constexpr int kOuts = WarpShare<Type, n, kGated>::kOuts;
  const Weights& first = products.front().w;
  MatvecParts m{{}, first.cols, first.row_bytes, static_cast<int>(rows.n), rows.add, {}};
  *n_blocks = 0;
  for (size_t i = 0; i < products.size(); ++i) {
    const auto& [y, bias, w] = products[i];
    const int log = rows.alone ? log_shares<Type, 1>(stream, w) : log_shares<Type, n>(stream, w);
    m.parts[i] = {{y + rows.begin * w.rows, bias, w.data, w.rows, *n_blocks}, log};
    if (kGated && i > 0) break;  // shares the blocks of the first
    const int64_t of_block = int64_t{kOuts} * (kMatvecWarps >> log);
    *n_blocks += static_cast<unsigned>((w.rows + of_block - 1) / of_block);
  }
  if constexpr (kGated) m.gate = *rows.gate;
  return m;
}

template <class Type, bool kGated, int n>
void launch_matvec(const Stream& stream, std::span<const DeviceProduct> products,
                   const MatvecRows& rows, const typename Type::X& x) {
  static_assert(hides_latency<Type>(WarpShare<Type, n, kGated>::kUnitsInFlight, n));
  unsigned n_blocks = 0;
  const MatvecParts m = parts_of<Type, kGated, n>(stream, products, rows, &n_blocks);
  launch(stream, matvec_kernel<Type, n, kGated>, n_blocks, kMatvecThreads, 0, m, x);
}

template <class Type, bool kGated = false>
void launch_matvec(const Stream& stream, std::span<const DeviceProduct> products,
                   const MatvecRows& rows, const typename Type::X& x) {
  if constexpr (!is_fast<Type>) {
    launch_matvec<Type, kGated, 8>(stream, products, rows, x);
  } else if (rows.n <= 1) {
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
void launch_experts(const Stream& stream, std::span<const DeviceProduct> products,
                    const MatvecRows& rows, const typename Type::X& x) {
  using Share = WarpShare<Type, 1, false>;
  static_assert(
      hides_latency<Type>(Share::kUnitsInFlight / Share::kBlocks * Type::kExpertBlocks, 1));
  unsigned n_blocks = 0;
  const MatvecParts m = parts_of<Type, false, 1>(stream, products, rows, &n_blocks);
  const dim3 grid(static_cast<unsigned>(rows.n), n_blocks);
  launch(stream, experts_kernel<Type>, grid, dim3(kMatvecThreads), 0, m, x, *rows.experts,
         static_cast<int>(rows.begin));
}

}  // namespace h2o::cuda
