// One step of a dense decoder of the Llama family on CPU threads: rows of tokens in, logits out.
//
// Compiled by engine/light/native/__init__.py for AVX-512 with BF16. Shapes: N rows, H hidden, A query
// heads, G key-value heads, D head size, I width of the FFN, V vocabulary.
//
//   team.inc     threads, phases, chunks
//   pack.inc     weights in panels: fp32, bf16, int8, int4
//   product.inc  a panel times rows
//   rows.inc     norm, rotation, cache, attention
//   model.inc    memory of weights and rows

#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kMostDim = 256;
constexpr int kMostHeads = 4;  // queries that share one reading of the cache
constexpr int64_t kSerialRows = 4;  // up to so many rows, norms and rotations are a phase's tail

#include "team.inc"
#include "pack.inc"
#include "product.inc"
#include "rows.inc"

}  // namespace

extern "C" {

struct Shape {
  int64_t layers, hidden, heads, groups, dim, width, vocab;
  int64_t format, group, threads, max_rows, interleaved;
  double eps;
  const float *cos, *sin;  // [positions, D / 2], kept by the caller
};

struct Step {
  int64_t rows, sampled, width;  // width: blocks of a row of tables
  const int64_t *ids, *positions, *tables, *wanted;
  const uint64_t *keys, *values;  // a pointer for each layer
  int64_t block_size, cache_is_bf16;
  float* logits;    // [sampled, V]
  uint8_t* bad;     // [rows]
  double* seconds;  // [kParts], added to
};

}  // extern "C"

namespace {

#include "model.inc"

// One thread's way through a step; all threads walk through the same phases.
class Walk {
 public:
  Walk(Model& model, const Step& step, int thread)
      : m_(model), s_(model.shape), step_(step), mine_(model.scratch[thread]), thread_(thread),
        serial_(step.rows <= kSerialRows), last_(Clock::now()) {}

  void run() {
    m_.team.each(step_.rows, 4, [&](int64_t row) { enter(row); }, [] {});
    mark(kRest);
    for (int64_t layer = 0; layer < s_.layers; layer++) {
      attention(layer);
      ffn(layer);
    }
    head();
  }

 private:
  using Clock = std::chrono::steady_clock;

