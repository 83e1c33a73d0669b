// Routed experts' feed-forward in three stages of small tasks, computed in place with ggml's products.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace ftgguf {

// Values of a row that one task rounds at a time: a multiple of every block that ggml rounds to (256 at most).
constexpr int64_t kPiece = 256;
// Bytes of as many values, rounded: q8_K has 292, q8_0 272.
constexpr size_t kRoundedPiece = 320;
// Tasks for each thread and stage, so that a slow thread does not hold up the rest.
constexpr int kTasks = 5;
// Entries whose intermediate rows exist at once: 4096 rows of 2048 floats are 32 MiB.
constexpr int kEntries = 4096;

// ----------------------------------------------------------------------------------------------------- the layers

size_t ExpertLayer::expert_bytes() const {
    size_t total = up.n * up.row_bytes + down.n * down.row_bytes;
    return has_gate ? total + gate.n * gate.row_bytes : total;
}

size_t ExpertJob::bytes() const {
    return n_experts * layer->expert_bytes() - (hidden ? layer->down.n * layer->down.row_bytes : 0);
}

static void complete(ExpertMatrix & m, bool own, const char * name) {
    if (m.type < 0 || m.type >= GGML_TYPE_COUNT || ggml_blck_size(m.type) == 0) {
        throw std::invalid_argument(std::string(name) + ": no such tensor type");
    }
    if (!m.base || m.n <= 0 || m.k <= 0 || m.k % ggml_blck_size(m.type) != 0) {
        throw std::invalid_argument(std::string(name) + ": rows of " + std::to_string(m.k) + " do not fit its type");
    }
    auto * traits = ggml_get_type_traits_cpu(m.type);
    if (!traits->vec_dot) {
        throw std::invalid_argument(std::string(name) + ": ggml's CPU backend has no product for " + ggml_type_name(m.type));
    }
    m.dot = traits->vec_dot;
    m.rounding = traits->vec_dot_type;
    if (m.k % ggml_blck_size(m.rounding) != 0) {
        throw std::invalid_argument(std::string(name) + ": rows of " + std::to_string(m.k) + " cannot be rounded to " +
                                    ggml_type_name(m.rounding));
    }
    m.row_bytes = ggml_row_size(m.type, m.k);
    m.own = own ? own_dot(m.type) : nullptr;
    m.input_bytes = m.own ? (m.k + m.own->group - 1) / m.own->group * m.own->group_bytes : ggml_row_size(m.rounding, m.k);
}

ExpertWorker::ExpertWorker(std::vector<int> cpus, bool own)
    : first_cpu_(cpus.empty() ? -1 : cpus[0]), own_(own), team_(std::move(cpus)) {
    ggml_cpu_init();  // the half-precision tables
}

void ExpertWorker::add_layer(int layer, ExpertLayer d) {
    if (layer < 0 || d.experts <= 0) throw std::invalid_argument("a layer has a number from 0 and at least one expert");
    complete(d.up, own_, "up");
    complete(d.down, own_, "down");
    if (d.has_gate) complete(d.gate, own_, "gate");
    if (!d.has_gate && d.act != Act::relu_sqr && d.act != Act::relu && d.act != Act::silu && d.act != Act::gelu) {
        throw std::invalid_argument("this activation needs a gate");
    }
    if (d.up.n != d.down.k || (d.has_gate && (d.gate.n != d.up.n || d.gate.k != d.up.k))) {
        throw std::invalid_argument("the shapes of gate, up and down do not fit each other");
    }
    std::lock_guard<std::mutex> lock(busy_);
    if (static_cast<size_t>(layer) >= layers_.size()) layers_.resize(layer + 1);
    layers_[layer] = std::make_unique<ExpertLayer>(d);
}

const ExpertLayer & ExpertWorker::layer(int layer) const {
    if (layer < 0 || static_cast<size_t>(layer) >= layers_.size() || !layers_[layer]) {
        throw std::invalid_argument("no experts were added for layer " + std::to_string(layer));
    }
    return *layers_[layer];
}

