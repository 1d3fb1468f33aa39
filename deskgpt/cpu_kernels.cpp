// Kernels for processors with AVX2 or AVX-512: causal attention, activations, softmax, norms, the split into heads
// with norm and rotation, and token shift.
//
// cpu_kernels.py compiles this file, once per machine, and calls the functions under `extern "C"` at its end. All sums
// are in float32. T is float or bfloat16, in which matrices come and are multiplied. Matmuls of blocks are torch's
// brgemm, which is oneDNN's: it takes AMX, AVX512-BF16 or AVX2, whichever the processor has. Vectors are at::vec's, but
// for one instruction that rounds to bfloat16.
//
// Attention follows FlashAttention-2 (Dao, arXiv:2307.08691): blocks of scores stay in the cache, the forward pass
// keeps the logarithm of each softmax's sum, and the backward pass computes the scores again. One thread does a whole
// head, or a part of its rows where there are few heads; no two threads add to one number, so results do not depend on
// their timing.
//
// Shape legend: B batch, H heads, T time, D width of a head. Padded to whole blocks: Tp, Dp.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/native/CPUBlas.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <utility>

namespace {

using at::BFloat16;
using Vec = at::vec::Vectorized<float>;
using VecBF16 = at::vec::Vectorized<BFloat16>;

constexpr int64_t W = Vec::size();      // floats of a vector: 16 with AVX-512, 8 with AVX2
constexpr int64_t PANEL = 64;           // columns of a packed matrix that lie together: the most that AMX tiles take
constexpr int64_t BLOCK = 64;           // rows of queries, and of keys, that are computed together
constexpr int64_t CHUNK = 512;          // keys whose scores exist at once in the forward pass; queries in the backward
constexpr int64_t ROWS_OF_A_TASK = 256; // at least so many rows of a head go to a task of its own
constexpr int64_t APART = 32;           // more elements to the next row: rows 4096 bytes apart share a cache set
constexpr float INF = std::numeric_limits<float>::infinity();

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// ---- vectors of either type: two at a time, since as many bfloat16 as floats fit in one register twice -----------

std::pair<Vec, Vec> load(const float* p) { return {Vec::loadu(p), Vec::loadu(p + W)}; }

std::pair<Vec, Vec> load(const BFloat16* p) {
  auto [a, b] = at::vec::convert_bfloat16_float(VecBF16::loadu(p));
  return {a, b};
}

void store(float* p, Vec a, Vec b) {
  a.store(p);
  b.store(p + W);
}

void store(BFloat16* p, Vec a, Vec b) {
#ifdef __AVX512BF16__  // one instruction in place of at::vec's twenty
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)));
#else
  at::vec::convert_float_bfloat16(a, b).store(p);
#endif
}

// exp(x), off by 2e-7 of it for float and by 1.1e-4 for bfloat16, whose own numbers are 4e-3 apart. Hides NaN.
template <typename T> Vec exponential(Vec x) { return sizeof(T) == 2 ? x.fexp_u20() : x.exp_u20(); }

// n floats, a multiple of 16: GCC makes slow string instructions of memcpy here.
void copy(const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += W) Vec::loadu(from + i).store(to + i);
}

// Writes factor * from[0..n) to `to`. from may be read up to a multiple of 2W.
template <typename T> void store_row(const float* from, float factor, T* to, int64_t n) {
  for (int64_t i = 0; i < n; i += 2 * W) {
    Vec a = Vec::loadu(from + i) * Vec(factor);
    Vec b = Vec::loadu(from + i + W) * Vec(factor);
    if (i + 2 * W <= n) {
      store(to + i, a, b);
    } else {
      T rest[2 * W];
      store(rest, a, b);
      std::memcpy(to + i, rest, (n - i) * sizeof(T));
    }
  }
}

float sum_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

float max_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, x);
}

// The larger one; NaN where one is.
float larger(float a, float b) { return b > a || std::isnan(b) ? b : a; }

// ---- memory of a thread, kept between calls ----------------------------------------------------------------------

struct Arena {
  char* start = nullptr;
  size_t size = 0;
  size_t used = 0;
  bool counts = false;  // take only adds up what is needed

  ~Arena() { std::free(start); }

  // Calls lay_out, which takes all buffers of a call, twice: to add up their bytes, and to hand them out.
  template <typename LayOut> void provide(LayOut lay_out) {
    used = 0;
    counts = true;
    lay_out();
    if (used > size) {
      std::free(start);
      size = 0;
      start = static_cast<char*>(std::aligned_alloc(4096, round_up(used, 4096)));
      if (start == nullptr) throw std::bad_alloc();
      size = used;
    }
    used = 0;
    counts = false;
    lay_out();
  }

  template <typename X> X* take(int64_t n) {
    size_t begin = used;
    used += round_up(n * sizeof(X), 64);
    if (counts) return nullptr;
    TORCH_INTERNAL_ASSERT(used <= size, "a kernel takes more memory than it has asked for");
    return reinterpret_cast<X*>(start + begin);
  }
};

thread_local Arena arena;

// ---- matrices as brgemm wants them -------------------------------------------------------------------------------

template <typename T> constexpr int64_t unit_of_width() { return sizeof(T) == 2 ? 32 : 16; }  // a row of an AMX tile

// The rows of one head of q, k, v or of a result.
template <typename T> struct Rows {
  T* at;
  int64_t stride;
};

// A copy (np, Dp) of n rows of width D, with zeros beyond them: a left operand.
template <typename T> void copy_rows(Rows<const T> from, int64_t n, int64_t D, T* to, int64_t np, int64_t Dp) {
  for (int64_t r = 0; r < np; r++) {
    int64_t kept = r < n ? D : 0;
    if (kept) std::memcpy(to + r * Dp, from.at + r * from.stride, kept * sizeof(T));
    std::memset(static_cast<void*>(to + r * Dp + kept), 0, (Dp - kept) * sizeof(T));
  }
}

// The same rows where they are, if they need no zeros; else a copy in `room`.
template <typename T>
Rows<const T> padded(Rows<const T> x, int64_t n, int64_t D, T* room, int64_t np, int64_t Dp) {
  if (n >= np && D == Dp) return x;
  copy_rows(x, n, D, room, np, Dp);
  return {room, Dp};
}

