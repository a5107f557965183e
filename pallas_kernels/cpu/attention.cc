#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "parallel.h"
#include "vec.h"

namespace pallas_kernels {
namespace {

// Softmax is taken over blocks of 64 tokens (or a page) inside chunks of 256, both at fixed places of a sequence, and
// chunks are merged in order: the same sums whatever else is in the batch and however the work is cut.
constexpr int kBlock = 64, kChunk = 256;
constexpr int kTileRows = 48;  // queries (tokens times heads of a group) that share a tile
constexpr int kMaxBlock = 128;
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Half {
  uint16_t bits;
};

PALLAS_KERNELS_INLINE F8 LoadAs(const float* p) { return Load(p); }
PALLAS_KERNELS_INLINE F8 LoadAs(const Half* p) { return Halves(p); }
inline void StoreAs(float* p, float x) { *p = x; }
inline void StoreAs(Half* p, float x) { p->bits = ToHalf(x); }

// c [kR, 8 kV] (+)= a [kR, depth] @ b [depth, 8 kV]. Meanwhile the same part of `next` is fetched: a page is read once in
// a step, and too short for the hardware to see it coming.
template <int kR, int kV, typename B>
void Micro(const float* a, int lda, const B* b, const B* next, int ldb, int depth, float* c, int ldc, bool add) {
  F8 acc[kR][kV];
  for (int r = 0; r < kR; ++r)
    for (int v = 0; v < kV; ++v) acc[r][v] = add ? Load(c + r * ldc + 8 * v) : Splat(0.0f);
  for (int d = 0; d < depth; ++d, b += ldb, next += ldb) {
    for (int v = 0; v < kV * 8; v += 64 / sizeof(B)) __builtin_prefetch(next + v);
    if constexpr (kR < kV) {  // the order that keeps everything in 16 registers
      F8 x[kR];
      for (int r = 0; r < kR; ++r) x[r] = Splat(a[r * lda + d]);
      for (int v = 0; v < kV; ++v) {
        const F8 row = LoadAs(b + 8 * v);
        for (int r = 0; r < kR; ++r) acc[r][v] = Fma(x[r], row, acc[r][v]);
      }
    } else {
      F8 row[kV];
      for (int v = 0; v < kV; ++v) row[v] = LoadAs(b + 8 * v);
      for (int r = 0; r < kR; ++r) {
        const F8 x = Splat(a[r * lda + d]);
        for (int v = 0; v < kV; ++v) acc[r][v] = Fma(x, row[v], acc[r][v]);
      }
    }
  }
  for (int r = 0; r < kR; ++r)
    for (int v = 0; v < kV; ++v) Store(c + r * ldc + 8 * v, acc[r][v]);
}

template <int kR, typename B>
void Panel(const float* a, int lda, const B* b, const B* next, int ldb, int depth, float* c, int ldc, int columns, bool add) {
  int n = 0;
  if constexpr (kR <= 3) {
    for (; n + 32 <= columns; n += 32) Micro<kR, 4>(a, lda, b + n, next + n, ldb, depth, c + n, ldc, add);
  }
  for (; n < columns; n += 16) Micro<kR, 2>(a, lda, b + n, next + n, ldb, depth, c + n, ldc, add);
}

// c [rows, columns] (+)= a [rows, depth] @ b [depth, columns]; columns a multiple of 16.
template <typename B>
void Multiply(const float* a, int lda, const B* b, const B* next, int ldb, int depth, float* c, int ldc, int rows, int columns,
              bool add) {
  for (int panels = (rows + 5) / 6; panels > 0; --panels) {
    const int height = (rows + panels - 1) / panels;
    switch (height) {
      case 1: Panel<1>(a, lda, b, next, ldb, depth, c, ldc, columns, add); break;
      case 2: Panel<2>(a, lda, b, next, ldb, depth, c, ldc, columns, add); break;
      case 3: Panel<3>(a, lda, b, next, ldb, depth, c, ldc, columns, add); break;
      case 4: Panel<4>(a, lda, b, next, ldb, depth, c, ldc, columns, add); break;
      case 5: Panel<5>(a, lda, b, next, ldb, depth, c, ldc, columns, add); break;
      default: Panel<6>(a, lda, b, next, ldb, depth, c, ldc, columns, add);
    }
    next = b;  // fetched by now
    rows -= height;
    a += height * lda;
    c += height * ldc;
  }
}

// One head of one token, normalised, rotated and scaled.
void LoadHead(const Heads& heads, int token, int head, int dim, float scale, float* out) {
  const float* x = heads.data + token * heads.stride + static_cast<size_t>(head) * dim;
  float factor = scale;
  if (heads.norm) {
    F8 square = Splat(0.0f);
    for (int i = 0; i < dim; i += 8) square = Fma(Load(x + i), Load(x + i), square);
    factor *= 1.0f / std::sqrt(Sum(square) / static_cast<float>(dim) + heads.eps);
  }
  for (int i = 0; i < dim; i += 8) {
    F8 v = Load(x + i) * factor;
    if (heads.norm) v *= Load(heads.norm + i) + heads.plus;
    Store(out + i, v);
  }
  if (!heads.cos) return;
  const int half = dim / 2;
  const float *cos = heads.cos + static_cast<size_t>(token) * half, *sin = heads.sin + static_cast<size_t>(token) * half;
  for (int i = 0; i < half; i += 8) {
    const F8 first = Load(out + i), second = Load(out + half + i), c = Load(cos + i), s = Load(sin + i);
    Store(out + i, first * c - second * s);
    Store(out + half + i, second * c + first * s);
  }
}

// A tile: query tokens of one sequence times the heads of one group, over part of the sequence's chunks.
struct Item {
  int sequence;
  int token;        // first query token, flat
  int tokens;
  int position;     // of the first query token
  int kv_head;
  int begin, end;   // keys any of its queries sees
  int chunk;        // the one chunk to do, its result kept apart; -1: all
  size_t partial;   // where, in floats
};

struct Softmax {
  float top, sum;  // sum 0: nothing yet
};

// Scratch of a thread. Sequences are padded to the tile's height.
struct Scratch {
  std::vector<float> q, scores, part, total;
  std::vector<Softmax> part_sums, total_sums;
};

template <typename P>
struct Worker {
  const Heads& queries;
  const int group;
  const Cache& cache;
  const Sequences& sequences;
  const Scoring& scoring;
  float* out;
  float* partials;
  const int dim = cache.head_dim, size = cache.page_size, block = std::max(kBlock, cache.page_size);

