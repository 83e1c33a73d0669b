// Attention of few rows for head sizes that ggml's own operator takes one element at a time.
#pragma once

#include "ggml.h"

namespace ftgguf {

// ggml_flash_attn_ext's result [v_dim, heads, rows], or null where that should compute it: other types of K and V than
// float16, heads or rows at which it is fast, a processor without AVX-512, a ggml that adds in another order. Shapes:
// q float32 [k_dim, rows, heads], k [k_dim, cells, kv_heads], v [v_dim, cells, kv_heads], mask float16 [cells, rows],
// sinks float32 [heads] or null.
ggml_tensor * own_attention(ggml_context * ctx, ggml_tensor * q, ggml_tensor * k, ggml_tensor * v, ggml_tensor * mask,
                            ggml_tensor * sinks, float scale, float softcap);

}  // namespace ftgguf
