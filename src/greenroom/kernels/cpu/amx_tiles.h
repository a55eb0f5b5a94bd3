// Products of weight rows and tokens on AMX tiles. For kernel_amx.cpp only; internal linkage: see kernel.h.
//
// bf16 weights are the A operand as they lie in memory (16 rows of 32), tokens are the columns. The B operand
// wants pairs of inner elements side by side for 16 tokens ("VNNI" order): row r of a tile holds elements 2r and
// 2r + 1 of each token. Missing rows, columns and tokens are zeros in scratch copies, so every tile is a whole one
// and one tile configuration does.
#ifndef GREENROOM_AMX_TILES_H
#define GREENROOM_AMX_TILES_H

#include <immintrin.h>

#include "dot_kernel.h"

namespace greenroom {
namespace {

constexpr int32_t kTile = 16;          // rows, and tokens
constexpr int32_t kInner = 32;         // bf16 elements in a tile's row
constexpr int64_t kTileBytes = 1024;
struct alignas(64) Scratch {
  float c[2][2][kTile * kTile];  // [row tile][token tile][row][token]
  uint8_t edge[2][kTileBytes];   // zero-padded weights
};

inline int32_t tiles_of(int32_t count, int32_t size) { return (count + size - 1) / size; }

// The intrinsics for tile loads do not tell the compiler that they read memory.
inline void memory_barrier() { __asm__ volatile("" ::: "memory"); }

// Lives for one kernel call. Releasing the tiles keeps them out of context switches between jobs.
struct TileScope {
  TileScope() {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    memory_barrier();
    _tile_loadconfig(&config);
  }
  ~TileScope() { _tile_release(); }
};

// Transposes 16 registers of 16 dwords.
inline void transpose(__m512i r[16]) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

// Two blocks of up to 16 weight rows each, and what to read after them.
struct WeightTiles {
  const uint8_t *block[2];
  int32_t rows[2];
  int32_t inner;
  // The blocks that come next, fetched into the L2 cache while these are computed: an equal part of them with
  // each pair of token tiles, so that memory is kept busy all the time. null: nothing.
  const uint8_t *ahead[2];
  int32_t ahead_lines;  // cache lines of each block in one step along the inner dimension
};

// What to prefetch with pair number `pair` of `pairs`.
inline void set_ahead(WeightTiles &w, const uint8_t *ahead, int64_t second, int32_t pair, int32_t pairs) {
  w.ahead_lines = tiles_of(kTile, pairs);
  const bool any = ahead && pair * w.ahead_lines < kTile;
  const int64_t done = static_cast<int64_t>(pair) * w.ahead_lines * (w.inner / kInner) * 64;
  w.ahead[0] = any ? ahead + done : nullptr;
  w.ahead[1] = any ? ahead + second + done : nullptr;
}

inline void copy_edge(const WeightTiles &w, int which, int32_t k, uint8_t *edge) {
  const int64_t pitch = static_cast<int64_t>(w.inner) * 2;
  const __mmask32 mask = w.inner - k >= kInner ? ~__mmask32{0} : (__mmask32{1} << (w.inner - k)) - 1;
  for (int32_t r = 0; r < kTile; ++r) {
    const __m512i row = r < w.rows[which]
                            ? _mm512_maskz_loadu_epi16(mask, w.block[which] + r * pitch + 2 * static_cast<int64_t>(k))
                            : _mm512_setzero_si512();
    _mm512_store_si512(edge + 64 * r, row);
  }
}

// Tiles 0-3 are sums [row tile][token tile], 4-5 weights, 6-7 tokens.
template <int RowTiles, int TokenTiles>
inline void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  if constexpr (TokenTiles > 1) _tile_dpbf16ps(1, 4, 7);
  if constexpr (RowTiles > 1) _tile_dpbf16ps(2, 5, 6);
  if constexpr (RowTiles > 1 && TokenTiles > 1) _tile_dpbf16ps(3, 5, 7);
}

// scratch.c = weights x tokens; b: [token tile][inner tile], b_pitch bytes between token tiles.
template <int RowTiles, int TokenTiles>
inline void tile_product(const WeightTiles &w, const uint8_t *b, int64_t b_pitch, Scratch &scratch) {
  const int64_t pitch = static_cast<int64_t>(w.inner) * 2;
  const bool whole_rows = w.rows[0] == kTile && (RowTiles == 1 || w.rows[1] == kTile);
  const int32_t whole = whole_rows ? w.inner / kInner : 0;
  const int32_t tiles = tiles_of(w.inner, kInner);
  memory_barrier();
  _tile_zero(0);
  if constexpr (TokenTiles > 1) _tile_zero(1);
  if constexpr (RowTiles > 1) _tile_zero(2);
  if constexpr (RowTiles > 1 && TokenTiles > 1) _tile_zero(3);
  for (int32_t k = 0; k < whole; ++k) {
    if (w.ahead[0])
      for (int32_t line = 0; line < w.ahead_lines; ++line) {
        const int64_t at = 64 * (static_cast<int64_t>(k) * w.ahead_lines + line);
        __builtin_prefetch(w.ahead[0] + at, 0, 2);
        if constexpr (RowTiles > 1) __builtin_prefetch(w.ahead[1] + at, 0, 2);
      }
    _tile_loadd(4, w.block[0] + 64 * static_cast<int64_t>(k), pitch);
    if constexpr (RowTiles > 1) _tile_loadd(5, w.block[1] + 64 * static_cast<int64_t>(k), pitch);
    _tile_loadd(6, b + k * kTileBytes, 64);
    if constexpr (TokenTiles > 1) _tile_loadd(7, b + b_pitch + k * kTileBytes, 64);
    multiply_tiles<RowTiles, TokenTiles>();
  }
  for (int32_t k = whole; k < tiles; ++k) {
    for (int which = 0; which < RowTiles; ++which) copy_edge(w, which, k * kInner, scratch.edge[which]);
    memory_barrier();
    _tile_loadd(4, scratch.edge[0], 64);
    if constexpr (RowTiles > 1) _tile_loadd(5, scratch.edge[1], 64);
    _tile_loadd(6, b + k * kTileBytes, 64);
    if constexpr (TokenTiles > 1) _tile_loadd(7, b + b_pitch + k * kTileBytes, 64);
    multiply_tiles<RowTiles, TokenTiles>();
    memory_barrier();
  }
  _tile_stored(0, scratch.c[0][0], 64);
  if constexpr (TokenTiles > 1) _tile_stored(1, scratch.c[0][1], 64);
  if constexpr (RowTiles > 1) _tile_stored(2, scratch.c[1][0], 64);
  if constexpr (RowTiles > 1 && TokenTiles > 1) _tile_stored(3, scratch.c[1][1], 64);
  memory_barrier();
}

}  // namespace
}  // namespace greenroom
#endif
