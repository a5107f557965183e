// Products of float32 rows with packed low-bit weights; the layout is described in quantized_matmul.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pallas_kernels {

constexpr int kRows = 16;   // output rows a strip interleaves
constexpr int kBlock = 32;  // weights along K that share an activation scale

enum class Activation : int32_t { kNone = 0, kSilu = 1, kGeluTanh = 2 };

struct Weight {
  const uint8_t* blocks;  // [strips, k / 32, block_bytes]
  int strips;             // of 16 rows, or of 8 gate and 8 up rows
  int n;                  // columns of the output
  int k;
  int bits;               // 4, 5, 6: unsigned; 8: signed
  int subgroups;          // scales in 32 weights of a row: 1 or 2
  bool has_offsets;       // stored per group; otherwise offset = -zero * scale
  float zero;
  float gain;             // power of two on every stored scale and offset

  int value_bytes() const { return kRows * kBlock * bits / 8; }
  int block_bytes() const { return value_bytes() + subgroups * kRows * 2 * (has_offsets ? 2 : 1); }
  int groups() const { return k / kBlock; }
  const uint8_t* block(int strip, int group) const {
    return blocks + (static_cast<size_t>(strip) * groups() + group) * block_bytes();
  }
};

struct RmsNorm {
  const float* weight = nullptr;  // null: none
  float eps = 0;
  float plus = 0;                 // added to the weight
};

struct Epilogue {
  Activation gate = Activation::kNone;  // act(gate) * up
  const float* bias = nullptr;          // [n], or the gate's and then the up's [2 n]
  RmsNorm norm;                         // [n], over what comes before it
  const float* residual = nullptr;      // [m, n]; may be the output itself
};

void QuantizedMatmul(const float* x, int m, const Weight& w, const RmsNorm& before, const Epilogue& after, float* y);

// y [count, k] = W[ids]; ids outside [0, n) give NaN.
void QuantizedRows(const int32_t* ids, int count, const Weight& w, float* y);

}  // namespace pallas_kernels
