"""How many of a layer's misses go over PCIe and how many stay on the CPU: the integer rule.

Arithmetic of arXiv 2608.16157 (equations 3 and 4): with q of m missing experts filled over a link of B_P and the rest
read by the CPU at what B_H leaves, both ends finish together at q = m * B_P / B_H. `phi` is that share.
"""

from __future__ import annotations

PHI_ONE = 1 << 16
"""phi = 1 in Q16."""


def balanced_fills(m: int, phi_q16: int, least: int = 1) -> int:
    """Fills for `m` misses at a share of `phi_q16` / 65536: of the two integers around m * phi the one whose slower
    branch is done first, `max(f * (1 - phi), (m - f) * phi)`, the lower on a tie; at least `least`, at most m.

    The kernel does the same in int32 (m < 2^14). `least` is 1 wherever slots exist: without it small m give q = 0 for
    phi < 1/3 and the cache of such layers never warms.
    """
    low = (m * phi_q16) >> 16
    cost_low = max(low * (PHI_ONE - phi_q16), (m - low) * phi_q16)
    cost_high = max((low + 1) * (PHI_ONE - phi_q16), (m - low - 1) * phi_q16)
    q = low if cost_low <= cost_high else low + 1
    return min(m, max(q, least))


def phi_from_bandwidths(fill: float, cpu: float, fill_contended: float = 0.0, cpu_contended: float = 0.0) -> float:
    """The share of misses to fill, 0..1, from bandwidths in bytes/s of expert data.

    With the pair measured while both paths run, `fill / (fill + cpu)`: both are then busy for as long. Without it,
    equation 4 of the paper, `B_P / B_H`, which assumes that the CPU gets only what the link leaves. Zero `fill` (no
    usable link) gives 0, zero `cpu` gives 1. Raises ValueError for negative rates or none at all.
    """
    if min(fill, cpu, fill_contended, cpu_contended) < 0 or fill + cpu <= 0:
        raise ValueError(f"bandwidths must be positive: link {fill}, CPU {cpu} bytes/s")
    if fill_contended > 0 and cpu_contended > 0:
        return fill_contended / (fill_contended + cpu_contended)
    if cpu == 0:
        return 1.0
    return min(1.0, fill / cpu)


def to_q16(phi: float) -> int:
    """`phi` (0..1) as the kernel takes it."""
    return min(PHI_ONE, max(0, round(phi * PHI_ONE)))
