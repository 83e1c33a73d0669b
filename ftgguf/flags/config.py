"""The one configuration object: every setting the server reads, frozen, with llama-server's defaults.

Nothing else in the package reads flags, environment or config files: `ftgguf.flags.parse_server` resolves them once
into a `ServerConfig`. A default here is llama-server's (its `common_params`), so a field the user did not give and
that nothing derived holds the value llama-server would use. `ServerConfig.given` names the fields that were set by
the user, as dotted paths (`sampling.top_k`), for code that may only fill in what was left open: the sampling
defaults of a GGUF file, `--fit`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ftgguf.engine.messages import SamplingParams

GPU_LAYERS_AUTO = -1
"""`placement.gpu_layers`: as many layers as fit."""
GPU_LAYERS_ALL = -2
"""`placement.gpu_layers`: every layer, or fail."""
SLOT_PAD = 256
"""llama.cpp pads the context of a slot to a multiple of this."""


@dataclass(frozen=True, slots=True)
class KvOverride:
    """One `--override-kv KEY=TYPE:VALUE`; `value` is int, float, bool or str as TYPE says."""

    key: str
    value: int | float | bool | str


@dataclass(frozen=True, slots=True)
class TensorOverride:
    """Tensors whose name contains a match of `pattern` live in `buffer`: `CPU` or `CUDA<n>`."""

    pattern: str
    buffer: str


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """One `--lora` file with its scale."""

    path: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, from where, and the models of router mode."""

    path: str = ""
    url: str = ""
    hf_repo: str = ""
    """`user/repo[:quant]`."""
    hf_file: str = ""
    hf_token: str = field(default="", repr=False)
    docker_repo: str = ""
    offline: bool = False
    aliases: tuple[str, ...] = ()
    """Sorted; the first is the model's id."""
    tags: tuple[str, ...] = ()
    override_kv: tuple[KvOverride, ...] = ()
    check_tensors: bool = False
    use_mmproj: bool = True
    mmproj: str = ""
    mmproj_url: str = ""
    lora: tuple[LoraAdapter, ...] = ()
    lora_init_without_apply: bool = False
    models_dir: str = ""
    models_preset: str = ""
    models_max: int = 4
    """Models loaded at once in router mode; 0 is no limit."""
    models_autoload: bool = True
    store: str = ""
    """Folder of pulled models; empty is the default place."""
    allow_pull: str = "auto"
    """Who may pull and delete over HTTP: `auto` (loopback clients, while no API key is set), `on`, `off`."""
    pull_hosts: tuple[str, ...] = ("registry.ollama.ai", "hf.co", "huggingface.co")
    """Registries that may be pulled from over HTTP."""
    keep_alive: float = 300.0
    """Seconds an on-demand model stays loaded after its last request; negative is for ever."""


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Where weights, KV and experts live. Sizes in MiB."""

    gpu_layers: int = GPU_LAYERS_AUTO
    overrides: tuple[TensorOverride, ...] = ()
    """`-ot`, `-cmoe`, `-ncmoe`, `-ncffn` in the order given; the first match decides (see `buffer_of`)."""
    cpu_moe: bool = False
    n_cpu_moe: int = 0
    """Both are also in `overrides`; kept for what start-up prints."""
    n_cpu_ffn: int = 0
    fit: bool = True
    fit_target: tuple[int, ...] = (1024,)
    """Free MiB to leave on each device; one value stands for all."""
    fit_ctx: int = 4096
    load_mode: str = "auto"
    """`auto`, `none`, `mmap`, `mlock`, `mmap+mlock`, `dio`."""
    lazy_mode: str = "auto"
    kv_offload: bool = True
    op_offload: bool = True
    """The GPU may run batches over CPU-resident weights by streaming them."""
    repack: bool = True
    devices: tuple[str, ...] | None = None
    """`None`: every GPU found; `()`: CPU only."""
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    main_gpu: int = 0
    numa: str = "off"
    """`off`, `distribute`, `isolate`, `numactl`."""
    vram_budget: int | None = None
    """MiB of device memory the engine never exceeds, everything counted; `None`: what is free minus the fit margin."""
    moe_mode: str = "auto"
    """`auto`, `resident`, `offload`, `hybrid`, `cpu`."""
    expert_cache: int | None = None
    """MiB of VRAM for cached experts; 0 is none, `None` what is left."""
    expert_policy: str = "decay"
    expert_disk: bool = False
    pin_budget: int | None = None
    """MiB of host memory that may be page-locked; `None`: as much as the pool needs."""
    weights_layout: str = "auto"
    """CPU weights as in the file (`plain`), repacked for decode, or both: `auto`, `plain`, `repacked`, `both`."""
    record_routing: str = ""
    debug_eager: bool = False

    def buffer_of(self, tensor: str) -> str | None:
        """The buffer an override names for `tensor`, or `None`. llama.cpp: `std::regex_search`, first match wins."""
        for override in self.overrides:
            if re.search(override.pattern, tensor):
                return override.buffer
        return None


@dataclass(frozen=True, slots=True)
class ContextConfig:
    """Context, KV, batching and slots. Sizes in tokens unless a name says otherwise."""

    size: int = 0
    """KV cells over all slots; 0: the model's training context."""
    n_predict: int = -1
    n_batch: int = 2048
    n_ubatch: int = 512
    n_keep: int = 0
    n_parallel: int = 4
    """Slots, resolved (never -1)."""
    kv_unified: bool = True
    """One pool for all slots, resolved."""
    per_slot: int = 0
    """`--kv-unified-per-slot`: limit of one slot; 0: none."""
    cont_batching: bool = True
    flash_attn: str = "auto"
    """`on`, `off`, `auto`."""
    type_k: str = "f16"
    type_v: str = "f16"
    swa_full: bool = False
    shift: bool = False
    cache_prompt: bool = True
    cache_reuse: int = 0
    cache_ram: int = 8192
    """MiB of host memory for prompts kept for reuse; -1 no limit, 0 none."""
    cache_idle_slots: bool = True
    checkpoints: int = 32
    checkpoint_min_step: int = 8192
    slot_prompt_similarity: float = 0.1
    slot_save_path: str = ""
    """Folder with a trailing separator; empty: slot save and restore answer 501."""
    rope_scaling: str | None = None
    """`none`, `linear`, `yarn`; `None`: as the model says (so too below)."""
    rope_freq_base: float = 0.0
    """0: as the model says."""
    rope_freq_scale: float = 0.0
    """0: as the model says; 1/N expands the context N times."""
    yarn_orig_ctx: int = 0
    yarn_ext_factor: float = -1.0
    yarn_attn_factor: float = -1.0
    yarn_beta_slow: float = -1.0
    yarn_beta_fast: float = -1.0
    warmup: bool = True

    def cells(self, n_ctx_train: int) -> int:
        """KV cells to allocate for a model trained on `n_ctx_train` tokens, padded as llama.cpp pads them."""
        total = self.size or n_ctx_train
        if self.kv_unified:
            return pad(total)
        return pad(max(total // self.n_parallel, 1)) * self.n_parallel

    def slot_limit(self, cells: int, n_ctx_train: int) -> int:
        """Tokens one slot may hold, given the `cells` really allocated.

        llama-server: all cells when unified, else an equal share; then `--kv-unified-per-slot`; then n_ctx_train.
        """
        limit = cells if self.kv_unified else cells // self.n_parallel
        if self.per_slot > 0:
            limit = min(limit, self.per_slot)
        return min(limit, n_ctx_train)


def pad(tokens: int) -> int:
    """`tokens` rounded up to a multiple of SLOT_PAD."""
    return -(-tokens // SLOT_PAD) * SLOT_PAD


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """CPU threads, resolved (never -1)."""

    threads: int = 1
    threads_batch: int = 1
    cpus: tuple[int, ...] = ()
    """CPU numbers the compute threads may use (`-C`, `-Cr`), ascending; empty: wherever the process may run."""
    strict: bool = False
    """One thread on each CPU of `cpus`, in order."""
    priority: int = 0
    """-1 low, 0 normal, 1 medium, 2 high, 3 realtime."""
    poll: int = 50


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Templates, reasoning and text handling."""

    jinja: bool = True
    template: str = ""
    """Jinja source or the name of a built-in template; empty: the model's."""
    template_file: str = ""
    """Where `template` was read from, for messages."""
    template_kwargs: dict[str, Any] = field(default_factory=lambda: {"preserve_reasoning": True})
    """Variables given to the template: `--chat-template-kwargs`, `--reasoning`, `--reasoning-effort` and kin."""
    skip_parsing: bool = False
    reasoning_format: str = "auto"
    """`none`, `auto`, `deepseek`, `deepseek-legacy`."""
    reasoning: str = "auto"
    """`on`, `off`, `auto` (as the template supports it)."""
    reasoning_budget: int = -1
    reasoning_budget_message: str = ""
    prefill_assistant: bool = True
    reverse_prompt: tuple[str, ...] = ()
    """Stop strings of requests that give none."""
    special: bool = False
    spm_infill: bool = False


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The HTTP front. Times in seconds."""

    hosts: tuple[str, ...] = ("127.0.0.1",)
    """Addresses; one that ends in `.sock` is a UNIX socket path."""
    port: int = 8080
    reuse_port: bool = False
    api_prefix: str = ""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors_origins: str = "*"
    cors_methods: str = "GET, POST, DELETE, OPTIONS"
    cors_headers: str = "*"
    cors_credentials: bool = True
    ssl_key_file: str = ""
    ssl_cert_file: str = ""
    timeout: int = 3600
    sse_ping_interval: int = 30
    """-1: no pings."""
    metrics: bool = False
    props: bool = False
    slots: bool = True
    sleep_idle_seconds: int = -1
    static_path: str = ""
    ui: bool = True
    ui_config: dict[str, Any] = field(default_factory=dict)
    embedding: bool = False
    reranking: bool = False
    pooling: str = ""
    embd_normalize: int = 2
    record: str = ""
    """File that requests are recorded to, secrets masked, for `ftgguf bench trace`."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logging."""

    disable: bool = False
    file: str = ""
    jsonl: bool = False
    colors: str = "auto"
    """`on`, `off`, `auto` (a terminal)."""
    prefix: bool = False
    timestamps: bool = False
    verbosity: int = 3
    """0 output, 1 error, 2 warning, 3 info, 4 trace, 5 and up debug."""
    prompts_dir: str = ""


@dataclass(frozen=True, slots=True)
class NgramMap:
    """An n-gram drafter: look up the last `size_n` tokens, draft `size_m`, after `min_hits` sightings."""

    size_n: int = 12
    size_m: int = 48
    min_hits: int = 1


@dataclass(frozen=True, slots=True)
class NgramMod:
    """The rolling-hash n-gram drafter: match `n_match` tokens, draft `n_min` to `n_max`."""

    n_match: int = 24
    n_min: int = 48
    n_max: int = 64


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """A draft model."""

    path: str = ""
    hf_repo: str = ""
    n_max: int = 3
    n_min: int = 0
    p_split: float = 0.1
    p_min: float = 0.0
    sampling: str = "greedy"
    gpu_layers: int = GPU_LAYERS_AUTO
    type_k: str = "f16"
    type_v: str = "f16"
    devices: tuple[str, ...] | None = None
    overrides: tuple[TensorOverride, ...] = ()


@dataclass(frozen=True, slots=True)
class SpecConfig:
    """Speculative decoding; `types` is empty when it is off."""

    types: tuple[str, ...] = ()
    ngram_mod: NgramMod = NgramMod()
    ngram_simple: NgramMap = NgramMap()
    ngram_map_k: NgramMap = NgramMap()
    ngram_map_k4v: NgramMap = NgramMap()
    draft: DraftConfig = DraftConfig()


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything, resolved. `reasons` say what was derived or mapped and why; `warnings` what has no effect."""

    model: ModelConfig = ModelConfig()
    placement: PlacementConfig = PlacementConfig()
    context: ContextConfig = ContextConfig()
    cpu: CpuConfig = CpuConfig()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    chat: ChatConfig = field(default_factory=ChatConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    log: LogConfig = LogConfig()
    spec: SpecConfig = SpecConfig()
    given: frozenset[str] = frozenset()
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def router(self) -> bool:
        """No model was named: the server loads models on demand (llama-server's rule)."""
        model = self.model
        return not (model.path or model.url or model.hf_repo or model.docker_repo)


def encode_config(config: ServerConfig) -> bytes:
    """`config` as msgpack, to hand it to the engine process (msgpack keeps the infinities of `logit_bias`)."""
    return msgspec.msgpack.encode(config)


def decode_config(data: bytes) -> ServerConfig:
    """The inverse of `encode_config`. Raises msgspec.ValidationError on anything else."""
    return msgspec.msgpack.decode(data, type=ServerConfig)
