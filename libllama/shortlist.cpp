// The short way of SamplerChain: which few candidates give the same answer as the whole vocabulary?
#include <algorithm>
#include <functional>
#include <limits>

#include "sampler.hpp"
#include "scan.hpp"

namespace ftgguf {

namespace {

constexpr std::size_t MAX_MODIFIED = 1024;  // tokens that bias and penalties may change
constexpr std::size_t MAX_SHORT_K = 512;
constexpr std::size_t MAX_HEAP_K = 128;  // up to here libllama's top_k is std::partial_sort, beyond it sorts buckets
constexpr float INF = std::numeric_limits<float>::infinity();

}  // namespace

void SamplerChain::plan(const ChainParams &p, std::vector<Token> biased) {
    Shortcut made;
    made.biased = std::move(biased);
    // libllama's bias finds a token at its own place in the whole vocabulary as often as it is named, and only once
    // in a list that leaves tokens out
    std::vector<Token> sorted = made.biased;
    std::sort(sorted.begin(), sorted.end());
    if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) return;
    if (p.mirostat != 0 || made.biased.size() > MAX_MODIFIED) return;
    for (const auto &name : p.samplers) {
        if (name == "top_k" && p.top_k > 0) {
            made.k = std::size_t(p.top_k);
            break;
        }
        const bool penalties = p.repeat_penalty != 1 || p.frequency_penalty != 0 || p.presence_penalty != 0;
        if (name == "penalties" && penalties) {
            made.window = std::max(made.window, std::size_t(p.repeat_last_n));
        } else if (name == "dry" && p.dry_multiplier != 0 && p.dry_base >= 1) {
            made.window = std::max(made.window, std::size_t(p.dry_penalty_last_n));
        } else if ((name == "top_n_sigma" && p.top_n_sigma > 0) || (name == "typ_p" && p.typical_p < 1) ||
                   (name == "top_p" && p.top_p < 1) || (name == "min_p" && p.min_p > 0) || name == "infill" ||
                   name == "temperature" || (name == "xtc" && p.xtc_probability > 0 && p.xtc_threshold <= 0.5f)) {
            return;  // it sees more than single tokens, and comes before top_k
        }
    }
    if (made.k > MAX_SHORT_K || made.window > MAX_MODIFIED) return;
    history_.resize(made.window);
    shortcut_ = std::move(made);
}

// Fills all_ with the candidates that top_k can keep, if that is certain: of the tokens that nothing changes the best
// k, and every token that something may change. Equal logits at the border or inside are ordered by how the sort came
// across them, which a shorter list would change: for them see `shortlist_with_ties`.
bool SamplerChain::shortlist(const float *logits, std::size_t n) {
    if (shortcut_.k == 0) return false;
    std::vector<Token> changed = shortcut_.biased;
    const auto remembered = std::ptrdiff_t(std::min(accepted_, history_.size()));
    changed.insert(changed.end(), history_.begin(), history_.begin() + remembered);
    std::sort(changed.begin(), changed.end());
    changed.erase(std::unique(changed.begin(), changed.end()), changed.end());
    const std::size_t want = shortcut_.k + changed.size() + 1;
    if (want * 4 > n / SCAN_BLOCK) return false;  // no gain
    const Scan found = scan(logits, n);
    if (!found.numbers) return false;  // the long way reports it
    const float bound = bound_for(found, want);
    if (bound == -INF) return false;
    std::vector<std::pair<float, std::int32_t>> best;
    collect(logits, n, found, bound, best);
    all_.clear();
    std::vector<float> values;
    for (const auto &[logit, id] : best) {
        if (std::binary_search(changed.begin(), changed.end(), id)) continue;
        values.push_back(logit);
        all_.push_back({id, logit, 0.0f});
    }
    for (const Token id : changed) {
        values.push_back(logits[id]);
        all_.push_back({id, logits[id], 0.0f});
    }
    const auto front = values.begin() + std::ptrdiff_t(std::min(values.size(), want));
    std::partial_sort(values.begin(), front, values.end(), std::greater<float>());
    if (std::adjacent_find(values.begin(), front) == front) return true;
    return shortlist_with_ties(logits, n, found, changed);
}

// The same where logits are equal: what std::partial_sort does depends on the first k candidates, which its heap begins
// with, and on those that are larger than the heap's smallest when their turn comes; all others leave no trace. So a
// list of these in their order ends as the whole vocabulary does, equal logits and all. What bias and penalties make of
// the `changed` tokens (sorted) is not known here: they are all taken, and raise the bar for nobody.
bool SamplerChain::shortlist_with_ties(const float *logits, std::size_t n, const Scan &found,
                                       const std::vector<Token> &changed) {
    const std::size_t k = shortcut_.k;
    if (k > MAX_HEAP_K) return false;
    std::vector<Token> ids = changed;
    for (std::size_t i = 0; i < k; ++i) ids.push_back(Token(i));
    if (!collect_rising(logits, n, found, k, changed, n / 8, ids)) return false;
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    all_.clear();
    for (const Token id : ids) all_.push_back({id, logits[id], 0.0f});
    return true;
}

}  // namespace ftgguf
