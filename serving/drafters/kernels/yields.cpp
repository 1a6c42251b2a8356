// The yield predictor in one call: the features of yield_features.py and what YieldPredictor.predict makes of them.

#include <cstdint>
#include <cstring>

namespace {

constexpr int kRecent = 3, kKinds = 4, kNumbers = 15;  // features before those of the draft's structure

// Weights by input, w[in, out]; the first layer has the normalisation in it, the second is bfloat16.
struct Network {
  const float *w1, *b1;
  const uint16_t* w2;
  const float *b2, *w3, *b3;
  int64_t num_features, num_first, num_second;
};

// Kind flags by token id; the last entry is for ids beyond.
struct Kinds {
  const uint8_t* flags;
  int64_t last;
};

// One draft as the caller packs it, without gaps; `size` token ids follow.
struct Draft {
  double score;
  int32_t size, match_length, is_local, prompt_length, num_emitted;
  float last_probability, recent[kRecent], accepted, cache_accepted, cache_rate;
};

void features_of(const Draft& draft, const int32_t* ids, const Kinds& kinds, float* out) {
  const double size = draft.size, emitted = draft.num_emitted;
  *out++ = draft.score;
  *out++ = draft.match_length;
  *out++ = size;
  *out++ = draft.score / size;
  *out++ = draft.last_probability;
  *out++ = draft.is_local;
  *out++ = draft.prompt_length;
  *out++ = emitted;
  *out++ = emitted / (draft.prompt_length + emitted);
  for (float accepted : draft.recent) *out++ = accepted;
  *out++ = draft.accepted;
  *out++ = draft.cache_accepted;
  *out++ = draft.cache_rate;
  int count[kKinds] = {}, first[kKinds] = {draft.size, draft.size, draft.size, draft.size};
  for (int at = draft.size; at-- > 0;) {
    const uint8_t flags = kinds.flags[ids[at] < kinds.last ? ids[at] : kinds.last];
    for (int kind = 0; kind < kKinds; ++kind)
      if (flags >> kind & 1) ++count[kind], first[kind] = at;
  }
  for (int kind = 0; kind < kKinds; ++kind) *out++ = count[kind] / size, *out++ = first[kind] / size;
}

inline float widened(float number) { return number; }
inline float widened(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
}

// out = max(0, x w + b). Weights of inputs that are 0, as half of the hidden ones are, are not read; the others are
// asked for ahead, for none is in a cache. NaN stays NaN.
template <class W>
void relu_layer(const float* x, int64_t num_in, const W* w, const float* b, int64_t num_out, float* out) {
  constexpr int64_t kLine = 64 / sizeof(W), kAhead = 4;
  const auto fetch = [&](int64_t i) {
    for (int64_t j = 0; j < num_out; j += kLine) __builtin_prefetch(w + i * num_out + j);
  };
  int64_t ahead = 0, num_ahead = 1;  // rows asked for, and those of them not read yet
  for (int64_t j = 0; j < num_out; ++j) out[j] = b[j];
  for (int64_t i = 0; i < num_in; ++i) {
    if (x[i] == 0.0f) continue;
    for (--num_ahead; num_ahead < kAhead && ahead < num_in; ++ahead)
      if (x[ahead] != 0.0f) fetch(ahead), ++num_ahead;
    const W* row = w + i * num_out;
    for (int64_t j = 0; j < num_out; ++j) out[j] += x[i] * widened(row[j]);
  }
  for (int64_t j = 0; j < num_out; ++j) out[j] = out[j] < 0.0f ? 0.0f : out[j];
}

}  // namespace

extern "C" {

// `drafts` to yields[count]; room is for kNumbers + 2 kKinds features and both hidden layers.
void dh_yields(const Network* net, const Kinds* kinds, const char* drafts, int64_t count, float* room, float* yields) {
  float *row = room, *first = row + kNumbers + 2 * kKinds, *second = first + net->num_first;
  for (int64_t i = 0; i < count; ++i) {
    Draft draft;
    constexpr int64_t kBytes = sizeof(double) + 5 * sizeof(int32_t) + (4 + kRecent) * sizeof(float);
    std::memcpy(&draft, drafts, kBytes);
    features_of(draft, reinterpret_cast<const int32_t*>(drafts + kBytes), *kinds, row);
    drafts += kBytes + draft.size * sizeof(int32_t);
    relu_layer(row, net->num_features, net->w1, net->b1, net->num_first, first);
    relu_layer(first, net->num_first, net->w2, net->b2, net->num_second, second);
    float sum = *net->b3;
    for (int64_t j = 0; j < net->num_second; ++j) sum += second[j] * net->w3[j];
    yields[i] = sum;
  }
}
}
