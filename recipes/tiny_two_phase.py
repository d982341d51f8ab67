"""Two phases over two cells, on a laptop: documentation first, then presidential speeches; the hero's mixture in small.

Purpose: see what a mixture does: the switch at its step, and each domain's held-out loss before and after it.
Cost:    about 5 minutes and 2 GB on 2 CPU cores; needs the texts of `pip install 'equimoe[text]'`.
Expect:  after step 240 (`mixture_segment` in metrics.jsonl goes from 0 to 1) the speeches' held-out loss falls faster
         than before, and that of the documentation stops falling.

    equimoe train tiny_two_phase
    equimoe data show tiny_two_phase 3                             # cells, weights, epochs, rows
    equimoe train tiny_two_phase mixture.weights=tokens --run as-they-come
    equimoe recipes copy tiny_two_phase mine.py
"""

from pathlib import Path

from equimoe import Checkpoints, Data, Evaluation, Mixture, Optimizer, Recipe, Schedule, preset

STEPS = 400
BATCH_SEQUENCES = 8  # x 256 positions = 2,048 tokens a step
BLOCK_SEQUENCES = 80  # 10 steps: a phase begins at a multiple of them
FIRST_PHASE = 0.6  # of the steps; the hero's is 0.8
EVALUATE_EVERY_STEPS = 40
MUONH_LR, ADAM_LR = 0.045, 0.012  # those of `tiny`


def recipe() -> Recipe:
    """The model, batch and rates of `tiny`; what is new is `data.cell` and the mixture."""
    return Recipe(
        name=Path(__file__).stem,
        purpose="Two phases over two domains on a laptop: what a mixture does to each domain's held-out loss.",
        cost="about 5 minutes on 2 CPU cores, 2 GB of memory",
        model=preset("tiny"),
        data=Data(
            path=("embedded", "embedded:speeches"),
            cell="source",  # a cell each: docstrings, speeches
            piece_bytes=20_000,  # a speech is a document of 50 kB, of which too few could be held out
            heldout_max_bytes=100_000,  # of each cell
        ),
        mixture=Mixture(
            weights="docstrings:0.9/0.2 speeches:0.1/0.8",
            shares=(FIRST_PHASE, 1 - FIRST_PHASE),
            block_sequences=BLOCK_SEQUENCES,
        ),
        optimizer=Optimizer(muonh_lr=MUONH_LR, adam_lr=ADAM_LR),
        schedule=Schedule(steps=STEPS, batch_sequences=BATCH_SEQUENCES),
        evaluation=Evaluation(every_steps=EVALUATE_EVERY_STEPS, at_first_step=False),
        checkpoints=Checkpoints(every_steps=100),
    )
