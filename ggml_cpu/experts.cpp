#include "experts.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ftgguf {

// Jobs with no more entries (routed rows) save a barrier; more are shared out evenly.
constexpr int kFewEntries = 64;
// Entries whose intermediate rows exist at once: 4096 rows of 2048 floats are 32 MiB.
constexpr int kEntries = 4096;

void relax(int spins) {
    // A thread of a busy machine may wait for one that has no processor: yielding lets it run.
    if (spins % 1024 == 1023) {
        sched_yield();
        return;
    }
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void pin_thread(int cpu) {
    if (cpu < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);  // a forbidden CPU leaves the thread where it may run
}

// ------------------------------------------------------------------------------------------------------- the team

Team::Team(std::vector<int> cpus) : cpus_(std::move(cpus)) {
    if (cpus_.empty()) throw std::invalid_argument("a team has at least one thread");
    for (int i = 1; i < size(); i++) threads_.emplace_back([this, i] { helper(i); });
}

Team::~Team() {
    stop_ = true;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        epoch_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto & t : threads_) t.join();
}

void Team::helper(int index) {
    pin_thread(cpus_[index]);
    uint64_t seen = 0;
    while (true) {
        auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_.load(std::memory_order_relaxed));
        int spins = 0;
        while (epoch_.load(std::memory_order_acquire) == seen) {
            relax(spins++);
            if (spins % 256 == 0 && std::chrono::steady_clock::now() > until) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleeping_.fetch_add(1);
                wake_.wait(lock, [&] { return epoch_.load() != seen; });
                sleeping_.fetch_sub(1);
            }
        }
        seen = epoch_.load(std::memory_order_acquire);
        if (stop_) return;
        (*body_)(index);
        running_.fetch_sub(1, std::memory_order_release);
    }
}

void Team::run(const std::function<void(int)> & body) {
    body_ = &body;
    running_.store(size() - 1);
    epoch_.fetch_add(1);  // sequentially consistent: a helper that goes to sleep sees it, or is counted as sleeping
    if (sleeping_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    body(0);
    for (int spins = 0; running_.load(std::memory_order_acquire) != 0; spins++) relax(spins);
}

void Team::barrier() {
    if (size() == 1) return;
    uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size()) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) relax(spins);
}

// ----------------------------------------------------------------------------------------------------- the layers

size_t ExpertLayer::expert_bytes() const {
    size_t total = up.n * up.row_bytes + down.n * down.row_bytes;
    return has_gate ? total + gate.n * gate.row_bytes : total;
}

static void complete(ExpertMatrix & m, const char * name) {
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
    m.input_bytes = ggml_row_size(m.rounding, m.k);
}

ExpertWorker::ExpertWorker(std::vector<int> cpus) : first_cpu_(cpus.empty() ? -1 : cpus[0]), team_(std::move(cpus)) {
    ggml_cpu_init();  // the half-precision tables
}

