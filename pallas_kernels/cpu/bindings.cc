// XLA FFI handlers: buffers and attributes in, checked, handed to the kernels.
#include <algorithm>

#include "xla/ffi/api/ffi.h"

#include "attention.h"
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
                  float norm_eps, float norm_plus, bool has_bias, bool has_out_norm,
                  float out_norm_eps, float out_norm_plus, bool has_residual) {
  const int strips = static_cast<int>(blocks.dimensions()[0]);
  const Weight w{blocks.typed_data(), strips, n, k, bits, subgroups, has_offsets, zero, gain};
  if (!Holds(w, blocks)) return Invalid("quantized_matmul: blocks do not match their layout");
  const int m = static_cast<int>(x.dimensions()[0]);
  RmsNorm before{nullptr, norm_eps, norm_plus};
  Epilogue after;
  after.norm = {nullptr, out_norm_eps, out_norm_plus};
  after.gate = static_cast<Activation>(gate);
  size_t next = 0;
  auto take = [&](const float*& to, size_t elements) {
    auto buffer = rest.get<F32>(next++);
    if (!buffer.has_value() || buffer->element_count() != elements) return false;
    to = buffer->typed_data();
    return true;
  };
  const bool gated = after.gate != Activation::kNone;
  if (has_norm && !take(before.weight, k)) return Invalid("quantized_matmul: norm must be [K]");
  if (has_bias && !take(after.bias, gated ? 2 * n : n)) return Invalid("quantized_matmul: bias has a wrong size");
  if (has_out_norm && !take(after.norm.weight, n)) return Invalid("quantized_matmul: out_norm must be [N]");
  if (has_residual && !take(after.residual, static_cast<size_t>(m) * n)) return Invalid("quantized_matmul: residual must be [M, N]");
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

using S32 = ffi::Buffer<ffi::S32>;

// Shapes as declared; false where they do not fit the kernels. The pages are written where the call aliases them.
bool Describe(const ffi::AnyBuffer& keys, const ffi::AnyBuffer& values, Cache* cache) {
  const auto k = keys.dimensions(), v = values.dimensions();
  const auto type = keys.element_type();
  if (k.size() != 4 || v.size() != 4 || type != values.element_type() || (type != ffi::F32 && type != ffi::F16)) return false;
  *cache = {keys.untyped_data(), values.untyped_data(), type == ffi::F16, static_cast<int>(k[0]), static_cast<int>(k[1]),
            static_cast<int>(k[2]), static_cast<int>(k[3])};
  const bool sizes = cache->head_dim % 16 == 0 && (k[3] == 16 || k[3] == 32 || k[3] == 64 || k[3] == 128);
  return sizes && v[0] == k[0] && v[1] == k[1] && v[2] == k[3] && v[3] == k[2];
}

Sequences Describe(const S32& page_table, const S32& kv_lens, const S32& cu_q_lens, const S32& num_seqs, bool decode, int64_t tokens) {
  const int count = std::clamp(num_seqs.typed_data()[0], 0, static_cast<int>(kv_lens.element_count()));
  return {page_table.typed_data(), static_cast<int>(page_table.dimensions()[1]), kv_lens.typed_data(),
          decode ? nullptr : cu_q_lens.typed_data(), count, static_cast<int>(tokens)};
}

ffi::Error PagedAttention(F32 q, ffi::AnyBuffer keys, ffi::AnyBuffer values, S32 page_table, S32 kv_lens, S32 cu_q_lens,
                          S32 num_seqs, ffi::Result<F32> out, bool decode, float scale, int32_t window, float soft_cap) {
  Cache cache;
  const auto d = q.dimensions();
  if (!Describe(keys, values, &cache) || d.size() != 3 || d[2] != cache.head_dim || d[1] % cache.kv_heads)
    return Invalid("paged_attention: shapes do not fit");
  const Heads queries{q.typed_data(), static_cast<size_t>(d[1] * d[2])};
  const Sequences sequences = Describe(page_table, kv_lens, cu_q_lens, num_seqs, decode, d[0]);
  Attend(queries, static_cast<int>(d[1]), cache, sequences, {scale, window, soft_cap}, out->typed_data());
  return ffi::Error::Success();
}

ffi::Error WriteKv(ffi::AnyBuffer, ffi::AnyBuffer, F32 k, F32 v, S32 pages, S32 offsets, ffi::Result<ffi::AnyBuffer> keys,
                   ffi::Result<ffi::AnyBuffer> values) {
  Cache cache;
  const auto d = k.dimensions();
  if (!Describe(*keys, *values, &cache) || d.size() != 3 || d[1] != cache.kv_heads || d[2] != cache.head_dim)
    return Invalid("write_kv: shapes do not fit");
  const size_t stride = d[1] * d[2];
  WriteCache(cache, {k.typed_data(), stride}, {v.typed_data(), stride}, pages.typed_data(), offsets.typed_data(), static_cast<int>(d[0]));
  return ffi::Error::Success();
}

// rest: the queries' and the keys' norms, if any.
ffi::Error AttendQkv(F32 qkv, F32 cos, F32 sin, ffi::AnyBuffer, ffi::AnyBuffer, S32 pages, S32 offsets, S32 page_table,
                     S32 kv_lens, S32 cu_q_lens, S32 num_seqs, ffi::RemainingArgs rest, ffi::Result<F32> out,
                     ffi::Result<ffi::AnyBuffer> keys, ffi::Result<ffi::AnyBuffer> values, bool decode, float scale,
                     int32_t window, float soft_cap, float norm_eps, float norm_plus) {
  Cache cache;
  const auto d = qkv.dimensions(), o = out->dimensions();
  if (!Describe(*keys, *values, &cache) || d.size() != 2 || o.size() != 2 || o[1] % (cache.kv_heads * cache.head_dim) ||
      d[1] != o[1] + 2 * cache.kv_heads * cache.head_dim || static_cast<int64_t>(cos.element_count()) * 2 != d[0] * cache.head_dim)
    return Invalid("attend_qkv: shapes do not fit");
  const int heads = static_cast<int>(o[1]) / cache.head_dim, tokens = static_cast<int>(d[0]);
  const size_t stride = d[1], kv = static_cast<size_t>(cache.kv_heads) * cache.head_dim;
  Heads q{qkv.typed_data(), stride, nullptr, norm_eps, norm_plus, cos.typed_data(), sin.typed_data()}, k = q;
  k.data += o[1];
  if (rest.size() == 2) {
    auto q_norm = rest.get<F32>(0), k_norm = rest.get<F32>(1);
    if (!q_norm.has_value() || !k_norm.has_value()) return Invalid("attend_qkv: norms must be float32");
    q.norm = q_norm->typed_data();
    k.norm = k_norm->typed_data();
  }
  const Heads v{k.data + kv, stride};
  WriteCache(cache, k, v, pages.typed_data(), offsets.typed_data(), tokens);
  const Sequences sequences = Describe(page_table, kv_lens, cu_q_lens, num_seqs, decode, tokens);
  Attend(q, heads, cache, sequences, {scale, window, soft_cap}, out->typed_data());
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
                                  .Attr<bool>("has_out_norm")
                                  .Attr<float>("out_norm_eps")
                                  .Attr<float>("out_norm_plus")
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

XLA_FFI_DEFINE_HANDLER_SYMBOL(PallasKernelsPagedAttention, pallas_kernels::PagedAttention,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<bool>("decode")
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("window")
                                  .Attr<float>("soft_cap"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(PallasKernelsWriteKv, pallas_kernels::WriteKv,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(PallasKernelsAttendQkv, pallas_kernels::AttendQkv,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("decode")
                                  .Attr<float>("scale")
                                  .Attr<int32_t>("window")
                                  .Attr<float>("soft_cap")
                                  .Attr<float>("norm_eps")
                                  .Attr<float>("norm_plus"));
