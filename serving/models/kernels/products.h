// How weights of a panel meet the inputs: one by one, or in pairs where the processor multiplies pairs of bfloat16.
//
// A panel has kPanel output features; inputs come in groups of Factors<W>::kInputs, whose weights stand together, and as
// Factors<W>::Input.

#pragma once

#include "vector.h"

namespace {

constexpr int kPanel = 2 * kLanes;

struct Pair {
  Vec low, high;  // output features [0, kLanes) and [kLanes, kPanel) of a panel
};

struct OneByOne {
  static constexpr int kInputs = 1;
  using Input = float;

  static Vec inputs(const float* x) { return splat(*x); }
  static Vec add(Vec x, Vec w, Vec sum) { return fused(x, w, sum); }
};

template <class W>
struct Factors;

template <>
struct Factors<float> : OneByOne {
  static int64_t place(int64_t feature, int64_t) { return feature; }
  static Pair weights(const float* p) { return {load(p), load(p + kLanes)}; }
};

// A byte times the scale of its output feature, which Output knows.
template <>
struct Factors<int8_t> : OneByOne {
  static int64_t place(int64_t feature, int64_t) { return feature; }
  static Pair weights(const int8_t* p) { return {load(p), load(p + kLanes)}; }
};

#if defined(__AVX512BF16__)

// Inputs are rounded to bfloat16; products of a pair are added to a float32 sum, twice as many in a cycle as of floats.
template <>
struct Factors<bf16> {
  static constexpr int kInputs = 2;
  using Input = bf16;

  static int64_t place(int64_t feature, int64_t input) { return 2 * feature + input; }
  static Pair weights(const bf16* p) {  // not one copy of both: GCC makes it by way of the stack
    return {(Vec)_mm512_loadu_ps(p), (Vec)_mm512_loadu_ps(p + kPanel)};
  }
  static Vec inputs(const bf16* x) {
    int32_t bits;
    std::memcpy(&bits, x, sizeof bits);
    return (Vec)_mm512_set1_epi32(bits);
  }
  static Vec add(Vec x, Vec w, Vec sum) { return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w); }
};

#else

// The halves of a panel interleave: one load, a shift and a mask make both.
template <>
struct Factors<bf16> : OneByOne {
  static int64_t place(int64_t feature, int64_t) {
    return feature < kLanes ? 2 * feature : 2 * (feature - kLanes) + 1;
  }
  static Pair weights(const bf16* p) {
    UintVec both;
    std::memcpy(&both, p, sizeof both);
    return {(Vec)(both << 16), (Vec)(both & 0xFFFF0000u)};
  }
};

#endif

}  // namespace
