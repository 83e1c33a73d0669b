#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <list>
#include <mutex>
#include <stdexcept>

#include "log.hpp"
#include "scan.hpp"

namespace ftgguf {

namespace {

constexpr std::int32_t MAX_HISTORY = 1 << 20;  // tokens; the samplers allocate their window up front
constexpr std::size_t MAX_BREAKERS = 64;       // each costs a pass over the vocabulary
constexpr std::size_t MAX_SAMPLERS = 64;
constexpr std::size_t MAX_INFILL = 4096;       // infill compares all pairs of candidates
constexpr std::size_t MAX_DRY_CACHE = 8;
constexpr float INF = std::numeric_limits<float>::infinity();

void require(bool ok, const std::string &message) {
    if (!ok) throw std::invalid_argument(message);
}

void check_finite(const ChainParams &p) {
    const std::pair<const char *, float> values[] = {
        {"temperature", p.temperature},         {"dynatemp_range", p.dynatemp_range},
        {"dynatemp_exponent", p.dynatemp_exponent}, {"top_p", p.top_p},
        {"min_p", p.min_p},                     {"top_n_sigma", p.top_n_sigma},
        {"xtc_probability", p.xtc_probability}, {"xtc_threshold", p.xtc_threshold},
        {"typical_p", p.typical_p},             {"dry_multiplier", p.dry_multiplier},
        {"dry_base", p.dry_base},               {"mirostat_tau", p.mirostat_tau},
        {"mirostat_eta", p.mirostat_eta},       {"adaptive_target", p.adaptive_target},
        {"adaptive_decay", p.adaptive_decay}};
    for (const auto &[name, value] : values) require(std::isfinite(value), std::string(name) + " must be finite");
    // llama-server's words for its own three checks
    require(std::isfinite(p.repeat_penalty) && p.repeat_penalty > 0 && std::isfinite(1.0f / p.repeat_penalty),
            "penalty_repeat must be finite and greater than 0");
    require(std::isfinite(p.frequency_penalty), "penalty_freq must be finite");
    require(std::isfinite(p.presence_penalty), "penalty_present must be finite");
}

void check_bounds(const ChainParams &p, const Vocab &vocab) {
    require(p.mirostat >= 0 && p.mirostat <= 2, "mirostat must be 0, 1 or 2");
    require(p.min_keep >= 0, "min_keep must not be negative");
    require(p.repeat_last_n >= 0, "repeat_last_n must not be negative");
    require(p.dry_penalty_last_n >= 0, "dry_penalty_last_n must not be negative");
    require(p.dry_allowed_length >= 0, "dry_allowed_length must not be negative");
    require(p.dry_sequence_breakers.size() <= MAX_BREAKERS,
            "at most " + std::to_string(MAX_BREAKERS) + " dry_sequence_breakers are allowed");
    require(p.samplers.size() <= MAX_SAMPLERS, "at most " + std::to_string(MAX_SAMPLERS) + " samplers are allowed");
    for (const auto &[id, bias] : p.logit_bias) {
        vocab.check(id);
        require(!std::isnan(bias) && bias < INF, "logit_bias of token " + std::to_string(id) +
                                                     " must be a finite number or minus infinity");
    }
}

// libllama's infill asks the vocabulary for two buffers of at most 512 bytes and resizes them by a negative number when
// a piece is longer, compares all pairs, and needs a token to end with: so candidates are bounded before it.
struct InfillGuard {
    static const char *name(const llama_sampler *) { return "infill-guard"; }
    static void apply(llama_sampler *, llama_token_data_array *candidates) {
        if (candidates->size <= MAX_INFILL) return;
        throw NoCandidate("the infill sampler has " + std::to_string(candidates->size) + " candidates; put top_k or "
                          "top_p before it (at most " + std::to_string(MAX_INFILL) + " are compared)");
    }
    static llama_sampler *make() {
        static llama_sampler_i interface = [] {
            llama_sampler_i made{};
            made.name = &InfillGuard::name;
            made.apply = &InfillGuard::apply;
            return made;
        }();
        return llama_sampler_init(&interface, nullptr);
    }
};

bool infill_is_safe(const Vocab &vocab) {
    const Token eot = llama_vocab_eot(vocab.get()), eos = llama_vocab_eos(vocab.get());
    return eot != LLAMA_TOKEN_NULL || eos != LLAMA_TOKEN_NULL;
}

// A DRY sampler looks at every piece of the vocabulary for every breaker when it is made (0.1 s at 150k ids), and
// copies the result when it is cloned; so the last few are kept, untouched, and cloned.
llama_sampler *make_dry(const Vocab &vocab, const ChainParams &p) {
    struct Entry {
        std::uint64_t vocab;
        float multiplier, base;
        std::int32_t allowed, last_n;
        std::vector<std::string> breakers;
        llama_sampler *sampler;
    };
    static std::mutex mutex;
    static std::list<Entry> cache;
    const std::int32_t last_n = std::min(p.dry_penalty_last_n, MAX_HISTORY);
    const std::lock_guard<std::mutex> lock(mutex);
    for (auto it = cache.begin(); it != cache.end(); ++it) {
        if (it->vocab == vocab.serial() && it->multiplier == p.dry_multiplier && it->base == p.dry_base &&
            it->allowed == p.dry_allowed_length && it->last_n == last_n && it->breakers == p.dry_sequence_breakers) {
            cache.splice(cache.begin(), cache, it);
            return llama_sampler_clone(it->sampler);
        }
    }
    std::vector<const char *> breakers;
    for (const auto &text : p.dry_sequence_breakers) breakers.push_back(text.c_str());
    const LogCapture quiet;  // it warns about empty and long breakers
    llama_sampler *made = llama_sampler_init_dry(vocab.get(), p.dry_multiplier, p.dry_base, p.dry_allowed_length,
                                                 last_n, breakers.data(), breakers.size());
    cache.push_front({vocab.serial(), p.dry_multiplier, p.dry_base, p.dry_allowed_length, last_n,
                      p.dry_sequence_breakers, made});
    if (cache.size() > MAX_DRY_CACHE) {
        llama_sampler_free(cache.back().sampler);
        cache.pop_back();
    }
    return llama_sampler_clone(made);
}

}  // namespace

SamplerChain::SamplerChain(std::shared_ptr<const Vocab> vocab, const ChainParams &params) : vocab_(std::move(vocab)) {
    check_finite(params);
    check_bounds(params, *vocab_);
    llama_sampler_chain_params options = llama_sampler_chain_default_params();
    options.no_perf = true;
    chain_ = llama_sampler_chain_init(options);
    try {
        build(params);
    } catch (...) {
        llama_sampler_free(chain_);
        throw;
    }
}

SamplerChain::~SamplerChain() { llama_sampler_free(chain_); }

void SamplerChain::add(llama_sampler *sampler) { llama_sampler_chain_add(chain_, sampler); }

void SamplerChain::build(const ChainParams &p) {
    std::vector<llama_logit_bias> biases;
    for (const auto &[id, bias] : p.logit_bias) biases.push_back({Token(id), bias});
    std::int32_t n_suppressed = 0;
    const Token *suppressed = llama_vocab_get_suppress_tokens(vocab_->get(), &n_suppressed);
    for (std::int32_t i = 0; i < n_suppressed; ++i) biases.push_back({suppressed[i], -INF});
    forbid_once(biases);
    if (!biases.empty()) {
        add(llama_sampler_init_logit_bias(vocab_->size(), std::int32_t(biases.size()), biases.data()));
    }
    std::vector<Token> biased;
    for (const auto &bias : biases) biased.push_back(bias.token);
    plan(p, std::move(biased));
    if (p.mirostat != 0) {
        add(llama_sampler_init_temp(p.temperature));
        add(p.mirostat == 1
                ? llama_sampler_init_mirostat(vocab_->size(), p.seed, p.mirostat_tau, p.mirostat_eta, 100)
                : llama_sampler_init_mirostat_v2(p.seed, p.mirostat_tau, p.mirostat_eta));
        return;
    }
    bool adaptive = false;
    for (const auto &name : p.samplers) add_named(name, p, adaptive);
    add(adaptive ? llama_sampler_init_adaptive_p(p.adaptive_target, p.adaptive_decay, p.seed)
                 : llama_sampler_init_dist(p.seed));
}

// Fills forbidden_, and leaves one bias of minus infinity for each of its tokens, whatever else was to be added to them:
// `ignore_eos` comes as a flag and as biases, and a token that is biased twice bars the short way.
void SamplerChain::forbid_once(std::vector<llama_logit_bias> &biases) {
    for (const auto &bias : biases) {
        if (bias.bias == -INF) forbidden_.push_back(bias.token);
    }
    std::sort(forbidden_.begin(), forbidden_.end());
    forbidden_.erase(std::unique(forbidden_.begin(), forbidden_.end()), forbidden_.end());
    const auto gone = [&](const llama_logit_bias &bias) {
        return std::binary_search(forbidden_.begin(), forbidden_.end(), bias.token);
    };
    biases.erase(std::remove_if(biases.begin(), biases.end(), gone), biases.end());
    for (const Token id : forbidden_) biases.push_back({id, -INF});
}

void SamplerChain::add_named(const std::string &name, const ChainParams &p, bool &adaptive) {
    const auto min_keep = std::size_t(p.min_keep);
    if (name == "penalties") {
        add(llama_sampler_init_penalties(vocab_->size(), std::min(p.repeat_last_n, MAX_HISTORY), p.repeat_penalty,
                                         p.frequency_penalty, p.presence_penalty));
    } else if (name == "dry") {
        if (p.dry_multiplier != 0 && p.dry_base >= 1 && p.dry_penalty_last_n != 0) add(make_dry(*vocab_, p));
    } else if (name == "top_n_sigma") {
        add(llama_sampler_init_top_n_sigma(p.top_n_sigma));
    } else if (name == "top_k") {
        add(llama_sampler_init_top_k(p.top_k));
    } else if (name == "typ_p") {
        add(llama_sampler_init_typical(p.typical_p, min_keep));
    } else if (name == "top_p") {
        add(llama_sampler_init_top_p(p.top_p, min_keep));
    } else if (name == "min_p") {
        add(llama_sampler_init_min_p(p.min_p, min_keep));
    } else if (name == "xtc") {
        add(llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, min_keep, p.seed));
    } else if (name == "temperature") {
        add(llama_sampler_init_temp_ext(p.temperature, p.dynatemp_range, p.dynatemp_exponent));
    } else if (name == "infill") {
        require(infill_is_safe(*vocab_), "the infill sampler needs a vocabulary with an end token");
        add(InfillGuard::make());
        add(llama_sampler_init_infill(vocab_->get()));
    } else if (name == "adaptive_p") {
        adaptive = true;  // it chooses, so it goes last and replaces dist
    } else {
        throw std::invalid_argument("unknown sampler '" + name + "'");
    }
}

