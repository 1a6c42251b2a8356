// Vectors of the widest kind this processor has, and the few operations the kernels need on them.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));
typedef uint32_t UintVec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef float Quad __attribute__((vector_size(16)));

struct bf16 {
  uint16_t bits;
};

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Vec load(const bf16* p) {
  HalfVec h;
  std::memcpy(&h, p, sizeof h);
#if defined(__AVX2__) && !defined(__AVX512F__)
  return (Vec)((UintVec)_mm256_cvtepu16_epi32((__m128i)h) << 16);  // GCC 12 makes five instructions of the generic form
#else
  return (Vec)(__builtin_convertvector(h, UintVec) << 16);
#endif
}

inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
#endif
}

// Keeps a value in its register: the compiler would rather load it again for every use.
inline void pin(Vec& v) {
#if defined(__AVX__)
  asm("" : "+v"(v));
#endif
}

// a * b + c, fused by intention: left to the compiler, contraction would differ from one loop to the next.
inline Vec fused(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline float to_float(float v) { return v; }
inline float to_float(bf16 v) {
  uint32_t bits = uint32_t(v.bits) << 16;
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

inline void assign(float* p, float v) { *p = v; }
inline void assign(bf16* p, float v) {  // round to nearest even
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  p->bits = uint16_t((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline Vec splat(float v) { return v - Vec{}; }

// The sum of the lanes, in one fixed order: halves are added until four are left.
inline float sum(Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  Quad total = {};
  for (int i = 0; i < kLanes; i += 4) {
    Quad quad;
    std::memcpy(&quad, lanes + i, sizeof quad);
    total += quad;
  }
  return (total[0] + total[2]) + (total[1] + total[3]);
}

// The sums of four vectors at once; each in one fixed order.
inline Quad sum4(Vec a, Vec b, Vec c, Vec d) {
#if defined(__AVX512F__)
  const auto halve = [](Vec v) {
    return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
  };
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps(halve(a), halve(b)), _mm256_hadd_ps(halve(c), halve(d)));
#elif defined(__AVX__)
  const __m256 sums = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
#endif
#if defined(__AVX__)
  return (Quad)_mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1));
#else
  return Quad{sum(a), sum(b), sum(c), sum(d)};
#endif
}

// exp by range reduction and a degree-6 polynomial: relative error < 3e-7 on [-87, 87], clamped beyond.
inline Vec vexp(Vec x) {
  const Vec low = splat(-87.f), high = splat(87.f);
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Vec magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec n = x * 1.44269504f + magic;
  const IntVec exponent = (IntVec)n << 23;
  n = n - magic;
  const Vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
  Vec p = splat(1.f / 720.f);
  for (const float c : {1.f / 120.f, 1.f / 24.f, 1.f / 6.f, 0.5f, 1.f, 1.f}) p = fused(p, r, splat(c));
  return (Vec)((IntVec)p + exponent);
}

}  // namespace
