// ggml's CPU backend for Python: weights, their layouts, and who computes.
#include "backend.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace ftgguf {

Backend::Backend(int n_threads) : handle(ggml_backend_cpu_init()) {
    if (!handle) throw std::runtime_error("ggml's CPU backend cannot be initialised");
    set_threads(n_threads);
}

Backend::~Backend() { ggml_backend_free(handle); }

ggml_backend_buffer_type_t Backend::repack_type() const {
    ggml_backend_dev_t device = ggml_backend_get_device(handle);
    auto reg = ggml_backend_dev_backend_reg(device);
    auto extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts"));
    if (!extra) return nullptr;
    // AMX tiles are another extra type of the same list. They are left out: on virtual machines that announce AMX,
    // ggml 0.25.3 crashes in its tile kernels as soon as a product has two rows.
    for (auto * p = extra(device); p && *p; ++p) {
        if (std::strcmp(ggml_backend_buft_name(*p), "CPU_REPACK") == 0) return *p;
    }
    return nullptr;
}

ggml_tensor * new_tensor(ggml_context * ctx, int type, const Shape & ne) {
    if (type < 0 || type >= GGML_TYPE_COUNT || ggml_blck_size(static_cast<ggml_type>(type)) == 0) {
        throw std::invalid_argument("no such tensor type: " + std::to_string(type));
    }
    if (ne.empty() || ne.size() > GGML_MAX_DIMS) throw std::invalid_argument("a tensor has 1 to 4 dimensions");
    for (int64_t n : ne) {
        if (n < 0) throw std::invalid_argument("a tensor dimension is negative");
    }
    auto t = static_cast<ggml_type>(type);
    if (ne[0] % ggml_blck_size(t) != 0) {
        throw std::invalid_argument(std::string("a row of ") + std::to_string(ne[0]) + " elements is not whole blocks of " +
                                    ggml_type_name(t));
    }
    return ggml_new_tensor(ctx, t, static_cast<int>(ne.size()), ne.data());
}

static ggml_context * headers(size_t count) {
    ggml_init_params params{ggml_tensor_overhead() * (count + 1), nullptr, /*no_alloc=*/true};
    ggml_context * ctx = ggml_init(params);
    if (!ctx) throw std::bad_alloc();
    return ctx;
}

Weights::Weights(Backend & b, size_t max_tensors)
    : backend(b), ctx(headers(max_tensors)), packed_ctx(headers(max_tensors)) {}

Weights::~Weights() {
    for (auto buffer : buffers) ggml_backend_buffer_free(buffer);
    for (auto shard : shards) ggml_backend_buffer_free(shard);
    ggml_free(packed_ctx);
    ggml_free(ctx);
}

int Weights::map(Bytes bytes) {
    auto * base = const_cast<uint8_t *>(bytes.data());
    auto buffer = ggml_backend_cpu_buffer_from_ptr(base, bytes.size());
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    shards.push_back(buffer);
    return static_cast<int>(shards.size()) - 1;
}

ggml_tensor * Weights::mapped(const std::string & name, int type, const Shape & ne, int shard, size_t offset) {
    auto buffer = shards.at(shard);
    ggml_tensor * t = new_tensor(ctx, type, ne);
    size_t size = ggml_backend_buffer_get_size(buffer);
    if (offset > size || ggml_nbytes(t) > size - offset) throw std::out_of_range("tensor " + name + " ends beyond its file");
    ggml_set_name(t, name.c_str());
    auto * base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer));
    if (ggml_backend_tensor_alloc(buffer, t, base + offset) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("tensor " + name + " cannot be placed");
    }
    return t;
}

