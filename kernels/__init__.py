"""Triton kernels on GGUF blocks (installed as `ftgguf.kernels`).

What a forward pass calls:

- `linear`: `linear`, `linear_many`, `ExpertBatch`, `expert_gate_up`, `expert_down` (products of `matrix`'s weights)
- `norm`: `norm` (with residual, experts' sum and quantisation fused), `combine`
- `rope`: `qk_norm_rope_write`, `Rope`, `rope_frequencies`; `kvcache`: `make_cache`
- `attention`: `attention_decode`, `attention_prefill`, `prefill_tiles`, `AttentionSpec`
- `router`: `route`; `act`: `glu`; `rows`: `get_rows`, `dequantize`; `sample`: `prefilter`
- `residency`: the expert cache's kernel; `offline`: compile without a device

Importing this package imports nothing; its modules need torch and triton. Under TRITON_INTERPRET=1 (set before the
first of them is imported) everything runs on CPU tensors.
"""
