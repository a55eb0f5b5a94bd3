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
constexpr int32_t kTokenTiles = 4;  // multiplied with each tile of weights
constexpr int32_t kStepsAhead = 8;  // distance of the software prefetch, in tiles along the inner dimension

struct alignas(64) Scratch {
  float c[2][kTokenTiles][kTile * kTile];  // [row tile][token tile][row][token]
  uint8_t edge[kTileBytes];                // zero-padded weights
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

// Up to 16 weight rows.
//
// A line of cold weights is asked for once and then meets all four token tiles, along the rows themselves: on Sapphire
// Rapids 16 rows read side by side came faster than the same bytes one after another.
struct WeightTile {
  const uint8_t *block;
  int64_t pitch;  // bytes from row to row
  int32_t rows;   // <= 0: none
  int32_t inner;
  const uint8_t *after;  // the rows that are read next, as far apart; null: nothing
  bool cold;             // likely not in a cache
};

inline void copy_edge(const WeightTile &w, int32_t k, uint8_t *edge) {
  const __mmask32 mask = w.inner - k >= kInner ? ~__mmask32{0} : (__mmask32{1} << (w.inner - k)) - 1;
  for (int32_t r = 0; r < kTile; ++r) {
    const __m512i row = r < w.rows ? _mm512_maskz_loadu_epi16(mask, w.block + r * w.pitch + 2 * static_cast<int64_t>(k))
                                   : _mm512_setzero_si512();
    _mm512_store_si512(edge + 64 * r, row);
  }
}

template <bool Cold>
inline void prefetch_rows(const uint8_t *at, int64_t pitch, int32_t first) {
  if constexpr (Cold)
    for (int32_t r = first; r < first + 4; ++r) __builtin_prefetch(at + r * pitch, 0, 2);
}

// The token tile that the next step wants, into L1. With fewer token tiles memory is what a step waits for.
template <int Tiles>
inline void prefetch_tokens(const uint8_t *tile) {
  if constexpr (Tiles == kTokenTiles)
    for (int32_t r = 0; r < kTile; ++r) __builtin_prefetch(tile + kTileBytes + 64 * r, 0, 3);
}

// Tiles 0-3 += tile 4 x `Tiles` token tiles; tiles 5-7 take tokens in turn. Tile loads from memory hardly overlap with
// the products before them, so the weights must be on their way by then. Their prefetches are spread among the
// products: in one burst they would hold the line fill buffers that the tokens need. Nor do tile loads from L2, where
// two hardware threads share a core: so tokens are asked for a step ahead.
template <int Tiles, bool Cold>
inline void multiply_tiles(const uint8_t *b, int64_t b_pitch, const uint8_t *ahead, int64_t pitch) {
  prefetch_rows<Cold>(ahead, pitch, 0);
  _tile_loadd(5, b, 64);
  _tile_dpbf16ps(0, 4, 5);
  prefetch_tokens<Tiles>(b);
  prefetch_rows<Cold>(ahead, pitch, 4);
  if constexpr (Tiles > 1) {
    _tile_loadd(6, b + b_pitch, 64);
    _tile_dpbf16ps(1, 4, 6);
    prefetch_tokens<Tiles>(b + b_pitch);
  }
  prefetch_rows<Cold>(ahead, pitch, 8);
  if constexpr (Tiles > 2) {
    _tile_loadd(7, b + 2 * b_pitch, 64);
    _tile_dpbf16ps(2, 4, 7);
    prefetch_tokens<Tiles>(b + 2 * b_pitch);
  }
  prefetch_rows<Cold>(ahead, pitch, 12);
  if constexpr (Tiles > 3) {
    _tile_loadd(5, b + 3 * b_pitch, 64);
    _tile_dpbf16ps(3, 4, 5);
    prefetch_tokens<Tiles>(b + 3 * b_pitch);
  }
}

template <int Tiles, bool Cold>
inline void tile_sums(const WeightTile &w, const uint8_t *b, int64_t b_pitch, float (*c)[kTile * kTile],
                      uint8_t *edge) {
  const int32_t whole = w.rows == kTile ? w.inner / kInner : 0;
  const int32_t tiles = tiles_of(w.inner, kInner);
  memory_barrier();
  _tile_zero(0);
  if constexpr (Tiles > 1) _tile_zero(1);
  if constexpr (Tiles > 2) _tile_zero(2);
  if constexpr (Tiles > 3) _tile_zero(3);
  const int32_t steps = smaller(kStepsAhead, whole);  // no further than the rows that are read next are wide
  const uint8_t *a = w.block;
  for (int32_t k = 0; k < whole; ++k, a += 64, b += kTileBytes) {
    const uint8_t *ahead = a + 64 * steps;
    if (k + steps >= whole) ahead = w.after ? w.after + 64 * (k + steps - whole) : a;
    _tile_loadd(4, a, w.pitch);
    multiply_tiles<Tiles, Cold>(b, b_pitch, ahead, w.pitch);
  }
  for (int32_t k = whole; k < tiles; ++k, b += kTileBytes) {
    copy_edge(w, k * kInner, edge);
    memory_barrier();
    _tile_loadd(4, edge, 64);
    multiply_tiles<Tiles, false>(b, b_pitch, nullptr, 0);
    memory_barrier();
  }
  _tile_stored(0, c[0], 64);
  if constexpr (Tiles > 1) _tile_stored(1, c[1], 64);
  if constexpr (Tiles > 2) _tile_stored(2, c[2], 64);
  if constexpr (Tiles > 3) _tile_stored(3, c[3], 64);
  memory_barrier();
}

template <int Tiles>
inline void tile_sums(const WeightTile &w, const uint8_t *b, int64_t b_pitch, float (*c)[kTile * kTile],
                      uint8_t *edge) {
  if (w.cold)
    tile_sums<Tiles, true>(w, b, b_pitch, c, edge);
  else
    tile_sums<Tiles, false>(w, b, b_pitch, c, edge);
}

// c[token tile] = weights x tokens, for 1 to 4 token tiles; b: [token tile][inner tile], b_pitch bytes between token
// tiles.
inline void tile_product(const WeightTile &w, const uint8_t *b, int64_t b_pitch, int32_t tiles,
                         float (*c)[kTile * kTile], uint8_t *edge) {
  switch (tiles) {
    case 1: return tile_sums<1>(w, b, b_pitch, c, edge);
    case 2: return tile_sums<2>(w, b, b_pitch, c, edge);
    case 3: return tile_sums<3>(w, b, b_pitch, c, edge);
    default: return tile_sums<4>(w, b, b_pitch, c, edge);
  }
}

}  // namespace
}  // namespace greenroom
#endif
