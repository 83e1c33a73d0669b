"""How many of a layer's misses go over PCIe and how many stay on the CPU: the integer rule.

Arithmetic of arXiv 2608.16157 (equations 3 and 4): with q of m missing experts filled over a link of B_P and the rest
read by the CPU at what B_H leaves, both ends finish together at q = m * B_P / B_H. `phi` is that share.
"""

from __future__ import annotations

PHI_ONE = 1 << 16
"""phi = 1 in Q16."""
LATE_MOST = 8 * PHI_ONE
"""Bound of `late`: eight experts."""


def rows_each(rows: int, top_k: int, experts: int) -> float:
    """Rows that an expert gets in a pass of `rows` rows that want `top_k` of `experts` each, of those that get any;
    uniform routing."""
    wanted = experts * (1 - (1 - top_k / experts) ** rows)
    return rows * top_k / wanted


def balanced_fills(m: int, phi_q16: int, least: int = 1, late_q16: int = 0) -> int:
    """Fills for `m` misses at a share of `phi_q16` / 65536: of the integers around m * phi the one whose slower branch
    is done first, `max(f * (1 - phi), (m - f) * phi + late)`, the lower on a tie; at least `least`, at most m.

    `late_q16`: what the CPU's branch takes beyond its bytes, less what the link's takes, in Q16 of the time that an
    expert takes on both paths one after the other. It does not count where the CPU has nothing to do (f = m). Zero
    gives the rule of the paper's code.

    The kernel does the same in int32 (m < 2^14, |late| <= 2^19). `least` is 1 wherever slots exist: without it small m
    give q = 0 for phi < 1/3 and the cache of such layers never warms.
    """
    low = min(max((m * phi_q16 + late_q16) >> 16, 0), m)
    high = min(low + 1, m)
    cost_low = _makespan(low, m, phi_q16, late_q16)
    cost_high = _makespan(high, m, phi_q16, late_q16)
    q, cost = (low, cost_low) if cost_low <= cost_high else (high, cost_high)
    if m * (PHI_ONE - phi_q16) < cost:
        q = m
    return min(m, max(q, least))


def split_misses(
    m: int, phi_q16: int, least: int = 1, late_q16: int = 0, link_q16: int = 0, cpu_q16: int = 0
) -> tuple[int, bool]:
    """(fills, whether one of the others is shared) for `m` misses.

    A shared expert has its gate and up computed by the CPU while its down comes over the link, where the GPU multiplies
    it: halves between whole numbers of experts, which few misses leave far apart. `link_q16` is what that adds to the
    link's time (with the wait for the hidden row), `cpu_q16` what it takes from the CPU's, in the unit of `late_q16`;
    zero `link_q16` rules it out. It is chosen where its slower branch is done earlier than `balanced_fills`'s; `least`
    experts are filled whole all the same. The kernel does the same in int32.
    """
    q = balanced_fills(m, phi_q16, least, late_q16)
    if link_q16 <= 0 or m <= least:
        return q, False
    cost = _makespan(q, m, phi_q16, late_q16)
    low = min(max((m * phi_q16 + late_q16 - link_q16 - cpu_q16) >> 16, least), m - 1)
    high = min(low + 1, m - 1)
    costs = [max(f * (PHI_ONE - phi_q16) + link_q16, (m - f) * phi_q16 + late_q16 - cpu_q16) for f in (low, high)]
    f, shared = (low, costs[0]) if costs[0] <= costs[1] else (high, costs[1])
    return (f, True) if shared < cost else (q, False)


def _makespan(f: int, m: int, phi_q16: int, late_q16: int) -> int:
    cpu = (m - f) * phi_q16 + late_q16 if f < m else 0
    return max(f * (PHI_ONE - phi_q16), cpu)


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
