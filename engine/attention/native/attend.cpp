// One decode step of hybrid attention for one context and layer, on one thread.
//
// Compiled by engine/attention/native/build.py for the machine it runs on, always with
// -ffp-contract=off: scores of the 2-bit scan must be the bits of engine/attention/codes.py. Shapes
// and layouts are those of engine/kvcache/quantise.py: P query heads per key-value head, D key
// size (a multiple of 16), V value size, blocks of 32 tokens.
//
//   scan.inc   scores of a block from its top-two-bit plane, per instruction set
//   rows.inc   keys and values as fp32 rows: full precision or coded
//   soft.inc   vector exp and the running softmax

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int kBlock = 32;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// 16 fp32 lanes; the compiler splits them where registers are narrower
typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t IntLanes __attribute__((vector_size(64)));
typedef double Doubles __attribute__((vector_size(64)));

}  // namespace

extern "C" {

// strides in elements; the last dimension is dense
struct Rows {
  const void* data;
  int64_t head_stride, row_stride, count;
  int64_t is_bf16;
};

struct Call {
  int64_t groups, heads, dim, value_dim;
  const float* q;  // [groups * heads, dim], scaled
  Rows sink_k, sink_v, hot_k, hot_v;
  // pools [slots, groups, ...], dense
  const uint8_t *top, *mid, *low;
  const uint16_t *minimum, *scale;
  const uint8_t* value_codes;
  const uint16_t *value_scale, *value_minimum;
  int64_t value_bits;  // 8, 4, or 0: the value is the key's first value_dim channels
  const int64_t *slots, *blocks;
  int64_t num_warm;
  int64_t hot_start, window_start;
  int64_t dense, shared, candidates, topk;
  float* out;         // [groups * heads, value_dim]
  float* lse;         // [groups * heads]
  int32_t* selected;  // [groups, shared ? 1 : heads, topk]
};

}  // extern "C"

