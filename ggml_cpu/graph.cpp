// A ggml graph of fixed shape for Python: built once, computed again and again.
#include "graph.h"

#include "attention.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

namespace ftgguf {

Graph::Graph(Arena & a, size_t max_nodes) : arena(a) {
    size_t size = ggml_tensor_overhead() * max_nodes * 2 + ggml_graph_overhead_custom(max_nodes, false);
    ctx = ggml_init({size, nullptr, /*no_alloc=*/true});
    if (!ctx) throw std::bad_alloc();
    nodes = ggml_new_graph_custom(ctx, max_nodes, false);
}

void Graph::place() {
    size_t before = arena.size();
    if (!ggml_gallocr_alloc_graph(arena.alloc, nodes)) throw std::bad_alloc();
    if (arena.size() != before) arena.generation++;
    generation = arena.generation;
    placed = true;
}

void Graph::move_windows(int64_t first_cell) {
    for (auto & w : windows) {
        w.view->data = static_cast<char *>(w.pool->data) + w.view->view_offs + first_cell * w.cell_bytes;
    }
}

void Graph::compute() {
    if (stale()) throw std::runtime_error("the graph has lost its memory: build it again");
    if (ggml_backend_graph_compute(arena.backend.handle, nodes) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("ggml could not compute the graph");
    }
}

using T = ggml_tensor *;

static void set(T t, nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> values) {
    if (!t->data) throw std::runtime_error("input is not placed");
    if (values.nbytes() != ggml_nbytes(t)) {
        throw std::invalid_argument(std::string("input ") + t->name + ": " + std::to_string(values.nbytes()) + " bytes for " +
                                    std::to_string(ggml_nbytes(t)));
    }
    std::memcpy(t->data, values.data(), values.nbytes());
}

// The tensor's memory as a float32 array [rows, columns]; valid until the next pass.
static nb::ndarray<nb::numpy, float, nb::ndim<2>> values(T t) {
    if (t->type != GGML_TYPE_F32 || !t->data || !ggml_is_contiguous(t)) throw std::invalid_argument("no float32 output");
    size_t shape[2] = {static_cast<size_t>(ggml_nrows(t)), static_cast<size_t>(t->ne[0])};
    return nb::ndarray<nb::numpy, float, nb::ndim<2>>(t->data, 2, shape, nb::none());
}

static T view(ggml_context * c, T a, const Shape & ne, const std::vector<size_t> & nb_, size_t offset) {
    if (nb_.size() + 1 != ne.size()) throw std::invalid_argument("view: one stride fewer than dimensions");
    switch (ne.size()) {
        case 1: return ggml_view_1d(c, a, ne[0], offset);
        case 2: return ggml_view_2d(c, a, ne[0], ne[1], nb_[0], offset);
        case 3: return ggml_view_3d(c, a, ne[0], ne[1], ne[2], nb_[0], nb_[1], offset);
        case 4: return ggml_view_4d(c, a, ne[0], ne[1], ne[2], ne[3], nb_[0], nb_[1], nb_[2], offset);
        default: throw std::invalid_argument("view: 1 to 4 dimensions");
    }
}

static T reshape(ggml_context * c, T a, const Shape & ne) {
    switch (ne.size()) {
        case 1: return ggml_reshape_1d(c, a, ne[0]);
        case 2: return ggml_reshape_2d(c, a, ne[0], ne[1]);
        case 3: return ggml_reshape_3d(c, a, ne[0], ne[1], ne[2]);
        case 4: return ggml_reshape_4d(c, a, ne[0], ne[1], ne[2], ne[3]);
        default: throw std::invalid_argument("reshape: 1 to 4 dimensions");
    }
}

// Cells [first, first + n) of a pool [row, cells] as attention reads them: [head_dim, n, heads]. `first` comes with
// move_windows().
static T window(Graph & g, T pool, int64_t head_dim, int64_t heads, int64_t n) {
    size_t head_bytes = ggml_row_size(pool->type, head_dim);
    T v = ggml_view_3d(g.ctx, pool, head_dim, n, heads, pool->nb[1], head_bytes, 0);
    g.windows.push_back({v, pool, pool->nb[1]});
    return v;
}

static T flash_attention(Graph & g, T q, T k, T v, T mask, T sinks, float scale, float softcap) {
    T o = ggml_flash_attn_ext(g.ctx, q, k, v, mask, scale, 0.0f, softcap);
    if (sinks) ggml_flash_attn_ext_add_sinks(o, sinks);
    ggml_prec_set_acc(o, GGML_PREC_F32);
    return ggml_reshape_2d(g.ctx, o, o->ne[0] * o->ne[1], o->ne[2] * o->ne[3]);
}

// The same by ours where that is faster (attention.h).
static T attention(Graph & g, T q, T k, T v, T mask, T sinks, float scale, float softcap) {
    T o = own_attention(g.ctx, q, k, v, mask, sinks, scale, softcap);
    return o ? ggml_reshape_2d(g.ctx, o, o->ne[0] * o->ne[1], o->ne[2]) : flash_attention(g, q, k, v, mask, sinks, scale, softcap);
}

// Each row's k expert scales out of a float32 [experts]: [1, k, rows].
static T expert_scale(Graph & g, T scale, T ids) {
    T s = ggml_reshape_3d(g.ctx, scale, 1, scale->ne[0], 1);
    return ggml_get_rows(g.ctx, ggml_repeat_4d(g.ctx, s, 1, scale->ne[0], ids->ne[1], 1), ids);
}

static ggml_glu_op glu_kind(const std::string & kind) {
    if (kind == "silu") return GGML_GLU_OP_SWIGLU;
    if (kind == "gelu") return GGML_GLU_OP_GEGLU;
    if (kind == "relu") return GGML_GLU_OP_REGLU;
    throw std::invalid_argument("no such gated activation: " + kind);
}

// The sum over dimension 1 of [n, k, rows], in order of rank: the order in which llama.cpp adds a row's experts.
static T sum_ranks(Graph & g, T a) {
    T sum = nullptr;
    for (int64_t i = 0; i < a->ne[1]; i++) {
        T part = ggml_view_2d(g.ctx, a, a->ne[0], a->ne[2], a->nb[2], i * a->nb[1]);
        sum = sum ? ggml_add(g.ctx, sum, part) : part;
        ggml_build_forward_expand(g.nodes, sum);
    }
    return a->ne[1] == 1 ? ggml_cont(g.ctx, sum) : sum;
}

#define UNARY(name, call) .def(name, [](Graph & g, T a) { return call(g.ctx, a); }, RI)
#define BINARY(name, call) .def(name, [](Graph & g, T a, T b) { return call(g.ctx, a, b); }, RI)

static void bind_operators(nb::class_<Graph> & cls) {
    const auto RI = nb::rv_policy::reference_internal;
    cls UNARY("silu", ggml_silu) UNARY("sigmoid", ggml_sigmoid) UNARY("softmax", ggml_soft_max) UNARY("sqrt", ggml_sqrt)
        UNARY("softplus", ggml_softplus) UNARY("tanh", ggml_tanh) UNARY("relu", ggml_relu) UNARY("sqr", ggml_sqr)
        UNARY("gelu", ggml_gelu) UNARY("sum_rows", ggml_sum_rows) UNARY("cont", ggml_cont)
        BINARY("mul_mat", ggml_mul_mat) BINARY("add", ggml_add) BINARY("mul", ggml_mul) BINARY("div", ggml_div)
        BINARY("get_rows", ggml_get_rows);
    cls.def("mul_mat_id", [](Graph & g, T w, T x, T ids) { return ggml_mul_mat_id(g.ctx, w, x, ids); }, RI)
        .def("add_id", [](Graph & g, T a, T b, T ids) { return ggml_add_id(g.ctx, a, b, ids); }, RI)
        .def("set_rows", [](Graph & g, T a, T b, T rows) { return ggml_set_rows(g.ctx, a, b, rows); }, RI)
        .def("fill", [](Graph & g, T a, float x) { return ggml_fill(g.ctx, a, x); }, RI)
        .def("scale", [](Graph & g, T a, float s) { return ggml_scale(g.ctx, a, s); }, RI)
        .def("clamp", [](Graph & g, T a, float lo, float hi) { return ggml_clamp(g.ctx, a, lo, hi); }, RI)
        .def("rms_norm", [](Graph & g, T a, float eps) { return ggml_rms_norm(g.ctx, a, eps); }, RI)
        .def("top_k", [](Graph & g, T a, int k) { return ggml_argsort_top_k(g.ctx, a, k); }, RI)
        .def("cast", [](Graph & g, T a, int type) { return ggml_cast(g.ctx, a, static_cast<ggml_type>(type)); }, RI)
        .def("glu", [](Graph & g, T gate, T up, const std::string & kind) {
            return ggml_glu_split(g.ctx, gate, up, glu_kind(kind)); }, RI)
        .def("swiglu_oai", [](Graph & g, T gate, T up, float alpha, float limit) {
            return ggml_swiglu_oai(g.ctx, gate, up, alpha, limit); }, RI)
        .def("rope", [](Graph & g, T a, T pos, T factors, int dims, bool neox, int ctx_orig, float base, float scale,
                        float ext, float attn, float fast, float slow) {
            return ggml_rope_ext(g.ctx, a, pos, factors, dims, neox ? GGML_ROPE_TYPE_NEOX : GGML_ROPE_TYPE_NORMAL, ctx_orig,
                                 base, scale, ext, attn, fast, slow); },
            RI, nb::arg("a"), nb::arg("pos"), nb::arg("factors").none(), nb::arg("dims"), nb::arg("neox"),
            nb::arg("ctx_orig"), nb::arg("base"), nb::arg("scale"), nb::arg("ext"), nb::arg("attn"), nb::arg("fast"),
            nb::arg("slow"))
        .def("reshape", [](Graph & g, T a, const Shape & ne) { return reshape(g.ctx, a, ne); }, RI)
        .def("view", [](Graph & g, T a, const Shape & ne, const std::vector<size_t> & strides, size_t offset) {
            return view(g.ctx, a, ne, strides, offset); }, RI)
        .def("strides", [](Graph &, T a) { return std::vector<size_t>(a->nb, a->nb + GGML_MAX_DIMS); })
        .def("permute", [](Graph & g, T a, int i, int j, int k, int l) { return ggml_permute(g.ctx, a, i, j, k, l); }, RI)
        .def("window", &window, RI)
        .def("expert_scale", &expert_scale, RI)
        .def("sum_ranks", &sum_ranks, RI)
        .def("flash_attention", &flash_attention, RI, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("mask"),
             nb::arg("sinks").none(), nb::arg("scale"), nb::arg("softcap"))
        .def("attention", &attention, RI, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("mask"), nb::arg("sinks").none(),
             nb::arg("scale"), nb::arg("softcap"));
}

void bind_graph(nb::module_ & m) {
    nb::class_<Arena>(m, "Arena")
        .def(nb::init<Backend &>(), nb::keep_alive<1, 2>())
        .def_prop_ro("size", &Arena::size);

    nb::class_<Graph> cls(m, "Graph");
    cls.def(nb::init<Arena &, size_t>(), nb::arg("arena"), nb::arg("max_nodes"), nb::keep_alive<1, 2>())
        .def("input", [](Graph & g, const std::string & name, int type, const Shape & ne) {
            ggml_tensor * t = new_tensor(g.ctx, type, ne);
            ggml_set_name(t, name.c_str());
            ggml_set_input(t);
            return t; }, nb::rv_policy::reference_internal)
        .def("expand", [](Graph & g, T t) { ggml_build_forward_expand(g.nodes, t); })
        .def("output", [](Graph & g, T t) { ggml_set_output(t); ggml_build_forward_expand(g.nodes, t); })
        .def("place", &Graph::place)
        .def("move_windows", &Graph::move_windows)
        .def("compute", &Graph::compute, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("stale", &Graph::stale)
        .def_prop_ro("n_nodes", [](Graph & g) { return ggml_graph_n_nodes(g.nodes); })
        .def_prop_ro("operators", [](Graph & g) {
            std::vector<std::string> names;
            for (int i = 0; i < ggml_graph_n_nodes(g.nodes); i++) names.push_back(ggml_op_desc(ggml_graph_node(g.nodes, i)));
            return names; })
        .def("set", [](Graph &, T t, nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> v) { set(t, v); })
        .def("set_used", [](Graph &, T t, nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> v) {
            if (t->data) set(t, v); },
            "Like set(), for an input that this graph may not read (and that then has no memory).")
        .def("values", [](Graph &, T t) { return values(t); });
    bind_operators(cls);
}

}  // namespace ftgguf
