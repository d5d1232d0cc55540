// Tile registers of AMX.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace h2o {
namespace {

constexpr int64_t kTile = 16;     // rows of a tile register, at most
constexpr int64_t kTileRow = 64;  // their bytes, at most

// The compiler does not know that the intrinsics read memory.
void written_before() { __asm__ volatile("" ::: "memory"); }

// The shape of each register, as the processor reads it.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t n_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(n_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
  void load() const {
    written_before();
    _tile_loadconfig(this);
  }
};

}  // namespace
}  // namespace h2o
