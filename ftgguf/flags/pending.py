"""Flags whose effect is not built yet: accepted, and said so once. Take a row out when its effect works.

The tier in the table is what the flag will be; this list keeps the promise honest until then.
`python -m ftgguf.flags.audit` finds flags that belong here, and rows that no longer do.
"""

from __future__ import annotations

_SNAPSHOTS = "no model family that needs snapshots of its state is served yet"

PENDING: dict[str, str] = {
    **dict.fromkeys(("--ctx-checkpoints", "--checkpoint-min-step"), _SNAPSHOTS),
    "--op-offload": "prompts use the GPU for experts in host memory wherever that is predicted to be faster",
    "--lazy-mode": "files are mapped, so rows of large tables are read when they are needed, in every mode",
    "--cpu-strict": "threads share the CPUs of the mask; the system places them",
}
"""Canonical spelling (`Flag.name`) -> what happens until it is built."""