// A right operand: x (n, Dp) in panels of at most 64 columns. In bfloat16 two rows are interleaved.
template <typename T> void pack(Rows<const T> x, int64_t n, int64_t Dp, T* to) {
  for (int64_t first = 0; first < Dp; first += PANEL) {
    int64_t width = std::min(PANEL, Dp - first);
    T* panel = to + first * n;
    if constexpr (sizeof(T) == 2) {
      for (int64_t r = 0; r < n; r += 2) {
        const uint16_t* even = reinterpret_cast<const uint16_t*>(x.at + r * x.stride + first);
        const uint16_t* odd = even + x.stride;
        uint32_t* pairs = reinterpret_cast<uint32_t*>(panel + r * width);
        for (int64_t c = 0; c < width; c++) pairs[c] = even[c] | static_cast<uint32_t>(odd[c]) << 16;
      }
    } else {
      for (int64_t r = 0; r < n; r++) copy(x.at + r * x.stride + first, panel + r * width, width);
    }
  }
}

// A right operand: the transpose of x (n, Dp) in panels of 64 of its rows, n a multiple of 64. Pairs of bfloat16 move
// as one float, which leaves them interleaved as `pack` has them.
template <typename T> void pack_transposed(Rows<const T> x, int64_t n, int64_t Dp, T* to) {
  int64_t words = Dp * sizeof(T) / sizeof(float);
  for (int64_t first = 0; first < n; first += PANEL) {
    float* panel = reinterpret_cast<float*>(to + first * Dp);
    for (int64_t r = 0; r < PANEL; r += 16) {
      for (int64_t w = 0; w < words; w += 16) {
        const float* from = reinterpret_cast<const float*>(x.at + (first + r) * x.stride) + w;
        at::vec::transpose_mxn<float, 16, 16>(from, x.stride * sizeof(T) / sizeof(float), panel + w * PANEL + r, PANEL);
      }
    }
  }
}

// A left operand (Dp, n), whose rows are ld apart: the transpose of x (n, Dp).
template <typename T> void transpose(Rows<const T> x, int64_t n, int64_t Dp, T* to, int64_t ld) {
  constexpr int64_t UNIT = unit_of_width<T>();
  for (int64_t r = 0; r < n; r += UNIT) {
    for (int64_t d = 0; d < Dp; d += UNIT) {
      at::vec::transpose_mxn<T, UNIT, UNIT>(x.at + r * x.stride + d, x.stride, to + d * ld + r, ld);
    }
  }
}

// Columns [c, c + W) of two rows of a right operand of 64 columns, which begin at `rows`.
void store_pair(float* rows, int64_t c, Vec first, Vec second) {
  first.store(rows + c);
  second.store(rows + PANEL + c);
}

void store_pair(BFloat16* rows, int64_t c, Vec first, Vec second) {
  auto [a, b] = at::vec::interleave2(first, second);
  store(rows + 2 * c, a, b);
}

// Rows of `to` from their transpose (Dp, n_rows), whose rows are ld apart; row r times factor(r). room: 16 * Dp floats.
template <typename T, typename Factor>
void store_transposed(const float* from, int64_t ld, Factor factor, Rows<T> to, int64_t n_rows, int64_t D,
                      float* room) {
  int64_t Dp = round_up(D, unit_of_width<T>());
  for (int64_t t = 0; t < n_rows; t += 16) {
    for (int64_t d = 0; d < Dp; d += 16) {
      at::vec::transpose_mxn<float, 16, 16>(from + d * ld + t, ld, room + d, Dp);
    }
    for (int64_t r = 0; r < std::min<int64_t>(16, n_rows - t); r++) {
      store_row(room + r * Dp, factor(t + r), to.at + (t + r) * to.stride, D);
    }
  }
}

// c (M, N) = a (M, K) @ b, or c + a @ b. b: one packed panel (K, N).
template <typename T>
void multiply(int64_t M, int64_t N, int64_t K, const T* a, int64_t lda, const T* b, float* c, int64_t ldc, bool add) {
  at::native::cpublas::brgemm(M, N, K, lda, N, ldc, add, a, b, c, sizeof(T) == 2);
}

// c (M, Dp) = a (M, K) @ rows [first, first + K) of a packed matrix of n rows, or c + that.
template <typename T>
void multiply_packed(int64_t M, int64_t K, const T* a, int64_t lda, const T* packed, int64_t n, int64_t first,
                     float* c, int64_t Dp, bool add) {
  for (int64_t d = 0; d < Dp; d += PANEL) {
    int64_t width = std::min(PANEL, Dp - d);
    multiply(M, width, K, a, lda, packed + d * n + first * width, c + d, Dp, add);
  }
}

// ---- attention, forward ------------------------------------------------------------------------------------------

