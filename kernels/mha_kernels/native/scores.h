// Rows of scores: which keys a query may attend, the exponential, the running softmax and its gradient.
//
// The same formulas as mha_kernels/algebra/tile.py, on one row of a chunk of keys that lies in the first cache.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "product.h"

namespace mha {

inline IntVector as_int(Vector x) { return (IntVector)x; }
inline Vector as_float(IntVector x) { return (Vector)x; }

constexpr float INF = std::numeric_limits<float>::infinity();

// exp(x) = 2^n 2^f with n an integer and |f| <= 1/2; 2^f by a polynomial of least relative error, 8e-8. 0 below -87.3
// and NaN for NaN; x is at most 88.
inline Vector exponential(Vector x) {
  constexpr float LOG2_E = 1.44269504f, MAGIC = 12582912.0f;  // adding 1.5 * 2^23 leaves n in the low bits
  const Vector shifted = x * LOG2_E + MAGIC;
  const Vector f = x * LOG2_E - (shifted - MAGIC);
  Vector p = f * 1.3276472e-3f + 9.6755413e-3f;
  p = p * f + 5.5507133e-2f;
  p = p * f + 2.4022120e-1f;
  p = p * f + 6.9314697e-1f;
  p = p * f + 1.0000001f;
  const IntVector power = (as_int(shifted) << 23) + (127 << 23);  // 2^n
  return x < -87.3f ? Vector{} : p * as_float(power);  // a product, so that NaN stays NaN whatever its bits
}

inline IntVector lanes() {
  IntVector result;
  for (int n = 0; n < LANES; n++) result[n] = n;
  return result;
}
#if defined(__AVX512F__)
inline float largest(Vector x) { return _mm512_reduce_max_ps((__m512)x); }
inline float total(Vector x) { return _mm512_reduce_add_ps((__m512)x); }
#else
inline float largest(Vector x) {
  float result = x[0];
  for (int n = 1; n < LANES; n++) result = x[n] > result ? x[n] : result;
  return result;
}
inline float total(Vector x) {
  float result = 0;
  for (int n = 0; n < LANES; n++) result += x[n];
  return result;
}
#endif

// Statistics that are means over the keys, in the order of MOMENTS in tile.py; `moments` of a call is a set of bits.
enum Moment { ENTROPY, DISTANCE, SINK_MASS, DIAGONAL_MASS, PREVIOUS_MASS, MOMENTS };

// What one example masks and where it lies. Keys first_key.. and distances key - query are positions; i, j are indices.
struct Example {
  long length_q, length_k;
  int64_t low, high;         // low <= j - i <= high
  int64_t shift, first_key;  // position of key 0 less that of query 0, and position of key 0
  const float* keep;         // 0 forbids the key; null: none is forbidden
  const int *query_ids, *key_ids;  // equal ids may attend; null: all