namespace {

#include "soft.inc"

#include "rows.inc"

#include "scan.inc"

typedef std::pair<float, int32_t> Scored;

bool better(const Scored& a, const Scored& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

// Keeps the best `count` of scores that arrive in rising order of place.
class Best {
 public:
  explicit Best(size_t count) : count_(count) { kept_.reserve(2 * count + kBlock); }

  void offer(const float* scores, int32_t first) {
    float peak = scores[0];
    for (int t = 1; t < kBlock; ++t) peak = std::max(peak, scores[t]);
    if (!(peak > least_)) return;
    for (int t = 0; t < kBlock; ++t)
      if (scores[t] > least_) kept_.emplace_back(scores[t], first + t);
    if (kept_.size() >= 2 * count_) shrink();
  }

  // places, rising
  std::vector<int32_t> finish() {
    shrink();
    std::vector<int32_t> places;
    places.reserve(kept_.size());
    for (const Scored& s : kept_) places.push_back(s.second);
    std::sort(places.begin(), places.end());
    return places;
  }

 private:
  void shrink() {
    if (kept_.size() <= count_) return;
    std::nth_element(kept_.begin(), kept_.begin() + (count_ - 1), kept_.end(), better);
    kept_.resize(count_);
    // what comes later has a higher place, so it must be strictly better
    least_ = kept_[count_ - 1].first;
  }

  size_t count_;
  float least_ = kNothing;
  std::vector<Scored> kept_;
};

// The best warm tokens of groups first .. last - 1.
std::vector<std::vector<int32_t>> scan_groups(const Call& c, int64_t first, int64_t last) {
  const int64_t quads = c.dim / 4;
  std::vector<Best> best(last - first, Best(std::min(c.candidates, c.num_warm * kBlock)));
  Scan scan(c.heads, c.dim);
  std::vector<float> shared(kBlock);
  for (int64_t w = 0; w < c.num_warm; ++w) {
    const int64_t ahead = c.slots[std::min(w + 1, c.num_warm - 1)];
    for (int64_t g = first; g < last; ++g) {
      const int64_t at = c.slots[w] * c.groups + g;
      prefetch(c.top + (ahead * c.groups + g) * quads * kBlock, quads * kBlock);
      prefetch(c.minimum + (ahead * c.groups + g) * c.dim, 2 * c.dim);
      prefetch(c.scale + (ahead * c.groups + g) * c.dim, 2 * c.dim);
      scan.block(c.q + g * c.heads * c.dim, c.top + at * quads * kBlock, c.minimum + at * c.dim,
                 c.scale + at * c.dim);
      std::copy(scan.scores(0), scan.scores(0) + kBlock, shared.begin());
      for (int64_t p = 1; p < c.heads; ++p)
        for (int t = 0; t < kBlock; ++t) shared[t] = std::max(shared[t], scan.scores(p)[t]);
      best[g - first].offer(shared.data(), int32_t(w * kBlock));
    }
  }
  std::vector<std::vector<int32_t>> places;
  for (Best& b : best) places.push_back(b.finish());
  return places;
}

struct Span {
  int64_t begin, end;
};

// Rows `spans[r]` of keys and values for query row r. Tiles of 32 begin at fixed places and a row
// takes of each what it sees, so its sums do not depend on who reads with it.
void read_rows(const Call* calls, int64_t g, const Rows& keys, const Rows& values,
               const std::vector<Span>& spans, std::vector<Softmax>& softmax) {
  const int64_t heads = calls->heads, dim = calls->dim;
  int64_t first = std::numeric_limits<int64_t>::max(), last = 0;
  for (const Span& span : spans)
    if (span.begin < span.end) {
      first = std::min(first, span.begin / kBlock * kBlock);
      last = std::max(last, span.end);
    }
  RowReader k(keys, g, dim), v(values, g, calls->value_dim);
  std::vector<float> logits(heads * kBlock);
  for (int64_t at = first; at < last; at += kBlock) {
    const int n = int(std::min<int64_t>(kBlock, last - at));
    const float* const* key_rows = k.tile(at, n);
    const float* const* rows = v.tile(at, n);
    for (size_t r = 0; r < spans.size(); ++r) {
      const int64_t begin = std::max<int64_t>(0, spans[r].begin - at);
      const int64_t end = std::min<int64_t>(n, spans[r].end - at);
      if (begin >= end) continue;
      score_rows(calls[r].q + g * heads * dim, heads, dim, key_rows, int(end), logits.data());
      for (int64_t p = 0; p < heads; ++p)
        std::fill_n(logits.begin() + p * kBlock, begin, kNothing);
      softmax[r].absorb(logits.data(), rows, int(end));
    }
  }
}

void read_warm_whole(const Call* calls, int64_t g, std::vector<Softmax>& softmax) {
  const Call& c = *calls;
  CodedReader coded(c, g);
  std::vector<float> logits(c.heads * kBlock);
  for (int64_t w = 0; w < c.num_warm; ++w) {
    coded.block(c.slots[w]);
    for (size_t r = 0; r < softmax.size(); ++r) {
      score_channels(calls[r].q + g * c.heads * c.dim, c.heads, c.dim, coded.channels(),
                     logits.data());
      softmax[r].absorb(logits.data(), coded.values(), kBlock);
    }
  }
}

// The best topk of `logits`, ties to the lower place; rising.
std::vector<int32_t> top(const float* logits, int64_t size, int64_t count) {
  std::vector<Scored> scored(size);
  for (int64_t i = 0; i < size; ++i) scored[i] = {logits[i], int32_t(i)};
  if (count < size) {
    std::nth_element(scored.begin(), scored.begin() + (count - 1), scored.end(), better);
    scored.resize(count);
  }
  std::vector<int32_t> places;
  for (const Scored& s : scored) places.push_back(s.second);
  std::sort(places.begin(), places.end());
  return places;
}

// Exact scores of candidates and of hot tokens before the window, the choice, and its attention.
void read_retrieved(const Call& c, int64_t g, const std::vector<int32_t>& places,
                    Softmax& softmax) {
  const float* q = c.q + g * c.heads * c.dim;
  const int64_t num_warm = places.size(), num_hot = c.window_start - c.hot_start;
  const int64_t size = num_warm + std::max<int64_t>(0, num_hot);
  std::vector<float> logits(c.heads * size);
  const std::vector<double> wide(q, q + c.heads * c.dim);
  CodedReader coded(c, g);
  for (int64_t i = 0; i < num_warm; ++i) {
    if (i + 1 < num_warm) coded.prefetch_row(c.slots[places[i + 1] / kBlock], places[i + 1] % kBlock);
    const float* row = coded.key_row(c.slots[places[i] / kBlock], places[i] % kBlock);
    exact_dots(wide.data(), c.heads, row, c.dim, logits.data() + i, size);
  }
  RowReader hot_k(c.hot_k, g, c.dim), hot_v(c.hot_v, g, c.value_dim);
  for (int64_t i = num_warm; i < size; ++i) {
    const float* row = hot_k.tile(i - num_warm, 1)[0];
    exact_dots(wide.data(), c.heads, row, c.dim, logits.data() + i, size);
  }
  std::vector<std::vector<int32_t>> chosen;
  if (c.shared) {
    std::vector<float> peak(logits.begin(), logits.begin() + size);
    for (int64_t p = 1; p < c.heads; ++p)
      for (int64_t i = 0; i < size; ++i) peak[i] = std::max(peak[i], logits[p * size + i]);
    chosen.push_back(top(peak.data(), size, c.topk));
  } else {
    for (int64_t p = 0; p < c.heads; ++p)
      chosen.push_back(top(logits.data() + p * size, size, c.topk));
  }
  // logits of what a head did not choose are -inf from here on
  std::vector<uint8_t> used(size, 0);
  std::vector<float> masked(c.heads * size, kNothing);
  for (int64_t p = 0; p < c.heads; ++p)
    for (int32_t i : chosen[c.shared ? 0 : p]) {
      used[i] = 1;
      masked[p * size + i] = logits[p * size + i];
    }
  for (size_t row = 0; row < chosen.size(); ++row) {
    int32_t* list = c.selected + (g * int64_t(chosen.size()) + int64_t(row)) * c.topk;
    std::fill(list, list + c.topk, -1);
    for (size_t i = 0; i < chosen[row].size(); ++i) {
      const int64_t at = chosen[row][i];
      list[i] = int32_t(at < num_warm
                            ? c.blocks[places[at] / kBlock] * kBlock + places[at] % kBlock
                            : c.hot_start + at - num_warm);
    }
  }
  std::vector<float> tile(c.heads * kBlock), buffer(kBlock * c.value_dim);
  const float* rows[kBlock];
  int n = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (used[i]) {
      float* into = buffer.data() + n * c.value_dim;
      const float* from = i < num_warm
                              ? coded.value_row(c.slots[places[i] / kBlock], places[i] % kBlock)
                              : hot_v.tile(i - num_warm, 1)[0];
      std::copy(from, from + c.value_dim, into);
      rows[n] = into;
      for (int64_t p = 0; p < c.heads; ++p) tile[p * kBlock + n] = masked[p * size + i];
      ++n;
    }
    if (n == kBlock || (n > 0 && i + 1 == size)) {
      softmax.absorb(tile.data(), rows, n);
      n = 0;
    }
  }
}

// One group of `count` rows that see the same warm blocks. `places`: the candidates of the only
// row, or null.
void read_group(const Call* calls, int64_t count, int64_t g, const std::vector<int32_t>* places) {
  const Call& c = calls[count - 1];
  std::vector<Softmax> softmax(count, Softmax(c.heads, c.value_dim));
  std::vector<Span> sink(count), hot(count);
  for (int64_t r = 0; r < count; ++r) {
    const Call& row = calls[r];
    sink[r] = {0, row.sink_k.count};
    const int64_t before = row.dense ? 0 : row.window_start - row.hot_start;
    hot[r] = {std::max<int64_t>(0, before), row.hot_k.count};
  }
  read_rows(calls, g, c.sink_k, c.sink_v, sink, softmax);
  if (c.dense) read_warm_whole(calls, g, softmax);
  if (!c.dense && c.topk > 0)
    for (int64_t r = 0; r < count; ++r)
      read_retrieved(calls[r], g, places ? *places : scan_groups(calls[r], g, g + 1)[0],
                     softmax[r]);
  read_rows(calls, g, c.hot_k, c.hot_v, hot, softmax);
  for (int64_t r = 0; r < count; ++r)
    softmax[r].finish(calls[r].out + g * c.heads * c.value_dim, calls[r].lse + g * c.heads);
}

bool read_together(const Call& a, const Call& b) {
  return a.slots == b.slots && a.num_warm == b.num_warm && a.top == b.top && a.dense == b.dense &&
         a.sink_k.data == b.sink_k.data && a.hot_k.data == b.hot_k.data;
}

}  // namespace

