// Attention with AVX-512 where ggml goes through heads one element at a time, with ggml's arithmetic.
//
// ggml built for AVX-512 adds up dots of float16 in steps of 64 elements and, with FP16, V in steps of 128; the rest
// goes singly through a table and a rounding in software: all of V in a head of 64. The sums here are the same to the
// bit (a dot's whole 64s in float, its rest in double; V's sums rounded to float16 after each cell; the cells of a
// single row split over the threads), but 16 elements at a time, and each K and V is read once for up to four heads
// that share it. Source: ggml's behaviour; online softmax: arXiv 2205.14135, its split over cells: arXiv 2311.01282.
#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <random>

#include "ggml-cpu.h"

#if defined(__x86_64__) && defined(__GNUC__)
// GCC 12 warns of its own intrinsics, whose don't-care operands it leaves unset on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

namespace ftgguf {

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,fma")))
#define AVX512_INLINE AVX512 __attribute__((always_inline)) static inline

constexpr int kMostKeys = 256;     // head sizes of K and
constexpr int kMostDim = 128;      // of V, less than that
constexpr int kHeads = 4;          // heads at a time
constexpr int kBlock = 64;         // cells at a time
constexpr int kAhead = 8;          // how many cells before its use a K is asked for
constexpr int kTiledRows = 64;     // from here on ggml computes tiles of rows, and well
constexpr int64_t kSplit = 512;    // from here on ggml splits one row's cells over the threads
constexpr int kMostChunks = 64;    // threads beyond have nothing to do in it

// What a head has seen: greatest logit, sum of exp(logit - greatest), and as many times V.
struct Seen {
    float most, sum, v[kMostDim];
};

struct Block {
    int n;
    int32_t cell[kBlock];
    float mask[kBlock];
    float weight[kHeads][kBlock];  // first the dot, then exp(logit - greatest so far)
    float shrink[kHeads][kBlock];  // what earlier sums are multiplied with before the cell is added
    uint64_t grows[kHeads];        // bits of cells whose `shrink` is not 1
};

struct Factors {
    float scale, softcap;
};
static_assert(sizeof(Factors) == sizeof(void *), "travels as an operator's user data");

AVX512_INLINE void ask_for(const char * from, int64_t dim) {
    for (int64_t at = 0; at < 2 * dim; at += 64) _mm_prefetch(from + at, _MM_HINT_T0);
}

AVX512_INLINE __mmask16 lanes(int64_t left) { return left >= 16 ? 0xffff : left <= 0 ? 0 : (1u << left) - 1; }

AVX512_INLINE __m512 halves(const ggml_fp16_t * from, __mmask16 in) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(in, from));
}

AVX512_INLINE __m512 rounded(__m512 x) {
    return _mm512_cvtph_ps(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// float -> float16 -> float, zeros up to a multiple of 16.
AVX512_INLINE void lay_out(const float * q, int64_t dim, float * out) {
    for (int64_t d = 0; d < dim; d += 16) _mm512_storeu_ps(out + d, rounded(_mm512_maskz_loadu_ps(lanes(dim - d), q + d)));
}

// The sum of 16 floats in ggml's order.
AVX512_INLINE float total(__m512 x) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
}

// Whole 64s in float, the rest (whose products are exact) in double.
template <int H>
AVX512_INLINE void dots(const float (*q)[kMostKeys], const ggml_fp16_t * k, int64_t dim, float * const * out) {
    __m512 sum[H][4];
    for (int h = 0; h < H; h++) sum[h][0] = sum[h][1] = sum[h][2] = sum[h][3] = _mm512_setzero_ps();
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) {
        for (int c = 0; c < 4; c++) {
            const __m512 x = halves(k + d + 16 * c, 0xffff);
            for (int h = 0; h < H; h++) sum[h][c] = _mm512_fmadd_ps(x, _mm512_loadu_ps(q[h] + d + 16 * c), sum[h][c]);
        }
    }
    for (int h = 0; h < H; h++) {
        const __m512 even = _mm512_add_ps(sum[h][0], sum[h][2]), odd = _mm512_add_ps(sum[h][1], sum[h][3]);
        *out[h] = total(_mm512_add_ps(even, odd));
    }
    if (d == dim) return;
    __m512d rest[H];
    for (int h = 0; h < H; h++) rest[h] = _mm512_setzero_pd();
    for (; d < dim; d += 16) {
        const __m512 x = halves(k + d, lanes(dim - d));
        for (int h = 0; h < H; h++) {
            const __m512 product = _mm512_mul_ps(x, _mm512_loadu_ps(q[h] + d));
            const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(product));
            const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(product, 1));
            rest[h] = _mm512_add_pd(rest[h], _mm512_add_pd(low, high));
        }
    }
    for (int h = 0; h < H; h++) *out[h] = static_cast<float>(*out[h] + _mm512_reduce_add_pd(rest[h]));
}

