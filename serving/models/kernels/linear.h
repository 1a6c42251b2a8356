// y[T, N] = x[T, K] w[N, K]^T on weights stored in panels: kPanel output features side by side, feature after
// feature of the input. A row of x is then read one number at a time, so even long rows stay in cache.
//
// Every sum runs over the inputs in one fixed order, in one lane, whatever T and the row's neighbours are.

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "products.h"
#include "vector.h"

namespace {

inline int64_t num_panels(int64_t N) { return (N + kPanel - 1) / kPanel; }

// Where the weight of output feature n and input k lies; K is a multiple of kInputs.
template <class W>
inline int64_t offset(const W*, int64_t n, int64_t k, int64_t K) {
  constexpr int64_t group = Factors<W>::kInputs;
  return n / kPanel * K * kPanel + k / group * group * kPanel + Factors<W>::place(n % kPanel, k % group);
}

// w[N, K] into panels; features beyond N are zero.
template <class W>
void pack(const W* w, W* panels, int64_t N, int64_t K) {
  for (int64_t n = 0; n < num_panels(N) * kPanel; ++n)
    for (int64_t k = 0; k < K; ++k) panels[offset(panels, n, k, K)] = n < N ? w[n * K + k] : W{};
}

// The same in bytes: scales[n] is what w[n, k] is a multiple of, nearly.
template <class W>
void pack_bytes(const W* w, int8_t* panels, float* scales, int64_t N, int64_t K) {
  for (int64_t n = 0; n < num_panels(N) * kPanel; ++n) {
    float most = 0.f;
    for (int64_t k = 0; n < N && k < K; ++k) most = std::max(most, std::fabs(to_float(w[n * K + k])));
    const float scale = most / 127.f;
    for (int64_t k = 0; k < K; ++k)
      panels[offset(panels, n, k, K)] = most > 0.f ? int8_t(std::lrintf(to_float(w[n * K + k]) / scale)) : 0;
    if (n < N) scales[n] = scale;
  }
}

// Row `ids[t]` of the packed w, as float32: an embedding.
template <class W>
void unpack_rows(const W* panels, const int64_t* ids, float* y, int64_t T, int64_t K) {
  for (int64_t t = 0; t < T; ++t)
    for (int64_t k = 0; k < K; ++k) y[t * K + k] = to_float(panels[offset(panels, ids[t], k, K)]);
}

inline const float* as_inputs(const float* x, int64_t, float) { return x; }

#if defined(__AVX512BF16__)
// x[0, count) rounded, in a place of the calling thread that its next call overwrites.
inline const bf16* as_inputs(const float* x, int64_t count, bf16) {
  thread_local std::vector<bf16> rounded;
  if (int64_t(rounded.size()) < count) rounded.resize(count);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t size = count - i < kLanes ? count - i : kLanes;
    const __mmask16 there = __mmask16((1u << size) - 1);
    const __m256bh few = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(there, x + i));
    std::memcpy(rounded.data() + i, &few, size * sizeof(bf16));
  }
  return rounded.data();
}
#endif

struct Output {
  float* y;
  const float* bias;
  int64_t N;
  bool accumulate;
  const float* scales = nullptr;  // of weights in bytes

  void put(int64_t t, int64_t n, Vec value) const {
    float* out = y + t * N + n;
    if (n + kLanes <= N) {
      if (scales) value *= load(scales + n);
      if (bias) value += load(bias + n);
      store(out, accumulate ? load(out) + value : value);
      return;
    }
    for (int64_t i = 0; n + i < N; ++i) {
      const float one = value[i] * (scales ? scales[n + i] : 1.f) + (bias ? bias[n + i] : 0.f);
      out[i] = accumulate ? out[i] + one : one;
    }
  }
};

constexpr int64_t kLine = 64;

// Weights to bring to the second-level cache while others are used: `lines` of them, from `from` on, every `every` steps.
struct Ahead {
  const char* from;
  int64_t every, lines;
};

