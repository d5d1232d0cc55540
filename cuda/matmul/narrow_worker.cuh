// How gemm_narrow() divides the work, and a warp's part of it.
//
// A block computes a tile of y, kRows x kOuts, or its sums over a part of the columns. It takes
// turns along them, kShares times kGroups groups of 32 each time. Each share has kOutWarps warps,
// with kWarpOuts outputs each. All threads copy x, and each warp its weights, as they are stored,
// to shared memory, a few turns ahead. The sums of the shares, and of blocks with other columns,
// are added in a fixed order: deterministic.
//
// Lane l of a warp unpacks elements 4 (l % 4) to 4 (l % 4) + 3 of each half of a group, of rows
// l / 4, l / 4 + 8, ...: its part of the operands of tensor cores, whose columns may be in any
// order, if it is the same for x.
#pragma once

#include "cuda/matmul/formats.cuh"
#include "cuda/matmul/gemm_narrow.h"
#include "cuda/matmul/half_scales.cuh"
#include "cuda/matmul/parts.cuh"
#include "cuda/runtime/ptx.cuh"
#include "cuda/runtime/reduce.cuh"

namespace h2o::cuda {
namespace {

constexpr int kRows = 32;
constexpr int kShares = 2, kOutWarps = 4;
constexpr int kWarps = kShares * kOutWarps, kThreads = kWarps * kWarp;
constexpr int kWarpOuts = 32, kOuts = kOutWarps * kWarpOuts;
constexpr int kGroups = 2;                // of a turn and share
constexpr int kTurn = kShares * kGroups;  // groups
constexpr int kPiece = 16;                // bytes
constexpr int kRowTiles = kRows / 8, kOutTiles = kWarpOuts / 16;
constexpr int kXBytes = kTurn * kGroup * 2;  // of a row of x
constexpr int kXPieces = kXBytes / kPiece;
constexpr int kSumStride = kOuts + 1;   // without bank conflicts
constexpr int kLeastShared = 99 << 10;  // that every device has per block
static_assert(kWarpOuts == kWarp, "each lane copies parts of one row");

struct NarrowPart : Part {
  int n_splits, n_turns;  // blocks that divide the columns of a tile; turns of each
  int first_sums;         // in NarrowGemm, if there are several
};

struct NarrowGemm {
  NarrowPart parts[kMaxProducts];
  const uint16_t* x;  // [n_rows, cols]
  int64_t cols;
  int64_t row_bytes;
  int n_rows;
  bool add;
  int* n_done;  // [number of splits] at a tile's first: those that have written their sums
  float* sums;  // [number of splits, kRows, kOuts], by tile

  H2O_HD int n_turns() const { return static_cast<int>((cols / kGroup + kTurn - 1) / kTurn); }
};

// Where a row of weights has kGroups times 16 bytes. The pieces of eight rows are in different
// banks.
__device__ inline int piece_at(int row, int g) {
  static_assert(kGroups == 2);
  return (row * kGroups + (g ^ (row >> 2 & 1))) * kPiece;
}

// Where a row of x has 32 bytes, half a group. Those of four rows are in different banks.
__device__ inline int half_group_at(int row, int i) {
  static_assert(kXBytes % (4 * 32) == 0);
  return row * kXBytes + (i ^ (row & 3)) * 32;
}

// Shared memory: the weights of each warp, then x, for one turn. Offsets of arrays with kWarpOuts
// rows.
template <class Format>
struct Stage {
  using Scales = typename Format::Scales;
  static constexpr int kPlanes = Format::kWide / kPiece;  // 16 bytes of each group
  static constexpr int kGroupWords = (Scales::kGroupBytes * kGroups + 3) / 4;
  static constexpr int kBlockWords = (Scales::kBlockBytes + 3) / 4;

  static constexpr int kPlaneBytes = kWarpOuts * kGroups * kPiece;
  static constexpr int kTwo = kPlanes * kPlaneBytes;
  static constexpr int kOne = kTwo + kWarpOuts * kGroups * Format::kTwo;
  static constexpr int kOfGroup = kOne + kWarpOuts * kGroups * Format::kOne;
  static constexpr int kOfBlock = kOfGroup + kWarpOuts * kGroupWords * 4;
  static constexpr int kWarpBytes = kOfBlock + kWarpOuts * kBlockWords * 4;
  static constexpr int kX = kWarps * kWarpBytes;
  static constexpr int kBytes = kX + kRows * kXBytes;
  static constexpr int kCount = kLeastShared / kBytes < 4 ? kLeastShared / kBytes : 4;
  static constexpr int kSharedBytes = kCount * kBytes;
  static_assert(kX % 128 == 0 && kBytes % 128 == 0, "half_group_at() in turns its lowest bits");
  static_assert(kWarpBytes % 32 == 0, "and so does piece_at()");
  static_assert(kCount >= 3);
  static_assert(kShares * kRows * kSumStride * 4 <= kSharedBytes, "sums take the place of stages");
};

// One warp's work. copy_weights() and copy_x() copy the next turn, multiply() multiplies the next
// one that has been copied.
template <class Format>
class Worker {
 public:
  using At = Stage<Format>;
  using Scales = typename Format::Scales;