  int Height(const Item& item) const { return item.tokens * group; }

  const P* Page(const void* base, int sequence, int page, int kv_head) const {
    const int id = std::clamp(sequences.page_table[static_cast<size_t>(sequence) * sequences.width + page], 0, cache.pages - 1);
    return static_cast<const P*>(base) + (static_cast<size_t>(id) * cache.kv_heads + kv_head) * dim * size;
  }

  void LoadQueries(const Item& item, float* q) const {
    for (int t = 0; t < item.tokens; ++t)
      for (int g = 0; g < group; ++g, q += dim)
        LoadHead(queries, item.token + t, item.kv_head * group + g, dim, scoring.scale, q);
  }

  // Keys [first, last) of a block that a query at `position` sees, as columns of the block.
  void Visible(int start, int columns, int position, int* first, int* last) const {
    *first = scoring.window ? std::clamp(position - scoring.window + 1 - start, 0, columns) : 0;
    *last = std::clamp(position + 1 - start, 0, columns);
  }

  // Turns a row of scores into weights; returns the factor for what was summed before.
  float Weigh(float* s, int columns, int first, int last, Softmax* state) const {
    if (first >= last) {
      std::fill(s, s + columns, 0.0f);
      return 1.0f;
    }
    if (scoring.soft_cap > 0) {
      const float cap = scoring.soft_cap;
      for (int c = 0; c < columns; c += 8) Store(s + c, cap * Tanh(Load(s + c) * (1.0f / cap)));
    }
    std::fill(s, s + first, kNone);
    std::fill(s + last, s + columns, kNone);
    F8 high = Splat(state->top);
    for (int c = 0; c < columns; c += 8) high = Max(Load(s + c), high);
    float top = high[0];
    for (int i = 1; i < 8; ++i) top = std::max(top, high[i]);
    F8 sum = Splat(0.0f);
    for (int c = 0; c < columns; c += 8) {
      const F8 weight = Exp(Load(s + c) - top);
      Store(s + c, weight);
      sum += weight;
    }
    const float factor = state->top == top ? 1.0f : std::exp(state->top - top);
    state->top = top;
    state->sum = state->sum * factor + Sum(sum);
    return factor;
  }

