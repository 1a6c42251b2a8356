// CPU kernels of one decoder step. Activations are float32; weights and the KV cache are float32 or bfloat16.
//
// T rows of the packed batch, H hidden size, K inputs and N outputs of a projection, D head dimension, V vocabulary.
//
// Every output element is summed in one fixed order that depends neither on T nor on the row's neighbours, so a row
// scored in a block of K + 1, in a batch, or alone gives the same bits: verification agrees with plain decoding.
// Small T is what speculation lives on, and what BLAS libraries are worst at: a weight is read once for all T rows.

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention.h"
#include "layer.h"
#include "linear.h"
#include "pool.h"
#include "rows.h"
#include "sampling.h"

namespace {

// Calls body with the pointer as what it points to.
template <class Body>
void typed(const void* p, int is_bf16, const Body& body) {
  if (is_bf16)
    body(static_cast<const bf16*>(p));
  else
    body(static_cast<const float*>(p));
}

template <class W>
W* same_type(const W*, void* p) {
  return static_cast<W*>(p);
}

}  // namespace

extern "C" {

int dh_lanes() { return kLanes; }

int dh_panel() { return kPanel; }

// Whether products with bfloat16 weights round their inputs to bfloat16.
int dh_rounds_inputs() { return Factors<bf16>::kInputs > 1; }

void dh_reserve_threads(int count) { Pool::instance().reserve(count); }

void dh_pack(const void* w, int is_bf16, void* panels, int64_t N, int64_t K) {
  typed(w, is_bf16, [&](auto* source) { pack(source, same_type(source, panels), N, K); });
}

void dh_pack_bytes(const void* w, int is_bf16, void* panels, float* scales, int64_t N, int64_t K) {
  typed(w, is_bf16, [&](auto* source) { pack_bytes(source, static_cast<int8_t*>(panels), scales, N, K); });
}

void dh_embed(const void* panels, int is_bf16, const int64_t* ids, float* y, int64_t T, int64_t K) {
  typed(panels, is_bf16, [&](auto* source) { unpack_rows(source, ids, y, T, K); });
}

// The weights are bytes where `scales` is not null.
void dh_linear(const float* x, const void* panels, int is_bf16, const float* scales, const float* bias, float* y,
               int64_t T, int64_t K, int64_t N, int accumulate) {
  const Output out{y, bias, N, accumulate != 0, scales};
  if (scales) return linear(x, static_cast<const int8_t*>(panels), out, T, K);
  typed(panels, is_bf16, [&](auto* w) { linear(x, w, out, T, K); });
}

void dh_rms_norm(const float* x, const float* weight, float* y, int64_t T, int64_t H, float epsilon) {
  rms_norm(x, weight, y, T, H, epsilon);
}

void dh_attend(const float* q, int64_t q_stride, const void* keys, const void* values, int is_bf16,
               const int64_t* rows, const int64_t* positions, float* out, int64_t T, int64_t num_queries,
               int64_t num_keys, int64_t D, int64_t capacity, float scale, int64_t window) {
  typed(keys, is_bf16, [&](auto* k) {
    attend(q, q_stride, Cache<std::remove_reference_t<decltype(*k)>>{k, static_cast<decltype(k)>(values), capacity},
           rows, positions, out, T, Heads{num_queries, num_keys, D}, scale, window);
  });
}

// y[t, i] = silu(x[t, i]) * x[t, I + i]
void dh_swiglu(const float* x, float* y, int64_t T, int64_t I) { swiglu(x, y, T, I); }

// hidden[T, H] through `count` layers; keys[i] and values[i] are the cache of layers[i], scratch has room for T rows.
// What enters them is kept as `features` says, if it is not null.
void dh_layers(const Layer* layers, int64_t count, const Shape* shape, const Step* step, void* const* keys,
               void* const* values, const Features* features, float* hidden, float* scratch) {
  typed(layers->qkv, shape->weights_are_bf16, [&](auto* w) {
    typed(keys[0], shape->cache_is_bf16, [&](auto* k) {
      const auto keep = [&](int64_t i) {
        if (features) keep_features(k, *features, i, *step, hidden, shape->hidden);
      };
      for (int64_t i = 0; i < count; ++i) {
        keep(i);
        run_layer(w, Cache{same_type(k, keys[i]), same_type(k, values[i]), step->capacity}, layers[i], *shape, *step,
                  hidden, scratch);
      }
      keep(count);
    });
  });
}

// One layer that reads a second stream; hidden[T, H] becomes its output.
void dh_joining_layer(const Layer* layer, const Shape* shape, const Step* step, void* keys, void* values,
                      const Side* side, float* hidden, float* scratch) {
  typed(layer->qkv, shape->weights_are_bf16, [&](auto* w) {
    typed(keys, shape->cache_is_bf16, [&](auto* k) {
      run_layer(w, Cache{same_type(k, keys), same_type(k, values), step->capacity}, *layer, *shape, *step, hidden,
                scratch, side);
    });
  });
}

int64_t dh_scratch_size(const Shape* shape, int64_t T) { return scratch_size(*shape, T); }

// Of each row of x[T, V]: columns[t] = its first highest and the one emitted, which is drawn[t] unless that is below 0;
// numbers[t] = what stands there, what stands at draft[t], and the log-sum-exp, NaN where that is not wanted.
void dh_columns(const float* x, int64_t stride, int64_t T, int64_t V, const int64_t* drawn, const int64_t* draft,
                int with_log_sum_exp, int64_t* columns, float* numbers) {
  Pool::instance().run(T, [&](int64_t t) {
    const float* row = x + t * stride;
    const int64_t top = first_highest(row, V), emitted = drawn[t] < 0 ? top : drawn[t];
    int64_t* column = columns + 2 * t;
    float* number = numbers + 4 * t;
    column[0] = top, column[1] = emitted;
    number[0] = row[top], number[1] = row[emitted], number[2] = row[draft[t]];
    number[3] = with_log_sum_exp ? log_sum_exp(row, V) : NAN;
  });
}

// Greedy drafts of T sequences by a head of one layer. First `read` has the positions that each has still to read, with
// the tokens ids[N] behind them and g[N, H], which is overwritten. Then a step at a time: what a sequence said and the
// token that came of it are read at its next position, until its draft ends. side->x is not read.
void dh_draft(const Layer* layer, const Shape* shape, const Step* read, void* keys, void* values, const Side* side,
              const Words* words, const Kept* kept, const Drafts* drafts, int64_t T, const int64_t* ids, float* g,
              float* scratch) {
  const int64_t H = shape->hidden, V = words->size;
  std::vector<float> embedded(read->num_tokens * H), hidden(T * H), logits(T * V), reach(T, 1.f);
  std::vector<int64_t> open, positions(T), rows(T), said(T);
  const auto slot = [&](int64_t a) { return kept->outputs + (rows[a] * kept->size + positions[a] % kept->size) * H; };
  const auto run = [&](const Step& step, const int64_t* tokens, float* x) {
    const Side own{embedded.data(), side->hidden_norm, side->residual_is_normed};
    dh_embed(words->embedding, shape->weights_are_bf16, tokens, embedded.data(), step.num_tokens, H);
    dh_joining_layer(layer, shape, &step, keys, values, &own, x, scratch);
  };
  run(*read, ids, g);
  for (int64_t t = 0, last = -1; t < T; ++t) {
    last += drafts->lengths[t];
    const int64_t a = int64_t(open.size());
    positions[a] = read->positions[last];
    rows[a] = read->rows[last];
    std::copy_n(g + last * H, H, slot(a));
    if (drafts->most[t] > 0) open.push_back(t);
  }
  while (!open.empty()) {
    const int64_t count = int64_t(open.size());
    for (int64_t a = 0; a < count; ++a) normalise(slot(a), words->norm, hidden.data() + a * H, H, shape->epsilon);
    dh_linear(hidden.data(), words->lm_head, shape->weights_are_bf16, words->scales, nullptr, logits.data(), count, H,
              V, false);
    std::vector<float> confidences(count);
    Pool::instance().run(count, [&](int64_t a) {
      const float* row = logits.data() + a * V;
      said[a] = first_highest(row, V);
      confidences[a] = std::exp(row[said[a]] - log_sum_exp(row, V));
    });
    int64_t left = 0;
    for (int64_t a = 0; a < count; ++a) {
      const int64_t t = open[a], drafted = drafts->drafted[t];
      reach[t] *= confidences[a];
      ++drafts->steps[t];
      if (confidences[a] < drafts->least || reach[t] < drafts->floors[t]) continue;
      drafts->tokens[t * drafts->stride + drafted] = words->target_ids[said[a]];
      drafts->confidences[t * drafts->stride + drafted] = confidences[a];
      if (++drafts->drafted[t] == drafts->most[t] || reach[t] < drafts->worth_a_pass * drafts->floors[t]) continue;
      std::copy_n(slot(a), H, hidden.data() + left * H);
      open[left] = t;
      positions[left] = positions[a] + 1;
      rows[left] = rows[a];
      said[left++] = words->target_ids[said[a]];
    }
    open.resize(left);
    if (open.empty()) break;
    run(Step{left, read->capacity, positions.data(), rows.data()}, said.data(), hidden.data());
    for (int64_t a = 0; a < left; ++a) std::copy_n(hidden.data() + a * H, H, slot(a));
  }
}

void dh_log_sum_exp(const float* x, int64_t stride, float* y, int64_t T, int64_t V) {
  Pool::instance().run(T, [&](int64_t t) { y[t] = log_sum_exp(x + t * stride, V); });
}

// For each of n rows of x: the floor that min_p, top_k (0: all) and top_p leave, then a draw; `keys` are two a row.
void dh_draw(const float* x, int64_t stride, int64_t V, const int64_t* rows, int64_t n, const float* temperatures,
             const int64_t* top_k, const float* top_p, const float* min_p, const uint32_t* keys, const int32_t* ids,
             int64_t* columns) {
  Pool::instance().run(n, [&](int64_t i) {
    const float* row = x + rows[i] * stride;
    const float floor = sampling_floor(row, V, temperatures[i], top_k[i], top_p[i], min_p[i]);
    columns[i] = draw(row, V, 1.f / temperatures[i], floor, keys[2 * i], keys[2 * i + 1], ids);
  });
}
}