// ---------------------------------------------------------------------------------------------------- the products

// Formulas: llama.cpp's build_moe_ffn and ggml's GLU operators.
static float activate(Act act, bool has_gate, float g, float u) {
    float in = has_gate ? g : u;
    float other = has_gate ? u : 1.0f;
    switch (act) {
        case Act::silu: return in / (1.0f + std::exp(-in)) * other;
        case Act::gelu: {
            float t = std::tanh(0.79788456080286535588f * in * (1.0f + 0.044715f * in * in));
            return 0.5f * in * (1.0f + t) * other;
        }
        case Act::relu: return std::max(in, 0.0f) * other;
        case Act::relu_sqr: {
            float r = std::max(u, 0.0f);
            return r * r;
        }
        case Act::swiglu_oai: {
            float a = std::min(g, 7.0f);
            float b = std::min(std::max(u, -7.0f), 7.0f);
            return a / (1.0f + std::exp(-1.702f * a)) * (b + 1.0f);
        }
    }
    return 0.0f;
}

// Values [from, to) of a row of `m`'s input as ggml rounds them; `from` is a multiple of kPiece. `row` and `to_row` are
// where the whole row starts.
static void round_values(const ExpertMatrix & m, const float * row, uint8_t * to_row, int64_t from, int64_t to) {
    auto * traits = ggml_get_type_traits_cpu(m.rounding);
    if (m.own) {
        uint8_t rounded[kRoundedPiece];
        for (int64_t at = from; at < to; at += m.own->group) {
            const int64_t values = std::min(m.own->group, to - at);
            traits->from_float(row + at, rounded, values);
            m.own->lay_out(rounded, values, to_row + at / m.own->group * m.own->group_bytes);
        }
        return;
    }
    uint8_t * out = to_row + ggml_row_size(m.rounding, from);
    if (m.rounding == GGML_TYPE_F32) {
        std::memcpy(out, row + from, (to - from) * sizeof(float));
    } else {
        traits->from_float(row + from, out, to - from);
    }
}

// Ask for the weights two rows on: ggml's products leave the memory idle between rows, and a processor's own prefetching
// ends at pages of 4 KB. With it an expert of 2.9 MB takes two cores 145 us instead of 195 (four rows on: 148).
constexpr int64_t kAhead = 2;

static void fetch_ahead(const ExpertMatrix & m, int expert, int64_t n) {
    if (m.own || n + kAhead >= m.n) return;
    const uint8_t * row = m.base + expert * m.stride + (n + kAhead) * m.row_bytes;
    for (size_t at = 0; at < m.row_bytes; at += 64) __builtin_prefetch(row + at);
}

// out[i] = weight row `n` of `expert` times inputs[i], for `rows` of them: kDotRows at most. `again`: the row has been read
// just now, for other inputs.
static void products(const ExpertMatrix & m, int expert, int64_t n, const uint8_t * const * inputs, int rows, bool again,
                     float * out) {
    const uint8_t * row = m.base + expert * m.stride + n * m.row_bytes;
    if (m.own) {
        m.own->dots[rows - 1](m.k, row, inputs, again ? 0 : kAhead * m.row_bytes, out);
    } else {
        for (int i = 0; i < rows; i++) m.dot(static_cast<int>(m.k), out + i, 0, row, 0, inputs[i], 0, 1);
    }
    for (int i = 0; i < rows; i++) {
        if (m.scale) out[i] *= m.scale[expert];
        if (m.bias) out[i] += m.bias[expert * m.n + n];
    }
}

