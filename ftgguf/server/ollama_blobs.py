"""/api/blobs/{digest}: whether content is here, and bringing it, for /api/create with `files`."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from pathlib import Path
from typing import IO

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from ftgguf.pull.digest import Digest
from ftgguf.pull.disk import SPACE_MARGIN
from ftgguf.pull.errors import NameResolutionError, NoSpace
from ftgguf.server.errors import InvalidRequest
from ftgguf.server.ollama_guard import check_may_change
from ftgguf.server.ollama_jobs import api_error, manager_of
from ftgguf.server.wire import random_id


def _digest(request: Request) -> Digest:
    try:
        return Digest.parse(request.path_params["digest"])
    except NameResolutionError as error:
        raise InvalidRequest(str(error)) from None


async def head_blob(request: Request) -> Response:
    manager, digest = manager_of(request), _digest(request)
    found = await manager.run(lambda: manager.store().find_blob(digest))
    return Response(status_code=200 if found is not None else 404)


async def post_blob(request: Request) -> Response:
    """201 once the bytes are stored and are those that the digest names; 200 if they were here already."""
    manager, digest = manager_of(request), _digest(request)
    check_may_change(request, manager.config)
    store = manager.store()
    if await manager.run(lambda: store.find_blob(digest)) is not None:
        return Response(status_code=200)
    partial: Path = await manager.run(lambda: store.folder("partial") / f"upload-{random_id()}")
    hasher, size = hashlib.sha256(), 0
    free = shutil.disk_usage(partial.parent).free - SPACE_MARGIN
    try:
        file: IO[bytes] = await manager.run(lambda: partial.open("wb"))
        with file:
            async for chunk in request.stream():
                size += len(chunk)
                if size > free:
                    raise api_error(NoSpace("the disk cannot hold this file: free some space"))

                def write(chunk: bytes = chunk) -> None:
                    file.write(chunk)
                    hasher.update(chunk)

                await manager.run(write)
        if hasher.hexdigest() != digest.hex:
            raise InvalidRequest(f"the bytes are not those of {digest.short}: sent were sha256:{hasher.hexdigest()}")
        await manager.run(lambda: store.adopt(partial, digest))
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return Response(status_code=201)


def add_blobs(app: FastAPI, prefix: str) -> None:
    path = prefix + "/api/blobs/{digest}"
    app.add_api_route(path, head_blob, methods=["HEAD"], response_model=None, operation_id="head_blob")
    app.add_api_route(path, post_blob, methods=["POST"], response_model=None, operation_id="post_blob")