  // One block of keys for all queries of a tile: updates o [height, dim] and its sums.
  void Block(const Item& item, int begin, int end, const float* q, float* scores, float* o, Softmax* sums) const {
    const int height = Height(item);
    const int from = begin / size * size, columns = (end + size - 1) / size * size - from;
    for (int at = from; at < end; at += size) {
      const P* keys = Page(cache.keys, item.sequence, at / size, item.kv_head);
      const P* values = Page(cache.values, item.sequence, at / size, item.kv_head);
      Multiply(q, dim, keys, values, size, dim, scores + (at - from), kMaxBlock, height, size, false);
    }
    for (int r = 0; r < height; ++r) {
      int first, last;
      Visible(from, columns, item.position + r / group, &first, &last);
      const float factor = Weigh(scores + r * kMaxBlock, columns, first, last, &sums[r]);
      if (factor == 1.0f) continue;
      for (int d = 0; d < dim; d += 8) Store(o + r * dim + d, Load(o + r * dim + d) * factor);
    }
    for (int at = from; at < end; at += size) {
      const P* values = Page(cache.values, item.sequence, at / size, item.kv_head);
      const int first = std::max(begin, at), last = std::min(end, at + size);
      const P* next = at + block < item.end ? Page(cache.keys, item.sequence, (at + block) / size, item.kv_head) : values;
      Multiply(scores + (first - from), kMaxBlock, values + (first - at) * dim, next, dim, last - first, o, dim, height, dim, true);
    }
  }

  void Chunk(const Item& item, int chunk, const float* q, float* scores, float* o, Softmax* sums) const {
    const int height = Height(item);
    std::fill(o, o + height * dim, 0.0f);
    std::fill(sums, sums + height, Softmax{kNone, 0.0f});
    const int begin = std::max(item.begin, chunk * kChunk), end = std::min(item.end, (chunk + 1) * kChunk);
    for (int start = begin / block * block; start < end; start += block)
      Block(item, std::max(begin, start), std::min(end, start + block), q, scores, o, sums);
  }

  // total += part, rescaled to the larger maximum.
  void Merge(int height, const float* part, const Softmax* part_sums, float* total, Softmax* total_sums) const {
    for (int r = 0; r < height; ++r, part += dim, total += dim) {
      Softmax &to = total_sums[r], from = part_sums[r];
      if (from.sum == 0) continue;
      const float top = std::max(to.top, from.top), keep = std::exp(to.top - top), take = std::exp(from.top - top);
      for (int d = 0; d < dim; d += 8) Store(total + d, Fma(Load(part + d), Splat(take), Load(total + d) * keep));
      to = {top, to.sum * keep + from.sum * take};
    }
  }

  void Finish(const Item& item, const float* total, const Softmax* sums) const {
    const size_t stride = static_cast<size_t>(cache.kv_heads) * group * dim;
    for (int r = 0; r < Height(item); ++r, total += dim) {
      float* to = out + (item.token + r / group) * stride + static_cast<size_t>(item.kv_head * group + r % group) * dim;
      const float inverse = sums[r].sum == 0 ? 0.0f : 1.0f / sums[r].sum;
      for (int d = 0; d < dim; d += 8) Store(to + d, Load(total + d) * inverse);
    }
  }

