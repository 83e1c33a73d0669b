// How a GPU hands experts to the CPU without a host call: words and buffers in memory that both map.
//
// One writer per word. The GPU writes a job into the mailbox and then its number, `request` (release); the server thread
// sees it (acquire), computes, and writes the number to `done` (release), for which the GPU waits (acquire). A watchdog
// thread writes `abort` if a request is not done in time or cannot be computed: the GPU's wait leaves then, too.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <optional>
#include <stdexcept>

#include "experts.h"

namespace ftgguf {

namespace nb = nanobind;
using Clock = std::chrono::steady_clock;

// Places in the array of words, int64: each in a cache line (and prefetch pair) of its own.
constexpr int kRequest = 0, kDone = 16, kAbort = 32, kHidden = 48, kWords = 64;
constexpr int64_t kAbortAll = std::numeric_limits<int64_t>::max();
// Fields of a layer in the GPU's trace.
constexpr int kTrace = 16;
// Header of a job, int32: layer, rows, CPU experts, entries, whether the first expert is shared (its hidden rows are wanted,
// and announced by kHidden).
constexpr int kHeader = 8;

// Addresses of the mailbox's parts as the CPU sees them. `entries` = rows * k at most.
struct Mailbox {
    int64_t * words;
    const int32_t * header;
    const int32_t * expert;
    const int32_t * start;
    const int32_t * rows_of;
    const float * weights;
    const float * x;
    float * y;
    float * hidden;
    int rows, k, entries, width;
};

// What the server did for one layer, sums since start.
struct Served {
    int64_t jobs = 0, experts = 0, entries = 0, bytes = 0, nanoseconds = 0;
};

class Doorbell {
  public:
    Doorbell(ExpertWorker & worker, Mailbox box, int layers, double timeout_seconds)
        : worker_(worker), box_(box), served_(layers), before_(layers), timeout_(timeout_seconds) {
        // Jobs of a decode step come up to some milliseconds apart where the cache hits well.
        worker_.spin_for(2000);
        // Whatever was asked before the server was there is not answered: the state is whole before the threads start.
        seen_ = load(kRequest);
        store(kDone, seen_);
        store(kAbort, -1);
        store(kHidden, seen_);
        server_ = std::thread([this] { serve(); });
        watchdog_ = std::thread([this] { watch(); });
    }

    ~Doorbell() { close(); }

    void close() {
        if (stop_.exchange(true)) return;
        server_.join();
        watchdog_.join();
    }

    // The error that ended the service, or "".
    std::string error() {
        std::lock_guard<std::mutex> lock(mutex_);
        return error_;
    }

    std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>> statistics() {
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>> rows;
        for (auto & s : served_) rows.emplace_back(s.jobs, s.experts, s.entries, s.bytes, s.nanoseconds);
        return rows;
    }

    // What was served since the last call, with the GPU's trace (int64 [layers, 16], kernels.fill.TRACE_FIELDS), added up
    // by kind of layer: float64 [kinds, 14], see experts/meter.py. `part_bytes`: what is copied of a shared one. Between two steps, so without Python over layers.
    void step_sums(const int64_t * trace, const double * expert_bytes, const double * part_bytes, const int32_t * kind,
                   double * out) {
        std::lock_guard<std::mutex> lock(mutex_);
        for (size_t l = 0; l < served_.size(); l++) {
            const Served now = served_[l], before = before_[l];
            before_[l] = now;
            const int64_t * t = trace + kTrace * l;
            double * row = out + 14 * kind[l];
            const double filled = t[2] * expert_bytes[l] + t[8] * part_bytes[l], computed = static_cast<double>(now.bytes - before.bytes);
            const double cpu_seconds = (now.nanoseconds - before.nanoseconds) * 1e-9;
            row[0] += filled;
            row[1] += t[5] * 1e-9;
            row[2] += computed;
            row[3] += cpu_seconds;
            add_job(row + 4, filled, t[4] * 1e-9);
            add_job(row + 9, computed, cpu_seconds);
        }
    }

