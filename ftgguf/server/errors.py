"""llama-server's error object: `{"error": {"code", "message", "type", ...}}` and the exceptions that carry it.

The table of types and HTTP statuses is llama-server's (`format_error_response`); everything a handler raises ends as
one of these objects, never as FastAPI's own 422 or plain text.
"""

from __future__ import annotations

from typing import Any

STATUS = {
    "invalid_request_error": 400,
    "exceed_context_size_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "server_error": 500,
    "not_supported_error": 501,
    "unavailable_error": 503,
}


class ApiError(Exception):
    """An error that a client sees: `type` is a key of `STATUS`, `extra` joins the object after the three fields."""

    def __init__(self, message: str, type: str = "invalid_request_error", code: int = 0, **extra: Any) -> None:
        super().__init__(message)
        self.message = message
        self.type = type
        self.code = code or STATUS.get(type, 500)
        self.extra = extra

    def object(self) -> dict[str, Any]:
        """The value of `error` (llama-server's key order: code, message, type, then extras)."""
        return {"code": self.code, "message": self.message, "type": self.type, **self.extra}

    def document(self) -> dict[str, Any]:
        return {"error": self.object()}


class InvalidRequest(ApiError):
    """400: the request is wrong."""


def server_error(message: str) -> ApiError:
    return ApiError(message, "server_error")


def not_supported(message: str) -> ApiError:
    return ApiError(message, "not_supported_error")


def unavailable(message: str) -> ApiError:
    return ApiError(message, "unavailable_error")


def exceeds_context(n_prompt: int, n_ctx: int) -> ApiError:
    """llama-server's 400 for a prompt that does not fit; clients read the two numbers."""
    return ApiError(
        f"request ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it",
        "exceed_context_size_error",
        n_prompt_tokens=n_prompt,
        n_ctx=n_ctx,
    )


NOT_FOUND = {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}}
"""Unknown path or wrong method; this one has its own key order in llama-server."""

FEATURE_DISABLED = {"error": {"message": "this feature is disabled", "type": "feature_disabled"}}
"""403 of `/tools` and `/cors-proxy` (no code field in llama-server)."""
