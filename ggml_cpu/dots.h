// Products of a quantised weight row with a rounded input row, for processors with AVX-512 VNNI.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ggml.h"

namespace ftgguf {

// Rows of input that one reading of a weight row may be multiplied with.
constexpr int kDotRows = 4;

// The same integers as ggml's product of the type (inputs are rounded by ggml, then laid out for these loops); sums of
// floats in another order, which is the same however many inputs there are.
struct OwnDot {
    ggml_type type;
    int64_t group;        // input values that are laid out together; a row's last group may be shorter
    size_t group_bytes;   // of them, laid out: a multiple of 64
    // `values` values that ggml rounded (a multiple of its block, one group at most) into `out`, 64 bytes aligned.
    void (*lay_out)(const uint8_t * rounded, int64_t values, uint8_t * out);
    // dots[n - 1] sets out[i] to the product with inputs[i], for n of them. `ahead`: bytes from `weights` to those that will
    // be read next but one, asked for on the way; 0 for none.
    void (*dots[kDotRows])(int64_t values, const uint8_t * weights, const uint8_t * const * inputs, size_t ahead, float * out);
};

// The product for weights of `type`, or null where this processor or the type has none.
const OwnDot * own_dot(ggml_type type);

}  // namespace ftgguf
