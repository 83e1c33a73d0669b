"""Readers for flag values that have a syntax of their own: samplers, biases, masks, buffers, devices, overrides."""

from __future__ import annotations

import re

from ftgguf.engine.messages import Grammar
from ftgguf.flags.config import GPU_LAYERS_ALL, GPU_LAYERS_AUTO, KvOverride, LoraAdapter, TensorOverride
from ftgguf.flags.row import Warn
from ftgguf.flags.values import csv_row, file_text, load_json, stof, stoi

MAX_CPUS = 512
"""ggml's GGML_MAX_N_THREADS: bits of a CPU mask."""
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""llama.cpp's pattern for `-cmoe` and `-ncmoe`."""
DENSE_FFN = r"\.ffn_(up|down|gate)\."
"""llama.cpp's pattern for `-ncffn`."""
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
SAMPLERS = {
    "penalties": "e",
    "dry": "d",
    "top_n_sigma": "s",
    "top_k": "k",
    "typ_p": "y",
    "top_p": "p",
    "min_p": "m",
    "xtc": "x",
    "temperature": "t",
    "infill": "i",
    "adaptive_p": "a",
}
"""llama-server's sampler names and letters."""
SPEC_TYPES = (
    "none",
    "draft-simple",
    "draft-eagle3",
    "draft-mtp",
    "draft-dflash",
    "draft-dspark",
    "ngram-simple",
    "ngram-map-k",
    "ngram-map-k4v",
    "ngram-mod",
    "ngram-cache",
)

_ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p"}
for _name in SAMPLERS:
    _ALIASES |= {_name: _name, _name.replace("_", "-"): _name, _name.replace("_", ""): _name}
_LETTERS = {letter: name for name, letter in SAMPLERS.items()}


def samplers(value: str, warn: Warn) -> tuple[str, ...]:
    """`;`-separated sampler names; unknown ones are dropped with a warning, as llama.cpp does."""
    found = []
    for name in value.split(";"):
        if (canonical := _ALIASES.get(name.lower())) is not None:
            found.append(canonical)
        else:
            warn(f"unable to match sampler by name '{name.lower()}' (known: {', '.join(SAMPLERS)})")
    return tuple(found)


def sampler_letters(value: str, warn: Warn) -> tuple[str, ...]:
    """One letter a sampler; unknown ones are dropped with a warning, as llama.cpp does."""
    for letter in value:
        if letter not in _LETTERS:
            warn(f"unable to match sampler by char '{letter}' (known: {''.join(_LETTERS)})")
    return tuple(_LETTERS[letter] for letter in value if letter in _LETTERS)


_BIAS = re.compile(r"\s*([+-]?\d+)\s*([+-])(.+)", re.DOTALL)


def logit_bias(value: str, warn: Warn) -> tuple[tuple[int, float], ...]:
    """`TOKEN_ID(+/-)BIAS`: `15043+1`, `15043-inf`."""
    match = _BIAS.fullmatch(value)
    if match is None:
        raise ValueError("invalid input format (TOKEN_ID+BIAS or TOKEN_ID-BIAS, such as 15043-1)")
    try:
        token, bias = stoi(match[1], warn), stof(match[3], warn)
    except ValueError:
        raise ValueError("invalid input format (TOKEN_ID+BIAS or TOKEN_ID-BIAS, such as 15043-1)") from None
    return ((token, -bias if match[2] == "-" else bias),)


def sequence_breaker(value: str, warn: Warn) -> tuple[str, ...]:
    """A DRY sequence breaker; `none` means none at all (see `ftgguf.flags.resolve`)."""
    return (value,)


def gbnf(value: str, warn: Warn) -> Grammar:
    """A GBNF grammar."""
    return Grammar(kind="gbnf", text=value)


def gbnf_file(path: str, warn: Warn) -> Grammar:
    """A GBNF grammar in a file."""
    return Grammar(kind="gbnf", text=file_text(path, warn))


