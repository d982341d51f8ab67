"""What the shell offers for an argument, on top of files: packaged recipes, runs of this folder."""

from __future__ import annotations

__all__ = ["recipes", "runs"]


def recipes(incomplete: str) -> list[str]:
    """Names of packaged recipes."""
    from equimoe.recipe.resolve import packaged_recipes

    return [name for name in packaged_recipes() if name.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Names of runs."""
    from equimoe.recipe.run_folder import known_runs

    return [name for name in known_runs() if name.startswith(incomplete)]
