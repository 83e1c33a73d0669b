// The Python face of the module: argument conversion, shape checks, and the GIL released around the work.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "log.hpp"
#include "sampler.hpp"
#include "vocab.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using ftgguf::ChainParams;
using ftgguf::SamplerChain;
using ftgguf::Token;
using ftgguf::Vocab;

namespace {

using Logits = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Mask = nb::ndarray<const std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

nb::bytes to_bytes(const std::string &text) { return nb::bytes(text.data(), text.size()); }

std::vector<Token> tokenize(const Vocab &vocab, const nb::bytes &text, bool add_special, bool parse_special) {
    const std::string_view view(text.c_str(), text.size());
    nb::gil_scoped_release release;
    return vocab.tokenize(view, add_special, parse_special);
}

nb::list pieces(const Vocab &vocab, bool special) {
    std::vector<std::string> all;
    {
        nb::gil_scoped_release release;
        all = vocab.pieces(special);
    }
    nb::list out;
    for (const auto &piece : all) out.append(to_bytes(piece));
    return out;
}

std::vector<std::uint32_t> attributes(const Vocab &vocab) {
    std::vector<std::uint32_t> all;
    for (Token id = 0; id < vocab.size(); ++id) all.push_back(std::uint32_t(llama_vocab_get_attr(vocab.get(), id)));
    return all;
}

nb::bytes detokenize(const Vocab &vocab, const std::vector<Token> &ids, bool remove_special, bool special) {
    std::string text;
    {
        nb::gil_scoped_release release;
        text = vocab.detokenize(ids, remove_special, special);
    }
    return to_bytes(text);
}

nb::bytes join_pieces(const Vocab &vocab, const std::vector<Token> &ids, bool special) {
    std::string text;
    {
        nb::gil_scoped_release release;
        text = vocab.join_pieces(ids, special);
    }
    return to_bytes(text);
}

template <Token (*get)(const llama_vocab *)> Token special_id(const Vocab &vocab) { return get(vocab.get()); }
template <bool (*get)(const llama_vocab *)> bool special_flag(const Vocab &vocab) { return get(vocab.get()); }

Token sample(SamplerChain &chain, const Vocab &vocab, const Logits &logits, const std::optional<Ids> &ids,
             const std::optional<Mask> &mask) {
    const auto n_vocab = std::size_t(vocab.size());
    if (!ids && logits.size() != n_vocab) {
        throw nb::value_error("logits must have one value per token of the vocabulary, or ids must be given");
    }
    if (logits.size() == 0 || logits.size() > n_vocab) throw nb::value_error("logits must have 1..n_vocab values");
    if (ids && ids->size() != logits.size()) throw nb::value_error("ids and logits must have the same length");
    if (mask && mask->size() < (n_vocab + 31) / 32) throw nb::value_error("mask must have a bit for every token");
    const std::int32_t *id_data = ids ? ids->data() : nullptr;
    const std::uint32_t *mask_data = mask ? mask->data() : nullptr;
    nb::gil_scoped_release release;
    return chain.sample(logits.data(), id_data, logits.size(), mask_data);
}

nb::tuple top_logprobs(const Logits &logits, std::int64_t chosen, std::int64_t n_top) {
    if (chosen < 0 || std::size_t(chosen) >= logits.size()) throw nb::index_error("chosen token is outside the logits");
    if (n_top < 0) throw nb::value_error("n_top must not be negative");
    ftgguf::TopLogprobs result;
    {
        nb::gil_scoped_release release;
        result = ftgguf::top_logprobs(logits.data(), logits.size(), Token(chosen), std::size_t(n_top));
    }
    return nb::make_tuple(result.chosen, result.top);
}

void bind_vocab(nb::module_ &m) {
    nb::class_<Vocab>(m, "Vocab")
        .def(nb::init<const std::string &>(), "path"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("tokenize", &tokenize, "text"_a, "add_special"_a, "parse_special"_a)
        .def("piece", [](const Vocab &v, std::int64_t id, bool special) {
            return to_bytes(v.piece(v.check(id), special));
        }, "id"_a, "special"_a)
        .def("pieces", &pieces, "special"_a)
        .def("join_pieces", &join_pieces, "ids"_a, "special"_a)
        .def("detokenize", &detokenize, "ids"_a, "remove_special"_a, "special"_a)
        .def("attributes", &attributes)
        .def("is_eog", [](const Vocab &v, std::int64_t id) { return llama_vocab_is_eog(v.get(), v.check(id)); }, "id"_a)
        .def_prop_ro("n_vocab", &Vocab::size)
        .def_prop_ro("type", [](const Vocab &v) { return int(llama_vocab_type(v.get())); })
        .def_prop_ro("bos", &special_id<llama_vocab_bos>)
        .def_prop_ro("eos", &special_id<llama_vocab_eos>)
        .def_prop_ro("eot", &special_id<llama_vocab_eot>)
        .def_prop_ro("sep", &special_id<llama_vocab_sep>)
        .def_prop_ro("nl", &special_id<llama_vocab_nl>)
        .def_prop_ro("pad", &special_id<llama_vocab_pad>)
        .def_prop_ro("mask", &special_id<llama_vocab_mask>)
        .def_prop_ro("fim_pre", &special_id<llama_vocab_fim_pre>)
        .def_prop_ro("fim_suf", &special_id<llama_vocab_fim_suf>)
        .def_prop_ro("fim_mid", &special_id<llama_vocab_fim_mid>)
        .def_prop_ro("fim_pad", &special_id<llama_vocab_fim_pad>)
        .def_prop_ro("fim_rep", &special_id<llama_vocab_fim_rep>)
        .def_prop_ro("fim_sep", &special_id<llama_vocab_fim_sep>)
        .def_prop_ro("add_bos", &special_flag<llama_vocab_get_add_bos>)
        .def_prop_ro("add_eos", &special_flag<llama_vocab_get_add_eos>)
        .def_prop_ro("add_sep", &special_flag<llama_vocab_get_add_sep>);
}

// SamplingParams is read by attribute, so that its fields are named in one place only.
ChainParams read_params(const nb::object &p) {
    const auto number = [&](const char *name) { return nb::cast<float>(p.attr(name)); };
    const auto integer = [&](const char *name) { return nb::cast<std::int32_t>(p.attr(name)); };
    ChainParams c;
    c.seed = nb::cast<std::uint32_t>(p.attr("seed"));
    c.temperature = number("temperature");
    c.dynatemp_range = number("dynatemp_range");
    c.dynatemp_exponent = number("dynatemp_exponent");
    c.top_k = integer("top_k");
    c.top_p = number("top_p");
    c.min_p = number("min_p");
    c.top_n_sigma = number("top_n_sigma");
    c.xtc_probability = number("xtc_probability");
    c.xtc_threshold = number("xtc_threshold");
    c.typical_p = number("typical_p");
    c.repeat_last_n = integer("repeat_last_n");
    c.repeat_penalty = number("repeat_penalty");
    c.presence_penalty = number("presence_penalty");
    c.frequency_penalty = number("frequency_penalty");
    c.dry_multiplier = number("dry_multiplier");
    c.dry_base = number("dry_base");
    c.dry_allowed_length = integer("dry_allowed_length");
    c.dry_penalty_last_n = integer("dry_penalty_last_n");
    for (nb::handle text : p.attr("dry_sequence_breakers")) {
        c.dry_sequence_breakers.push_back(nb::cast<std::string>(text));
    }
    c.mirostat = integer("mirostat");
    c.mirostat_tau = number("mirostat_tau");
    c.mirostat_eta = number("mirostat_eta");
    c.adaptive_target = number("adaptive_target");
    c.adaptive_decay = number("adaptive_decay");
    c.min_keep = nb::cast<std::int64_t>(p.attr("min_keep"));
    for (nb::handle name : p.attr("samplers")) c.samplers.push_back(nb::cast<std::string>(name));
    for (nb::handle entry : p.attr("logit_bias")) {
        c.logit_bias.emplace_back(nb::cast<std::int64_t>(entry[0]), nb::cast<float>(entry[1]));
    }
    return c;
}

struct PyChain {  // the chain keeps its vocabulary alive
    std::shared_ptr<const Vocab> vocab;
    std::unique_ptr<SamplerChain> chain;

    PyChain(std::shared_ptr<Vocab> v, const nb::object &params) : vocab(std::move(v)) {
        const ChainParams values = read_params(params);
        nb::gil_scoped_release release;
        chain = std::make_unique<SamplerChain>(vocab, values);
    }
};

void bind_sampler(nb::module_ &m) {
    nb::class_<PyChain>(m, "SamplerChain")
        .def(nb::init<std::shared_ptr<Vocab>, const nb::object &>(), "vocab"_a, "params"_a)
        .def("sample", [](PyChain &p, const Logits &logits, const std::optional<Mask> &mask,
                          const std::optional<Ids> &ids) {
            return sample(*p.chain, *p.vocab, logits, ids, mask);
        }, "logits"_a, "mask"_a = nb::none(), "ids"_a = nb::none())
        .def("accept", [](PyChain &p, std::int64_t id) { p.chain->accept(p.vocab->check(id)); }, "id"_a)
        .def("accept_all", [](PyChain &p, const std::vector<Token> &ids) {
            nb::gil_scoped_release release;
            p.chain->accept_all(ids);
        }, "ids"_a)
        .def("reset", [](PyChain &p) { p.chain->reset(); })
        .def("candidates", [](PyChain &p, std::size_t limit) { return p.chain->candidates(limit); }, "limit"_a)
        .def_prop_ro("chosen_probability", [](const PyChain &p) { return p.chain->chosen_probability(); })
        .def_prop_ro("n_considered", [](const PyChain &p) { return p.chain->n_considered(); })
        .def_prop_ro("n_candidates", [](const PyChain &p) { return p.chain->n_candidates(); })
        .def_prop_ro("seed", [](const PyChain &p) { return p.chain->seed(); })
        .def_prop_ro("names", [](const PyChain &p) { return p.chain->names(); });
    m.def("top_logprobs", &top_logprobs, "logits"_a, "chosen"_a, "n_top"_a);
}

}  // namespace

NB_MODULE(_libllama, m) {
    nb::set_leak_warnings(false);  // objects that other extensions hold at exit (a grammar tokenizer) are no fault
    nb::exception<ftgguf::NoCandidate>(m, "NoCandidate", PyExc_RuntimeError);
    ftgguf::quiet_log();
    bind_vocab(m);
    bind_sampler(m);
}
