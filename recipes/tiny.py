"""The whole system on a laptop: every mechanism of the hero, at a size that trains in minutes.

Purpose: see it learn, stop it, resume it, sample from it; and a base for experiments of your own.
Cost:    about 3 minutes and 2 GB on 2 CPU cores, the extraction of the corpus included.
Expect:  held-out bits per byte about 1.8, where a Kneser-Ney bigram of the same tokens has 2.0 (printed beside it).

    equimoe train tiny
    equimoe train tiny schedule.steps=50 --run short
    equimoe train tiny --data 'docs/*.md'
    equimoe recipes copy tiny mine.py          # a file of your own, to change
"""

from pathlib import Path

from equimoe import Checkpoints, Data, Evaluation, Optimizer, Recipe, Schedule, preset

STEPS = 300
BATCH_SEQUENCES = 8  # x 256 positions = 2,048 tokens a step
SAVE_EVERY_STEPS = 100
EVALUATE_EVERY_STEPS = 150

# The rates that follow from the token budget were fitted on billions of tokens; at half a million they are too low
# (1.92 bits per byte after 320 steps instead of 1.82). Leave them out to have the derived ones.
MUONH_LR = 0.045
ADAM_LR = 0.012


def recipe() -> Recipe:
    """Everything else is a default of the hero, or follows from the sizes."""
    return Recipe(
        name=Path(__file__).stem,
        purpose="Learn the system on a laptop: all mechanisms of the hero, text that comes with Python.",
        cost="about 3 minutes on 2 CPU cores, 2 GB of memory",
        model=preset("tiny"),
        data=Data(path="embedded"),
        optimizer=Optimizer(muonh_lr=MUONH_LR, adam_lr=ADAM_LR),
        schedule=Schedule(steps=STEPS, batch_sequences=BATCH_SEQUENCES),
        # Not after the first step: the first regular evaluation is only a minute away.
        evaluation=Evaluation(every_steps=EVALUATE_EVERY_STEPS, at_first_step=False, baselines=True),
        checkpoints=Checkpoints(every_steps=SAVE_EVERY_STEPS),
    )