// The next cells before `end` that the row sees.
AVX512_INLINE void next_cells(const ggml_fp16_t * mask, int64_t & at, int64_t end, Block & b) {
    const __m512i hidden = _mm512_set1_epi16(static_cast<int16_t>(0xfc00));  // minus infinity
    for (b.n = 0; at < end && b.n <= kBlock - 32; at += 32) {
        const __mmask32 in = end - at >= 32 ? ~0u : (1u << (end - at)) - 1;
        uint32_t bits = _mm512_mask_cmpneq_epu16_mask(in, _mm512_maskz_loadu_epi16(in, mask + at), hidden);
        for (; bits; bits &= bits - 1) {
            const int64_t cell = at + __builtin_ctz(bits);
            b.cell[b.n] = static_cast<int32_t>(cell);
            b.mask[b.n++] = _cvtsh_ss(mask[cell]);
        }
    }
}

AVX512_INLINE void softmax(Block & b, int h, Factors f, Seen & s) {
    // In a loop of their own, since ggml does not fuse the mask's addition with them.
    for (int i = 0; i < b.n; i++) b.weight[h][i] *= f.scale;
    for (int i = 0; f.softcap != 0.0f && i < b.n; i++) b.weight[h][i] = f.softcap * tanhf(b.weight[h][i]);
    b.grows[h] = 0;
    for (int i = 0; i < b.n; i++) {
        const float x = b.weight[h][i] + b.mask[i];
        float shrink = 1.0f, weight = 1.0f;
        if (x > s.most) {
            shrink = expf(s.most - x);
            s.most = x;
            b.grows[h] |= uint64_t(1) << i;
        } else {
            weight = expf(x - s.most);
        }
        s.sum = fmaf(s.sum, shrink, weight);
        b.shrink[h][i] = shrink;
        b.weight[h][i] = weight;
    }
}

// Adds C times 16 elements of V, from element d on.
template <int H, int C>
AVX512_INLINE void add_values(const Block & b, const char * v, size_t stride, int64_t d, int64_t dim, Seen * const * s) {
    __m512 sum[H][C];
    __mmask16 in[C];
    for (int c = 0; c < C; c++) {
        in[c] = lanes(dim - d - 16 * c);
        for (int h = 0; h < H; h++) sum[h][c] = _mm512_maskz_loadu_ps(in[c], s[h]->v + d + 16 * c);
    }
    for (int i = 0; i < b.n; i++) {
        __m512 x[C];
        auto * row = reinterpret_cast<const ggml_fp16_t *>(v + b.cell[i] * stride) + d;
        for (int c = 0; c < C; c++) x[c] = halves(row + 16 * c, in[c]);
        for (int h = 0; h < H; h++) {
            if (b.grows[h] >> i & 1) {
                const __m512 shrink = _mm512_set1_ps(b.shrink[h][i]);
                for (int c = 0; c < C; c++) sum[h][c] = rounded(_mm512_mul_ps(sum[h][c], shrink));
            }
            const __m512 weight = _mm512_set1_ps(b.weight[h][i]);
            for (int c = 0; c < C; c++) sum[h][c] = rounded(_mm512_fmadd_ps(x[c], weight, sum[h][c]));
        }
    }
    for (int c = 0; c < C; c++) {
        for (int h = 0; h < H; h++) _mm512_mask_storeu_ps(s[h]->v + d + 16 * c, in[c], sum[h][c]);
    }
}

struct Node {
    const ggml_tensor *q, *k, *v, *mask, *sinks;
    Factors factors;

    Node(const ggml_tensor * t, void * user) : q(t->src[0]), k(t->src[1]), v(t->src[2]), mask(t->src[3]), sinks(t->src[4]) {
        std::memcpy(&factors, &user, sizeof factors);
    }
};