void ExpertWorker::check(const ExpertJob & job) const {
    if (job.rows < 0 || job.k <= 0 || job.n_experts < 0) throw std::invalid_argument("an expert list with negative counts");
    if (job.n_experts > 0 && job.start[0] != 0) throw std::invalid_argument("an expert list that does not start at 0");
    for (int i = 0; i < job.n_experts; i++) {
        if (job.expert[i] < 0 || job.expert[i] >= job.layer->experts || job.start[i + 1] < job.start[i] ||
            job.start[i + 1] > job.rows * job.k) {
            throw std::invalid_argument("expert " + std::to_string(job.expert[i]) + " of the CPU's list is out of range");
        }
    }
    int entries = job.n_experts > 0 ? job.start[job.n_experts] : 0;
    // Experts without entries are left out of a part: the first one must be the shared one there, too.
    if (job.hidden && (job.n_experts == 0 || job.start[1] == 0 || entries > kEntries)) {
        throw std::invalid_argument("a shared expert without entries, or in a list of more than a decode step's rows");
    }
    for (int j = 0; j < entries; j++) {
        if (job.rows_of[j] < 0 || job.rows_of[j] >= job.rows * job.k) {
            throw std::invalid_argument("entry " + std::to_string(job.rows_of[j]) + " of the CPU's list is out of range");
        }
    }
}

void ExpertWorker::compute(const ExpertJob & job) {
    std::lock_guard<std::mutex> lock(busy_);
    check(job);
    std::memset(job.y, 0, sizeof(float) * job.rows * job.layer->down.n);
    std::vector<int32_t> expert, start{0};
    int first = 0;
    auto flush = [&] {
        if (!expert.empty()) part(job, expert, start, job.rows_of + first);
        first += start.back();
        expert.clear();
        start.assign(1, 0);
    };
    for (int i = 0; i < job.n_experts; i++) {
        for (int at = job.start[i]; at < job.start[i + 1];) {
            int room = kEntries - start.back();
            int take = std::min(room, job.start[i + 1] - at);
            expert.push_back(job.expert[i]);
            start.push_back(start.back() + take);
            at += take;
            if (start.back() == kEntries) flush();
        }
    }
    flush();
}

