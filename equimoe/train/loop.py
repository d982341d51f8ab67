"""The training loop: prepare the data, make or restore the state, step, log, save, evaluate.

    equimoe.train_recipe(recipe, Path("runs/tiny"))       a new run
    equimoe.resume_run(Path("runs/tiny"))                the same run, continued to its end

Order at a step that is due for everything: its line is on disk, then the checkpoint is committed, then the
evaluation runs. So a finished run is never lost in evaluation, and a kill at any moment costs at most the
steps since the last checkpoint, which a resumed run makes again, bit for bit on CPU.
"""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from equimoe import optim
from equimoe.baselines import baselines
from equimoe.data.prepare import Prepared, prepare
from equimoe.data.rows import Batch, Rows, heldout_batches
from equimoe.data.source import absolute
from equimoe.errors import EquimoeError
from equimoe.evaluate import Score, evaluate, make_scorer
from equimoe.files import write_file
from equimoe.optim.rates import warmup_then_linear
from equimoe.parallel.capabilities import capabilities, device_memory_bytes
from equimoe.parallel.mesh import make_mesh, row_sharding
from equimoe.plan.arithmetic import refuse_if_too_large, run_rates
from equimoe.recipe import Recipe
from equimoe.recipe.recipe_json import new_provenance, read_recipe, recipe_to_json
from equimoe.train import checkpoint
from equimoe.train.display import Display
from equimoe.train.interrupt import Interrupt
from equimoe.train.metrics import RunLog, read_lines, rewind
from equimoe.train.state import TrainState, abstract_state, create_state, state_shardings, with_pending_bias
from equimoe.train.step import StepMetrics, make_step
from equimoe.train.throughput import StepClock, peak_flops

__all__ = ["make_optimizer", "resume_run", "train_recipe"]

_SMALL_HELDOUT_TOKENS = 10_000
HELDOUT = "heldout"  # the name of the held-out split of the training data among the evaluation sets


def train_recipe(recipe: Recipe, run: Path, *, provenance: dict[str, Any] | None = None) -> None:
    """Train a new run in the folder `run`, to its end.

    Raises EquimoeError if the folder already holds a checkpoint, if the model cannot fit here, or for anything
    wrong with the data; KeyboardInterrupt after Ctrl-C, when the state has been saved.
    """
    recipe = _concrete(recipe)
    mesh = _mesh_that_fits(recipe)
    with _locked(run):
        if checkpoint.committed_steps(run / "checkpoints"):
            raise EquimoeError(
                "run",
                "already holds a trained run, and training never overwrites one",
                f"Continue it with `equimoe resume {run}`",
                value=str(run),
            )
        prepared = prepare(recipe.data, recipe.model.vocab_size, print)
        kept = {**(provenance or new_provenance("python")), "data": _data_identity(prepared)}
        write_file(run / "recipe.json", [recipe_to_json(recipe, kept).encode()])
        rewind(run, 0)  # lines of an attempt that never reached a checkpoint
        session = _Session(recipe, run, prepared, mesh, make_optimizer(recipe))
        session.go(session.fresh_state(), "started")


def resume_run(run: Path) -> None:
    """Continue a run from its newest complete checkpoint; from the beginning if it has none yet.

    Raises EquimoeError if the data is no longer what the run was trained on, or the checkpoint is damaged.
    """
    recipe, provenance = read_recipe(run)
    mesh = _mesh_that_fits(recipe)
    with _locked(run):
        prepared = prepare(recipe.data, recipe.model.vocab_size, print)
        _check_same_data(provenance.get("data", {}), prepared, run)
        session = _Session(recipe, run, prepared, mesh, make_optimizer(recipe))
        steps = checkpoint.committed_steps(run / "checkpoints")
        if steps:
            newest = run / "checkpoints" / str(steps[-1])
            state = checkpoint.restore(newest, abstract_state(recipe.model, session.optimizer, mesh))
        else:
            state = session.fresh_state()
        rewind(run, int(state.step))
        session.go(state, "resumed")


