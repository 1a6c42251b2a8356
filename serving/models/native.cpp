// CPU kernels of one decoder step. Activations are float32; weights and the KV cache are float32 or bfloat16.
//
// T rows of the packed batch, H hidden size, N output features, D head dimension.
//
// Every output element is summed in one fixed order that depends neither on T nor on the row's neighbours, so a row
// scored in a block of K + 1, in a batch, or alone gives the same bits: verification agrees with plain decoding.
// Small T is what speculation lives on, and what BLAS libraries are worst at: a weight is read once for all T rows.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "native_pool.h"

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

// Keeps a value in its register: the compiler would rather load it again for every use.
inline void pin(Vec& v) {
#if defined(__x86_64__)
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

// exp by range reduction and a degree-6 polynomial: relative error < 3e-7 on [-87, 87], 0 below.
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

// TB rows of x against NB rows of w, K a multiple of kLanes.
template <int TB, int NB, class W>
inline void tile(const float* x, const W* w, float* y, const float* bias, int64_t K, int64_t N, bool accumulate) {
  Vec acc[TB][NB] = {};
  for (int64_t k = 0; k < K; k += kLanes) {
    Vec weights[NB];
    for (int n = 0; n < NB; ++n) weights[n] = load(w + n * K + k);
    for (int t = 0; t < TB; ++t) {
      Vec row = load(x + t * K + k);
      pin(row);
      for (int n = 0; n < NB; ++n) acc[t][n] = fused(row, weights[n], acc[t][n]);
    }
  }
  for (int t = 0; t < TB; ++t)
    for (int n = 0; n < NB; ++n) {
      float* out = y + t * N + n;
      const float value = sum(acc[t][n]) + (bias ? bias[n] : 0.f);
      *out = accumulate ? *out + value : value;
    }
}

template <int TB, int NB, class W>
inline void columns(const float* x, const W* w, float* y, const float* bias, int64_t K, int64_t N, int64_t n0,
                    int64_t n1, bool accumulate) {
  int64_t n = n0;
  for (; n + NB <= n1; n += NB) tile<TB, NB, W>(x, w + n * K, y + n, bias ? bias + n : nullptr, K, N, accumulate);
  for (; n < n1; ++n) tile<TB, 1, W>(x, w + n * K, y + n, bias ? bias + n : nullptr, K, N, accumulate);
}

template <class W>
void linear(const float* x, const W* w, const float* bias, float* y, int64_t T, int64_t K, int64_t N,
            bool accumulate) {
  const int64_t kColumns = N > 8192 ? 96 : 24;  // weight rows that stay in L1 while all T rows pass over them
  const int64_t blocks = (N + kColumns - 1) / kColumns;
  Pool::instance().run(blocks, [&](int64_t block) {
    const int64_t n0 = block * kColumns, n1 = n0 + kColumns < N ? n0 + kColumns : N;
    int64_t t = 0;
    for (; T - t >= 6 && T - t != 7 && T - t != 8; t += 6)
      columns<6, 2, W>(x + t * K, w, y + t * N, bias, K, N, n0, n1, accumulate);
    for (; T - t > 5; t += 4) columns<4, 3, W>(x + t * K, w, y + t * N, bias, K, N, n0, n1, accumulate);
    const float* rest = x + t * K;
    float* out = y + t * N;
    switch (T - t) {
      case 1: columns<1, 8, W>(rest, w, out, bias, K, N, n0, n1, accumulate); break;
      case 2: columns<2, 6, W>(rest, w, out, bias, K, N, n0, n1, accumulate); break;
      case 3: columns<3, 4, W>(rest, w, out, bias, K, N, n0, n1, accumulate); break;
      case 4: columns<4, 3, W>(rest, w, out, bias, K, N, n0, n1, accumulate); break;
      case 5: columns<5, 2, W>(rest, w, out, bias, K, N, n0, n1, accumulate); break;
      default: break;
    }
  });
}

void normalise(const float* x, const float* weight, float* y, int64_t size, float epsilon) {
  Vec squares = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vec v = load(x + i);
    squares += v * v;
  }
  const float scale = 1.f / std::sqrt(sum(squares) / float(size) + epsilon);
  for (int64_t i = 0; i < size; i += kLanes) store(y + i, load(weight + i) * (load(x + i) * scale));
}

