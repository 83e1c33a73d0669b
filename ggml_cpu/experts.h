// Routed experts on the CPU: a team of threads that computes some experts' feed-forward in place from host memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dots.h"
#include "ggml-cpu.h"
#include "ggml.h"
#include "team.h"

namespace ftgguf {

enum class Act { silu, gelu, relu, relu_sqr, swiglu_oai };

// One matrix of every expert of a layer: expert e starts at base + e * stride; n rows of k columns.
struct ExpertMatrix {
    ggml_type type = GGML_TYPE_F32;
    const uint8_t * base = nullptr;
    int64_t stride = 0;
    int64_t n = 0, k = 0;
    const float * bias = nullptr;   // [experts, n]
    const float * scale = nullptr;  // [experts]
    // Filled in by ExpertWorker::add_layer.
    size_t row_bytes = 0;
    ggml_vec_dot_t dot = nullptr;
    const OwnDot * own = nullptr;        // in place of `dot`
    ggml_type rounding = GGML_TYPE_F32;  // what an input row is rounded to before the product
    size_t input_bytes = 0;
};

// Memory that starts at a cache line.
struct Lines {
    std::vector<uint8_t> bytes;
    uint8_t * data() { return bytes.data() + (-reinterpret_cast<uintptr_t>(bytes.data()) & 63); }
    void resize(size_t size) { bytes.resize(size + 63); }
};

struct ExpertLayer {
    int experts = 0;
    Act act = Act::silu;
    bool has_gate = true;
    ExpertMatrix gate, up, down;
    size_t expert_bytes() const;
};

// Experts of one layer for some routed entries. Entry = row * k + rank; expert[i] computes the entries
// rows_of[start[i] .. start[i + 1]). Where `hidden` is set, expert 0 is shared: its activated gate and up rows are written
// there, in the order of its entries, and reported by `on_hidden`; its down is somebody else's work.
struct ExpertJob {
    const ExpertLayer * layer = nullptr;
    int rows = 0, k = 0, n_experts = 0;
    const int32_t * expert = nullptr;
    const int32_t * start = nullptr;
    const int32_t * rows_of = nullptr;
    const float * x = nullptr;        // [rows, n_embd]
    const float * weights = nullptr;  // [rows, k]
    float * y = nullptr;              // [rows, n_embd], overwritten
    float * hidden = nullptr;         // [start[1], n_ff]
    std::function<void()> on_hidden;
    // Weights that it reads.
    size_t bytes() const;
};

class ExpertWorker {
  public:
    // `own`: whether to use our own products where there are any, or ggml's alone.
    explicit ExpertWorker(std::vector<int> cpus, bool own = true);
    void add_layer(int layer, ExpertLayer description);
    const ExpertLayer & layer(int layer) const;
    // Compute a job; throws std::invalid_argument for a list that does not fit the layer. One job at a time.
    void compute(const ExpertJob & job);
    int threads() const { return team_.size(); }
    int first_cpu() const { return first_cpu_; }
    void spin_for(int microseconds) { team_.spin_for(microseconds); }

  private:
    void check(const ExpertJob & job) const;
    void part(const ExpertJob & job, const std::vector<int32_t> & expert, const std::vector<int32_t> & start,
              const int32_t * rows_of);
    int first_cpu_;
    bool own_;
    Team team_;
    std::mutex busy_;
    std::vector<std::unique_ptr<ExpertLayer>> layers_;
    // Work memory, kept between jobs.
    Lines input_a_, input_b_, hidden_rounded_;
    std::vector<float> hidden_, out_;
    std::vector<int32_t> order_, used_rows_;
    // Tasks of an expert's piece that are not done: those of different pieces are counted by different threads.
    struct alignas(64) Count {
        std::atomic<int> tasks{0};
    };
    std::unique_ptr<Count[]> left_;
    int left_size_ = 0;
};

}  // namespace ftgguf
