"""Where phases and stages begin: the hero's numbers, small runs by hand, and what is refused."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from equimoe.data.mixture import segments_of
from equimoe.errors import EquimoeError
from equimoe.recipe import Mixture, MixtureStage

CELLS = {"docs": 900, "speeches": 100}
HERO = {"steps": 390_251, "batch_sequences": 11_264}
TWO = {"shares": (0.8, 0.2)}


def starts(mixture, **run):
    return [segment.first_sequence // run["batch_sequences"] for segment in segments_of(mixture, CELLS, **run)]


def test_the_hero_switches_at_a_multiple_of_48_steps():
    assert starts(Mixture(**TWO), **HERO) == [0, 312_192]
    assert 312_192 == 48 * 6504 and 48 * 11_264 == 11 * 49_152
    segments = segments_of(Mixture(weights="tokens/equal", **TWO), CELLS, **HERO)
    assert [segment.weights for segment in segments] == [
        {"docs": 0.9, "speeches": 0.1},
        {"docs": 0.5, "speeches": 0.5},
    ]
    assert segments[1].first_sequence % 49_152 == 0


def test_one_phase_is_one_segment_whatever_the_block():
    assert starts(Mixture(), steps=7, batch_sequences=5) == [0]


@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=5), st.integers(5_000, 400_000), st.sampled_from([1, 7, 48, 1000])
)
@settings(max_examples=50, deadline=None)
def test_switches_are_the_exact_ones_rounded_down(parts, steps, multiple):
    """In fractions; a share such as 1/3 is no float, so that a switch may also be that of a step 1e-6 further."""
    batch = 16
    shares = tuple(part / sum(parts) for part in parts)
    exact = [Fraction(sum(parts[:n]), sum(parts)) * steps for n in range(1, len(parts))]
    expected = [int(switch) // multiple * multiple for switch in exact]
    mixture = Mixture(shares=shares, block_sequences=multiple * batch)
    if sorted({0, *expected, steps}) != [0, *expected, steps]:
        with pytest.raises(EquimoeError, match="gets no step"):
            starts(mixture, steps=steps, batch_sequences=batch)
    else:
        assert starts(mixture, steps=steps, batch_sequences=batch) == [0, *expected]


def test_a_block_too_large_for_the_run_is_named_with_one_that_works():
    """A block of 80 steps, 640 sequences, is the largest after which 20 of the 100 steps are left; 49,152 are 6,144
    steps. Of 0.4, 0.4, 0.2 the first two phases need 40 steps each: 320. A block of 480 is 60 steps: 0, 60 and 60."""
    mixture = Mixture(**TWO)
    with pytest.raises(EquimoeError) as error:
        starts(mixture, steps=100, batch_sequences=8)
    assert error.value.problems == (
        "mixture.block_sequences (49152): phase 1 gets no step: with a batch of 8 a phase begins at a multiple of "
        "6,144 steps, the run has 100; set mixture.block_sequences=640",
    )
    assert starts(Mixture(block_sequences=640, **TWO), steps=100, batch_sequences=8) == [0, 80]
    with pytest.raises(EquimoeError, match=r"phase 1 gets no step.*60 steps.*=320\n"):
        starts(Mixture(shares=(0.4, 0.4, 0.2), block_sequences=480), steps=100, batch_sequences=8)
    assert starts(Mixture(shares=(0.4, 0.4, 0.2), block_sequences=320), steps=100, batch_sequences=8) == [0, 40, 80]
    with pytest.raises(EquimoeError, match="raise schedule.steps, or use larger shares"):
        starts(Mixture(shares=(0.001, 0.999)), steps=100, batch_sequences=8)
    with pytest.raises(EquimoeError, match="set mixture.block_sequences=10\n"):
        starts(Mixture(block_sequences=7, shares=(0.5, 0.5)), steps=8, batch_sequences=10)


def test_a_stage_replaces_the_running_phase_and_those_after():
    stages = {"more": MixtureStage(108_000, "equal/tokens"), "last": MixtureStage(336_000, "docs:1 speeches:0")}
    mixture = Mixture(weights="tokens/equal", stages=stages, **TWO)
    segments = segments_of(mixture, CELLS, **HERO)
    tokens, equal = {"docs": 0.9, "speeches": 0.1}, {"docs": 0.5, "speeches": 0.5}
    assert [(segment.first_sequence // 11_264, segment.weights) for segment in segments] == [
        (0, tokens),
        (108_000, equal),
        (312_192, tokens),
        (336_000, {"docs": 1.0, "speeches": 0.0}),
    ]
    at_switch = Mixture(weights="tokens/equal", stages={"s": MixtureStage(312_192, "equal/tokens")}, **TWO)
    assert [s.weights for s in segments_of(at_switch, CELLS, **HERO)] == [tokens, tokens]


def test_what_ran_before_a_stage_stays_when_the_store_has_more_cells():
    kept = Mixture(weights="docs:0.7/0.2 speeches:0.3/0.8", **TWO)
    stage = {"new": MixtureStage(108_000, "docs:0.5 fresh:0.5")}
    more = {**CELLS, "fresh": 50}
    segments = segments_of(Mixture(weights=kept.weights, stages=stage, **TWO), more, **HERO)
    assert segments[0].weights == {**segments_of(kept, CELLS, **HERO)[0].weights, "fresh": 0.0}
    assert segments[1].weights == {"docs": 0.5, "speeches": 0.0, "fresh": 0.5}


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (108_001, r"from_step \(108001\): must be a multiple of 48 steps, where a block of 49,152 and a batch of"),
        (108_001, "use 108000 or 108048"),
        (0, "above 0 and below schedule.steps .390,251.; use 48"),
        (-5, "use 48"),
        (390_251, "use 390240"),
        (390_250, "use 390240"),
        (9_999_999, "use 390240"),
    ],
)
def test_the_step_of_a_stage_is_refused_with_the_nearest(step, said):
    with pytest.raises(EquimoeError, match=said):
        segments_of(Mixture(stages={"later": MixtureStage(step, "equal")}), CELLS, **HERO)


def test_stages_ascend_and_a_run_too_short_for_any_says_so():
    stages = {"one": MixtureStage(96, "equal"), "two": MixtureStage(96, "tokens"), "three": MixtureStage(48, "tokens")}
    with pytest.raises(EquimoeError) as error:
        segments_of(Mixture(stages=stages), CELLS, **HERO)
    assert error.value.problems == (
        "mixture.stages.two.from_step (96): must be after the stage before it, one at step 96; append stages in the "
        "order of their steps",
        "mixture.stages.three.from_step (48): must be after the stage before it, two at step 96; append stages in the "
        "order of their steps",
    )
    with pytest.raises(EquimoeError, match="no step is: set mixture.block_sequences=72\n"):
        segments_of(Mixture(stages={"s": MixtureStage(4, "equal")}), CELLS, steps=10, batch_sequences=8)


def test_all_that_is_wrong_is_said_at_once():
    stages = {"later": MixtureStage(100, "docs:0.5 speches:0.5")}
    with pytest.raises(EquimoeError) as error:
        segments_of(Mixture(weights="docs:0.5 speeches:0.4", stages=stages, **TWO), CELLS, steps=100, batch_sequences=8)
    problems = "\n".join(error.value.problems)
    assert "mixture.weights, phase1 (0.9): its weights must sum to 1" in problems
    assert "mixture.stages.later.weights, speches ('speches'): is no cell of the store; did you mean speeches?" in (
        problems
    )
    assert "phase 1 gets no step" in problems
    assert "mixture.stages.later.from_step (100)" in problems


def test_shares_that_are_none_are_refused():
    mixture = Mixture()
    for shares in ((), (0.5, 0.4), (1.5, -0.5), (1.0, 0.0), (0.5, float("nan"))):
        object.__setattr__(mixture, "shares", shares)
        with pytest.raises(EquimoeError, match="mixture.shares .*: must be positive and sum to 1 within 1e-09"):
            segments_of(mixture, CELLS, steps=100, batch_sequences=8)


@pytest.mark.parametrize(
    ("steps", "plans", "begins"),
    [
        # blocks of 10 steps; by hand: phases at 60 % and 90 % of the plan in force
        (100, (), {0: 0, 60: 1, 90: 2}),
        (50, ((20, 100),), {0: 0, 30: 1, 40: 2}),  # cut in half at 20: 0.6 and 0.9 of 50, rounded down to tens
        (80, ((65, 100),), {0: 0, 60: 1, 70: 2}),  # 0.6 of 80 passed, 0.9 of 80 is 72: at the end of the block of 65
        (50, ((41, 100),), {0: 0}),  # the block of the join ends with the run
        (200, ((65, 100),), {0: 0, 60: 1, 180: 2}),  # longer: the phase that began at 60 is not gone back from
        (120, ((20, 100), (40, 60)), {0: 0, 30: 1, 100: 2}),  # twice: 36 -> 30 of the second plan, 108 -> 100
    ],
)
def test_phases_follow_the_plan_in_force(steps, plans, begins):
    weights = "docs:0.5/0.6/0.7 speeches:0.5/0.4/0.3"
    mixture = Mixture(weights=weights, shares=(0.6, 0.3, 0.1), block_sequences=80)
    segments = segments_of(mixture, CELLS, steps=steps, batch_sequences=8, plans=plans)
    assert {s.first_sequence // 8: s.phase for s in segments} == begins
    assert [s.weights["docs"] for s in segments] == [(0.5, 0.6, 0.7)[s.phase] for s in segments]


def test_segments_are_counted_from_where_reading_begins():
    """40 steps of 100 were read of other data: 60 are left, the second half of them is the second phase."""
    stages = {"late": MixtureStage(90, "docs:1/1")}
    mixture = Mixture(weights="docs:0.5/0.6 speeches:0.5/0.4", shares=(0.5, 0.5), block_sequences=80, stages=stages)
    segments = segments_of(mixture, CELLS, steps=100, batch_sequences=8, first_step=40)
    assert [(s.first_sequence // 8, s.phase, s.stage) for s in segments] == [
        (0, 0, None),
        (30, 1, None),
        (50, 1, "late"),
    ]
    wrong = dataclasses.replace(mixture, stages={"late": MixtureStage(95, "docs:1/1")})
    with pytest.raises(EquimoeError, match=r"a multiple of 10 steps, counted from step 40, .*use 90"):
        segments_of(wrong, CELLS, steps=100, batch_sequences=8, first_step=40)
