"""`/metrics`: llama-server's Prometheus names, types and help texts, and our own with the prefix `ftgguf_`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ftgguf.server.errors import not_supported
from ftgguf.server.state import state_of

TABLE: tuple[tuple[str, str, str], ...] = (
    ("prompt_tokens_total", "counter", "Number of prompt tokens processed, excluding cached tokens"),
    ("prompt_tokens_cached_total", "counter", "Number of prompt tokens reused from the cache"),
    ("prompt_seconds_total", "counter", "Total time spent processing prompts"),
    ("tokens_predicted_total", "counter", "Number of generation tokens processed"),
    ("tokens_predicted_seconds_total", "counter", "Total time spent generating tokens"),
    (
        "n_decode_total",
        "counter",
        "Total number of llama_decode() calls, excluding speculative decoding and multimodal decoding",
    ),
    ("n_tokens_max", "counter", "Largest observed sequence length (prompt + generation)"),
    ("spec_decode_num_draft_tokens_total", "counter", "Speculative: Total draft tokens generated"),
    (
        "spec_decode_num_accepted_tokens_total",
        "counter",
        "Speculative: Total draft tokens accepted by the target model",
    ),
    ("spec_decode_num_drafts_total", "counter", "Speculative: Total speculative decoding verification steps"),
    ("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s"),
    ("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s"),
    ("requests_processing", "gauge", "Number of requests processing"),
    ("requests_deferred", "gauge", "Number of requests deferred"),
    ("n_busy_slots_per_decode", "gauge", "Average number of busy slots per llama_decode() call"),
)
"""Name without prefix, type, help."""


def render(values: dict[str, float]) -> str:
    """The exposition text of the engine's `values` (llama-server's names without prefix; others become ours)."""
    lines: list[str] = []
    known = {name for name, _, _ in TABLE}
    rows = [("llamacpp:" + name, kind, text, values.get(name, 0)) for name, kind, text in TABLE]
    for name, value in values.items():
        if name not in known and isinstance(value, int | float):
            kind = "counter" if name.endswith("_total") else "gauge"
            rows.append(("ftgguf_" + name, kind, name.removesuffix("_total").replace("_", " "), value))
    for name, kind, text, value in rows:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {_number(value)}"]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6g}"


async def get_metrics(request: Request) -> Response:
    state = state_of(request)
    if not state.config.http.metrics:
        raise not_supported("This server does not support metrics endpoint. Start it with `--metrics`")
    values = await state.engine.metrics()
    response = Response(render({**values, "engine_restarts_total": state.engine.restarts}))
    response.headers["content-type"] = "text/plain; version=0.0.4"
    response.headers["process-start-time-unix"] = str(state.started_at)
    return response
