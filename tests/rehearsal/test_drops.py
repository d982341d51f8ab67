"""What `equimoe drops` reads from its options, and what it makes of them: by hand at sizes that can be counted."""

from __future__ import annotations

import dataclasses
import math
import statistics

import pytest

from equimoe import EquimoeError
from equimoe.recipe.resolve import resolve
from equimoe.rehearsal.dispatch import Dropped
from equimoe.rehearsal.drops import rehearse_drops
from equimoe.rehearsal.drops_options import DropsOptions, settings, tokens_of_a_shard
from equimoe.rehearsal.expected import Group, Rate, Rates, fit_skew, measure
from equimoe.rehearsal.routing import RoutingModel
from equimoe.rehearsal.rules import Rule

QUICK = {"trials": 2, "sample_tokens": 128}


def recipe(name: str = "tiny", *overrides: str):
    return resolve(name, list(overrides)).recipe


# Options.


def test_tokens_of_a_shard_are_those_of_a_device_and_micro_batch():
    assert tokens_of_a_shard(recipe("hero")) == 65_536  # 16 rows of 4,096 on each of 704
    assert tokens_of_a_shard(recipe("hero", "schedule.accumulation=4")) == 16_384
    assert tokens_of_a_shard(recipe("tiny")) == 8 * 256


def test_what_is_asked_by_default_and_in_lists():
    asked = settings(recipe("hero"), DropsOptions())
    assert [(c.seq, c.documents, c.shards) for c in asked.cases] == [(4096, 16, 64)]
    assert asked.transports == ("pooled_wave", "ragged") and asked.capacities == ()
    asked = settings(recipe("hero"), DropsOptions(seq="4096, 65536", shards="8,64", capacity="1.05,1.15,1.05"))
    assert [(c.documents, c.shards) for c in asked.cases] == [(16, 8), (16, 64), (1, 8), (1, 64)]
    assert asked.capacities == (1.05, 1.15)
    asked = settings(recipe("hero"), DropsOptions(documents_per_shard="2,16"))
    assert [(c.seq, c.documents) for c in asked.cases] == [(None, 2), (None, 16)]


def test_every_mistake_is_named_at_once():
    wrong = DropsOptions(
        seq="5000,x,0",
        capacity="0,nan,-1,1e999",
        shards="7",
        transport="pooled",
        skew=math.nan,
        imbalance=-0.1,
        seed=-1,
        trials=0,
        data=("a.txt",),
        fit="1.5",
    )
    with pytest.raises(EquimoeError) as refused:
        settings(recipe("hero"), wrong)
    text = str(refused.value)
    for expected in (
        "--seq (5000): must divide the tokens of a shard (65,536)",
        "--seq ('x'): must be whole numbers of at least 1",
        "--seq ('0'): must be whole numbers",
        *(f"--capacity ('{bad}'): must be numbers above 0" for bad in ("0", "nan", "-1", "1e999")),
        "--shards (7): must divide model.num_experts (384); use one of 1, 2, 3, 4, 6, 8",
        "--transport ('pooled'): must be one of pooled_wave, ragged, per_cell",
        "--skew (nan): must be in 0 .. 20",
        "--imbalance (-0.1)",
        "--seed (-1)",
        "--trials (0): must be at least 1",
        "--data (('a.txt',)): is for --load",
        "--skew and --fit",
        "--fit ('1.5'): must be a drop rate between 0 and 1, or public",
    ):
        assert expected in text, expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq": "131072"}, "--seq (131072): must divide the tokens of a shard (65,536)"),
        ({"documents_per_shard": "65537"}, "must be at most the tokens of a shard (65,536)"),
        ({"seq": "4096", "documents_per_shard": "2"}, "says how long documents are, and so does"),
        ({"fit": "0.1"}, "needs one setting, and there are 2"),
        ({"fit": "nan", "transport": "ragged"}, "must be a drop rate between 0 and 1"),
        ({"sample_tokens": 10**9, "shards": "64", "capacity": "1.33"}, None),  # capped by the tokens there are
        ({"sample_tokens": 65_536, "shards": "384", "capacity": "2"}, "slots, which is 5 GB; use fewer tokens"),
        ({"capacity": "1e300"}, "slots, which is 5 GB; use fewer tokens"),
        ({"transport": ""}, "--transport (''): must be one of pooled_wave, ragged, per_cell"),
        ({"capacity": ""}, "--capacity (''): must be numbers above 0"),
    ],
)
def test_one_mistake(options, message):
    if message is None:
        settings(recipe("hero"), DropsOptions(**options))
        return
    with pytest.raises(EquimoeError) as refused:
        settings(recipe("hero"), DropsOptions(**options))
    assert message in str(refused.value) and "1 problem:" in str(refused.value)


def test_a_batch_that_the_mesh_does_not_divide_is_named():
    odd = dataclasses.replace(recipe("hero"), schedule=dataclasses.replace(recipe("hero").schedule, batch_sequences=7))
    with pytest.raises(EquimoeError, match="schedule.batch_sequences .7.: must be a multiple of mesh.replica"):
        settings(odd, DropsOptions())


# Rates.