Token SamplerChain::sample(const float *logits, const std::int32_t *ids, std::size_t n, const std::uint32_t *mask) {
    size_ = 0;
    if (ids != nullptr || mask != nullptr || !shortlist(logits, n)) fill(logits, ids, n, mask);
    llama_token_data_array view{all_.data(), all_.size(), -1, false};
    llama_sampler_apply(chain_, &view);
    if (view.selected < 0 || std::size_t(view.selected) >= view.size) throw NoCandidate("the samplers chose no token");
    const llama_token_data chosen = view.data[view.selected];
    // Where nothing is left, libllama's dist takes the last candidate; a forbidden token must not come out. One that
    // only the samplers brought down (temperature 0, then XTC with threshold 0) may, as it does in llama-server.
    const bool brought_down = chosen.logit == -INF;
    if (brought_down ? forbidden(chosen.id, logits, ids, n, mask) : !(chosen.p >= 0)) {
        throw NoCandidate("no token is left to choose from: logit_bias, grammar and samplers forbid all of them");
    }
    data_ = view.data;
    size_ = brought_down ? 0 : view.size;  // no probabilities: libllama's are 0/0
    chosen_p_ = brought_down ? 1.0f : chosen.p;
    return chosen.id;
}

bool SamplerChain::forbidden(Token id, const float *logits, const std::int32_t *ids, std::size_t n,
                             const std::uint32_t *mask) const {
    if (mask != nullptr && (mask[id >> 5] >> (id & 31) & 1) == 0) return true;
    if (std::binary_search(forbidden_.begin(), forbidden_.end(), id)) return true;
    const auto at = ids == nullptr ? std::ptrdiff_t(id) : std::find(ids, ids + n, id) - ids;
    return logits[at] == -INF;
}

