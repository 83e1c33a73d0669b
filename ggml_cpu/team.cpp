// A stage's tasks by shares: each share is one atomic word, taken from by its thread first and by the others at the end;
// whoever finishes a stage's last task opens the next one, and nobody waits for a thread that has nothing in hand.
#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ftgguf {

// A share's word: stage << 48 | end << 24 | next task. Threads that come too late count `next` up once each.
constexpr int kEndAt = 24, kStageAt = 48;
constexpr uint64_t kCount = (1u << 24) - 1;
constexpr int kMostTasks = (1 << 24) - 4096;

static bool has_task(uint64_t word) { return (word & kCount) < (word >> kEndAt & kCount); }

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

Team::Team(std::vector<int> cpus) : cpus_(std::move(cpus)) {
    if (cpus_.empty()) throw std::invalid_argument("a team has at least one thread");
    shares_ = std::make_unique<Share[]>(cpus_.size());
    try {
        for (int i = 1; i < size(); i++) threads_.emplace_back([this, i] { helper(i); });
    } catch (const std::system_error & error) {
        end();
        throw std::runtime_error("no thread " + std::to_string(threads_.size() + 1) + " of " + std::to_string(size()) +
                                 " for the experts on the CPU (" + error.what() + "): lower -t, or raise the limit on processes");
    }
}

Team::~Team() { end(); }

void Team::end() {
    stop_ = true;
    {
        std::lock_guard<std::mutex> lock(mutex_);
    }
    wake_.notify_all();
    for (auto & t : threads_) t.join();
}

void Team::helper(int index) {
    pin_thread(cpus_[index]);
    auto deadline = [&] {
        return std::chrono::steady_clock::now() + std::chrono::microseconds(spin_us_.load(std::memory_order_relaxed));
    };
    auto until = deadline();
    uint64_t seen = 0;
    for (int spins = 0; !stop_.load(std::memory_order_relaxed);) {
        const uint64_t opened = opened_.load(std::memory_order_acquire);
        if (opened != seen) {
            seen = opened;
            while (help(index)) {}
            until = deadline();
            spins = 0;
            continue;
        }
        relax(spins++);
        if (spins % 256 != 0 || std::chrono::steady_clock::now() < until) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1);  // sequentially consistent, as is `open`: it sees this, or we see its stage
        wake_.wait(lock, [&] { return stop_ || opened_.load() != seen; });
        sleeping_.fetch_sub(1);
        lock.unlock();
        until = deadline();
    }
}

// Do a task of `share` if it has one; returns how many were done. The stage cannot end before that is reported.
int Team::take(Share & share) {
    if (!has_task(share.word.load(std::memory_order_acquire))) return 0;
    const uint64_t word = share.word.fetch_add(1, std::memory_order_acq_rel);
    if (!has_task(word)) return 0;
    (*stages_)[word >> kStageAt].body(static_cast<int>(word & kCount));
    return 1;
}

void Team::finished(int tasks) {
    if (tasks > 0 && left_.fetch_sub(tasks, std::memory_order_acq_rel) == tasks) open(stage_ + 1);
}

// Do what is left of this thread's share, or else one task of another's; false where nothing was left.
bool Team::help(int index) {
    int done = 0;
    while (take(shares_[index])) done++;
    finished(done);
    for (int i = 1; i < size(); i++) {
        if (take(shares_[(index + i) % size()])) {
            finished(1);
            return true;
        }
    }
    return done > 0;
}

void Team::open(int stage) {
    while (stage < static_cast<int>(stages_->size()) && (*stages_)[stage].tasks == 0) stage++;
    if (stage == static_cast<int>(stages_->size())) {
        done_.store(true, std::memory_order_release);
        return;
    }
    const int64_t tasks = (*stages_)[stage].tasks;
    stage_ = stage;
    left_.store(static_cast<int>(tasks), std::memory_order_relaxed);
    for (int i = 0; i < size(); i++) {
        const uint64_t from = tasks * i / size(), to = tasks * (i + 1) / size();
        shares_[i].word.store(static_cast<uint64_t>(stage) << kStageAt | to << kEndAt | from, std::memory_order_release);
    }
    opened_.fetch_add(1);
    if (sleeping_.load() > 0) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
}

void Team::run(const std::vector<Stage> & stages) {
    for (auto & s : stages) {
        if (s.tasks < 0 || s.tasks > kMostTasks) throw std::invalid_argument("a stage with too many tasks");
    }
    stages_ = &stages;
    done_.store(false, std::memory_order_relaxed);
    uint64_t seen = opened_.load(std::memory_order_relaxed);
    open(0);
    for (int spins = 0; !done_.load(std::memory_order_acquire);) {
        const uint64_t opened = opened_.load(std::memory_order_acquire);
        if (opened == seen) {
            relax(spins++);
            continue;
        }
        seen = opened;
        while (help(0)) {}
        spins = 0;
    }
}

}  // namespace ftgguf
