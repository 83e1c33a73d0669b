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