// Rotate the two halves of one head in place.
void rotate(float* head, const float* cos, const float* sin, int64_t D) {
  const int64_t half = D / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = head[i], b = head[i + half];
    head[i] = a * cos[i] - b * sin[i];
    head[i + half] = b * cos[i + half] + a * sin[i + half];
  }
}

struct Heads {
  int64_t num_queries, num_keys, dim;
};

template <class C>
void rope_store(float* qkv, const float* q_norm, const float* k_norm, float epsilon, const float* cos,
                const float* sin, const int64_t* positions, const int64_t* slots, C* keys, C* values, int64_t T,
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
    const int64_t base = slots[t] * heads.num_keys * D;
    for (int64_t i = 0; i < heads.num_keys * D; ++i) {
      assign(keys + base + i, k[i]);
      assign(values + base + i, v[i]);
    }
  });
}

// One query head over `count` cache positions; a row of scores fits in cache, so no online softmax. D is a multiple
// of kLanes; Dim is D where it is known at compile time, else 0.
template <int Dim, class C>
void attend_head(const float* q, const C* keys, const C* values, float* out, float* scores, int64_t count, Heads heads,
                 float scale, float softcap) {
  constexpr int kVectors = (Dim ? Dim : 256) / kLanes;
  const int64_t D = Dim ? Dim : heads.dim, stride = heads.num_keys * D, vectors = D / kLanes;
  const auto key = [&](int64_t j) { return keys + (j < count ? j : count - 1) * stride; };
  for (int64_t j = 0; j < count; j += 4) {
    const C *k0 = key(j), *k1 = key(j + 1), *k2 = key(j + 2), *k3 = key(j + 3);
    Vec a = {}, b = {}, c = {}, e = {};
    for (int64_t d = 0; d < vectors * kLanes; d += kLanes) {
      Vec query = load(q + d);
      pin(query);
      a = fused(query, load(k0 + d), a);
      b = fused(query, load(k1 + d), b);
      c = fused(query, load(k2 + d), c);
      e = fused(query, load(k3 + d), e);
    }
    const Quad four = sum4(a, b, c, e) * scale;
    std::memcpy(scores + j, &four, sizeof four);
  }
  if (softcap > 0.f)
    for (int64_t j = 0; j < count; ++j) scores[j] = softcap * std::tanh(scores[j] / softcap);
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t j = count; j < padded; ++j) scores[j] = -INFINITY;
  Vec peaks = splat(-INFINITY);
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vec value = load(scores + j);
    peaks = value > peaks ? value : peaks;
  }
  float peak = -INFINITY;
  for (int i = 0; i < kLanes; ++i) peak = peaks[i] > peak ? peaks[i] : peak;
  Vec totals = {};
  for (int64_t j = 0; j < padded; j += kLanes) {
    const Vec value = load(scores + j);
    const Vec weight = value < splat(-1e30f) ? Vec{} : vexp(value - peak);
    store(scores + j, weight);
    totals += weight;
  }
  Vec acc[kVectors] = {};
  for (int64_t j = 0; j < count; ++j) {
    const C* v = values + j * stride;
#pragma GCC unroll 16
    for (int64_t d = 0; d < vectors; ++d) acc[d] = fused(splat(scores[j]), load(v + d * kLanes), acc[d]);
  }
  const float inverse = 1.f / sum(totals);
  for (int64_t d = 0; d < vectors; ++d) store(out + d * kLanes, acc[d] * inverse);
}

