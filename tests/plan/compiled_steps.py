"""Steps compiled for N devices that share this CPU, and what the planner says of them, as one line of JSON."""

from __future__ import annotations

import json
import sys

from equimoe.parallel.capabilities import pretend_devices

SMALL = ["data.path=x", "model.vocab_size=1024", "compute_dtype=float32", "optimizer.newton_schulz_dtype=float32"]
WIDE = [
    "model.hidden_size=192",
    "model.num_attention_heads=6",
    "model.latent_dim=96",
    "model.moe_intermediate_size=160",
]
LONG = ["model.max_position_embeddings=512", "model.sliding_window=128", "model.vocab_size=6144"]
CASES = {
    1: [
        ["schedule.batch_sequences=16"],
        [*WIDE, "schedule.batch_sequences=8", "model.num_experts=8", "model.num_experts_per_tok=3"],
        [*LONG, "schedule.batch_sequences=8", "schedule.accumulation=2", "model.num_hidden_layers=2"],
    ],
    8: [
        ["mesh.data=2", "mesh.expert=4", "transport.kind=pooled_wave", "schedule.batch_sequences=64"],
        [*WIDE, "mesh.data=8", "schedule.batch_sequences=32"],
        [*LONG, "mesh.replica=2", "mesh.data=2", "mesh.expert=2", "transport.kind=pooled_wave",
         "transport.waves=2", "schedule.batch_sequences=16", "model.num_hidden_layers=2"],
    ],
}  # fmt: skip


def main(devices: int) -> None:
    pretend_devices(devices)
    from equimoe.parallel.program import CPU
    from equimoe.plan.arithmetic import arithmetic
    from equimoe.plan.traffic import traffic_of
    from equimoe.recipe.resolve import resolve
    from equimoe.rehearsal.abstract_step import compile_step

    cases = []
    for changes in CASES[devices]:
        last = {text.partition("=")[0]: text for text in (*SMALL, *changes)}
        recipe = resolve("tiny", list(last.values())).recipe
        memory, compiled = arithmetic(recipe, devices=devices, program=CPU).memory, compile_step(recipe)
        planned: dict[str, int] = {}
        for one in traffic_of(recipe, memory.mesh, CPU):
            planned[one.kind] = planned.get(one.kind, 0) + one.times * one.bytes
        cases.append(
            {
                "changes": changes,
                "arguments": compiled.argument_bytes,
                "planned_arguments": memory.argument_bytes + 3 * 4 * recipe.tokens_per_step // devices,
                "temporary": compiled.temporary_bytes,
                "planned_temporary": memory.peak_bytes - memory.argument_bytes,
                "collectives": compiled.bytes_by_kind(),
                "planned_collectives": planned,
            }
        )
    print(json.dumps(cases))


if __name__ == "__main__":
    main(int(sys.argv[1]))
