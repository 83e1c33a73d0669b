"""Model source, download and router mode."""

from __future__ import annotations

from ftgguf.flags import special
from ftgguf.flags import values as v
from ftgguf.flags.config import SpecConfig
from ftgguf.flags.row import Assignment, Flag, switch, value, void

_ENV = "LLAMA_ARG_"
_DENSE = "a preset for a dense, embedding or vision model; name the model itself: -hf ggml-org/{}"


def _gpt_oss(repo: str, file: str) -> tuple[Assignment, ...]:
    """llama-server's settings for gpt-oss."""
    fields = {
        "model.hf_repo": repo,
        "http.port": 8013,
        "context.n_ubatch": 2048,
        "context.n_batch": 32768,
        "context.n_parallel": 2,
        "context.size": 131072 * 2,
        "sampling.temperature": 1.0,
        "sampling.top_p": 1.0,
        "sampling.top_k": 0,
        "sampling.min_p": 0.01,
        "chat.jinja": True,
    }
    if file:
        fields["model.hf_file"] = file
    return tuple(Assignment(path, setting) for path, setting in fields.items())


def _fim_qwen_30b() -> tuple[Assignment, ...]:
    """llama-server's settings for fill-in-the-middle with Qwen3 Coder."""
    fields = {
        "model.hf_repo": "ggml-org/Qwen3-Coder-30B-A3B-Instruct-Q8_0-GGUF",
        "model.hf_file": "qwen3-coder-30b-a3b-instruct-q8_0.gguf",
        "http.port": 8012,
        "context.n_ubatch": 1024,
        "context.n_batch": 1024,
        "context.size": 0,
        "context.cache_reuse": 256,
    }
    return tuple(Assignment(path, setting) for path, setting in fields.items())


def _spec_default() -> tuple[Assignment, ...]:
    default = SpecConfig().ngram_mod
    return (
        Assignment("spec.types", ("ngram-mod",), "append"),
        Assignment("spec.ngram_mod.n_match", default.n_match),
        Assignment("spec.ngram_mod.n_min", default.n_min),
        Assignment("spec.ngram_mod.n_max", default.n_max),
    )


