"""The training loop: prepare the data, make or restore the state, step, log, save, evaluate, sample.

    equimoe.train_recipe(recipe, Path("runs/tiny"))       a new run
    equimoe.resume_run(Path("runs/tiny"))                the same run, continued to its end

Order at a step that is due for everything: its line is on disk, then the checkpoint is committed, then the
evaluation runs. So a finished run is never lost in evaluation, and a kill at any moment costs at most the
steps since the last checkpoint, which a resumed run makes again, bit for bit on CPU.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from equimoe import optim
from equimoe.baselines import baselines
from equimoe.data.loader import Batches, RowSource, refuse_without_guard
from equimoe.data.rows import Batch, heldout_batches
from equimoe.data.run_store import weights_as_given, with_weights_of
from equimoe.data.source import absolute, with_commits_of
from equimoe.errors import EquimoeError
from equimoe.evaluate import make_scorer
from equimoe.files import typed, write_file
from equimoe.parallel.capabilities import capabilities, device_memory_bytes, program_here
from equimoe.parallel.compile_cache import enable_compile_cache
from equimoe.parallel.mesh import make_mesh, row_sharding
from equimoe.parallel.mesh_fit import transport_warning
from equimoe.parallel.on_mesh import on_mesh
from equimoe.parallel.out_of_memory import out_of_memory_said
from equimoe.parallel.processes.meeting import Lost
from equimoe.parallel.processes.together import ALONE, Processes
from equimoe.plan.arithmetic import refuse_if_too_large
from equimoe.recipe import Recipe, Transport
from equimoe.recipe.batches import BatchNumbers
from equimoe.recipe.recipe_json import new_provenance, read_recipe, recipe_to_json
from equimoe.recipe.resolve import changed
from equimoe.recipe.trajectory import differences, refuse_changes, refuse_edited
from equimoe.train import checkpoint
from equimoe.train.ahead import Ahead
from equimoe.train.display import Display
from equimoe.train.from_recipe import make_optimizer, step_of
from equimoe.train.init_from import (
    Parent,
    as_begun,
    check_parents_data,
    find_parent,
    joined,
    parent_as_begun,
    refuse_unused,
    state_of,
)
from equimoe.train.interrupt import Interrupt, stopped
from equimoe.train.metrics import RunLog, read_lines, rewind
from equimoe.train.placing import place_parts, place_rows, row_parts
from equimoe.train.report import norms_due, rate_schedules, step_values
from equimoe.train.rolling_back import RolledBack, again_after_roll_back
from equimoe.train.run_data import RunData, check_same_data, prepare_run_data
from equimoe.train.run_lock import held, refuse_unless_shared
from equimoe.train.samples import samples_due, samples_missing, write_samples
from equimoe.train.saving import Saver
from equimoe.train.scoring import HELDOUT, due_sets, missing_sets, score_sets
from equimoe.train.state import TrainState, abstract_state, create_state, with_pending_bias
from equimoe.train.step import StepMetrics
from equimoe.train.throughput import StepClock, peak_flops
from equimoe.train.watching import Watch, given_prediction, keep_prediction

__all__ = ["IMPORTED", "concrete", "resume_run", "train_recipe"]

IMPORTED = "imported"  # of a run's provenance: where the weights of its step 0 came from (hub.import_weights)


@partial(again_after_roll_back, resume=lambda run, **named: resume_run(run, **named))
def train_recipe(
    recipe: Recipe, run: Path, *, provenance: dict[str, Any] | None = None, processes: Processes = ALONE
) -> None:
    """Train a new run in the folder `run`, to its end; one of several `processes` that all call this, or alone.

    Several are made by `parallel.processes.start.met`, before anything touches a device.
    Raises EquimoeError if the folder already holds a checkpoint, if the model cannot fit here, or for anything
    wrong with the data; `interrupt.Stopped` after Ctrl-C (it is a KeyboardInterrupt) or SIGTERM (a SystemExit).
    """
    refuse_without_guard()  # before a worker's Python takes devices
    enable_compile_cache()
    refuse_unused(recipe.init_from)
    mesh = _mesh_that_fits(recipe)  # before the Hub is asked for anything
    recipe = concrete(recipe)
    with Interrupt() as interrupt, held(run, processes), out_of_memory_said(_less_memory(recipe)):
        with processes.in_turn("look at the run"):
            if processes.writes and checkpoint.committed_steps(run / "checkpoints"):
                raise EquimoeError(
                    "run",
                    "already holds a trained run, and training never overwrites one",
                    f"Continue it with `equimoe resume {typed(run)}`",
                    value=str(run),
                )
            expected = given_prediction(recipe) if processes.writes else None
        parent = find_parent(recipe)
        if parent is not None:
            recipe = joined(recipe, parent)
            for line in parent.lines(recipe):
                processes.say(line)
        data, given = _prepared(recipe, processes), weights_as_given(recipe)
        kept = {**(provenance or new_provenance("python")), "data": data.identity}
        if parent is not None:
            check_parents_data(parent, data.identity, recipe.init_from)
            kept |= {"parent": parent.record(recipe.init_from)}
        kept |= {} if data.recipe == recipe else {"weights_given": given}
        recipe = data.recipe
        if processes.writes:
            write_file(run / "recipe.json", [recipe_to_json(recipe, kept).encode()])
            keep_prediction(run, expected)
            rewind(run, 0)  # lines of an attempt that never reached a checkpoint
        refuse_unless_shared(run / "recipe.json", processes)
        session = _Session(recipe, run, data, mesh, make_optimizer(recipe, mesh), interrupt, processes)
        session.go(session.fresh_state(parent), "started")


@again_after_roll_back
def resume_run(
    run: Path, overrides: Sequence[str] = (), *, given: Recipe | None = None, processes: Processes = ALONE
) -> None:
    """Continue a run from its newest complete checkpoint; from the beginning if it has none yet.

    One of several `processes` that all call this, or alone. `overrides` are `name=value` texts of settings that leave
    alone what the run computes (`recipe.trajectory`). Instead of them the whole recipe may be `given`, as it would be
    to start the run. Raises EquimoeError for any other change, if recipe.json or the data is no longer what the run was
    trained on, or if the checkpoint is damaged.
    """
    refuse_without_guard()
    refuse_unless_shared(run / "recipe.json", processes)
    before, provenance = read_recipe(run)
    recipe = concrete(changed(before, overrides)) if overrides else before
    if given is not None:
        recipe = dataclasses.replace(as_begun(concrete(with_commits_of(given, before)), before), name=before.name)
        recipe = with_weights_of(recipe, before, provenance.get("weights_given", {}))
        left_out = {*recipe.schedule.skipped_batches, *before.schedule.skipped_batches}  # by going back
        schedule = dataclasses.replace(recipe.schedule, skipped_batches=tuple(sorted(left_out)))
        recipe = dataclasses.replace(recipe, schedule=schedule)
    changes = list(overrides) if given is None else differences(before, recipe)
    steps = processes.as_first("checkpoints", checkpoint.committed_steps(run / "checkpoints"))
    begun = IMPORTED not in provenance or steps != [0]
    refuse_changes(before, recipe, begun=begun, step=steps[-1] if steps else 0)
    with Interrupt() as interrupt, held(run, processes), out_of_memory_said(_less_memory(recipe)):
        with processes.in_turn("read the prediction"):
            new = processes.writes and recipe.expected != before.expected
            expected = given_prediction(recipe) if new else None
        steps = processes.as_first("checkpoints", checkpoint.committed_steps(run / "checkpoints"))
        newest = run / "checkpoints" / str(steps[-1]) if steps else None
        if newest is not None:
            refuse_edited(checkpoint.read_position(newest)["trajectory"], recipe, str(newest), step=steps[-1])
        if changes:
            note = {"step": steps[-1] if steps else 0, "overrides": changes}
            provenance = {**provenance, "resumed": [*provenance.get("resumed", []), note]}
        ended = newest is not None and processes.as_first("the end", _nothing_left(run, recipe, steps[-1]))
        if ended:
            if changes:  # `equimoe eval` and the next resume read them: only what the run's data can be read with
                data = _prepared_again(recipe, run, provenance, processes)
                _write_changes(run, data.recipe, provenance, processes, expected)
            processes.say(f"done: {steps[-1]} steps in {run}, nothing is left to do")
            return
        enable_compile_cache()
        mesh = _mesh_that_fits(recipe)
        if begun:
            data = _prepared_again(recipe, run, provenance, processes)
        else:
            data = _prepared(recipe, processes)
            provenance = {**provenance, "data": data.identity}
        recipe = data.recipe
        session = _Session(recipe, run, data, mesh, make_optimizer(recipe, mesh), interrupt, processes)
        if newest is None:
            state = session.fresh_state(parent_as_begun(recipe, provenance))
        else:
            state = checkpoint.restore(newest, abstract_state(recipe.model, session.optimizer, mesh))
        if changes or not begun:
            _write_changes(run, recipe, provenance, processes, expected)
        if processes.writes:
            rewind(run, int(state.step))
        session.go(state, "resumed")


def _prepared(recipe: Recipe, processes: Processes) -> RunData:
    """The data of a run: process 0 prepares it first, and others on its host, or its file system, find it ready."""
    with processes.in_turn("prepare the data"):
        data = prepare_run_data(recipe, processes.say)
    processes.refuse_difference("data", data.identity, "Give all hosts the same files")
    return data


def _prepared_again(recipe: Recipe, run: Path, provenance: Mapping[str, Any], processes: Processes) -> RunData:
    """The data of a run that has begun, refused if it is not what the run was trained on."""
    try:
        data = _prepared(recipe, processes)
    except EquimoeError as error:
        if error.subject != "data.path":
            raise
        raise error.and_kept(f"where it moved to is told by `equimoe resume {typed(run)} data.path=NEW`") from error
    check_same_data(provenance.get("data", {}), data.identity, run)
    return data


def _write_changes(
    run: Path, recipe: Recipe, provenance: dict[str, Any], processes: Processes, expected: bytes | None
) -> None:
    if processes.writes:
        keep_prediction(run, expected)  # before recipe.json names it
        write_file(run / "recipe.json", [recipe_to_json(recipe, provenance).encode()])


def _nothing_left(run: Path, recipe: Recipe, step: int) -> bool:
    """Whether the run is at its end, scored, sampled, and has said so: nothing to prepare or compile for."""
    return (
        step == recipe.schedule.steps
        and not missing_sets(run, recipe, step)
        and not samples_missing(run, recipe, step)
        and any(line["event"] == "finished" for line in read_lines(run / "events.jsonl"))
    )


def _mesh_that_fits(recipe: Recipe) -> Mesh:
    """The mesh over the devices here; refuses, before anything is written, what cannot be trained on them."""
    refuse_if_too_large(recipe, device_memory_bytes(), jax.device_count(), program=program_here())
    schedule = recipe.schedule
    return make_mesh(recipe.mesh, recipe.model, schedule.batch_sequences, accumulation=schedule.accumulation)


def _less_memory(recipe: Recipe) -> str:
    """What takes less memory; what was saved is whole."""
    return (
        f"Use shorter rows (model.max_position_embeddings={recipe.model.max_position_embeddings}), a smaller batch"
        f" (schedule.batch_sequences={recipe.schedule.batch_sequences}) or more schedule.accumulation"
    )


def concrete(recipe: Recipe) -> Recipe:
    """`auto` replaced by what this machine does, data named for good: a run resumes the same from any folder."""
    return absolute(recipe.computed_in(capabilities().compute_dtype))


@dataclass
class _Session:
    """One process's work on one run, from a state to the end of the schedule."""

    recipe: Recipe
    run: Path
    data: RunData
    mesh: Mesh
    optimizer: optax.GradientTransformation
    interrupt: Interrupt
    processes: Processes

    def fresh_state(self, parent: Parent | None) -> TrainState:
        """The state before the first step."""
        if parent is not None:
            state = state_of(parent, self.recipe, self.optimizer, self.mesh)
        else:
            state = create_state(self.recipe.model, self.optimizer, self.mesh, key=jax.random.key(self.recipe.seed))
        optim.refuse_zero_matrices(state.model)
        return state

    def go(self, state: TrainState, how: str) -> None:
        """Train from `state` to the last step."""
        recipe, start = self.recipe, int(state.step)
        self._prepare(state)
        self.log.event(
            how,
            step=start,
            devices=jax.device_count(),
            processes=self.processes.count,
            device=capabilities().device_kind,
            compute_dtype=recipe.compute_dtype,
        )
        try:
            # Ctrl-C is ours before the bar hides the cursor.
            with self.interrupt.deferred(self.display.answer), self.display:
                if start:
                    self.display.say(f"going on from step {start}")
                if start < recipe.schedule.steps:
                    self.display.say("compiling the step; then a line every 10 seconds")
                self._make_up(state, start)
                self._steps(state, start)
        except BaseException as error:
            if isinstance(error, EquimoeError) and not isinstance(error, Lost):
                self.processes.ends()  # most likely all fail alike: no other one's end may cut off a save under way
            if not getattr(error, "at_once", False) and not isinstance(error, Lost):
                self.saver.close()  # but for a second Ctrl-C, and a save that waits for who is gone
            raise
        self._finish(recipe.schedule.steps)

    def _prepare(self, state: TrainState) -> None:
        """Everything that the loop reads: rows, held-out sets, compiled functions, log, display, clock."""
        recipe = self.recipe
        self.step = step_of(recipe, self.optimizer, self.mesh, state)
        self.scorer = make_scorer(recipe.compute_dtype, on_mesh(self.mesh, Transport()))  # local: nothing is dropped
        drops = recipe.transport.kind != "local" and not recipe.transport.balanced
        self.as_trained = make_scorer(recipe.compute_dtype, on_mesh(self.mesh, recipe.transport)) if drops else None
        self.log = RunLog(self.run, writes=self.processes.writes)
        tokenizer = self.data.tokenizer.json.encode()
        self.saver = Saver(self.run, recipe, tokenizer, self.log, self.processes)
        self.display = Display(recipe.schedule.steps, int(state.step), speaks=self.processes.writes)
        self.sharding = row_sharding(self.mesh)
        self.rates = rate_schedules(recipe)
        peak, source = peak_flops(recipe.compute_dtype)
        self.clock = StepClock(recipe, peak)
        for line in self.data.lines():
            self.display.say(line)
        self.display.say(f"peak for MFU: {peak / 1e9:,.0f} GFLOP/s ({source})")
        self.watch = Watch(recipe, self.run, self.log, self.display.say, self.processes)
        warning = transport_warning(recipe.transport, self.mesh.shape, recipe.model)
        if warning is not None:
            self.display.say(warning)

    def _steps(self, state: TrainState, start: int) -> None:
        """The loop. A step's metrics are fetched while the next one runs; before a save they are on disk."""
        recipe, steps, waiting = self.recipe, self.recipe.schedule.steps, None
        read = self._read_ahead(start)
        with read, Ahead(lambda _: self._on_devices(next(read)), start + 1, steps) as batches:
            for done in range(start + 1, steps + 1):
                batch, data_seconds = batches.next()
                norms = np.bool_(norms_due(recipe, done))
                state, metrics = self.step(state, *batch, norms, *self.watch.limits(done, self.data.segment_of(done)))
                if waiting is not None:
                    self._report(*waiting)
                waiting = (done, metrics, data_seconds)
                self.saver.check()
                stop, old, off_path = self.processes.any(
                    "a step", self.interrupt.requested, self.saver.last_is_old(), self.watch.asks
                )
                if stop and not self.interrupt.requested:
                    self.display.say("another process was asked to stop; stopping after this step to save")
                if off_path:
                    self._go_back_if_asked()
                stop = stop or off_path
                save, look = (
                    stop or old or self.saver.due(done),
                    bool(due_sets(recipe, done)) or samples_due(recipe, done),
                )
                if not (save or look):
                    continue
                self._report(*waiting)
                waiting = None
                if not off_path and self.processes.any("a line before a save", self.watch.asks)[0]:
                    self._go_back_if_asked()  # a checkpoint behind a flag would be one to resume from
                    stop = save = True
                if save:
                    self.saver.save(state, done)
                if look and not stop:
                    self.saver.wait()  # save before evaluate: a failure in the evaluation loses nothing
                    stop = not self._look(state, done, due_sets(recipe, done), samples_due(recipe, done))
                if stop:
                    self._stop(state, done, saved=save)
                self._log_blocked(done)
                self.clock.pause()
        self.saver.wait()
        self._log_blocked(steps)

    def _make_up(self, state: TrainState, step: int) -> None:
        """Score and sample what a kill or Ctrl-C after the save of `step` left undone."""
        missing = [missing_sets(self.run, self.recipe, step), samples_missing(self.run, self.recipe, step)]
        if step and not self._look(state, step, *self.processes.as_first("what is missing", missing)):
            self._stop(state, step, saved=True)

    def _stop(self, state: TrainState, step: int, *, saved: bool) -> None:
        """End as Ctrl-C asked, with the state of `step` committed."""
        if not saved:
            self.saver.save(state, step)
        self.saver.wait()
        self._log_blocked(step)
        off_path = self.watch.stopped(step)
        if off_path is not None:
            raise off_path
        again = f" (in {self.processes.count} processes, as this was started)" if self.processes.count > 1 else ""
        self.display.say(f"saved at step {step}; continue with: equimoe resume {typed(self.run)}{again}")
        raise stopped(max(self.processes.gather("the signal", self.interrupt.number)), saved=True)

    def _go_back_if_asked(self) -> None:
        """RolledBack, if a flag asks for that and not for a stop; Stopped, if Ctrl-C came meanwhile."""
        if not self.watch.goes_back():
            return
        self.saver.wait()
        self.watch.go_back()
        self.log.close()
        number = max(self.processes.gather("the signal", self.interrupt.number))
        if number:
            self.display.say(f"continue with: equimoe resume {typed(self.run)}")
            raise stopped(number, saved=True)
        raise RolledBack(self.run, self.processes)

    def _read_ahead(self, start: int) -> Batches:
        """The rows of this process of steps `start` + 1 to the last."""
        schedule, loading, first = self.recipe.schedule, self.recipe.loading, self.recipe.init_from.data_step
        return Batches(
            self.data.rows,
            BatchNumbers(schedule.skipped_batches, start - first, schedule.steps - first),
            schedule.batch_sequences,
            row_parts(self.sharding, (schedule.batch_sequences, self.data.rows.row_tokens)),
            workers=loading.workers,
            prefetch_batches=loading.prefetch_batches,
        )

    def _on_devices(self, parts: Sequence[Batch]) -> tuple[jax.Array, ...]:
        shape = (self.recipe.schedule.batch_sequences, self.data.rows.row_tokens)
        return place_parts(parts, self.sharding, shape)

    def _place(self, rows: RowSource, first: int, count: int) -> tuple[jax.Array, ...]:
        return place_rows(rows, first, count, self.sharding)

    def _report(self, done: int, metrics: StepMetrics, data_seconds: float) -> None:
        """Fetch a step's metrics, write its line, show it. A non-finite value stops the run here, before any save."""
        values = step_values(self.recipe, done, jax.device_get(metrics), self.rates)
        values |= self.data.mixture_values(done)
        self.log.write("metrics", values)
        pace = self.clock.tick()
        if pace is not None:
            self.log.write("timing", {"step": done, **dataclasses.asdict(pace), "data_seconds": data_seconds})
        self.display.step(values, pace)

    def _log_blocked(self, step: int) -> None:
        seconds = self.saver.blocked_seconds()
        if seconds:
            self.log.write("timing", {"step": step, "checkpoint_seconds": seconds})

    def _look(self, state: TrainState, step: int, sets: list[str], samples: bool) -> bool:
        """Score the sets and let the model write, with the pending bias applied, as an export of this step would.

        False if it was cut short by Ctrl-C: what is missing is made up for on resume.
        """
        if not (sets or samples):
            return True
        model = with_pending_bias(state.model, state.betas)

        def stop() -> bool:
            return self.processes.any("a look", self.interrupt.requested)[0]

        begin = time.perf_counter()
        self.display.say(f"step {step}  looking at it: {', '.join([*sets, *['samples'] * samples])}")
        if sets:
            schedule = self.recipe.schedule
            if not score_sets(
                self.scorer,
                model,
                self.data.sets,
                sets,
                step=step,
                rows=schedule.batch_sequences // schedule.accumulation,
                log=self.log,
                say=self.display.say,
                place=self._place,
                stop=stop,
                as_trained=self.as_trained,
                cells=bool(self.recipe.evaluation.cells),
                expected=self.watch,
            ):
                return False
            self.log.write("timing", {"step": step, "evaluation_seconds": time.perf_counter() - begin})
            begin = time.perf_counter()
        if samples:
            writes, tokenizer = self.processes.writes, self.data.tokenizer
            if not write_samples(self.run, self.recipe, model, tokenizer, step, stop=stop, writes=writes):
                return False
            self.log.write("timing", {"step": step, "samples_seconds": time.perf_counter() - begin})
            self.display.say(f"step {step}  samples are in {self.run / 'samples' / f'{step}.jsonl'}")
        return True

    def _finish(self, steps: int) -> None:
        """Last words: the result beside what counting can do, and what to do next."""
        if not self.processes.writes:
            return
        scores = [line for line in read_lines(self.run / "metrics.jsonl") if f"eval_loss/{HELDOUT}" in line]
        model_bits = scores[-1][f"eval_bits_per_byte/{HELDOUT}"]
        facts: dict[str, float] = {"bits_per_byte": model_bits}
        if self.recipe.evaluation.baselines:
            facts |= self._baselines()
        print("held-out bits per byte, lower is better:")
        for name, value in sorted(facts.items(), key=lambda fact: fact[1]):
            print(f"  {'this model' if name == 'bits_per_byte' else name.replace('_', ' '):<18} {value:.4f}")
        self.log.event("finished", step=steps, **facts)
        self.log.sync()
        self.log.close()
        print(f'done: {steps} steps in {self.run}; try: equimoe sample {typed(self.run)} "The function returns"')

    def _baselines(self) -> dict[str, float]:
        """Unigram and bigram fitted on the very tokens that the run was trained on, each counted once."""
        heldout = self.data.sets[HELDOUT]
        found = baselines(
            self.data.rows.tokens(0, self.data.first_rows(self.recipe.data_sequences)),
            heldout_batches(heldout, self.recipe.model.max_position_embeddings, 64),
            heldout.text(self.data.tokenizer.decode),
            self.recipe.model.vocab_size,
        )
        return {"kneser_ney_bigram": found.bigram, "unigram": found.unigram, "zlib": found.zlib}
