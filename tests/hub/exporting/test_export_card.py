"""The model card: what the run says, nothing private, and text of users that breaks no table, fence or command."""

from __future__ import annotations

import ast
import json
import re
import shlex

import pytest
from tiny_runs import made_run

import equimoe
from equimoe.errors import EquimoeError
from equimoe.hub.exporting.export import export
from equimoe.hub.exporting.model_card import CardFacts, model_card
from equimoe.recipe.recipe_json import new_provenance

SIZES = {"head_dim": 8, "experts": 4, "experts_per_token": 2, "vocabulary": 304, "row_tokens": 32}


def recipe(**changes) -> equimoe.Recipe:
    model = equimoe.derive(16, layers=2, gated_norm_rank=8, **SIZES)
    base = {"name": "small", "model": model, "schedule": equimoe.Schedule(steps=20, batch_sequences=8)}
    return equimoe.Recipe(**{**base, **changes})


def card_of(run, of=None, provenance=None, **changes) -> str:
    facts = {"steps": (12,), "dtype": "bfloat16", "licence": None, "has_template": False, **changes}
    return model_card(CardFacts(run, of or recipe(), provenance or new_provenance("small"), **facts))


def metrics(run, *lines) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def blocks(card: str, language: str) -> list[str]:
    """Fenced blocks as Markdown reads them: the closing fence is at least as long as the opening one."""
    return [found[2] for found in re.finditer(rf"^(`{{3,}}){language}\n(.*?)\n\1`*$", card, re.MULTILINE | re.DOTALL)]


