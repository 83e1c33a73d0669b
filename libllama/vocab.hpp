// The vocabulary half of libllama: tokenize, detokenize and the special ids, with every input bounded first, because
// libllama answers a bad one by ending the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "llama.h"

namespace ftgguf {

using Token = llama_token;

class Vocab {
  public:
    // Loads a GGUF that holds at least the tokenizer keys, without weights. Throws std::runtime_error with what
    // libllama said.
    explicit Vocab(const std::string &path);
    ~Vocab();
    Vocab(const Vocab &) = delete;
    Vocab &operator=(const Vocab &) = delete;

    std::vector<Token> tokenize(std::string_view text, bool add_special, bool parse_special) const;
    std::string piece(Token id, bool special) const;
    std::vector<std::string> pieces(bool special) const;
    std::string join_pieces(const std::vector<Token> &ids, bool special) const;
    std::string detokenize(const std::vector<Token> &ids, bool remove_special, bool special) const;

    Token check(std::int64_t id) const;  // id, or throws std::out_of_range
    const llama_vocab *get() const { return vocab_; }
    std::int32_t size() const { return size_; }
    std::uint64_t serial() const { return serial_; }  // no other Vocab of this process has it

  private:
    std::vector<Token> tokenize_here(std::string_view text, bool add_special, bool parse_special) const;

    llama_model *model_ = nullptr;
    const llama_vocab *vocab_ = nullptr;
    std::int32_t size_ = 0;
    std::uint64_t serial_;
};

}  // namespace ftgguf
