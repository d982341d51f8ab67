"""A job as a batch script of Slurm: `srun` starts a process a GPU, the script starts the job again where that helps.

What an end means, by srun's exit code, which is the highest of all processes:

    0            the run is done
    2            a mistake: the same command would make it again
    3            a monitor stopped the run, as its recipe asks: saved, a person should look at it
    130          stopped by a person (scancel --signal=INT): saved, stays stopped
    143          stopped before the time limit, saved: again
    75           a process was lost or did not come: again
    others       (a crash, memory that ran out, no progress): again, if the run had begun by then

A crash loop ends in the run itself: `train --or-resume` makes it a mistake when the last starts never came to a new
checkpoint. Times of files are never compared with a clock of another machine: what is looked at is how large they are.
"""

from __future__ import annotations

import re
import shlex

from equimoe import __version__
from equimoe.errors import Problems
from equimoe.files import filled
from equimoe.launch.job import (
    STALE_MINUTES,
    START_MINUTES,
    START_TIMEOUT_SECONDS,
    STOP_SECONDS,
    Job,
)
from equimoe.plan.fit import USABLE

__all__ = ["script"]

# Every form that Slurm's --time takes: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.
_TIME = re.compile(r"\d{1,6}(:\d{1,2}){0,2}|\d{1,4}-\d{1,2}(:\d{1,2}){0,2}")
_NAMES = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,@+-]{0,127}")

_TEMPLATE = """\
#!/bin/bash
# Written by `equimoe launch slurm` (equimoe @VERSION@). Read it, change what is marked EDIT, then: sbatch FILE
# @SUMMARY@
# Submit from a folder that all hosts share: paths below without a leading / begin there.
#
#   scancel --signal=TERM JOB    saves, and starts the job again
#   scancel --signal=INT JOB     saves, and stops for good
#   scancel JOB                  stops at once: what was done since the last checkpoint is lost

#SBATCH --job-name=@NAME@
# One task a GPU. No --gpus-per-task: a process must see all GPUs of its host to reach them over NVLink; equimoe
# chooses its own by the order of the processes on the host.
#SBATCH --nodes=@HOSTS@
#SBATCH --ntasks-per-node=@HOST_PROCESSES@
#SBATCH --gpus-per-node=@HOST_PROCESSES@
# EDIT: cores of a host divided by its GPUs.
#SBATCH --cpus-per-task=8
# Whole hosts with all their memory. EDIT where a job with fewer GPUs than a host has should share it.
#SBATCH --exclusive
#SBATCH --mem=0
# SIGTERM to the processes, not to this script, @STOP_SECONDS@ s before the time limit: they save and exit 143.
# EDIT where a step and a save take longer.
#SBATCH --signal=TERM@@STOP_SECONDS@
#SBATCH --requeue
# A job that starts again goes on in the same log.
#SBATCH --open-mode=append
#SBATCH --output=@NAME@-%j.log
# EDIT: what your cluster asks for. The time limit may be short: the job is started again until the run is done.
@PARTITION@
@ACCOUNT@
@TIME@
@SEGMENT@
set -u

# ---- what is trained. Recipe file, data and run folder must be on storage that all hosts share, and on which flock
# works (on Lustre: mounted with -o flock).
run=@RUN@
command=(@COMMAND@)

# ---- environment. EDIT: what makes `equimoe` known on every host, for example
# source venv/bin/activate
# The environment that you submit from comes along, HF_TOKEN too: write no secret into this file.
# Prepared data and compiled programs, for all hosts: process 0 makes them, the others find them.
export EQUIMOE_CACHE="${EQUIMOE_CACHE:-$PWD/equimoe-cache}"
# How long the processes wait for each other.
export EQUIMOE_START_TIMEOUT=@START_TIMEOUT@
# JAX takes 0.75 of the GPU's memory if it is not told; the rest of this is for NCCL and CUDA.
export XLA_PYTHON_CLIENT_MEM_FRACTION=@MEMORY_FRACTION@
export NCCL_DEBUG=WARN
# Lines appear in the log when they are written.
export PYTHONUNBUFFERED=1
# EDIT, where the network needs it: export NCCL_SOCKET_IFNAME=..., NCCL_IB_HCA=..., XLA_FLAGS=...

# ---- limits. A run that writes nothing for so long hangs, and is started again: a step, an evaluation of one set or
# the preparation of data must not take longer. EDIT: prepare large data before, or allow more at the start.
start_minutes=@START_MINUTES@
stale_minutes=@STALE_MINUTES@
look_seconds=60
# Of all starts, whatever their reason. EDIT for a long run under a short time limit.
most_requeues=1000

bytes() { # of what the run has written; it only grows while the run goes on
  local sum=0 each
  for each in $(stat --format=%s -- "$run/metrics.jsonl" "$run/timing.jsonl" 2>/dev/null); do sum=$((sum + each)); done
  echo "$sum"
}

events() { stat --format=%s -- "$run/events.jsonl" 2>/dev/null; }

watch() { # kill the step when the run writes nothing any more
  local last now since=$SECONDS minutes=$start_minutes
  last=$(bytes)
  while sleep "$look_seconds"; do
    now=$(bytes)
    # Fewer: a resumed run has taken back what came after its checkpoint. That is no step yet.
    if ((now > last)); then minutes=$stale_minutes; fi
    if ((now != last)); then last=$now since=$SECONDS; fi
    if ((SECONDS - since >= minutes * 60)); then
      echo "job $SLURM_JOB_ID: the run has written nothing for $minutes minutes; its processes are killed"
      scancel --signal=KILL "$SLURM_JOB_ID.0"
      return
    fi
  done
}

told=no
trap 'told=yes' TERM # by scancel, by preemption: Slurm decides then whether the job comes again
before=$(events)
echo "job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST: ${command[*]@Q}"

# No --kill-on-bad-exit: processes that lose one end by themselves, at once, and say why by their exit code; one that
# still writes a checkpoint must not be cut off. --wait is for one that cannot end.
srun --kill-on-bad-exit=0 --wait=600 --distribution=block --cpus-per-task="$SLURM_CPUS_PER_TASK" "${command[@]}" &
step=$!
watch </dev/null &
watcher=$!
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do # a signal to this script has ended the waiting, not the step
  wait "$step"
  code=$?
done
kill "$watcher" 2>/dev/null
wait "$watcher" 2>/dev/null

again=no
case $code in
  0) reason="the run is done" ;;
  2 | 126 | 127) reason="a mistake, see above: it would be made again" ;;
  3) reason="a monitor stopped the run, which is saved, see above" ;;
  130) reason="stopped by a person" ;;
  75) again=yes reason="a process was lost or did not come" ;;
  143) again=yes reason="stopped before the time limit" ;;
  *)
    reason="a process ended"
    if [[ "$(events)" != "$before" ]]; then again=yes; else reason+=" before the run had begun"; fi
    ;;
esac
if [[ $told == yes ]]; then again=no reason="this job was told to end"; fi
if [[ $again == yes ]] && ((${SLURM_RESTART_COUNT:-0} >= most_requeues)); then
  again=no reason+=", and most_requeues is reached"
fi
echo "job $SLURM_JOB_ID: exit code $code, $reason; started again: $again"
if [[ $again == yes ]]; then scontrol requeue "$SLURM_JOB_ID" && exit 0; fi
exit "$code"
"""

