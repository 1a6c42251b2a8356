// The yield predictor: what YieldPredictor.predict defines, for a few rows, in one call.

#include <cstdint>

namespace {

// Weights by input, w[in, out]; the first layer has the normalisation in it.
struct Network {
  const float *w1, *b1, *w2, *b2, *w3, *b3;
  int64_t num_features, num_first, num_second;
};

// out = max(0, x w + b). Weights of inputs that are 0, as half of the hidden ones are, are not read. NaN stays NaN.
void relu_layer(const float* x, int64_t num_in, const float* w, const float* b, int64_t num_out, float* out) {
  for (int64_t j = 0; j < num_out; ++j) out[j] = b[j];
  for (int64_t i = 0; i < num_in; ++i) {
    if (x[i] == 0.0f) continue;
    const float* row = w + i * num_out;
    for (int64_t j = 0; j < num_out; ++j) out[j] += x[i] * row[j];
  }
  for (int64_t j = 0; j < num_out; ++j) out[j] = out[j] < 0.0f ? 0.0f : out[j];
}

}  // namespace

extern "C" {

// rows[count, num_features] to yields[count]; hidden has room for num_first + num_second.
void dh_yields(const Network* net, const float* rows, int64_t count, float* hidden, float* yields) {
  float *first = hidden, *second = hidden + net->num_first;
  for (int64_t row = 0; row < count; ++row) {
    relu_layer(rows + row * net->num_features, net->num_features, net->w1, net->b1, net->num_first, first);
    relu_layer(first, net->num_first, net->w2, net->b2, net->num_second, second);
    float sum = *net->b3;
    for (int64_t j = 0; j < net->num_second; ++j) sum += second[j] * net->w3[j];
    yields[row] = sum;
  }
}
}
