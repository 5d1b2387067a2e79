// Products of small matrices: C (rows x width) = or += A (rows x n) B (n x width), B packed into panels of columns.
//
// A panel holds up to PANEL columns of B, row after row, its width a multiple of LANES. The inner kernel keeps a block
// of C in registers, 6 rows by one panel, and walks along n: one row of the panel is loaded, one entry of each row of A
// is multiplied in. A's strides are free, so a transposed A costs nothing.

#pragma once

#include <cstring>
#include <utility>

namespace mha {

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;
#elif defined(__AVX__)
constexpr int LANES = 8, VECTORS = 2;
#else
constexpr int LANES = 4, VECTORS = 4;
#endif
constexpr long PANEL = LANES * VECTORS, ROWS = 6;

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int IntVector __attribute__((vector_size(4 * LANES)));

inline Vector load(const float* from) {
  Vector result;
  std::memcpy(&result, from, sizeof(Vector));
  return result;
}
inline void store(float* to, Vector value) { std::memcpy(to, &value, sizeof(Vector)); }
inline Vector all(float value) { return value - Vector{}; }
inline IntVector all(int value) { return value - IntVector{}; }
inline long round_up(long n, long to) { return (n + to - 1) / to * to; }

// A matrix by its first entry and strides.
struct Strided {
  const float* first;
  long row, column;
};

template <int R, int V>
inline void block(Strided a, const float* panel, long n, float* c, long c_row, bool add) {
  Vector sum[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) sum[r][v] = add ? load(c + r * c_row + v * LANES) : Vector{};
  for (long k = 0; k < n; k++) {
    Vector b[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) b[v] = load(panel + (k * V + v) * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Vector entry = all(a.first[r * a.row + k * a.column]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sum[r][v] += entry * b[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) store(c + r * c_row + v * LANES, sum[r][v]);
}

template <int V>
inline void block_of(long rows, Strided a, const float* panel, long n, float* c, long c_row, bool add) {
  switch (rows) {
    case 6: return block<6, V>(a, panel, n, c, c_row, add);
    case 5: return block<5, V>(a, panel, n, c, c_row, add);
    case 4: return block<4, V>(a, panel, n, c, c_row, add);
    case 3: return block<3, V>(a, panel, n, c, c_row, add);
    case 2: return block<2, V>(a, panel, n, c, c_row, add);
    default: return block<1, V>(a, panel, n, c, c_row, add);
  }
}

// One panel, `width` columns of it (a multiple of LANES), for up to ROWS rows.
inline void product(long rows, Strided a, const float* panel, long width, long n, float* c, long c_row, bool add) {
  switch (width / LANES) {
    case 4: if constexpr (VECTORS >= 4) return block_of<4>(rows, a, panel, n, c, c_row, add);
    case 3: if constexpr (VECTORS >= 3) return block_of<3>(rows, a, panel, n, c, c_row, add);
    case 2: return block_of<2>(rows, a, panel, n, c, c_row, add);
    default: return block_of<1>(rows, a, panel, n, c, c_row, add);
  }
}

// All panels of a B with `width` columns (a multiple of LANES), of whose n rows `from` to `to` take part. A starts at
// row `from` of B.
inline void product_panels(long rows, Strided a, const float* panels, long width, long n, long from, long to, float* c,
                           long c_row, bool add) {
  for (long at = 0; at < width; at += PANEL) {
    const long wide = width - at < PANEL ? width - at : PANEL;
    product(rows, a, panels + at * n + from * wide, wide, to - from, c + at, c_row, add);
  }
}

// Rows (n x width, strided) as panels `height` rows high, padded with zeros below and to whole vectors; rows whose
// `used` is 0 become zero.
inline void pack(const float* rows, long row, long n, long height, long width, const unsigned char* used,
                 float* panels) {
  const long padded = round_up(width, LANES);
  for (long at = 0; at < padded; at += PANEL) {
    const long wide = padded - at < PANEL ? padded - at : PANEL, real = width - at < wide ? width - at : wide;
    float* to = panels + at * height;
    for (long k = 0; k < height; k++, to += wide) {
      const long kept = k < n && used[k] ? real : 0;
      std::memcpy(to, rows + k * row + at, kept * sizeof(float));
      std::memset(to + kept, 0, (wide - kept) * sizeof(float));
    }
  }
}

// a and b hold rows whose lanes differ in bit S of their number; afterwards that bit tells rows apart.
template <int S, size_t... N>
inline void exchange(Vector& a, Vector& b, std::index_sequence<N...>) {
  const Vector low = __builtin_shufflevector(a, b, (N & S ? LANES + N - S : N)...);
  b = __builtin_shufflevector(a, b, (N & S ? LANES + N : N + S)...);
  a = low;
}
template <int S>
inline void transpose(Vector* rows) {
#pragma GCC unroll 16
  for (int n = 0; n < LANES; n++)
    if (!(n & S)) exchange<S>(rows[n], rows[n + S], std::make_index_sequence<LANES>());
  if constexpr (S > 1) transpose<S / 2>(rows);
}

// Rows (count x n, strided) as the panels of their transpose (n x count padded to whole panels).
inline void pack_transposed(const float* rows, long row, long count, long n, const unsigned char* used, float* panels) {
  for (long at = 0; at < round_up(count, PANEL); at += LANES) {
    float* to = panels + at / PANEL * PANEL * n + at % PANEL;
    bool whole = at + LANES <= count;
    for (long c = 0; c < LANES && whole; c++) whole = used[at + c];
    long k = 0;
    for (; whole && k + LANES <= n; k += LANES) {
      Vector square[LANES];
#pragma GCC unroll 16
      for (int c = 0; c < LANES; c++) square[c] = load(rows + (at + c) * row + k);
      transpose<LANES / 2>(square);
#pragma GCC unroll 16
      for (int c = 0; c < LANES; c++) store(to + (k + c) * PANEL, square[c]);
    }
    for (; k < n; k++)
      for (long c = 0; c < LANES; c++)
        to[k * PANEL + c] = at + c < count && used[at + c] ? rows[(at + c) * row + k] : 0;
  }
}

}  // namespace mha
