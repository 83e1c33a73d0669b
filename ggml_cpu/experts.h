// Routed experts on the CPU: a team of threads that computes some experts' feed-forward in place from host memory.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ggml-cpu.h"
#include "ggml.h"

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
    ggml_type rounding = GGML_TYPE_F32;  // what an input row is rounded to before the product
    size_t input_bytes = 0;
};

struct ExpertLayer {
    int experts = 0;
    Act act = Act::silu;
    bool has_gate = true;
    ExpertMatrix gate, up, down;
    size_t expert_bytes() const;
};

// Experts of one layer for some routed entries. Entry = row * k + rank; expert[i] computes the entries
// rows_of[start[i] .. start[i + 1]).
struct ExpertJob {
    const ExpertLayer * layer = nullptr;
    int rows = 0, k = 0, n_experts = 0;
    const int32_t * expert = nullptr;
    const int32_t * start = nullptr;
    const int32_t * rows_of = nullptr;
    const float * x = nullptr;        // [rows, n_embd]
    const float * weights = nullptr;  // [rows, k]
    float * y = nullptr;              // [rows, n_embd], overwritten
};

// Threads that work on one task together and wait, first by spinning, then asleep, for the next.
class Team {
  public:
    // `cpus[i]` is where thread i runs (-1: anywhere); thread 0 is whoever calls run.
    explicit Team(std::vector<int> cpus);
    ~Team();
    int size() const { return static_cast<int>(cpus_.size()); }
    void run(const std::function<void(int)> & body);
    void barrier();
    // How long helpers spin for the next job before they sleep. Waking them from sleep costs more than a small job.
    void spin_for(int microseconds) { spin_us_ = microseconds; }

  private:
    void helper(int index);
    std::vector<int> cpus_;
    std::vector<std::thread> threads_;
    const std::function<void(int)> * body_ = nullptr;
    std::atomic<int> spin_us_{300};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    // What some threads spin on while others count up lies in cache lines (pairs, for the prefetcher) of its own.
    alignas(128) std::atomic<uint64_t> epoch_{0};
    alignas(128) std::atomic<int> running_{0};
    std::atomic<int> sleeping_{0};
    alignas(128) std::atomic<int> arrived_{0};
    alignas(128) std::atomic<uint32_t> round_{0};
};

void pin_thread(int cpu);
void relax(int spins);

class ExpertWorker {
  public:
    explicit ExpertWorker(std::vector<int> cpus);
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
    Team team_;
    std::mutex busy_;
    std::vector<std::unique_ptr<ExpertLayer>> layers_;
    // Work memory, kept between jobs.
    std::vector<uint8_t> input_a_, input_b_, hidden_rounded_;
    std::vector<float> hidden_, out_;
    std::vector<uint8_t> used_;
    std::vector<int32_t> order_;
    std::unique_ptr<std::atomic<int>[]> left_;  // [experts]: tasks of an expert that are not done
    int left_size_ = 0;
};

}  // namespace ftgguf