// What queries [begin, end) of one head find: rows of o, and the logarithms of the sums of exponentials in lse.
//
// Scores are computed transposed, (keys, queries): what belongs to a query is then one number of a vector.
template <typename T>
void forward_head(Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<T> o, float* lse, int64_t begin, int64_t end,
                  int64_t D) {
  constexpr int64_t N_VECS = BLOCK / W;  // of the queries of a block
  int64_t n = round_up(end, BLOCK);
  int64_t ld = n + APART;
  int64_t Dp = round_up(D, unit_of_width<T>());
  T *room, *v_transposed, *q_packed, *q_room, *weights;
  float *scores, *out, *out_rows;
  arena.provide([&] {
    room = arena.take<T>(n * Dp);
    v_transposed = arena.take<T>(Dp * ld);
    q_packed = arena.take<T>(BLOCK * Dp);
    q_room = arena.take<T>(BLOCK * Dp);
    weights = arena.take<T>(CHUNK * BLOCK);
    scores = arena.take<float>(CHUNK * BLOCK);
    out = arena.take<float>(Dp * BLOCK);
    out_rows = arena.take<float>(16 * Dp + 2 * W);  // store_row reads whole vectors
  });
  transpose(padded(v, end, D, room, n, Dp), n, Dp, v_transposed, ld);
  Rows<const T> keys = padded(k, end, D, room, n, Dp);
  const Vec scale(1 / std::sqrt(static_cast<float>(D)));

  for (int64_t block = begin; block < end; block += BLOCK) {
    int64_t n_rows = std::min(BLOCK, end - block);
    Rows<const T> q_rows{q.at + block * q.stride, q.stride};
    pack_transposed(padded(q_rows, n_rows, D, q_room, BLOCK, Dp), BLOCK, Dp, q_packed);
    float largest[BLOCK];
    float sum[BLOCK];
    std::fill(largest, largest + BLOCK, -INF);
    std::fill(sum, sum + BLOCK, 0.0f);
    int64_t seen = block + BLOCK;  // keys that the last query of the block sees
    for (int64_t chunk = 0; chunk < seen; chunk += CHUNK) {
      int64_t n_keys = std::min(CHUNK, seen - chunk);
      multiply(n_keys, BLOCK, Dp, keys.at + chunk * keys.stride, keys.stride, q_packed, scores, BLOCK, false);
      auto hidden_from = [&](int64_t key) { return std::max<int64_t>(0, chunk + key - block); };  // queries before it
      for (int64_t key = 0; key < n_keys; key++) {
        std::fill(scores + key * BLOCK, scores + key * BLOCK + hidden_from(key), -INF);
      }
      Vec before[N_VECS];
      Vec most[N_VECS];
      Vec total[N_VECS];
      for (int64_t i = 0; i < N_VECS; i++) {
        before[i] = Vec::loadu(largest + i * W);
        most[i] = Vec(-INF);
        total[i] = Vec(0.0f);
      }
      for (int64_t key = 0; key < n_keys; key++) {
        for (int64_t i = 0; i < N_VECS; i++) {
          most[i] = at::vec::maximum(most[i], Vec::loadu(scores + key * BLOCK + i * W));
        }
      }
      for (int64_t i = 0; i < N_VECS; i++) {
        most[i] = at::vec::maximum(before[i], most[i] * scale);
        most[i].store(largest + i * W);
      }
      for (int64_t key = 0; key < n_keys; key += 2) {
        T* pair = weights + key * BLOCK;
        for (int64_t i = 0; i < N_VECS; i++) {
          const float* s = scores + key * BLOCK + i * W;
          Vec a = exponential<T>(Vec::loadu(s) * scale - most[i]);
          Vec b = exponential<T>(Vec::loadu(s + BLOCK) * scale - most[i]);
          total[i] = total[i] + a + b;
          store_pair(pair, i * W, a, b);
        }
      }
      for (int64_t i = 0; i < N_VECS; i++) {
        if (chunk > 0) {
          Vec shrink = exponential<T>(before[i] - most[i]);  // of what earlier chunks have given
          total[i] = at::vec::fmadd(Vec::loadu(sum + i * W), shrink, total[i]);
          for (int64_t d = 0; d < Dp; d++) {
            float* at = out + d * BLOCK + i * W;
            (Vec::loadu(at) * shrink).store(at);
          }
        }
        total[i].store(sum + i * W);
      }
      multiply(Dp, BLOCK, n_keys, v_transposed + chunk, ld, weights, out, BLOCK, chunk > 0);
    }
    float log_sums[BLOCK];
    for (int64_t r = 0; r < BLOCK; r += W) (Vec::loadu(largest + r) + Vec::loadu(sum + r).log()).store(log_sums + r);
    std::memcpy(lse + block, log_sums, n_rows * sizeof(float));
    auto factor = [&](int64_t r) { return std::isfinite(largest[r]) ? 1 / sum[r] : NAN; };  // see exponential
    store_transposed(out, BLOCK, factor, Rows<T>{o.at + block * o.stride, o.stride}, n_rows, D, out_rows);
  }
}

// ---- attention, backward -----------------------------------------------------------------------------------------

template <typename T> float dot(const T* a, const T* b, int64_t n) {
  Vec sum(0.0f);
  int64_t i = 0;
  for (; i + 2 * W <= n; i += 2 * W) {
    auto [a0, a1] = load(a + i);
    auto [b0, b1] = load(b + i);
    sum = at::vec::fmadd(a1, b1, at::vec::fmadd(a0, b0, sum));
  }
  float rest = 0;
  for (; i < n; i++) rest += static_cast<float>(a[i]) * static_cast<float>(b[i]);
  return sum_of(sum) + rest;
}

