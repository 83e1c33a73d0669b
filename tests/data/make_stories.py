"""Makes ftgguf/data/stories260K-8x-top2-Q8_0.gguf, the `stories` model, from tests/data/stories260K.gguf."""

from __future__ import annotations

from pathlib import Path

from ftgguf.pull.upcycle import upcycle

ROOT = Path(__file__).parents[2]
# The model knows no roles: a chat is the text so far, and the answer goes on with the story.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% if not loop.last %} {% endif %}{% endfor %}"

if __name__ == "__main__":
    upcycle(
        ROOT / "tests" / "data" / "stories260K.gguf",
        ROOT / "ftgguf" / "data" / "stories260K-8x-top2-Q8_0.gguf",
        expert_type="Q8_0",
        name="stories260K 8x top-2",
        chat_template=TEMPLATE,
    )