def cells(card: str) -> dict[str, list[str]]:
    """First cell -> other cells, of every row of every table."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in card.splitlines() if line.startswith("|")]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


# What it says.


def test_the_card_says_what_the_run_says(tiny, exported):
    card = (exported / "README.md").read_text()
    counts, lines = equimoe.counts(tiny.recipe.model), (tiny.run / "metrics.jsonl").read_text().splitlines()
    values = [json.loads(line) for line in lines]
    score = [line for line in values if "eval_loss/heldout" in line][-1]
    loss = [line["loss"] for line in values if "loss" in line][-1]
    table = cells(card)
    assert f"# {tiny.recipe.name}\n" in card and table["run"] == [f"`{tiny.run.name}`"]
    assert table["parameters"] == [f"{counts.total:,}"]
    assert table["active per token, without embeddings"] == [f"{counts.active:,}"]
    assert table["trained"] == ["12 of 12 steps, 3,072 tokens"]
    assert table["training loss"] == [f"{loss:.4f} nats per token, of the batch of step 12"]
    assert table["weights"] == ["float32, of step 12"]
    assert table["heldout"] == [
        "12",
        f"{score['eval_loss/heldout']:,.4f}",
        f"{score['eval_bits_per_byte/heldout']:,.4f}",
        f"{score['eval_tokens/heldout']:,}",
    ]
    provenance = json.loads((tiny.run / "recipe.json").read_text())["provenance"]
    assert table["corpus sha256"] == [f"`{provenance['data']['corpus_sha256']}`"]
    assert table["data"] == ["`texts`"] and table["tokenizer"] == ["byte-level BPE, trained on this data"]
    assert str(tiny.root) not in card and tiny.root.name not in card
    assert json.loads(blocks(card, "json")[0])["schedule"]["steps"] == 12
    assert not {"mean of the weights", "single checkpoint"} & set(
        re.findall(r"mean of the weights|single check\w+", card)
    )


def test_the_header_claims_no_licence_and_names_library_and_tags(exported):
    lines = (exported / "README.md").read_text().splitlines()
    header = lines[1 : lines.index("---", 1)]
    assert header[:3] == ["library_name: transformers", "pipeline_tag: text-generation", "tags:"]
    assert {"- equimoe", "- mixture-of-experts", "- grug_moe"} <= set(header)


@pytest.mark.parametrize(
    ("provenance", "said"),
    [
        ({"overrides": ["schedule.steps=10"]}, True),
        ({"overrides": ["data.path=docs/*.md"]}, False),
        ({"overrides": [], "imported": {"source": "org/name"}}, False),
    ],
)
def test_a_purpose_is_not_that_of_other_data_or_weights(tmp_path, provenance, said):
    card = card_of(tmp_path, of=recipe(purpose="Text that comes with Python."), provenance=provenance)
    assert ("Text that comes with Python." in card.split("## Recipe")[0]) is said


def test_a_licence_only_if_it_is_given(tmp_path):
    said = card_of(tmp_path, licence="cc-by-4.0")
    assert "\nlicense: cc-by-4.0\n" in said.split("---")[1] and "\nWeights: cc-by-4.0. `LICENSE` is that of the" in said
    silent = card_of(tmp_path)
    assert "license:" not in silent and "The licence of the weights was not stated. `LICENSE` is that of" in silent
    run = made_run(tmp_path / "run")
    for wrong in ("mit\ntags: x", "", "Apache 2.0", "a" * 65):
        with pytest.raises(EquimoeError, match=r"license .*must be an id of the Hub"):
            export(run, tmp_path / "out", verified=False, license=wrong)
    out = export(run, tmp_path / "out", verified=False, license="mit").folder
    assert "\nlicense: mit\n" in (out / "README.md").read_text()


def test_every_set_has_its_last_score_up_to_the_step(tmp_path):
    metrics(
        tmp_path,
        {"step": 4, "loss": 3.0},
        {"step": 4, "eval_loss/heldout": 4.0, "eval_bits_per_byte/heldout": 2.0, "eval_tokens/heldout": 900},
        {"step": 8, "eval_loss/heldout": 3.5, "eval_bits_per_byte/heldout": 1.75, "eval_tokens/heldout": 900},
        {"step": 4, "eval_loss/code": 1.25, "eval_bits_per_byte/code": 0.5, "eval_tokens/code": 12_345},
        {"step": 8, "eval_loss/macro": 2.0},
        {"step": 9, "loss": 2.875},
        {"step": 16, "eval_loss/heldout": 1.0, "loss": 1.0},
        {"loss": 9.0, "eval_loss/heldout": 9.0},
        {"step": "8", "loss": "nine"},
    )
    table = cells(card_of(tmp_path))
    assert table["heldout"] == ["8", "3.5000", "1.7500", "900"]
    assert table["code"] == ["4", "1.2500", "0.5000", "12,345"] and table["macro"] == ["8", "2.0000", "", ""]
    assert table["training loss"] == ["2.8750 nats per token, of the batch of step 9"]


def test_a_mean_is_named_and_the_scores_are_not_its(tmp_path):
    metrics(tmp_path, {"step": 12, "eval_loss/heldout": 4.0})
    card = card_of(tmp_path, steps=(12, 8, 4))
    assert cells(card)["weights"] == ["bfloat16, mean of the weights of steps 4, 8, 12"]
    assert "**These are scores of the single checkpoint of step 12, not of the mean.**" in card


def test_a_run_without_metrics_has_a_card(tmp_path):
    card = card_of(tmp_path, of=recipe(purpose="Learn\nhow <b>it</b> goes."))
    assert "## Evaluations" not in card and "\n\nLearn how &lt;b>it&lt;/b> goes.\n\n" in card


# What it does not say.

PRIVATE = {
    "/home/alice/secret/docs/a.txt": "a.txt",
    "secret/alice/docs": "docs",
    "~/alice/secret/notes.jsonl": "notes.jsonl",
    "C:\\Users\\alice\\secret\\b.txt": "b.txt",
    "\\\\alice\\secret\\c.txt": "c.txt",
    "/home/alice/secret/**/*.md": "*.md",
    "/mnt/secret/alice/docs/": "docs",
    "../alice/secret/d.txt": "d.txt",
    "s3://secret/alice/e.txt": "e.txt",
    "embedded": "embedded",
    "hf://org/name@0123abc/en/*.parquet": "hf://org/name@0123abc/en/*.parquet",
}


@pytest.mark.parametrize(("path", "shown"), PRIVATE.items())
def test_of_a_path_only_the_last_part_is_shown(tmp_path, path, shown):
    provenance = {**new_provenance(path), "data": {"corpus_sha256": "c0ffee", "prepared_in": path}, "parent": [path]}
    several, tokenizer = (path, "embedded"), path if path != "embedded" else "train"
    for data in (path, several, f"{path}, embedded"):
        of = recipe(data=equimoe.Data(path=data, tokenizer=tokenizer), evals={"code": data})
        card = card_of(tmp_path, of, provenance)
        assert not re.search(r"alice|secret|Users|/home|/mnt", card)
        settings = json.loads(blocks(card, "json")[0])
        names = {path: shown, several: [shown, "embedded"], f"{path}, embedded": f"{shown},embedded"}[data]
        assert settings["data"]["path"] == settings["evals"]["code"]["path"] == names
        assert settings["data"]["tokenizer"] == (shown if path != "embedded" else "train")
        assert cells(card)["prepared in"] == cells(card)["started from"] == [f"`{shown}`"]


def test_hub_ids_stay(tmp_path):
    of = recipe(data=equimoe.Data(path="hf://org/data", tokenizer="meta-llama/Llama-3.1-8B"))
    card = card_of(tmp_path, of, {**new_provenance("small"), "parent": "org/first@0123"})
    assert cells(card)["tokenizer"] == ["`meta-llama/Llama-3.1-8B`"] and cells(card)["data"] == ["`hf://org/data`"]


def test_a_run_of_imported_weights_says_where_they_came_from(tmp_path):
    """As `equimoe import` leaves it: no data yet, nothing trained, no metrics."""
    origin = {"source": "org/first", "revision": "0123abc", "step": None}
    provenance = {**new_provenance("imported"), "imported": origin}
    table = cells(card_of(tmp_path, recipe(data=equimoe.Data(path=None)), provenance, steps=(0,)))
    assert table["started from"] == ["`source org/first, revision 0123abc`"] and "data" not in table
    assert table["trained"] == ["0 of 20 steps, 0 tokens"] and table["recipe"] == ["`small`"]


def test_recipe_and_its_file(tmp_path):
    assert cells(card_of(tmp_path, provenance=new_provenance("small")))["recipe"] == ["`small`"]
    found = cells(card_of(tmp_path, provenance=new_provenance("/home/alice/mine.py")))["recipe"]
    assert found == ["`small`, from `mine.py`"]


# Text of users.


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ((), "The function returns"),
        (("", " \n "), "The function returns"),
        (("-", "--tokens 3", "b"), "b"),
        (("a\0b", "\x1b[2J", "\ud800", "c"), "c"),
        (("say \"hi\" and 'ho' to $HOME `id` \\n",), None),
        (("two\nlines\n",), None),
        (("```\n# closes the fence\n```",), None),
        (("````",), None),
        (("数学 | 🙂",), None),
    ],
)
def test_prompts_are_the_same_text_in_shell_and_python(tmp_path, prompts, expected):
    card = card_of(tmp_path, recipe(samples=equimoe.Samples(prompts=prompts)))
    expected = prompts[0] if expected is None else expected
    (shell,), python = blocks(card, "sh"), blocks(card, "python")
    words = shlex.split(shell, comments=True)
    at = words.index("sample")
    assert words[at - 1 : at + 3] == ["equimoe", "sample", "MODEL", expected]
    calls = [node for node in ast.walk(ast.parse(python[0])) if isinstance(node, ast.Call)]
    assert [c.args[0].value for c in calls if getattr(c.func, "id", "") == "tokenizer"] == [expected]
    assert len(python) == 2 and len(blocks(card, "json")) == 1


def test_bars_breaks_and_backticks_stay_in_their_cell(tmp_path):
    of = recipe(name="a|b\nc`d", data=equimoe.Data(path=("x|y.txt", "line\nbreak.txt")))
    card = card_of(tmp_path, of)
    assert "\n# a|b c`d\n" in card
    assert cells(card)["recipe"] == ["`` a\\|b c`d ``, from `small`"]
    assert cells(card)["data"] == ["`x\\|y.txt, line break.txt`"]


def test_the_commands_of_the_card_exist(tmp_path):
    import typer

    from equimoe.cli.app import app

    known = set(typer.main.get_command(app).commands) | {"eval", "download"}  # under way
    (shell,) = blocks(card_of(tmp_path, has_template=True), "sh")
    used = set(re.findall(r"^equimoe (\w+)", shell, re.MULTILINE))
    assert used == {"sample", "eval", "download", "chat"} and used <= known


def test_a_run_over_a_store_names_its_cells(tmp_path):
    mixture = equimoe.Mixture("docs:0.9/0.25 talks:0.1/0.75", (0.8, 0.2))
    table = cells(card_of(tmp_path, recipe(data=equimoe.Data(path="/secret/place/store"), mixture=mixture)))
    assert table["data"] == ["`store`"] and table["tokenizer"] == ["that of the store"]
    assert table["mixture of cells"] == ["docs 90.0% → 25.0%, talks 10.0% → 75.0%"]
    assert table["phases"] == ["80.0% and 20.0% of the steps"]
    many = equimoe.Mixture(" ".join(f"c{n:02d}q0:{1 / 16}" for n in range(16)))
    table = cells(card_of(tmp_path, recipe(mixture=many)))
    assert table["mixture"] == ["of 16 cells, weights in recipe.json"] and "phases" not in table
