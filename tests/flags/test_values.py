"""Readers of single values, against libc, Python's csv writer and llama.cpp's sources (b11434)."""

from __future__ import annotations

import csv as stdlib_csv
import ctypes
import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftgguf.flags import ServerConfig
from ftgguf.flags import values as v
from ftgguf.flags.special import cpu_mask, cpu_range, logit_bias, sampler_letters, samplers, unescape


def quiet(line: str) -> None:
    """Drops warnings."""


_libc = ctypes.CDLL(None)
_libc.strtol.restype = ctypes.c_long
_libc.strtod.restype = ctypes.c_double


@given(st.text("0123456789+- .exk", max_size=8) | st.integers(-(2**40), 2**40).map(str))
def test_stoi_is_libcs_strtol(text: str) -> None:
    """std::stoi is strtol base 10 with a range check; it ignores what follows."""
    end = ctypes.c_char_p()
    data = ctypes.create_string_buffer(text.encode())
    number = _libc.strtol(data, ctypes.byref(end), 10)
    parsed_any = ctypes.cast(end, ctypes.c_void_p).value != ctypes.addressof(data)
    if parsed_any and -(2**31) <= number < 2**31:
        assert v.stoi(text, quiet) == number
    else:
        with pytest.raises(ValueError, match=r"^stoi: "):
            v.stoi(text, quiet)


@given(st.text("0123456789+-. eEinfa", max_size=9) | st.floats(allow_nan=False, allow_infinity=False).map(repr))
def test_stof_is_libcs_strtod(text: str) -> None:
    """std::stof is strtof (here: double); NaN is refused."""
    end = ctypes.c_char_p()
    data = ctypes.create_string_buffer(text.encode())
    number = _libc.strtod(data, ctypes.byref(end))
    if ctypes.cast(end, ctypes.c_void_p).value == ctypes.addressof(data) or math.isnan(number):
        with pytest.raises(ValueError, match=r"^stof: "):
            v.stof(text, quiet)
    else:
        assert v.stof(text, quiet) == number


@given(
    st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0"), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
    )
)
def test_csv_rows(fields: list[str]) -> None:
    """Against Python's csv writer, which quotes as RFC 4180 says."""
    out = io.StringIO()
    stdlib_csv.writer(out, quoting=stdlib_csv.QUOTE_ALL, lineterminator="").writerow(fields)
    assert v.csv_row(out.getvalue()) == fields


@given(st.text(max_size=20))
def test_unescape_inverts_escape(text: str) -> None:
    r"""Escaping \ and newlines, then -e's reading, is the identity; so are \xHH of every byte."""
    plain = text.encode("utf-8", "replace").decode()
    escaped = plain.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t").replace('"', '\\"')
    assert unescape(escaped) == plain
    assert unescape("".join(f"\\x{byte:02x}" for byte in plain.encode())) == plain


def test_unescape_keeps_what_it_does_not_know() -> None:
    r"""string_process_escapes: \q stays \q, a lone backslash at the end stays, \x needs two digits."""
    assert unescape(r"a\qb\x1 \x4a\'" + "\\") == r"a\qb\x1 J'" + "\\"
    with pytest.raises(ValueError, match="UTF-8"):
        unescape(r"\xff")


@given(st.sets(st.integers(0, 127), min_size=1))
def test_cpu_masks(cpus: set[int]) -> None:
    """Against Python's hex of the bit set; 0x is optional."""
    mask = f"{sum(1 << cpu for cpu in cpus):x}"
    assert cpu_mask(mask, quiet) == cpu_mask("0x" + mask.upper(), quiet) == tuple(sorted(cpus))


def test_cpu_ranges() -> None:
    """Either end may be missing (parse_cpu_range)."""
    assert cpu_range("2-4", quiet) == (2, 3, 4)
    assert cpu_range("-1", quiet) == (0, 1)
    assert cpu_range("510-", quiet) == (510, 511)


def test_sampler_names_and_letters() -> None:
    """sampling.cpp: aliases in any case, kebab and joined forms; unknown ones are dropped with a warning."""
    warned: list[str] = []
    names = samplers("Top-K;topp;nucleus;temp;typ;min_p;bogus", warned.append)
    assert names == ("top_k", "top_p", "top_p", "temperature", "typ_p", "min_p")
    assert "'bogus'" in warned[0]
    assert sampler_letters("edskypmxt", quiet) == ServerConfig().sampling.samplers


@given(st.integers(-(2**31), 2**31 - 1), st.floats(0, 1e6, allow_nan=False), st.sampled_from("+-"))
def test_logit_bias_syntax(token: int, bias: float, sign: str) -> None:
    """TOKEN_ID(+/-)BIAS."""
    assert logit_bias(f"{token}{sign}{bias!r}", quiet) == ((token, bias if sign == "+" else -bias),)


def test_hosts() -> None:
    """A comma list; brackets of IPv6 addresses are optional; sockets are paths."""
    assert v.hosts("127.0.0.1, [::1],/run/x.sock", quiet) == ("127.0.0.1", "::1", "/run/x.sock")


def test_durations() -> None:
    """Seconds, or Ollama's units."""
    assert [v.duration(text, quiet) for text in ("90", "5m", "1.5h", "-1", "250ms")] == [90, 300, 5400, -1, 0.25]
    with pytest.raises(ValueError, match="invalid duration 'soon'"):
        v.duration("soon", quiet)