void SamplerChain::fill(const float *logits, const std::int32_t *ids, std::size_t n, const std::uint32_t *mask) {
    all_.resize(n);
    bool bad = false;
    float best = -INF;
    for (std::size_t i = 0; i < n; ++i) {
        const float logit = logits[i];
        bad |= !(logit < INF);  // NaN and plus infinity
        best = logit > best ? logit : best;
        all_[i] = {ids == nullptr ? Token(i) : vocab_->check(ids[i]), logit, 0.0f};
    }
    if (bad) throw NoCandidate("the model gave logits that are not numbers (NaN or infinity)");
    if (best == -INF) throw NoCandidate("every logit is minus infinity");
    if (mask == nullptr) return;
    for (auto &candidate : all_) {
        if ((mask[candidate.id >> 5] >> (candidate.id & 31) & 1) == 0) candidate.logit = -INF;
    }
}

void SamplerChain::accept(Token id) {
    llama_sampler_accept(chain_, vocab_->check(id));
    if (!history_.empty()) history_[accepted_++ % history_.size()] = id;
}

void SamplerChain::accept_all(const std::vector<Token> &ids) {
    for (const Token id : ids) vocab_->check(id);
    for (const Token id : ids) accept(id);
}

void SamplerChain::reset() {
    size_ = 0;
    accepted_ = 0;
    llama_sampler_reset(chain_);
}