FLAGS: tuple[Flag, ...] = (
    value("-m", "--model", hint="FNAME", parse=v.text, to="model.path", env=_ENV + "MODEL",
          completes="*.gguf", help="GGUF file to serve; of a split file, the first part"),
    value("-mu", "--model-url", hint="MODEL_URL", parse=v.text, to="model.url", env=_ENV + "MODEL_URL",
          help="download the model from this URL"),
    value("-dr", "--docker-repo", hint="[<repo>/]<model>[:quant]", parse=v.text, to="model.docker_repo",
          env=_ENV + "DOCKER_REPO", tier="D",
          note="Docker Hub models are not supported; use -hf user/repo[:quant], or pull the file and give it with -m",
          help="model from Docker Hub"),
    value("-hf", "-hfr", "--hf-repo", hint="<user>/<model>[:quant]", parse=v.text, to="model.hf_repo",
          env=_ENV + "HF_REPO", shown="unused",
          help="model from Hugging Face; without a quant Q4_K_M, else the first file of the repository"),
    value("-hff", "--hf-file", hint="FILE", parse=v.text, to="model.hf_file", env=_ENV + "HF_FILE", shown="unused",
          help="this file of the repository, whatever quant --hf-repo names"),
    value("-hft", "--hf-token", hint="TOKEN", parse=v.text, to="model.hf_token", env="HF_TOKEN",
          shown="the one huggingface-cli stored", help="access token for Hugging Face"),
    void("--offline", to="model.offline", env=_ENV + "OFFLINE", help="use what is on disk, never the network"),
    void("-cl", "--cache-list", action="cache-list", tier="B", note="lists our store and the caches it reads",
         help="list the models on disk and exit"),
    value("-a", "--alias", hint="STRING", parse=v.names, to="model.aliases", mode="append", env=_ENV + "ALIAS",
          group="server", shown="the model's name",
          help="names of the model in the API, comma-separated; the first in alphabetical order is its id"),
    value("--tags", hint="STRING", parse=v.names, to="model.tags", mode="append", env=_ENV + "TAGS", group="server",
          shown="none", help="tags shown with the model, comma-separated; they route nothing"),
    value("--override-kv", hint="KEY=TYPE:VALUE,...", parse=special.kv_overrides, to="model.override_kv",
          mode="append", shown="none",
          help="replace metadata of the file; types int, float, bool, str; comma-separated"),
    void("--check-tensors", to="model.check_tensors", tier="B",
         note="ggml's check of all values, before the file is loaded",
         help="look for invalid values in the weights"),
    value("--models-dir", hint="PATH", parse=v.existing_dir, to="model.models_dir", env=_ENV + "MODELS_DIR",
          group="server", tier="B", note="models are loaded on demand, one engine process each", shown="none",
          help="folder of models that requests may name (router mode)"),
    value("--models-preset", hint="PATH", parse=v.existing_file, to="model.models_preset",
          env=_ENV + "MODELS_PRESET", group="server", tier="B",
          note="one section per model; keys are flags without dashes", shown="none",
          help="INI file of models and their flags (router mode)"),
    value("--models-max", hint="N", parse=v.whole(0), to="model.models_max", env=_ENV + "MODELS_MAX", group="server",
          tier="B", note="fewer when their memory would exceed the machine's",
          help="models loaded at once, 0 for no limit (router mode)"),
    switch("--models-autoload", no=("--no-models-autoload",), to="model.models_autoload",
           env=_ENV + "MODELS_AUTOLOAD", group="server", tier="B", note="a request that names a model loads it",
           tier_off="B", note_off="models load by POST /models/load only",
           help="load a model when a request names it (router mode)"),
    void("--gpt-oss-20b-default", tier="B", note="sets repository, port, batch, slots, context and sampling",
         expand=lambda _: _gpt_oss("ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b-mxfp4.gguf"), group="server",
         help="gpt-oss-20b with llama-server's settings for it (may download)"),
    void("--gpt-oss-120b-default", tier="B", note="sets repository, port, batch, slots, context and sampling",
         expand=lambda _: _gpt_oss("ggml-org/gpt-oss-120b-GGUF", ""), group="server",
         help="gpt-oss-120b with llama-server's settings for it (may download)"),
    void("--fim-qwen-30b-default", tier="B", note="sets repository, port, batch and cache reuse",
         expand=lambda _: _fim_qwen_30b(), group="server",
         help="Qwen3 Coder 30B A3B for fill-in-the-middle (may download)"),
    void("--embd-gemma-default", tier="D", note=_DENSE.format("embeddinggemma-300M-qat-q4_0-GGUF"), group="server",
         help="EmbeddingGemma"),
    void("--fim-qwen-1.5b-default", tier="D", note=_DENSE.format("Qwen2.5-Coder-1.5B-Q8_0-GGUF"), group="server",
         help="Qwen 2.5 Coder 1.5B"),
    void("--fim-qwen-3b-default", tier="D", note=_DENSE.format("Qwen2.5-Coder-3B-Q8_0-GGUF"), group="server",
         help="Qwen 2.5 Coder 3B"),
    void("--fim-qwen-7b-default", tier="D", note=_DENSE.format("Qwen2.5-Coder-7B-Q8_0-GGUF"), group="server",
         help="Qwen 2.5 Coder 7B"),
    void("--fim-qwen-7b-spec", tier="D", note=_DENSE.format("Qwen2.5-Coder-7B-Q8_0-GGUF"), group="server",
         help="Qwen 2.5 Coder 7B with a draft model"),
    void("--fim-qwen-14b-spec", tier="D", note=_DENSE.format("Qwen2.5-Coder-14B-Q8_0-GGUF"), group="server",
         help="Qwen 2.5 Coder 14B with a draft model"),
    void("--vision-gemma-4b-default", tier="D", note=_DENSE.format("gemma-3-4b-it-qat-GGUF"), group="server",
         help="Gemma 3 4B"),
    void("--vision-gemma-12b-default", tier="D", note=_DENSE.format("gemma-3-12b-it-qat-GGUF"), group="server",
         help="Gemma 3 12B"),
    void("--spec-default", expand=lambda _: _spec_default(), group="server",
         help="speculate with llama-server's default: ngram-mod, match 24, draft 48 to 64"),
)  # fmt: skip