ggml_tensor * Weights::owned(const std::string & name, int type, const Shape & ne, Bytes bytes) {
    ggml_tensor * t = new_tensor(ctx, type, ne);
    if (ggml_nbytes(t) != bytes.size()) throw std::invalid_argument("tensor " + name + ": wrong number of bytes");
    auto buffer = ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), ggml_nbytes(t));
    if (!buffer) throw std::bad_alloc();
    buffers.push_back(buffer);
    ggml_set_name(t, name.c_str());
    ggml_backend_tensor_alloc(buffer, t, ggml_backend_buffer_get_base(buffer));
    std::memcpy(t->data, bytes.data(), bytes.size());
    return t;
}

// Whether the repack buffer type takes this tensor: asked of the backend with a product of the kind it will be used in,
// on a throw-away header that lies in an empty buffer of that type (setting the bytes of a refused tensor crashes).
static bool can_pack(Backend & backend, ggml_backend_buffer_type_t type, const ggml_tensor * plain, bool experts) {
    ggml_init_params params{ggml_tensor_overhead() * 8, nullptr, true};
    ggml_context * probe = ggml_init(params);
    ggml_tensor * w = ggml_new_tensor(probe, plain->type, ggml_n_dims(plain), plain->ne);
    ggml_backend_buffer_t empty = ggml_backend_buft_alloc_buffer(type, 0);
    w->buffer = empty;
    ggml_tensor * x;
    ggml_tensor * y;
    if (experts) {
        x = ggml_new_tensor_3d(probe, GGML_TYPE_F32, w->ne[0], 1, 4);
        ggml_tensor * ids = ggml_new_tensor_2d(probe, GGML_TYPE_I32, 1, 4);
        y = ggml_mul_mat_id(probe, w, x, ids);
    } else {
        x = ggml_new_tensor_2d(probe, GGML_TYPE_F32, w->ne[0], 4);
        y = ggml_mul_mat(probe, w, x);
    }
    bool ok = ggml_backend_dev_supports_op(ggml_backend_get_device(backend.handle), y);
    w->buffer = nullptr;
    ggml_backend_buffer_free(empty);
    ggml_free(probe);
    return ok;
}

ggml_tensor * Weights::packed(ggml_tensor * plain, bool experts) {
    auto type = backend.repack_type();
    if (!type || !can_pack(backend, type, plain, experts)) return nullptr;
    ggml_tensor * t = ggml_new_tensor(packed_ctx, plain->type, ggml_n_dims(plain), plain->ne);
    ggml_set_name(t, plain->name);
    return t;
}

size_t Weights::packed_size() const {
    size_t total = 0;
    for (auto * t = ggml_get_first_tensor(packed_ctx); t; t = ggml_get_next_tensor(packed_ctx, t)) total += ggml_nbytes(t);
    return total;
}

// Huge pages for memory that nobody has touched yet. A thread reads 13 GB/s from them and 8 from small ones, which have
// an address to look up every 4 KB.
static void ask_for_huge_pages(ggml_backend_buffer_t buffer) {
#if defined(MADV_HUGEPAGE)
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t base = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(buffer));
    const uintptr_t start = (base + page - 1) / page * page, end = (base + ggml_backend_buffer_get_size(buffer)) / page * page;
    // A refusal (a kernel without them) leaves everything as it was.
    if (start < end) madvise(reinterpret_cast<void *>(start), end - start, MADV_HUGEPAGE);
#else
    (void) buffer;
#endif
}

void Weights::allocate_packed() {
    if (!ggml_get_first_tensor(packed_ctx)) return;
    auto buffer = ggml_backend_alloc_ctx_tensors_from_buft(packed_ctx, backend.repack_type());
    if (!buffer) throw std::bad_alloc();
    ask_for_huge_pages(buffer);
    ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    buffers.push_back(buffer);
}

void Weights::pack(ggml_tensor * packed, ggml_tensor * plain) {
    if (!packed->buffer || !plain->data || ggml_nbytes(packed) != ggml_nbytes(plain)) {
        throw std::invalid_argument("pack: the two tensors do not belong together");
    }
    ggml_backend_tensor_set(packed, plain->data, 0, ggml_nbytes(plain));
}

