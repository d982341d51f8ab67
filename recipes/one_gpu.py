"""The d768 rung of the scaling ladder on one GPU of 80 GB: 1.6 B parameters, 61 M active, 48 B tokens.

Purpose: a research run on one card, with the batch, tokens and rates of the published rung.
Cost:    5.5e19 FLOPs: about 3 days on one H100 at 20 % of its peak, by arithmetic; no GPU has run it yet.
Expect:  `equimoe show one_gpu` adds up its memory to less than 80 GB; the published rung is one of the ladder's points.

    equimoe show one_gpu
    equimoe train one_gpu --data 'hf://HuggingFaceFW/fineweb-edu' data.max_bytes=200000000000
    equimoe recipes copy one_gpu mine.py       # a file of your own, to change

The tokens of a run are kept on disk, 4 bytes each with this vocabulary: 48 B are 192 GB in the cache. A shorter run,
`schedule.steps=1000`, derives its rates from its own budget.
"""

from pathlib import Path

from equimoe import Checkpoints, Data, Evaluation, Optimizer, Recipe, Schedule, preset
from equimoe.counting import counts

BATCH_SEQUENCES = 1024  # x 4,096 positions = 4.2 M tokens a step, as published
ROWS_AT_A_TIME = 8  # 32,768 tokens: the larger part of what a step needs for a while grows with them
TOKENS_PER_ACTIVE_PARAMETER = 791  # active by the published count
SAVE_EVERY_STEPS = 500
EVALUATE_EVERY_STEPS = 250


def recipe(rows_at_a_time: int = ROWS_AT_A_TIME) -> Recipe:
    """`rows_at_a_time`: sequences of a micro-batch; smaller for a smaller card, the update stays the same."""
    model = preset("d768")
    tokens_per_step = BATCH_SEQUENCES * model.max_position_embeddings
    return Recipe(
        name=Path(__file__).stem,
        purpose="The d768 rung of the ladder (1.6 B parameters, 61 M active) on one GPU of 80 GB.",
        cost="about 3 days on one H100 by arithmetic, 5.5e19 FLOPs",
        model=model,
        data=Data(path=None, tokenizer="marin-community/marin-tokenizer"),  # Llama 3's entries: 128,256
        schedule=Schedule(
            steps=round(TOKENS_PER_ACTIVE_PARAMETER * counts(model).active_published / tokens_per_step),  # 11,420
            batch_sequences=BATCH_SEQUENCES,
            accumulation=max(1, BATCH_SEQUENCES // max(1, rows_at_a_time)),
        ),
        optimizer=Optimizer(newton_schulz_dtype="bfloat16"),
        evaluation=Evaluation(every_steps=EVALUATE_EVERY_STEPS),
        checkpoints=Checkpoints(every_steps=SAVE_EVERY_STEPS, permanent_every_steps=4 * SAVE_EVERY_STEPS),
        compute_dtype="bfloat16",
    )
