// Passes over a whole vocabulary's logits, written so that a compiler turns them into vector code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ftgguf {

constexpr std::size_t SCAN_BLOCK = 64;

struct Scan {
    std::vector<float> block_max;  // of each block of at most SCAN_BLOCK logits
    float best;                    // minus infinity where there is no larger one
    bool numbers;                  // no NaN, no plus infinity
};

Scan scan(const float *logits, std::size_t n);

// A bound that at least `want` logits reach: the `want`-th largest block maximum. Minus infinity where there are fewer
// blocks than that.
float bound_for(const Scan &scan, std::size_t want);

// Appends (logit, id) of every logit >= bound, in no order. Only blocks that reach the bound are read.
void collect(const float *logits, std::size_t n, const Scan &scan, float bound,
             std::vector<std::pair<float, std::int32_t>> &out);

// Appends the ids, rising, of every logit that is larger than the `k`-th largest before it. Those of `skip` (sorted) are
// passed over: neither appended nor counted. False, with `out` unfinished, where it would grow by more than `limit`.
bool collect_rising(const float *logits, std::size_t n, const Scan &scan, std::size_t k,
                    const std::vector<std::int32_t> &skip, std::size_t limit, std::vector<std::int32_t> &out);

// Sum of exp(logit - best).
double sum_exp(const float *logits, std::size_t n, float best);

}  // namespace ftgguf
