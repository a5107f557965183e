// Eight floats at a time in the compiler's own vector extension: AVX2, NEON or scalar code from one source.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

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
inline F8 Max(F8 a, F8 b) { return a > b ? a : b; }
inline float Sum(F8 v) { return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7])); }
// e^x within 2 ulp for finite x, 0 below -87, e^88 above 88 (Cephes' polynomial, as in every vector library).
inline F8 Exp(F8 x) {
  const F8 low = Splat(-87.33f), high = Splat(88.0f);
  const I8 flushed = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const F8 magic = Splat(12582912.0f);  // adding it rounds to the nearest integer
  F8 n = (x * 1.44269504f + magic) - magic;
  F8 r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  F8 p = Splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  I8 bits = (__builtin_convertvector(n, I8) + 127) << 23;
  F8 power;
  std::memcpy(&power, &bits, sizeof power);
  F8 zero = Splat(0.0f);
  return flushed ? zero : p * power;
}

inline F8 Silu(F8 x) { return x / (1.0f + Exp(-x)); }

// GELU, tanh approximation: x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)).
inline F8 GeluTanh(F8 x) { return x / (1.0f + Exp(-1.5957691216f * (x + 0.044715f * x * x * x))); }

}  // namespace pallas_kernels
