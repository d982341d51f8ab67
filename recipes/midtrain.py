"""The later part of a run: a cooldown on other weights, then longer context, joined exactly where the run was.

Purpose: from 80 % of pretraining on, the mixture of the cooldown, and context from 4,096 to 32,768 and 65,536 positions
         at constant tokens a step; rates, moments, router bias and the place in the data are those of the run.
Cost:    of the hero the last 20 % of its steps: 5.4e23 FLOPs, 704 GPUs for about 20 days; a longer row costs more.
Expect:  the first step is the one that the run would have made; loss at positions beyond the old length falls, and that
         of short rows stays (tests/recipes/long_context.py shows both on a laptop).

    equimoe train midtrain init_from=runs/hero step=312000 weights=cooldown.csv
    equimoe train midtrain init_from=runs/midtrain step=351000 context=32768 --run midtrain-32k
    equimoe train midtrain init_from=runs/midtrain-32k step=372000 context=65536 --run midtrain-65k
    equimoe train midtrain init_from=tiny step=200 context=512 pretrained_context=256     # after `equimoe train tiny`

Rows of another length are rows of the same documents, so `data` and its mixture stay those of the run. Another corpus
is read with `init_from.take=weights,betas,optimizer,position data.path=STORE data.tokenizer=...`.
"""

import dataclasses
import math
from pathlib import Path

from equimoe import EquimoeError, Mixture, MixtureStage, Recipe, continued
from equimoe.recipes.hero import recipe as hero

PRETRAINED_CONTEXT = 4096
QUERY_MULTIPLIER = 1.3
LONG_TIMES = 4  # rows of documents that fill a row come round so often in their cell, once rows are longer


def recipe(
    init_from: str = "",
    step: int = 0,
    context: int = 0,
    pretrained_context: int = PRETRAINED_CONTEXT,
    weights: str = "",
    long_times: int = LONG_TIMES,
) -> Recipe:
    """`init_from`: a run, and `step` its checkpoint (0: the newest); without one the hero's shapes, to be shown.

    `context`: positions of a row (0: as the run); `pretrained_context`: those that the first run was trained with, from
    which the multiplier of queries grows. `weights`: of the cells from here on, as `mixture.weights`, else as they are.
    """
    parent = continued(init_from, step or None) if init_from else hero()
    model, mixture, schedule = parent.model, parent.mixture, parent.schedule
    row_tokens = context or model.max_position_embeddings
    batch_sequences = parent.tokens_per_step / row_tokens
    block_sequences = mixture.block_sequences * model.max_position_embeddings / row_tokens
    if batch_sequences != int(batch_sequences) or batch_sequences < 1 or block_sequences != int(block_sequences):
        raise EquimoeError(
            "context",
            f"must divide the {parent.tokens_per_step:,} tokens of a step, and a block of the mixture, into whole rows",
            f"Use {model.max_position_embeddings} times a power of 2",
            value=context,
        )
    growth = row_tokens / pretrained_context
    cells = not init_from or mixture != Mixture()  # files without cells have neither blocks nor long rows
    longer = cells and row_tokens > model.max_position_embeddings
    batch_sequences, block_sequences = int(batch_sequences), int(block_sequences)
    stages = dict(mixture.stages)
    if weights:
        multiple = math.lcm(block_sequences, batch_sequences) // batch_sequences
        begin = -(-max(parent.init_from.step or 0, 1) // multiple) * multiple  # where a block and a step end together
        stages[Path(__file__).stem] = MixtureStage(from_step=begin, weights=weights)
    return dataclasses.replace(
        parent,
        name=Path(__file__).stem,
        purpose="Cooldown and longer context, joined to a run where it was: rates, moments, router bias, data.",
        cost="of the hero 20 % of its steps, 5.4e23 FLOPs",
        model=dataclasses.replace(
            model,
            max_position_embeddings=row_tokens,
            qk_mult=QUERY_MULTIPLIER * (0.1 * math.log(growth) + 1) if growth > 1 else model.qk_mult,
        ),
        schedule=dataclasses.replace(
            schedule,
            batch_sequences=batch_sequences,
            accumulation=math.gcd(schedule.accumulation, batch_sequences),
        ),
        mixture=dataclasses.replace(mixture, block_sequences=block_sequences, stages=stages)
        if cells or stages
        else mixture,
        data=dataclasses.replace(
            parent.data,
            long_document_tokens=row_tokens if longer else parent.data.long_document_tokens,
            long_document_times=long_times if longer else parent.data.long_document_times,
        ),
    )
