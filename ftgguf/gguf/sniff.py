"""What a file is that is not GGUF: the usual accidents, each with its cure."""

from __future__ import annotations

import re

from .errors import shown

_OLD_MAGIC = {
    b"lmgg": "GGML",
    b"fmgg": "GGMF",
    b"tjgg": "GGJT",
    b"algg": "GGLA",
    b"GGML": "GGML",
    b"GGJT": "GGJT",
}
_ARCHIVES = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip (a PyTorch checkpoint, perhaps)",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zX": "xz",
    b"BZh": "bzip2",
    b"7z\xbc\xaf": "7-Zip",
}
_MARKUP = re.compile(rb"^(\xef\xbb\xbf)?\s*<(!doctype|html|head|\?xml|!--)", re.IGNORECASE)
_PART = re.compile(
    r"(\.part[-_.]?(\d+of\d+|[a-z0-9]{1,3})|\.gguf[-_.]split[-_.]?[a-z]+|\.gguf\.\d{2,3}|\.0\d\d)$", re.I
)


def is_raw_part(name: str) -> bool:
    """True for names of byte-wise parts (`x.gguf.part1of2`, `x.gguf-split-a`), which do have to be joined with cat."""
    return _PART.search(name) is not None


def describe(head: bytes, size: int, name: str) -> str:
    """Fault and cure of a file whose first bytes (`head`, up to 512) are not the GGUF magic. `size` in bytes."""
    if size == 0:
        return "the file is empty: the download did not start, get it again"
    if size < 4 and b"GGUF".startswith(head):
        return f"the file ends after {size} bytes of 'GGUF': the download has just begun, get it again"
    if head.startswith(b"version https://git-lfs"):
        found = re.search(rb"\nsize (\d{1,19})", head)
        real = f" of a {int(found[1])}-byte file" if found else ""
        return f"this is a Git LFS pointer{real}, not the model: run 'git lfs pull' in the clone, or download the file"
    if _MARKUP.match(head):
        return "this is a web page saved under the model's name, not a GGUF file: download from the direct file link"
    if head[:4] in _OLD_MAGIC:
        return f"this is a {_OLD_MAGIC[head[:4]]} file from before GGUF: get a GGUF of the model, or convert it"
    if len(head) > 9 and head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < 1 << 40:
        return "this is a safetensors file: get a GGUF of the model, or convert it with convert_hf_to_gguf.py"
    for magic, what in _ARCHIVES.items():
        if head.startswith(magic):
            return f"this is a {what} archive, not a GGUF file: unpack it first"
    if head.startswith(b"FUGG"):
        return "bad magic 'FUGG': the bytes are swapped; get a little-endian GGUF"
    if not any(head):
        return "the file begins with zeros: the download never finished, get it again"
    if is_raw_part(name):
        return "bad magic: this looks like a later byte-wise part of a file; join all parts in order with cat"
    try:
        text = head.decode()
    except UnicodeDecodeError:
        text = ""
    if text and all(c.isprintable() or c in "\r\n\t" for c in text):
        return f"this is a text file that begins {shown(text.strip())}, not a GGUF file: download the model again"
    return f"bad magic {shown(head[:4])}, a GGUF file begins with 'GGUF': the file is something else or damaged"
