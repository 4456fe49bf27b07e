// One step of a dense decoder of the Llama family on CPU threads: rows of tokens in, logits out.
//
// Compiled by engine/light/native/__init__.py for AVX-512 with BF16. Shapes: N rows, H hidden, A query
// heads, G key-value heads, D head size, I width of the FFN, V vocabulary.
//
//   team.inc     threads, phases, chunks
//   pack.inc     weights in panels: fp32, bf16, int8, int4
//   product.inc  a panel times rows
//   rows.inc     norm, rotation, cache, attention
//   draw.inc     a token from logits
//   model.inc    memory of weights and rows
//   walk.inc     the phases of a step

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
constexpr int64_t kPartsPerThread = 4;  // of the contexts, when there are fewer heads to attend to
constexpr int64_t kSerialRows = 4;  // up to so many rows, norms and rotations are a phase's tail

#include "team.inc"
#include "pack.inc"
#include "product.inc"
#include "rows.inc"
#include "draw.inc"

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
#include "walk.inc"

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

// A token of each row of softmax(logits / temperature), or the likeliest at temperature 0: the first
// whose cumulative weight passes uniform * total. logprob of what was sampled from.
void parl_draw(Model* model, int64_t rows, const float* logits, const double* uniforms,
               const double* temperatures, int32_t* ids, float* logprobs) {
  int64_t vocab = model->shape.vocab;
  model->team.run([&](int) {
    model->team.each(
        rows, 1,
        [&](int64_t row) {
          Draw drawn = draw_row(logits + row * vocab, vocab, uniforms[row], temperatures[row]);
          ids[row] = int32_t(drawn.id), logprobs[row] = drawn.logprob;
        },
        [] {});
  });
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
