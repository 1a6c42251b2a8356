// One decoder layer of the Llama shape: norm, attention, norm, SwiGLU, both added to the residual stream.

#pragma once

#include <algorithm>

#include "attention.h"
#include "linear.h"
#include "pool.h"
#include "rows.h"
#include "vector.h"

// Filled in by models/native_layers.py, field by field.
extern "C" {

struct Layer {
  const void *qkv, *out, *gate_up, *down;
  const float *qkv_bias, *out_bias, *input_norm, *post_norm, *q_norm, *k_norm;
  int64_t window;
};

struct Shape {
  int64_t hidden, num_queries, num_keys, head_dim, intermediate, weights_are_bf16, cache_is_bf16;
  float epsilon, scale;
  const float *cos, *sin;
};

// A second stream x[T, H] that attention reads beside the hidden one, each under its own norm: [norm(x), norm(hidden)].
struct Side {
  const float *x, *hidden_norm;
  int64_t residual_is_normed;
};

// What a head speaks with: embedding[V, H], lm_head[size, H] behind a norm, bytes where there are scales[size], and what its
// ids are of the target's.
struct Words {
  const void *embedding, *lm_head;
  const float *scales, *norm;
  const int64_t* target_ids;
  int64_t size;
};

// Where a head keeps what it said at the last `size` positions of every row: outputs[row, position % size, H].
struct Kept {
  float* outputs;
  int64_t size;
};

// For each sequence: how many positions it reads first, the most tokens of its draft, and how likely all of a draft up
// to a token must be for that token to be drafted, and `worth_a_pass` times that for another to be thought of; `least` is
// how likely each must be. Then what came of it: tokens[T, stride] and their probabilities, how many were drafted and how
// many were thought of.
struct Drafts {
  const int64_t *lengths, *most;
  const float* floors;
  float least, worth_a_pass;
  int64_t stride;
  int64_t* tokens;
  float* confidences;
  int64_t *drafted, *steps;
};

// Where what enters a layer (the last index: what leaves them all) is kept, in the cache's type: slots[row, position,
// width] from offsets[layer] on, nowhere where that is below 0.
struct Features {
  void* slots;
  int64_t width;
  const int64_t* offsets;
};

struct Step {
  int64_t num_tokens, capacity;
  const int64_t *positions, *rows;
};
}

namespace {

void swiglu(const float* x, float* y, int64_t T, int64_t I) {
  Pool::instance().run(T, [&](int64_t t) {
    for (int64_t i = 0; i < I; i += kLanes) {
      const Vec gate = load(x + t * 2 * I + i), up = load(x + t * 2 * I + I + i);
      store(y + t * I + i, gate / (1.f + vexp(-gate)) * up);
    }
  });
}

void rms_norm(const float* x, const float* weight, float* y, int64_t T, int64_t H, float epsilon) {
  for (int64_t t = 0; t < T; ++t) normalise(x + t * H, weight, y + t * H, H, epsilon);
}

inline int64_t qkv_width(const Shape& s) { return (s.num_queries + 2 * s.num_keys) * s.head_dim; }

// Floats for the norms' output (of two streams), queries with keys and values, attention's output, gate with up, and
// their product.
inline int64_t scratch_size(const Shape& s, int64_t T) {
  return T * (2 * s.hidden + qkv_width(s) + s.num_queries * s.head_dim + 3 * s.intermediate);
}

// y[T, 2 H] = [norm(x), norm(hidden)]
void join_streams(const Side& side, const float* input_norm, float* hidden, float* y, int64_t T, int64_t H,
                  float epsilon) {
  for (int64_t t = 0; t < T; ++t) {
    float *joined = y + t * 2 * H, *residual = hidden + t * H;
    normalise(side.x + t * H, input_norm, joined, H, epsilon);
    normalise(residual, side.hidden_norm, joined + H, H, epsilon);
    if (side.residual_is_normed) std::copy_n(joined + H, H, residual);
  }
}

template <class C>
void keep_features(const C*, const Features& f, int64_t layer, const Step& step, const float* hidden, int64_t H) {
  if (f.offsets[layer] < 0) return;
  for (int64_t t = 0; t < step.num_tokens; ++t) {
    C* slot = static_cast<C*>(f.slots) + (step.rows[t] * step.capacity + step.positions[t]) * f.width;
    for (int64_t i = 0; i < H; ++i) assign(slot + f.offsets[layer] + i, hidden[t * H + i]);
  }
}

template <class W, class C>
void run_layer(const W*, Cache<C> cache, const Layer& layer, const Shape& s, const Step& step, float* hidden,
               float* scratch, const Side* side = nullptr) {
  const int64_t T = step.num_tokens, H = s.hidden, I = s.intermediate, A = s.num_queries * s.head_dim;
  const Heads heads{s.num_queries, s.num_keys, s.head_dim};
  const int64_t width = side ? 2 * H : H;
  float *normed = scratch, *qkv = normed + T * width, *mixed = qkv + T * qkv_width(s), *gate_up = mixed + T * A,
        *inner = gate_up + 2 * T * I;
  const auto project = [&](const float* x, const void* w, const float* bias, float* y, int64_t K, int64_t N,
                           bool accumulate) {
    linear(x, static_cast<const W*>(w), Output{y, bias, N, accumulate}, T, K);
  };
  if (side)
    join_streams(*side, layer.input_norm, hidden, normed, T, H, s.epsilon);
  else
    rms_norm(hidden, layer.input_norm, normed, T, H, s.epsilon);
  project(normed, layer.qkv, layer.qkv_bias, qkv, width, qkv_width(s), false);
  rope_store(qkv, layer.q_norm, layer.k_norm, s.epsilon, s.cos, s.sin, step.positions, step.rows, cache, T, heads);
  attend(qkv, qkv_width(s), cache, step.rows, step.positions, mixed, T, heads, s.scale, layer.window);
  project(mixed, layer.out, layer.out_bias, hidden, A, H, true);
  rms_norm(hidden, layer.post_norm, normed, T, H, s.epsilon);
  project(normed, layer.gate_up, nullptr, gate_up, H, 2 * I, false);
  swiglu(gate_up, inner, T, I);
  project(inner, layer.down, nullptr, hidden, I, H, true);
}

}  // namespace
