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

// Rounds v[4] * inverse to 32 int8 at q; returns their sums over the first and the last 16.
struct Sums {
  int first, last;
};

#ifdef PALLAS_KERNELS_AVX2

float LargestMagnitude(const F8 (&v)[4]) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i high = _mm256_setzero_si256();  // as integers, so that a NaN is the largest
  for (const F8& part : v) high = _mm256_max_epi32(high, _mm256_and_si256((__m256i)part, magnitude));
  __m128i top = _mm_max_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0b01001110));
  top = _mm_max_epi32(top, _mm_shuffle_epi32(top, 0b10110001));
  return _mm_cvtss_f32(_mm_castsi128_ps(top));
}

Sums RoundGroup(const F8 (&v)[4], float inverse, uint8_t* q) {
  __m256i n[4];
  for (int i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps((__m256)v[i], _mm256_set1_ps(inverse)));
  const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(q), _mm256_permutevar8x32_epi32(bytes, order));
  const __m256i pairs = _mm256_hadd_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  const __m128i two = _mm_hadd_epi32(four, four);
  return {_mm_cvtsi128_si32(two), _mm_extract_epi32(two, 1)};
}

#else

float LargestMagnitude(const F8 (&v)[4]) {
  uint32_t top = 0;  // as integers, so that a NaN is the largest
  for (const F8& part : v) {
    uint32_t bits[8];
    std::memcpy(bits, &part, sizeof bits);
    for (uint32_t b : bits) top = std::max(top, b & 0x7fffffff);
  }
  float value;
  std::memcpy(&value, &top, 4);
  return value;
}

Sums RoundGroup(const F8 (&v)[4], float inverse, uint8_t* q) {
  int sums[2] = {};
  for (int i = 0; i < kBlock; ++i) {
    const int n = static_cast<int>(std::lrint(v[i / 8][i % 8] * inverse));
    sums[i / 16] += n;
    q[i] = static_cast<uint8_t>(n);
  }
  return {sums[0], sums[1]};
}

#endif

// One group of one row of a tile of `width` rows.
PALLAS_KERNELS_INLINE void QuantizeGroup(const F8 (&v)[4], float shift, int subgroups, int width, int row, uint8_t* tile) {
  const float top = LargestMagnitude(v);
  const float scale = top * (1.0f / 127.0f);  // NaN and infinity pass through it to the result
  const float inverse = top > 0 && top <= std::numeric_limits<float>::max() ? 127.0f / top : 0.0f;
  const Sums sums = RoundGroup(v, inverse, tile + row * kBlock);
  float* meta = reinterpret_cast<float*>(tile + width * kBlock) + row;
  meta[0] = scale;
  meta[width] = static_cast<float>(subgroups == 1 ? sums.first + sums.last : sums.first) * scale * shift;
  if (subgroups == 2) meta[2 * width] = static_cast<float>(sums.last) * scale * shift;
}

float InverseRms(const float* x, int count, float eps) {
  F8 square[2] = {Splat(0.0f), Splat(0.0f)};
  for (int i = 0; i + 8 <= count; i += 8) square[i / 8 % 2] = Fma(Load(x + i), Load(x + i), square[i / 8 % 2]);
  float sum = Sum(square[0] + square[1]);
  for (int i = count / 8 * 8; i < count; ++i) sum += x[i] * x[i];
  return 1.0f / std::sqrt(sum / static_cast<float>(count) + eps);
}

// One row of x into a tile of `width` rows.
void QuantizeRow(const float* x, const Weight& w, const RmsNorm& norm, int width, int row, uint8_t* tile) {
  const float shift = w.has_offsets ? 1.0f : -w.zero;
  const float factor = norm.weight ? InverseRms(x, w.k, norm.eps) : 1.0f;
  for (int g = 0; g < w.groups(); ++g, x += kBlock, tile += XBytes(width, w.subgroups)) {
    F8 v[4];
    for (int i = 0; i < 4; ++i) {
      v[i] = Load(x + 8 * i);
      if (norm.weight) v[i] *= factor * (Load(norm.weight + g * kBlock + 8 * i) + norm.plus);
    }
    QuantizeGroup(v, shift, w.subgroups, width, row, tile);
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

// y = residual + norm(x) of one row.
void NormRow(const float* x, int n, const RmsNorm& norm, const float* residual, float* y) {
  const float factor = InverseRms(x, n, norm.eps);
  for (int i = 0; i < n; ++i) y[i] = x[i] * factor * (norm.weight[i] + norm.plus) + (residual ? residual[i] : 0.0f);
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

void QuantizedMatmul(const float* x, int m, const Weight& w, const RmsNorm& before, const Epilogue& after, float* y) {
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
  static thread_local std::vector<float> unnormed;  // the residual may lie in y, and is added after the norm
  if (after.norm.weight) unnormed.resize(static_cast<size_t>(m) * w.n);
  float* const to = after.norm.weight ? unnormed.data() : y;
  const float* const residual = after.norm.weight ? nullptr : after.residual;
  const Dots dots = Pick(w);
  const int band = std::max(32, 256 * 1024 / w.k / kMaxM * kMaxM);  // rows of x that stay in L2 beside a strip
  // Strips a thread takes at once: as many as stay in L2, which makes long runs of reads and, row by row, of writes.
  const int parts = (m <= kMaxM ? 2 : 6) * pool.threads(), strip_bytes = w.groups() * w.block_bytes();
  const int run = std::max(1, std::min(64 * 1024 / strip_bytes, w.strips / parts));
  for (int begin = 0; begin < m; begin += band) {
    const int end = std::min(m, begin + band);
    pool.For((w.strips + run - 1) / run, [&](int part) {
      for (int m0 = begin, width; m0 < end; m0 += width) {
        width = TileWidth(end - m0);
        const DotFn dot = dots.of(width);
        for (int s = part * run; s < std::min(w.strips, (part + 1) * run); ++s) {
          float tile[kMaxM * kRows];
          dot(w.block(s, 0), &quantized[m0 * row_bytes], w.groups(), tile);
          const size_t at = static_cast<size_t>(m0) * w.n;
          Finish(w, after, s, width, tile, residual ? residual + at : nullptr, to + at);
        }
      }
    });
  }
  if (!after.norm.weight) return;
  pool.For((m + kMaxM - 1) / kMaxM, [&](int tile) {
    for (int i = tile * kMaxM; i < std::min(m, (tile + 1) * kMaxM); ++i) {
      const size_t at = static_cast<size_t>(i) * w.n;
      NormRow(to + at, w.n, after.norm, after.residual ? after.residual + at : nullptr, y + at);
    }
  });
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