// The gradients by keys and values [begin, end) of one head, as rows of dk and dv, and what these keys add to that by
// queries, transposed (Dp, Tp) and without its scale, in dq, whose columns before `begin` are left alone.
//
// Scores are computed transposed, (keys, queries): what belongs to a query is then a vector, and probabilities are left
// operands as they are. With P the probabilities, dP = g v^T and dS = P (dP - delta): dv = P^T g, dk = dS^T q scale,
// dq = dS k scale (FlashAttention-2, algorithm 2).
template <typename T>
void backward_head(Rows<const T> g, Rows<const T> q, Rows<const T> k, Rows<const T> v, Rows<const T> o,
                   const float* lse, Rows<T> dk, Rows<T> dv, float* dq, int64_t begin, int64_t end, int64_t n_rows,
                   int64_t D) {
  constexpr int64_t KEYS = 2 * BLOCK;  // that are computed together: dq is then read and written half as often
  constexpr int64_t LD = CHUNK + APART;
  int64_t Tp = round_up(n_rows, BLOCK);
  int64_t n = Tp - begin;  // queries from `begin` on see these keys
  int64_t n_keys = std::min(round_up(end, BLOCK), Tp) - begin;
  int64_t ld_keys = n_keys + APART;
  int64_t Dp = round_up(D, unit_of_width<T>());
  T *room, *q_transposed, *q_packed, *g_transposed, *g_packed, *k_rows, *k_transposed, *v_rows, *p, *ds, *ds_packed;
  float *log_sums, *delta, *scores, *dp, *dk_sum, *dv_sum;
  arena.provide([&] {
    room = arena.take<T>(n * Dp);
    q_transposed = arena.take<T>(n * Dp);
    q_packed = arena.take<T>(n * Dp);
    g_transposed = arena.take<T>(n * Dp);
    g_packed = arena.take<T>(n * Dp);
    k_rows = arena.take<T>(n_keys * Dp);
    k_transposed = arena.take<T>(Dp * ld_keys);
    v_rows = arena.take<T>(n_keys * Dp);
    p = arena.take<T>(KEYS * LD);
    ds = arena.take<T>(KEYS * LD);
    ds_packed = arena.take<T>(KEYS * PANEL);
    log_sums = arena.take<float>(n);
    delta = arena.take<float>(n);
    scores = arena.take<float>(BLOCK * PANEL);
    dp = arena.take<float>(BLOCK * PANEL);
    dk_sum = arena.take<float>(KEYS * Dp + 2 * W);
    dv_sum = arena.take<float>(KEYS * Dp + 2 * W);
  });

  auto from = [&](Rows<const T> x) { return Rows<const T>{x.at + begin * x.stride, x.stride}; };
  Rows<const T> rows = padded(from(q), n_rows - begin, D, room, n, Dp);
  pack_transposed(rows, n, Dp, q_transposed);
  pack(rows, n, Dp, q_packed);
  rows = padded(from(g), n_rows - begin, D, room, n, Dp);
  pack_transposed(rows, n, Dp, g_transposed);
  pack(rows, n, Dp, g_packed);
  copy_rows(from(k), n_rows - begin, D, k_rows, n_keys, Dp);
  transpose(Rows<const T>{k_rows, Dp}, n_keys, Dp, k_transposed, ld_keys);
  copy_rows(from(v), n_rows - begin, D, v_rows, n_keys, Dp);
  for (int64_t i = 0; i < n; i++) {
    bool is_query = begin + i < n_rows;
    log_sums[i] = is_query ? lse[begin + i] : INF;  // those beyond the last have no probabilities
    delta[i] = is_query ? dot(from(g).at + i * g.stride, from(o).at + i * o.stride, D) : 0;
  }
  const float scale = 1 / std::sqrt(static_cast<float>(D));

  for (int64_t key = 0; key < n_keys; key += KEYS) {
    int64_t keys = std::min(KEYS, n_keys - key);
    for (int64_t chunk = key; chunk < n; chunk += CHUNK) {
      int64_t queries = std::min(CHUNK, n - chunk);
      for (int64_t panel = chunk; panel < chunk + queries; panel += PANEL) {
        int64_t m = std::min(keys, panel + PANEL - key);  // the keys that some query of the panel sees
        for (int64_t part = 0; part < m; part += BLOCK) {  // so that scores stay in the first cache
          multiply(BLOCK, PANEL, Dp, k_rows + (key + part) * Dp, Dp, q_transposed + panel * Dp, scores, PANEL, false);
          multiply(BLOCK, PANEL, Dp, v_rows + (key + part) * Dp, Dp, g_transposed + panel * Dp, dp, PANEL, false);
          bool is_diagonal = key + part == panel;
          for (int64_t r = 0; r < BLOCK; r += 2) {
            int64_t hidden = is_diagonal ? r : 0;  // queries of the panel that do not see key r, and one more the next
            int64_t skipped = hidden / (2 * W) * (2 * W);
            float* s = scores + r * PANEL;
            std::fill(s, s + hidden, -INF);
            std::fill(s + PANEL, s + PANEL + (is_diagonal ? hidden + 1 : 0), -INF);
            T* p_rows = p + (part + r) * LD + panel - chunk;
            T* ds_rows = ds + (part + r) * LD + panel - chunk;
            T* ds_pair = ds_packed + (part + r) * PANEL;
            for (int64_t row = 0; row < 2; row++) {
              std::fill(p_rows + row * LD, p_rows + row * LD + skipped, T(0));
              std::fill(ds_rows + row * LD, ds_rows + row * LD + skipped, T(0));
            }
            for (int64_t c = 0; c < skipped; c += W) store_pair(ds_pair, c, Vec(0.0f), Vec(0.0f));
            for (int64_t c = skipped; c < PANEL; c += 2 * W) {
              Vec found[2][2];
              for (int64_t row = 0; row < 2; row++) {
                Vec probability[2];
                for (int64_t half = 0; half < 2; half++) {
                  int64_t query = c + half * W;
                  const float* score = s + row * PANEL + query;
                  const float* d = dp + (r + row) * PANEL + query;
                  Vec log_sum = Vec::loadu(log_sums + panel + query);
                  probability[half] = exponential<T>(Vec::loadu(score) * Vec(scale) - log_sum);
                  found[row][half] = probability[half] * (Vec::loadu(d) - Vec::loadu(delta + panel + query));
                }
                store(p_rows + row * LD + c, probability[0], probability[1]);
                store(ds_rows + row * LD + c, found[row][0], found[row][1]);
              }
              store_pair(ds_pair, c, found[0][0], found[1][0]);
              store_pair(ds_pair, c + W, found[0][1], found[1][1]);
            }
          }
        }
        multiply(Dp, PANEL, m, k_transposed + key, ld_keys, ds_packed, dq + begin + panel, Tp, key > 0);
      }
      for (int64_t half = 0; half < keys; half += BLOCK) {
        int64_t hidden = std::max<int64_t>(0, key + half - chunk);  // queries before these keys
        int64_t first = half * LD + hidden;
        bool add = chunk > key;
        multiply_packed(BLOCK, queries - hidden, p + first, LD, g_packed, n, chunk + hidden, dv_sum + half * Dp, Dp,
                        add);
        multiply_packed(BLOCK, queries - hidden, ds + first, LD, q_packed, n, chunk + hidden, dk_sum + half * Dp,
                        Dp, add);
      }
    }
    for (int64_t r = 0; r < std::min(keys, n_rows - begin - key); r++) {
      int64_t row = begin + key + r;
      store_row(dv_sum + r * Dp, 1.0f, dv.at + row * dv.stride, D);
      store_row(dk_sum + r * Dp, scale, dk.at + row * dk.stride, D);
    }
  }
}

