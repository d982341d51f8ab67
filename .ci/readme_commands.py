"""Prints the shell commands of the README's sections named below, and its Python, as one script.

CI runs what a newcomer would type. `pip install` lines are left out (CI has just installed the built wheel), and
two documents are made for the section on data.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

DATA = "How do I say what data to train on"
SECTIONS = (
    *("Quick start", DATA, "Data at any size", "Sampling and chat"),
    *("Weights for others", "Weights of others", "Evaluation", "From Python"),
)
DOCUMENTS = """mkdir -p docs/guide
python - <<'END'
import json
text = "The quick brown fox jumps over the lazy dog. " * 400
open("docs/guide/fox.md", "w").write(text)
open("notes.jsonl", "w").writelines(json.dumps({"text": f"Note {i}. {text}"}) + chr(10) for i in range(20))
END"""


def commands(readme: str) -> list[str]:
    """One entry a code block."""
    found = []
    for section in readme.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        if title not in SECTIONS:
            continue
        for language, block in re.findall(r"```(sh|python)\n(.*?)```", body, flags=re.DOTALL):
            if language == "python":
                found.append(f"python - <<'END'\n{block}END")
            else:
                lines = [line for line in block.splitlines() if not line.startswith(("pip install", "python -m venv"))]
                found += [DOCUMENTS] * (title == DATA) + ["\n".join(lines)]
    return found


if __name__ == "__main__":
    print("\n".join(commands(Path(sys.argv[1]).read_text(encoding="utf-8"))))