def _mesh_that_fits(recipe: Recipe) -> Mesh:
    """The mesh over the devices here; refuses, before anything is written, what cannot be trained on them."""
    refuse_if_too_large(recipe, device_memory_bytes(), jax.device_count())
    return make_mesh(recipe.mesh, recipe.model, recipe.schedule.batch_sequences)


def _concrete(recipe: Recipe) -> Recipe:
    """`auto` replaced by what this machine does, data named for good: a run resumes the same from any folder."""
    dtype = capabilities().compute_dtype if recipe.compute_dtype == "auto" else recipe.compute_dtype
    newton_schulz = recipe.optimizer.newton_schulz_dtype
    optimizer = dataclasses.replace(
        recipe.optimizer, newton_schulz_dtype=dtype if newton_schulz == "auto" else newton_schulz
    )
    return absolute(dataclasses.replace(recipe, compute_dtype=dtype, optimizer=optimizer))


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """The optimizer of a run, by its recipe."""
    settings, schedule = recipe.optimizer, recipe.schedule
    return optim.make(
        recipe.model,
        run_rates(recipe),
        steps=schedule.steps,
        warmup_fraction=schedule.warmup_fraction,
        final_fraction=schedule.final_fraction,
        momentum=settings.momentum,
        newton_schulz_steps=settings.newton_schulz_steps,
        newton_schulz_dtype=settings.newton_schulz_dtype,
        gate_router_decay=settings.gate_router_decay,
    )


def _data_identity(prepared: Prepared) -> dict[str, str]:
    return {"corpus_sha256": prepared.corpus_sha256, "tokenizer_sha256": prepared.tokenizer_sha256}