// Rows of the gradient by queries from its parts (Dp, Tp), one for each range of keys: part i knows queries from
// first(i) on.
template <typename T, typename First>
void store_query_gradients(float* parts, int64_t n_parts, First first, Rows<T> dq, int64_t n_rows, int64_t D) {
  int64_t Tp = round_up(n_rows, BLOCK);
  int64_t Dp = round_up(D, unit_of_width<T>());
  const float scale = 1 / std::sqrt(static_cast<float>(D));
  for (int64_t i = 1; i < n_parts; i++) {
    for (int64_t d = 0; d < Dp; d++) {
      float* sum = parts + d * Tp;
      const float* part = parts + (i * Dp + d) * Tp;
      for (int64_t t = first(i); t < Tp; t += W) (Vec::loadu(sum + t) + Vec::loadu(part + t)).store(sum + t);
    }
  }
  float* room;
  arena.provide([&] { room = arena.take<float>(16 * Dp + 2 * W); });  // what it held before is no longer needed
  auto factor = [&](int64_t) { return scale; };
  store_transposed(parts, Tp, factor, dq, n_rows, D, room);
}

// ---- heads on threads --------------------------------------------------------------------------------------------

// A tensor (B, H, T, D) whose last dimension is contiguous; strides in elements.
struct Heads {
  void* data;
  int64_t batch_stride;
  int64_t head_stride;
  int64_t row_stride;

  template <typename T> Rows<T> head(int64_t b, int64_t h) const {
    return {static_cast<T*>(data) + b * batch_stride + h * head_stride, row_stride};
  }
};

struct Shape {
  int64_t B, H, T, D;
};

// The parts of a head that are tasks of their own: one where there are enough heads for all threads.
int64_t parts_of_a_head(Shape x) {
  int64_t heads = x.B * x.H;
  int64_t wanted = round_up(4 * at::get_num_threads(), heads) / heads;  // four tasks for each thread
  return std::clamp<int64_t>(x.T / ROWS_OF_A_TASK, 1, wanted);
}

// Where part i of n begins, such that all have the same work: the first rows of a triangle are short, or the last.
// None is empty, since the parts of a head have at least ROWS_OF_A_TASK rows in the mean.
int64_t begin_of_part(int64_t i, int64_t n, int64_t T, bool first_are_short) {
  if (i == n) return T;
  double share = static_cast<double>(i) / n;
  double at = first_are_short ? std::sqrt(share) : 1 - std::sqrt(1 - share);
  return static_cast<int64_t>(at * T) / (2 * BLOCK) * (2 * BLOCK);
}

template <typename Task> void for_tasks(int64_t n, Task task) {
  at::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) task(i);
    at::native::cpublas::brgemm_release();  // AMX's tiles are left as they were found
  });
}

template <typename T>
void attention_forward_of(const Heads& q, const Heads& k, const Heads& v, const Heads& o, float* lse, Shape x) {
  int64_t parts = parts_of_a_head(x);
  for_tasks(x.B * x.H * parts, [&](int64_t task) {
    int64_t head = task / parts;
    int64_t b = head / x.H;
    int64_t h = head % x.H;
    int64_t begin = begin_of_part(task % parts, parts, x.T, true);
    int64_t end = begin_of_part(task % parts + 1, parts, x.T, true);
    forward_head<T>(q.head<const T>(b, h), k.head<const T>(b, h), v.head<const T>(b, h), o.head<T>(b, h),
                    lse + head * x.T, begin, end, x.D);
  });
}

// dq_parts: (B, H, parts, Dp, Tp) floats where a head has several parts.
template <typename T>
void attention_backward_of(const Heads& g, const Heads& q, const Heads& k, const Heads& v, const Heads& o,
                           const float* lse, const Heads& dq, const Heads& dk, const Heads& dv, Shape x) {
  int64_t parts = parts_of_a_head(x);
  int64_t size = round_up(x.D, unit_of_width<T>()) * round_up(x.T, BLOCK);  // of a part of dq
  auto begin_of = [&](int64_t part) { return begin_of_part(part, parts, x.T, false); };
  auto gradients = [&](int64_t head, int64_t part, float* dq_part) {
    int64_t b = head / x.H;
    int64_t h = head % x.H;
    backward_head<T>(g.head<const T>(b, h), q.head<const T>(b, h), k.head<const T>(b, h), v.head<const T>(b, h),
                     o.head<const T>(b, h), lse + head * x.T, dk.head<T>(b, h), dv.head<T>(b, h), dq_part,
                     begin_of(part), begin_of(part + 1), x.T, x.D);
  };
  auto store = [&](int64_t head, float* dq_parts) {
    store_query_gradients(dq_parts, parts, begin_of, dq.head<T>(head / x.H, head % x.H), x.T, x.D);
  };
  if (parts == 1) {
    for_tasks(x.B * x.H, [&](int64_t head) {
      static thread_local Arena own;
      float* dq_part;
      own.provide([&] { dq_part = own.take<float>(size); });
      gradients(head, 0, dq_part);
      store(head, dq_part);
    });
    return;
  }
  Arena shared;
  float* all;
  shared.provide([&] { all = shared.take<float>(x.B * x.H * parts * size); });
  for_tasks(x.B * x.H * parts, [&](int64_t task) { gradients(task / parts, task % parts, all + task * size); });
  for_tasks(x.B * x.H, [&](int64_t head) { store(head, all + head * parts * size); });
}

// ---- activations -------------------------------------------------------------------------------------------------

// Each has its value at x, and its slope there.

struct GeluTanh {  // x * sigmoid(2u), which is x * (1 + tanh(u)) / 2, with u = sqrt(2 / pi) * (x + 0.044715 * x^3)
  template <typename T> static Vec gate(Vec x) {
    Vec u2 = x * at::vec::fmadd(x * x, Vec(0.0713548162726f), Vec(1.5957691216057f));
    return Vec(1.0f) / (Vec(1.0f) + exponential<T>(at::vec::minimum(Vec(0.0f) - u2, Vec(80.0f))));  // no overflow
  }
  template <typename T> static Vec value(Vec x) { return x * gate<T>(x); }
  template <typename T> static Vec slope(Vec x) {
    Vec s = gate<T>(x);
    Vec slope_of_u2 = at::vec::fmadd(x * x, Vec(0.2140644488178f), Vec(1.5957691216057f));
    return at::vec::fmadd(x * slope_of_u2, s - s * s, s);
  }
};

struct Relu2 {
  template <typename T> static Vec value(Vec x) {
    Vec positive = at::vec::maximum(x, Vec(0.0f));
    return positive * positive;
  }
  template <typename T> static Vec slope(Vec x) {
    Vec positive = at::vec::maximum(x, Vec(0.0f));
    return positive + positive;
  }
};

