"""Sizes, durations and ages as Ollama prints them."""

from __future__ import annotations


def human(n: int | float) -> str:
    """Decimal units, Ollama's rounding: `986 B`, `19 GB`, `4.9 GB`: one decimal below ten, none from there on."""
    value = float(n)
    unit = "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 10 and value % 1 else f"{int(value)} {unit}"


def duration(seconds: float) -> str:
    """`7m30s`, `1h5m`, `45s`; `99h+` beyond."""
    whole = int(seconds + 0.5)
    if whole >= 99 * 3600:
        return "99h+"
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m"
    return f"{minutes}m{secs}s" if minutes else f"{secs}s"


def ago(seconds: float) -> str:
    """`3 days ago`, Ollama's words for a time that long past."""
    minutes = seconds / 60
    if seconds < 1:
        return "Less than a second ago"
    if seconds < 60:
        return f"{int(seconds)} second{'s' * (int(seconds) != 1)} ago"
    if minutes < 2:
        return "About a minute ago"
    if minutes < 60:
        return f"{int(minutes)} minutes ago"
    hours = int(minutes / 60 + 0.5)
    if hours == 1:
        return "About an hour ago"
    if hours < 48:
        return f"{hours} hours ago"
    days = hours // 24
    if days < 14:
        return f"{days} days ago"
    if days < 60:
        return f"{days // 7} weeks ago"
    return f"{days // 30} months ago" if days < 730 else f"{days // 365} years ago"