def schema(value: str, warn: Warn) -> Grammar:
    """A JSON schema."""
    load_json(value, "the schema")
    return Grammar(kind="json_schema", text=value)


def schema_file(path: str, warn: Warn) -> Grammar:
    """A JSON schema in a file."""
    source = file_text(path, warn)
    load_json(source, f"file '{path}'")
    return Grammar(kind="json_schema", text=source)


def template_file(path: str, warn: Warn) -> tuple[str, str]:
    """(source, path) of a template file."""
    return file_text(path, warn), path


def cpu_mask(value: str, warn: Warn) -> tuple[int, ...]:
    """CPU numbers of a hexadecimal mask of any length up to MAX_CPUS bits."""
    digits = value[2:] if value.startswith("0x") else value
    if not digits or re.fullmatch(r"[0-9a-fA-F]+", digits) is None:
        raise ValueError("invalid cpumask (hexadecimal digits, such as 0xff)")
    if len(digits) * 4 > MAX_CPUS:
        raise ValueError(f"invalid cpumask (at most {MAX_CPUS // 4} digits)")
    bits = int(digits, 16)
    return tuple(cpu for cpu in range(len(digits) * 4) if bits >> cpu & 1)


def cpu_range(value: str, warn: Warn) -> tuple[int, ...]:
    """CPU numbers lo to hi of `lo-hi`; either end may be left out."""
    match = re.fullmatch(r"(\d*)-(\d*)", value.strip())
    if match is None:
        raise ValueError("invalid range (expected [<start>]-[<end>])")
    low, high = int(match[1] or 0), int(match[2] or MAX_CPUS - 1)
    if low >= MAX_CPUS or high >= MAX_CPUS:
        raise ValueError(f"invalid range (CPU numbers end at {MAX_CPUS - 1})")
    if low > high:
        raise ValueError(f"invalid range ({low} is greater than {high})")
    return tuple(range(low, high + 1))


def cache_type(value: str, warn: Warn) -> str:
    """A KV cache type."""
    if value not in CACHE_TYPES:
        raise ValueError(f"Unsupported cache type: {value} (allowed: {', '.join(CACHE_TYPES)})")
    return value


def gpu_layers(value: str, warn: Warn) -> int:
    """A number, `auto` or `all`; llama.cpp reads -1 as auto and anything below as all."""
    if value == "auto":
        return GPU_LAYERS_AUTO
    if value == "all":
        return GPU_LAYERS_ALL
    return max(stoi(value, warn), GPU_LAYERS_ALL)


def devices(value: str, warn: Warn) -> tuple[str, ...]:
    """`none`, or names such as `CUDA0`; whether they exist is the engine's to find."""
    if value == "none":
        return ()
    found = value.split(",")
    for device in found:
        if re.fullmatch(r"CUDA\d+", device) is None:
            raise ValueError(f"invalid device: {device} (none, or CUDA0, CUDA1 ...; see --list-devices)")
    return tuple(found)


def tensor_overrides(value: str, warn: Warn) -> tuple[TensorOverride, ...]:
    """`REGEX=BUFFER,...`. A comma separates overrides, so a pattern cannot hold one (as in llama.cpp)."""
    found = []
    for item in value.split(","):
        pattern, equals, buffer = item.partition("=")
        if not equals:
            raise ValueError(f"invalid value '{item}' (expected <tensor name pattern>=<buffer type>)")
        if re.fullmatch(r"CPU|CUDA_Host|CUDA\d+", buffer) is None:
            raise ValueError(
                f"unknown buffer type '{buffer}'. Available buffer types: CPU, CUDA_Host, CUDA0, CUDA1 ..."
            )
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"invalid tensor name pattern '{pattern}': {error}") from None
        found.append(TensorOverride(pattern, "CPU" if buffer == "CUDA_Host" else buffer))
    return tuple(found)


def layer_overrides(count: int, pattern: str) -> tuple[TensorOverride, ...]:
    """`pattern` in the first `count` blocks goes to the CPU."""
    return tuple(TensorOverride(rf"blk\.{block}{pattern}", "CPU") for block in range(count))


