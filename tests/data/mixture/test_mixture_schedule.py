"""The schedule against a twin that goes through every sequence, against counts by hand, and at the hero's size."""

from __future__ import annotations

import json
import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixture_twin import simulate

from equimoe.data.mixture import MixtureSchedule, Segment, blocks, check_epochs, segments_of, share_of_rows
from equimoe.data.mixture.blocks import levels_of
from equimoe.errors import EquimoeError
from equimoe.recipe import Mixture, MixtureStage

HERO = {"steps": 390_251, "batch_sequences": 11_264}
HERO_BLOCK, HERO_SEQUENCES = 49_152, 390_251 * 11_264
NAMES = [f"c{domain:02d}q{quality}" for domain in range(40) for quality in range(5)]


def read(schedule, first, count):
    cell, row = schedule.locate(first, count)
    assert cell.dtype == row.dtype == np.int64
    return [(schedule.cells[c], r) for c, r in zip(cell.tolist(), row.tolist(), strict=True)]


# ---- the twin

SHARES = st.sampled_from([0, 0, 1, 2, 3, 0.1, 30, 40, 100])  # small beside large: a tail, and a tail of the tail


@st.composite
def cases(draw):
    """Segments, each over more cells than the one before, with rows, block, seed and number of sequences."""
    block = draw(st.integers(8, 24))
    firsts = [0, *np.cumsum(draw(st.lists(st.integers(1, 9), max_size=2))).tolist()]
    segments, names = [], ["a", "m"]
    for number, first in enumerate(firsts):
        new = draw(st.sampled_from([(), (f"b{number}",), (f"z-{number}", f"c_{number}")])) if number else ()
        names = [*names, *new]
        shares = draw(st.lists(SHARES, min_size=len(names), max_size=len(names)).filter(any))
        weights = {name: share / sum(shares) for name, share in zip(names, shares, strict=True)}
        segments.append((first * block, weights))
    rows = {name: draw(st.integers(1, 40)) for name in names}
    total = segments[-1][0] + draw(st.integers(0, 4 * block))
    return segments, rows, block, draw(st.integers(0, 2**32 - 1)), total, draw(st.sampled_from([1.0, 0.4, 0.01]))


