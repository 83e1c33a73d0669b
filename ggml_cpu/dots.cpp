// Dot products with AVX-512 VNNI: whole blocks in registers, one fused multiply-add of floats for 64 integer products.
//
// ggml's products of these types take twice the instructions, so that fewer bytes are on their way from memory at once.
// Weights are unpacked once for up to four rows of input.
// Layouts of blocks: the GGUF types' definitions (q4_K, q6_K, mxfp4; inputs in q8_K and q8_0).
#include "dots.h"

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
// GCC 12 warns of its own intrinsics, whose don't-care operands it leaves unset on purpose.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

namespace ftgguf {

#define VNNI __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,f16c,fma")))
#define VNNI_INLINE_MEMBER VNNI __attribute__((always_inline)) inline
#define VNNI_INLINE static VNNI_INLINE_MEMBER

VNNI_INLINE float half_at(const uint8_t * p) {
    uint16_t h;
    std::memcpy(&h, p, 2);
    return _cvtsh_ss(h);
}

VNNI_INLINE void ask_for(const uint8_t * from, size_t bytes, size_t ahead) {
    if (ahead == 0) return;
    for (size_t at = 0; at < bytes; at += 64) _mm_prefetch(reinterpret_cast<const char *>(from + ahead + at), _MM_HINT_T0);
}

VNNI_INLINE __m512 times(__m512i products, __m512 scale, __m512 sum) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), scale, sum);
}

// R rows of laid-out inputs on their way through a weight row, and their sums.
template <int R, class Inputs>
struct Rows {
    const Inputs * x[R];
    __m512 sum[R];
    VNNI_INLINE_MEMBER explicit Rows(const uint8_t * const * inputs) {
        for (int r = 0; r < R; r++) {
            x[r] = reinterpret_cast<const Inputs *>(inputs[r]);
            sum[r] = _mm512_setzero_ps();
        }
    }
    VNNI_INLINE_MEMBER void next() {
        for (int r = 0; r < R; r++) x[r]++;
    }
    VNNI_INLINE_MEMBER void store(float * out) const {
        for (int r = 0; r < R; r++) out[r] = _mm512_reduce_add_ps(sum[r]);
    }
};

// ---------------------------------------------------------------------------------------------------- 256 a block

// A block of 256 inputs: their scale, and what the blocks' offsets are multiplied with.
struct Inputs256 {
    int8_t q[256];
    float sums[16];
    float d;
    float unused[15];
};
static_assert(sizeof(Inputs256) == 384);

// Where the scales of the four registers of a block's weights (64 each) are among its 16.
struct Scales256 {
    __m512i of[4];
    VNNI_INLINE_MEMBER Scales256(__m512i first, int second, int third) {
        const int steps[4] = {0, second, third, second + third};
        for (int i = 0; i < 4; i++) of[i] = _mm512_add_epi32(first, _mm512_set1_epi32(steps[i]));
    }
};

// A block's products with R rows of inputs, added to their sums. `scale` has the weights' 16 scales or offsets.
template <int R>
VNNI_INLINE void add_block(const Scales256 & scales, const __m512i * weights, __m512 scale, Rows<R, Inputs256> & rows) {
    __m512 s[4];
    for (int i = 0; i < 4; i++) s[i] = _mm512_permutexvar_ps(scales.of[i], scale);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        __m512 block = _mm512_mul_ps(scale, _mm512_load_ps(rows.x[r]->sums));
        for (int i = 0; i < 4; i++) {
            block = times(_mm512_dpbusd_epi32(_mm512_setzero_si512(), weights[i], _mm512_load_si512(rows.x[r]->q + 64 * i)), s[i], block);
        }
        rows.sum[r] = _mm512_fmadd_ps(block, _mm512_set1_ps(rows.x[r]->d), rows.sum[r]);
    }
}

// A q8_K block: float d, int8 [256], int16 sums of 16.
constexpr size_t kQ8KSums = 4 + 256;

static void lay_out_q6(const uint8_t * rounded, int64_t, uint8_t * out) {
    auto & to = *reinterpret_cast<Inputs256 *>(out);
    int16_t sums[16];
    std::memcpy(&to.d, rounded, 4);
    std::memcpy(to.q, rounded + 4, 256);
    std::memcpy(sums, rounded + kQ8KSums, sizeof sums);
    for (int i = 0; i < 16; i++) to.sums[i] = -32.0f * sums[i];  // weights are stored with 32 added
}

