// The KV cells of a segment on the CPU, the attention mask, and moving cells about.
#include <sys/mman.h>

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "graph.h"

namespace ftgguf {

using I32 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// K and V of every layer: tensors [row, cells]. A cell is one token's K and V in all layers.
struct Cells {
    ggml_context * ctx;
    ggml_backend_buffer_t buffer;
    std::vector<ggml_tensor *> pools;
    int64_t count;
    void * memory = nullptr;
    size_t bytes = 0;

    Cells(Backend & backend, const std::vector<int64_t> & rows, const std::vector<int> & types, int64_t n_cells) : count(n_cells) {
        if (rows.size() != types.size()) throw std::invalid_argument("one type for each pool");
        ctx = ggml_init({ggml_tensor_overhead() * (rows.size() + 1), nullptr, true});
        (void) backend;
        constexpr size_t page = 4096;
        for (size_t i = 0; i < rows.size(); i++) {
            pools.push_back(new_tensor(ctx, types[i], {rows[i], n_cells}));
            bytes += (ggml_nbytes(pools.back()) + page - 1) / page * page;
        }
        // Fresh pages of the system read as zero and take memory only once they are written: a context of 128k tokens
        // costs nothing until it is used. Zero matters: attention multiplies masked cells by zero, and zero times a
        // NaN left in memory is NaN.
        memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) {
            ggml_free(ctx);
            throw std::bad_alloc();
        }
        buffer = ggml_backend_cpu_buffer_from_ptr(memory, bytes);
        auto * at = static_cast<char *>(memory);
        for (auto * p : pools) {
            ggml_backend_tensor_alloc(buffer, p, at);
            at += (ggml_nbytes(p) + page - 1) / page * page;
        }
    }
    ~Cells() {
        ggml_backend_buffer_free(buffer);
        munmap(memory, bytes);
        ggml_free(ctx);
    }
    Cells(const Cells &) = delete;
    Cells & operator=(const Cells &) = delete;

    void check(I32 cells) const {
        for (size_t i = 0; i < cells.size(); i++) {
            if (cells.data()[i] < 0 || cells.data()[i] >= count) throw std::out_of_range("no such cell");
        }
    }

    char * at(const ggml_tensor * pool, int64_t cell) const { return static_cast<char *>(pool->data) + cell * pool->nb[1]; }

    size_t cell_bytes() const {
        size_t n = 0;
        for (auto * p : pools) n += p->nb[1];
        return n;
    }

    void copy(I32 src, I32 dst) {
        if (src.size() != dst.size()) throw std::invalid_argument("as many targets as sources");
        check(src);
        check(dst);
        for (auto * p : pools)
            for (size_t i = 0; i < src.size(); i++) std::memcpy(at(p, dst.data()[i]), at(p, src.data()[i]), p->nb[1]);
    }

    // Cell by cell within each pool: [pool][cell] bytes.
    nb::bytes read(I32 cells) const {
        check(cells);
        std::string out(cell_bytes() * cells.size(), '\0');
        char * to = out.data();
        for (auto * p : pools)
            for (size_t i = 0; i < cells.size(); i++, to += p->nb[1]) std::memcpy(to, at(p, cells.data()[i]), p->nb[1]);
        return nb::bytes(out.data(), out.size());
    }

    void write(I32 cells, nb::bytes data) {
        check(cells);
        if (data.size() != cell_bytes() * cells.size()) throw std::invalid_argument("the bytes do not fit these cells");
        const char * from = data.c_str();
        for (auto * p : pools)
            for (size_t i = 0; i < cells.size(); i++, from += p->nb[1]) std::memcpy(at(p, cells.data()[i]), from, p->nb[1]);
    }
};

// The lowest and one past the highest cell that any table names.
static std::pair<int64_t, int64_t> span(const std::vector<I32> & tables) {
    int32_t lo = INT32_MAX, hi = 0;
    for (auto & t : tables) {
        for (size_t i = 0; i < t.size(); i++) {
            lo = std::min(lo, t.data()[i]);
            hi = std::max(hi, t.data()[i] + 1);
        }
    }
    return {tables.empty() || hi == 0 ? 0 : lo, hi};
}

// Fill the float16 mask [n_kv, rows] of a graph: 0 where row i of sequence s at position p may look (cells of s at
// positions <= p, and > p - window where window > 0), minus infinity elsewhere. Cells count from `first`.
static void fill_mask(ggml_tensor * mask, int64_t first, const std::vector<I32> & tables, I32 sequence, I32 position,
                      int64_t window) {
    if (mask->type != GGML_TYPE_F16 || !mask->data) throw std::invalid_argument("the mask is a placed float16 tensor");
    const int64_t n_kv = mask->ne[0], rows = mask->ne[1];
    if (static_cast<int64_t>(sequence.size()) != rows || static_cast<int64_t>(position.size()) != rows) {
        throw std::invalid_argument("one sequence and one position for each row");
    }
    const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY), seen = ggml_fp32_to_fp16(0.0f);
    auto * data = static_cast<ggml_fp16_t *>(mask->data);
    for (int64_t i = 0; i < rows; i++) {
        ggml_fp16_t * row = data + i * n_kv;
        const int64_t s = sequence.data()[i], p = position.data()[i];
        if (s < 0 || s >= static_cast<int64_t>(tables.size())) throw std::out_of_range("row of an unknown sequence");
        const int32_t * table = tables[s].data();
        if (p < 0 || p >= static_cast<int64_t>(tables[s].size())) throw std::out_of_range("row beyond its page table");
        int64_t from = window > 0 ? std::max<int64_t>(0, p - window + 1) : 0;
        // The next row of the same prompt sees what this one sees and one cell more.
        bool follows = i > 0 && sequence.data()[i - 1] == s && position.data()[i - 1] == p - 1 && window <= 0;
        if (follows) {
            std::memcpy(row, row - n_kv, n_kv * sizeof(ggml_fp16_t));
            from = p;
        } else {
            std::fill(row, row + n_kv, hidden);
        }
        for (int64_t j = from; j <= p; j++) {
            int64_t cell = table[j] - first;
            if (cell < 0 || cell >= n_kv) throw std::out_of_range("a cell lies outside the attention window");
            row[cell] = seen;
        }
    }
}

void bind_cells(nb::module_ & m) {
    nb::class_<Cells>(m, "Cells")
        .def(nb::init<Backend &, const std::vector<int64_t> &, const std::vector<int> &, int64_t>(), nb::arg("backend"),
             nb::arg("rows"), nb::arg("types"), nb::arg("n_cells"), nb::keep_alive<1, 2>())
        .def("pool", [](Cells & c, int i) { return c.pools.at(i); }, nb::rv_policy::reference_internal)
        .def_ro("count", &Cells::count)
        .def_prop_ro("cell_bytes", &Cells::cell_bytes)
        .def("copy", &Cells::copy)
        .def("read", &Cells::read)
        .def("write", &Cells::write);
    m.def("span", &span, nb::arg("tables"), "(lowest, one past the highest) cell of the page tables.");
    m.def("fill_mask", &fill_mask, nb::arg("mask"), nb::arg("first"), nb::arg("tables"), nb::arg("sequence"),
          nb::arg("position"), nb::arg("window"));
}

}  // namespace ftgguf
