// The inner product of a strip of 16 packed rows with a few quantised rows of x: AVX2, or portable code of the same result.
#pragma once

#include <cstdint>
#include <cstring>

#include "quantized_matmul.h"
#include "vec.h"

namespace pallas_kernels {

constexpr int kSteps = 8;  // a block is 8 steps of 4 weights along K for 16 rows
constexpr int kStepBytes = 64;
constexpr int kMaxM = 4;   // rows of x a micro-kernel takes at once
constexpr int kAhead = 4096;  // bytes to prefetch ahead: the hardware stops at every page

// Quantised x, in tiles of M = 4, 2 or 1 rows: for each 32 of K
//   int8 [M, 32] values, float [M] scales, float [subgroups, M] shifts,
// where a shift is what the weights' offset multiplies: sum of values * scale, times -zero where no offset is stored.
constexpr int XBytes(int m, int subgroups) { return m * (kBlock + 4 * (1 + subgroups)); }

inline int ValueAt(int bits, const uint8_t* block, int row, int k) {
  const int step = k / 4, at = row * 4 + k % 4;
  if (bits == 8) return static_cast<int8_t>(block[step * kStepBytes + at]);
  const int low = block[step % 4 * kStepBytes + at] >> (step < 4 ? 0 : 4) & 15;
  const uint8_t* planes = block + 4 * kStepBytes;
  if (bits == 5) return low | (planes[at] >> step & 1) << 4;
  if (bits == 6) return low | (planes[at / 32 * 64 + step / 4 * 32 + at % 32] >> 2 * (step % 4) & 3) << 4;
  return low;
}

// acc += scale * x_scale * dot + offset * shift, for 8 rows of one group.
template <int kSub, bool kOffsets>
PALLAS_KERNELS_INLINE void Accumulate(const uint8_t* scales, int subgroup, int half, float x_scale, float shift, F8 dot, F8& acc) {
  const F8 scale = Halves(scales + (subgroup * kRows + 8 * half) * 2);
  if constexpr (kOffsets) {
    const F8 offset = Halves(scales + ((kSub + subgroup) * kRows + 8 * half) * 2);
    acc += Fma(offset, Splat(shift), scale * (dot * x_scale));
  } else {
    acc = Fma(scale, Fma(dot, Splat(x_scale), Splat(shift)), acc);
  }
}

#ifdef PALLAS_KERNELS_AVX2

PALLAS_KERNELS_INLINE __m256i LoadBytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Keeps GCC from reordering the sums of a block, which would spill every product.
PALLAS_KERNELS_INLINE void Pin(__m256i& v) { asm("" : "+x"(v)); }

template <int kShift>
PALLAS_KERNELS_INLINE __m256i ShiftLeft(__m256i v) {
  if constexpr (kShift >= 0) return _mm256_slli_epi16(v, kShift);
  else return _mm256_srli_epi16(v, -kShift);
}

// Four weights along K of 8 rows, as bytes.
template <int kBits, int kStep>
PALLAS_KERNELS_INLINE __m256i Values(const uint8_t* block, int half) {
  if constexpr (kBits == 8) {
    return LoadBytes(block + kStep * kStepBytes + 32 * half);
  } else {
    __m256i low = LoadBytes(block + kStep % 4 * kStepBytes + 32 * half);
    low = _mm256_and_si256(ShiftLeft<kStep < 4 ? 0 : -4>(low), _mm256_set1_epi8(15));
    if constexpr (kBits == 4) return low;
    const uint8_t* planes = block + 4 * kStepBytes;
    __m256i high;
    if constexpr (kBits == 5) high = ShiftLeft<4 - kStep>(LoadBytes(planes + 32 * half));
    else high = ShiftLeft<4 - 2 * (kStep % 4)>(LoadBytes(planes + 64 * half + kStep / 4 * 32));
    return _mm256_or_si256(low, _mm256_and_si256(high, _mm256_set1_epi8(kBits == 5 ? 0x10 : 0x30)));
  }
}

// Steps whose products can be summed in int16: 127 * 2 * (2^bits - 1) * steps < 2^15.
constexpr int SafeSteps(int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : bits == 6 ? 2 : 1; }

template <int kBits, int kM, int kStep>
PALLAS_KERNELS_INLINE void Step(const uint8_t* block, const uint8_t* x, __m256i (&pairs)[kM][2], __m256i (&sums)[kM][2]) {
  constexpr int kRun = SafeSteps(kBits);
  const __m256i w[2] = {Values<kBits, kStep>(block, 0), Values<kBits, kStep>(block, 1)};
  for (int m = 0; m < kM; ++m) {
    int32_t four;
    std::memcpy(&four, x + m * kBlock + 4 * kStep, 4);
    const __m256i xs = _mm256_set1_epi32(four);
    for (int h = 0; h < 2; ++h) {
      __m256i p;
      if constexpr (kBits == 8) p = _mm256_maddubs_epi16(_mm256_abs_epi8(w[h]), _mm256_sign_epi8(xs, w[h]));
      else p = _mm256_maddubs_epi16(w[h], xs);
      pairs[m][h] = kStep % kRun == 0 ? p : _mm256_add_epi16(pairs[m][h], p);
      Pin(pairs[m][h]);
      if constexpr (kStep % kRun == kRun - 1) {
        const __m256i sum = _mm256_madd_epi16(pairs[m][h], _mm256_set1_epi16(1));
        sums[m][h] = kStep < kRun ? sum : _mm256_add_epi32(sums[m][h], sum);
        if constexpr (kRun < 8) Pin(sums[m][h]);
      }
    }
  }
}

template <int kBits, int kM, int kFirst>
PALLAS_KERNELS_INLINE void HalfBlock(const uint8_t* block, const uint8_t* x, __m256i (&pairs)[kM][2], __m256i (&sums)[kM][2]) {
  Step<kBits, kM, kFirst>(block, x, pairs, sums);
  Step<kBits, kM, kFirst + 1>(block, x, pairs, sums);
  Step<kBits, kM, kFirst + 2>(block, x, pairs, sums);
  Step<kBits, kM, kFirst + 3>(block, x, pairs, sums);
}

// out [kM, 16] = x @ W^T of one strip; block and x point at their first of `groups` blocks.
template <int kBits, int kSub, bool kOffsets, int kM>
__attribute__((noinline)) void StripDot(const uint8_t* block, const uint8_t* x, int groups, float* out) {
  constexpr int kValues = kRows * kBlock * kBits / 8, kBytes = kValues + kSub * kRows * 2 * (kOffsets ? 2 : 1);
  F8 acc[kM][2];
  for (int m = 0; m < kM; ++m) acc[m][0] = acc[m][1] = Splat(0.0f);
  for (int g = 0; g < groups; ++g, block += kBytes, x += XBytes(kM, kSub)) {
    __m256i pairs[kM][2], sums[kM][2];
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(block + kAhead + i);
    const float* meta = reinterpret_cast<const float*>(x + kM * kBlock);
    auto flush = [&](int s) __attribute__((always_inline)) {
      for (int h = 0; h < 2; ++h)
        for (int m = 0; m < kM; ++m)
          Accumulate<kSub, kOffsets>(block + kValues, s, h, meta[m], meta[(1 + s) * kM + m],
                                     (F8)_mm256_cvtepi32_ps(sums[m][h]), acc[m][h]);
    };
    HalfBlock<kBits, kM, 0>(block, x, pairs, sums);
    if constexpr (kSub == 2) {
      flush(0);
      for (int m = 0; m < kM; ++m) sums[m][0] = sums[m][1] = _mm256_setzero_si256();
    }
    HalfBlock<kBits, kM, 4>(block, x, pairs, sums);
    flush(kSub - 1);
  }
  for (int m = 0; m < kM; ++m)
    for (int h = 0; h < 2; ++h) Store(out + m * kRows + 8 * h, acc[m][h]);
}

#else  // portable

typedef uint8_t U16 __attribute__((vector_size(16)));
typedef int8_t C16 __attribute__((vector_size(16)));
typedef int16_t S16 __attribute__((vector_size(32)));

// Steps whose products fit int16 lane by lane: 127 * (2^bits - 1) * steps < 2^15.
constexpr int SafeSteps(int bits) { return bits <= 5 ? 8 : bits == 6 ? 4 : 2; }

// A step's values for 4 of the 16 rows.
template <int kBits>
PALLAS_KERNELS_INLINE S16 Values(const uint8_t* block, int step, int quarter) {
  auto load = [](const uint8_t* p) {
    U16 v;
    std::memcpy(&v, p, sizeof v);
    return v;
  };
  if constexpr (kBits == 8) {
    C16 v;
    std::memcpy(&v, block + step * kStepBytes + 16 * quarter, sizeof v);
    return __builtin_convertvector(v, S16);
  }
  U16 v = load(block + step % 4 * kStepBytes + 16 * quarter) >> (step < 4 ? 0 : 4) & 15;
  const uint8_t* planes = block + 4 * kStepBytes;
  if constexpr (kBits == 5) v |= (load(planes + 16 * quarter) >> step & 1) << 4;
  if constexpr (kBits == 6) v |= (load(planes + quarter / 2 * 64 + step / 4 * 32 + quarter % 2 * 16) >> 2 * (step % 4) & 3) << 4;
  return __builtin_convertvector(v, S16);
}

// Four int8 of x beside every row's four values.
PALLAS_KERNELS_INLINE S16 Repeat(const uint8_t* x) {
  typedef int8_t C4 __attribute__((vector_size(4)));
  typedef int16_t S4 __attribute__((vector_size(8)));
  typedef int64_t L4 __attribute__((vector_size(32)));
  C4 bytes;
  std::memcpy(&bytes, x, sizeof bytes);
  const S4 four = __builtin_convertvector(bytes, S4);
  int64_t word;
  std::memcpy(&word, &four, sizeof word);
  return (S16)L4{word, word, word, word};
}

PALLAS_KERNELS_INLINE I8 AddPairs(S16 lanes) {
  const I8 pairs = (I8)lanes;
  return (pairs << 16 >> 16) + (pairs >> 16);
}

// Sums of neighbours: of a, then of b.
PALLAS_KERNELS_INLINE I8 AddNeighbours(I8 a, I8 b) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  return __builtin_shuffle(a, b, I8{0, 2, 4, 6, 8, 10, 12, 14}) + __builtin_shuffle(a, b, I8{1, 3, 5, 7, 9, 11, 13, 15});
#endif
}