    int layers() const { return static_cast<int>(served_.size()); }
    void stall(double seconds) { stall_ = seconds; }
    void set_timeout(double seconds) { timeout_ = seconds; }

  private:
    // Jobs, bytes, bytes^2, seconds, bytes * seconds.
    static void add_job(double * sums, double bytes, double seconds) {
        if (bytes <= 0) return;
        const double more[5] = {1, bytes, bytes * bytes, seconds, bytes * seconds};
        for (int i = 0; i < 5; i++) sums[i] += more[i];
    }

    int64_t load(int word) const { return __atomic_load_n(box_.words + word, __ATOMIC_ACQUIRE); }
    void store(int word, int64_t value) { __atomic_store_n(box_.words + word, value, __ATOMIC_RELEASE); }

    void fail(const std::string & message) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (error_.empty()) error_ = message;
        }
        if (!failed_.exchange(true)) store(kAbort, kAbortAll);
    }

    void serve() {
        pin_thread(worker_.first_cpu());
        auto idle_since = Clock::now();
        int spins = 0;
        while (!stop_.load(std::memory_order_relaxed)) {
            int64_t request = load(kRequest);
            if (request == seen_) {
                relax(spins++);
                // Busy only around decode steps: after 5 ms the thread looks every 50 us, after a second every ms.
                if (spins % 256 == 0) {
                    auto idle = Clock::now() - idle_since;
                    if (idle > std::chrono::seconds(1)) {
                        std::this_thread::sleep_for(std::chrono::milliseconds(1));
                    } else if (idle > std::chrono::milliseconds(5)) {
                        std::this_thread::sleep_for(std::chrono::microseconds(50));
                    }
                }
                continue;
            }
            seen_ = request;
            try {
                answer(request);
            } catch (const std::exception & e) {
                fail(std::string("the CPU cannot compute the experts it was given: ") + e.what());
            }
            idle_since = Clock::now();
            spins = 0;
        }
    }

    // The job's lines have just come over the link: all asked for at once, not one after the other as they are read.
    void ask_for_job() const {
        const void * lines[] = {box_.header, box_.expert, box_.start, box_.rows_of, box_.weights};
        for (const void * line : lines) __builtin_prefetch(line);
    }

    void answer(int64_t request) {
        ask_for_job();
        const int number = box_.header[0];
        ExpertJob job;
        job.layer = &worker_.layer(number);
        job.rows = box_.header[1];
        job.k = box_.k;
        job.n_experts = box_.header[2];
        if (job.rows > box_.rows || job.n_experts > box_.entries || number >= static_cast<int>(served_.size())) {
            throw std::invalid_argument("a job larger than the mailbox");
        }
        job.expert = box_.expert;
        job.start = box_.start;
        job.rows_of = box_.rows_of;
        job.x = box_.x;
        job.weights = box_.weights;
        job.y = box_.y;
        if (box_.header[4]) {
            if (job.layer->up.n > box_.width || (job.n_experts > 0 && job.start[1] > box_.rows)) {
                throw std::invalid_argument("hidden rows larger than the mailbox");
            }
            job.hidden = box_.hidden;
            job.on_hidden = [this, request] { store(kHidden, request); };
        }
        double stall = stall_.load();
        if (stall > 0) std::this_thread::sleep_for(std::chrono::duration<double>(stall));
        auto begin = Clock::now();
        worker_.compute(job);
        auto took = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
        // The GPU does not wait for the sums; who reads them behind its step waits for the lock.
        std::lock_guard<std::mutex> lock(mutex_);
        store(kDone, request);
        Served & s = served_[number];
        s.jobs++;
        s.experts += job.n_experts;
        s.entries += job.n_experts ? job.start[job.n_experts] : 0;
        s.bytes += static_cast<int64_t>(job.bytes());
        s.nanoseconds += took;
    }

    void watch() {
        int64_t waiting = 0;
        auto since = Clock::now();
        while (!stop_.load(std::memory_order_relaxed)) {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            int64_t request = load(kRequest);
            if (request == load(kDone) || failed_) {
                waiting = 0;
                continue;
            }
            if (request != waiting) {
                waiting = request;
                since = Clock::now();
            } else if (std::chrono::duration<double>(Clock::now() - since).count() > timeout_.load()) {
                fail("the CPU did not finish request " + std::to_string(request) + " within " +
                     std::to_string(timeout_.load()) + " s: the GPU was released");
            }
        }
    }

    ExpertWorker & worker_;
    Mailbox box_;
    std::vector<Served> served_, before_;
    std::atomic<double> timeout_;
    std::atomic<double> stall_{0};
    std::atomic<bool> stop_{false};
    std::atomic<bool> failed_{false};
    std::mutex mutex_;
    std::string error_;
    int64_t seen_ = 0;
    std::thread server_, watchdog_;
};