// ggml prints a line for each tensor that it repacks. Only its warnings and errors are worth a user's eyes.
static void log_to_stderr(ggml_log_level level, const char * text, void *) {
    static thread_local bool shown = false;
    if (level != GGML_LOG_LEVEL_CONT) shown = level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR;
    if (shown) std::fputs(text, stderr);
}

static nb::dict cpu_features() {
    nb::dict d;
    d["avx2"] = ggml_cpu_has_avx2() != 0;
    d["fma"] = ggml_cpu_has_fma() != 0;
    d["f16c"] = ggml_cpu_has_f16c() != 0;
    d["avx_vnni"] = ggml_cpu_has_avx_vnni() != 0;
    d["avx512"] = ggml_cpu_has_avx512() != 0;
    d["avx512_vbmi"] = ggml_cpu_has_avx512_vbmi() != 0;
    d["avx512_vnni"] = ggml_cpu_has_avx512_vnni() != 0;
    d["avx512_bf16"] = ggml_cpu_has_avx512_bf16() != 0;
    d["amx_int8"] = ggml_cpu_has_amx_int8() != 0;
    d["neon"] = ggml_cpu_has_neon() != 0;
    d["dotprod"] = ggml_cpu_has_dotprod() != 0;
    d["matmul_int8"] = ggml_cpu_has_matmul_int8() != 0;
    d["sve"] = ggml_cpu_has_sve() != 0;
    return d;
}

void bind_backend(nb::module_ & m) {
    ggml_log_set(log_to_stderr, nullptr);
    m.def("ggml_version", [] { return std::string(ggml_version()); }, "ggml's version string, as linked.");
    m.def("cpu_features", &cpu_features, "Instruction sets that this build of ggml uses: name -> bool.");
    m.def("has_kernel", [](int type) {
        if (type < 0 || type >= GGML_TYPE_COUNT) return false;
        auto t = static_cast<ggml_type>(type);
        if (t == GGML_TYPE_F32) return true;
        auto * traits = ggml_get_type_traits_cpu(t);
        return ggml_blck_size(t) != 0 && traits && traits->vec_dot != nullptr;
    }, "Whether ggml's CPU backend multiplies by weights of this type.");

    nb::class_<Backend>(m, "Backend")
        .def(nb::init<int>(), nb::arg("n_threads"))
        .def("set_threads", &Backend::set_threads)
        .def("can_repack", [](Backend & b) { return b.repack_type() != nullptr; });

    nb::class_<ggml_tensor>(m, "Tensor")
        .def_prop_ro("name", [](ggml_tensor & t) { return std::string(t.name); })
        .def_prop_ro("type", [](ggml_tensor & t) { return static_cast<int>(t.type); })
        .def_prop_ro("shape", [](ggml_tensor & t) { return Shape(t.ne, t.ne + ggml_n_dims(&t)); })
        .def("ne", [](ggml_tensor & t, int i) { return t.ne[i]; })
        .def_prop_ro("nbytes", [](ggml_tensor & t) { return ggml_nbytes(&t); });

    nb::class_<Weights>(m, "Weights")
        .def(nb::init<Backend &, size_t>(), nb::arg("backend"), nb::arg("max_tensors"), nb::keep_alive<1, 2>())
        .def("map", &Weights::map, nb::arg("bytes"), nb::keep_alive<1, 2>(),
             "Register a mapped file; returns its shard number. The mapping must outlive this object.")
        .def("mapped", &Weights::mapped, nb::rv_policy::reference_internal)
        .def("owned", &Weights::owned, nb::rv_policy::reference_internal)
        .def("packed", &Weights::packed, nb::rv_policy::reference_internal, nb::arg("plain"), nb::arg("experts"))
        .def("packed_size", &Weights::packed_size)
        .def("allocate_packed", &Weights::allocate_packed)
        .def("pack", &Weights::pack, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace ftgguf
