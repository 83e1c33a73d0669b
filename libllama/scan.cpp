#include "scan.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

// One binary for every x86-64: the loader picks the widest version that the machine has.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FTGGUF_WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FTGGUF_WIDE
#endif

namespace ftgguf {

namespace {

constexpr float INF = std::numeric_limits<float>::infinity();

// Explicit vectors (GCC and Clang), since a compiler may not reorder maxima and sums of floats by itself. Sixteen lanes
// are one AVX-512 register, two of AVX2, four of SSE and NEON.
constexpr std::size_t LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef std::int32_t Ints __attribute__((vector_size(4 * LANES)));

#define FTGGUF_LOAD(from) ({ Floats loaded; std::memcpy(&loaded, from, sizeof loaded); loaded; })

// A chunk is SCAN_BLOCK vectors; each of its lanes is one block, so that no maximum across lanes is taken.
constexpr std::size_t CHUNK = SCAN_BLOCK * LANES;

FTGGUF_WIDE void block_maxima(const float *logits, std::size_t chunks, float *maxima, std::uint32_t *odd) {
    Ints strange = {};
    for (std::size_t c = 0; c < chunks; ++c) {
        Floats best = FTGGUF_LOAD(logits + c * CHUNK);
        strange |= ~(best < INF);
        for (std::size_t i = LANES; i < CHUNK; i += LANES) {
            const Floats x = FTGGUF_LOAD(logits + c * CHUNK + i);
            strange |= ~(x < INF);
            best = x > best ? x : best;
        }
        std::memcpy(maxima + c * LANES, &best, sizeof best);
    }
    for (std::size_t l = 0; l < LANES; ++l) *odd |= std::uint32_t(strange[l]);
}

// e^x for x <= 0: 2^i * e^f with i whole and |f| <= ln(2)/2, where seven terms of e^f's Taylor series leave 1.2e-7.
// ln(2) is subtracted in two parts, the first exact in few bits, so that f keeps its precision.
FTGGUF_WIDE double block_sums(const float *logits, std::size_t blocks, float best) {
    double sum = 0;
    for (std::size_t b = 0; b < blocks; ++b) {
        Floats part = {};
        for (std::size_t i = 0; i < SCAN_BLOCK; i += LANES) {
            const Floats below = FTGGUF_LOAD(logits + b * SCAN_BLOCK + i) - best;
            const Ints tiny = below < -87.0f;
            const Floats x = tiny ? Floats{} - 87.0f : below;
            const Ints whole = __builtin_convertvector(x * 1.44269504f - 0.5f, Ints);
            const Floats w = __builtin_convertvector(whole, Floats);
            const Floats f = (x - w * 0.693359375f) + w * 2.12194440e-4f;
            Floats e = f * (1.0f / 720) + 1.0f / 120;
            e = e * f + 1.0f / 24;
            e = e * f + 1.0f / 6;
            e = e * f + 0.5f;
            e = e * f + 1.0f;
            e = e * f + 1.0f;
            const Ints bits = (whole + 127) << 23;
            Floats power;
            std::memcpy(&power, &bits, sizeof power);
            part += tiny ? Floats{} : e * power;
        }
        for (std::size_t l = 0; l < LANES; ++l) sum += double(part[l]);
    }
    return sum;
}

// Whether any of SCAN_BLOCK logits is larger than `bound`.
FTGGUF_WIDE bool any_above(const float *logits, float bound) {
    Ints above = {};
    for (std::size_t i = 0; i < SCAN_BLOCK; i += LANES) above |= FTGGUF_LOAD(logits + i) > bound;
    std::uint64_t parts[LANES / 2];
    std::memcpy(parts, &above, sizeof parts);
    std::uint64_t any = 0;
    for (const std::uint64_t part : parts) any |= part;
    return any != 0;
}

}  // namespace

Scan scan(const float *logits, std::size_t n) {
    const std::size_t chunks = n / CHUNK, rest = n - chunks * CHUNK;
    Scan result{std::vector<float>(chunks * LANES + (rest + SCAN_BLOCK - 1) / SCAN_BLOCK, -INF), -INF, true};
    std::uint32_t odd = 0;
    block_maxima(logits, chunks, result.block_max.data(), &odd);
    for (std::size_t i = 0; i < rest; ++i) {
        const float x = logits[chunks * CHUNK + i];
        float &best = result.block_max[chunks * LANES + i / SCAN_BLOCK];
        odd |= x < INF ? 0u : 1u;
        best = x > best ? x : best;
    }
    for (const float best : result.block_max) result.best = best > result.best ? best : result.best;
    result.numbers = odd == 0;
    return result;
}

float bound_for(const Scan &scan, std::size_t want) {
    if (want == 0) return INF;
    if (want > scan.block_max.size()) return -INF;
    std::vector<float> maxima = scan.block_max;
    std::nth_element(maxima.begin(), maxima.begin() + std::ptrdiff_t(want - 1), maxima.end(), std::greater<float>());
    return maxima[want - 1];
}

void collect(const float *logits, std::size_t n, const Scan &scan, float bound,
             std::vector<std::pair<float, std::int32_t>> &out) {
    const std::size_t chunks = n / CHUNK;
    for (std::size_t b = 0; b < scan.block_max.size(); ++b) {
        if (scan.block_max[b] < bound) continue;
        const bool lane = b < chunks * LANES;
        const std::size_t behind = chunks * CHUNK + (b - chunks * LANES) * SCAN_BLOCK;
        const std::size_t first = lane ? b / LANES * CHUNK + b % LANES : behind;
        const std::size_t step = lane ? LANES : 1;
        for (std::size_t j = 0, i = first; j < SCAN_BLOCK && i < n; ++j, i += step) {
            if (logits[i] >= bound) out.emplace_back(logits[i], std::int32_t(i));
        }
    }
}

bool collect_rising(const float *logits, std::size_t n, const Scan &scan, std::size_t k,
                    const std::vector<std::int32_t> &skip, std::size_t limit, std::vector<std::int32_t> &out) {
    std::vector<float> heap;  // the k largest so far, the smallest in front
    heap.reserve(k + 1);
    const std::size_t most = out.size() + limit;
    float bound = -INF;
    for (std::size_t chunk = 0; chunk < n; chunk += CHUNK) {
        const bool whole = n - chunk >= CHUNK;
        const float *maxima = scan.block_max.data() + chunk / SCAN_BLOCK;
        if (whole && !(*std::max_element(maxima, maxima + LANES) > bound)) continue;
        const std::size_t end = std::min(n, chunk + CHUNK);
        for (std::size_t block = chunk; block < end; block += SCAN_BLOCK) {
            const std::size_t stop = std::min(end, block + SCAN_BLOCK);
            if (stop - block == SCAN_BLOCK && !any_above(logits + block, bound)) continue;
            for (std::size_t i = block; i < stop; ++i) {
                if (!(logits[i] > bound)) continue;
                if (std::binary_search(skip.begin(), skip.end(), std::int32_t(i))) continue;
                if (out.size() == most) return false;
                out.push_back(std::int32_t(i));
                heap.push_back(logits[i]);
                std::push_heap(heap.begin(), heap.end(), std::greater<float>());
                if (heap.size() > k) {
                    std::pop_heap(heap.begin(), heap.end(), std::greater<float>());
                    heap.pop_back();
                }
                if (heap.size() == k) bound = heap.front();
            }
        }
    }
    return true;
}

double sum_exp(const float *logits, std::size_t n, float best) {
    const std::size_t whole = n / SCAN_BLOCK;
    double sum = block_sums(logits, whole, best);
    for (std::size_t i = whole * SCAN_BLOCK; i < n; ++i) sum += std::exp(double(logits[i]) - double(best));
    return sum;
}

}  // namespace ftgguf
