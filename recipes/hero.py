"""The 535B-A23B run on 18.0 T tokens, with its true numbers (source: github.com/marin-community/marin, issue 8435).

Purpose: the reference that the ladder, the planner and the smaller recipes are held against.
Cost:    2.7e24 FLOPs: 704 GPUs (11 racks of 64) for about 100 days. Less is refused, with what it would need.
Expect:  `equimoe show hero` prints 535,477,106,688 parameters and 46,137,344 x 390,251 = 18.005 T tokens.

    equimoe show hero
    equimoe train hero --data store            # on the cluster; this recipe names no data by itself
    equimoe show hero racks=1                  # the same model and tokens at another batch
"""

from pathlib import Path

from equimoe import Checkpoints, Data, EquimoeError, Evaluation, Mesh, Optimizer, Recipe, Schedule, Transport, preset
from equimoe.counting import counts

RACKS = 11
EXPERT_SHARDS = 64  # GPUs of one NVLink domain: 6 of the 384 experts on each
SEQUENCES_PER_RACK = 1024  # 16 rows of 4,096 a GPU
TOKENS_PER_ACTIVE_PARAMETER = 791  # active by the published count
SAVE_EVERY_STEPS = 6000
EVALUATE_EVERY_STEPS = 3000


def recipe(racks: int = RACKS) -> Recipe:
    """`racks`: batch and mesh grow with them, the tokens in all stay (rounded to whole steps)."""
    if racks < 1:
        raise EquimoeError("racks", "must be at least 1", "The reference run had 11", value=racks)
    model = preset("hero")
    batch_sequences = SEQUENCES_PER_RACK * racks
    tokens_per_step = batch_sequences * model.max_position_embeddings
    steps = round(TOKENS_PER_ACTIVE_PARAMETER * counts(model).active_published / tokens_per_step)  # 390,251 at 11 racks
    return Recipe(
        name=Path(__file__).stem,
        purpose="The 535B-A23B reference run, true numbers: to be shown, planned and compared with.",
        cost="704 GPUs for about 100 days, 2.7e24 FLOPs",
        model=model,
        data=Data(path=None),  # 18 T tokens come with no package: data.path must be given
        schedule=Schedule(steps=steps, batch_sequences=batch_sequences, warmup_fraction=0.01, final_fraction=0.05),
        optimizer=Optimizer(
            newton_schulz_dtype="bfloat16",
            quantile_balancing_bins=10_000,
            z_loss=1e-4,
            # The reference run added a decay of 0.02 at step 58,000; a run that starts today starts as that one did.
            gate_router_decay=0.0,
        ),
        evaluation=Evaluation(every_steps=EVALUATE_EVERY_STEPS),
        checkpoints=Checkpoints(
            every_steps=SAVE_EVERY_STEPS, permanent_every_steps=SAVE_EVERY_STEPS, rolling_minutes=60.0, keep=1
        ),
        mesh=Mesh(replica=racks, data=1, expert=EXPERT_SHARDS, model=1),
        # Ragged from step 81,716 on: 0.018 % dropped instead of 2.67 %.
        transport=Transport("pooled_wave", waves=3, transport_factor=1.15, receiver_factor=1.15),
        compute_dtype="bfloat16",
    )
