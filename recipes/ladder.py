"""A rung of the scaling ladder: the hero's recipe at a smaller width, from which its losses are predicted.

Purpose: d768, d1024, d1536 and d2048 at 791 tokens per active parameter, as published; `equimoe ladder` fits their law.
Cost:    5.5e19, 2.7e20, 1.8e21 and 9.2e21 FLOPs: 64, 128, 384 and 704 GPUs.
Expect:  each evaluation is a point at its fraction of training; the hero is predicted before it is begun.

    equimoe show ladder rung=d1024
    equimoe train ladder rung=d768 --data store
    equimoe ladder predict runs/ladder-* --recipe hero --asymptote 1.4 --out prediction.json
"""

from pathlib import Path

from equimoe import Checkpoints, Data, EquimoeError, Evaluation, Mesh, Optimizer, Recipe, Schedule, Transport, preset
from equimoe.counting import counts

RACKS = {"d768": 1, "d1024": 2, "d1536": 6, "d2048": 11}  # of 64 GPUs, in the published runs
EXPERT_SHARDS = 64
SEQUENCES_PER_RACK = 1024
TOKENS_PER_ACTIVE_PARAMETER = 791
EVALUATIONS = 20  # at equal fractions of training, whatever the length


def recipe(rung: str = "d768", tokens_per_parameter: int = TOKENS_PER_ACTIVE_PARAMETER) -> Recipe:
    """`rung`: d768, d1024, d1536 or d2048. A shorter ladder, of fewer `tokens_per_parameter`, has its own rates."""
    if rung not in RACKS or tokens_per_parameter < 1:
        raise EquimoeError(
            "rung and tokens_per_parameter",
            f"must be one of {', '.join(RACKS)}, and at least 1",
            "Use rung=d768",
            value=(rung, tokens_per_parameter),
        )
    model, racks = preset(rung), RACKS[rung]
    batch_sequences = SEQUENCES_PER_RACK * racks
    tokens_per_step = batch_sequences * model.max_position_embeddings
    steps = round(tokens_per_parameter * counts(model).active_published / tokens_per_step)
    often = max(1, steps // EVALUATIONS)
    return Recipe(
        name=f"{Path(__file__).stem}-{rung}",
        purpose="A rung of the ladder (rung=d768, d1024, d1536, d2048): the hero's recipe at a smaller width.",
        cost="64 to 704 GPUs; 5.5e19 to 9.2e21 FLOPs",
        model=model,
        data=Data(path=None),
        schedule=Schedule(steps=steps, batch_sequences=batch_sequences),
        optimizer=Optimizer(newton_schulz_dtype="bfloat16"),
        evaluation=Evaluation(every_steps=often),
        checkpoints=Checkpoints(every_steps=often, permanent_every_steps=5 * often, keep=1),
        mesh=Mesh(replica=racks, data=1, expert=EXPERT_SHARDS, model=1),
        transport=Transport("pooled_wave", waves=3, transport_factor=1.15, receiver_factor=1.15),
        compute_dtype="bfloat16",
    )
