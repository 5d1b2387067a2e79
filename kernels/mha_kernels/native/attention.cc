// Attention on the CPU in one pass over tiles that stay in the cache, float32, forward and backward.
//
// Forward: a task is one head and QUERY_TILE queries. For each chunk of keys and each six queries: products q.k into a
// row of scores, softmax, and the product with the values, all while the scores lie in the first cache. Only panels of
// keys that some of the six may attend are touched.
//
// Backward: a task is one key/value head, so that nothing is added by two threads and every sum has a fixed order. For
// each of its query heads, chunk of keys and tile of queries: scores and probabilities again, then the five products.
//
// Arrays are (B, L, heads, width) as JAX holds them. `Operands` in operands.py says what each operand is.

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "problem.h"

namespace mha {
namespace {

// Queries of a task and keys of a chunk forward, which the second cache holds; and backward, where rows of a tile are
// apart by no power of two, which would share cache sets.
constexpr long QUERY_TILE = 192, CHUNK = 512;
constexpr long BACK_TILE = 96, BACK_CHUNK = 256, BACK_ROW = BACK_CHUNK + LANES;

struct Forward {
  Inputs in;
  const unsigned char* used;
  const float *keys, *values;  // packed: transposed keys, values
  float *output, *maximum, *sum, *moments;
  int wanted;
};

void forward_task(const Forward& f, long task) {
  const Problem& p = f.in.p;
  const long tiles = (p.length_q + QUERY_TILE - 1) / QUERY_TILE;
  const long b = task / tiles / p.heads, h = task / tiles % p.heads, begin = task % tiles * QUERY_TILE;
  const long end = std::min(begin + QUERY_TILE, p.length_q), count = end - begin, wide = p.value_padded();
  const Example at = f.in.example(b);
  std::vector<Softmax> state(count);
  std::vector<float> query(count * p.width), attended(count * wide), scores(ROWS * CHUNK);
  const float* line = f.in.line_of(b, h);
  const long group = b * p.groups + h / (p.heads / p.groups);
  const float *keys = f.keys + group * p.keys() * p.width, *values = f.values + group * p.keys() * wide;
  const bool is_open = f.in.is_open(b, h);
  for (long i = 0; is_open && i < count; i++)
    if (f.used[b * (p.length_q + p.length_k) + begin + i])
      for (long e = 0; e < p.width; e++) query[i * p.width + e] = f.in.scale[b] * f.in.query_row(b, begin + i, h)[e];
  for (long chunk = 0; is_open && chunk < p.keys(); chunk += CHUNK)
    for (long i = begin; i < end; i += ROWS) {
      const long rows = std::min(ROWS, end - i);
      const auto [first, last] = reach(at, i, i + rows, chunk, std::min(chunk + CHUNK, p.keys()));
      if (first == last) continue;
      for (long j = first; j < last; j += PANEL)
        product(rows, {&query[(i - begin) * p.width], p.width, 1}, keys + j * p.width, PANEL, p.width,
                &scores[j - first], CHUNK, false);
      for (long r = 0; r < rows; r++) {
        float* row = &scores[r * CHUNK];
        finish_scores(at, i + r, first, last, line, row);
        const float decay = softmax_update(state[i + r - begin], row, last - first, f.wanted, at, i + r, first);
        if (decay != 1)
          for (long v = 0; v < wide; v++) attended[(i + r - begin) * wide + v] *= decay;
      }
      product_panels(rows, {scores.data(), CHUNK, 1}, values, wide, p.keys(), first, last,
                     &attended[(i - begin) * wide], wide, true);
    }
  for (long i = 0; i < count; i++) {
    const long row = (b * p.heads + h) * p.length_q + begin + i;
    const float share = state[i].sum == 0 ? 0 : 1 / state[i].sum;
    float* output = f.output + ((b * p.length_q + begin + i) * p.heads + h) * p.value_width;
    for (long v = 0; v < p.value_width; v++) output[v] = attended[i * wide + v] * share;
    f.maximum[row] = std::isnan(state[i].sum) ? state[i].sum : state[i].maximum;
    f.sum[row] = state[i].sum;
    for (int moment = 0, place = 0; moment < MOMENTS; moment++)
      if (f.wanted & 1 << moment) f.moments[place++ * p.batch * p.heads * p.length_q + row] = state[i].moment[moment];
  }
}

ffi::Error forward(ffi::ThreadPool pool, Floats query, Floats key, Floats value, Floats scale, Ints places, Floats keep,
                   Ints query_ids, Ints key_ids, Floats line, Bytes open, FloatResult output, FloatResult maximum,
                   FloatResult sum, FloatResult moments, FloatResult packed_keys, FloatResult packed_values,
                   ByteResult used, int64_t wanted) {
  const Inputs in = inputs(query, key, value, scale, places, keep, query_ids, key_ids, line, open);
  const Problem& p = in.p;
  find_used(in, used->typed_data(), pool);
  for_each(pool, p.batch * p.groups, [&](long n) {
    const long b = n / p.groups, g = n % p.groups;
    const unsigned char* of_keys = used->typed_data() + b * (p.length_q + p.length_k) + p.length_q;
    pack_transposed(in.key + (b * p.length_k * p.groups + g) * p.width, p.groups * p.width, p.length_k, p.width,
                    of_keys, packed_keys->typed_data() + n * p.keys() * p.width);
    pack(in.value + (b * p.length_k * p.groups + g) * p.value_width, p.groups * p.value_width, p.length_k, p.keys(),
         p.value_width, of_keys, packed_values->typed_data() + n * p.keys() * p.value_padded());
  });
  const Forward f{in,
                  used->typed_data(),
                  packed_keys->typed_data(),
                  packed_values->typed_data(),
                  output->typed_data(),
                  maximum->typed_data(),
                  sum->typed_data(),
                  moments->typed_data(),
                  static_cast<int>(wanted)};
  for_each(pool, p.batch * p.heads * ((p.length_q + QUERY_TILE - 1) / QUERY_TILE), [&](long n) { forward_task(f, n); });
  return ffi::Error::Success();
}

struct Backward {
  Inputs in;
  const unsigned char* used;
  const float *lse, *correction, *cotangent, *of_moments;
  float *dq, *dk, *dv, *of_line;
  int wanted;
};

// A tile of queries of one head and their output cotangents, as rows and as panels.
struct QueryTile {
  long begin, count;
  std::vector<float> query, cotangent, query_panels, cotangent_panels;
  std::vector<QueryRow> rows;
};

QueryTile load_queries(const Backward& f, long b, long h, long begin) {
  const Problem& p = f.in.p;
  const long count = std::min(BACK_TILE, p.length_q - begin), width = p.width, value_width = p.value_width;
  QueryTile tile{begin,
                 count,
                 std::vector<float>(count * width),
                 std::vector<float>(count * value_width),
                 std::vector<float>(count * p.padded()),
                 std::vector<float>(count * p.value_padded()),
                 std::vector<QueryRow>(count)};
  const unsigned char* used = f.used + b * (p.length_q + p.length_k) + begin;
  for (long i = 0; i < count; i++) {
    const long row = (b * p.heads + h) * p.length_q + begin + i;
    const float* cotangent = f.cotangent + ((b * p.length_q + begin + i) * p.heads + h) * value_width;
    for (long e = 0; e < width && used[i]; e++)
      tile.query[i * width + e] = f.in.scale[b] * f.in.query_row(b, begin + i, h)[e];
    for (long v = 0; v < value_width && used[i]; v++) tile.cotangent[i * value_width + v] = cotangent[v];
    tile.rows[i].lse = f.lse[row];
    tile.rows[i].correction = f.correction[row];
    for (int moment = 0, place = 0; moment < MOMENTS; moment++)
      if (f.wanted & 1 << moment)
        tile.rows[i].cotangent[moment] = f.of_moments[place++ * p.batch * p.heads * p.length_q + row];
  }
  pack(tile.query.data(), width, count, count, width, used, tile.query_panels.data());
  pack(tile.cotangent.data(), value_width, count, count, value_width, used, tile.cotangent_panels.data());
  return tile;
}

// Keys and values of one head and chunk as panels.
struct KeyChunk {
  std::vector<float> keys, keys_transposed, values_transposed;
};

struct Gradients {
  std::vector<float> dq, dk, dv;
};

// Adds what one tile of queries and one chunk of keys give. scores and products hold (BACK_TILE, BACK_ROW).
void backward_tile(const Backward& f, const Example& at, const QueryTile& tile, const KeyChunk& chunk, long from,
                   long to, const float* line, float* of_line, float* scores, float* products,
                   Gradients& sums) {
  const Problem& p = f.in.p;
  const long wide = p.padded(), value_wide = p.value_padded(), begin = tile.begin, count = tile.count;
  std::vector<std::pair<long, long>> reached;  // of each six queries, from the chunk's first key on
  for (long i = 0; i < count; i += ROWS) {
    const long rows = std::min(ROWS, count - i);
    const auto [first, last] = reach(at, begin + i, begin + i + rows, from, to);
    reached.push_back({first - from, last - from});
    if (first == last) continue;
    for (long j = first - from; j < last - from; j += PANEL) {
      product(rows, {&tile.query[i * p.width], p.width, 1}, &chunk.keys_transposed[j * p.width], PANEL, p.width,
              scores + i * BACK_ROW + j, BACK_ROW, false);
      product(rows, {&tile.cotangent[i * p.value_width], p.value_width, 1}, &chunk.values_transposed[j * p.value_width],
              PANEL, p.value_width, products + i * BACK_ROW + j, BACK_ROW, false);
    }
    for (long r = i; r < i + rows; r++) {
      float* row = scores + r * BACK_ROW + first - from;
      finish_scores(at, begin + r, first, last, line, row);
      score_gradients(tile.rows[r], f.wanted, at, begin + r, first, last, row, products + r * BACK_ROW + first - from,
                      of_line);
    }
    product_panels(rows, {products + i * BACK_ROW + first - from, BACK_ROW, 1}, chunk.keys.data(), wide, BACK_CHUNK,
                   first - from, last - from, &sums.dq[(begin + i) * wide], wide, true);
  }
  for (long panel = 0; panel < to - from; panel += PANEL) {
    const auto has = [&](long n) { return reached[n].first <= panel && panel < reached[n].second; };
    long first = count, last = 0;  // the queries that reached this panel
    for (long n = 0; n < static_cast<long>(reached.size()); n++)
      if (has(n)) {
        first = std::min(first, n * ROWS);
        last = std::min((n + 1) * ROWS, count);
      }
    if (first >= last) continue;
    for (long i = first; i < last; i++)  // those between them that did not
      if (!has(i / ROWS)) {
        std::fill_n(scores + i * BACK_ROW + panel, PANEL, 0.0f);
        std::fill_n(products + i * BACK_ROW + panel, PANEL, 0.0f);
      }
    for (long j = panel; j < panel + PANEL; j += ROWS) {
      const long rows = std::min(ROWS, panel + PANEL - j), place = first * BACK_ROW + j;
      product_panels(rows, {scores + place, 1, BACK_ROW}, tile.cotangent_panels.data(), value_wide, count, first, last,
                     &sums.dv[(from + j) * value_wide], value_wide, true);
      product_panels(rows, {products + place, 1, BACK_ROW}, tile.query_panels.data(), wide, count, first, last,
                     &sums.dk[(from + j) * wide], wide, true);
    }
  }
}

void backward_task(const Backward& f, long task) {
  const Problem& p = f.in.p;
  const long b = task / p.groups, g = task % p.groups, repeats = p.heads / p.groups;
  const long wide = p.padded(), value_wide = p.value_padded();
  const Example at = f.in.example(b);
  const unsigned char* used = f.used + b * (p.length_q + p.length_k) + p.length_q;
  KeyChunk chunk{std::vector<float>(BACK_CHUNK * wide), std::vector<float>(BACK_CHUNK * p.width),
                 std::vector<float>(BACK_CHUNK * p.value_width)};
  Gradients sums{{}, std::vector<float>(p.keys() * wide), std::vector<float>(p.keys() * value_wide)};
  std::vector<float> scores(BACK_TILE * BACK_ROW), products(BACK_TILE * BACK_ROW);
  for (long h = g * repeats; h < (g + 1) * repeats; h++) {
    sums.dq.assign(p.length_q * wide, 0);
    float* of_line = f.of_line ? f.of_line + (b * p.heads + h) * f.in.line_length : nullptr;
    if (of_line) std::fill_n(of_line, f.in.line_length, 0.0f);
    std::vector<QueryTile> tiles;
    for (long begin = 0; f.in.is_open(b, h) && begin < p.length_q; begin += BACK_TILE)
      tiles.push_back(load_queries(f, b, h, begin));
    for (long from = 0; f.in.is_open(b, h) && from < p.keys(); from += BACK_CHUNK) {
      const long to = std::min(from + BACK_CHUNK, p.keys()), count = std::min(to, p.length_k) - from;
      const float* key = f.in.key + ((b * p.length_k + from) * p.groups + g) * p.width;
      const float* value = f.in.value + ((b * p.length_k + from) * p.groups + g) * p.value_width;
      pack(key, p.groups * p.width, count, BACK_CHUNK, p.width, used + from, chunk.keys.data());
      pack_transposed(key, p.groups * p.width, count, p.width, used + from, chunk.keys_transposed.data());
      pack_transposed(value, p.groups * p.value_width, count, p.value_width, used + from,
                      chunk.values_transposed.data());
      for (const QueryTile& tile : tiles) {
        const auto [first, last] = reach(at, tile.begin, tile.begin + tile.count, from, to);
        if (first < last)
          backward_tile(f, at, tile, chunk, from, to, f.in.line_of(b, h), of_line, scores.data(), products.data(),
                        sums);
      }
    }
    for (long i = 0; i < p.length_q; i++)
      for (long e = 0; e < p.width; e++)
        f.dq[((b * p.length_q + i) * p.heads + h) * p.width + e] = f.in.scale[b] * sums.dq[i * wide + e];
  }
  for (long j = 0; j < p.length_k; j++) {
    const long row = (b * p.length_k + j) * p.groups + g;
    std::copy_n(&sums.dk[j * wide], p.width, f.dk + row * p.width);
    std::copy_n(&sums.dv[j * value_wide], p.value_width, f.dv + row * p.value_width);
  }
}

ffi::Error backward(ffi::ThreadPool pool, Floats query, Floats key, Floats value, Floats scale, Ints places,
                    Floats keep, Ints query_ids, Ints key_ids, Floats line, Bytes open, Floats lse, Floats correction,
                    Floats cotangent, Floats of_moments, FloatResult dq, FloatResult dk, FloatResult dv,
                    FloatResult of_line, ByteResult used, int64_t wanted) {
  const Inputs in = inputs(query, key, value, scale, places, keep, query_ids, key_ids, line, open);
  find_used(in, used->typed_data(), pool);
  const Backward f{in,
                   used->typed_data(),
                   lse.typed_data(),
                   correction.typed_data(),
                   cotangent.typed_data(),
                   of_moments.typed_data(),
                   dq->typed_data(),
                   dk->typed_data(),
                   dv->typed_data(),
                   of_line->element_count() ? of_line->typed_data() : nullptr,
                   static_cast<int>(wanted)};
  for_each(pool, in.p.batch * in.p.groups, [&](long n) { backward_task(f, n); });
  return ffi::Error::Success();
}

auto bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<Floats>()   // query
      .Arg<Floats>()   // key
      .Arg<Floats>()   // value
      .Arg<Floats>()   // scale
      .Arg<Ints>()     // places
      .Arg<Floats>()   // keep
      .Arg<Ints>()     // query_ids
      .Arg<Ints>()     // key_ids
      .Arg<Floats>()   // line
      .Arg<Bytes>();   // open
}

}  // namespace
}  // namespace mha

XLA_FFI_DEFINE_HANDLER_SYMBOL(mha_forward, mha::forward,
                              mha::bind()
                                  .Ret<mha::Floats>()  // output
                                  .Ret<mha::Floats>()  // maximum
                                  .Ret<mha::Floats>()  // sum
                                  .Ret<mha::Floats>()  // moments
                                  .Ret<mha::Floats>()  // packed keys
                                  .Ret<mha::Floats>()  // packed values
                                  .Ret<mha::Bytes>()   // used
                                  .Attr<int64_t>("moments"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(mha_backward, mha::backward,
                              mha::bind()
                                  .Arg<mha::Floats>()  // lse
                                  .Arg<mha::Floats>()  // correction
                                  .Arg<mha::Floats>()  // cotangent
                                  .Arg<mha::Floats>()  // of moments
                                  .Ret<mha::Floats>()  // dq
                                  .Ret<mha::Floats>()  // dk
                                  .Ret<mha::Floats>()  // dv
                                  .Ret<mha::Floats>()  // of line
                                  .Ret<mha::Bytes>()   // used
                                  .Attr<int64_t>("moments"));
