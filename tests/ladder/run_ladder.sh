# The ladder of recipes/tiny_ladder.py, climbed and judged: about 10 minutes on 2 free cores.
#     bash tests/ladder/run_ladder.sh FOLDER
# Three rungs, the smallest with three seeds, predict the fourth. The asymptote 0.8 is the recipe's, set beforehand.
set -euo pipefail
cd "$1"
largest=tiny_ladder-d96
for seed in 0 1 2; do
    [ -e runs/d32-seed$seed ] || equimoe train tiny_ladder rung=d32 seed=$seed --run d32-seed$seed
done
for rung in d48 d64 d96; do
    [ -e runs/$rung ] || equimoe train tiny_ladder rung=$rung --run $rung
done
points="runs/d32-seed0 runs/d32-seed1 runs/d32-seed2 runs/d48 runs/d64 runs/d96"
equimoe ladder fit $points --asymptote 0.8 --hold-out $largest
equimoe ladder plot $points law.svg --asymptote 0.8 --hold-out $largest
