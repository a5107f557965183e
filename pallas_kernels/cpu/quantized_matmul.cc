#include "quantized_matmul.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"
#include "quantized_dot.h"
#include "vec.h"

namespace pallas_kernels {
namespace {

typedef int8_t B8 __attribute__((vector_size(8)));

// One group of one row of a tile of `width` rows; x points at the group's 32 floats.
void QuantizeGroup(const float* x, const Weight& w, int width, int row, uint8_t* tile) {
  F8 v[4], high = Splat(0.0f);
  I8 nan = {};
  for (int i = 0; i < 4; ++i) {
    v[i] = Load(x + 8 * i);
    nan |= v[i] != v[i];
    high = Max(high, v[i] < 0 ? -v[i] : v[i]);
  }
  bool poisoned = false;
  for (int i = 0; i < 8; ++i) poisoned |= nan[i] != 0;
  const float top = HighestOf(high);
  const float scale = poisoned ? std::numeric_limits<float>::quiet_NaN() : top / 127.0f;
  const float inverse = top > 0 && !poisoned ? 127.0f / top : 0.0f;
  I8 sum[2] = {};
  for (int i = 0; i < 4; ++i) {
    const F8 magic = Splat(12582912.0f);  // adding it rounds to the nearest integer
    const I8 n = __builtin_convertvector((v[i] * inverse + magic) - magic, I8);
    sum[i * w.subgroups / 4] += n;
    const B8 bytes = __builtin_convertvector(n, B8);
    std::memcpy(tile + row * kBlock + 8 * i, &bytes, sizeof bytes);
  }
  float* meta = reinterpret_cast<float*>(tile + width * kBlock);
  meta[row] = scale;
  for (int s = 0; s < w.subgroups; ++s) {
    int total = 0;
    for (int i = 0; i < 8; ++i) total += sum[s][i];
    meta[(1 + s) * width + row] = static_cast<float>(total) * scale * (w.has_offsets ? 1.0f : -w.zero);
  }
}

void QuantizeRow(const float* x, const Weight& w, const Prologue& before, int width, int row, uint8_t* tile) {
  float factor = 1.0f;
  if (before.norm) {
    F8 square = Splat(0.0f);
    for (int i = 0; i < w.k; i += 8) square += Load(x + i) * Load(x + i);
    factor = 1.0f / std::sqrt(Sum(square) / static_cast<float>(w.k) + before.eps);
  }
  for (int g = 0; g < w.groups(); ++g, x += kBlock, tile += XBytes(width, w.subgroups)) {
    float normed[kBlock];
    if (before.norm) {
      const float* norm = before.norm + g * kBlock;
      for (int i = 0; i < kBlock; i += 8) Store(normed + i, Load(x + i) * factor * (Load(norm + i) + before.plus));
    }
    QuantizeGroup(before.norm ? normed : x, w, width, row, tile);
  }
}

// Rows are cut into tiles of 4, and a last 2 and 1.
int TileWidth(int left) { return left >= kMaxM ? kMaxM : left >= 2 ? 2 : 1; }

using DotFn = void (*)(const uint8_t*, const uint8_t*, int, float*);

// Kernels of one kind of weight, by tile width.
struct Dots {
  DotFn one, two, four;
  DotFn of(int width) const { return width == 4 ? four : width == 2 ? two : one; }
};

template <int kBits, int kSub>
Dots PickOffsets(bool offsets) {
  if (offsets) return {StripDot<kBits, kSub, true, 1>, StripDot<kBits, kSub, true, 2>, StripDot<kBits, kSub, true, 4>};
  return {StripDot<kBits, kSub, false, 1>, StripDot<kBits, kSub, false, 2>, StripDot<kBits, kSub, false, 4>};
}

Dots Pick(const Weight& w) {
  switch (w.bits) {
    case 4: return PickOffsets<4, 1>(w.has_offsets);
    case 5: return PickOffsets<5, 1>(w.has_offsets);
    case 6: return w.subgroups == 2 ? PickOffsets<6, 2>(w.has_offsets) : PickOffsets<6, 1>(w.has_offsets);
    default: return w.subgroups == 2 ? PickOffsets<8, 2>(w.has_offsets) : PickOffsets<8, 1>(w.has_offsets);
  }
}

F8 LoadSome(const float* p, int count) {
  if (count >= 8) return Load(p);
  F8 v = Splat(0.0f);
  for (int i = 0; i < count; ++i) v[i] = p[i];
  return v;
}

void StoreSome(float* p, F8 v, int count) {
  if (count >= 8) return Store(p, v);
  for (int i = 0; i < count; ++i) p[i] = v[i];
}

// Scales, adds, gates and stores a tile [rows, 16] of one strip; y and the residual point at the tile's first row.
void Finish(const Weight& w, const Epilogue& after, int strip, int rows, const float* tile, const float* residual, float* y) {
  const bool gated = after.gate != Activation::kNone;
  for (int m = 0; m < rows; ++m, tile += kRows) {
    for (int h = 0; h < (gated ? 1 : 2); ++h) {
      const int column = gated ? 8 * strip : kRows * strip + 8 * h, count = w.n - column;
      if (count <= 0) break;
      const size_t at = static_cast<size_t>(m) * w.n + column;
      F8 v = Load(tile + 8 * h) * w.gain;
      if (after.bias) v += LoadSome(after.bias + column, count);
      if (gated) {
        F8 up = Load(tile + 8) * w.gain;
        if (after.bias) up += LoadSome(after.bias + w.n + column, count);
        v = (after.gate == Activation::kSilu ? Silu(v) : GeluTanh(v)) * up;
      }
      if (residual) v += LoadSome(residual + at, count);
      StoreSome(y + at, v, count);
    }
  }
}

void DequantizeRow(const Weight& w, int id, float* y) {
  const int row = id % kRows;
  for (int g = 0; g < w.groups(); ++g) {
    const uint8_t* block = w.block(id / kRows, g);
    const uint8_t* scales = block + w.value_bytes();
    for (int i = 0; i < kBlock; ++i) {
      const int subgroup = i * w.subgroups / kBlock;
      const float scale = HalfAt(scales, subgroup * kRows + row);
      const float offset = w.has_offsets ? HalfAt(scales, (w.subgroups + subgroup) * kRows + row) : -w.zero * scale;
      y[g * kBlock + i] = (static_cast<float>(ValueAt(w.bits, block, row, i)) * scale + offset) * w.gain;
    }
  }
}

}  // namespace

void QuantizedMatmul(const float* x, int m, const Weight& w, const Prologue& before, const Epilogue& after, float* y) {
  static thread_local std::vector<uint8_t> own;
  std::vector<uint8_t>& quantized = own;
  Pool& pool = Pool::Get();
  pool.Wake();
  const size_t row_bytes = static_cast<size_t>(w.groups()) * XBytes(1, w.subgroups);
  quantized.resize(m * row_bytes);
  auto quantize = [&](int m0) {
    const int width = TileWidth(m - m0);
    for (int row = 0; row < width; ++row)
      QuantizeRow(x + static_cast<size_t>(m0 + row) * w.k, w, before, width, row, &quantized[m0 * row_bytes]);
    return width;
  };
  if (m < 8) {
    for (int m0 = 0; m0 < m;) m0 += quantize(m0);
  } else {
    pool.For(m / kMaxM, [&](int tile) { quantize(tile * kMaxM); });
    for (int m0 = m / kMaxM * kMaxM; m0 < m;) m0 += quantize(m0);
  }
  const Dots dots = Pick(w);
  const int band = std::max(32, 256 * 1024 / w.k / kMaxM * kMaxM);  // rows of x that stay in L2 beside a strip
  const int run = std::clamp(w.strips / (8 * pool.threads()), 1, 8);
  for (int begin = 0; begin < m; begin += band) {
    const int end = std::min(m, begin + band);
    pool.For((w.strips + run - 1) / run, [&](int part) {
      for (int s = part * run; s < std::min(w.strips, (part + 1) * run); ++s) {
        for (int m0 = begin, width; m0 < end; m0 += width) {
          width = TileWidth(end - m0);
          float tile[kMaxM * kRows];
          dots.of(width)(w.block(s, 0), &quantized[m0 * row_bytes], w.groups(), tile);
          const size_t at = static_cast<size_t>(m0) * w.n;
          Finish(w, after, s, width, tile, after.residual ? after.residual + at : nullptr, y + at);
        }
      }
    });
  }
}

void QuantizedRows(const int32_t* ids, int count, const Weight& w, float* y) {
  Pool::Get().For((count + 7) / 8, [&](int part) {
    for (int i = 8 * part; i < std::min(count, 8 * part + 8); ++i) {
      float* row = y + static_cast<size_t>(i) * w.k;
      if (ids[i] >= 0 && ids[i] < w.n) DequantizeRow(w, ids[i], row);
      else std::fill(row, row + w.k, std::numeric_limits<float>::quiet_NaN());
    }
  });
}

}  // namespace pallas_kernels
