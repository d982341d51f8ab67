"""Shell completion: packaged recipes for RECIPE, the runs of this folder for RUN."""

from __future__ import annotations

from packaged import PACKAGED
from typer.testing import CliRunner

from equimoe.cli.app import app


def offered(words: str) -> set[str]:
    """What bash is offered behind `words`; the last one is being typed."""
    environment = {"_EQUIMOE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    return set(CliRunner().invoke(app, [], env=environment, prog_name="equimoe").stdout.split())


def test_recipes_and_runs_are_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("alpha", "beta"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "recipe.json").write_text("{}")
    (tmp_path / "runs" / "no_run").mkdir()
    assert offered("equimoe train ") == set(PACKAGED)
    assert offered("equimoe show o") == {"one_gpu"}
    assert offered("equimoe resume ") == {"alpha", "beta"}
    assert offered("equimoe sample b") == {"beta"}