// y = the value at 2W numbers x or, with gradients g, g * the slope there.
template <typename F, typename T> void activate(const T* x, const T* g, T* y) {
  auto [a, b] = load(x);
  if (g == nullptr) {
    store(y, F::template value<T>(a), F::template value<T>(b));
  } else {
    auto [g0, g1] = load(g);
    store(y, g0 * F::template slope<T>(a), g1 * F::template slope<T>(b));
  }
}

// The same of n numbers.
template <typename F, typename T> void activation_of(const T* x, const T* g, T* y, int64_t n) {
  int64_t whole = n / (2 * W);
  at::parallel_for(0, whole, 512, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * 2 * W; i < end * 2 * W; i += 2 * W) activate<F>(x + i, g ? g + i : nullptr, y + i);
  });
  int64_t first = whole * 2 * W;
  if (first == n) return;
  T rest[3][2 * W] = {};
  std::memcpy(rest[0], x + first, (n - first) * sizeof(T));
  if (g) std::memcpy(rest[1], g + first, (n - first) * sizeof(T));
  activate<F>(rest[0], g ? rest[1] : nullptr, rest[2]);
  std::memcpy(y + first, rest[2], (n - first) * sizeof(T));
}

template <typename T> void activation_named(int64_t which, const void* x, const void* g, void* y, int64_t n) {
  auto run = which == 0 ? activation_of<GeluTanh, T> : activation_of<Relu2, T>;
  run(static_cast<const T*>(x), static_cast<const T*>(g), static_cast<T*>(y), n);
}

// ---- softmax -----------------------------------------------------------------------------------------------------

// Writes the probabilities (N, V) of logits (N, V), and the logarithms (N,) of the targets' (from 0 to V - 1).
template <typename T>
void softmax_rows(const void* logits, const int64_t* targets, void* probabilities, float* log_p, int64_t N, int64_t V) {
  int64_t whole = V / (2 * W) * (2 * W);
  at::parallel_for(0, N, 1, [&](int64_t begin, int64_t end) {
    float* p;
    arena.provide([&] { p = arena.take<float>(V + 2 * W); });
    for (int64_t row = begin; row < end; row++) {
      const T* x = static_cast<const T*>(logits) + row * V;
      TORCH_CHECK(0 <= targets[row] && targets[row] < V, "target ", targets[row], " is not a token below ", V);
      float target = static_cast<float>(x[targets[row]]);
      Vec most(-INF);
      for (int64_t i = 0; i < whole; i += 2 * W) {
        auto [a, b] = load(x + i);
        most = at::vec::maximum(most, at::vec::maximum(a, b));
      }
      float largest = max_of(most);
      for (int64_t i = whole; i < V; i++) largest = larger(largest, static_cast<float>(x[i]));
      Vec total(0.0f);
      for (int64_t i = 0; i < whole; i += 2 * W) {
        auto [a, b] = load(x + i);
        a = (a - Vec(largest)).exp_u20();
        b = (b - Vec(largest)).exp_u20();
        total = total + a + b;
        a.store(p + i);
        b.store(p + i + W);
      }
      float sum = sum_of(total);
      for (int64_t i = whole; i < V; i++) sum += p[i] = std::exp(static_cast<float>(x[i]) - largest);
      if (!std::isfinite(largest)) sum = NAN;  // exp_u20 would hide it
      log_p[row] = target - largest - std::log(sum);
      store_row(p, 1 / sum, static_cast<T*>(probabilities) + row * V, V);
    }
  });
}

// ---- norms of the residual stream --------------------------------------------------------------------------------

// n numbers as floats, and zeros up to a multiple of 2W.
template <typename T> void load_row(const T* from, float* to, int64_t n) {
  int64_t whole = n / (2 * W) * (2 * W);
  for (int64_t i = 0; i < whole; i += 2 * W) {
    auto [a, b] = load(from + i);
    store(to + i, a, b);
  }
  if (whole == n) return;
  for (int64_t i = whole; i < n; i++) to[i] = static_cast<float>(from[i]);
  std::fill(to + n, to + whole + 2 * W, 0.0f);
}

// to[i] = function(i) for whole vectors that cover n numbers.
template <typename F> void for_vectors(float* to, int64_t n, F function) {
  for (int64_t i = 0; i < n; i += W) function(i).store(to + i);
}

float sum_of_row(const float* x, int64_t n) {
  Vec sum(0.0f);
  for (int64_t i = 0; i < n; i += W) sum = sum + Vec::loadu(x + i);
  return sum_of(sum);
}

struct Norm {
  const float* gain;  // (C,)
  const float* bias;  // (C,) or nullptr
  bool layer;         // subtracts the mean
  float eps;
  int64_t N, C;

  int64_t padded() const { return round_up(C, 2 * W); }
};

// Row x becomes (x - mean) * inverse, and 0 beyond C.
void normalize(const Norm& norm, float* x, float mean, float inverse) {
  for_vectors(x, norm.padded(), [&](int64_t i) { return (Vec::loadu(x + i) - Vec(mean)) * Vec(inverse); });
  std::fill(x + norm.C, x + norm.padded(), 0.0f);
}

// sum = x + y and h = norm(sum), (N, C); without y, sum is x. statistics (N, 2): means, inverse deviations.
// X: type of the residual stream. Y: of what layers take and give.
template <typename X, typename Y>
void norm_forward_of(const void* x, const void* y, void* sum, void* h, float* statistics, const Norm& norm) {
  int64_t C = norm.C;
  int64_t Cp = norm.padded();
  at::parallel_for(0, norm.N, 32768 / C + 1, [&](int64_t begin, int64_t end) {
    float *gain, *bias, *a, *b;
    arena.provide([&] {
      for (float** row : {&gain, &bias, &a, &b}) *row = arena.take<float>(Cp);
    });
    load_row(norm.gain, gain, C);
    load_row(norm.bias, bias, norm.bias ? C : 0);
    if (!norm.bias) std::fill(bias, bias + Cp, 0.0f);
    for (int64_t row = begin; row < end; row++) {
      load_row(static_cast<const X*>(x) + row * C, a, C);
      if (y) {
        load_row(static_cast<const Y*>(y) + row * C, b, C);
        for_vectors(a, Cp, [&](int64_t i) { return Vec::loadu(a + i) + Vec::loadu(b + i); });
        X* rounded = static_cast<X*>(sum) + row * C;
        store_row(a, 1.0f, rounded, C);
        if (sizeof(X) == 2) load_row(rounded, a, C);
      }
      float mean = norm.layer ? sum_of_row(a, Cp) / C : 0.0f;
      if (norm.layer) normalize(norm, a, mean, 1.0f);
      float inverse = 1 / std::sqrt(dot(a, a, Cp) / C + norm.eps);
      statistics[2 * row] = mean;
      statistics[2 * row + 1] = inverse;
      for_vectors(a, Cp, [&](int64_t i) {
        return at::vec::fmadd(Vec::loadu(a + i) * Vec(inverse), Vec::loadu(gain + i), Vec::loadu(bias + i));
      });
      store_row(a, 1.0f, static_cast<Y*>(h) + row * C, C);
    }
  });
}