def test_mean_and_standard_error_are_those_of_the_statistics_module():
    found = [Dropped(1, 2, 100), Dropped(4, 0, 100), Dropped(3, 5, 100)]
    total = [0.03, 0.04, 0.08]
    rates = Rates.of(found)
    assert rates.sender.mean == pytest.approx(8 / 300) and rates.receiver.mean == pytest.approx(7 / 300)
    assert rates.total.mean == pytest.approx(0.05)
    assert rates.total.error == pytest.approx(statistics.stdev(total) / math.sqrt(3))
    assert (rates.total.low, rates.total.high) == (0.03, 0.08)
    assert Rate.of([0.5]).error is None


def test_documents_are_shortened_and_never_fewer():
    group = Group(8, 2, 4, 1000, 30)
    assert group.sampled(100) == dataclasses.replace(group, tokens=100)
    assert group.sampled(7).tokens == 30
    assert group.sampled(5000) == group


def test_a_fit_drops_what_was_asked_for():
    group, rule = Group(16, 2, 4, 256, 2), Rule("per_cell", 1.5, 1.5)
    fitted = fit_skew(0.1, group, rule, imbalance=0.0, seed=3, trials=3)
    again = measure([fitted] * 3, group, [rule], seed=3)[rule].total.mean
    assert again == pytest.approx(0.1, abs=0.003)
    assert fitted == fit_skew(0.1, group, rule, imbalance=0.0, seed=3, trials=3)
    with pytest.raises(EquimoeError, match="must be between .*%, what skews of 0 and 4 give"):
        fit_skew(0.99, group, rule, imbalance=0.0, seed=3, trials=3)


def test_perfectly_even_routing_drops_nothing_and_hopeless_routing_what_it_must():
    """All experts of every token: each load is its mean. Then K = 1 and one document that wants hardly any but one."""
    rules = [Rule("pooled_wave", 1.0, 1.0, waves=1), Rule("ragged", 1.0, 1.0), Rule("per_cell", 1.0, 1.0)]
    even = measure([RoutingModel(0.0)], Group(6, 6, 3, 60, 2), rules, seed=0)
    assert all(rates.total.mean == 0 for rates in even.values())
    lonely = measure([RoutingModel(20.0)], Group(8, 1, 1, 64, 1), [rules[2]], seed=1)[rules[2]]
    assert 0.6 < lonely.total.mean <= 1 - 1 / 8


# The report.


@pytest.fixture(scope="module")
def report():
    options = DropsOptions(documents_per_shard="1,8", capacity="1.1", shards="4", **QUICK)
    return rehearse_drops(recipe("tiny"), options)


def test_table_and_json_agree(report):
    facts, lines = report.to_dict(), list(report.lines())
    assert lines[0] == "tiny: 16 experts, 2 a token; 2,048 tokens a shard, of which 128 are drawn"
    assert lines[1].startswith("skew 0.64 (the default)")
    table = [line.split() for line in lines[3:]]
    assert len(table) == len(facts["rows"]) == 2 * 2
    for cells, row in zip(table, facts["rows"], strict=True):
        assert cells[:5] == ["-", str(row["documents_per_shard"]), "4", row["transport"], "1.1"]
        parts = [row[name]["mean"] for name in ("dropped_at_sender", "dropped_at_receiver", "dropped")]
        assert cells[5:8] == [f"{100 * part:.3f}%" for part in parts]
        assert cells[8] == f"{100 * row['dropped']['error']:.3f}%"
        assert parts[0] + parts[1] == pytest.approx(parts[2])
    assert facts["trials"] == 2 and facts["sampled_tokens_per_shard"] == 128


def test_more_documents_drop_less_and_a_seed_is_exact(report):
    rates = {(row.rule.transport, row.case.documents): row.rates.total.mean for row in report.rows}
    assert rates["pooled_wave", 1] > rates["pooled_wave", 8] > 0
    again = rehearse_drops(recipe("tiny"), DropsOptions(documents_per_shard="1,8", capacity="1.1", shards="4", **QUICK))
    assert again.to_dict() == report.to_dict()


def test_the_picture_holds_a_line_for_each_rule(report, tmp_path):
    pytest.importorskip("matplotlib")
    report.draw(tmp_path / "drops.svg")
    text = (tmp_path / "drops.svg").read_text()
    assert "<svg" in text and "pooled_wave 1.1, 4 shards" in text and "ragged 1.1, 4 shards" in text


def test_the_skew_of_a_run_is_taken_layer_by_layer(tiny, monkeypatch):
    monkeypatch.setenv("EQUIMOE_CACHE", str(tiny.cache))
    monkeypatch.setattr("equimoe.rehearsal.observed.SHORTEST_PIECE", 8)
    options = DropsOptions(load=str(tiny.run), transport="per_cell", shards="2", capacity="1.5", **QUICK)
    found = rehearse_drops(recipe("tiny"), options)
    facts, layers = found.to_dict(), tiny.recipe.model.num_hidden_layers
    assert layers == 2 == len(facts["skew_of_layers"]) == len(facts["imbalance_of_layers"])
    assert facts["skew_of_trials"] == sorted(facts["skew_of_layers"])  # two trials: the less and the more skewed layer
    assert sorted(facts["imbalance_of_trials"]) == sorted(facts["imbalance_of_layers"])
    assert "skew by layer" in "\n".join(found.lines())