def kv_overrides(value: str, warn: Warn) -> tuple[KvOverride, ...]:
    """`KEY=TYPE:VALUE,...` with types int, float, bool, str."""
    return tuple(_kv_override(item, warn) for item in csv_row(value))


def _kv_override(item: str, warn: Warn) -> KvOverride:
    key, equals, rest = item.partition("=")
    kind, colon, raw = rest.partition(":")
    fault = f"error: Invalid type for KV override: {item}"
    if not equals or not colon or not 0 < len(key) < 128:
        raise ValueError(f"{fault} (expected KEY=TYPE:VALUE, types int, float, bool, str)")
    if kind == "int":
        number = re.fullmatch(r"\s*([+-]?\d+)\s*", raw)
        if number is None or not -(2**63) <= int(number[1]) < 2**63:
            raise ValueError(f"{fault} ('{raw}' is not a 64-bit integer)")
        return KvOverride(key, int(number[1]))
    if kind == "float":
        return KvOverride(key, stof(raw, warn))
    if kind == "bool":
        if raw not in ("true", "false"):
            raise ValueError(f"{fault} (a bool is true or false)")
        return KvOverride(key, raw == "true")
    if kind == "str":
        if len(raw.encode()) > 127:
            raise ValueError(f"{fault} (a str cannot exceed 127 bytes)")
        return KvOverride(key, raw)
    raise ValueError(f"{fault} (types are int, float, bool, str)")


def proportions(value: str, warn: Warn) -> tuple[float, ...]:
    """Numbers separated by `,` or `/`."""
    return tuple(stof(part, warn) for part in re.split(r"[,/]+", value))


def margins(value: str, warn: Warn) -> tuple[int, ...]:
    """MiB for each device, separated by `,` or `/`."""
    found = tuple(stoi(part, warn) for part in re.split(r"[,/]+", value))
    if any(part < 0 for part in found):
        raise ValueError("invalid value (MiB cannot be negative)")
    return found


def spec_types(value: str, warn: Warn) -> tuple[str, ...]:
    """Kinds of speculation; `none` among them means none."""
    found = value.split(",")
    for name in found:
        if name == "none":
            return ()
        if name not in SPEC_TYPES:
            raise ValueError(f"unknown speculative type: {name} (known: {', '.join(SPEC_TYPES)})")
    return tuple(found)


def lora(value: str, warn: Warn) -> tuple[LoraAdapter, ...]:
    """Adapter files."""
    return tuple(LoraAdapter(item) for item in csv_row(value))


def lora_scaled(value: str, warn: Warn) -> tuple[LoraAdapter, ...]:
    """`FNAME:SCALE,...`."""
    found = []
    for item in csv_row(value):
        parts = item.split(":")
        if len(parts) != 2:
            raise ValueError("lora-scaled format: FNAME:SCALE")
        found.append(LoraAdapter(parts[0], stof(parts[1], warn)))
    return tuple(found)


def unescape(value: str) -> str:
    r"""Escapes of `-e`: \n \r \t \' \" \\ and \xHH (bytes); anything else stays. ValueError if not UTF-8 after."""
    data, out, i = value.encode("utf-8", "surrogateescape"), bytearray(), 0
    simple = {ord("n"): 10, ord("r"): 13, ord("t"): 9, ord("'"): 39, ord('"'): 34, ord("\\"): 92}
    while i < len(data):
        if data[i] != 92 or i + 1 == len(data):
            out.append(data[i])
            i += 1
        elif data[i + 1] in simple:
            out.append(simple[data[i + 1]])
            i += 2
        elif data[i + 1] == ord("x") and re.fullmatch(rb"[0-9a-fA-F]{2}", data[i + 2 : i + 4]):
            out.append(int(data[i + 2 : i + 4], 16))
            i += 4
        else:
            out += data[i : i + 2]
            i += 2
    try:
        return out.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"'{value}' is not UTF-8 text once its \\x escapes are read") from None