// H heads from `head` on, which share K and V, of one row over cells [from, to).
template <int H>
AVX512 static void look(const Node & n, int64_t row, int64_t head, int64_t from, int64_t to, Seen * const * s) {
    const int64_t dim = n.k->ne[0], v_dim = n.v->ne[0], kv_head = head / (n.q->ne[2] / n.k->ne[2]);
    alignas(64) float q[H][kMostKeys];
    for (int h = 0; h < H; h++) {
        auto * at = static_cast<const char *>(n.q->data) + row * n.q->nb[1] + (head + h) * n.q->nb[2];
        lay_out(reinterpret_cast<const float *>(at), dim, q[h]);
        s[h]->most = -INFINITY;
        s[h]->sum = 0.0f;
        std::memset(s[h]->v, 0, v_dim * sizeof(float));
    }
    auto * k = static_cast<const char *>(n.k->data) + kv_head * n.k->nb[2];
    auto * v = static_cast<const char *>(n.v->data) + kv_head * n.v->nb[2];
    auto * mask = reinterpret_cast<const ggml_fp16_t *>(static_cast<const char *>(n.mask->data) + row * n.mask->nb[1]);
    Block b;
    while (from < to) {
        next_cells(mask, from, to, b);
        for (int i = 0; i < b.n; i++) {
            float * out[H];
            for (int h = 0; h < H; h++) out[h] = &b.weight[h][i];
            ask_for(k + (b.cell[i] + kAhead) * n.k->nb[1], dim);
            ask_for(v + b.cell[i] * n.v->nb[1], v_dim);
            dots<H>(q, reinterpret_cast<const ggml_fp16_t *>(k + b.cell[i] * n.k->nb[1]), dim, out);
        }
        for (int h = 0; h < H; h++) softmax(b, h, n.factors, *s[h]);
        int64_t d = 0;
        for (; H == 1 && d + 64 < v_dim; d += 96) add_values<H, 6>(b, v, n.v->nb[1], d, v_dim, s);
        for (; H <= 2 && d + 48 < v_dim; d += 64) add_values<H, 4>(b, v, n.v->nb[1], d, v_dim, s);
        for (; d + 16 < v_dim; d += 32) add_values<H, 2>(b, v, n.v->nb[1], d, v_dim, s);
        for (; d < v_dim; d += 16) add_values<H, 1>(b, v, n.v->nb[1], d, v_dim, s);
    }
}

// As many of the heads [head, end) as share K and V and fit; returns their number.
static int look_at_group(const Node & n, int64_t row, int64_t head, int64_t end, int64_t from, int64_t to,
                         Seen * const * s) {
    const int64_t group = n.q->ne[2] / n.k->ne[2];
    const int heads = static_cast<int>(std::min<int64_t>({kHeads, end - head, group - head % group}));
    switch (heads) {
        case 1: look<1>(n, row, head, from, to, s); break;
        case 2: look<2>(n, row, head, from, to, s); break;
        case 3: look<3>(n, row, head, from, to, s); break;
        default: look<4>(n, row, head, from, to, s); break;
    }
    for (int h = 0; n.sinks && from == 0 && h < heads; h++) {
        const float sink = static_cast<const float *>(n.sinks->data)[head + h];
        float shrink = 1.0f, weight = 1.0f;
        if (sink > s[h]->most) {
            shrink = expf(s[h]->most - sink);
            s[h]->most = sink;
            for (int64_t d = 0; d < n.v->ne[0]; d++) s[h]->v[d] *= shrink;
        } else {
            weight = expf(sink - s[h]->most);
        }
        s[h]->sum = s[h]->sum * shrink + weight;
    }
    return heads;
}

static void finish(const Seen & s, int64_t dim, float * out) {
    const float by = s.sum == 0.0f ? 0.0f : 1.0f / s.sum;
    for (int64_t d = 0; d < dim; d++) out[d] = s.v[d] * by;
}

// Rows times heads dealt out in runs.
static void compute_rows(ggml_tensor * out, int ith, int nth, void * user) {
    const Node n(out, user);
    const int64_t heads = n.q->ne[2], all = n.q->ne[1] * heads;
    Seen seen[kHeads], *s[kHeads];
    for (int h = 0; h < kHeads; h++) s[h] = &seen[h];
    for (int64_t at = all * ith / nth, end = all * (ith + 1) / nth; at < end;) {
        const int64_t row = at / heads, head = at % heads;
        const int done = look_at_group(n, row, head, std::min(heads, head + end - at), 0, n.k->ne[1], s);
        for (int h = 0; h < done; h++) finish(seen[h], out->ne[0], static_cast<float *>(out->data) + (at + h) * out->ne[0]);
        at += done;
    }
}

// One row: a part of its cells for each thread, all heads. `out` holds Seen [heads][chunks].
static void compute_chunks(ggml_tensor * out, int ith, int nth, void * user) {
    const Node n(out, user);
    const int64_t heads = n.q->ne[2], cells = n.k->ne[1], chunks = std::min(nth, kMostChunks);
    const int64_t each = (cells + chunks - 1) / chunks, from = ith * each;
    auto * all = static_cast<Seen *>(out->data);
    for (int64_t head = 0; head < heads && ith < chunks;) {
        Seen * s[kHeads];
        for (int64_t h = 0; h < kHeads; h++) s[h] = all + std::min(head + h, heads - 1) * kMostChunks + ith;
        head += look_at_group(n, 0, head, heads, std::min(from, cells), std::min(from + each, cells), s);
    }
}