// Runs of 32 in the order in which two registers of nibbles hold them.
static void lay_out_q4(const uint8_t * rounded, int64_t, uint8_t * out) {
    static const int order[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    auto & to = *reinterpret_cast<Inputs256 *>(out);
    int16_t sums[16];
    std::memcpy(&to.d, rounded, 4);
    std::memcpy(sums, rounded + kQ8KSums, sizeof sums);
    for (int i = 0; i < 8; i++) {
        std::memcpy(to.q + 32 * i, rounded + 4 + 32 * order[i], 32);
        to.sums[i] = 0;
        to.sums[8 + i] = -(static_cast<float>(sums[2 * i]) + sums[2 * i + 1]);  // minima are subtracted
    }
}

// q4_K, 144 bytes: half d, half dmin, 8 scales and 8 minima of 6 bits in 12 bytes, nibbles.
template <int R>
VNNI static void dots_q4(int64_t values, const uint8_t * w, const uint8_t * const * inputs, size_t ahead, float * out) {
    const __m512i low = _mm512_set1_epi8(15);
    const Scales256 scales(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2), 1, 4);
    Rows<R, Inputs256> rows(inputs);
    for (const auto * end = w + values / 256 * 144; w < end; w += 144) {
        ask_for(w, 144, ahead);
        uint32_t s0, s1, s2;
        std::memcpy(&s0, w + 4, 4);
        std::memcpy(&s1, w + 8, 4);
        std::memcpy(&s2, w + 12, 4);
        const __m128i six = _mm_setr_epi32(s0 & 0x3f3f3f3f, (s2 & 0x0f0f0f0f) | ((s0 >> 2) & 0x30303030), s1 & 0x3f3f3f3f,
                                           ((s2 >> 4) & 0x0f0f0f0f) | ((s1 >> 2) & 0x30303030));
        const __m512 d = _mm512_insertf32x8(_mm512_set1_ps(half_at(w)), _mm256_set1_ps(half_at(w + 2)), 1);
        const __m512 scale = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(six)), d);
        const __m512i a = _mm512_loadu_si512(w + 16), b = _mm512_loadu_si512(w + 80);
        const __m512i a_high = _mm512_and_si512(_mm512_srli_epi16(a, 4), low);
        const __m512i b_high = _mm512_and_si512(_mm512_srli_epi16(b, 4), low);
        const __m512i weights[4] = {_mm512_and_si512(a, low), a_high, _mm512_and_si512(b, low), b_high};
        add_block(scales, weights, scale, rows);
        rows.next();
    }
    rows.store(out);
}

// q6_K, 210 bytes: low nibbles [128], two high bits [64], int8 scales [16], half d.
template <int R>
VNNI static void dots_q6(int64_t values, const uint8_t * w, const uint8_t * const * inputs, size_t ahead, float * out) {
    const __m512i low = _mm512_set1_epi8(15), high = _mm512_set1_epi8(0x30);
    const Scales256 scales(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), 4, 8);
    // Bits 2 i and 2 i + 1 of a byte belong to the i-th run of 32: moved to bits 4 and 5, whatever comes from the byte
    // beside it is masked out.
    const __m512i left = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    const __m512i right = _mm512_inserti64x4(_mm512_set1_epi16(0), _mm256_set1_epi16(2), 1);
    Rows<R, Inputs256> rows(inputs);
    for (const auto * end = w + values / 256 * 210; w < end; w += 210) {
        ask_for(w, 210, ahead);
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(w + 192));
        const __m512 scale = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), _mm512_set1_ps(half_at(w + 208)));
        const __m512i a = _mm512_loadu_si512(w), b = _mm512_loadu_si512(w + 64);
        const __m512i c = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + 128)));
        const __m512i e = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + 160)));
        auto both = [&](__m512i nibbles, __m512i bits) __attribute__((target("avx512f,avx512bw"), always_inline)) {
            return _mm512_or_si512(_mm512_and_si512(nibbles, low), _mm512_and_si512(bits, high));
        };
        const __m512i weights[4] = {
            both(a, _mm512_sllv_epi16(c, left)), both(_mm512_srli_epi16(a, 4), _mm512_srlv_epi16(c, right)),
            both(b, _mm512_sllv_epi16(e, left)), both(_mm512_srli_epi16(b, 4), _mm512_srlv_epi16(e, right))};
        add_block(scales, weights, scale, rows);
        rows.next();
    }
    rows.store(out);
}

// ----------------------------------------------------------------------------------------------------- 32 a block

// Four blocks of 32 inputs: first halves, second halves, and what the offset of the weights adds to each sum of 4.
struct Inputs128 {
    int8_t first[64], second[64];
    int32_t offset[16];
    float d[4];
    float unused[12];
};
static_assert(sizeof(Inputs128) == 256);

