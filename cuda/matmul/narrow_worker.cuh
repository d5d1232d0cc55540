// How gemm_narrow() divides the work, and a warp's part of it.
//
// A block computes a tile of y, kRows x kOuts. Its warps take turns along the columns of x and w,
// kGroups groups of 32 each time. A warp copies its groups to its own part of shared memory,
// weights as they are stored, a few turns ahead, and waits for no other warp until their sums are
// added at the end, in a fixed order: deterministic.
//
// Lane l of a warp unpacks elements 4 (l % 4) to 4 (l % 4) + 3 of each half of a group, of rows
// l / 4, l / 4 + 8, ...: its part of the operands of tensor cores, whose columns may be in any
// order, if it is the same for x.
#pragma once

#include "cuda/matmul/formats.cuh"
#include "cuda/matmul/gemm_narrow.h"
#include "cuda/matmul/half_scales.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {
namespace {

constexpr int kRows = kNarrowTile, kOuts = 32;  // of a tile
constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kGroups = 2;  // of a turn
constexpr int kPiece = 16;  // bytes
constexpr int kRowTiles = kRows / 8, kOutTiles = kOuts / 16;
constexpr int kXBytes = kGroups * kGroup * 2;  // of a row of x
constexpr int kXPieces = kXBytes / kPiece;
constexpr int kSumStride = kOuts + 1;                              // without bank conflicts
constexpr int kWarpBytes = 113 * 1024 / kWarps / kPiece * kPiece;  // two blocks per multiprocessor
constexpr int kLeastWarpBytes = 99 * 1024 / kWarps / kPiece * kPiece;  // that every device has
constexpr int kMostStages = 4;
static_assert(kMostStages <= 4, "wait_for_turns() knows no more");
static_assert(kOuts == kWarp, "each lane copies parts of one row");
static_assert(kRows * kSumStride * 4 <= kLeastWarpBytes, "sums take the place of stages");

// One of the products of a launch.
struct NarrowPart {
  float* y;               // [n_rows, rows]
  const float* bias;      // or nullptr
  const std::byte* data;  // weights
  int64_t rows;           // of the weights
  unsigned first_block;   // of the grid
};

struct NarrowGemm {
  NarrowPart parts[kMaxProducts];  // unused ones start after the last block
  const uint16_t* x;               // [n_rows, cols]
  int64_t cols;
  int64_t row_bytes;
  int n_rows;
  int warp_bytes;  // of shared memory
  bool add;

  __device__ NarrowPart part_of(unsigned block) const {
    NarrowPart part = parts[0];
#pragma unroll
    for (int i = 1; i < kMaxProducts; ++i) {
      if (block >= parts[i].first_block) part = parts[i];
    }
    return part;
  }
};

// Where a row of weights has kGroups times 16 bytes. The pieces of eight rows are in different
// banks.
__device__ inline int piece_at(int row, int g) {
  static_assert(kGroups == 2);
  return (row * kGroups + (g ^ (row >> 2 & 1))) * kPiece;
}

// Where a row of x has 32 bytes, half a group. Those of four rows are in different banks.
__device__ inline int half_group_at(int row, int i) {
  static_assert(kXBytes == 4 * 32);
  return row * kXBytes + (i ^ (row & 3)) * 32;
}

// A warp's part of shared memory for one turn: offsets of arrays with kOuts rows, then of x.
template <class Format>
struct Stage {
  using Scales = typename Format::Scales;
  static constexpr int kPlanes = Format::kWide / kPiece;  // 16 bytes of each group
  static constexpr int kGroupWords = (Scales::kGroupBytes * kGroups + 3) / 4;
  static constexpr int kBlockWords = (Scales::kBlockBytes + 3) / 4;

  static constexpr int kPlaneBytes = kOuts * kGroups * kPiece;
  static constexpr int kTwo = kPlanes * kPlaneBytes;
  static constexpr int kOne = kTwo + kOuts * kGroups * Format::kTwo;
  static constexpr int kOfGroup = kOne + kOuts * kGroups * Format::kOne;
  static constexpr int kOfBlock = kOfGroup + kOuts * kGroupWords * 4;
  static constexpr int kX = kOfBlock + kOuts * kBlockWords * 4;
  static_assert(kX % kPiece == 0);
  static_assert(2 * (kX + kRows * kXBytes) <= kLeastWarpBytes, "at least two stages");
};

// One warp's work. copy_weights() and copy_x() copy the next turn, multiply() multiplies the next
// one that has been copied.
template <class Format>
class Worker {
 public:
  using At = Stage<Format>;
  using Scales = typename Format::Scales;