  // Its first turn is `first_turn`.
  __device__ Worker(const NarrowGemm& g, const NarrowPart& part, int first_row, int64_t first_out,
                    int first_turn, std::byte* shared)
      : n_rows_(min(kRows, g.n_rows - first_row)),
        n_groups_(static_cast<int>(g.cols / kGroup)),
        magic_(kHalves1024 | (g.n_rows < 0)),
        shared_(shared),
        own_(kept(warp() * At::kWarpBytes)),
        copied_to_(kept(own_ + piece_at(lane() / kGroups, lane() % kGroups))),
        x_copied_to_(kept(At::kX + half_group_at(x_row(), x_piece() / 2) + x_piece() % 2 * kPiece)),
        matrix_(kept(own_ + piece_at(lane(), 0))),
        x_at_(kept(At::kX + half_group_at(lane() / 4, share() * kGroups * 2) + lane() % 4 * 8)),
        group_(first_turn * kTurn + share() * kGroups),
        copied_(group_),
        x_(g.x + int64_t{first_row + x_row()} * g.cols + first_turn * kTurn * kGroup +
           x_piece() * 8),
        x_stride_(g.cols * (kThreads / kXPieces)) {
    const int64_t first = first_out + warp() % kOutWarps * kWarpOuts;
    row_ = part.data + min(first + lane(), part.rows - 1) * g.row_bytes;
    asm volatile("" : "+l"(row_));
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {  // kGroups lanes copy adjacent pieces of a row
      const int64_t row = min(first + lane() / kGroups + i * kCopiedRows, part.rows - 1);
      rows_[i] = part.data + row * g.row_bytes + lane() % kGroups * kPiece;
      asm volatile("" : "+l"(rows_[i]));
    }
  }

  // If the number of groups is odd, the last one's neighbor is other data of the row.
  __device__ void copy_weights() {
    if (copied_ < n_groups_) {
      const typename Format::Places at(n_groups_, copied_);
      std::byte *const pieces = shared_ + weights_to_ + copied_to_, *const to = shared_ +
                                                                                weights_to_ + own_;
#pragma unroll
      for (int p = 0; p < At::kPlanes; ++p) {
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          const int place = p * At::kPlaneBytes + i * kCopiedRows * kGroups * kPiece;
          copy_16_async(shared_address(pieces + place), rows_[i] + at.wide + p * at.wide_step,
                        true);
        }
      }
      if constexpr (Format::kTwo > 0) {
        copy_16_async(shared_address(to + At::kTwo + lane() * kPiece), row_ + at.two, true);
      }
      if constexpr (Format::kOne > 0) copy_words<2>(to + At::kOne, row_ + at.one);
      copy_words<At::kGroupWords>(to + At::kOfGroup, row_ + at.of_group);
      copy_words<At::kBlockWords>(to + At::kOfBlock, row_ + at.of_block / 4 * 4);
    }
    copied_ += kTurn;
    weights_to_ = after(weights_to_);
  }

