"""Assignments -> ServerConfig: defaults, derived values with their reasons, and checks between flags.

An explicit flag beats a derived value. Every derivation that changes what a user would expect leaves a line in
`ServerConfig.reasons`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from ftgguf.engine.messages import SamplingParams
from ftgguf.flags import config as c
from ftgguf.flags.errors import FlagError
from ftgguf.flags.machine import Machine, read_machine
from ftgguf.flags.parse import Parsed
from ftgguf.flags.row import UNSET
from ftgguf.flags.special import unescape

AUTO_SLOTS = 4
"""llama-server's slots when `--parallel` is auto."""
MAX_SLOTS = 256
"""llama.cpp's LLAMA_MAX_SEQ."""

T = TypeVar("T")
_KWARGS = "chat.template_kwargs."


class Settings:
    """Field values by dotted path, and what to say about them."""

    def __init__(self, parsed: Parsed) -> None:
        self.values: dict[str, Any] = {}
        self.kwargs = dict(c.ChatConfig().template_kwargs)
        self.reasons = list(parsed.reasons)
        self.warnings = list(parsed.warnings)
        for path, value, mode in parsed.assignments:
            if path.startswith(_KWARGS):
                self._keyword(path.removeprefix(_KWARGS), value)
            elif mode == "append":
                self.values[path] = (*self.values.get(path, ()), *value)
            else:
                self.values[path] = value
        self.given = frozenset(path for path in self.values if not path.startswith("legacy.")) | (
            {"chat.template_kwargs"} if any(a.path.startswith(_KWARGS) for a in parsed.assignments) else frozenset()
        )

    def _keyword(self, key: str, value: Any) -> None:
        if value is UNSET:
            self.kwargs.pop(key, None)
        else:
            self.kwargs[key] = value

    def get(self, path: str, default: Any = None) -> Any:
        """The value set so far."""
        return self.values.get(path, default)

    def derive(self, path: str, value: Any, why: str = "") -> None:
        """Set a field that was derived, saying why."""
        self.values[path] = value
        if why:
            self.reasons.append(why)

    def build(self, prefix: str, cls: Callable[..., T]) -> T:
        """The group `prefix` as `cls`, fields below it only."""
        start = prefix + "."
        own = {p.removeprefix(start): value for p, value in self.values.items() if p.startswith(start)}
        return cls(**{name: value for name, value in own.items() if "." not in name})


def resolve(parsed: Parsed, machine: Machine | None = None) -> c.ServerConfig:
    """The configuration. `machine` is read from the system unless given. Raises FlagError."""
    settings = Settings(parsed)
    _model(settings)
    _load_mode(settings)
    _slots(settings)
    _batch(settings)
    _threads(settings, machine or read_machine())
    _texts(settings)
    _http(settings)
    return _assemble(settings)


def _assemble(s: Settings) -> c.ServerConfig:
    s.values["chat.template_kwargs"] = s.kwargs
    maps = {f"ngram_{kind}": s.build(f"spec.ngram_{kind}", c.NgramMap) for kind in ("simple", "map_k", "map_k4v")}
    spec = dataclasses.replace(
        s.build("spec", c.SpecConfig),
        types=tuple(dict.fromkeys(s.get("spec.types", ()))),
        ngram_mod=s.build("spec.ngram_mod", c.NgramMod),
        draft=s.build("spec.draft", c.DraftConfig),
        **maps,
    )
    return c.ServerConfig(
        model=s.build("model", c.ModelConfig),
        placement=s.build("placement", c.PlacementConfig),
        context=s.build("context", c.ContextConfig),
        cpu=s.build("cpu", c.CpuConfig),
        sampling=s.build("sampling", SamplingParams),
        chat=s.build("chat", c.ChatConfig),
        http=s.build("http", c.HttpConfig),
        log=s.build("log", c.LogConfig),
        spec=spec,
        given=s.given,
        reasons=tuple(s.reasons),
        warnings=tuple(s.warnings),
    )


def _model(s: Settings) -> None:
    for path in ("model.aliases", "model.tags"):
        if path in s.values:
            s.values[path] = tuple(sorted(set(s.values[path])))
    if s.get("model.hf_file") and not s.get("model.hf_repo"):
        raise FlagError("error: --hf-file needs --hf-repo, the repository that the file is in")


def _load_mode(s: Settings) -> None:
    """The removed memory-map flags, as their combination was meant."""
    mmap, mlock, dio = s.get("legacy.mmap"), s.get("legacy.mlock"), s.get("legacy.dio")
    if mmap is None and mlock is None and dio is None:
        pass
    elif "placement.load_mode" in s.given:
        s.warnings.append("--load-mode decides; --mmap, --mlock and --direct-io are ignored beside it")
    elif dio:
        s.derive("placement.load_mode", "dio")
    elif mlock:
        s.derive("placement.load_mode", "mlock" if mmap is False else "mmap+mlock")
    elif mmap is not None:
        s.derive("placement.load_mode", "mmap" if mmap else "none")
    if s.get("placement.repack") is False and "placement.weights_layout" not in s.given:
        s.derive("placement.weights_layout", "plain")


