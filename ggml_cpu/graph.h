// One ggml graph of fixed shape: built operator by operator, placed once, computed many times.
#pragma once

#include <memory>

#include "backend.h"

namespace ftgguf {

// Work memory shared by all graphs of an executor: only one computes at a time and nothing in it outlives a pass.
// When it has to grow, graphs that were placed before it lose their memory: `generation` tells.
struct Arena {
    Backend & backend;
    ggml_gallocr_t alloc;
    size_t generation = 0;

    explicit Arena(Backend & b)
        : backend(b), alloc(ggml_gallocr_new(ggml_backend_get_default_buffer_type(b.handle))) {}
    ~Arena() { ggml_gallocr_free(alloc); }
    Arena(const Arena &) = delete;
    Arena & operator=(const Arena &) = delete;
    size_t size() const { return ggml_gallocr_get_buffer_size(alloc, 0); }
};

struct Graph {
    Arena & arena;
    ggml_context * ctx;
    ggml_cgraph * nodes;
    size_t generation = 0;
    bool placed = false;

    // A view into a cell pool whose first cell changes from pass to pass.
    struct Window {
        ggml_tensor * view;
        ggml_tensor * pool;
        size_t cell_bytes;
    };
    std::vector<Window> windows;

    Graph(Arena & arena, size_t max_nodes);
    ~Graph() { ggml_free(ctx); }
    Graph(const Graph &) = delete;
    Graph & operator=(const Graph &) = delete;

    void place();
    void move_windows(int64_t first_cell);
    void compute();
    bool stale() const { return !placed || generation != arena.generation; }
};

}  // namespace ftgguf
