// XLA FFI handlers: buffers and attributes in, checked, handed to the kernels.
#include "xla/ffi/api/ffi.h"

#include "parallel.h"
#include "quantized_matmul.h"

namespace ffi = xla::ffi;

namespace pallas_kernels {
namespace {

using F32 = ffi::Buffer<ffi::F32>;

ffi::Error Invalid(const char* what) { return ffi::Error::InvalidArgument(what); }

bool Holds(const Weight& w, const ffi::Buffer<ffi::U8>& blocks) {
  const auto d = blocks.dimensions();
  return d.size() == 3 && d[1] == w.groups() && d[2] == w.block_bytes() && w.k % kBlock == 0 &&
         (w.subgroups == 1 || (w.subgroups == 2 && w.bits >= 6));
}

// The optional operands come in this order, each if its flag is set.
ffi::Error Matmul(F32 x, ffi::Buffer<ffi::U8> blocks, ffi::RemainingArgs rest, ffi::Result<F32> y, int32_t n, int32_t k,
                  int32_t bits, int32_t subgroups, bool has_offsets, float zero, float gain, int32_t gate, bool has_norm,
                  float norm_eps, float norm_plus, bool has_bias, bool has_residual) {
  const int strips = static_cast<int>(blocks.dimensions()[0]);
  const Weight w{blocks.typed_data(), strips, n, k, bits, subgroups, has_offsets, zero, gain};
  if (!Holds(w, blocks)) return Invalid("quantized_matmul: blocks do not match their layout");
  const int m = static_cast<int>(x.dimensions()[0]);
  Prologue before;
  Epilogue after;
  after.gate = static_cast<Activation>(gate);
  size_t next = 0;
  auto take = [&](const float*& to, size_t elements) {
    auto buffer = rest.get<F32>(next++);
    if (!buffer.has_value() || buffer->element_count() != elements) return false;
    to = buffer->typed_data();
    return true;
  };
  const bool gated = after.gate != Activation::kNone;
  if (has_norm && !take(before.norm, k)) return Invalid("quantized_matmul: norm must be [K]");
  if (has_bias && !take(after.bias, gated ? 2 * n : n)) return Invalid("quantized_matmul: bias has a wrong size");
  if (has_residual && !take(after.residual, static_cast<size_t>(m) * n)) return Invalid("quantized_matmul: residual must be [M, N]");
  before.eps = norm_eps;
  before.plus = norm_plus;
  QuantizedMatmul(x.typed_data(), m, w, before, after, y->typed_data());
  return ffi::Error::Success();
}

ffi::Error Rows(ffi::Buffer<ffi::S32> ids, ffi::Buffer<ffi::U8> blocks, ffi::Result<F32> y, int32_t n, int32_t k,
                int32_t bits, int32_t subgroups, bool has_offsets, float zero, float gain) {
  const int strips = static_cast<int>(blocks.dimensions()[0]);
  const Weight w{blocks.typed_data(), strips, n, k, bits, subgroups, has_offsets, zero, gain};
  if (!Holds(w, blocks)) return Invalid("quantized_rows: blocks do not match their layout");
  QuantizedRows(ids.typed_data(), static_cast<int>(ids.element_count()), w, y->typed_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace pallas_kernels

extern "C" void PallasKernelsSetThreads(int threads) { pallas_kernels::Pool::Get().SetThreads(threads); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(PallasKernelsQuantizedMatmul, pallas_kernels::Matmul,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("n")
                                  .Attr<int32_t>("k")
                                  .Attr<int32_t>("bits")
                                  .Attr<int32_t>("subgroups")
                                  .Attr<bool>("has_offsets")
                                  .Attr<float>("zero")
                                  .Attr<float>("gain")
                                  .Attr<int32_t>("gate")
                                  .Attr<bool>("has_norm")
                                  .Attr<float>("norm_eps")
                                  .Attr<float>("norm_plus")
                                  .Attr<bool>("has_bias")
                                  .Attr<bool>("has_residual"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PallasKernelsQuantizedRows, pallas_kernels::Rows,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int32_t>("n")
                                  .Attr<int32_t>("k")
                                  .Attr<int32_t>("bits")
                                  .Attr<int32_t>("subgroups")
                                  .Attr<bool>("has_offsets")
                                  .Attr<float>("zero")
                                  .Attr<float>("gain"));
