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

// One draft as the caller packs it, without gaps: the look-up's own words, with `size` ids and as many probabilities
// behind them, and what is known of its place.
struct Match {
  double score;
  int32_t match_length, is_local, size;
  float predicted;  // not read
};

struct Place {
  int32_t prompt_length, num_emitted;
  float recent[kRecent], accepted, cache_accepted, cache_rate;
};

template <class T>
T taken(const char*& at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  at += sizeof value;
  return value;
}

// The features of the draft at `at`; returns what follows it.
const char* features_of(const char* at, const Kinds& kinds, float* out) {
  const Match match = taken<Match>(at);
  const char *ids = at, *last = at + (2 * match.size - 1) * sizeof(int32_t);
  const float last_probability = taken<float>(last);
  at += 2 * match.size * sizeof(int32_t);
  const Place place = taken<Place>(at);
  const double size = match.size, emitted = place.num_emitted;
  *out++ = match.score;
  *out++ = match.match_length;
  *out++ = size;
  *out++ = match.score / size;
  *out++ = last_probability;
  *out++ = match.is_local;
  *out++ = place.prompt_length;
  *out++ = emitted;
  *out++ = emitted / (place.prompt_length + emitted);
  for (float accepted : place.recent) *out++ = accepted;
  *out++ = place.accepted;
  *out++ = place.cache_accepted;
  *out++ = place.cache_rate;
  int count[kKinds] = {}, first[kKinds] = {match.size, match.size, match.size, match.size};
  for (int i = 0; i < match.size; ++i) {
    const int32_t id = taken<int32_t>(ids);
    const uint8_t flags = kinds.flags[id < kinds.last ? id : kinds.last];
    for (int kind = 0; kind < kKinds; ++kind)
      if (flags >> kind & 1 && ++count[kind] == 1) first[kind] = i;
  }
  for (int kind = 0; kind < kKinds; ++kind) *out++ = count[kind] / size, *out++ = first[kind] / size;
  return at;
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
    drafts = features_of(drafts, *kinds, row);
    relu_layer(row, net->num_features, net->w1, net->b1, net->num_first, first);
    relu_layer(first, net->num_first, net->w2, net->b2, net->num_second, second);
    float sum = *net->b3;
    for (int64_t j = 0; j < net->num_second; ++j) sum += second[j] * net->w3[j];
    yields[i] = sum;
  }
}
}