// Rows are summed in parts, whose number does not depend on that of the threads.
int64_t parts_of_rows(int64_t N) { return std::clamp<int64_t>(N / 128, 1, 32); }

// The gradient by sum from that by h and, unless nullptr, the one that reaches sum from elsewhere; as X in by_x and,
// unless nullptr, as Y in by_y. by_gain, by_bias (C,).
template <typename X, typename Y>
void norm_backward_of(const void* by_h, const void* by_sum, const void* sum, const float* statistics, void* by_x,
                      void* by_y, float* by_gain, float* by_bias, const Norm& norm) {
  int64_t C = norm.C;
  int64_t Cp = norm.padded();
  int64_t parts = parts_of_rows(norm.N);
  Arena shared;
  float* sums;  // (parts, 2, Cp)
  shared.provide([&] { sums = shared.take<float>(parts * 2 * Cp); });
  std::fill(sums, sums + parts * 2 * Cp, 0.0f);
  at::parallel_for(0, parts, 1, [&](int64_t first, int64_t last) {
    float *gain, *a, *g, *other;
    arena.provide([&] {
      for (float** row : {&gain, &a, &g, &other}) *row = arena.take<float>(Cp);
    });
    load_row(norm.gain, gain, C);
    for (int64_t part = first; part < last; part++) {
      float* of_gain = sums + part * 2 * Cp;
      float* of_bias = of_gain + Cp;
      for (int64_t row = part * norm.N / parts; row < (part + 1) * norm.N / parts; row++) {
        float inverse = statistics[2 * row + 1];
        load_row(static_cast<const X*>(sum) + row * C, a, C);
        normalize(norm, a, statistics[2 * row], inverse);
        load_row(static_cast<const Y*>(by_h) + row * C, g, C);
        Vec total(0.0f);
        Vec product(0.0f);
        for (int64_t i = 0; i < Cp; i += W) {
          Vec given = Vec::loadu(g + i);
          Vec x = Vec::loadu(a + i);
          at::vec::fmadd(given, x, Vec::loadu(of_gain + i)).store(of_gain + i);
          if (by_bias) (given + Vec::loadu(of_bias + i)).store(of_bias + i);
          given = given * Vec::loadu(gain + i);
          given.store(g + i);
          total = total + given;
          product = at::vec::fmadd(given, x, product);
        }
        Vec mean(norm.layer ? sum_of(total) / C : 0.0f);
        Vec along(sum_of(product) / C);
        for_vectors(g, Cp, [&](int64_t i) {
          return Vec(inverse) * (Vec::loadu(g + i) - mean - Vec::loadu(a + i) * along);
        });
        if (by_sum) {
          load_row(static_cast<const X*>(by_sum) + row * C, other, C);
          for_vectors(g, Cp, [&](int64_t i) { return Vec::loadu(g + i) + Vec::loadu(other + i); });
        }
        store_row(g, 1.0f, static_cast<X*>(by_x) + row * C, C);
        if (by_y) store_row(g, 1.0f, static_cast<Y*>(by_y) + row * C, C);
      }
    }
  });
  for (int64_t part = 1; part < parts; part++) {
    const float* of_part = sums + part * 2 * Cp;
    for_vectors(sums, 2 * Cp, [&](int64_t i) { return Vec::loadu(sums + i) + Vec::loadu(of_part + i); });
  }
  std::memcpy(by_gain, sums, C * sizeof(float));
  if (by_bias) std::memcpy(by_bias, sums + Cp, C * sizeof(float));
}

// ---- queries and keys: norm and rotation -------------------------------------------------------------------------

// Channels i and i + D / 2 of x (D,) turn by an angle, or back by it where sign is -1.
void turn(float* x, const float* cos, const float* sin, float sign, int64_t D) {
  float* y = x + D / 2;
  for (int64_t i = 0; i < D / 2; i++) {
    float a = x[i];
    float b = y[i];
    x[i] = a * cos[i] - sign * b * sin[i];
    y[i] = sign * a * sin[i] + b * cos[i];
  }
}