  __device__ Worker(const NarrowGemm& g, const NarrowPart& part, int first_row, int64_t first_out,
                    std::byte* shared)
      : n_tiles_((min(kRows, g.n_rows - first_row) + 7) / 8),
        n_groups_(static_cast<int>(g.cols / kGroup)),
        stage_bytes_(At::kX + n_tiles_ * 8 * kXBytes),
        n_stages_(min(g.warp_bytes / stage_bytes_, kMostStages)),
        own_(shared + threadIdx.x / kWarp * g.warp_bytes),
        weights_to_(own_),
        x_to_(own_),
        from_(own_),
        group_(threadIdx.x / kWarp * kGroups),
        copied_(group_),
        row_(part.data + min(first_out + lane(), part.rows - 1) * g.row_bytes),
        x_(g.x + int64_t{first_row + lane() / kXPieces} * g.cols + group_ * kGroup +
           lane() % kXPieces * 8),
        x_stride_(g.cols * (kWarp / kXPieces)) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int64_t row = min(first_out + copied_row(i), part.rows - 1);
      rows_[i] = part.data + row * g.row_bytes + copied_piece() * kPiece;
    }
  }

  __device__ int n_stages() const { return n_stages_; }
  __device__ int n_turns() const { return (n_groups_ + kTurn - 1) / kTurn; }

  // If the number of groups is odd, the last one's neighbor is other data of the row.
  __device__ void copy_weights() {
    if (copied_ < n_groups_) {
      const typename Format::Places at(n_groups_, copied_);
#pragma unroll
      for (int p = 0; p < At::kPlanes; ++p) {
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          const int to = p * At::kPlaneBytes + piece_at(copied_row(i), copied_piece());
          copy_16_async(shared_address(weights_to_ + to), rows_[i] + at.wide + p * at.wide_step,
                        true);
        }
      }
      const int row = lane();
      if constexpr (Format::kTwo > 0) {
        copy_16_async(shared_address(weights_to_ + At::kTwo + row * kPiece), row_ + at.two, true);
      }
      if constexpr (Format::kOne > 0) copy_words<2>(At::kOne, row_ + at.one);
      copy_words<At::kGroupWords>(At::kOfGroup, row_ + at.of_group);
      copy_words<At::kBlockWords>(At::kOfBlock, row_ + at.of_block / 4 * 4);
    }
    copied_ += kTurn;
    weights_to_ = after(weights_to_);
  }

  // Rows past the end are memory that can be read, and do not affect others.
  __device__ void copy_x() {
    const int piece = lane() % kXPieces;
    // The same place of every row that a lane copies: kWarp / kXPieces rows later.
    std::byte* const to =
        x_to_ + At::kX + half_group_at(lane() / kXPieces, piece / 2) + piece % 2 * kPiece;
    const uint16_t* from = x_;
    static_assert(kWarp / kXPieces == 4, "half_group_at() repeats after four rows");
#pragma unroll
    for (int i = 0; i < kRows / 4; ++i) {
      if (i >= n_tiles_ * 2) break;
      copy_16_async(shared_address(to + i * 4 * kXBytes), from, true);
      from += x_stride_;
    }
    x_ += kTurn * kGroup;
    x_to_ = after(x_to_);
  }

  __device__ void multiply() {
    if (group_ < n_groups_) {
      RawScales raw[kParts];
#pragma unroll
      for (int p = 0; p < kParts; ++p) raw[p] = scales_of(p * 8 + lane() / 4);
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
        if (group_ + i < n_groups_) multiply(raw, i);
      }
    }
    group_ += kTurn;
    from_ = after(from_);
  }

  // Stores to [kRows, kSumStride].
  __device__ void store(float* to) const {
#pragma unroll
    for (int m = 0; m < kOutTiles; ++m) {
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = t * 8 + lane() % 4 * 2 + i % 2;
          to[row * kSumStride + m * 16 + lane() / 4 + i / 2 * 8] = sums_[m][t][i];
        }
      }
    }
  }

 private:
  static constexpr int kTurn = kWarps * kGroups;  // groups, of all warps
  static constexpr int kParts = kOutTiles * 2;    // of eight outputs

  // Scales of the groups of a turn and a row.
  struct RawScales {
    uint32_t of_groups[At::kGroupWords + 1];
    uint32_t of_block[At::kBlockWords + 1];
  };

  static __device__ int lane() { return threadIdx.x % kWarp; }

  // kGroups lanes copy adjacent pieces of a row.
  static __device__ int copied_row(int i) { return lane() / kGroups + i * (kWarp / kGroups); }
  static __device__ int copied_piece() { return lane() % kGroups; }

  __device__ std::byte* after(std::byte* stage) const {
    stage += stage_bytes_;
    return stage < own_ + n_stages_ * stage_bytes_ ? stage : own_;
  }

  // n words of each row.
  template <int n>
  __device__ void copy_words(int to, const std::byte* from) const {
    std::byte* const row = weights_to_ + to + lane() * n * 4;
    if constexpr (n == 4) {
      copy_16_async(shared_address(row), from, true);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) copy_4_async(shared_address(row + i * 4), from + i * 4, true);
    }
  }

  __device__ RawScales scales_of(int row) const {
    RawScales raw{};
    const auto read = [&](uint32_t* to, int at, int n) {
      const auto* from = reinterpret_cast<const uint32_t*>(from_ + at) + row * n;
      if (n == 4) {
        const auto four = *reinterpret_cast<const uint4*>(from);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
        return;
      }
#pragma unroll
      for (int i = 0; i < n; ++i) to[i] = from[i];
    };
    read(raw.of_groups, At::kOfGroup, At::kGroupWords);
    read(raw.of_block, At::kOfBlock, At::kBlockWords);
    if constexpr (Scales::kBlockBytes == 2) {  // one of two in a word
      raw.of_block[0] >>= group_ / kSuperblock % 2 * 16;
    }
    return raw;
  }

  // Bytes 2 i and 2 i + 1 of four q, minus the offset, as halves: in 1024, 0x6400, the lowest bit
  // is a one.
  static __device__ uint32_t halves(uint32_t q, int i) {
    constexpr int kBias = Format::kSigned ? 128 : 0;
    const uint32_t pair =
        permute_bytes(q ^ (kBias * 0x01010101u), 0x64646464, i == 0 ? 0x4140 : 0x4342);
    return subtract_halves(pair, (0x6400u + kBias + Format::kOffset) * 0x00010001u);
  }

  // The i-th group of the turn.
  __device__ void multiply(const RawScales* raw, int i) {
    const int quad = lane() / 4, own = lane() % 4;
    uint32_t first[kParts]{}, second[kParts]{};
    if constexpr (At::kPlanes > 0) {
      load_matrices(first, shared_address(from_ + piece_at(lane(), i)));
    }
    if constexpr (At::kPlanes > 1) {
      load_matrices(second, shared_address(from_ + At::kPlaneBytes + piece_at(lane(), i)));
    }
    uint32_t w[kParts][2][2];  // [eight outputs, half of the group, two columns]
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const int row = p * 8 + quad;
      uint2 two{};
      uint32_t one = 0;
      if constexpr (Format::kTwo > 0) {
        two = *reinterpret_cast<const uint2*>(from_ + At::kTwo + row * kPiece + i * 8);
      }
      if constexpr (Format::kOne > 0) {
        one = *reinterpret_cast<const uint32_t*>(from_ + At::kOne + row * 8 + i * 4);
      }
      const uint2 q = Format::eight(first[p], second[p], two, one, own);
      const auto* of_group = reinterpret_cast<const std::byte*>(raw[p].of_groups);
      const HalfScales<Scales> scale(
          Scales::load_raw(
              of_group + i * Scales::kGroupBytes,
              reinterpret_cast<const std::byte*>(raw[p].of_block),
              []<class T>(const std::byte* from, T* v) { memcpy(v, from, sizeof(T)); }),
          group_ + i);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        w[p][0][c] = scale(halves(q.x, c), 0);
        w[p][1][c] = scale(halves(q.y, c), Scales::kScales - 1);
      }
    }
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      if (t >= n_tiles_) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto x = *reinterpret_cast<const uint2*>(
            from_ + At::kX + half_group_at(t * 8 + quad, i * 2 + h) + own * 8);
#pragma unroll
        for (int m = 0; m < kOutTiles; ++m) {
          const uint32_t a[4] = {w[2 * m][h][0], w[2 * m + 1][h][0], w[2 * m][h][1],
                                 w[2 * m + 1][h][1]};
          multiply_add(sums_[m][t], a, x.x, x.y);
        }
      }
    }
  }

  int n_tiles_, n_groups_, stage_bytes_, n_stages_;
  std::byte* own_;                  // this warp's stages
  std::byte *weights_to_, *x_to_;   // the next to be copied to
  std::byte* from_;                 // the next to be multiplied
  int group_;                       // its first group
  int copied_;                      // the first group of weights to be copied
  const std::byte* rows_[kGroups];  // weights that this lane copies pieces of
  const std::byte* row_;            // the row that it copies the rest of
  const uint16_t* x_;               // the next piece of x to be copied
  int64_t x_stride_;                // to the next row of this lane
  float sums_[kOutTiles][kRowTiles][4] = {};
};

}  // namespace
}  // namespace h2o::cuda
