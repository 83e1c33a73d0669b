// Threads that work through a job's stages together, taking one small task after another.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace ftgguf {

// Part of a job: `tasks` calls of `body`, in any order and on any threads; done before the next stage begins.
struct Stage {
    int tasks = 0;
    std::function<void(int)> body;
};

// Each thread has a share of a stage's tasks and takes over others' when it is done with its own; none waits for a thread
// that has nothing in hand. So a job of 100 us on a shared machine, where some thread is often not running, is not held up
// by it, and threads touch each other's memory a few times a stage only (one counter for all tasks cost some 10 us a job).
class Team {
  public:
    // `cpus[i]` is where thread i runs (-1: anywhere); thread 0 is whoever calls run.
    explicit Team(std::vector<int> cpus);
    ~Team();
    int size() const { return static_cast<int>(cpus_.size()); }
    // Not from two threads at once. Bodies must not throw.
    void run(const std::vector<Stage> & stages);
    // How long helpers spin for the next job before they sleep. Waking them from sleep costs more than a small job.
    void spin_for(int microseconds) { spin_us_ = microseconds; }

  private:
    // Tasks [next, end) of a stage, in one word, so that whoever takes one knows what it belongs to.
    struct alignas(128) Share {
        std::atomic<uint64_t> word{0};
    };
    void end();
    void helper(int index);
    bool help(int index);
    int take(Share & share);
    void finished(int tasks);
    void open(int stage);
    std::vector<int> cpus_;
    std::vector<std::thread> threads_;
    const std::vector<Stage> * stages_ = nullptr;
    std::atomic<int> spin_us_{300};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::unique_ptr<Share[]> shares_;
    // Words that many threads write, each in a cache line (pair, for the prefetcher) of its own.
    alignas(128) std::atomic<uint64_t> opened_{0};  // stages opened so far: what waiting threads look at
    alignas(128) std::atomic<int> left_{0};         // tasks of the open stage that are not done
    int stage_ = 0;                                 // the open stage; written by whoever opens it
    alignas(128) std::atomic<bool> done_{true};
    alignas(128) std::atomic<int> sleeping_{0};
};

void pin_thread(int cpu);
void relax(int spins);

}  // namespace ftgguf
