// The CPU backend, its buffer types and the weights that live in them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

namespace ftgguf {

namespace nb = nanobind;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Shape = std::vector<int64_t>;

// One ggml CPU backend. Exactly one thread may call compute: the libraries are built with OpenMP, which keeps a team
// of workers for each calling thread.
struct Backend {
    ggml_backend_t handle;

    explicit Backend(int n_threads);
    ~Backend();
    Backend(const Backend &) = delete;
    Backend & operator=(const Backend &) = delete;

    void set_threads(int n) { ggml_backend_cpu_set_n_threads(handle, n); }
    // The buffer type of repacked weights, or null where this build or processor has none.
    ggml_backend_buffer_type_t repack_type() const;
};

// Tensors whose bytes stay for the life of the model: views into mapped files, and copies in ggml's repacked layout.
struct Weights {
    Backend & backend;
    ggml_context * ctx;          // tensor headers of mapped and owned tensors
    ggml_context * packed_ctx;   // tensor headers of repacked tensors
    std::vector<ggml_backend_buffer_t> buffers;
    std::vector<ggml_backend_buffer_t> shards;

    Weights(Backend & backend, size_t max_tensors);
    ~Weights();
    Weights(const Weights &) = delete;
    Weights & operator=(const Weights &) = delete;

    int map(Bytes bytes);
    ggml_tensor * mapped(const std::string & name, int type, const Shape & ne, int shard, size_t offset);
    ggml_tensor * owned(const std::string & name, int type, const Shape & ne, Bytes bytes);
    // A header for a repacked copy of `plain`, or null where ggml has no such layout for its type, shape or use.
    // `experts`: the tensor is used by mul_mat_id. Memory comes with allocate_packed(), bytes with pack().
    ggml_tensor * packed(ggml_tensor * plain, bool experts);
    size_t packed_size() const;
    void allocate_packed();
    void pack(ggml_tensor * packed, ggml_tensor * plain);
};

void bind_backend(nb::module_ & m);
void bind_graph(nb::module_ & m);
void bind_cells(nb::module_ & m);
void bind_experts(nb::module_ & m);

// A new tensor header of 1 to 4 dimensions, refusing what ggml would abort on.
ggml_tensor * new_tensor(ggml_context * ctx, int type, const Shape & ne);

}  // namespace ftgguf
