// Sampling: one row per item of work, the sorted row made only as far as the draw needs it.
//
// A token is one number, its logit's bits in an order that integers share above the complement of its id: equal logits
// are then ordered by id, and NaN cannot upset a sort.
#include <ATen/Parallel.h>  // at::get_num_threads
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include "team.h"

namespace tenantry {
namespace {

uint64_t token_of(float logit, int64_t id) {
  uint32_t bits;
  logit += 0.0f;  // both zeros are one
  std::memcpy(&bits, &logit, 4);
  const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(ordered) << 32 | (UINT32_MAX - static_cast<uint32_t>(id));
}

int64_t id_of(uint64_t token) { return UINT32_MAX - static_cast<uint32_t>(token); }

float logit_of(uint64_t token) {
  const uint32_t ordered = static_cast<uint32_t>(token >> 32);
  const uint32_t bits = ordered & 0x80000000u ? ordered ^ 0x80000000u : ~ordered;
  float logit;
  std::memcpy(&logit, &bits, 4);
  return logit;
}

uint64_t mixed(uint64_t value) {  // splitmix64, as `uniform` in sample.py
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

double uniform(int64_t seed, int64_t step) {
  constexpr uint64_t golden = 0x9e3779b97f4a7c15u;
  const uint64_t state = mixed(static_cast<uint64_t>(seed) + golden) + (static_cast<uint64_t>(step) + 1) * golden;
  return static_cast<double>(mixed(state) >> 11) * 0x1p-53;
}

// Tokens from the best on; sorted in runs of growing length, when they are asked for.
class Ranked {
 public:
  Ranked(std::vector<uint64_t>& tokens, int64_t count) : tokens_(tokens), count_(count) {}

  int64_t count() const { return count_; }

  uint64_t at(int64_t rank) {
    while (rank >= sorted_) {
      const int64_t end = std::min<int64_t>(count_, std::max<int64_t>(64, 4 * sorted_));
      const auto first = tokens_.begin();
      if (end < count_) std::nth_element(first + sorted_, first + end, first + count_, std::greater<>());
      std::sort(first + sorted_, first + end, std::greater<>());
      sorted_ = end;
    }
    return tokens_[static_cast<size_t>(rank)];
  }

 private:
  std::vector<uint64_t>& tokens_;
  int64_t count_, sorted_ = 0;
};

struct Filters {
  float temperature;
  int64_t top_k;
  float top_p, min_p;
};

int64_t draw(const float* logits, int64_t vocab, const Filters& filters, double u) {
  thread_local std::vector<uint64_t> tokens;
  tokens.resize(static_cast<size_t>(vocab));
  float best = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < vocab; ++i) best = std::max(best, logits[i]);
  const auto weight = [&](float logit) { return std::exp((logit - best) / filters.temperature); };
  for (int64_t i = 0; i < vocab; ++i) tokens[static_cast<size_t>(i)] = token_of(logits[i], i);
  int64_t count = vocab;
  if (filters.top_k > 0 && filters.top_k < vocab) {
    count = filters.top_k;
    std::nth_element(tokens.begin(), tokens.begin() + count, tokens.end(), std::greater<>());
  }
  Ranked ranked(tokens, count);
  const auto whole = [&](float floor) {  // weight of all tokens at or above the floor
    double mass = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float w = count < vocab ? weight(logit_of(tokens[static_cast<size_t>(i)])) : weight(logits[i]);
      if (w >= floor) mass += w;
    }
    return mass;
  };
  double mass = 0;
  if (filters.top_p < 1.0f) {  // counts what top-k has left; the token that crosses the border stays
    const double border = static_cast<double>(filters.top_p) * whole(0.0f);
    double before = 0;
    int64_t kept = 0;
    do {
      const float w = weight(logit_of(ranked.at(kept)));
      before += w;
      if (w >= filters.min_p) mass += w;
      ++kept;
    } while (kept < count && before < border);
    count = kept;
  } else {
    mass = whole(filters.min_p);
  }
  const double target = u * mass;
  double seen = 0;
  int64_t chosen = id_of(ranked.at(0));
  for (int64_t rank = 0; rank < count; ++rank) {
    const uint64_t token = ranked.at(rank);
    const float w = weight(logit_of(token));
    if (!(w > 0.0f && w >= filters.min_p)) break;  // the last one with mass is right then, whatever was rounded
    chosen = id_of(token);
    seen += w;
    if (seen > target) break;
  }
  return chosen;
}

int64_t greatest(const float* logits, int64_t vocab) {
  int64_t chosen = 0;
  for (int64_t i = 1; i < vocab; ++i)
    if (logits[i] > logits[chosen]) chosen = i;
  return chosen;
}

void check(const at::Tensor& values, at::ScalarType type, int64_t rows, const char* name) {
  TORCH_CHECK(values.scalar_type() == type && values.dim() == 1 && values.size(0) == rows && values.is_contiguous(),
              "`", name, "` must be ", type, " [", rows, "]");
}

void sample(const at::Tensor& logits, const at::Tensor& temperature, const at::Tensor& top_k, const at::Tensor& top_p,
            const at::Tensor& min_p, const at::Tensor& seeds, const at::Tensor& steps, at::Tensor& chosen) {
  TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.stride(1) == 1 && logits.size(1) > 0 &&
                  logits.size(1) < UINT32_MAX,
              "`logits` must be float32 [rows, vocab] with contiguous rows");
  const int64_t rows = logits.size(0), vocab = logits.size(1), stride = logits.stride(0);
  check(temperature, at::kFloat, rows, "temperature");
  check(top_k, at::kLong, rows, "top_k");
  check(top_p, at::kFloat, rows, "top_p");
  check(min_p, at::kFloat, rows, "min_p");
  check(seeds, at::kLong, rows, "seeds");
  check(steps, at::kLong, rows, "steps");
  check(chosen, at::kLong, rows, "chosen");
  const auto* from = static_cast<const float*>(logits.data_ptr());
  const auto* t = static_cast<const float*>(temperature.data_ptr());
  const auto* k = static_cast<const int64_t*>(top_k.data_ptr());
  const auto* p = static_cast<const float*>(top_p.data_ptr());
  const auto* m = static_cast<const float*>(min_p.data_ptr());
  const auto* seed = static_cast<const int64_t*>(seeds.data_ptr());
  const auto* step = static_cast<const int64_t*>(steps.data_ptr());
  auto* to = static_cast<int64_t*>(chosen.data_ptr());
  Team::get().run(rows, rows * vocab < 10'000 ? 1 : at::get_num_threads(), [&](int64_t row) {
    const float* own = from + row * stride;
    to[row] = t[row] > 0 ? draw(own, vocab, {t[row], k[row], p[row], m[row]}, uniform(seed[row], step[row]))
                         : greatest(own, vocab);
  });
}

}  // namespace
}  // namespace tenantry

TORCH_LIBRARY_FRAGMENT(tenantry_cpu, m) {
  m.def("sample(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, "
        "Tensor steps, Tensor(a!) chosen) -> ()");
}

TORCH_LIBRARY_IMPL(tenantry_cpu, CPU, m) { m.impl("sample", tenantry::sample); }