@given(cases(), st.sampled_from([4096, 5]), st.data())
@settings(max_examples=60, deadline=None)
def test_every_sequence_is_that_of_the_twin(case, tail_block, data):
    """Also with blocks of the tail that are so small that many of them are read, and tails of the tail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_TAIL_BLOCK_SLOTS", tail_block)
        compare_with_twin(*case, tail_block, data)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_a_tail_of_the_tail_is_that_of_the_twin(seed, monkeypatch):
    """In blocks of 8 `a` has 7 slots, the tail 1. Of its blocks of 10 slots `b` has 6, `c` 2 and the next tail 2, in
    blocks of 6 slots; segments end in the middle of blocks of both tails."""
    monkeypatch.setattr(blocks, "_TAIL_BLOCK_SLOTS", 5)
    weights = {"a": 0.9, "b": 0.055, "c": 0.021, "d": 0.008, "e": 0.008, "f": 0.008}
    other = {"a": 0.05, "b": 0.9, "c": 0.03, "d": 0.005, "e": 0.005, "f": 0.01}
    rows, total = {"a": 200, "b": 9, "c": 4, "d": 3, "e": 2, "f": 5}, 2000
    expected = simulate([(0, weights), (37 * 8, other), (93 * 8, weights)], rows, 8, seed, total, 1.0, 5)
    made = [Segment(0, weights), Segment(37 * 8, other), Segment(93 * 8, weights)]
    schedule = MixtureSchedule(made, rows, 8, seed)
    levels = levels_of(np.array([*weights.values()]), 8)
    assert [(level.size, level.counts.tolist(), level.tail_slots) for level in levels] == [
        (8, [7], 1),
        (10, [6, 2], 2),
        (6, [2, 2, 2], 0),
    ]
    assert read(schedule, 0, total) == expected
    for count in (37 * 8, 500, 93 * 8, 1999):
        assert schedule.counts(count) == {cell: Counter(c for c, _ in expected[:count])[cell] for cell in rows}
        assert read(schedule, count, 1) == expected[count : count + 1]


def compare_with_twin(segments, rows, block, seed, total, share, tail_block, data):
    expected = simulate(segments, rows, block, seed, total, share, tail_block)
    made = [Segment(first, weights) for first, weights in segments]
    schedule = MixtureSchedule(made, rows, block, seed, share_of_rows=share)
    assert read(schedule, 0, total) == expected

    begin = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - begin))
    assert read(schedule, begin, count) == expected[begin : begin + count]
    counted = Counter(cell for cell, _ in expected[:begin])
    assert schedule.counts(begin) == {cell: counted[cell] for cell in sorted(rows)}

    # Without the last segment, and without the cells that came with it: what was read before stays.
    before = made[:-1] or made
    known = {cell: rows[cell] for cell in before[-1].weights}
    end = made[-1].first_sequence if len(made) > 1 else total
    assert read(MixtureSchedule(before, known, block, seed, share_of_rows=share), 0, end) == expected[:end]


# ---- by hand


def test_a_block_by_hand():
    """Rounded down 0.5, 0.26 and 0.24 of 10 slots are 5, 2, 2; one is left over, the largest takes it: 6, 2, 2. With
    0.04 for `d`, less than a slot, the tail is given one: nothing is left over: 5, 2, 2, 1."""
    three = MixtureSchedule([Segment(0, {"a": 0.5, "b": 0.26, "c": 0.24})], {"a": 99, "b": 99, "c": 99}, 10, 0)
    assert three.counts(10) == {"a": 6, "b": 2, "c": 2}
    four = MixtureSchedule([Segment(0, {"a": 0.5, "b": 0.26, "c": 0.2, "d": 0.04})], dict.fromkeys("abcd", 99), 10, 0)
    assert four.counts(10) == {"a": 5, "b": 2, "c": 2, "d": 1}
    assert four.counts(0) == dict.fromkeys("abcd", 0)
    tied = MixtureSchedule([Segment(0, {"b": 1 / 3, "a": 1 / 3, "c": 1 / 3})], dict.fromkeys("abc", 99), 10, 0)
    assert tied.counts(10) == {"a": 4, "b": 3, "c": 3}


def test_every_epoch_has_each_row_once_and_an_order_of_its_own():
    schedule = MixtureSchedule([Segment(0, {"a": 0.5, "b": 0.5})], {"a": 30, "b": 6}, 12, 3)
    rows = {"a": [], "b": []}
    for cell, row in read(schedule, 0, 120):
        rows[cell].append(row)
    assert sorted(rows["a"]) == sorted([*range(30)] * 2)
    assert sorted(rows["b"]) == sorted([*range(6)] * 10)
    epochs = [tuple(rows["b"][begin : begin + 6]) for begin in range(0, 60, 6)]
    assert all(sorted(epoch) == list(range(6)) for epoch in epochs)  # a block of b is one epoch of it here
    assert len(set(epochs)) > 5


def test_simulated_epochs_repeat_one_subset():
    whole = MixtureSchedule([Segment(0, {"a": 1.0})], {"a": 1000}, 50, 0)
    part = MixtureSchedule([Segment(0, {"a": 1.0})], {"a": 1000}, 50, 0, share_of_rows=0.1)
    assert sorted(row for _, row in read(whole, 0, 1000)) == list(range(1000))
    first, second = ([row for _, row in read(part, begin, 100)] for begin in (0, 100))
    assert len(set(first)) == 100 and set(first) == set(second) and first != second
    assert max(first) > 500  # not the first hundred rows
    assert part.rows_used == {"a": 100}


def test_small_cells_come_at_their_rate_through_two_levels():
    """A tail of 0.01 in blocks of 100: 1 slot. Of its blocks of 4,096 slots floor(0.95 * 4096) = 3,891 are of `b`,
    204 of `c`, and `d`, 0.0001 of the tail, gets the one slot that its own tail has at least."""
    weights = {"a": 0.99, "b": 0.0095, "c": 0.000499, "d": 0.000001}
    schedule = MixtureSchedule([Segment(0, weights)], dict.fromkeys("abcd", 10**6), 100, 0)
    assert schedule.counts(100 * 4096 * 3) == {"a": 99 * 4096 * 3, "b": 3891 * 3, "c": 204 * 3, "d": 3}
    shown = {entry.cell: entry for entry in schedule.table(500_000).segments[0].cells}
    assert [shown[cell].tail for cell in "abcd"] == [False, True, True, True]
    assert {cell: shown[cell].effective for cell in "abcd"} == pytest.approx(
        {"a": 0.99, "b": 0.01 * 3891 / 4096, "c": 0.01 * 204 / 4096, "d": 0.01 / 4096}
    )
    rows = [row for cell, row in read(schedule, 0, 100 * 4096) if cell == "b"]
    assert len(rows) == len(set(rows)) == 3891


def test_a_block_of_fewer_slots_than_cells_still_reads_each():
    names = [f"n{number:02d}" for number in range(30)]
    schedule = MixtureSchedule([Segment(0, dict.fromkeys(names, 1 / 30))], dict.fromkeys(names, 10**6), 8, 0)
    counts = schedule.counts(8**5)
    assert sum(counts.values()) == 8**5 and min(counts.values()) > 0
    assert Counter(cell for cell, _ in read(schedule, 0, 8**5)) == counts


def test_seeds_and_the_order_that_a_run_relies_on():
    """The numbers that this release gives: a run must read the same after an upgrade."""
    segments, rows = [Segment(0, {"docs": 0.7, "speeches": 0.3})], {"docs": 50, "speeches": 20}
    assert read(MixtureSchedule(segments, rows, 10, 7), 0, 6) == PINNED
    assert read(MixtureSchedule(segments, rows, 10, 8), 0, 6) != PINNED


PINNED = [("docs", 6), ("speeches", 3), ("speeches", 16), ("speeches", 14), ("docs", 46), ("docs", 41)]


# ---- the hero


def lognormal(seed):
    weights = np.random.default_rng(seed).lognormal(0.0, 1.2, len(NAMES))
    return weights / weights.sum()


def hero(*, stage=False):
    tokens = dict(zip(NAMES, (lognormal(0) * 23.0e12).astype(np.int64).tolist(), strict=True))
    phases = [lognormal(seed).tolist() for seed in (1, 2, 3)]
    base = " ".join(f"{name}:{a!r}/{b!r}" for name, a, b, _ in zip(NAMES, *phases, strict=True))
    later = " ".join(f"{name}:{c!r}" for name, _, _, c in zip(NAMES, *phases, strict=True))
    stages = {"later": MixtureStage(108_000, later)} if stage else {}
    segments = segments_of(Mixture(weights=base, shares=(0.8, 0.2), stages=stages), tokens, **HERO)
    return MixtureSchedule(segments, {name: count // 4096 for name, count in tokens.items()}, HERO_BLOCK, 0), phases


def test_the_hero_switches_where_it_should_and_its_blocks_are_exact():
    schedule, phases = hero()
    assert [segment.first_sequence for segment in schedule.segments] == [0, 312_192 * 11_264]
    for number, segment in enumerate(schedule.segments):
        weights = dict(zip(NAMES, phases[number], strict=True))
        counts = {name: int(np.floor(weights[name] * HERO_BLOCK)) for name in NAMES}
        assert min(counts.values()) > 0  # no tail in these
        counts[max(NAMES, key=weights.get)] += HERO_BLOCK - sum(counts.values())
        before = schedule.counts(segment.first_sequence)
        for count in (1, 2, 71_544 if number == 0 else 17_000):
            after = schedule.counts(segment.first_sequence + count * HERO_BLOCK)
            assert {name: after[name] - before[name] for name in NAMES} == {n: count * counts[n] for n in NAMES}
        cell, _ = schedule.locate(segment.first_sequence + 500 * HERO_BLOCK, HERO_BLOCK)
        assert np.bincount(cell).tolist() == [counts[name] for name in schedule.cells]
    assert sum(schedule.counts(HERO_SEQUENCES).values()) == HERO_SEQUENCES


def test_a_later_stage_of_the_hero_keeps_every_sequence_before_it():
    before, after = hero()[0], hero(stage=True)[0]
    stage = 108_000 * 11_264
    assert [segment.first_sequence for segment in after.segments] == [0, stage, 312_192 * 11_264]
    for first in (0, 11_264 * 54_321, stage - 11_264):
        for one, other in zip(before.locate(first, 11_264), after.locate(first, 11_264), strict=True):
            assert (one == other).all()
    assert before.counts(stage) == after.counts(stage)
    assert not (before.locate(stage, 11_264)[0] == after.locate(stage, 11_264)[0]).all()


def test_no_row_of_the_hero_twice_in_an_epoch():
    """All sequences of one cell in 8 blocks around its first change of epoch: it is in the fourth."""
    schedule, _ = hero()
    cell = next(name for name in NAMES if 500 < schedule.counts(HERO_BLOCK)[name] < 900)
    a_block = schedule.counts(HERO_BLOCK)[cell]
    first = schedule.rows[cell] // a_block - 3
    cells, rows = schedule.locate(first * HERO_BLOCK, 8 * HERO_BLOCK)
    assert first > 1000
    rows = rows[cells == schedule.cells.index(cell)].tolist()
    assert len(rows) == 8 * a_block and 0 <= min(rows) and max(rows) < schedule.rows[cell]
    assert len(set(rows[: 3 * a_block])) == 3 * a_block
    assert len(set(rows[4 * a_block :])) == 4 * a_block
    assert max(Counter(rows).values()) <= 2


def test_a_process_that_loads_has_the_same_schedule():
    """Workers of a loader get it as bytes."""
    schedule = hero(stage=True)[0]
    other = pickle.loads(pickle.dumps(schedule))
    assert read(other, 10**9, 50) == read(schedule, 10**9, 50)


# ---- epochs, tables


def test_a_cell_over_the_limit_is_named_with_what_would_help():
    segments = [Segment(0, {"a": 0.9, "b": 0.1, "c": 0.0}), Segment(100, {"a": 0.5, "b": 0.3, "c": 0.2})]
    schedule = MixtureSchedule(segments, {"a": 1000, "b": 10, "c": 4}, 10, 0)
    check_epochs(schedule, 200, 5)  # a 90 + 50, b 10 + 30, c 20 of 200
    check_epochs(schedule, 200, 5.0)
    with pytest.raises(EquimoeError) as error:
        check_epochs(schedule, 200, 3, row_tokens=64)
    assert error.value.problems == (
        "cell b ('4.00 epochs'): may be read at most 3 times over the whole run: it has 10 rows, the run takes 40 of "
        "its 200 sequences from it; lower its weights to a share of at most 0.150000 of the run, or bring it to 896 "
        "tokens",
        "cell c ('5.00 epochs'): may be read at most 3 times over the whole run: it has 4 rows, the run takes 20 of "
        "its 200 sequences from it; lower its weights to a share of at most 0.0600000 of the run, or bring it to 448 "
        "tokens",
    )
    assert "raise mixture.most_epochs" in str(error.value)
    simulated = MixtureSchedule(segments, {"a": 1000, "b": 10, "c": 4}, 10, 0, share_of_rows=0.5)
    with pytest.raises(EquimoeError, match=r"b \('8.00 epochs'\).* it has 5 rows, .* bring it to 14 rows"):
        check_epochs(simulated, 200, 6)


def test_the_table_says_what_is_planned_and_what_comes():
    segments = [Segment(0, {"a": 0.55, "b": 0.45, "c": 0.0, "d": 0.0}), Segment(40, {"a": 0.97, "b": 0.0, "c": 0.03})]
    schedule = MixtureSchedule(segments, {"a": 100, "b": 4, "c": 7, "d": 5}, 10, 0)
    table = schedule.table(60, batch_sequences=20, most_epochs=3)
    assert table.lines() == TABLE.splitlines()
    facts = json.loads(json.dumps(table.to_dict()))
    assert facts["segments"][0]["cells"][0] == {
        "cell": "a",
        "planned": 0.55,
        "effective": 0.6,
        "in_block": 6,
        "tail": False,
        "takes_rest": True,
        "sequences": 24,
        "epochs": 0.24,
    }
    assert facts["warning"] == TABLE.splitlines()[-1]
    assert facts["over"] == ["b"] and facts["cells"][2]["sequences"] == 2
    short = schedule.table(37).lines()  # in the middle of a block of the first segment
    assert any(line.startswith("Segment 0: sequences 0 .. 36") for line in short)
    assert not any(line.startswith("Segment 1") for line in short)


TABLE = """\
Mixture: 3 of 4 cells, 60 sequences in blocks of 10, 2 segments