constexpr size_t kQ80 = 34;    // half d, int8 [32]
constexpr size_t kMxfp4 = 17;  // exponent, nibbles of two halves
constexpr int kMost = 12;      // mxfp4's values are -12 .. 12 (doubled): unsigned with this added

static void lay_out_mxfp4(const uint8_t * rounded, int64_t values, uint8_t * out) {
    auto & to = *reinterpret_cast<Inputs128 *>(out);
    std::memset(&to, 0, sizeof to);
    for (int b = 0; b < values / 32; b++) {
        const uint8_t * from = rounded + b * kQ80;
        ggml_fp16_t d;
        std::memcpy(&d, from, 2);
        to.d[b] = ggml_fp16_to_fp32(d);
        std::memcpy(to.first + 16 * b, from + 2, 16);
        std::memcpy(to.second + 16 * b, from + 18, 16);
    }
    for (int i = 0; i < 64; i++) to.offset[i / 4] -= kMost * (to.first[i] + to.second[i]);
}

// Four blocks at a time; past the end of a row its last block stands in, with inputs of 0.
template <int R>
VNNI static void dots_mxfp4(int64_t values, const uint8_t * w, const uint8_t * const * inputs, size_t ahead, float * out) {
    const __m512i table = _mm512_broadcast_i32x4(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
    const __m512i low = _mm512_set1_epi8(15);
    const __m512i spread = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const int64_t blocks = values / 32;
    Rows<R, Inputs128> rows(inputs);
    for (int64_t b = 0; b < blocks; b += 4) {
        const uint8_t * at[4];
        for (int i = 0; i < 4; i++) at[i] = w + (b + i < blocks ? b + i : blocks - 1) * kMxfp4;
        ask_for(w + b * kMxfp4, 4 * kMxfp4, ahead);
        auto nibbles = [](const uint8_t * p) { return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 1)); };
        __m512i q = _mm512_castsi128_si512(nibbles(at[0]));
        q = _mm512_inserti32x4(q, nibbles(at[1]), 1);
        q = _mm512_inserti32x4(q, nibbles(at[2]), 2);
        q = _mm512_inserti32x4(q, nibbles(at[3]), 3);
        // 2^(e - 128), the half of 2^(e - 127) because the values are doubled; the two smallest are subnormal
        const __m128i e = _mm_setr_epi32(at[0][0], at[1][0], at[2][0], at[3][0]);
        const __m128i normal = _mm_slli_epi32(_mm_sub_epi32(e, _mm_set1_epi32(1)), 23);
        const __m128i small = _mm_sllv_epi32(_mm_set1_epi32(0x00200000), e);
        const __m128i power = _mm_mask_mov_epi32(normal, _mm_cmplt_epi32_mask(e, _mm_set1_epi32(2)), small);
        const __m512i first = _mm512_shuffle_epi8(table, _mm512_and_si512(q, low));
        const __m512i second = _mm512_shuffle_epi8(table, _mm512_and_si512(_mm512_srli_epi16(q, 4), low));
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const __m128 scale = _mm_mul_ps(_mm_castsi128_ps(power), _mm_load_ps(rows.x[r]->d));
            __m512i products = _mm512_dpbusd_epi32(_mm512_load_si512(rows.x[r]->offset), first, _mm512_load_si512(rows.x[r]->first));
            products = _mm512_dpbusd_epi32(products, second, _mm512_load_si512(rows.x[r]->second));
            rows.sum[r] = times(products, _mm512_permutexvar_ps(spread, _mm512_castps128_ps512(scale)), rows.sum[r]);
        }
        rows.next();
    }
    rows.store(out);
}

const OwnDot * own_dot(ggml_type type) {
    static const OwnDot dots[] = {
        {GGML_TYPE_Q4_K, 256, sizeof(Inputs256), lay_out_q4, {dots_q4<1>, dots_q4<2>, dots_q4<3>, dots_q4<4>}},
        {GGML_TYPE_Q6_K, 256, sizeof(Inputs256), lay_out_q6, {dots_q6<1>, dots_q6<2>, dots_q6<3>, dots_q6<4>}},
        {GGML_TYPE_MXFP4, 128, sizeof(Inputs128), lay_out_mxfp4, {dots_mxfp4<1>, dots_mxfp4<2>, dots_mxfp4<3>, dots_mxfp4<4>}},
    };
    static const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                            __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
    if (!can) return nullptr;
    for (auto & dot : dots) {
        if (dot.type == type) return &dot;
    }
    return nullptr;
}

}  // namespace ftgguf

#else

namespace ftgguf {
const OwnDot * own_dot(ggml_type) { return nullptr; }
}  // namespace ftgguf

#endif
