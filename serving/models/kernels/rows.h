// What is done to one row: normalise it, find its highest number, sum its exponentials.

#pragma once

#include "vector.h"

namespace {

inline void normalise(const float* x, const float* weight, float* y, int64_t size, float epsilon) {
  Vec squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load(x + i);
    squares += v * v;
  }
  const float scale = 1.f / std::sqrt(sum(squares) / float(size) + epsilon);
  for (int64_t i = 0; i < size; i += kLanes) store(y + i, load(weight + i) * (load(x + i) * scale));
}

// The highest of x[0, size); NaN is never the highest.
inline float highest(const float* x, int64_t size) {
  Vec peaks = splat(-INFINITY);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const Vec value = load(x + i);
    peaks = value > peaks ? value : peaks;
  }
  float peak = -INFINITY;
  for (int lane = 0; lane < kLanes; ++lane) peak = peaks[lane] > peak ? peaks[lane] : peak;
  for (; i < size; ++i) peak = x[i] > peak ? x[i] : peak;
  return peak;
}

// The first index that holds the highest number; 0 where there is none (all NaN or -inf).
inline int64_t first_highest(const float* x, int64_t size) {
  constexpr int64_t kBlock = 16 * kLanes;
  const float peak = highest(x, size);
  int64_t start = 0;
  for (; start + kBlock <= size; start += kBlock) {  // one branch a block
    IntVec found = {};
    for (int64_t i = start; i < start + kBlock; i += kLanes) found |= load(x + i) == splat(peak);
    int32_t any = 0;
    for (int lane = 0; lane < kLanes; ++lane) any |= found[lane];
    if (any) break;
  }
  for (int64_t i = start; i < size; ++i)
    if (x[i] == peak) return i;
  return 0;
}

inline float log_sum_exp(const float* x, int64_t size) {
  const float peak = highest(x, size);
  if (!(peak > -INFINITY) || peak == INFINITY) return peak;
  Vec totals = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) totals += vexp(load(x + i) - peak);
  float total = sum(totals);
  for (; i < size; ++i) total += std::exp(x[i] - peak);
  return peak + std::log(total);
}

}  // namespace
