"""Router mode's models as the management routes see them: catalog and pool together."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor

from ftgguf.flags import FlagError
from ftgguf.pull.catalog import LocalModel
from ftgguf.pull.errors import NameResolutionError
from ftgguf.server.errors import server_error
from ftgguf.server.models import Running, running_model
from ftgguf.server.models_catalog import Catalog, Source
from ftgguf.server.models_pool import Pool

log = logging.getLogger("ftgguf.server")


class RouterHost:
    """A `ModelHost`, and always ready for the gate."""

    state = "ready"
    failure = ""

    def __init__(self, catalog: Catalog, pool: Pool) -> None:
        self.catalog = catalog
        self.pool = pool
        self._thread = ThreadPoolExecutor(1, "catalog")

    async def reload(self) -> None:
        """Look at the disk again. Raises ApiError."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.catalog.reload)
        except (FlagError, NameResolutionError, OSError) as error:
            raise server_error(str(error).removeprefix("error: ")) from None
        self.pool.publish("models_reload", "")

    async def find_source(self, name: str) -> Source | None:
        """A model by the name in a request; the disk is looked at again for one that is not known."""
        await self.refresh()
        found = self.catalog.find(name)
        if found is None and self.catalog.stale():
            await self.reload()
            found = self.catalog.find(name)
        return found

    async def refresh(self) -> None:
        """Look at the disk again if the store was changed through this server."""
        if self.catalog.outdated:
            await self.reload()

    def running(self) -> list[Running]:
        models = []
        for each in self.pool.loaded():
            if each.started is not None and each.ready:
                models.append(running_model(each.name, each.source.local, each.started.state, each.expires()))
        return models

    def own(self) -> list[LocalModel]:
        sources = [source for source in self.catalog.sources() if source.kind != "cache"]
        return [source.local for source in sources if source.local is not None]

    def find(self, name: str) -> LocalModel | None:
        found = self.catalog.find(name)
        return found.local if found is not None else None

    async def unload(self, name: str) -> bool:
        found = self.catalog.find(name)
        return await self.pool.unload(found.name) if found is not None else False

    def changed(self) -> None:
        self.catalog.outdated = True

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