def _check_same_data(before: dict[str, str], prepared: Prepared, run: Path) -> None:
    now = _data_identity(prepared)
    changed = sorted(name for name in now if before.get(name) != now[name])
    if changed:
        raise EquimoeError(
            "training data",
            f"must be what the run was trained on; {' and '.join(changed)} changed",
            "Restore the files (for `embedded`: the package versions of recipe.json), or start a new run",
            value=str(run),
        )


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """One process at a time trains a run: the lock goes with the process, also when it is killed."""
    run.mkdir(parents=True, exist_ok=True)
    with open(run / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise EquimoeError(
                "run", "is being trained by another process", "Wait for it, or choose another --run", value=str(run)
            ) from None
        for name in checkpoint.remove_incomplete(run / "checkpoints"):
            print(f"removed {name} from {run / 'checkpoints'}: its save was interrupted, it has no marker")
        try:
            yield
        except KeyboardInterrupt as stop:
            if not stop.args:  # not the polite one, that has saved and said so
                print(f"stopped without saving; {_how_to_go_on(run)}")
            raise
        finally:
            if {path.name for path in run.iterdir()} == {".lock"}:  # it failed before there was anything to keep
                (run / ".lock").unlink()
                run.rmdir()


def _how_to_go_on(run: Path) -> str:
    started = (run / "recipe.json").exists()
    return f"continue with: equimoe resume {run}" if started else "nothing was written yet, give the same command again"


@dataclass
class _Session:
    """One process's work on one run, from a state to the end of the schedule."""

    recipe: Recipe
    run: Path
    prepared: Prepared
    mesh: Mesh
    optimizer: optax.GradientTransformation

    def fresh_state(self) -> TrainState:
        """The state before the first step."""
        state = create_state(self.recipe.model, self.optimizer, self.mesh, key=jax.random.key(self.recipe.seed))
        optim.refuse_zero_matrices(state.model)
        return state

    def go(self, state: TrainState, how: str) -> None:
        """Train from `state` to the last step."""
        recipe, steps = self.recipe, self.recipe.schedule.steps
        start = int(state.step)
        self._prepare(state)
        self.log.event(
            how,
            step=start,
            devices=jax.device_count(),
            device=capabilities().device_kind,
            compute_dtype=recipe.compute_dtype,
        )
        with Interrupt(self.display.say) as interrupt, self.display:  # Ctrl-C is ours before the bar hides the cursor
            self.display.say("compiling the step; then a line every 10 seconds")
            if start and self._evaluation_missing(start):
                self._evaluate(state)
            state, interrupted = self._steps(state, start, interrupt)
        if interrupted:
            print(f"saved at step {int(state.step)}; continue with: equimoe resume {self.run}")
            raise KeyboardInterrupt("saved")
        self._finish(steps)

    def _prepare(self, state: TrainState) -> None:
        """Everything that the loop reads: rows, compiled functions, log, display, clock."""
        recipe = self.recipe
        self.rows = Rows(self.prepared.train, recipe.model.max_position_embeddings, recipe.seed)
        self.step = make_step(
            self.optimizer,
            z_loss=recipe.optimizer.z_loss,
            qb_bins=recipe.optimizer.quantile_balancing_bins,
            compute_dtype=recipe.compute_dtype,
            shardings=state_shardings(state),
        )
        self.scorer = make_scorer(recipe.compute_dtype)
        self.log = RunLog(self.run)
        self.display = Display(recipe.schedule.steps, int(state.step))
        self.sharding = row_sharding(self.mesh)
        peak, source = peak_flops(recipe.compute_dtype)
        epochs = recipe.schedule.steps * recipe.schedule.batch_sequences / self.rows.rows_per_epoch
        self.display.say(
            f"data: {recipe.total_tokens:,} tokens to train on = {epochs:.2f} epochs of the training split"
        )
        if self.prepared.heldout.token_count < _SMALL_HELDOUT_TOKENS:
            self.display.say(
                f"data: only {self.prepared.heldout.token_count:,} held-out tokens: their loss says little"
            )
        self.display.say(f"peak for MFU: {peak / 1e9:,.0f} GFLOP/s ({source})")
        self.clock = StepClock(recipe, peak)
        rates, schedule = run_rates(recipe), recipe.schedule
        self.rates = {
            name: warmup_then_linear(
                peak_rate,
                schedule.steps,
                warmup_fraction=schedule.warmup_fraction,
                final_fraction=schedule.final_fraction,
            )
            for name, peak_rate in (("muonh_lr", rates.muonh_lr), ("adam_lr", rates.adam_lr))
        }

    def _steps(self, state: TrainState, start: int, interrupt: Interrupt) -> tuple[TrainState, bool]:
        """The loop. A step's metrics are fetched while the next one runs; before a save they are on disk."""
        steps, waiting = self.recipe.schedule.steps, None
        for done in range(start + 1, steps + 1):
            batch = self._batch(done)
            state, metrics = self.step(state, *batch)
            if waiting is not None:
                self._report(*waiting)
            waiting = (done, metrics)
            stop = interrupt.requested
            last = done == steps
            save = last or stop or done % self.recipe.checkpoints.every_steps == 0
            score = last or done % self.recipe.evaluation.every_steps == 0
            if save or score:
                self._report(*waiting)
                waiting = None
                if save:
                    self._save(state)
                if stop and not last:
                    return state, True
                if score:
                    self._evaluate(state)
                self.clock.pause()
        return state, False

    def _batch(self, done: int) -> tuple[jax.Array, ...]:
        size = self.recipe.schedule.batch_sequences
        batch = self.rows.batch((done - 1) * size, size)
        return self._on_devices(batch)

    def _on_devices(self, batch: Batch) -> tuple[jax.Array, ...]:
        return tuple(jax.device_put(a, self.sharding) for a in (batch.token_ids, batch.segment_ids, batch.loss_weight))

    def _report(self, done: int, metrics: StepMetrics) -> None:
        """Fetch a step's metrics, write its line, show it. A non-finite value stops the run here, before any save."""
        found = jax.device_get(metrics)
        config = self.recipe.model
        assignments = self.recipe.tokens_per_step * config.num_experts_per_tok * config.num_hidden_layers - int(
            np.sum(found.skipped_padding, dtype=np.int64)
        )
        dropped = int(np.sum(found.dropped, dtype=np.int64))
        values = {
            "step": done,
            "tokens": done * self.recipe.tokens_per_step,
            **{
                name: float(getattr(found, name))
                for name in (
                    "loss",
                    "cross_entropy",
                    "z",
                    "gradient_norm",
                    "load_max_over_mean",
                    "load_min_over_mean",
                    "router_entropy",
                    "router_z",
                    "router_bias_norm",
                )
            },
            **{name: rate(done - 1) for name, rate in self.rates.items()},
            "dropped": dropped,
            "dropped_share": dropped / max(1, assignments),
            "skipped_padding": int(np.sum(found.skipped_padding, dtype=np.int64)),
        }
        self.log.write("metrics", values)
        pace = self.clock.tick()
        if pace is not None:
            self.log.write("timing", {"step": done, **dataclasses.asdict(pace)})
        self.display.step(values, pace)

    def _save(self, state: TrainState) -> None:
        step = int(state.step)
        self.log.sync()
        path = checkpoint.save(
            self.run / "checkpoints",
            state,
            sequences=step * self.recipe.schedule.batch_sequences,
            tokenizer=self.prepared.tokenizer_path.read_bytes(),
            keep=self.recipe.checkpoints.keep,
        )
        self.log.event("saved", step=step, path=f"checkpoints/{path.name}")

    def _evaluate(self, state: TrainState) -> None:
        """Score the held-out split with the pending bias applied, as an export of this step would score."""
        step = int(state.step)
        size = self.recipe.schedule.batch_sequences
        store = self.prepared.heldout
        model = with_pending_bias(state.model, state.betas)
        score: Score = evaluate(
            self.scorer,
            model,
            heldout_batches(store, self.recipe.model.max_position_embeddings, size),
            store.total_text_bytes,
        )
        self.log.write(
            "metrics",
            {
                "step": step,
                f"eval_loss/{HELDOUT}": score.loss,
                f"eval_bits_per_byte/{HELDOUT}": score.bits_per_byte,
                f"eval_tokens/{HELDOUT}": score.tokens,
            },
        )
        self.display.say(f"step {step}  held-out loss {score.loss:.4f}  bits per byte {score.bits_per_byte:.4f}")

    def _evaluation_missing(self, step: int) -> bool:
        """Whether a kill between the save and the evaluation of this step left the evaluation undone."""
        due = step == self.recipe.schedule.steps or step % self.recipe.evaluation.every_steps == 0
        return due and not any(
            line["step"] == step and f"eval_loss/{HELDOUT}" in line for line in read_lines(self.run / "metrics.jsonl")
        )

    def _finish(self, steps: int) -> None:
        """Last words: the result beside what counting can do, and what to do next."""
        scores = [line for line in read_lines(self.run / "metrics.jsonl") if f"eval_loss/{HELDOUT}" in line]
        model_bits = scores[-1][f"eval_bits_per_byte/{HELDOUT}"]
        facts: dict[str, float] = {"bits_per_byte": model_bits}
        if self.recipe.evaluation.baselines:
            facts |= self._baselines(steps)
        print("held-out bits per byte, lower is better:")
        for name, value in sorted(facts.items(), key=lambda fact: fact[1]):
            print(f"  {'this model' if name == 'bits_per_byte' else name.replace('_', ' '):<18} {value:.4f}")
        self.log.event("finished", step=steps, **facts)
        self.log.sync()
        self.log.close()
        print(f'done: {steps} steps in {self.run}; try: equimoe sample {self.run} "The function returns"')

    def _baselines(self, steps: int) -> dict[str, float]:
        """Unigram and bigram fitted on the very tokens that the run was trained on, each counted once."""
        rows = min(steps * self.recipe.schedule.batch_sequences, self.rows.rows_per_epoch)
        row_tokens = self.recipe.model.max_position_embeddings
        found = baselines(
            self.rows.tokens(0, rows),
            heldout_batches(self.prepared.heldout, row_tokens, 64),
            self.prepared.heldout_text(),
            self.recipe.model.vocab_size,
        )
        return {"kneser_ney_bigram": found.bigram, "unigram": found.unigram, "zlib": found.zlib}
