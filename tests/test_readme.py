"""The README tells the truth: its tree is the tree, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def files_of_the_tree() -> set[str]:
    """Paths that the section "The tree" names: a folder line ends in /, deeper lines belong to it."""
    block = README.split("## The tree")[1].split("```")[1]
    found, folders = set(), {}
    for line in block.strip("\n").splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"\s*([\w./]+(?: [\w./]+)*?)(?:\s{2,}|$)", line).group(1).split()
        parent = "".join(folders[d] for d in sorted(folders) if d < depth)
        if names[0].endswith("/"):
            folders = {d: f for d, f in folders.items() if d < depth} | {depth: names[0]}
        else:
            found |= {parent + name for name in names}
    return found


def test_the_tree_names_every_file_and_no_other():
    shipped = {
        str(path.relative_to(ROOT))
        for folder in ("equimoe", "cli", "recipes")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "__init__.py"
    }
    assert files_of_the_tree() == shipped


def test_every_command_of_the_readme_exists():
    import typer

    from equimoe.cli.app import app

    group = typer.main.get_command(app)
    known = {name for name in group.commands}
    used = set(re.findall(r"^equimoe (\w+)", README, flags=re.MULTILINE))
    assert used and used <= known, used - known
