// Rotary positions, the KV cache and attention over it. D head dimension, a multiple of kLanes.

#pragma once

#include <vector>

#include "pool.h"
#include "rows.h"
#include "vector.h"

namespace {

struct Heads {
  int64_t num_queries, num_keys, dim;
};

// A layer's cache: [rows, num_keys, capacity, dim], so what one head reads of one sequence lies in one piece.
template <class C>
struct Cache {
  C *keys, *values;
  int64_t capacity;

  int64_t at(Heads heads, int64_t row, int64_t key_head, int64_t position) const {
    return ((row * heads.num_keys + key_head) * capacity + position) * heads.dim;
  }
};

// Rotate the two halves of one head in place.
void rotate(float* head, const float* cos, const float* sin, int64_t D) {
  const int64_t half = D / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

template <class C>
void rope_store(float* qkv, const float* q_norm, const float* k_norm, float epsilon, const float* cos,
                const float* sin, const int64_t* positions, const int64_t* rows, Cache<C> cache, int64_t T,
                Heads heads) {
  const int64_t D = heads.dim, width = (heads.num_queries + 2 * heads.num_keys) * D;
  Pool::instance().run(T, [&](int64_t t) {
    const float *c = cos + positions[t] * D, *s = sin + positions[t] * D;
    for (int64_t h = 0; h < heads.num_queries + heads.num_keys; ++h) {
      float* head = qkv + t * width + h * D;
      const float* norm = h < heads.num_queries ? q_norm : k_norm;
      if (norm) normalise(head, norm, head, D, epsilon);
      rotate(head, c, s, D);
    }
    const float* k = qkv + t * width + heads.num_queries * D;
    const float* v = k + heads.num_keys * D;
    for (int64_t h = 0; h < heads.num_keys; ++h) {
      const int64_t base = cache.at(heads, rows[t], h, positions[t]);
      for (int64_t i = 0; i < D; ++i) {
        assign(cache.keys + base + i, k[h * D + i]);
        assign(cache.values + base + i, v[h * D + i]);
      }
    }
  });
}

// Scores of `count` positions to weights, in place; returns their sum. Room for kLanes more is needed behind them.
inline float soften(float* scores, int64_t count) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t j = count; j < padded; ++j) scores[j] = -INFINITY;
  const float peak = highest(scores, padded);
  Vec totals = {};
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vec value = load(scores + j);
    const Vec weight = value < splat(-1e30f) ? Vec{} : vexp(value - peak);
    store(scores + j, weight);
    totals += weight;
  }
  return sum(totals);
}

// Asks for one position of one head.
template <class C>
inline void touch(const C* p, int64_t D) {
  for (int64_t d = 0; d < D; d += 64 / int64_t(sizeof(C))) __builtin_prefetch(p + d);
}

constexpr int64_t kAhead = 16;  // positions between asking for a key and using it

// G query heads that share one key head, over `count` cache positions: keys and values are read once for all. A row
// of scores fits in cache, so no online softmax. Dim is D where it is known at compile time, else 0.
template <int G, int Dim, class C>
void attend_heads(const float* q, const C* keys, const C* values, float* out, std::vector<float>& scratch,
                  int64_t count, Heads heads, float scale) {
  constexpr int kSlice = G == 1 ? 8 : 4;
  const int64_t D = Dim ? Dim : heads.dim;
  const int64_t room = (count + 2 * kLanes) / kLanes * kLanes;
  if (int64_t(scratch.size()) < G * room) scratch.resize(2 * G * room);
  float* const scores = scratch.data();
  for (int64_t j = 0; j < count; j += 4) {
    const C* key[4];
    for (int i = 0; i < 4; ++i) key[i] = keys + (j + i < count ? j + i : count - 1) * D;
    for (int i = 0; i < 4; ++i) {
      touch(key[i] + kAhead * D, D);
      touch(values + (key[i] - keys), D);
    }
    Vec dots[G][4] = {};
    for (int64_t d = 0; d < D; d += kLanes)
      for (int i = 0; i < 4; ++i) {
        Vec k = load(key[i] + d);
        pin(k);
        for (int g = 0; g < G; ++g) dots[g][i] = fused(load(q + g * D + d), k, dots[g][i]);
      }
    for (int g = 0; g < G; ++g) {
      const Quad four = sum4(dots[g][0], dots[g][1], dots[g][2], dots[g][3]) * scale;
      std::memcpy(scores + g * room + j, &four, sizeof four);
    }
  }
  float inverse[G];
  for (int g = 0; g < G; ++g) inverse[g] = 1.f / soften(scores + g * room, count);
  for (int64_t d = 0; d < D; d += kSlice * kLanes) {
    const int64_t vectors = (D - d) / kLanes < kSlice ? (D - d) / kLanes : kSlice;
    Vec acc[G][kSlice] = {};
    const auto gather = [&](auto width) {
      for (int64_t j = 0; j < count; ++j) {
        Vec weight[G];
        for (int g = 0; g < G; ++g) weight[g] = splat(scores[g * room + j]);
        for (int64_t i = 0; i < width; ++i) {
          const Vec value = load(values + j * D + d + i * kLanes);
          for (int g = 0; g < G; ++g) acc[g][i] = fused(weight[g], value, acc[g][i]);
        }
      }
    };
    if (vectors == kSlice)
      gather(std::integral_constant<int64_t, kSlice>{});
    else
      gather(vectors);
    for (int g = 0; g < G; ++g)
      for (int64_t i = 0; i < vectors; ++i) store(out + g * D + d + i * kLanes, acc[g][i] * inverse[g]);
  }
}

template <int Dim, class C>
void attend_group(const float* q, const C* keys, const C* values, float* out, std::vector<float>& scratch,
                  int64_t count, Heads heads, float scale) {
  const int64_t D = heads.dim, group = heads.num_queries / heads.num_keys;
  for (int64_t g = 0; g < group;) {
    const auto next = [&](auto size) {
      attend_heads<decltype(size)::value, Dim, C>(q + g * D, keys, values, out + g * D, scratch, count, heads, scale);
      g += size;
    };
    switch (group - g) {
      case 1: next(std::integral_constant<int, 1>{}); break;
      case 2: case 4: next(std::integral_constant<int, 2>{}); break;
      default: next(std::integral_constant<int, 3>{}); break;
    }
  }
}

template <class C>
void attend(const float* q, int64_t q_stride, Cache<C> cache, const int64_t* rows, const int64_t* positions,
            float* out, int64_t T, Heads heads, float scale, int64_t window) {
  const int64_t group = heads.num_queries / heads.num_keys, D = heads.dim;
  const auto one = D == 64 ? attend_group<64, C> : D == 128 ? attend_group<128, C> : attend_group<0, C>;
  Pool::instance().run(T * heads.num_keys, [&](int64_t item) {
    thread_local std::vector<float> scratch;
    const int64_t t = item / heads.num_keys, key_head = item % heads.num_keys, last = positions[t];
    const int64_t first = window > 0 && last - window + 1 > 0 ? last - window + 1 : 0;
    const int64_t offset = cache.at(heads, rows[t], key_head, first), h = key_head * group;
    one(q + t * q_stride + h * D, cache.keys + offset, cache.values + offset, out + (t * heads.num_queries + h) * D,
        scratch, last - first + 1, heads, scale);
  });
}

}  // namespace
