"""What a browser gets: a small chat page at `/`, or the files of `--path`; nothing with `--no-ui`."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from ftgguf.flags.config import HttpConfig

PAGE = Path(__file__).with_name("index.html")


class StaticPathError(ValueError):
    """`--path` names no folder."""


async def get_page(request: Request) -> Response:
    """Our page. It needs no key; what it asks for does."""
    return Response(PAGE.read_bytes(), media_type="text/html", headers={"cache-control": "no-cache"})


def add_ui(app: FastAPI, http: HttpConfig) -> None:
    """Add the pages behind all other routes. Raises `StaticPathError`."""
    if not http.ui:
        return
    if http.static_path:
        if not os.path.isdir(http.static_path):
            raise StaticPathError(f"static assets path not found: {http.static_path}")
        app.mount(http.api_prefix + "/", StaticFiles(directory=http.static_path, html=True))
        return
    for path in ("/", "/index.html"):
        app.add_api_route(
            http.api_prefix + path, get_page, methods=["GET", "HEAD"], include_in_schema=False, response_model=None
        )