  void mark(Part part) {
    if (thread_ != 0) return;
    auto now = Clock::now();
    step_.seconds[part] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

  Cache cache(int64_t layer) const {
    return {(void*)step_.keys[layer], (void*)step_.values[layer], s_.groups, s_.dim,
            step_.block_size, step_.cache_is_bf16 != 0};
  }

  bool normalise(const std::vector<float>& weight, int64_t row) {
    return norm_row(m_.x.get() + row * s_.hidden, weight.data(), s_.hidden, float(s_.eps),
                    m_.normed.get() + row * m_.hidden_stride * m_.item, m_.is_fp32);
  }

  void enter(int64_t row) {
    std::memcpy(m_.x.get() + row * s_.hidden, m_.table + step_.ids[row] * s_.hidden,
                s_.hidden * sizeof(float));
    normalise(m_.layers[0].attention_norm, row);
  }

  // a product of all rows: done(panel, first row, count, tile), then after(row) for every row
  template <class Done, class After>
  void product(const Matrix& m, const Buffer<uint8_t>& in, int64_t stride, Done done, After after) {
    int64_t rows = step_.rows;
    multiply_all(m, in, stride, rows, done, [&] {
      if (serial_)
        for (int64_t row = 0; row < rows; row++) after(row);
    });
    if (!serial_) m_.team.each(rows, 4, after, [] {});
  }

  template <class Done, class Tail>
  void multiply_all(const Matrix& m, const Buffer<uint8_t>& in, int64_t stride, int64_t rows,
                    Done done, Tail tail) {
    int64_t chunk = std::clamp<int64_t>(m.panels() / (m_.team.size() * 12), 1, 64);
    m_.team.each(
        rows ? m.panels() : 0, chunk,
        [&](int64_t i) {
          multiply(m, i, {in.get(), stride}, rows, mine_.panel.get(),
                   [&](int64_t row, int64_t count, const float* tile) { done(i, row, count, tile); });
        },
        tail);
  }

  void attention(int64_t layer) {
    const Layer& l = m_.layers[layer];
    auto keep = [&](int64_t i, int64_t row, int64_t count, const float* tile) {
      for (int64_t r = 0; r < count; r++)
        std::memcpy(m_.qkv.get() + (row + r) * m_.qkv_stride + i * kPanel, tile + r * kPanel,
                    kPanel * sizeof(float));
    };
    product(l.qkv, m_.normed, m_.hidden_stride, keep, [&](int64_t row) { place(row, layer); });
    mark(kQkv);
    m_.team.each(step_.rows * s_.groups, 1, [&](int64_t i) { attend(i, layer); }, [] {});
    mark(kAttention);
    product(
        l.output, m_.attended, m_.attended_stride,
        [&](int64_t i, int64_t row, int64_t count, const float* tile) { add(i, row, count, tile); },
        [&](int64_t row) { normalise(l.ffn_norm, row); });
    mark(kOutput);
  }

  void ffn(int64_t layer) {
    const Layer& l = m_.layers[layer];
    bool is_last = layer + 1 == s_.layers;
    const std::vector<float>& next = is_last ? m_.norm : m_.layers[layer + 1].attention_norm;
    multiply_all(
        l.gate_up, m_.normed, m_.hidden_stride, step_.rows,
        [&](int64_t i, int64_t row, int64_t count, const float* tile) {
          for (int64_t r = 0; r < count; r++) gate(i, row + r, tile + r * kPanel);
        },
        [] {});
    mark(kGateUp);
    product(
        l.down, m_.middle, m_.middle_stride,
        [&](int64_t i, int64_t row, int64_t count, const float* tile) { add(i, row, count, tile); },
        [&](int64_t row) {
          bool finite = normalise(next, row);
          if (is_last) step_.bad[row] = !finite;
        });
    mark(kDown);
  }

  // silu(gate) * up of 16 columns
  void gate(int64_t i, int64_t row, const float* tile) {
    __m512 g = _mm512_load_ps(tile), up = _mm512_load_ps(tile + 16);
    __m512 e = exp_lanes(_mm512_sub_ps(_mm512_setzero_ps(), g));
    __m512 silu = _mm512_div_ps(g, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
    store_input(m_.middle.get(), m_.is_fp32, row * m_.middle_stride + i * 16,
                _mm512_mul_ps(silu, up), 0xffff);
  }

  void add(int64_t i, int64_t row, int64_t count, const float* tile) {
    int64_t columns = std::min(kPanel, s_.hidden - i * kPanel);
    for (int64_t r = 0; r < count; r++) {
      float* x = m_.x.get() + (row + r) * s_.hidden + i * kPanel;
      for (int64_t c = 0; c < columns; c++) x[c] += tile[r * kPanel + c];
    }
  }

  // rotate a row's queries and keys and put keys and values into the cache
  void place(int64_t row, int64_t layer) {
    Cache kv = cache(layer);
    float* q = m_.qkv.get() + row * m_.qkv_stride;
    int64_t position = step_.positions[row], half = s_.dim / 2;
    const float *cos = s_.cos + position * half, *sin = s_.sin + position * half;
    float scale = 1 / std::sqrt(float(s_.dim));
    for (int64_t h = 0; h < s_.heads; h++)
      rotate(q + h * s_.dim, cos, sin, s_.dim, s_.interleaved, scale);
    int64_t block = step_.tables[row * step_.width + position / kv.size];
    for (int64_t g = 0; g < s_.groups; g++) {
      float *k = q + (s_.heads + g) * s_.dim, *v = k + s_.groups * s_.dim;
      rotate(k, cos, sin, s_.dim, s_.interleaved, 1);
      kv.write(block, g, position % kv.size, k, v);
    }
  }

  // a row and a key-value head
  void attend(int64_t index, int64_t layer) {
    int64_t row = index / s_.groups, group = index % s_.groups, repeat = s_.heads / s_.groups;
    Cache kv = cache(layer);
    for (int64_t first = 0; first < repeat; first += kMostHeads) {
      int64_t count = std::min<int64_t>(kMostHeads, repeat - first), head = group * repeat + first;
      const float* q[kMostHeads];
      Running run;
      run.out = mine_.out.get();
      std::memset(run.out, 0, count * s_.dim * sizeof(float));
      for (int64_t h = 0; h < count; h++) {
        q[h] = m_.qkv.get() + row * m_.qkv_stride + (head + h) * s_.dim;
        run.most[h] = -std::numeric_limits<float>::infinity();
        run.sum[h] = 0;
      }
      attend_heads(kv, step_.tables + row * step_.width, group, q, count, 0,
                   step_.positions[row] + 1, run);
      for (int64_t h = 0; h < count; h++) {
        __m512 scale = _mm512_set1_ps(1 / run.sum[h]);
        int64_t at = row * m_.attended_stride + (head + h) * s_.dim;
        for (int64_t d = 0; d < s_.dim; d += 16)
          store_input(m_.attended.get(), m_.is_fp32, at + d,
                      _mm512_mul_ps(_mm512_loadu_ps(run.out + h * s_.dim + d), scale), 0xffff);
      }
    }
  }

  void head() {
    int64_t bytes = m_.hidden_stride * m_.item;
    m_.team.each(
        step_.sampled, 4,
        [&](int64_t i) {
          std::memcpy(m_.picked.get() + i * bytes, m_.normed.get() + step_.wanted[i] * bytes, bytes);
        },
        [] {});
    multiply_all(
        m_.head, m_.picked, m_.hidden_stride, step_.sampled,
        [&](int64_t i, int64_t row, int64_t count, const float* tile) {
          int64_t columns = std::min(kPanel, s_.vocab - i * kPanel);
          for (int64_t r = 0; r < count; r++) {
            const float* from = tile + r * kPanel;
            std::memcpy(step_.logits + (row + r) * s_.vocab + i * kPanel, from,
                        columns * sizeof(float));
            // x - x is NaN where x is not finite
            __m512 a = _mm512_load_ps(from), b = _mm512_load_ps(from + 16);
            __m512 c = _mm512_sub_ps(a, a), d = _mm512_sub_ps(b, b);
            if (_mm512_cmp_ps_mask(c, d, _CMP_UNORD_Q)) step_.bad[step_.wanted[row + r]] = 1;
          }
        },
        [] {});
    mark(kHead);
  }

  Model& m_;
  const Shape& s_;
  const Step& step_;
  Scratch& mine_;
  const int thread_;
  const bool serial_;
  Clock::time_point last_;
};

// A matrix made of rows of one or two sources, panel by panel
template <class RowOf>
void pack(Model& model, const Matrix& m, int64_t inputs, RowOf row_of) {
  model.team.run([&](int) {
    model.team.each(
        m.panels(), 1,
        [&](int64_t i) {
          const float* rows[kPanel];
          for (int64_t n = 0; n < kPanel; n++) rows[n] = row_of(i, n);
          pack_panel(m, i, rows, inputs);
        },
        [] {});
  });
}

}  // namespace

extern "C" {

int64_t parl_shape_bytes() { return sizeof(Shape); }
int64_t parl_step_bytes() { return sizeof(Step); }

// null when there is no memory for the weights
Model* parl_model_new(const Shape* shape) {
  auto model = std::make_unique<Model>(*shape);
  return model->arena.data == nullptr ? nullptr : model.release();
}

void parl_model_free(Model* model) { delete model; }

int64_t parl_model_bytes(const Model* model) { return model->weight_bytes; }

// q [A D, H], k and v [G D, H], o [H, A D], gate_up [2 I, H], down [H, I], norms [H]
void parl_model_layer(Model* model, int64_t index, const float* q, const float* k, const float* v,
                      const float* o, const float* gate_up, const float* down, const float* norm_a,
                      const float* norm_f) {
  const Shape& s = model->shape;
  Layer& l = model->layers[index];
  int64_t inner = s.heads * s.dim, kept = s.groups * s.dim;
  pack(*model, l.qkv, s.hidden, [&](int64_t i, int64_t n) -> const float* {
    int64_t row = i * kPanel + n;
    if (row < inner) return q + row * s.hidden;
    if (row < inner + kept) return k + (row - inner) * s.hidden;
    return row < inner + 2 * kept ? v + (row - inner - kept) * s.hidden : nullptr;
  });
  pack(*model, l.output, inner, [&](int64_t i, int64_t n) -> const float* {
    return i * kPanel + n < s.hidden ? o + (i * kPanel + n) * inner : nullptr;
  });
  // 16 gates, then the 16 ups that they multiply
  pack(*model, l.gate_up, s.hidden, [&](int64_t i, int64_t n) -> const float* {
    int64_t column = i * 16 + n % 16;
    return column < s.width ? gate_up + (column + (n / 16) * s.width) * s.hidden : nullptr;
  });
  pack(*model, l.down, s.width, [&](int64_t i, int64_t n) -> const float* {
    return i * kPanel + n < s.hidden ? down + (i * kPanel + n) * s.width : nullptr;
  });
  std::copy_n(norm_a, s.hidden, l.attention_norm.begin());
  std::copy_n(norm_f, s.hidden, l.ffn_norm.begin());
}

// table, head [V, H]; the table is not copied
void parl_model_ends(Model* model, const float* table, const float* head, const float* norm) {
  const Shape& s = model->shape;
  model->table = table;
  pack(*model, model->head, s.hidden, [&](int64_t i, int64_t n) -> const float* {
    return i * kPanel + n < s.vocab ? head + (i * kPanel + n) * s.hidden : nullptr;
  });
  std::copy_n(norm, s.hidden, model->norm.begin());
}

void parl_model_step(Model* model, const Step* step) {
  model->team.run([&](int thread) { Walk(*model, *step, thread).run(); });
}

// GB/s at which the team reads the packed weights: the bound of a step
double parl_model_read(Model* model) {
  std::atomic<int64_t> kept{0};
  auto begin = std::chrono::steady_clock::now();
  constexpr int64_t kChunk = 1 << 18;
  model->team.run([&](int) {
    __m512i sum[4] = {};
    model->team.each(
        model->weight_bytes / kChunk, 4,
        [&](int64_t i) {
          const uint8_t* at = model->arena.data + i * kChunk;
          for (int64_t j = 0; j < kChunk; j += 256)
            for (int64_t k = 0; k < 4; k++)
              sum[k] = _mm512_add_epi32(sum[k], _mm512_load_si512(at + j + 64 * k));
        },
        [] {});
    for (const __m512i& part : sum) kept += _mm512_reduce_add_epi32(part);
  });
  std::chrono::duration<double> spent = std::chrono::steady_clock::now() - begin;
  int64_t bytes = model->weight_bytes / kChunk * kChunk;
  // the sum is used, so it is computed
  return double(bytes) / spent.count() / 1e9 + (kept.load() == 1 ? 1e-12 : 0);
}

}  // extern "C"