AVX512 static void merge_chunks(ggml_tensor * out, int ith, int nth, void *) {
    const int64_t dim = out->ne[0], chunks = std::min(nth, kMostChunks);
    for (int64_t head = ith; head < out->ne[1]; head += nth) {
        auto * parts = static_cast<const Seen *>(out->src[0]->data) + head * kMostChunks;
        Seen s{-INFINITY, 0.0f, {}};
        for (int64_t c = 0; c < chunks; c++) {
            if (parts[c].sum == 0.0f) continue;
            const float most = std::max(s.most, parts[c].most);
            const float old = expf(s.most - most), fresh = expf(parts[c].most - most);
            for (int64_t d = 0; d < dim; d++) s.v[d] = fmaf(s.v[d], old, parts[c].v[d] * fresh);
            s.sum = fmaf(s.sum, old, parts[c].sum * fresh);
            s.most = most;
        }
        finish(s, dim, static_cast<float *>(out->data) + head * dim);
    }
}

// Whether ggml's dot of this many float16 is ours to the bit. A ggml built for other instructions adds in another order.
AVX512 static bool compare_dots(int64_t dim) {
    const auto dot = ggml_get_type_traits_cpu(GGML_TYPE_F16)->vec_dot;
    std::mt19937 random(1);
    for (int round = 0; round < 32; round++) {
        ggml_fp16_t k[kMostKeys], rounded_q[kMostKeys];
        float q[kMostKeys], laid_out[1][kMostKeys], theirs, ours, *out = &ours;
        for (int64_t d = 0; d < dim; d++) {
            q[d] = static_cast<float>(random()) / 4294967296.0f - 0.5f;
            rounded_q[d] = ggml_fp32_to_fp16(q[d]);
            k[d] = ggml_fp32_to_fp16(static_cast<float>(random()) / 4294967296.0f - 0.5f);
        }
        lay_out(q, dim, laid_out[0]);
        dots<1>(laid_out, k, dim, &out);
        dot(static_cast<int>(dim), &theirs, 0, k, 0, rounded_q, 0, 1);
        if (ours != theirs) return false;
    }
    return true;
}

static bool same_dots(int64_t dim) {
    static std::atomic<int8_t> known[kMostKeys + 1];  // 0: not compared yet
    if (known[dim] == 0) known[dim] = compare_dots(dim) ? 1 : -1;
    return known[dim] == 1;
}

// Whether the processor has AVX-512, K and V are float16, and ggml adds as ours does and is slow here.
static bool can_own(ggml_type k, ggml_type v, int64_t k_dim, int64_t v_dim, int64_t rows) {
    static const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("fma");
    const bool fits = k == GGML_TYPE_F16 && v == GGML_TYPE_F16 && k_dim <= kMostKeys && v_dim < kMostDim &&
                      rows < kTiledRows;
    return can && fits && same_dots(k_dim);
}

ggml_tensor * own_attention(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask,
                            ggml_tensor * sinks, float scale, float softcap) {
    const int64_t dim = v->ne[0], rows = q->ne[1], heads = q->ne[2];
    if (!can_own(k->type, v->type, k->ne[0], dim, rows) || !mask || q->ne[3] != 1 || mask->ne[2] != 1) return nullptr;
    ggml_tensor * args[] = {q, k, v, mask, sinks};
    const int n_args = sinks ? 5 : 4;
    const Factors factors{softcap != 0.0f ? scale / softcap : scale, softcap};
    void * user;
    std::memcpy(&user, &factors, sizeof user);
    if (rows > 1 || k->ne[1] < kSplit) {
        return ggml_custom_4d(ctx, GGML_TYPE_F32, dim, heads, rows, 1, args, n_args, compute_rows, GGML_N_TASKS_MAX, user);
    }
    ggml_tensor * parts = ggml_custom_4d(ctx, GGML_TYPE_F32, sizeof(Seen) / sizeof(float), kMostChunks, heads, 1, args, n_args,
                                         compute_chunks, GGML_N_TASKS_MAX, user);
    return ggml_custom_4d(ctx, GGML_TYPE_F32, dim, heads, 1, 1, &parts, 1, merge_chunks, GGML_N_TASKS_MAX, nullptr);
}

}  // namespace ftgguf

#else

namespace ftgguf {
ggml_tensor * own_attention(ggml_context *, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *, ggml_tensor *, float,
                            float) {
    return nullptr;
}
}  // namespace ftgguf

#endif