// TB rows of x from row t against PB panels from panel p. Not inlined: among its callers' own values GCC finds no
// registers for the sums, and 6 rows take the time of 12.
template <int TB, int PB, class W>
[[gnu::noinline]] void tile(const typename Factors<W>::Input* x, const W* panels, const Output& out, int64_t t,
                            int64_t p, int64_t K, Ahead ahead) {
  using F = Factors<W>;
  const int64_t groups = K / F::kInputs;
  Vec low[TB][PB] = {}, high[TB][PB] = {};
  const auto* rows = x + t * K;
  const W* w = panels + p * K * kPanel;
  for (int64_t start = 0; start < groups; start += ahead.every) {
    for (int64_t line = 0; line < ahead.lines; ++line, ahead.from += kLine) __builtin_prefetch(ahead.from, 0, 2);
    const int64_t end = start + ahead.every < groups ? start + ahead.every : groups;
    for (int64_t k = start; k < end; ++k) {
      Pair weights[PB];
      for (int b = 0; b < PB; ++b) weights[b] = F::weights(w + (b * groups + k) * F::kInputs * kPanel);
      for (int r = 0; r < TB; ++r) {
        const Vec value = F::inputs(rows + r * K + k * F::kInputs);
        for (int b = 0; b < PB; ++b) {
          low[r][b] = F::add(value, weights[b].low, low[r][b]);
          high[r][b] = F::add(value, weights[b].high, high[r][b]);
        }
      }
    }
  }
#pragma GCC unroll 16  // or the sums would be kept in memory, to be found by index
  for (int r = 0; r < TB; ++r)
    for (int b = 0; b < PB; ++b) {
      out.put(t + r, (p + b) * kPanel, low[r][b]);
      if ((p + b) * kPanel + kLanes < out.N) out.put(t + r, (p + b) * kPanel + kLanes, high[r][b]);
    }
}

template <int TB, int PB, class W>
inline void panels_of(const typename Factors<W>::Input* x, const W* panels, const Output& out, int64_t t, int64_t p0,
                      int64_t p1, int64_t K, Ahead ahead) {
  int64_t p = p0;
  for (; p + PB <= p1; p += PB) tile<TB, PB, W>(x, panels, out, t, p, K, ahead);
  if constexpr (PB > 1) panels_of<TB, PB - 1, W>(x, panels, out, t, p, p1, K, ahead);
}

#if defined(__AVX512F__)
constexpr int kRows = 12;  // 24 sums, 2 weights and a value: 27 of 32 registers
constexpr int kFew = 3;
#else
constexpr int kRows = 6;  // 12 sums, 2 weights and a value: 15 of 16 registers
constexpr int kFew = 2;
#endif
constexpr int64_t kPerItem = 4;  // panels that a thread takes at a time, at most

// panels_of for `count` rows, 1 to kRows. Few rows take several panels at once, so that memory brings as many streams
// by itself: sums that then find no register cost less than waiting for it.
template <int TB = 1, class W, class... Args>
inline void rows_of(int64_t count, const typename Factors<W>::Input* x, const W* panels, Args... args) {
  if constexpr (TB < kRows) {
    if (count > TB) return rows_of<TB + 1, W>(count, x, panels, args...);
  }
  panels_of<TB, TB <= kFew ? kPerItem : 1, W>(x, panels, args...);
}

// Few rows are bound by memory, whose own prefetching is best left alone; many are not, and ask a panel ahead of use.
template <class W>
void linear(const float* x, const W* panels, const Output& out, int64_t T, int64_t K) {
  const bool is_few = T <= kFew;
  const int64_t all = num_panels(out.N), row_blocks = (T + kRows - 1) / kRows;
  const int64_t bytes = K * kPanel * sizeof(W), lines = (bytes + kLine - 1) / kLine, groups = K / Factors<W>::kInputs;
  const int64_t every = is_few ? groups : std::max<int64_t>(1, row_blocks * groups / lines);
  const int64_t at_once = is_few ? 1 : (lines * every + row_blocks * groups - 1) / (row_blocks * groups);
  const auto* inputs = as_inputs(x, T * K, typename Factors<W>::Input{});
  Pool& pool = Pool::instance();
  const int64_t per_item = std::clamp<int64_t>(all / pool.size(), 1, kPerItem);
  pool.run((all + per_item - 1) / per_item, [&](int64_t item) {
    const int64_t p0 = item * per_item, p1 = std::min(p0 + per_item, all), step = is_few ? per_item : 1;
    for (int64_t p = p0; p < p1; p += step) {
      // The panels after this item's go to other threads.
      const int64_t next = p + step < p1 ? p + step : std::min(p0 + pool.size() * per_item, all - 1);
      for (int64_t b = 0; b < row_blocks; ++b) {
        const int64_t t = T * b / row_blocks;  // blocks as even as they can be: short ones waste the multipliers
        const Ahead ahead{reinterpret_cast<const char*>(panels) + next * bytes + bytes * b / row_blocks, every, at_once};
        rows_of(T * (b + 1) / row_blocks - t, inputs, panels, out, t, p, std::min(p + step, p1), K, ahead);
      }
    }
  });
}

}  // namespace
