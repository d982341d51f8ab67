"""Names of the packaged recipes, as users find them in help, errors and completion: one committed list."""

PACKAGED = ["hero", "ladder", "midtrain", "one_gpu", "tiny", "tiny_ladder", "tiny_two_phase"]
