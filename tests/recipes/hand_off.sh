# From pretraining to a published folder, stage by stage, each begun with what the one before had come to.
#     hand_off.sh RECIPE FOLDER [PRETRAIN_OVERRIDES...]
# RECIPE has rows of 32 positions over a store with the cells `a` and `b`. Run by tests/recipes/test_hand_off.py.
set -euo pipefail
recipe=$1 folder=$2
shift 2

equimoe train "$recipe" --run "$folder/pretrain" "$@"

# The cooldown: other weights from the join on, everything else where the run was.
equimoe train midtrain init_from="$folder/pretrain" step=8 weights='a:0.1 b:0.9' --run "$folder/cooldown" \
    checkpoints.every_steps=2

# Longer rows, at constant tokens a step.
equimoe train midtrain init_from="$folder/cooldown" step=10 context=64 pretrained_context=32 --run "$folder/long"

equimoe export "$folder/long" "$folder/exported"
equimoe inspect "$folder/exported" --json > "$folder/inspected.json"

# Weights alone, as the next stage of somebody else would begin.
equimoe train "$recipe" init_from="$folder/exported" schedule.steps=2 model.max_position_embeddings=64 \
    schedule.batch_sequences=4 --run "$folder/again"
