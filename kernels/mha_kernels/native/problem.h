// The problem as XLA hands it over, for both passes: sizes, operands, which queries and keys are used, and threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "scores.h"
#include "xla/ffi/api/ffi.h"

namespace mha {

namespace ffi = xla::ffi;
using Floats = ffi::Buffer<ffi::F32>;
using Ints = ffi::Buffer<ffi::S32>;
using Bytes = ffi::Buffer<ffi::U8>;
using FloatResult = ffi::Result<Floats>;
using ByteResult = ffi::Result<Bytes>;

// work(0) .. work(count - 1) on the threads of XLA's pool, this one among them. It never waits for a task that has not
// begun, so calls from inside the pool cannot block each other.
inline void for_each(ffi::ThreadPool pool, long count, const std::function<void(long)>& work) {
  struct Progress {
    std::atomic<long> next{0}, done{0};
  };
  auto progress = std::make_shared<Progress>();
  const auto* job = &work;  // alive until all are done; a late thread finds none left and does not touch it
  auto run = [progress, count, job] {
    for (long n; (n = progress->next.fetch_add(1)) < count;) {
      (*job)(n);
      progress->done.fetch_add(1);
    }
  };
  for (long n = 1; n < std::min<long>(count, pool.num_threads()); n++) pool.Schedule(std::function<void()>(run));
  run();
  while (progress->done.load() < count) std::this_thread::yield();
}

constexpr int64_t UNBOUNDED = std::numeric_limits<int>::min(), FAR = int64_t{1} << 40;

struct Problem {
  long batch, length_q, length_k, heads, groups, width, value_width;
  long keys() const { return round_up(length_k, PANEL); }
  long padded() const { return round_up(width, LANES); }
  long value_padded() const { return round_up(value_width, LANES); }
};

// The operands that both passes share.
struct Inputs {
  Problem p;
  const float *query, *key, *value;
  const float* scale;  // (B,)
  const int* places;  // (B, 4): bounds low and high of key - query, positions of query 0 and key 0
  const float* keep;
  const int *query_ids, *key_ids;
  const float* line;
  long line_rows, line_heads, line_length, columns;
  const unsigned char* open;

  Example example(long b) const {
    const int* place = places + 4 * b;
    const int64_t low = place[0], high = place[1], shift = int64_t{place[3]} - place[2];
    return {p.length_q,
            p.length_k,
            low == UNBOUNDED ? -FAR : low - shift,
            high == UNBOUNDED ? FAR : high - shift,
            shift,
            place[3],
            keep ? keep + b * columns : nullptr,
            query_ids ? query_ids + b * p.length_q : nullptr,
            key_ids ? key_ids + b * columns : nullptr};
  }
  const float* line_of(long b, long h) const {
    if (!line) return nullptr;
    return line + ((line_rows > 1 ? b : 0) * line_heads + (line_heads > 1 ? h : 0)) * line_length;
  }
  bool is_open(long b, long h) const { return !open || open[b * p.heads + h]; }
  const float* query_row(long b, long i, long h) const {
    return query + ((b * p.length_q + i) * p.heads + h) * p.width;
  }
};

template <typename T, typename Buffer>
const T* given(const Buffer& buffer) {  // an empty array stands for none
  return buffer.element_count() ? buffer.typed_data() : nullptr;
}

inline Inputs inputs(const Floats& query, const Floats& key, const Floats& value, const Floats& scale,
                     const Ints& places, const Floats& keep, const Ints& query_ids, const Ints& key_ids,
                     const Floats& line, const Bytes& open) {
  const auto q = query.dimensions(), k = key.dimensions();
  const Problem p{q[0], q[1], k[1], q[2], k[2], q[3], value.dimensions()[3]};
  const auto rows = line.dimensions();
  return {p,
          query.typed_data(),
          key.typed_data(),
          value.typed_data(),
          scale.typed_data(),
          places.typed_data(),
          given<float>(keep),
          given<int>(query_ids),
          given<int>(key_ids),
          given<float>(line),
          rows[0],
          rows[1],
          rows[2],
          round_up(k[1], 64),
          given<unsigned char>(open)};
}

// Whether test(n) holds for any n from `from` to `to`; `likely` is looked at first.
template <typename Test>
inline bool any(long from, long to, long likely, Test test) {
  if (from >= to) return false;
  if (test(std::clamp(likely, from, to - 1))) return true;
  for (long n = from; n < to; n++)
    if (test(n)) return true;
  return false;
}

// used (B, Q + K): whether a query or key is in any allowed pair. What is in none may hold anything, NaN included.
inline void find_used(const Inputs& in, unsigned char* used, ffi::ThreadPool pool) {
  const long length_q = in.p.length_q, length_k = in.p.length_k;
  for_each(pool, in.p.batch, [&](long b) {
    const Example at = in.example(b);
    unsigned char *queries = used + b * (length_q + length_k), *keys = queries + length_q;
    std::vector<long> kept(length_k + 1);  // how many of the first keys are no padding
    for (long j = 0; j < length_k; j++) kept[j + 1] = kept[j] + (!at.keep || at.keep[j] != 0);
    for (long i = 0; i < length_q; i++) {
      const long from = at.first(i), to = at.last(i);
      queries[i] = kept[to] > kept[from] && any(from, to, i, [&](long j) { return at.allowed(i, j); });
    }
    for (long j = 0; j < length_k; j++) {
      const long from = std::clamp<int64_t>(j - at.high, 0, length_q);
      const long to = std::clamp<int64_t>(j - at.low + 1, from, length_q);
      keys[j] = kept[j + 1] > kept[j] && any(from, to, j, [&](long i) { return at.allowed(i, j); });
    }
  });
}

// Whether the ids of queries `from` to `to` and of a panel of keys overlap, and the panel has a key that is no padding.
inline bool may_meet(const Example& at, long from, long to, long panel) {
  const long end = std::min(panel + PANEL, at.length_k);
  if (at.keep && std::all_of(at.keep + panel, at.keep + end, [](float keep) { return keep == 0; })) return false;
  if (!at.key_ids) return true;
  const auto [low, high] = std::minmax_element(at.query_ids + from, at.query_ids + to);
  const auto [key_low, key_high] = std::minmax_element(at.key_ids + panel, at.key_ids + end);
  return *low <= *key_high && *key_low <= *high;
}

// The panels of a chunk, from key `begin` to `end`, without those at both ends that queries `from` to `to` cannot
// attend.
inline std::pair<long, long> reach(const Example& at, long from, long to, long begin, long end) {
  long first = std::max(at.first(from) / PANEL * PANEL, begin);
  long last = std::min(round_up(at.last(to - 1), PANEL), end);
  if (at.keep || at.key_ids) {
    while (first < last && !may_meet(at, from, to, first)) first += PANEL;
    while (first < last && !may_meet(at, from, to, last - PANEL)) last -= PANEL;
  }
  return {first, std::max(first, last)};
}

}  // namespace mha
