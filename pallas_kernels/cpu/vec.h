// Eight floats at a time in the compiler's own vector extension: AVX2, NEON or scalar code from one source.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(PALLAS_KERNELS_PORTABLE)
#include <immintrin.h>
#define PALLAS_KERNELS_AVX2 1
#endif

#define PALLAS_KERNELS_INLINE inline __attribute__((always_inline))

namespace pallas_kernels {

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));

inline F8 Load(const float* p) {
  F8 v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void Store(float* p, F8 v) { std::memcpy(p, &v, sizeof v); }
inline F8 Splat(float x) { return F8{x, x, x, x, x, x, x, x}; }

// a * b + c. The library is compiled without contraction, so that a row's result does not depend on where it is inlined.
PALLAS_KERNELS_INLINE F8 Fma(F8 a, F8 b, F8 c) {
#ifdef PALLAS_KERNELS_AVX2
  return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  for (int i = 0; i < 8; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#else
  return a * b + c;
#endif
}

inline F8 Max(F8 a, F8 b) { return a > b ? a : b; }
inline float Sum(F8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }
// e^x within 2 ulp for finite x, 0 below -87, e^88 above 88 (Cephes' polynomial, as in every vector library).
inline F8 Exp(F8 x) {
  const F8 low = Splat(-87.33f), high = Splat(88.0f);
  const I8 flushed = x < low;
  x = flushed ? low : x;
  x = x > high ? high : x;
  const F8 magic = Splat(12582912.0f);  // adding it rounds to the nearest integer
  const F8 n = Fma(x, Splat(1.44269504f), magic) - magic;
  F8 r = Fma(n, Splat(-0.693359375f), x);
  r = Fma(n, Splat(2.12194440e-4f), r);
  F8 p = Splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = Fma(p, r, Splat(c));
  p = Fma(p * r, r, r + 1.0f);
  const I8 bits = (__builtin_convertvector(n, I8) + 127) << 23;
  F8 power;
  std::memcpy(&power, &bits, sizeof power);
  return flushed ? Splat(0.0f) : p * power;
}

inline F8 Silu(F8 x) { return x / (1.0f + Exp(-x)); }

// GELU, tanh approximation: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)).
inline F8 GeluTanh(F8 x) { return x / (1.0f + Exp(-1.5957691216f * (x + 0.044715f * x * x * x))); }

inline F8 Tanh(F8 x) { return 1.0f - 2.0f / (1.0f + Exp(2.0f * x)); }

// IEEE half precision.
inline float HalfAt(const void* p, int i) {
  uint16_t h;
  std::memcpy(&h, static_cast<const char*>(p) + 2 * i, 2);
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  uint32_t bits = static_cast<uint32_t>(h & 0x7fff) << 13;
  float value;
  std::memcpy(&value, &bits, 4);
  value *= 5.192296858534828e33f;  // 2^112 rebiases the exponent and normalises subnormals
  std::memcpy(&bits, &value, 4);
  if ((h & 0x7c00) == 0x7c00) bits |= 0x7f800000;
  bits |= sign;
  std::memcpy(&value, &bits, 4);
  return value;
}

// To the nearest, ties to even; overflow gives infinity.
inline uint16_t ToHalf(float x) {
#ifdef PALLAS_KERNELS_AVX2
  return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00);
  if (bits >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: adding 0.5 leaves the half's bits in the mantissa
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
#endif
}

PALLAS_KERNELS_INLINE F8 Halves(const void* p) {
#ifdef PALLAS_KERNELS_AVX2
  return (F8)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  F8 v;
  for (int i = 0; i < 8; ++i) v[i] = HalfAt(p, i);
  return v;
#endif
}

}  // namespace pallas_kernels
