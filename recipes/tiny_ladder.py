"""A ladder that a laptop climbs: four sizes at 20 tokens per active parameter, to fit a law and test it on the largest.

Purpose: see what `equimoe ladder` does, and how far to trust it: three rungs predict the fourth.
Cost:    d32 and d48 half a minute each, d64 2, d96 5 minutes on 2 CPU cores; 2 GB.
Expect:  losses on one line in log(L - 0.8) over log(FLOPs); README, "Small runs predict a large one", has figures.

    equimoe train tiny_ladder rung=d32
    equimoe train tiny_ladder rung=d32 seed=1 --run tiny_ladder-d32-seed1
    equimoe ladder fit runs/tiny_ladder-* --asymptote 0.8 --hold-out tiny_ladder-d96

The asymptote was set before any of these ran: the public ladder's 1.4 nats a token are 0.32 nats a byte of its
tokenizer; a token of this one has 2.6 bytes.
"""

from pathlib import Path

from equimoe import Checkpoints, Data, EquimoeError, Evaluation, Recipe, Schedule, derive
from equimoe.counting import counts

LAYERS = {"d32": 2, "d48": 2, "d64": 3, "d96": 3}  # by width, in the name of the rung
TOKENS_PER_ACTIVE_PARAMETER = 20  # the published ladder's is 791: of the corpus there would be too little
BATCH_SEQUENCES, ROW_TOKENS = 8, 256
EVALUATIONS = 10  # at equal fractions of training


def recipe(rung: str = "d32") -> Recipe:
    """`rung`: d32, d48, d64 or d96. Rates follow from the token budget, as everywhere on a ladder."""
    if rung not in LAYERS:
        raise EquimoeError("rung", f"must be one of {', '.join(LAYERS)}", "Use rung=d32", value=rung)
    model = derive(
        int(rung[1:]),
        layers=LAYERS[rung],
        head_dim=16,
        experts=16,
        experts_per_token=2,
        vocabulary=1024,
        row_tokens=ROW_TOKENS,
        window=64,
        gated_norm_rank=16,
    )
    tokens = TOKENS_PER_ACTIVE_PARAMETER * counts(model).active_published
    steps = round(tokens / (BATCH_SEQUENCES * ROW_TOKENS))
    often = max(1, steps // EVALUATIONS)
    return Recipe(
        name=f"{Path(__file__).stem}-{rung}",
        purpose="Four sizes that a laptop trains, to fit a scaling law and test it on the largest.",
        cost="half a minute to 5 minutes on 2 CPU cores",
        model=model,
        data=Data(path="embedded"),
        schedule=Schedule(steps=often * EVALUATIONS, batch_sequences=BATCH_SEQUENCES),
        evaluation=Evaluation(every_steps=often, at_first_step=False),
        checkpoints=Checkpoints(every_steps=5 * often),
    )
