// y[T, N] = x[T, K] w[N, K]^T on weights stored in panels: kPanel output features side by side, feature after
// feature of the input. A row of x is then read one number at a time, so even long rows stay in cache.
//
// Every sum runs over k = 0, 1, ... K - 1 in one lane, whatever T and the row's neighbours are.

#pragma once

#include <algorithm>

#include "pool.h"
#include "vector.h"

namespace {

constexpr int kPanel = 2 * kLanes;

struct Pair {
  Vec low, high;  // output features [0, kLanes) and [kLanes, kPanel) of a panel
};

inline Pair load_pair(const float* p) { return {load(p), load(p + kLanes)}; }

// bfloat16 panels interleave their halves: one load, a shift and a mask make both.
inline Pair load_pair(const bf16* p) {
  UintVec both;
  std::memcpy(&both, p, sizeof both);
  return {(Vec)(both << 16), (Vec)(both & 0xFFFF0000u)};
}

inline int64_t place(const float*, int64_t lane) { return lane; }
inline int64_t place(const bf16*, int64_t lane) { return lane < kLanes ? 2 * lane : 2 * (lane - kLanes) + 1; }

inline int64_t num_panels(int64_t N) { return (N + kPanel - 1) / kPanel; }

// w[N, K] into panels; features beyond N are zero.
template <class W>
void pack(const W* w, W* panels, int64_t N, int64_t K) {
  for (int64_t p = 0; p < num_panels(N); ++p)
    for (int64_t lane = 0; lane < kPanel; ++lane) {
      const int64_t n = p * kPanel + lane;
      W* out = panels + p * K * kPanel + place(w, lane);
      for (int64_t k = 0; k < K; ++k) out[k * kPanel] = n < N ? w[n * K + k] : W{};
    }
}

// Row `ids[t]` of the packed w, as float32: an embedding.
template <class W>
void unpack_rows(const W* panels, const int64_t* ids, float* y, int64_t T, int64_t K) {
  for (int64_t t = 0; t < T; ++t) {
    const W* row = panels + ids[t] / kPanel * K * kPanel + place(panels, ids[t] % kPanel);
    for (int64_t k = 0; k < K; ++k) y[t * K + k] = to_float(row[k * kPanel]);
  }
}

struct Output {
  float* y;
  const float* bias;
  int64_t N;
  bool accumulate;

  void put(int64_t t, int64_t n, Vec value) const {
    float* out = y + t * N + n;
    if (n + kLanes <= N) {
      if (bias) value += load(bias + n);
      store(out, accumulate ? load(out) + value : value);
      return;
    }
    for (int64_t i = 0; n + i < N; ++i) {
      const float one = value[i] + (bias ? bias[n + i] : 0.f);
      out[i] = accumulate ? out[i] + one : one;
    }
  }
};

constexpr int64_t kLine = 64;

// Weights to bring to the second-level cache while others are used: one line from `from` on every `every` steps of k.
struct Ahead {
  const char* from;
  int64_t every;
};

// TB rows of x from row t against PB panels from panel p.
template <int TB, int PB, class W>
inline void tile(const float* x, const W* panels, const Output& out, int64_t t, int64_t p, int64_t K, Ahead ahead) {
  Vec low[TB][PB] = {}, high[TB][PB] = {};
  const float* rows = x + t * K;
  const W* w = panels + p * K * kPanel;
  for (int64_t start = 0; start < K; start += ahead.every) {
    __builtin_prefetch(ahead.from, 0, 2);
    ahead.from += kLine;
    const int64_t end = start + ahead.every < K ? start + ahead.every : K;
    for (int64_t k = start; k < end; ++k) {
      Pair weights[PB];
      for (int b = 0; b < PB; ++b) weights[b] = load_pair(w + (b * K + k) * kPanel);
      for (int r = 0; r < TB; ++r) {
        const Vec value = splat(rows[r * K + k]);
        for (int b = 0; b < PB; ++b) {
          low[r][b] = fused(value, weights[b].low, low[r][b]);
          high[r][b] = fused(value, weights[b].high, high[r][b]);
        }
      }
    }
  }
  for (int r = 0; r < TB; ++r)
    for (int b = 0; b < PB; ++b) {
      out.put(t + r, (p + b) * kPanel, low[r][b]);
      if ((p + b) * kPanel + kLanes < out.N) out.put(t + r, (p + b) * kPanel + kLanes, high[r][b]);
    }
}

template <int TB, int PB, class W>
inline void panels_of(const float* x, const W* panels, const Output& out, int64_t t, int64_t p0, int64_t p1,
                      int64_t K, Ahead ahead) {
  int64_t p = p0;
  for (; p + PB <= p1; p += PB) tile<TB, PB, W>(x, panels, out, t, p, K, ahead);
  for (; p < p1; ++p) tile<TB, 1, W>(x, panels, out, t, p, K, ahead);
}

// Few rows are bound by memory, whose own prefetching is best left alone; many are not, and ask a panel ahead of use.
template <class W>
void linear(const float* x, const W* panels, const Output& out, int64_t T, int64_t K) {
  constexpr int64_t kRows = 6;  // 12 sums, 2 weights and a value: 15 of 16 registers
  const bool is_few = T < 4;
  const int64_t per_item = is_few ? 4 : 1, all = num_panels(out.N), row_blocks = (T + kRows - 1) / kRows;
  const int64_t bytes = K * kPanel * sizeof(W), lines = (bytes + kLine - 1) / kLine;
  const int64_t every = is_few ? K : std::max<int64_t>(1, row_blocks * K / lines);
  Pool& pool = Pool::instance();
  pool.run((all + per_item - 1) / per_item, [&](int64_t item) {
    const int64_t p0 = item * per_item, p1 = std::min(p0 + per_item, all);
    const int64_t next = std::min(p0 + pool.size() * per_item, all - 1);  // those between go to other threads
    for (int64_t b = 0; b < row_blocks; ++b) {
      const int64_t t = T * b / row_blocks;
      const Ahead ahead{reinterpret_cast<const char*>(panels) + next * bytes + bytes * b / row_blocks, every};
      switch (T * (b + 1) / row_blocks - t) {  // blocks as even as they can be: short ones waste the multipliers
        case 1: panels_of<1, 4, W>(x, panels, out, t, p0, p1, K, ahead); break;
        case 2: panels_of<2, 2, W>(x, panels, out, t, p0, p1, K, ahead); break;
        case 3: panels_of<3, 2, W>(x, panels, out, t, p0, p1, K, ahead); break;
        case 4: panels_of<4, 1, W>(x, panels, out, t, p0, p1, K, ahead); break;
        case 5: panels_of<5, 1, W>(x, panels, out, t, p0, p1, K, ahead); break;
        default: panels_of<6, 1, W>(x, panels, out, t, p0, p1, K, ahead); break;
      }
    }
  });
}

}  // namespace