// Products of 4 rows with kM rows of x over steps [first, last), two int32 a row.
template <int kBits, int kM>
PALLAS_KERNELS_INLINE void Quarter(const uint8_t* block, int quarter, int first, int last, const S16 (&q)[kM][kSteps], I8 (&pairs)[kM]) {
  for (int m = 0; m < kM; ++m) pairs[m] = I8{};
  for (int step = first; step < last;) {
    S16 lanes[kM] = {};
    for (const int end = step + SafeSteps(kBits) < last ? step + SafeSteps(kBits) : last; step < end; ++step) {
      const S16 w = Values<kBits>(block, step, quarter);
      for (int m = 0; m < kM; ++m) lanes[m] += w * q[m][step];
    }
    for (int m = 0; m < kM; ++m) pairs[m] += AddPairs(lanes[m]);
  }
}

template <int kBits, int kSub, bool kOffsets, int kM>
void StripDot(const uint8_t* block, const uint8_t* x, int groups, float* out) {
  constexpr int kValues = kRows * kBlock * kBits / 8, kBytes = kValues + kSub * kRows * 2 * (kOffsets ? 2 : 1);
  F8 acc[kM][2];
  for (int m = 0; m < kM; ++m) acc[m][0] = acc[m][1] = Splat(0.0f);
  for (int g = 0; g < groups; ++g, block += kBytes, x += XBytes(kM, kSub)) {
    const float* meta = reinterpret_cast<const float*>(x + kM * kBlock);
    S16 q[kM][kSteps];
    for (int m = 0; m < kM; ++m)
      for (int step = 0; step < kSteps; ++step) q[m][step] = Repeat(x + m * kBlock + 4 * step);
    for (int s = 0; s < kSub; ++s) {
      for (int h = 0; h < 2; ++h) {
        I8 a[kM], b[kM];
        Quarter<kBits, kM>(block, 2 * h, s * kSteps / kSub, (s + 1) * kSteps / kSub, q, a);
        Quarter<kBits, kM>(block, 2 * h + 1, s * kSteps / kSub, (s + 1) * kSteps / kSub, q, b);
        for (int m = 0; m < kM; ++m) {
          const F8 dot = __builtin_convertvector(AddNeighbours(a[m], b[m]), F8);
          Accumulate<kSub, kOffsets>(block + kValues, s, h, meta[m], meta[(1 + s) * kM + m], dot, acc[m][h]);
        }
      }
    }
  }
  for (int m = 0; m < kM; ++m)
    for (int h = 0; h < 2; ++h) Store(out + m * kRows + 8 * h, acc[m][h]);
}

#endif

}  // namespace pallas_kernels
