// A token drawn from a row of logits: argmax of z / T + Gumbel noise over what a floor leaves.
//
// The noise is a function of two 32-bit keys, made of seed and position, and the token id; see models/noise.py.

#pragma once

#include <algorithm>
#include <vector>

#include "rows.h"
#include "vector.h"

namespace {

inline UintVec shifted(UintVec h, int bits) { return h >> bits; }

inline UintVec noise_bits(UintVec id, uint32_t key0, uint32_t key1) {
  UintVec h = id * 0x9E3779B1u + key0;
  h = (h ^ shifted(h, 16)) * 0x21F0AAADu;
  h = (h ^ shifted(h, 15)) ^ key1;
  h = h * 0xD35A2D97u;
  return h ^ shifted(h, 15);
}

// Natural logarithm of positive normal numbers, relative error < 2e-7 (Cephes' polynomial).
inline Vec vlog(Vec x) {
  const UintVec bits = (UintVec)x;
  IntVec exponent = (IntVec)(bits >> 23) - 126;
  Vec m = (Vec)((bits & 0x007FFFFFu) | 0x3F000000u);
  const IntVec is_low = (IntVec)(m < splat(0.707106781f));
  exponent += is_low;
  m = m + (Vec)((IntVec)m & is_low) - 1.f;
  Vec p = splat(7.0376836292e-2f);
  for (const float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                        2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fused(p, m, splat(c));
  const Vec square = m * m, e = __builtin_convertvector(exponent, Vec);
  return fused(p * m, square, e * -2.12194440e-4f) - 0.5f * square + m + e * 0.693359375f;
}

// Standard Gumbel noise. The uniform number is most precise near 0, which is where large noise comes from.
inline Vec gumbel(UintVec bits) {
  const Vec uniform = (__builtin_convertvector((IntVec)(bits >> 1), Vec) + 0.5f) * 0x1p-31f;
  const Vec below_one = 1.f - uniform;
  const Vec small = uniform + uniform * uniform * (0.5f + uniform * (1.f / 3.f + uniform * 0.25f));
  const Vec large = -vlog(below_one > splat(0x1p-24f) ? below_one : splat(0x1p-24f));
  return -vlog(uniform < splat(0x1p-6f) ? small : large);
}

// Column of the highest z / T + noise among z >= floor, the first of equals. `ids` maps columns to token ids, or null.
inline int64_t draw(const float* row, int64_t V, float inverse_t, float floor, uint32_t key0, uint32_t key1,
                    const int32_t* ids) {
  UintVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = uint32_t(i);
  Vec best = splat(-INFINITY);
  UintVec best_block = {};
  const int64_t whole = V / kLanes * kLanes;
  for (int64_t j = 0; j < V; j += kLanes) {
    Vec z = splat(-INFINITY);
    UintVec id = lane + uint32_t(j);
    if (j < whole) {
      z = load(row + j);
      if (ids) std::memcpy(&id, ids + j, sizeof id);
    } else {
      for (int64_t i = j; i < V; ++i) {
        z[i - j] = row[i];
        if (ids) id[i - j] = uint32_t(ids[i]);
      }
    }
    const Vec noisy = z * inverse_t + gumbel(noise_bits(id, key0, key1));
    const IntVec wins = (IntVec)(noisy > best) & (IntVec)(z >= splat(floor));
    best = wins ? noisy : best;
    best_block = wins ? UintVec{} + uint32_t(j) : best_block;
  }
  int64_t winner = 0;
  float highest_noisy = -INFINITY;
  for (int i = 0; i < kLanes; ++i) {
    const int64_t column = int64_t(best_block[i]) + i;
    if (best[i] > highest_noisy || (best[i] == highest_noisy && best[i] > -INFINITY && column < winner)) {
      highest_noisy = best[i];
      winner = column;
    }
  }
  return highest_noisy > -INFINITY ? winner : first_highest(row, V);
}

// The lowest logit that min_p, then top_k, then top_p leave: each looks at what the one before has left.
inline float sampling_floor(const float* row, int64_t V, float temperature, int64_t top_k, float top_p, float min_p) {
  const float peak = highest(row, V);
  float floor = min_p > 0.f ? peak + temperature * std::log(min_p) : -INFINITY;
  thread_local std::vector<float> kept;
  if (top_k > 0 && top_k < V) {
    kept.clear();
    for (int64_t i = 0; i < V; ++i)
      if (row[i] >= floor) kept.push_back(row[i]);
    if (top_k < int64_t(kept.size())) {
      std::nth_element(kept.begin(), kept.begin() + (top_k - 1), kept.end(), std::greater<float>());
      floor = kept[top_k - 1];
    }
  }
  if (top_p >= 1.f) return floor;
  double total = 0.0;
  for (int64_t j = 0; j < V; j += kLanes) {
    Vec z = splat(-INFINITY);
    if (j + kLanes <= V)
      z = load(row + j);
    else
      for (int64_t i = j; i < V; ++i) z[i - j] = row[i];
    total += sum(z >= splat(floor) ? vexp((z - peak) / temperature) : Vec{});
  }
  // What is below this weighs less than 1 - top_p all together, so the nucleus lies above it.
  const float least = std::max(floor, peak + temperature * float(std::log((1.0 - top_p) * total / double(V))));
  kept.clear();
  for (int64_t i = 0; i < V; ++i)
    if (row[i] >= least) kept.push_back(row[i]);
  std::sort(kept.begin(), kept.end(), std::greater<float>());
  double mass = 0.0;
  for (const float z : kept) {
    mass += std::exp(double(z - peak) / temperature);
    if (mass >= top_p * total) return z;
  }
  return kept.empty() ? floor : kept.back();
}

}  // namespace