// --------------------------------------------------------------------------------------------------- for Python

using F32s = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using I32s = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Trace = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using F64s = nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sums = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

static Act act_of(const std::string & name) {
    if (name == "silu") return Act::silu;
    if (name == "gelu") return Act::gelu;
    if (name == "relu") return Act::relu;
    if (name == "relu_sqr") return Act::relu_sqr;
    if (name == "swiglu_oai") return Act::swiglu_oai;
    throw std::invalid_argument("unknown activation '" + name + "'");
}

static ExpertMatrix matrix(int type, int64_t address, int64_t stride, int64_t n, int64_t k, int64_t bias, int64_t scale) {
    ExpertMatrix m;
    m.type = static_cast<ggml_type>(type);
    m.base = reinterpret_cast<const uint8_t *>(address);
    m.stride = stride;
    m.n = n;
    m.k = k;
    m.bias = reinterpret_cast<const float *>(bias);
    m.scale = reinterpret_cast<const float *>(scale);
    return m;
}

static void compute(ExpertWorker & w, int layer, F32s x, F32s weights, I32s expert, I32s start, I32s rows_of, Out y) {
    const ExpertLayer & l = w.layer(layer);
    ExpertJob job;
    job.layer = &l;
    if (x.ndim() != 2 || weights.ndim() != 2 || x.shape(0) != weights.shape(0) || y.shape(0) != x.shape(0) ||
        static_cast<int64_t>(x.shape(1)) != l.up.k || static_cast<int64_t>(y.shape(1)) != l.down.n) {
        throw std::invalid_argument("x, weights and y must be [rows, n_embd], [rows, k], [rows, n_embd]");
    }
    if (start.size() != expert.size() + 1 || start.data()[0] != 0 ||
        static_cast<size_t>(start.data()[expert.size()]) > rows_of.size()) {
        throw std::invalid_argument("expert list: start must have one more element, from 0, within rows_of");
    }
    job.rows = static_cast<int>(x.shape(0));
    job.k = static_cast<int>(weights.shape(1));
    job.n_experts = static_cast<int>(expert.size());
    job.expert = expert.data();
    job.start = start.data();
    job.rows_of = rows_of.data();
    job.x = x.data();
    job.weights = weights.data();
    job.y = y.data();
    nb::gil_scoped_release release;
    w.compute(job);
}

