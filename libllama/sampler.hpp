// llama-server's sampler chain over libllama's samplers, fed with logits instead of a context.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "scan.hpp"
#include "vocab.hpp"

namespace ftgguf {

// Field names and meanings are llama-server's; ftgguf.engine.messages.SamplingParams has the defaults.
struct ChainParams {
    std::uint32_t seed;
    float temperature, dynatemp_range, dynatemp_exponent;
    std::int32_t top_k;
    float top_p, min_p, top_n_sigma, xtc_probability, xtc_threshold, typical_p;
    std::int32_t repeat_last_n;
    float repeat_penalty, presence_penalty, frequency_penalty;
    float dry_multiplier, dry_base;
    std::int32_t dry_allowed_length, dry_penalty_last_n;
    std::vector<std::string> dry_sequence_breakers;
    std::int32_t mirostat;
    float mirostat_tau, mirostat_eta;
    float adaptive_target, adaptive_decay;
    std::int64_t min_keep;
    std::vector<std::string> samplers;
    std::vector<std::pair<std::int64_t, float>> logit_bias;
};

struct NoCandidate : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class SamplerChain {
  public:
    // Throws std::invalid_argument for values the samplers cannot take.
    SamplerChain(std::shared_ptr<const Vocab> vocab, const ChainParams &params);
    ~SamplerChain();
    SamplerChain(const SamplerChain &) = delete;
    SamplerChain &operator=(const SamplerChain &) = delete;

    // Runs the chain over `n` candidates: `logits[i]` belongs to token `ids[i]`, or to token i where ids is null (then
    // n is the vocabulary's size). `mask`, where not null, has one bit per token, least significant first; tokens
    // without their bit get minus infinity before the chain. Throws NoCandidate where nothing can be chosen.
    Token sample(const float *logits, const std::int32_t *ids, std::size_t n, const std::uint32_t *mask);
    void accept(Token id);
    void accept_all(const std::vector<Token> &ids);
    void reset();

    // The last sample's candidates after the chain, best first, at most `limit`, those with probability 0 left out;
    // and the chosen token's probability.
    std::vector<std::pair<Token, float>> candidates(std::size_t limit);
    float chosen_probability() const { return chosen_p_; }
    std::size_t n_candidates() const { return size_; }
    // What the last sample ran the chain over: the whole vocabulary, or a shortlist.
    std::size_t n_considered() const { return all_.size(); }

    std::uint32_t seed() const;
    std::vector<std::string> names() const;

  private:
    // What it takes to run the chain on a few candidates with the same result: top_k comes first but for samplers that
    // change single tokens (bias, penalties, DRY), and which tokens those are is known.
    struct Shortcut {
        std::size_t k = 0;       // 0: not possible
        std::size_t window = 0;  // accepted tokens that penalties or DRY look back on
        std::vector<Token> biased;
    };

    void add(llama_sampler *sampler);
    void plan(const ChainParams &params, std::vector<Token> biased);
    bool shortlist(const float *logits, std::size_t n);
    bool shortlist_with_ties(const float *logits, std::size_t n, const Scan &found, const std::vector<Token> &changed);
    void fill(const float *logits, const std::int32_t *ids, std::size_t n, const std::uint32_t *mask);
    // Whether logits, mask or logit_bias rule `id` out before any sampler runs; the arguments are sample's.
    bool forbidden(Token id, const float *logits, const std::int32_t *ids, std::size_t n,
                   const std::uint32_t *mask) const;
    void build(const ChainParams &params);
    void forbid_once(std::vector<llama_logit_bias> &biases);
    void add_named(const std::string &name, const ChainParams &params, bool &adaptive);

    std::shared_ptr<const Vocab> vocab_;
    llama_sampler *chain_ = nullptr;
    Shortcut shortcut_;
    std::vector<Token> forbidden_;  // by a logit_bias of minus infinity; sorted
    std::vector<Token> history_;  // a ring of the last `window` accepted tokens
    std::size_t accepted_ = 0;
    std::vector<llama_token_data> all_;
    llama_token_data *data_ = nullptr;  // into all_, after the chain
    std::size_t size_ = 0;
    float chosen_p_ = 0;
};

struct TopLogprobs {
    float chosen;                               // log-probability of the token asked for
    std::vector<std::pair<Token, float>> top;   // best first; ties by lower id
};

// Log-softmax over raw logits [n]: `chosen`'s value and the `n_top` best, in one pass and a partial selection.
TopLogprobs top_logprobs(const float *logits, std::size_t n, Token chosen, std::size_t n_top);

}  // namespace ftgguf
