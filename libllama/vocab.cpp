#include "vocab.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <stdexcept>

#include <pthread.h>

#include "log.hpp"

namespace ftgguf {

namespace {

constexpr std::size_t MAX_TEXT = std::size_t(1) << 28;  // bytes; libllama counts tokens and bytes in int32
constexpr std::size_t MAX_IDS = std::size_t(1) << 26;

// libllama falls back to std::wregex for many pre-tokenizers, and libstdc++'s matcher recurses once per character of a
// match: about 430 bytes of stack each, measured with deepseek-llm. A text whose longest stretch without a change
// between white space and other bytes exceeds SMALL_RUN is tokenized on a thread with a stack that fits.
constexpr std::size_t SMALL_RUN = 2048;
constexpr std::size_t MAX_RUN = std::size_t(1) << 21;
constexpr std::size_t STACK_PER_BYTE = 2048;
constexpr std::size_t STACK_BASE = std::size_t(16) << 20;

std::atomic<std::uint64_t> next_serial{1};

bool is_space(unsigned char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

std::size_t longest_run(std::string_view text) {
    std::size_t longest = 0, start = 0;
    for (std::size_t i = 1; i <= text.size(); ++i) {
        if (i == text.size() || is_space(text[i]) != is_space(text[i - 1])) {
            longest = std::max(longest, i - start);
            start = i;
        }
    }
    return longest;
}

// Runs `work` to its end on a new thread whose stack has `stack` bytes (address space; only what is used is resident).
template <class Work> void run_on_stack(std::size_t stack, Work work) {
    struct Job {
        Work *work;
        std::exception_ptr error;
    } job{&work, nullptr};
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_t thread;
    const auto main = [](void *raw) -> void * {
        auto *job = static_cast<Job *>(raw);
        try {
            (*job->work)();
        } catch (...) {
            job->error = std::current_exception();
        }
        return nullptr;
    };
    int failed = pthread_attr_setstacksize(&attributes, stack);
    if (failed == 0) failed = pthread_create(&thread, &attributes, main, &job);
    pthread_attr_destroy(&attributes);
    if (failed != 0) {
        throw std::runtime_error("text has a stretch without white space that is too long to tokenize here: no thread "
                                 "with " + std::to_string(stack >> 20) + " MiB of stack could be started");
    }
    pthread_join(thread, nullptr);
    if (job.error) std::rethrow_exception(job.error);
}

// Calls `fill(buffer, capacity)`, which answers a count or minus the capacity it needs.
template <class Fill> std::string grown(std::size_t guess, Fill fill) {
    std::string out(std::max<std::size_t>(guess, 32), '\0');
    std::int32_t n = fill(out.data(), std::int32_t(out.size()));
    if (n < 0) {
        if (n == std::numeric_limits<std::int32_t>::min()) throw std::length_error("text is too long");
        out.resize(std::size_t(-std::int64_t(n)));
        n = fill(out.data(), std::int32_t(out.size()));
        if (n < 0) throw std::runtime_error("libllama asked for a larger buffer twice");
    }
    out.resize(std::size_t(n));
    return out;
}

}  // namespace

Vocab::Vocab(const std::string &path) : serial_(next_serial++) {
    LogCapture log;
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    model_ = llama_model_load_from_file(path.c_str(), params);
    if (model_ == nullptr) throw std::runtime_error(log.reason());
    vocab_ = llama_model_get_vocab(model_);
    size_ = llama_vocab_n_tokens(vocab_);
    if (size_ <= 0 || llama_vocab_type(vocab_) == LLAMA_VOCAB_TYPE_NONE) {
        llama_model_free(model_);
        throw std::runtime_error("the file has no vocabulary");
    }
}

Vocab::~Vocab() { llama_model_free(model_); }

Token Vocab::check(std::int64_t id) const {
    if (id < 0 || id >= size_) {
        throw std::out_of_range("token id " + std::to_string(id) + " is outside 0.." + std::to_string(size_ - 1));
    }
    return Token(id);
}

std::vector<Token> Vocab::tokenize(std::string_view text, bool add_special, bool parse_special) const {
    if (text.size() > MAX_TEXT) {
        throw std::length_error("text of " + std::to_string(text.size()) + " bytes is longer than the limit of " +
                                std::to_string(MAX_TEXT));
    }
    const std::size_t run = longest_run(text);
    if (run <= SMALL_RUN) return tokenize_here(text, add_special, parse_special);
    if (run > MAX_RUN) {
        throw std::length_error("text has a stretch of " + std::to_string(run) + " bytes without a break between white "
                                "space and other characters; the limit is " + std::to_string(MAX_RUN));
    }
    std::vector<Token> ids;
    run_on_stack(STACK_BASE + run * STACK_PER_BYTE, [&] { ids = tokenize_here(text, add_special, parse_special); });
    return ids;
}

std::vector<Token> Vocab::tokenize_here(std::string_view text, bool add_special, bool parse_special) const {
    std::vector<Token> ids(text.size() + 4);
    for (int attempt = 0; attempt < 2; ++attempt) {
        const std::int32_t n = llama_tokenize(vocab_, text.data(), std::int32_t(text.size()), ids.data(),
                                              std::int32_t(ids.size()), add_special, parse_special);
        if (n >= 0) {
            ids.resize(std::size_t(n));
            return ids;
        }
        if (n == std::numeric_limits<std::int32_t>::min()) break;
        ids.resize(std::size_t(-std::int64_t(n)));  // invalid UTF-8 may give more tokens than bytes
    }
    throw std::length_error("the text has too many tokens");
}

std::string Vocab::piece(Token id, bool special) const {
    check(id);
    return grown(32, [&](char *out, std::int32_t room) {
        return llama_token_to_piece(vocab_, id, out, room, 0, special);
    });
}

std::vector<std::string> Vocab::pieces(bool special) const {
    std::vector<std::string> all;
    all.reserve(std::size_t(size_));
    for (Token id = 0; id < size_; ++id) all.push_back(piece(id, special));
    return all;
}

std::string Vocab::join_pieces(const std::vector<Token> &ids, bool special) const {
    constexpr std::size_t ROOM = 64;  // most pieces are shorter, and are written where they belong at once
    std::string text;
    std::size_t used = 0;
    for (const Token id : ids) {
        check(id);
        if (text.size() - used < ROOM) text.resize(2 * text.size() + ROOM * 16);
        const std::int32_t n = llama_token_to_piece(vocab_, id, text.data() + used, std::int32_t(ROOM), 0, special);
        if (n >= 0) {
            used += std::size_t(n);
            continue;
        }
        text.replace(used, std::string::npos, piece(id, special));
        used = text.size();
    }
    text.resize(used);
    return text;
}

std::string Vocab::detokenize(const std::vector<Token> &ids, bool remove_special, bool special) const {
    if (ids.size() > MAX_IDS) throw std::length_error("too many token ids");
    for (const Token id : ids) check(id);
    return grown(ids.size() * 4, [&](char *out, std::int32_t room) {
        return llama_detokenize(vocab_, ids.data(), std::int32_t(ids.size()), out, room, remove_special, special);
    });
}

}  // namespace ftgguf