void ExpertWorker::add_layer(int layer, ExpertLayer d) {
    if (layer < 0 || d.experts <= 0) throw std::invalid_argument("a layer has a number from 0 and at least one expert");
    complete(d.up, "up");
    complete(d.down, "down");
    if (d.has_gate) complete(d.gate, "gate");
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

static void round_row(const ExpertMatrix & m, const float * from, uint8_t * to) {
    if (m.rounding == GGML_TYPE_F32) {
        std::memcpy(to, from, m.k * sizeof(float));
    } else {
        ggml_get_type_traits_cpu(m.rounding)->from_float(from, to, m.k);
    }
}

static float product(const ExpertMatrix & m, int expert, int64_t n, const uint8_t * input) {
    float value;
    m.dot(static_cast<int>(m.k), &value, 0, m.base + expert * m.stride + n * m.row_bytes, 0, input, 0, 1);
    if (m.scale) value *= m.scale[expert];
    if (m.bias) value += m.bias[expert * m.n + n];
    return value;
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

void ExpertWorker::part(const ExpertJob & job, const std::vector<int32_t> & expert, const std::vector<int32_t> & start,
                        const int32_t * rows_of) {
    const ExpertLayer & l = *job.layer;
    const ExpertMatrix & first = l.has_gate ? l.gate : l.up;
    const bool two_roundings = l.has_gate && l.gate.rounding != l.up.rounding;
    const int n_experts = static_cast<int>(expert.size()), entries = start.back();
    const int64_t d_in = l.up.k, f = l.up.n, d_out = l.down.n;
    input_a_.resize(job.rows * first.input_bytes);
    if (two_roundings) input_b_.resize(job.rows * l.up.input_bytes);
    hidden_.resize(entries * f);
    hidden_rounded_.resize(entries * l.down.input_bytes);
    out_.resize(entries * d_out);
    used_.assign(job.rows, 0);
    int rows_used = 0;
    for (int j = 0; j < entries; j++) {
        uint8_t & used = used_[rows_of[j] / job.k];
        rows_used += !used;
        used = 1;
    }
    // By entry: a row's ranks are added up in their order, whichever expert came first.
    order_.resize(entries);
    std::iota(order_.begin(), order_.end(), 0);
    std::sort(order_.begin(), order_.end(), [&](int a, int b) { return rows_of[a] < rows_of[b]; });

    const int wanted = 6 * team_.size();  // tasks, so that a slow thread does not hold up the rest
    auto chunk_of = [&](int64_t n, int64_t parts) { return std::max<int64_t>(8, (n + parts - 1) / parts); };
    const int64_t chunk_f = chunk_of(f, std::max<int64_t>(1, (wanted + n_experts - 1) / n_experts));
    const int64_t chunk_d = chunk_of(d_out, wanted);
    const int chunks_f = static_cast<int>((f + chunk_f - 1) / chunk_f);
    const int chunks_d = static_cast<int>((d_out + chunk_d - 1) / chunk_d);
    const uint8_t * input_up = two_roundings ? input_b_.data() : input_a_.data();
    auto round_input = [&](int64_t row) {
        round_row(first, job.x + row * d_in, input_a_.data() + row * first.input_bytes);
        if (two_roundings) round_row(l.up, job.x + row * d_in, input_b_.data() + row * l.up.input_bytes);
    };
    auto round_hidden = [&](int j) {
        round_row(l.down, hidden_.data() + j * f, hidden_rounded_.data() + j * l.down.input_bytes);
    };
    // A decode step's job takes some 100 us, in which a round of waiting for each other costs several: with one row the
    // calling thread rounds it before the others begin, and with few entries whoever finishes an expert rounds its.
    const bool few = entries <= kFewEntries;
    if (few && left_size_ < n_experts) {
        left_ = std::make_unique<std::atomic<int>[]>(n_experts);
        left_size_ = n_experts;
    }
    for (int i = 0; few && i < n_experts; i++) left_[i].store(chunks_f, std::memory_order_relaxed);
    if (rows_used == 1) round_input(rows_of[0] / job.k);
    std::atomic<int> next[4] = {{0}, {0}, {0}, {0}};

    std::function<void(int)> body = [&](int) {
        if (rows_used > 1) {
            for (int row; (row = next[0]++) < job.rows;) {
                if (used_[row]) round_input(row);
            }
            team_.barrier();
        }
        for (int task; (task = next[1]++) < n_experts * chunks_f;) {
            const int i = task / chunks_f, e = expert[i];
            const int64_t from = (task % chunks_f) * chunk_f, to = std::min(f, from + chunk_f);
            for (int64_t n = from; n < to; n++) {
                for (int j = start[i]; j < start[i + 1]; j++) {
                    const int64_t row = rows_of[j] / job.k;
                    float g = l.has_gate ? product(l.gate, e, n, input_a_.data() + row * l.gate.input_bytes) : 0.0f;
                    float u = product(l.up, e, n, input_up + row * l.up.input_bytes);
                    hidden_[j * f + n] = activate(l.act, l.has_gate, g, u);
                }
            }
            if (few && left_[i].fetch_sub(1, std::memory_order_acq_rel) == 1) {
                for (int j = start[i]; j < start[i + 1]; j++) round_hidden(j);
            }
        }
        team_.barrier();
        if (!few) {
            for (int j; (j = next[2]++) < entries;) round_hidden(j);
            team_.barrier();
        }
        // A task has all experts' part of some columns, so that it can add them up as well.
        for (int task; (task = next[3]++) < chunks_d;) {
            const int64_t from = task * chunk_d, to = std::min(d_out, from + chunk_d);
            for (int i = 0; i < n_experts; i++) {
                for (int64_t n = from; n < to; n++) {
                    for (int j = start[i]; j < start[i + 1]; j++) {
                        out_[j * d_out + n] = product(l.down, expert[i], n, hidden_rounded_.data() + j * l.down.input_bytes);
                    }
                }
            }
            for (int j : order_) {
                const float w = job.weights[rows_of[j]];
                float * y = job.y + (rows_of[j] / job.k) * d_out;
                for (int64_t n = from; n < to; n++) y[n] += w * out_[j * d_out + n];
            }
        }
    };
    team_.run(body);
}

}  // namespace ftgguf
