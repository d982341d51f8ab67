"""The folder of a simulated run beside that of a real one, and beside itself without faults."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from equimoe.counting import counts
from equimoe.errors import EquimoeError
from equimoe.plan.goodput.inputs import PlannedStops, goodput_of
from equimoe.plan.goodput.study import simulate
from equimoe.plan.goodput.trial import Trial
from equimoe.recipe import Transport
from equimoe.recipe.recipe_json import read_recipe
from equimoe.recipe.resolve import resolve
from equimoe.rehearsal.plausible import ANCHORS, Plausible, ladder_loss
from equimoe.rehearsal.simulated_run import START, write_simulated_run
from equimoe.train.metrics import METRICS, RunLog, declared, read_lines, rewind
from equimoe.train.scoring import missing_sets

FILES = ("recipe.json", "metrics.jsonl", "timing.jsonl", "events.jsonl")


@pytest.fixture(scope="module")
def recipe():
    """A short run on several devices, with every kind of line: first evaluation, a second set, drops."""
    base = resolve("tiny", ["schedule.steps=400", "evaluation.every_steps=70", "evaluation.at_first_step=true"]).recipe
    pooled = Transport("pooled_wave")
    return dataclasses.replace(base, transport=pooled, evals={"code": "eval/*.py"})


def inputs_of(recipe, **changed):
    """A step of 2 s, a save every 90 s, a fault about every 2 minutes."""
    asked = {"step_seconds": 2.0, "hosts": 2, "save_seconds": 1.0, "restore_seconds": 4.0, "mtbf_hours": 0.06}
    more = {"restart_seconds": 10.0, "write_seconds": 3.0, "detection_seconds": 60.0, "lost_share": 0.0}
    return goodput_of(
        recipe, **{**asked, **more, "per": "host", "save_every_minutes": 1.5, "evaluation_seconds": 5.0, **changed}
    )


@pytest.fixture(scope="module")
def faulty(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulated") / "run"
    return write_simulated_run(recipe, inputs_of(recipe), folder, seed=1)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("file", ["metrics", "timing"])
def test_what_is_written_is_what_the_table_declares(faulty, file):
    """All of it but the seconds of samples: they are texts, and nothing has written any; and it reads no store, has no
    prediction and skips nothing."""
    elsewhere = {"samples_seconds", "mixture_segment", "cell_share/*", "cell_epochs/*", "skipped_update"}
    elsewhere |= {"predicted_loss/*", "predicted_low/*", "predicted_high/*"}
    written = {declared(name) for line in read_lines(faulty.folder / f"{file}.jsonl") for name in line}
    assert written == {name for name, metric in METRICS.items() if metric.file == file} - elsewhere | {"step"}


def test_faults_leave_the_metrics_of_a_run_without_them(recipe, faulty, tmp_path):
    """Line for line, as with a real run (train/metrics.py); what was taken back stands in events.jsonl."""
    clean = write_simulated_run(recipe, inputs_of(recipe, mtbf_hours=None), tmp_path / "clean", seed=1)
    assert faulty.faults >= 3 and clean.faults == 0
    assert contents(faulty.folder)["metrics.jsonl"] == contents(clean.folder)["metrics.jsonl"]
    assert faulty.days > clean.days
    taken = [event for event in read_lines(faulty.folder / "events.jsonl") if event["event"] == "rewound"]
    lines = contents(clean.folder)["metrics.jsonl"].decode().splitlines()
    steps = [json.loads(event["line"]) for event in taken if event["file"] == "metrics.jsonl"]
    assert all(line["step"] > event["to_step"] for event, line in zip(taken, steps, strict=False))
    assert all(event["line"] in lines for event in taken if event["file"] == "metrics.jsonl")
    trial = Trial(inputs_of(recipe), 1, 0).run()
    assert sum("loss" in line for line in steps) == trial.lost_steps > 0
    assert faulty.faults == trial.faults
    assert not any(event["event"] == "rewound" for event in read_lines(clean.folder / "events.jsonl"))


def test_events_tell_the_history(recipe, faulty):
    events = [event for event in read_lines(faulty.folder / "events.jsonl") if event["event"] != "rewound"]
    assert [event["event"] for event in events[:2]] == ["simulated", "started"] and events[-1]["event"] == "finished"
    times = [event["time"] for event in events]
    assert times == sorted(times) and times[0] == START
    assert times[-1] == pytest.approx(START + faulty.days * 86_400, abs=0.01)
    assert sum(event["event"] == "simulated_fault" for event in events) == faulty.faults
    saved = {0}
    for event in events:
        if event["event"] == "saved":
            saved.add(event["step"])
            assert event["path"] == f"checkpoints/{event['step']}"
        elif event["event"] == "resumed":
            assert event["step"] == max(saved)
    assert max(saved) == 400
    assert set(events[1]) == {"event", "time", "step", "devices", "processes", "device", "compute_dtype"}


def test_it_is_the_first_of_the_runs_that_are_simulated(recipe, faulty):
    found = simulate(inputs_of(recipe), trials=1, seed=1)
    assert (found.days.mean, found.faults.mean) == (pytest.approx(faulty.days, rel=1e-12), faulty.faults)


def test_a_planned_stop_is_a_resume_that_loses_nothing(recipe, tmp_path):
    stops = PlannedStops(every_hours=0.1, hours=0.05)
    made = write_simulated_run(
        recipe, inputs_of(recipe, mtbf_hours=None, planned_stops=stops), tmp_path / "run", seed=1
    )
    kinds = [event["event"] for event in read_lines(made.folder / "events.jsonl")]
    assert (
        kinds.count("simulated_stop") == kinds.count("resumed") == 3
    )  # after 6, 12 and 18 minutes; 400 steps are 13 of them
    assert "rewound" not in kinds


def test_readers_of_the_library_take_it(recipe, faulty):
    found, provenance = read_recipe(faulty.folder)
    assert found == dataclasses.replace(
        recipe,
        compute_dtype="bfloat16",
        optimizer=dataclasses.replace(recipe.optimizer, newton_schulz_dtype="bfloat16"),
    )
    assert provenance["simulated"]["seed"] == 1 and provenance["simulated"]["inputs"]["mtbf_hours"] == 0.06
    assert "data" not in provenance  # so that resume refuses it
    assert {path.name for path in faulty.folder.iterdir()} == set(FILES)
    lines = read_lines(faulty.folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 401))
    for step in (1, 70, 350, 400):
        assert missing_sets(faulty.folder, recipe, step) == []
    macro = next(line for line in lines if line["step"] == 70 and "eval_loss/macro" in line)
    one, other = (
        next(v[f"eval_loss/{n}"] for v in lines if f"eval_loss/{n}" in v and v["step"] == 70)
        for n in ("heldout", "code")
    )
    assert macro["eval_loss/macro"] == pytest.approx((one + other) / 2)


def test_a_real_rewind_works_on_it(faulty, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name, data in contents(faulty.folder).items():
        (copy / name).write_bytes(data)
    assert rewind(copy, 200) > 400
    assert max(line["step"] for line in read_lines(copy / "metrics.jsonl")) == 200


def test_the_same_seed_writes_the_same_bytes(recipe, faulty, tmp_path):
    again = write_simulated_run(recipe, inputs_of(recipe), tmp_path / "again", seed=1)
    other = write_simulated_run(recipe, inputs_of(recipe), tmp_path / "other", seed=2)
    assert contents(again.folder) == contents(faulty.folder)
    differing = {name for name in FILES if contents(other.folder)[name] != contents(again.folder)[name]}
    assert differing == set(FILES)


def test_until_a_step_it_is_the_beginning_of_the_whole(recipe, faulty, tmp_path):
    part = write_simulated_run(recipe, inputs_of(recipe), tmp_path / "part", seed=1, until_step=150)
    assert part.step == 150 and part.days < faulty.days
    found, whole = contents(part.folder)["metrics.jsonl"], contents(faulty.folder)["metrics.jsonl"]
    assert whole.startswith(found)
    assert [line["step"] for line in read_lines(part.folder / "metrics.jsonl")][-1] == 150
    events = contents(part.folder)["events.jsonl"].splitlines()
    assert events[1:] == contents(faulty.folder)["events.jsonl"].splitlines()[1 : len(events)]
    assert b"finished" not in events[-1]


def test_nothing_is_ever_overwritten(recipe, faulty, tmp_path):
    before = contents(faulty.folder)
    with pytest.raises(EquimoeError) as caught:
        write_simulated_run(recipe, inputs_of(recipe), faulty.folder)
    assert str(caught.value) == (
        f"simulated run ({str(faulty.folder)!r}): its folder must be new or empty. Name another"
    )
    assert contents(faulty.folder) == before


def test_a_kill_leaves_no_folder(recipe, tmp_path, monkeypatch):
    def killed(log):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunLog, "sync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_simulated_run(recipe, inputs_of(recipe), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_belong_together_is_refused(recipe, tmp_path):
    other = dataclasses.replace(inputs_of(recipe), steps=7, evaluation_every_steps=3)
    with pytest.raises(EquimoeError) as caught:
        write_simulated_run(recipe, other, tmp_path / "run", seed=-1, until_step=401)
    assert [line.split(" ")[0] for line in caught.value.problems] == [
        *("steps", "seed", "until_step", "evaluation_every_steps")
    ]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_would_never_end_is_not_begun(recipe, tmp_path):
    with pytest.raises(EquimoeError, match="it does not get anywhere"):
        write_simulated_run(recipe, inputs_of(recipe, mtbf_hours=0.001), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# ---- the numbers


def test_the_law_meets_the_public_anchors_and_what_they_predicted():
    for flops, loss in ANCHORS:
        assert ladder_loss(flops) == pytest.approx(loss, rel=0.003)
    assert ladder_loss(1.19e23) == pytest.approx(2.256, rel=0.01)  # the run that was predicted, measured


def test_the_hero_has_a_healthy_course():
    hero = resolve("hero").recipe
    values = Plausible(hero, 0)
    assert values.smooth_loss(1) == pytest.approx(math.log(128_256), rel=1e-6)
    step = round(1.19e23 / (150_362_652_672 * 46_137_344))
    assert values.smooth_loss(step) == pytest.approx(2.256, rel=0.01)
    losses = values.smooth_loss(np.arange(1, 390_252))
    assert np.all(np.diff(losses) < 0)
    sampled = {step: values.found(step, with_norms=False) for step in range(50_000, 390_251, 500)}
    norms = {step: found.gradient_norm for step, found in sampled.items()}
    thirds = [
        np.mean([n for s, n in norms.items() if a * 390_251 < s <= b * 390_251])
        for a, b in ((0.13, 0.2), (0.25, 0.4), (0.8, 1))
    ]
    assert thirds[1] > 1.1 * thirds[0] and thirds[1] > 1.5 * thirds[2]  # hero_spec section 6: peaks near 25-40 %
    last = sampled[390_000]
    assignments = 46_137_344 * 8 * 48
    dropped = int((last.dropped_at_sender + last.dropped_at_receiver).sum())
    assert dropped / assignments == pytest.approx(0.04, rel=0.5)
    first = values.found(1, with_norms=True)
    assert int((first.dropped_at_sender + first.dropped_at_receiver).sum()) / assignments == pytest.approx(0.1, rel=0.5)
    assert sum(norm**2 for norm in first.gradient_norms.values()) == pytest.approx(first.gradient_norm**2)


def test_a_step_gives_the_same_numbers_whatever_was_asked_before():
    recipe = resolve("tiny", ["schedule.steps=5000"]).recipe
    forth, back = Plausible(recipe, 3), Plausible(recipe, 3)
    steps = (1, 1024, 1025, 3000)
    found = {step: forth.found(step, with_norms=False).loss for step in steps}
    assert found == {step: back.found(step, with_norms=False).loss for step in reversed(steps)}


@pytest.mark.slow
def test_beside_the_files_of_a_real_run(tiny, tmp_path):
    """The same lines with the same names in the same order, the same steps, tokens, rates and constant norms."""
    inputs = goodput_of(tiny.recipe, step_seconds=1.0, hosts=1, save_seconds=0.5, restore_seconds=0.0, mtbf_hours=None)
    made = write_simulated_run(tiny.recipe, inputs, tmp_path / "run")
    real, simulated = read_lines(tiny.run / "metrics.jsonl"), read_lines(made.folder / "metrics.jsonl")
    assert [list(line) for line in simulated] == [list(line) for line in real]
    sizes = counts(tiny.recipe.model).components
    kept = {f"parameter_norm/{name}": sizes[name] for name in ("attention", "experts", "lm_head", "latent")}
    for there, here in zip(real, simulated, strict=True):
        assert all(there.get(name) == here.get(name) for name in ("step", "tokens", "muonh_lr", "adam_lr", "dropped"))
        for name in kept.keys() & there.keys():  # hyperball never changes them; n drawn weights: 1 / sqrt(2 n) off
            assert here[name] == pytest.approx(there[name], rel=3 / math.sqrt(2 * kept[name]))
    assert any(kept.keys() <= line.keys() for line in real)
    for file in ("timing", "events"):
        there, here = (read_lines(run / f"{file}.jsonl") for run in (tiny.run, made.folder))
        names = {frozenset(line) for line in there}
        assert names == {frozenset(line) for line in here if line.get("event") != "simulated"}
    steps = [
        [line["step"] for line in read_lines(run / "timing.jsonl") if "mfu" in line] for run in (tiny.run, made.folder)
    ]
    assert steps[0] == steps[1]  # not the first after a start, a save or an evaluation


@pytest.mark.slow
def test_resume_refuses_it(tiny, tmp_path):
    from equimoe.train import loop

    inputs = goodput_of(tiny.recipe, step_seconds=1.0, hosts=1, save_seconds=0.5, restore_seconds=0.0, mtbf_hours=None)
    made = write_simulated_run(tiny.recipe, inputs, tmp_path / "run")
    before = contents(made.folder)
    with pytest.raises(EquimoeError, match="training data .* must be what the run was trained on"):
        loop.resume_run(made.folder)
    assert {name: contents(made.folder)[name] for name in FILES} == before