  Scratch& Prepare(int height) const {
    static thread_local Scratch scratch;
    scratch.q.resize(height * dim);
    scratch.part.resize(height * dim);
    scratch.total.assign(height * dim, 0.0f);
    scratch.scores.resize(height * kMaxBlock);
    scratch.part_sums.resize(height);
    scratch.total_sums.assign(height, Softmax{kNone, 0.0f});
    return scratch;
  }

  void Run(const Item& item) const {
    const int height = Height(item);
    Scratch& s = Prepare(height);
    LoadQueries(item, s.q.data());
    if (item.chunk >= 0) {
      float* o = partials + item.partial;
      Chunk(item, item.chunk, s.q.data(), s.scores.data(), o, reinterpret_cast<Softmax*>(o + height * dim));
      return;
    }
    for (int chunk = item.begin / kChunk; chunk * kChunk < item.end; ++chunk) {
      Chunk(item, chunk, s.q.data(), s.scores.data(), s.part.data(), s.part_sums.data());
      Merge(height, s.part.data(), s.part_sums.data(), s.total.data(), s.total_sums.data());
    }
    Finish(item, s.total.data(), s.total_sums.data());
  }

  // Merges the chunks of a split tile; `item` is the first of its `count`.
  void Join(const Item* item, int count) const {
    const int height = Height(*item);
    Scratch& s = Prepare(height);
    for (int i = 0; i < count; ++i) {
      const float* o = partials + item[i].partial;
      Merge(height, o, reinterpret_cast<const Softmax*>(o + height * dim), s.total.data(), s.total_sums.data());
    }
    Finish(*item, s.total.data(), s.total_sums.data());
  }
};

std::vector<Item> Tiles(const Sequences& sequences, int group, const Cache& cache, int window) {
  std::vector<Item> items;
  const int step = std::max(1, kTileRows / group);
  for (int i = 0; i < sequences.count; ++i) {
    const int begin = sequences.cu_q_lens ? sequences.cu_q_lens[i] : i, end = sequences.cu_q_lens ? sequences.cu_q_lens[i + 1] : i + 1;
    const int context = std::clamp(sequences.kv_lens[i], 0, sequences.width * cache.page_size);
    for (int token = begin; token < end; token += step) {
      const int tokens = std::min(step, end - token), position = context - (end - token);
      const int first = window ? std::max(0, position - window + 1) : 0, last = std::max(0, position + tokens);
      for (int kv_head = 0; kv_head < cache.kv_heads; ++kv_head)
        items.push_back({i, token, tokens, position, kv_head, first, last, -1, 0});
    }
  }
  return items;
}

int Chunks(const Item& item) { return item.end > item.begin ? (item.end - 1) / kChunk - item.begin / kChunk + 1 : 0; }

// Cuts tiles into chunks where there are too few of them, or some much longer than others.
std::vector<Item> Split(const std::vector<Item>& tiles, int group, int dim, int threads, size_t* floats) {
  std::vector<Item> items;
  *floats = 0;
  for (const Item& tile : tiles) {
    const int chunks = Chunks(tile);
    if (threads == 1 || chunks <= 1 || (static_cast<int>(tiles.size()) >= 8 * threads && chunks <= 8)) {
      items.push_back(tile);
      continue;
    }
    for (int i = 0; i < chunks; ++i) {
      Item part = tile;
      part.chunk = tile.begin / kChunk + i;
      part.partial = *floats;
      *floats += static_cast<size_t>(tile.tokens) * group * (dim + 2);
      items.push_back(part);
    }
  }
  return items;
}

template <typename P>
void AttendAs(const Heads& queries, int heads, const Cache& cache, const Sequences& sequences, const Scoring& scoring, float* out) {
  static thread_local std::vector<float> partials;
  Pool& pool = Pool::Get();
  const int group = heads / cache.kv_heads;
  size_t floats = 0;
  const std::vector<Item> items = Split(Tiles(sequences, group, cache, scoring.window), group, cache.head_dim, pool.threads(), &floats);
  partials.resize(floats);
  const Worker<P> worker{queries, group, cache, sequences, scoring, out, partials.data()};
  pool.For(static_cast<int>(items.size()), [&](int i) { worker.Run(items[i]); });
  for (size_t i = 0; i < items.size();) {
    const int count = items[i].chunk < 0 ? 1 : Chunks(items[i]);
    if (items[i].chunk >= 0) worker.Join(&items[i], count);
    i += count;
  }
  const int used = sequences.count == 0 ? 0 : sequences.cu_q_lens ? sequences.cu_q_lens[sequences.count] : sequences.count;
  const size_t stride = static_cast<size_t>(heads) * cache.head_dim;
  std::fill(out + used * stride, out + sequences.tokens * stride, 0.0f);
}

// Keys of one run of tokens with neighbouring places in a page, so that stores are as contiguous as the layout allows.
template <typename P>
void WriteRun(const Cache& cache, const Heads& keys, const Heads& values, int begin, int end, int page, int offset) {
  const int dim = cache.head_dim, size = cache.page_size;
  static thread_local std::vector<float> rows;
  rows.resize(static_cast<size_t>(end - begin) * dim);
  for (int head = 0; head < cache.kv_heads; ++head) {
    const size_t base = (static_cast<size_t>(page) * cache.kv_heads + head) * dim * size;
    for (int t = begin; t < end; ++t) LoadHead(keys, t, head, dim, 1.0f, &rows[static_cast<size_t>(t - begin) * dim]);
    P* to = static_cast<P*>(cache.keys) + base + offset;
    for (int d = 0; d < dim; ++d, to += size)
      for (int t = 0; t < end - begin; ++t) StoreAs(to + t, rows[static_cast<size_t>(t) * dim + d]);
    for (int t = begin; t < end; ++t) {
      LoadHead(values, t, head, dim, 1.0f, rows.data());
      P* line = static_cast<P*>(cache.values) + base + static_cast<size_t>(offset + t - begin) * dim;
      for (int d = 0; d < dim; ++d) StoreAs(line + d, rows[d]);
    }
  }
}

template <typename P>
void WriteAs(const Cache& cache, const Heads& keys, const Heads& values, const int32_t* pages, const int32_t* offsets, int tokens) {
  auto write = [&](int begin, int end) {
    for (int t = begin, next; t < end; t = next) {
      next = t + 1;
      while (next < end && pages[next] == pages[t] && offsets[next] == offsets[next - 1] + 1) ++next;
      const bool inside = pages[t] >= 0 && pages[t] < cache.pages && offsets[t] >= 0 && offsets[next - 1] < cache.page_size;
      if (inside) WriteRun<P>(cache, keys, values, t, next, pages[t], offsets[t]);
    }
  };
  constexpr int kRun = 16;
  if (tokens <= kRun) return write(0, tokens);
  Pool::Get().For((tokens + kRun - 1) / kRun, [&](int i) { write(i * kRun, std::min(tokens, (i + 1) * kRun)); });
}

}  // namespace

void WriteCache(const Cache& cache, const Heads& keys, const Heads& values, const int32_t* pages, const int32_t* offsets, int tokens) {
  if (cache.half) WriteAs<Half>(cache, keys, values, pages, offsets, tokens);
  else WriteAs<float>(cache, keys, values, pages, offsets, tokens);
}

void Attend(const Heads& queries, int heads, const Cache& cache, const Sequences& sequences, const Scoring& scoring, float* out) {
  if (cache.half) AttendAs<Half>(queries, heads, cache, sequences, scoring, out);
  else AttendAs<float>(queries, heads, cache, sequences, scoring, out);
}

}  // namespace pallas_kernels