// Of qkv (B, T, 3, H, D): q and k, normalised if has_norm and turned by rotary (2, T, D / 2) unless it is nullptr.
// With gradients by q, k and v instead, these are read, and by_qkv is written.
template <typename T>
void split_heads_of(const void* qkv, const Heads& q, const Heads& k, const Heads* v, void* by_qkv, const float* rotary,
                    bool has_norm, Shape shape) {
  constexpr float EPS = 1e-5f;
  auto [B, H, n, D] = shape;
  int64_t Dp = round_up(D, 2 * W);
  at::parallel_for(0, B * n, 32768 / (H * D) + 1, [&](int64_t begin, int64_t end) {
    float *x, *g;
    arena.provide([&] {
      x = arena.take<float>(Dp);
      g = arena.take<float>(Dp);
    });
    for (int64_t token = begin; token < end; token++) {
      int64_t b = token / n;
      int64_t t = token % n;
      const float* cos = rotary ? rotary + t * (D / 2) : nullptr;
      const float* sin = rotary ? cos + n * (D / 2) : nullptr;
      for (int64_t i = 0; i < 2 * H; i++) {
        Rows<T> rows = (i < H ? q : k).head<T>(b, i % H);
        T* head = rows.at + t * rows.stride;
        int64_t at = (token * 3 * H + i) * D;
        float inverse = 1;
        if (has_norm || !v) load_row(static_cast<const T*>(qkv) + at, x, D);
        if (has_norm) {
          inverse = 1 / std::sqrt(dot(x, x, Dp) / D + EPS);
          for_vectors(x, Dp, [&](int64_t c) { return Vec::loadu(x + c) * Vec(inverse); });
        }
        if (!v) {
          if (rotary) turn(x, cos, sin, 1.0f, D);
          store_row(x, 1.0f, head, D);
          continue;
        }
        load_row(head, g, D);
        if (rotary) turn(g, cos, sin, -1.0f, D);
        if (has_norm) {
          Vec along(dot(g, x, Dp) / D);
          for_vectors(g, Dp, [&](int64_t c) {
            return Vec(inverse) * (Vec::loadu(g + c) - Vec::loadu(x + c) * along);
          });
        }
        store_row(g, 1.0f, static_cast<T*>(by_qkv) + at, D);
      }
      for (int64_t h = 0; v && h < H; h++) {
        Rows<T> rows = v->head<T>(b, h);
        T* to = static_cast<T*>(by_qkv) + ((token * 3 + 2) * H + h) * D;
        std::memcpy(to, rows.at + t * rows.stride, D * sizeof(T));
      }
    }
  });
}

// ---- token shift -------------------------------------------------------------------------------------------------

// y (B, T, bytes) is x, but for the first `moved` bytes of a token: those of the token before or, with step -1, after.
void shift_tokens(const char* x, char* y, int64_t step, int64_t B, int64_t T, int64_t bytes, int64_t moved) {
  at::parallel_for(0, B * T, 65536 / bytes + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      int64_t from = row % T - step;
      char* to = y + row * bytes;
      std::memcpy(to + moved, x + row * bytes + moved, bytes - moved);
      if (0 <= from && from < T) {
        std::memcpy(to, x + (row - step) * bytes, moved);
      } else {
        std::memset(to, 0, moved);
      }
    }
  });
}

// ---- calls from outside ------------------------------------------------------------------------------------------

// Runs function; returns nullptr, or what went wrong.
template <typename F> const char* guarded(F function) {
  static thread_local std::string problem;
  try {
    function();
    return nullptr;
  } catch (const std::exception& e) {
    problem = e.what();
  } catch (...) {
    problem = "unknown error";
  }
  return problem.c_str();
}

}  // namespace

extern "C" {

const char* attention_forward(bool bf16, const Heads* q, const Heads* k, const Heads* v, const Heads* o, float* lse,
                              int64_t B, int64_t H, int64_t T, int64_t D) {
  return guarded([&] {
    auto run = bf16 ? attention_forward_of<BFloat16> : attention_forward_of<float>;
    run(*q, *k, *v, *o, lse, {B, H, T, D});
  });
}

const char* attention_backward(bool bf16, const Heads* g, const Heads* q, const Heads* k, const Heads* v,
                               const Heads* o, const float* lse, const Heads* dq, const Heads* dk, const Heads* dv,
                               int64_t B, int64_t H, int64_t T, int64_t D) {
  return guarded([&] {
    auto run = bf16 ? attention_backward_of<BFloat16> : attention_backward_of<float>;
    run(*g, *q, *k, *v, *o, lse, *dq, *dk, *dv, {B, H, T, D});
  });
}

// which: 0 gelu_tanh, 1 relu2. g: nullptr for the value.
const char* activation(bool bf16, int64_t which, const void* x, const void* g, void* y, int64_t n) {
  return guarded([&] {
    auto run = bf16 ? activation_named<BFloat16> : activation_named<float>;
    run(which, x, g, y, n);
  });
}

const char* softmax(bool bf16, const void* logits, const int64_t* targets, void* p, float* log_p, int64_t N, int64_t V) {
  return guarded([&] {
    auto run = bf16 ? softmax_rows<BFloat16> : softmax_rows<float>;
    run(logits, targets, p, log_p, N, V);
  });
}

// stream_bf16: of x, sum and their gradients. bf16: of y, h and theirs.
const char* norm_forward(bool bf16, bool stream_bf16, const void* x, const void* y, void* sum, void* h,
                         float* statistics, const float* gain, const float* bias, bool layer, double eps, int64_t N,
                         int64_t C) {
  return guarded([&] {
    auto run = stream_bf16 ? norm_forward_of<BFloat16, BFloat16>
               : bf16      ? norm_forward_of<float, BFloat16>
                           : norm_forward_of<float, float>;
    run(x, y, sum, h, statistics, {gain, bias, layer, static_cast<float>(eps), N, C});
  });
}

const char* norm_backward(bool bf16, bool stream_bf16, const void* by_h, const void* by_sum, const void* sum,
                          const float* statistics, void* by_x, void* by_y, float* by_gain, float* by_bias,
                          const float* gain, bool layer, double, int64_t N, int64_t C) {
  return guarded([&] {
    auto run = stream_bf16 ? norm_backward_of<BFloat16, BFloat16>
               : bf16      ? norm_backward_of<float, BFloat16>
                           : norm_backward_of<float, float>;
    run(by_h, by_sum, sum, statistics, by_x, by_y, by_gain, by_bias, {gain, nullptr, layer, 0.0f, N, C});
  });
}

// v, by_qkv: nullptr in the forward pass.
const char* split_heads(bool bf16, const void* qkv, const Heads* q, const Heads* k, const Heads* v, void* by_qkv,
                        const float* rotary, bool has_norm, int64_t B, int64_t H, int64_t T, int64_t D) {
  return guarded([&] {
    auto run = bf16 ? split_heads_of<BFloat16> : split_heads_of<float>;
    run(qkv, *q, *k, v, by_qkv, rotary, has_norm, {B, H, T, D});
  });
}

const char* token_shift(bool bf16, const void* x, void* y, int64_t step, int64_t B, int64_t T, int64_t C, int64_t n) {
  int64_t size = bf16 ? 2 : 4;
  return guarded([&] {
    shift_tokens(static_cast<const char*>(x), static_cast<char*>(y), step, B, T, C * size, n * size);
  });
}
}