  long first(long i) const { return std::clamp<int64_t>(i + low, 0, length_k); }
  long last(long i) const { return std::clamp<int64_t>(i + high + 1, first(i), length_k); }
  bool allowed(long i, long j) const { return (!keep || keep[j] != 0) && (!key_ids || query_ids[i] == key_ids[j]); }
};

// A row of scores s_ij, j from `from` to `to`, in place: the bias added and -inf where i may not attend.
inline void finish_scores(const Example& at, long i, long from, long to, const float* line, float* scores) {
  const long first = at.first(i), last = at.last(i);
  const bool masked = from < first || to > last || at.keep || at.key_ids;
  if (!masked && !line) return;
  for (long j = from; j < to; j += LANES) {
    Vector s = load(scores + j - from);
    if (line) s += load(line + j - i + at.length_q - 1);
    if (masked) {
      const IntVector index = lanes() + static_cast<int>(j);
      IntVector yes = (index >= static_cast<int>(first)) & (index < static_cast<int>(last));
      if (at.keep) yes &= load(at.keep + j) != Vector{};
      if (at.key_ids) {
        IntVector ids;
        std::memcpy(&ids, at.key_ids + j, sizeof ids);
        yes &= ids == at.query_ids[i];
      }
      s = yes ? s : all(-INF);
    }
    store(scores + j - from, s);
  }
}

// The number that a statistic averages at keys j.. of query i.
inline Vector moment_weight(int moment, const Example& at, long i, long j) {
  const IntVector distance = lanes() + static_cast<int>(j - i + at.shift);
  if (moment == DISTANCE) return __builtin_convertvector(distance < 0 ? -distance : distance, Vector);
  const IntVector place = lanes() + static_cast<int>(j + at.first_key);
  const IntVector yes = moment == SINK_MASS ? place == 0 : moment == DIAGONAL_MASS ? distance == 0 : distance == -1;
  return yes ? all(1.0f) : Vector{};
}

// The running softmax of one query: maximum m, sum of exp(s - m), and the sums of exp(s - m) x of its moments.
struct Softmax {
  float maximum = -INF, sum = 0, moment[MOMENTS] = {};
};

// Takes in a row of scores, which becomes exp(s - m); returns what everything summed before is to be multiplied with.
inline float softmax_update(Softmax& state, float* scores, long count, int moments, const Example& at, long i,
                            long from) {
  Vector top = all(-INF);
  for (long j = 0; j < count; j += LANES) {
    const Vector s = load(scores + j);
    top = s > top ? s : top;
  }
  const float maximum = std::max(state.maximum, largest(top));
  const float shift = maximum == -INF ? 0 : maximum;
  const float decay = state.sum == 0 ? 0 : exponential(all(state.maximum - shift))[0];
  Vector sum{}, entropy{};
  for (long j = 0; j < count; j += LANES) {
    const Vector away = load(scores + j) - shift;
    const Vector weight = exponential(away);
    store(scores + j, weight);
    sum += weight;
    if (moments & 1 << ENTROPY) entropy += weight * (away < -200.0f ? all(-200.0f) : away);
  }
  if (moments & 1 << ENTROPY) {
    if (state.sum > 0) state.moment[ENTROPY] += (state.maximum - shift) * state.sum;
    state.moment[ENTROPY] = state.moment[ENTROPY] * decay + total(entropy);
  }
  for (int moment = DISTANCE; moment < MOMENTS; moment++) {
    if (!(moments & 1 << moment)) continue;
    Vector found{};
    for (long j = 0; j < count; j += LANES) found += load(scores + j) * moment_weight(moment, at, i, from + j);
    state.moment[moment] = state.moment[moment] * decay + total(found);
  }
  state.sum = state.sum * decay + total(sum);
  state.maximum = maximum;
  return decay;
}

// What the backward pass knows of one query: lse (+inf where it attends nothing), sum_j p_j dp_j, and the cotangents of
// its moments.
struct QueryRow {
  float lse, correction, cotangent[MOMENTS];
};

// A row of scores and of value products dp becomes one of probabilities and of score gradients, which are also added to
// the gradient of the line of biases.
inline void score_gradients(const QueryRow& row, int moments, const Example& at, long i, long from, long to,
                            float* scores, float* products, float* of_line) {
  for (long j = 0; j < to - from; j += LANES) {
    const Vector s = load(scores + j), log_weight = s - row.lse;
    const Vector weight = exponential(log_weight);
    Vector gradient = load(products + j) - row.correction;
    if (moments & 1 << ENTROPY) gradient -= row.cotangent[ENTROPY] * ((weight > 0.0f ? log_weight : Vector{}) + 1.0f);
    for (int moment = DISTANCE; moment < MOMENTS; moment++)
      if (moments & 1 << moment) gradient += row.cotangent[moment] * moment_weight(moment, at, i, from + j);
    gradient = s == -INF ? Vector{} : weight * gradient;
    store(scores + j, weight);
    store(products + j, gradient);
    if (of_line) {
      float* to_line = of_line + from + j - i + at.length_q - 1;
      store(to_line, load(to_line) + gradient);
    }
  }
}

}  // namespace mha
