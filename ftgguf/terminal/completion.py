"""`ftgguf completion bash|zsh|fish`: a script for the shell, and `ftgguf complete`, which the script asks.

The script knows nothing: it passes the words typed so far on, so that names of models are those that are here now.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

SCRIPTS = {
    "bash": """_ftgguf() {
    local IFS=$'\\n' cur="${COMP_LINE:0:COMP_POINT}"
    local words=(); IFS=' ' read -r -a words <<< "$cur"; IFS=$'\\n'
    [[ "$cur" == *' ' ]] && words+=('')
    local last="${words[-1]}"
    COMPREPLY=( $(ftgguf complete -- "${words[@]:1}" 2>/dev/null) )
    if [[ "$last" == *:* && "$COMP_WORDBREAKS" == *:* ]]; then
        local lead="${last%"${last##*:}"}"
        COMPREPLY=( "${COMPREPLY[@]#"$lead"}" )
    fi
    [[ ${#COMPREPLY[@]} -eq 0 ]] && COMPREPLY=( $(compgen -f -- "$last") )
}
complete -o nosort -F _ftgguf ftgguf
""",
    "zsh": """#compdef ftgguf
_ftgguf() {
    local -a found
    found=(${(f)"$(ftgguf complete -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( ${#found} )); then compadd -Q -- "${found[@]}"; else _files; fi
}
compdef _ftgguf ftgguf
""",
    "fish": """complete -c ftgguf -f -a '(ftgguf complete -- (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
NAMED = ("run", "show", "rm", "cp", "stop", "pull", "list", "plan")
"""Commands whose argument is a model."""
OURS_ONLY = ("rm", "cp", "stop")
"""Of these the built-in models are none."""


def script(argv: Sequence[str]) -> int:
    """`completion SHELL`."""
    if len(argv) != 1 or argv[0] not in SCRIPTS:
        print("usage: ftgguf completion bash|zsh|fish   for example: source <(ftgguf completion bash)", file=sys.stderr)
        return 0 if argv and argv[0] in ("-h", "--help") else 1
    print(SCRIPTS[argv[0]], end="")
    return 0


def answer(argv: Sequence[str]) -> int:
    """`complete -- WORD...`: what the last word can become, one a line."""
    words = list(argv[1:] if argv[:1] == ["--"] else argv)
    for found in suggestions(words or [""]):
        print(found)
    return 0


def suggestions(words: Sequence[str]) -> list[str]:
    """What the last of `words` (those behind `ftgguf`) can become; empty where only a file will do."""
    from ftgguf.cli import COMMANDS

    last = words[-1]
    if len(words) == 1:
        return [name for name in ("serve", *COMMANDS) if name.startswith(last) and name != "complete"]
    if last.startswith("-"):
        return [flag for flag in _flags(words[0]) if flag.startswith(last)]
    if words[-2] in ("-m", "--model") or (words[0] in NAMED and not words[-2].startswith("-")):
        return [name for name in _models(words[0] not in OURS_ONLY or words[0] == "stop") if name.startswith(last)]
    if words[0] == "completion":
        return [name for name in SCRIPTS if name.startswith(last)]
    return []


def _flags(command: str) -> list[str]:
    if command not in ("serve", "run", "bench", "plan"):
        return []
    from ftgguf.flags.table import FLAGS

    return [name for flag in FLAGS if not flag.hidden for name in (*flag.names, *flag.no) if name.startswith("--")]


def _models(builtin: bool) -> list[str]:
    from ftgguf.pull.catalog import local_models
    from ftgguf.pull.store import Store

    try:
        names = [model.name for model in local_models(Store(None))]
    except OSError:
        return []
    if builtin and "demo" not in names:
        names.append("demo")
    return names if builtin else [name for name in names if name not in ("demo", "stories")]