  // Rows past the end are not copied, and do not affect others.
  __device__ void copy_x() {
    constexpr int kStep = kThreads / kXPieces;
    std::byte* const to = shared_ + x_to_ + x_copied_to_;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i) {
      if (x_row() + i * kStep < n_rows_) {
        copy_16_async(shared_address(to + i * kStep * kXBytes), x_ + i * x_stride_, true);
      }
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

  // Stores to [kShares, kRows, kSumStride].
  __device__ void store(float* to) const {
    to += share() * kRows * kSumStride + warp() % kOutWarps * kWarpOuts;
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
  static constexpr int kParts = kOutTiles * 2;  // of eight outputs
  static constexpr int kCopiedRows = kWarp / kGroups;

  // Scales of the groups of a turn and a row.
  struct RawScales {
    uint32_t of_groups[At::kGroupWords + 1];
    uint32_t of_block[At::kBlockWords + 1];
  };

  static __device__ int lane() { return threadIdx.x % kWarp; }
  static __device__ int warp() { return threadIdx.x / kWarp; }
  static __device__ int share() { return warp() / kOutWarps; }
  static __device__ int x_row() { return threadIdx.x / kXPieces; }
  static __device__ int x_piece() { return threadIdx.x % kXPieces; }

  // In a register: else it would be computed again for every use.
  static __device__ int kept(int x) {
    asm volatile("" : "+r"(x));
    return x;
  }

  static __device__ int after(int stage) {
    return stage + At::kBytes < At::kSharedBytes ? stage + At::kBytes : 0;
  }

  // n words of each row.
  template <int n>
  static __device__ void copy_words(std::byte* to, const std::byte* from) {
    to += lane() * n * 4;
    if constexpr (n == 4) {  // also of the next turn, and of the other share
      copy_16_cached(shared_address(to), from);
    } else {
#pragma unroll
      for (int i = 0; i < n; ++i) copy_4_async(shared_address(to + i * 4), from + i * 4, true);
    }
  }

  __device__ RawScales scales_of(int row) const {
    RawScales raw{};
    const auto read = [&](uint32_t* to, int at, int n) {
      const auto* from = reinterpret_cast<const uint32_t*>(shared_ + from_ + own_ + at) + row * n;
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

  // Bytes 2 i and 2 i + 1 of four q as halves from 1024 on; kZero is what q = 0 is.
  static constexpr uint32_t kBias = Format::kSigned ? 128 : 0;
  static constexpr uint32_t kZero = kHalves1024 + (kBias + Format::kOffset) * 0x00010001u;
  __device__ uint32_t halves(uint32_t q, int i) const {
    return permute_bytes(q ^ (kBias * 0x01010101u), magic_, i == 0 ? 0x5150 : 0x5352);
  }

  // The i-th group of the turn.
  __device__ void multiply(const RawScales* raw, int i) {
    const int quad = lane() / 4, in_quad = lane() % 4;
    const std::byte *const weights = shared_ + from_ + own_, *const matrix =
                                                                 shared_ + from_ +
                                                                 (matrix_ ^ (i * kPiece));
    uint32_t first[kParts]{}, second[kParts]{};
    if constexpr (At::kPlanes > 0) {
      load_matrices(first, shared_address(matrix));
    }
    if constexpr (At::kPlanes > 1) {
      load_matrices(second, shared_address(matrix + At::kPlaneBytes));
    }
    uint32_t w[kParts][2][2];  // [eight outputs, half of the group, two columns]
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const int row = p * 8 + quad;
      uint2 two{};
      uint32_t one = 0;
      if constexpr (Format::kTwo > 0) {
        two = *reinterpret_cast<const uint2*>(weights + At::kTwo + row * kPiece + i * 8);
      }
      if constexpr (Format::kOne > 0) {
        one = *reinterpret_cast<const uint32_t*>(weights + At::kOne + row * 8 + i * 4);
      }
      const uint2 q = Format::eight(first[p], second[p], two, one, in_quad);
      const auto* of_group = reinterpret_cast<const std::byte*>(raw[p].of_groups);
      const HalfScales<Scales> scale(
          Scales::load_raw(
              of_group + i * Scales::kGroupBytes,
              reinterpret_cast<const std::byte*>(raw[p].of_block),
              []<class T>(const std::byte* from, T* v) { memcpy(v, from, sizeof(T)); }),
          group_ + i, magic_);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        w[p][0][c] = scale(halves(q.x, c), kZero, 0);
        w[p][1][c] = scale(halves(q.y, c), kZero, Scales::kScales - 1);
      }
    }
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      if (t * 8 >= n_rows_) break;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int place = t * 8 * kXBytes + ((from_ + x_at_) ^ (i * 2 + h) * 32);
        const auto x = *reinterpret_cast<const uint2*>(shared_ + place);
#pragma unroll
        for (int m = 0; m < kOutTiles; ++m) {
          const uint32_t a[4] = {w[2 * m][h][0], w[2 * m + 1][h][0], w[2 * m][h][1],
                                 w[2 * m + 1][h][1]};
          multiply_add(sums_[m][t], a, x.x, x.y);
        }
      }
    }
  }

  int n_rows_, n_groups_;
  uint32_t magic_;  // kHalves1024, in a register
  std::byte* shared_;
  // Places in a stage: this warp's weights, and where this lane copies to and reads from.
  int own_, copied_to_, x_copied_to_, matrix_, x_at_;
  int weights_to_ = 0, x_to_ = 0;   // stages, the next to be copied to
  int from_ = 0;                    // the next to be multiplied
  int group_;                       // its first group
  int copied_;                      // the first group of weights to be copied
  const std::byte* rows_[kGroups];  // weights that this lane copies pieces of
  const std::byte* row_;            // the row that it copies the rest of
  const uint16_t* x_;               // the next piece of x to be copied
  int64_t x_stride_;                // to the next row of this thread
  float sums_[kOutTiles][kRowTiles][4] = {};
};

}  // namespace
}  // namespace h2o::cuda
