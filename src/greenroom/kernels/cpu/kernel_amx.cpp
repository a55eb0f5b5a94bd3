// AMX, for bf16 experts with several tokens.
//
// Hidden rows are brought to the order of token tiles once per call (amx_tiles.h). Activation rows are written in it,
// as [token tile][inner tile][16][16 tokens][2]. Padded tokens have their own columns, which never reach the output.
#define GR_LANES 16
#include "amx_tiles.h"

namespace greenroom {

const int32_t amx_min_tokens = 2;

namespace {

constexpr int64_t kPackedBytes = 1 << 20;  // hidden rows of one pass
// Weights that stay in the L2 cache while all tokens pass by, beside four tiles of tokens. The cache is taken for
// 1 MiB: two hardware threads often share one of 2.
constexpr int64_t kHeldBytes = 256 << 10;

// Token tiles in one pass over an expert's rows: a multiple of those in one product.
inline int32_t pass_tiles(int32_t inner) {
  const int64_t tiles = kPackedBytes / (kTileBytes * tiles_of(inner, kInner)) / kTokenTiles * kTokenTiles;
  return static_cast<int32_t>(tiles < kTokenTiles ? kTokenTiles : tiles);
}

// Rows in steps of `step` whose weights, `bytes` a step, are held together.
inline int32_t held_rows(int32_t step, int64_t bytes) {
  const int64_t steps = kHeldBytes / bytes;
  return step * static_cast<int32_t>(steps < 1 ? 1 : steps);
}

// Hidden rows of up to 16 tokens into tiles.
inline void pack_tokens(const Group &group, int32_t token, uint8_t *tiles) {
  const int32_t inner = group.format->hidden;
  const int32_t tokens = smaller(group.count - token, kTile);
  const Bf16 *rows[kTile];
  for (int32_t n = 0; n < tokens; ++n)
    rows[n] = reinterpret_cast<const Bf16 *>(group.hidden) + static_cast<int64_t>(group.pairs[token + n].token) * inner;
  for (int32_t k = 0; k < inner; k += kInner, tiles += kTileBytes) {
    const __mmask32 mask = inner - k >= kInner ? ~__mmask32{0} : (__mmask32{1} << (inner - k)) - 1;
    __m512i r[kTile];
    for (int32_t n = 0; n < kTile; ++n)
      r[n] = n < tokens ? _mm512_maskz_loadu_epi16(mask, rows[n] + k) : _mm512_setzero_si512();
    transpose(r);
    for (int32_t n = 0; n < kTile; ++n) _mm512_store_si512(tiles + 64 * n, r[n]);
  }
}

size_t amx_act_bytes(const gr_format *f, int32_t count) {
  return static_cast<size_t>(tiles_of(count, kTile)) * tiles_of(f->inter, kInner) * kTileBytes;
}

size_t amx_scratch_bytes(const gr_format *f) {
  // Packed hidden rows follow, [token tile][inner tile].
  return sizeof(Scratch) + static_cast<size_t>(pass_tiles(f->hidden)) * tiles_of(f->hidden, kInner) * kTileBytes;
}

// Two neighbouring inner elements of 16 tokens: one row of an activation tile.
inline void store_pair_row(uint8_t *to, VecF even, VecF odd) {
  const __m512i words = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  alignas(64) static constexpr uint16_t order[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  _mm512_store_si512(to, _mm512_permutexvar_epi16(_mm512_load_si512(order), words));
}

// One row of activations, 16 tokens. Rows past the last one are zeros: the next projection reads them.
inline VecF activated_row(const gr_format &f, const float *gate, const float *up, const Bf16 *bias, int32_t row) {
  if (row >= f.inter) return splat(0.0f);
  VecF u = *reinterpret_cast<const VecF *>(up);
  if (!f.gated) return activate_plain(f, bias ? u + to_float(bias[row]) : u);
  VecF g = *reinterpret_cast<const VecF *>(gate);
  if (bias) {
    g = g + to_float(bias[row]);
    u = u + to_float(bias[f.inter + row]);
  }
  return activate_gated(f, g, u);
}

// The activations of one product and one token tile, into that tile's row of inner tiles.
inline void store_activations(const gr_format &f, const Scratch &scratch, int32_t n, const Bf16 *bias, int32_t row,
                              uint8_t *tiles) {
  uint8_t *to = tiles + row / kInner * kTileBytes + row % kInner * 32;
  if (f.gated) {  // the row tiles are gate and up of the same rows
    const float *gate = scratch.c[0][n], *up = scratch.c[1][n];
    for (int32_t r = 0; r < kTile; r += 2, gate += 2 * kTile, up += 2 * kTile)
      store_pair_row(to + r * 32, activated_row(f, gate, up, bias, row + r),
                     activated_row(f, gate + kTile, up + kTile, bias, row + r + 1));
    return;
  }
  for (int32_t i = 0; i < 2; ++i) {  // consecutive rows
    const float *up = scratch.c[i][n];
    for (int32_t r = i * kTile; r < (i + 1) * kTile; r += 2, up += 2 * kTile)
      store_pair_row(to + r * 32, activated_row(f, up, up, bias, row + r),
                     activated_row(f, up + kTile, up + kTile, bias, row + r + 1));
  }
}

void amx_up(const Group *group, int32_t first, int32_t last, const uint8_t *next, void *memory) {
  const gr_format &f = *group->format;
  Scratch &scratch = *static_cast<Scratch *>(memory);
  uint8_t *packed = static_cast<uint8_t *>(memory) + sizeof(Scratch);
  const int64_t pitch = static_cast<int64_t>(f.hidden) * 2;
  const uint8_t *matrix = group->block + f.up;
  const Bf16 *bias = f.has_bias ? reinterpret_cast<const Bf16 *>(group->block + f.up_bias) : nullptr;
  const int64_t token_pitch = tiles_of(f.hidden, kInner) * kTileBytes;
  const int64_t act_pitch = tiles_of(f.inter, kInner) * kTileBytes;
  const int32_t all_tiles = tiles_of(group->count, kTile);
  const int64_t second = (f.gated ? f.inter : kTile) * pitch;  // from the first to the second block of rows
  const int32_t step = f.gated ? kTile : 2 * kTile;            // rows of activations for each product
  const TileScope scope;
  for (int32_t pass = 0; pass < all_tiles; pass += pass_tiles(f.hidden)) {
    const int32_t tiles = smaller(all_tiles - pass, pass_tiles(f.hidden));
    for (int32_t t = 0; t < tiles; ++t) pack_tokens(*group, (pass + t) * kTile, packed + t * token_pitch);
    // Rows are covered up to a whole inner tile of the next projection, whose padding must be zeros.
    const int32_t end = last < f.inter ? last : tiles_of(f.inter, kInner) * kInner;
    const int32_t held = held_rows(step, 2 * kTile * pitch);
    for (int32_t begin = first; begin < end; begin += held)
      for (int32_t t = 0; t < tiles; t += kTokenTiles)
        for (int32_t row = begin; row < end && row < begin + held; row += step) {
          const int32_t token_tiles = smaller(tiles - t, kTokenTiles);
          const uint8_t *b = packed + t * token_pitch;
          const uint8_t *rows = matrix + row * pitch;
          const uint8_t *after = row + step < last ? rows + step * pitch : next;
          const WeightTile w0{rows, pitch, smaller(kTile, f.inter - row), f.hidden, rows + second, t == 0};
          const WeightTile w1{rows + second, pitch, f.gated ? w0.rows : smaller(kTile, f.inter - row - kTile), f.hidden,
                              after, t == 0};
          tile_product(w0, b, token_pitch, token_tiles, scratch.c[0], scratch.edge);
          tile_product(w1, b, token_pitch, token_tiles, scratch.c[1], scratch.edge);
          for (int32_t n = 0; n < token_tiles; ++n)
            store_activations(f, scratch, n, bias, row, group->act + (pass + t + n) * act_pitch);
        }
  }
}

// Up to 16 biases.
inline __m512 load_biases(const Bf16 *bias, __mmask16 mask) {
  const __m256i words = _mm256_maskz_loadu_epi16(mask, reinterpret_cast<const uint16_t *>(bias));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

inline void add_weighted(float *sum, __mmask16 mask, __m512 value, float weight) {
  const __m512 old = _mm512_maskz_loadu_ps(mask, sum);
  _mm512_mask_storeu_ps(sum, mask, _mm512_fmadd_ps(_mm512_set1_ps(weight), value, old));
}

// sums[token, 0:rows] += weight * (c[:, token] + bias[0:rows]), tokens in their order, for up to 32 rows: those with
// even numbers are in `even`, the others in `odd`.
inline void add_to_sums(const Group &group, const float *even, const float *odd, int32_t token, int32_t rows,
                        const Bf16 *bias, float *sums, int64_t sums_pitch) {
  alignas(64) static constexpr int32_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 16);
  const __mmask16 mask[2] = {static_cast<__mmask16>(rows < 16 ? (1u << rows) - 1 : 0xffffu),
                             static_cast<__mmask16>(rows < 16 ? 0u : (1u << (rows - 16)) - 1)};
  __m512i r[2][kTile];
  for (int i = 0; i < kTile; ++i) {
    r[0][i] = _mm512_load_si512(even + kTile * i);
    r[1][i] = _mm512_load_si512(odd + kTile * i);
  }
  transpose(r[0]);
  transpose(r[1]);
  __m512 b[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
  if (bias)
    for (int i = 0; i < 2; ++i) b[i] = load_biases(bias + kTile * i, mask[i]);
  const int32_t tokens = smaller(group.count - token, kTile);
  for (int32_t n = 0; n < tokens; ++n) {
    const Pair pair = group.pairs[token + n];
    float *sum = sums + pair.token * sums_pitch;
    const __m512 c[2] = {_mm512_castsi512_ps(_mm512_permutex2var_epi32(r[0][n], low, r[1][n])),
                         _mm512_castsi512_ps(_mm512_permutex2var_epi32(r[0][n], high, r[1][n]))};
    for (int i = 0; i < 2; ++i) add_weighted(sum + kTile * i, mask[i], _mm512_add_ps(c[i], b[i]), pair.weight);
  }
}

void amx_down(const Group *group, int32_t first, int32_t last, float *sums, int64_t sums_pitch, const uint8_t *next,
              void *memory) {
  const gr_format &f = *group->format;
  Scratch &scratch = *static_cast<Scratch *>(memory);
  const int64_t pitch = static_cast<int64_t>(f.inter) * 2;
  const Bf16 *bias = f.has_bias ? reinterpret_cast<const Bf16 *>(group->block + f.down_bias) : nullptr;
  const int64_t act_pitch = tiles_of(f.inter, kInner) * kTileBytes;
  const uint8_t *act = group->act + group->begin / kInner * kTileBytes;
  const uint8_t *matrix = group->block + f.down + 2 * group->begin;
  const int32_t inner = f.inter - group->begin;
  const int32_t tiles = tiles_of(group->count, kTile);
  constexpr int32_t step = 2 * kTile;
  const TileScope scope;
  const int32_t held = held_rows(step, step * 2 * static_cast<int64_t>(inner));
  for (int32_t begin = first; begin < last; begin += held)
    for (int32_t t = 0; t < tiles; t += kTokenTiles)
      for (int32_t row = begin; row < last && row < begin + held; row += step) {
        // One tile takes every other row, its neighbour those between: memory answers faster when the rows of a
        // tile, which are fetched together, are spread over more pages.
        const int32_t rows = smaller(step, last - row);
        const uint8_t *even = matrix + row * pitch;
        const uint8_t *after = row + step < last ? even + step * pitch : next;
        const WeightTile w0{even, 2 * pitch, (rows + 1) / 2, inner, even + pitch, t == 0};
        const WeightTile w1{even + pitch, 2 * pitch, rows / 2, inner, after, t == 0};
        const int32_t token_tiles = smaller(tiles - t, kTokenTiles);
        const uint8_t *b = act + t * act_pitch;
        tile_product(w0, b, act_pitch, token_tiles, scratch.c[0], scratch.edge);
        tile_product(w1, b, act_pitch, token_tiles, scratch.c[1], scratch.edge);
        for (int32_t n = 0; n < token_tiles; ++n)
          add_to_sums(*group, scratch.c[0][n], scratch.c[1][n], (t + n) * kTile, rows, bias ? bias + row : nullptr,
                      sums + (row - first), sums_pitch);
      }
}

}  // namespace

const Kernel amx_kernel = {kInner, 2 * kTile, amx_act_bytes, amx_scratch_bytes, amx_up, amx_down, nullptr};

}  // namespace greenroom
