"""What one pull works with: the store, the client, who is told, and which hosts are allowed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field

from ftgguf.pull.client import Client, NetOptions, host_of, hub_endpoint
from ftgguf.pull.digest import Digest, GitOid
from ftgguf.pull.disk import SPACE_MARGIN
from ftgguf.pull.errors import NoSpace, Refused
from ftgguf.pull.foreign import hub_token
from ftgguf.pull.manifest import Layer
from ftgguf.pull.names import HubName, Name, OllamaName, UrlName
from ftgguf.pull.sizes import human
from ftgguf.pull.store import Store
from ftgguf.pull.transfer import Item, Transfer


@dataclass(frozen=True, slots=True)
class Event:
    """One line of progress, Ollama's `ProgressResponse`. Sizes in bytes; zero and empty mean absent."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


Report = Callable[[Event], None]
"""Called from the thread that pulls. It may raise to cancel: what was fetched is kept."""


def silent(_event: Event) -> None:
    """A report that nobody reads."""


@dataclass
class Session:
    """Close it, or use it as a context manager."""

    store: Store
    options: NetOptions = field(default_factory=NetOptions)
    report: Report = silent
    hf_token: str = ""
    """Empty: `HF_TOKEN`, else the token that the Hub's tools stored."""
    hosts: tuple[str, ...] | None = None
    """Hosts that may be asked (for pulls that come in over HTTP); None: any."""

    cancelled: Callable[[], bool] = lambda: False
    """Asked while the network is waited for; a report that raises cancels as well."""

    def __post_init__(self) -> None:
        self.client = Client(self.options)
        self.client.cancelled = self.cancelled
        self.client.notice = self.say

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def say(self, line: str) -> None:
        self.report(Event(line))

    @property
    def endpoint(self) -> str:
        return hub_endpoint()

    def token(self) -> str:
        return self.hf_token or os.environ.get("HF_TOKEN", "") or hub_token()

    def check_host(self, name: Name) -> None:
        """Raise Refused if `name` would be fetched from a host that is not on the list."""
        if self.hosts is None:
            return
        if isinstance(name, HubName):
            host = "hf.co" if self.endpoint == "https://huggingface.co" else host_of(self.endpoint)
        elif isinstance(name, OllamaName):
            host = name.host
        elif isinstance(name, UrlName):
            host = host_of(name.url)
        else:
            return
        if host.lower() not in (allowed.lower() for allowed in self.hosts):
            raise Refused(f"pulling from {host} is not allowed here: --pull-hosts lists the hosts that are")

    def check_space(self, layers: tuple[Layer, ...], what: str) -> None:
        """Raise NoSpace unless the disk can hold what is missing of `layers`, less what earlier tries brought."""
        missing = 0
        for layer in layers:
            if self.store.find_blob(layer.digest, layer.size) is None:
                missing += layer.size - self.store.partial_progress(layer.digest.file_name)[0]
        free = shutil.disk_usage(self.store.folder("blobs")).free
        if missing and free < missing + SPACE_MARGIN:
            raise NoSpace(
                f"{what} needs {human(missing)} more and {human(max(0, free - SPACE_MARGIN))} are free: free some "
                "space, or use --store DIR on another disk"
            )

    def fetch(self, url: str, check: Digest | GitOid | None, size: int | None, label: str = "") -> tuple[Digest, int]:
        """Bring one file into the store, unless it is on this disk: its digest and size.

        One download when several ask: others wait and see its progress.
        """
        digest = check if isinstance(check, Digest) else None
        shown = digest.short if digest is not None else label
        status = f"pulling {shown}"

        def progress(completed: int, total: int) -> None:
            self.report(Event(status, str(digest or ""), total, completed))

        def known() -> tuple[Digest, int] | None:
            path = self.store.find_blob(digest, size) if digest is not None else None
            return (digest, path.stat().st_size) if digest is not None and path is not None else None

        key = digest.file_name if digest is not None else f"other-{Digest.of(f'{check}{url}'.encode()).hex}"
        found = known()
        if found is None:
            with self.store.locked(key, lambda: progress(*self.store.partial_progress(key))):
                found = known()  # another may have brought it while we waited
                if found is None:
                    item = Item(url, label or f"sha256:{shown}", size, check)
                    transfer = Transfer(self.client, item, self.store.folder("partial"), key, progress)
                    found = transfer.run()
                    self.store.adopt(transfer.partial, found[0])
        progress(found[1], found[1])
        return found