_SEGMENT = """\
# @SEGMENT_HOSTS@ hosts are one NVLink domain (@RACK_DEVICES@ GPUs), which the expert axis of the mesh should not leave.
# EDIT: where Slurm has the plugin topology/block and knows --segment, the next line (with one # less) keeps them
# together; elsewhere ask for such hosts by --nodelist or --constraint. Processes are numbered in the order of hosts.
##SBATCH --segment=@SEGMENT_HOSTS@
"""


def script(job: Job, *, partition: str | None = None, account: str | None = None, time: str | None = None) -> str:
    """The batch script. EquimoeError if an option is nothing that Slurm takes."""
    problems = Problems("options of Slurm")
    for option, value in (("--partition", partition), ("--account", account)):
        legal = value is None or _NAMES.fullmatch(value) is not None
        problems.require(legal, option, value, "must be a name of letters, digits and _.,@+-", "see sinfo, sacctmgr")
    legal = time is None or (_TIME.fullmatch(time) is not None and any(digit in time for digit in "123456789"))
    problems.require(legal, "--time", time, "must be MINUTES, HH:MM:SS or D-HH:MM:SS, above 0", "write 1-00:00:00")
    problems.raise_if_any()
    segment = job.segment_hosts
    values = {
        "VERSION": __version__,
        "SUMMARY": job.summary,
        "NAME": job.name,
        "HOSTS": str(job.hosts),
        "HOST_PROCESSES": str(job.host_processes),
        "STOP_SECONDS": str(STOP_SECONDS),
        "PARTITION": _line("partition", partition, "NAME"),
        "ACCOUNT": _line("account", account, "NAME"),
        "TIME": _line("time", time, "1-00:00:00"),
        "SEGMENT": "" if segment is None else filled(_SEGMENT, _segment(job, segment)),
        "RUN": bash_word(job.run),
        "COMMAND": " ".join(bash_word(word) for word in job.command),
        "START_TIMEOUT": str(START_TIMEOUT_SECONDS),
        "MEMORY_FRACTION": str(USABLE),
        "START_MINUTES": str(START_MINUTES),
        "STALE_MINUTES": str(STALE_MINUTES),
    }
    return filled(_TEMPLATE, values)


def _line(option: str, value: str | None, example: str) -> str:
    return f"##SBATCH --{option}={example}" if value is None else f"#SBATCH --{option}={value}"


def _segment(job: Job, hosts: int) -> dict[str, str]:
    return {"SEGMENT_HOSTS": str(hosts), "RACK_DEVICES": str(hosts * job.host_processes)}


def bash_word(text: str) -> str:
    """`text` as one word of bash on one line, whatever it holds."""
    if text.isprintable():
        return shlex.quote(text)
    escaped = (c if c.isprintable() and c not in "\\'" else "".join(f"\\x{b:02x}" for b in c.encode()) for c in text)
    return f"$'{''.join(escaped)}'"
