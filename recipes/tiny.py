"""The whole system on a laptop: every mechanism of the hero, at a size that trains in minutes.

Purpose: see it learn, stop it, resume it, sample from it; and a base for experiments of your own.
Cost:    about 4 minutes and 2 GB on 2 CPU cores, the extraction of the corpus included.
Expect:  held-out bits per byte at least 0.10 below a Kneser-Ney bigram of the same tokens (printed beside it).

    equimoe train tiny
    equimoe train tiny schedule.steps=50 --run short
    equimoe train tiny --data 'docs/*.md'
    equimoe recipes copy tiny mine.py          # a file of your own, to change
"""

from pathlib import Path

from equimoe import Checkpoints, Data, Evaluation, Recipe, Schedule, preset

STEPS = 700
BATCH_SEQUENCES = 8  # x 256 positions = 2,048 tokens a step
SAVE_EVERY_STEPS = 100
EVALUATE_EVERY_STEPS = 100


def recipe() -> Recipe:
    """Learning rates are left out: they follow from the number of tokens (`equimoe show tiny` prints them)."""
    return Recipe(
        name=Path(__file__).stem,
        purpose="Learn the system on a laptop: all mechanisms of the hero, text that comes with Python.",
        cost="about 4 minutes on 2 CPU cores, 2 GB of memory",
        model=preset("tiny"),
        data=Data(path="embedded"),
        schedule=Schedule(steps=STEPS, batch_sequences=BATCH_SEQUENCES),
        evaluation=Evaluation(every_steps=EVALUATE_EVERY_STEPS, baselines=True),
        checkpoints=Checkpoints(every_steps=SAVE_EVERY_STEPS),
    )