Segment 0: sequences 0 .. 39, steps 0 .. 1
  cell    planned  effective  in a block  sequences  epochs
  a     55.0000 %  60.0000 %           6         24   0.240  takes the rest of a block, +5.0000 %
  b     45.0000 %  40.0000 %           4         16   4.000

Segment 1: sequences 40 .. 59, steps 2 .. 2
  cell    planned  effective  in a block  sequences  epochs
  a     97.0000 %  90.0000 %           9         18   0.180  takes the rest of a block, -7.0000 %
  c      3.0000 %  10.0000 %      1.0000          2   0.286  tail

Run
  cell  sequences      share  rows  epochs
  a            42  70.0000 %   100   0.420
  b            16  26.6667 %     4   4.000  over mixture.most_epochs (3)
  c             2   3.3333 %     7   0.286
  not read: d

Warning: in segment 1 cell c gets 10.00 % of the sequences, 3.00 % is planned: a block of 10 has a whole number of\
 each of its 2 cells, and of the largest what is left over. Set mixture.block_sequences=40
"""


@pytest.mark.parametrize(
    ("cells", "block", "gets", "remedy"),
    [
        # 1 of each, 1,000 of 4,000 are left over. Of 128,000 (42 each) are 2,000: 1.56 %. Of 256,000 1,000: 0.39 %.
        (3000, 4000, "25.02", "Set mixture.block_sequences=256000"),
        (2, 49_151, None, ""),
        (3, 4, "50.00", "Set mixture.block_sequences=256"),  # 86 of it: 33.59 %; 44 of 128: 34.38 %
    ],
)
def test_a_cell_that_gets_far_more_than_planned_is_warned_of(cells, block, gets, remedy):
    weights = {f"c{number:04d}": 1 / cells for number in range(cells)}
    table = MixtureSchedule([Segment(0, weights)], dict.fromkeys(weights, 10), block, 0).table(1000)
    if gets is None:
        assert table.warning() is None and "Warning" not in "".join(table.lines())
        return
    assert table.lines()[-1] == table.warning()
    assert f"cell c0000 gets {gets} % of the sequences, {100 / cells:.2f} % is planned" in table.warning()
    assert table.warning().endswith(remedy), table.warning()


@pytest.mark.parametrize(
    ("border", "total", "remedy"),
    [
        # 0.5/0.25/0.25 of 5 is 3 + 1 + 1, of 10 6 + 2 + 2, of 20 exact; and 20 divides 200.
        (200, 400, "Set mixture.block_sequences=20"),
        # 30 is no multiple of 20. With batches of 5 a block of 20 ends with each fourth step.
        (30, 400, "Set mixture.block_sequences=20 (segments then begin at multiples of 4 steps)"),
        (30, 39, "Give small cells the weight 0, or prepare fewer cells"),  # 20 are more than half of the run
    ],
)
def test_the_block_that_helps_leaves_segments_where_they_are_or_says_where_they_go(border, total, remedy):
    cells = {"a": 0.5, "b": 0.25, "c": 0.25}
    segments = [Segment(0, cells), Segment(border, dict(zip("abc", (0.25, 0.25, 0.5), strict=True)))]
    warning = MixtureSchedule(segments, dict.fromkeys("abc", 50), 5, 0).table(total, batch_sequences=5).warning()
    assert "in segment 0 cell a gets 60.00 %" in warning and warning.endswith(remedy), warning
    fewer = [Segment(0, {"a": 0.7, "b": 0.3}), Segment(40, {"a": 1.0})]
    warning = MixtureSchedule(fewer, {"a": 50, "b": 50}, 5, 0).table(80).warning()
    assert warning.endswith("Set mixture.block_sequences=10"), "3.5 and 1.5 of 5"


@pytest.mark.parametrize(("sequences", "said"), [(1, "0.0010"), (9, "0.0090"), (10, "0.010"), (1500, "1.500")])
def test_epochs_have_two_digits_at_least(sequences, said):
    table = MixtureSchedule([Segment(0, {"a": 1.0})], {"a": 1000}, 1, 0).table(sequences)
    assert table.lines()[-1].split()[-1] == said


def test_of_many_cells_the_table_shows_the_largest_and_those_over_the_limit():
    lines = hero()[0].table(HERO_SEQUENCES, most_epochs=20).lines()
    shown = [line for line in lines if line.startswith("  c") and not line.startswith("  cell")]
    over = [line for line in shown if "over mixture.most_epochs (20)" in line]
    assert over and len(shown) <= 60 + len(over)
    assert sum(line.startswith("  ... and 180 more, ") for line in lines) >= 2


def test_what_is_no_schedule_is_refused():
    one = Segment(0, {"a": 1.0})
    for segments, rows, block, share, said in (
        ([Segment(0, {"a": 0.5})], {"a": 1}, 4, 1.0, r"\(0.5\): must sum to 1 within 1e-09"),
        ([one, Segment(6, {"a": 1.0})], {"a": 1}, 4, 1.0, r"must be multiples of the block \(4\)"),
        ([Segment(4, {"a": 1.0})], {"a": 1}, 4, 1.0, "must begin at 0 and ascend"),
        ([], {"a": 1}, 4, 1.0, "must begin at 0 and ascend"),
        ([one], {"b": 1}, 4, 1.0, r"\('a'\): a cell with a weight must have a row"),
        ([one], {"a": 0}, 4, 1.0, r"\('a'\): a cell with a weight must have a row"),
        ([one], {"a": 1}, 0, 1.0, "must be at least 1; use 49152"),
        ([one], {"a": 1}, 4, 1.5, "must be above 0 and at most 1"),
        ([Segment(0, {"a": 1.5, "b": -0.5})], {"a": 1, "b": 1}, 4, 1.0, r"\('b'\): must be finite and 0 or above"),
        ([Segment(0, {"a": 0.5, "b": 0.5})], {"a": 1, "b": 1}, 1, 1.0, "must have room for each of the 2 cells"),
    ):
        with pytest.raises(EquimoeError, match=said):
            MixtureSchedule(segments, rows, block, 0, share_of_rows=share)
    schedule = MixtureSchedule([one], {"a": 1}, 4, 0)
    for wrong in (lambda: schedule.locate(-1, 2), lambda: schedule.locate(0, -2), lambda: schedule.counts(-1)):
        with pytest.raises(EquimoeError, match="must not be negative; |must not be negative. Count from 0"):
            wrong()


def test_the_share_of_rows_is_that_of_the_tokens():
    assert share_of_rows(None, 1000) == 1.0
    assert share_of_rows(18_750_000_000_000, 18_750_000_000) == 0.001
    with pytest.raises(EquimoeError, match=r"simulated_tokens \(999\): must be at least the tokens of this run, 1,000"):
        share_of_rows(999, 1000)