std::vector<std::pair<Token, float>> SamplerChain::candidates(std::size_t limit) {
    limit = std::min(limit, size_);
    // The chain's own order is no help: adaptive_p changes the probabilities of candidates that were sorted before.
    std::partial_sort(data_, data_ + limit, data_ + size_, [](const llama_token_data &a, const llama_token_data &b) {
        return a.p > b.p || (a.p == b.p && a.id < b.id);
    });
    std::vector<std::pair<Token, float>> best;
    for (std::size_t i = 0; i < limit && data_[i].p > 0; ++i) best.emplace_back(data_[i].id, data_[i].p);
    return best;
}

std::uint32_t SamplerChain::seed() const { return llama_sampler_get_seed(chain_); }

std::vector<std::string> SamplerChain::names() const {
    std::vector<std::string> all;
    for (int i = 0; i < llama_sampler_chain_n(chain_); ++i) {
        all.emplace_back(llama_sampler_name(llama_sampler_chain_get(chain_, i)));
    }
    return all;
}

TopLogprobs top_logprobs(const float *logits, std::size_t n, Token chosen, std::size_t n_top) {
    using Entry = std::pair<float, Token>;
    const auto better = [](const Entry &a, const Entry &b) {
        return a.first > b.first || (a.first == b.first && a.second < b.second);
    };
    n_top = std::min(n_top, n);
    const Scan found = scan(logits, n);
    if (!found.numbers || found.best == -INF) {
        throw NoCandidate("the model gave logits that are not numbers (NaN or infinity)");
    }
    const float best = found.best;
    const double sum = sum_exp(logits, n, best);
    std::vector<Entry> list;
    collect(logits, n, found, bound_for(found, n_top), list);
    std::partial_sort(list.begin(), list.begin() + std::ptrdiff_t(n_top), list.end(), better);
    list.resize(n_top);
    const double log_sum = std::log(sum);
    const auto value = [&](float logit) {
        // llama-server's float probability is 0 here, and the log it reports the lowest float
        if (std::exp(logit - best) == 0.0f) return std::numeric_limits<float>::lowest();
        return float(double(logit) - double(best) - log_sum);
    };
    TopLogprobs result{value(logits[chosen]), {}};
    for (const auto &[logit, id] : list) result.top.emplace_back(id, value(logit));
    return result;
}

}  // namespace ftgguf