// Three stages: the inputs rounded by pieces, gate and up (whoever finishes a piece of an expert's hidden rows rounds it),
// down with the weighted sum by columns.
void ExpertWorker::part(const ExpertJob & job, const std::vector<int32_t> & expert, const std::vector<int32_t> & start,
                        const int32_t * rows_of) {
    const ExpertLayer & l = *job.layer;
    const ExpertMatrix & first = l.has_gate ? l.gate : l.up;
    const bool two_roundings = l.has_gate && (l.gate.rounding != l.up.rounding || l.gate.own != l.up.own);
    const int n_experts = static_cast<int>(expert.size()), entries = start.back();
    const int first_down = job.hidden ? 1 : 0, first_entry = job.hidden ? start[1] : 0;
    const int64_t d_in = l.up.k, f = l.up.n, d_out = l.down.n;
    input_a_.resize(job.rows * first.input_bytes);
    if (two_roundings) input_b_.resize(job.rows * l.up.input_bytes);
    hidden_.resize(entries * f);
    hidden_rounded_.resize(entries * l.down.input_bytes);
    out_.resize(entries * d_out);
    // By entry: a row's ranks are added up in their order, whichever expert came first.
    order_.resize(entries);
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [&](int a, int b) { return rows_of[a] < rows_of[b]; });
    used_rows_.clear();
    for (int j : order_) {
        const int row = rows_of[j] / job.k;
        if (used_rows_.empty() || used_rows_.back() != row) used_rows_.push_back(row);
    }

    const int wanted = kTasks * team_.size();
    auto parts_of = [](int64_t n, int64_t size) { return static_cast<int>((n + size - 1) / size); };
    const int pieces_in = parts_of(d_in, kPiece), pieces_f = parts_of(f, kPiece);
    const int64_t chunk_f = std::clamp<int64_t>(kPiece * n_experts * pieces_f / wanted, 8, kPiece);
    const int chunks_f = parts_of(kPiece, chunk_f);  // of a piece
    const int64_t chunk_d = std::max<int64_t>(8, (d_out + wanted - 1) / wanted);
    const uint8_t * input_up = two_roundings ? input_b_.data() : input_a_.data();
    if (left_size_ < n_experts * pieces_f) {
        left_size_ = n_experts * pieces_f;
        left_ = std::make_unique<Count[]>(left_size_);
    }
    for (int i = 0; i < n_experts * pieces_f; i++) left_[i].tasks.store(chunks_f, std::memory_order_relaxed);
    std::atomic<int> shared_left{pieces_f};

    auto round_input = [&](int task) {
        const int64_t row = used_rows_[task / pieces_in], from = task % pieces_in * kPiece, to = std::min(d_in, from + kPiece);
        round_values(first, job.x + row * d_in, input_a_.data() + row * first.input_bytes, from, to);
        if (two_roundings) round_values(l.up, job.x + row * d_in, input_b_.data() + row * l.up.input_bytes, from, to);
    };
    auto gate_up = [&](int task) {
        const int piece = task / chunks_f, i = piece / pieces_f, e = expert[i];
        const int64_t begin = piece % pieces_f * kPiece, end = std::min(f, begin + kPiece);
        const int64_t from = begin + task % chunks_f * chunk_f, to = std::min(end, from + chunk_f);
        for (int64_t n = from; n < to; n++) {
            if (l.has_gate) fetch_ahead(l.gate, e, n);
            fetch_ahead(l.up, e, n);
            for (int j = start[i]; j < start[i + 1]; j += kDotRows) {
                const int rows = std::min(kDotRows, start[i + 1] - j);
                const uint8_t *to_gate[kDotRows], *to_up[kDotRows];
                float g[kDotRows] = {}, u[kDotRows];
                for (int r = 0; r < rows; r++) {
                    const int64_t row = rows_of[j + r] / job.k;
                    to_gate[r] = input_a_.data() + row * first.input_bytes;
                    to_up[r] = input_up + row * l.up.input_bytes;
                }
                if (l.has_gate) products(l.gate, e, n, to_gate, rows, j > start[i], g);
                products(l.up, e, n, to_up, rows, j > start[i], u);
                float * to = (i < first_down ? job.hidden : hidden_.data()) + n;
                for (int r = 0; r < rows; r++) to[(j + r) * f] = activate(l.act, l.has_gate, g[r], u[r]);
            }
        }
        if (left_[piece].tasks.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        if (i < first_down) {
            if (shared_left.fetch_sub(1, std::memory_order_acq_rel) == 1) job.on_hidden();
            return;
        }
        for (int j = start[i]; j < start[i + 1]; j++) {
            round_values(l.down, hidden_.data() + j * f, hidden_rounded_.data() + j * l.down.input_bytes, begin, end);
        }
    };
    // A task has all experts' part of some columns, so that it can add them up as well.
    auto down = [&](int task) {
        const int64_t from = task * chunk_d, to = std::min(d_out, from + chunk_d);
        for (int i = first_down; i < n_experts; i++) {
            for (int64_t n = from; n < to; n++) {
                fetch_ahead(l.down, expert[i], n);
                for (int j = start[i]; j < start[i + 1]; j += kDotRows) {
                    const int rows = std::min(kDotRows, start[i + 1] - j);
                    const uint8_t * inputs[kDotRows];
                    float found[kDotRows];
                    for (int r = 0; r < rows; r++) inputs[r] = hidden_rounded_.data() + (j + r) * l.down.input_bytes;
                    products(l.down, expert[i], n, inputs, rows, j > start[i], found);
                    for (int r = 0; r < rows; r++) out_[(j + r) * d_out + n] = found[r];
                }
            }
        }
        for (int j : order_) {
            if (j < first_entry) continue;
            const float w = job.weights[rows_of[j]];
            float * y = job.y + (rows_of[j] / job.k) * d_out;
            for (int64_t n = from; n < to; n++) y[n] += w * out_[j * d_out + n];
        }
    };
    team_.run({{static_cast<int>(used_rows_.size()) * pieces_in, round_input},
               {n_experts * pieces_f * chunks_f, gate_up},
               {first_down < n_experts ? parts_of(d_out, chunk_d) : 0, down}});
}

}  // namespace ftgguf