void bind_experts(nb::module_ & m) {
    nb::class_<ExpertMatrix>(m, "ExpertMatrix",
                             "One matrix of all experts of a layer, by address: expert e starts at address + e * stride.")
        .def_static("make", &matrix, nb::arg("type"), nb::arg("address"), nb::arg("stride"), nb::arg("n"), nb::arg("k"),
                    nb::arg("bias") = 0, nb::arg("scale") = 0);

    m.def("has_own_dot", [](int type) { return own_dot(static_cast<ggml_type>(type)) != nullptr; }, nb::arg("type"),
          "Whether this processor runs our product for weights of `type`.");
    nb::class_<ExpertWorker>(m, "ExpertWorker", "Threads that compute routed experts in place.")
        .def(nb::init<std::vector<int>, bool>(), nb::arg("cpus"), nb::arg("own") = true,
             "One thread for each CPU number (-1: anywhere). `own`: our products where there are any, or ggml's alone.")
        .def("add_layer",
             [](ExpertWorker & w, int layer, int experts, const std::string & act, std::optional<ExpertMatrix> gate,
                ExpertMatrix up, ExpertMatrix down) {
                 ExpertLayer l;
                 l.experts = experts;
                 l.act = act_of(act);
                 l.has_gate = gate.has_value();
                 if (gate) l.gate = *gate;
                 l.up = up;
                 l.down = down;
                 w.add_layer(layer, l);
             },
             nb::arg("layer"), nb::arg("experts"), nb::arg("activation"), nb::arg("gate").none(), nb::arg("up"),
             nb::arg("down"))
        .def("compute", &compute, nb::arg("layer"), nb::arg("x"), nb::arg("weights"), nb::arg("expert"), nb::arg("start"),
             nb::arg("rows_of"), nb::arg("y"), "y [rows, n_embd] = the listed experts' share, weighted.")
        .def_prop_ro("threads", &ExpertWorker::threads);

    nb::class_<Doorbell>(m, "Doorbell", "Serves a mailbox in memory that a GPU (or a test) writes.")
        .def("__init__",
             [](Doorbell * self, ExpertWorker & worker, int64_t words, int64_t header, int64_t expert, int64_t start,
                int64_t rows_of, int64_t weights, int64_t x, int64_t y, int64_t hidden, int rows, int k, int width, int layers,
                double timeout) {
                 auto i32 = [](int64_t a) { return reinterpret_cast<const int32_t *>(a); };
                 auto f32 = [](int64_t a) { return reinterpret_cast<float *>(a); };
                 new (self) Doorbell(worker,
                                     Mailbox{reinterpret_cast<int64_t *>(words), i32(header), i32(expert), i32(start),
                                             i32(rows_of), f32(weights), f32(x), f32(y), f32(hidden), rows, k, rows * k,
                                             width},
                                     layers, timeout);
             },
             nb::arg("worker"), nb::arg("words"), nb::arg("header"), nb::arg("expert"), nb::arg("start"),
             nb::arg("rows_of"), nb::arg("weights"), nb::arg("x"), nb::arg("y"), nb::arg("hidden"), nb::arg("rows"),
             nb::arg("k"), nb::arg("width"), nb::arg("layers"), nb::arg("timeout"), nb::keep_alive<1, 2>())
        .def("close", &Doorbell::close, nb::call_guard<nb::gil_scoped_release>())
        .def("error", &Doorbell::error)
        .def("statistics", &Doorbell::statistics, "For each layer: jobs, experts, entries, bytes, nanoseconds.")
        .def("step_sums",
             [](Doorbell & d, Trace trace, F64s expert_bytes, F64s part_bytes, I32s kind, Sums out) {
                 const size_t n = d.layers();
                 const int32_t * of = kind.data();
                 if (trace.shape(0) != n || trace.shape(1) != kTrace || expert_bytes.size() != n || part_bytes.size() != n || kind.size() != n ||
                     out.shape(1) != 14 || std::any_of(of, of + n, [&](int32_t k) {
                         return k < 0 || static_cast<size_t>(k) >= out.shape(0); })) {
                     throw std::invalid_argument("trace [layers, 16], expert_bytes, part_bytes and kind [layers], out [kinds, 14]");
                 }
                 d.step_sums(trace.data(), expert_bytes.data(), part_bytes.data(), of, out.data());
             },
             nb::arg("trace"), nb::arg("expert_bytes"), nb::arg("part_bytes"), nb::arg("kind"), nb::arg("out"))
        .def("stall", &Doorbell::stall, nb::arg("seconds"), "Delay each answer: for tests of the watchdog.")
        .def("set_timeout", &Doorbell::set_timeout, nb::arg("seconds"));
    m.attr("DOORBELL_WORDS") = kWords;
    m.attr("DOORBELL_HEADER") = kHeader;
    m.attr("DOORBELL_REQUEST") = kRequest;
    m.attr("DOORBELL_DONE") = kDone;
    m.attr("DOORBELL_ABORT") = kAbort;
    m.attr("DOORBELL_HIDDEN") = kHidden;
}

}  // namespace ftgguf