def _slots(s: Settings) -> None:
    """Slots and the KV pool (llama-server's main: auto is 4 slots and one pool)."""
    slots = s.get("context.n_parallel", -1)
    if slots < 0:
        if s.get("context.kv_unified") is False:
            s.warnings.append("--no-kv-unified has no effect while --parallel is auto, as in llama-server; give -np N")
        s.derive("context.n_parallel", AUTO_SLOTS, f"slots: {AUTO_SLOTS}, sharing one KV pool (--parallel is auto)")
        s.derive("context.kv_unified", True)
    elif slots > MAX_SLOTS:
        raise FlagError(f"error: --parallel {slots}: n_seq_max must be <= {MAX_SLOTS}")
    else:
        s.values.setdefault("context.kv_unified", False)
    per_slot = s.get("context.per_slot", 0)
    if per_slot > 0 and "context.size" not in s.given:
        size = s.get("context.n_parallel") * per_slot
        s.derive("context.size", size, f"context: {size} tokens, {per_slot} for each slot (--kv-unified-per-slot)")


def _batch(s: Settings) -> None:
    """llama.cpp: n_ubatch = min(n_batch, n_ubatch), and 0 means n_batch."""
    default = c.ContextConfig()
    batch, ubatch = s.get("context.n_batch", default.n_batch), s.get("context.n_ubatch", default.n_ubatch)
    if ubatch == 0:
        s.derive("context.n_ubatch", batch)
    elif ubatch > batch:
        s.derive("context.n_ubatch", batch, f"physical batch: {batch}, cut from {ubatch} to --batch-size")


def _threads(s: Settings, machine: Machine) -> None:
    """Defaults from the machine; 0 or less is every logical CPU, as llama.cpp reads it."""
    cpus = tuple(sorted(set(s.get("cpu.cpus", ()))))
    if cpus:
        s.values["cpu.cpus"] = cpus = tuple(cpu for cpu in cpus if cpu in machine.allowed)
        if not cpus:
            raise FlagError(
                f"error: --cpu-mask and --cpu-range leave no CPU of this process ({_spans(machine.allowed)})"
            )
    cores = machine.cores(cpus)
    logical = len(cpus or machine.allowed)
    if "cpu.threads" not in s.given:
        threads = machine.bounded(cores)
        why = f"{cores} physical core{'s' * (cores != 1)}" + (" of the CPU mask" if cpus else "")
        if threads < cores:
            why += f", cut to the cgroup's quota of {machine.quota:g} CPUs"
        s.derive("cpu.threads", threads, f"threads: {threads} ({why})")
    for path, name in (("cpu.threads", "--threads"), ("cpu.threads_batch", "--threads-batch")):
        if path in s.given and s.values[path] <= 0:
            s.derive(path, machine.bounded(logical), f"{name}: {machine.bounded(logical)}, every logical CPU")
    s.values.setdefault("cpu.threads_batch", s.values["cpu.threads"])
    wanted = s.values["cpu.threads"]
    if cpus and len(cpus) < wanted:
        s.warnings.append(f"Not enough set bits in CPU mask ({len(cpus)}) to satisfy requested thread count: {wanted}")
    if "cpu.threads" in s.given and machine.quota is not None and wanted > machine.quota:
        s.warnings.append(
            f"--threads {wanted} is more than the cgroup's quota of {machine.quota:g} CPUs: expect stalls"
        )


def _spans(cpus: tuple[int, ...]) -> str:
    return f"CPUs {cpus[0]} to {cpus[-1]}" if len(cpus) > 1 else f"CPU {cpus[0]}"


def _texts(s: Settings) -> None:
    """DRY breakers (the first one given drops the defaults, `none` drops all so far), and escapes."""
    breakers = s.get("sampling.dry_sequence_breakers")
    if breakers is not None:
        last = max((i + 1 for i, text in enumerate(breakers) if text == "none"), default=0)
        s.values["sampling.dry_sequence_breakers"] = breakers[last:]
    if s.get("legacy.escape", True):
        for path, flag in (
            ("chat.reverse_prompt", "--reverse-prompt"),
            ("sampling.dry_sequence_breakers", "--dry-sequence-breaker"),
        ):
            try:
                if path in s.values:
                    s.values[path] = tuple(unescape(text) for text in s.values[path])
            except ValueError as error:
                raise FlagError(f"error: {flag}: {error}; --no-escape takes the text as it is") from None


def _http(s: Settings) -> None:
    if "http.api_keys" in s.values:
        s.values["http.api_keys"] = tuple(dict.fromkeys(s.values["http.api_keys"]))
    key, cert = s.get("http.ssl_key_file"), s.get("http.ssl_cert_file")
    if bool(key) != bool(cert):
        missing = "--ssl-cert-file" if key else "--ssl-key-file"
        raise FlagError(f"error: TLS needs both files: {missing} is missing")
    prefix = s.get("http.api_prefix", "")
    tidy = "/" + prefix.strip("/") if prefix.strip("/") else ""
    if tidy != prefix:
        s.derive("http.api_prefix", tidy, f"--api-prefix: '{prefix}' is read as '{tidy}'")
