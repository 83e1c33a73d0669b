"""Is docs/structure.md true? Its list of modules is written from the first line of each module.

`python -m compat.structure` rewrites the list; a test fails when it is out of date.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "structure.md"
BEGIN, END = "<!-- modules: written by `python -m compat.structure` -->", "<!-- end of modules -->"
FOLDERS = ("ftgguf", "kernels", "ggml_cpu", "libllama", "compat")


def first_line(path: Path) -> str:
    """What a file says it is: the first sentence of its docstring or of its leading comment."""
    text = path.read_text()
    if path.suffix == ".py":
        doc = ast.get_docstring(ast.parse(text)) or ""
    else:
        lines = []
        for line in text.splitlines():
            if line.startswith("//"):
                lines.append(line.lstrip("/ "))
            elif lines or (line and not line.startswith("#")):
                break
        doc = "\n".join(lines)
    paragraph = " ".join(doc.strip().split("\n\n")[0].split())
    for end in (". ", ": ", "? "):
        head, found, _ = paragraph.partition(end)
        if found and len(head) > 30:
            paragraph = head + ("?" if end == "? " else "")
            break
    return paragraph.rstrip(".")


def modules() -> str:
    """The list as Markdown, a table for each folder."""
    parts = []
    for top in FOLDERS:
        folders = sorted({p.parent for p in (ROOT / top).rglob("*") if p.suffix in (".py", ".cpp")})
        for folder in folders:
            if folder.is_symlink() or any(parent.is_symlink() for parent in folder.parents):
                continue
            rows = [
                f"| `{path.name}` | {first_line(path).replace('|', '/')} |"
                for path in sorted(folder.iterdir())
                if path.suffix in (".py", ".cpp") and path.stat().st_size and path.name != "__init__.py"
            ]
            if rows:
                parts.append(
                    f"### {folder.relative_to(ROOT)}/\n\n| file | what it answers |\n|---|---|\n" + "\n".join(rows)
                )
    return "\n\n".join(parts)


def updated(page: str) -> str:
    """`page` with its list rewritten."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{modules()}\n\n{END}{tail}"


def main() -> int:
    PAGE.write_text(updated(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