template <class C>
void attend(const float* q, int64_t q_stride, const C* keys, const C* values, const int64_t* row_starts,
            const int64_t* positions, float* out, int64_t T, Heads heads, float scale, int64_t window,
            float softcap) {
  const int64_t group = heads.num_queries / heads.num_keys, D = heads.dim, stride = heads.num_keys * D;
  const auto one = D == 64 ? attend_head<64, C> : D == 128 ? attend_head<128, C> : attend_head<0, C>;
  Pool::instance().run(T * heads.num_keys, [&](int64_t item) {
    thread_local std::vector<float> scores;
    const int64_t t = item / heads.num_keys, key_head = item % heads.num_keys, last = positions[t];
    const int64_t first = window > 0 && last - window + 1 > 0 ? last - window + 1 : 0;
    if (int64_t(scores.size()) < last + 1 + kLanes) scores.resize(2 * last + 1 + kLanes);
    const int64_t offset = (row_starts[t] + first) * stride + key_head * D;
    for (int64_t h = key_head * group; h < (key_head + 1) * group; ++h)
      one(q + t * q_stride + h * D, keys + offset, values + offset, out + (t * heads.num_queries + h) * D,
          scores.data(), last - first + 1, heads, scale, softcap);
  });
}

}  // namespace

extern "C" {

int dh_lanes() { return kLanes; }

void dh_reserve_threads(int count) { Pool::instance().reserve(count); }

void dh_linear(const float* x, const void* w, int is_bf16, const float* bias, float* y, int64_t T, int64_t K,
               int64_t N, int accumulate) {
  if (is_bf16)
    linear(x, static_cast<const bf16*>(w), bias, y, T, K, N, accumulate);
  else
    linear(x, static_cast<const float*>(w), bias, y, T, K, N, accumulate);
}

void dh_rms_norm(const float* x, const float* weight, float* y, int64_t T, int64_t H, float epsilon) {
  for (int64_t t = 0; t < T; ++t) normalise(x + t * H, weight, y + t * H, H, epsilon);
}

void dh_rope_store(float* qkv, const float* q_norm, const float* k_norm, float epsilon, const float* cos,
                   const float* sin, const int64_t* positions, const int64_t* slots, void* keys, void* values,
                   int is_bf16, int64_t T, int64_t num_queries, int64_t num_keys, int64_t D) {
  const Heads heads{num_queries, num_keys, D};
  if (is_bf16)
    rope_store(qkv, q_norm, k_norm, epsilon, cos, sin, positions, slots, static_cast<bf16*>(keys),
               static_cast<bf16*>(values), T, heads);
  else
    rope_store(qkv, q_norm, k_norm, epsilon, cos, sin, positions, slots, static_cast<float*>(keys),
               static_cast<float*>(values), T, heads);
}

void dh_attend(const float* q, int64_t q_stride, const void* keys, const void* values, int is_bf16,
               const int64_t* row_starts, const int64_t* positions, float* out, int64_t T, int64_t num_queries,
               int64_t num_keys, int64_t D, float scale, int64_t window, float softcap) {
  const Heads heads{num_queries, num_keys, D};
  if (is_bf16)
    attend(q, q_stride, static_cast<const bf16*>(keys), static_cast<const bf16*>(values), row_starts, positions, out,
           T, heads, scale, window, softcap);
  else
    attend(q, q_stride, static_cast<const float*>(keys), static_cast<const float*>(values), row_starts, positions,
           out, T, heads, scale, window, softcap);
}

// y[t, i] = silu(x[t, i]) * x[t, I + i]
void dh_swiglu(const float* x, float* y, int64_t T, int64_t I) {
  Pool::instance().run(T, [&](int64_t t) {
    for (int64_t i = 0; i < I; i += kLanes) {
      const Vec gate = load(x + t * 2 * I + i), up = load(x + t * 2 * I + I + i);
      store(y + t * I + i, gate / (1.f + vexp(-gate)) * up);
    }
  });
}
}
