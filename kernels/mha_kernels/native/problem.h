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

inline Inputs inputs(const Floats& query, const Floats& key, const Floats& value, const Floats& scale, const Ints& places,
              const Floats& keep, const Ints& query_ids, const Ints& key_ids, const Floats& line, const Bytes& open) {
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

// used (B, Q + K): whether a query or key is in any allowed pair. What is in none may hold anything, NaN included.
inline void find_used(const Inputs& in, unsigned char* used, ffi::ThreadPool pool) {
  const long length_q = in.p.length_q, length_k = in.p.length_k;
  for_each(pool, in.p.batch, [&](long b) {
    const Example at = in.example(b);
    unsigned char *queries = used + b * (length_q + length_k), *keys = queries + length_q;
    for (long i = 0; i < length_q; i++) {
      queries[i] = 0;
      for (long j = at.first(i), last = at.last(i); j < last && !queries[i]; j++) queries[i] = at.allowed(i, j);
    }
    for (long j = 0; j < length_k; j++) {
      keys[j] = 0;
      const long from = std::clamp<int64_t>(j - at.high, 0, length_q);
      const long to = std::clamp<int64_t>(j - at.low + 1, from, length_q);
      for (long i = from; i < to && !keys[j]; i++) keys[j] = at.allowed(i, j);
    }
  });
}

// The panels of a chunk that queries `from` to `to` may attend, as multiples of PANEL from key `begin` on.
inline std::pair<long, long> reach(const Example& at, long from, long to, long begin, long end) {
  const long first = std::max(at.first(from) / PANEL * PANEL, begin);
  const long last = std::min(round_up(at.last(to - 1), PANEL), end);
  return {first, std::max(first, last)};
}

}  // namespace mha