extern "C" {

void parl_decode(const Call* call) {
  const Call& c = *call;
  std::vector<std::vector<int32_t>> places(c.groups);
  if (!c.dense && c.topk > 0) places = scan_groups(c, 0, c.groups);
  for (int64_t g = 0; g < c.groups; ++g) read_group(call, 1, g, &places[g]);
}

// Many rows, on several threads. Neighbours that share their blocks are read together: a tile of
// keys is loaded and decoded once for all of them. A row's bits are those of parl_decode.
void parl_decode_rows(const Call* calls, int64_t count, int64_t num_threads) {
  struct Part {
    int64_t first, count, group;
  };
  std::vector<Part> parts;
  for (int64_t first = 0, next; first < count; first = next) {
    for (next = first + 1; next < count && read_together(calls[first], calls[next]);) ++next;
    for (int64_t g = 0; g < calls[first].groups; ++g) parts.push_back({first, next - first, g});
  }
  std::atomic<size_t> taken{0};
  auto work = [&] {
    for (size_t i = taken++; i < parts.size(); i = taken++)
      read_group(calls + parts[i].first, parts[i].count, parts[i].group, nullptr);
  };
  std::vector<std::thread> others;
  try {
    const int64_t most = std::min<int64_t>(num_threads, int64_t(parts.size()));
    for (int64_t i = 1; i < most; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {
    // no more threads to be had: the rows are done by those there are
  }
  work();
  for (std::thread& other : others) other.join();
}

// Scores of every warm token, fp32 [groups, heads, 32 num_warm]: for tests and metrics.
void parl_scan(const Call* call, float* scores) {
  const Call& c = *call;
  Scan scan(c.heads, c.dim);
  for (int64_t w = 0; w < c.num_warm; ++w)
    for (int64_t g = 0; g < c.groups; ++g) {
      const int64_t at = c.slots[w] * c.groups + g;
      scan.block(c.q + g * c.heads * c.dim, c.top + at * c.dim / 4 * kBlock,
                 c.minimum + at * c.dim, c.scale + at * c.dim);
      for (int64_t p = 0; p < c.heads; ++p)
        std::copy(scan.scores(p), scan.scores(p) + kBlock,
                  scores + ((g * c.heads + p) * c.num_warm + w) * kBlock);
    }
}

int64_t parl_call_bytes() { return sizeof(Call); }

}  // extern "C"
