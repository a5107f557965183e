// Ragged paged attention and cache writes; shapes and meanings are those of attention.py.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pallas_kernels {

// Keys [pages, kv_heads, head_dim, page_size], values [pages, kv_heads, page_size, head_dim], float or half.
struct Cache {
  void* keys;
  void* values;
  bool half;
  int pages, kv_heads, head_dim, page_size;
};

// Sequences of a projection and what turns them into queries or keys: RMSNorm over the head, then rotation.
struct Heads {
  const float* data;            // token t, head i at data + t * stride + i * head_dim
  size_t stride;
  const float* norm = nullptr;  // [head_dim]; null: none
  float eps = 0, plus = 0;
  const float* cos = nullptr;   // [T, head_dim / 2]; null: no rotation
  const float* sin = nullptr;
};

struct Sequences {
  const int32_t* page_table;  // [B, width]
  int width;
  const int32_t* kv_lens;
  const int32_t* cu_q_lens;   // null: one token each
  int count;                  // that are not padding
  int tokens;                 // T, padding included
};

struct Scoring {
  float scale;
  int window;      // tokens a query sees, itself included; 0: all
  float soft_cap;  // 0: none
};

void WriteCache(const Cache& cache, const Heads& keys, const Heads& values, const int32_t* pages, const int32_t* offsets, int tokens);
void Attend(const Heads& queries, int heads, const Cache& cache, const Sequences& sequences, const Scoring& scoring, float* out);

}  // namespace pallas_kernels
