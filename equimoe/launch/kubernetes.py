"""A job for Kubernetes: an Indexed Job with a pod a host, and a headless service under whose name its pods meet.

A pod starts one process a GPU of its host, so that they reach each other over NVLink as on any host; which one of the
run each is follows from the pod's index. Pods that lose one another end by themselves, all of them, and the Job starts
each again: they wait for each other and go on from the last checkpoint. What an end means, by a pod's exit code (2 if
one of its processes made a mistake, else the highest):

    0            the run is done
    2, 126, 127  a mistake: the Job ends
    3            a monitor stopped the run, as its recipe asks: saved, the Job ends
    143          stopped by SIGTERM (a drained host, a preemption), saved: again, not counted
    others       (75: another pod was lost): again, counted for each pod by itself

A crash loop ends in the run itself: `train --or-resume` makes it a mistake when the last starts never came to a new
checkpoint. Needs Kubernetes 1.29 or newer (backoffLimitPerIndex).
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
import textwrap

from equimoe import __version__
from equimoe.errors import EquimoeError, Problems
from equimoe.files import filled
from equimoe.launch.job import (
    STALE_MINUTES,
    START_MINUTES,
    START_TIMEOUT_SECONDS,
    STOP_SECONDS,
    Job,
)
from equimoe.parallel.processes.place import PORT
from equimoe.plan.fit import USABLE

__all__ = ["DEFAULT_MOUNT", "manifests", "on_volume"]

DEFAULT_MOUNT = "/shared"
DEFAULT_IMAGE = "equimoe:edit-me"
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,254}")

# Run by bash with the command as its arguments; PID 1 of the container, so that it must pass signals on.
_START = """\
set -u
pids=()
trap 'kill -TERM "${pids[@]}" 2>/dev/null' TERM INT
for ((i = 0; i < HOST_PROCESSES; i++)); do
  EQUIMOE_PROCESS=$((JOB_COMPLETION_INDEX * HOST_PROCESSES + i)) "$@" &
  pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
  wait "$pid"
  ended=$?
  while kill -0 "$pid" 2>/dev/null; do # a signal has ended the waiting, not the process
    wait "$pid"
    ended=$?
  done
  if ((ended == 2 || (code != 2 && ended > code))); then code=$ended; fi
done
exit "$code"
"""

# A resumed run first takes back what came after its checkpoint: only what grows between two looks is a step.
_BEGUN = """\
now=0
for size in $(stat --format=%s "$RUN/metrics.jsonl" "$RUN/timing.jsonl" 2>/dev/null); do
  now=$((now + size))
done
last=$(cat /tmp/equimoe-bytes 2>/dev/null || echo "$now")
echo "$now" > /tmp/equimoe-bytes
((now > last))
"""

_ALIVE = """\
test -n "$(find "$RUN/metrics.jsonl" "$RUN/timing.jsonl" "$RUN/events.jsonl" -mmin -@STALE_MINUTES@ 2>/dev/null)"
"""

_TEMPLATE = """\
# Written by `equimoe launch k8s` (equimoe @VERSION@). Read it, change what is marked EDIT, then: kubectl apply -f FILE
# @SUMMARY@
# For Kubernetes 1.29 or newer. To stop: kubectl delete job @NAME@, which saves. The file applied again goes on.
---
# Gives the pods names, under which they meet before any of them is ready.
apiVersion: v1
kind: Service
metadata:
  name: @NAME@
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    batch.kubernetes.io/job-name: @NAME@
  ports:
  - name: meeting
    port: @PORT@
---
# Nobody at the meeting proves who he is: only pods of this job may come in. Works where the network plugin enforces it.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: @NAME@
spec:
  podSelector:
    matchLabels:
      batch.kubernetes.io/job-name: @NAME@
  policyTypes: [Ingress]
  ingress:
  - from:
    - podSelector:
        matchLabels:
          batch.kubernetes.io/job-name: @NAME@
---
apiVersion: batch/v1
kind: Job
metadata:
  name: @NAME@
spec:
  # A pod a host, all at once.
  completionMode: Indexed
  completions: @HOSTS@
  parallelism: @HOSTS@
  # One lost pod ends all of them, so that every failure counts once for each pod; where one has failed as often as
  # this, the whole Job ends. EDIT: a run of 100 days with three faults a day needs 300.
  backoffLimitPerIndex: 300
  maxFailedIndexes: 0
  podFailurePolicy:
    rules:
    # A mistake would be made again; 3: a monitor stopped the run, a person should look at it.
    - action: FailJob
      onExitCodes:
        containerName: train
        operator: In
        values: [2, 3, 126, 127]
    # A host that is drained or taken away; and the other pods, which save and stop with it.
    - action: Ignore
      onPodConditions:
      - type: DisruptionTarget
        status: "True"
    - action: Ignore
      onExitCodes:
        containerName: train
        operator: In
        values: [143]
  template:
@TEMPLATE_METADATA@    spec:
      subdomain: @NAME@
      restartPolicy: Never
      # From SIGTERM to the end: a step and a save. EDIT where they take longer.
      terminationGracePeriodSeconds: @STOP_SECONDS@
      automountServiceAccountToken: false
      enableServiceLinks: false
@PLACEMENT@      securityContext:
        # EDIT: a user that may write to the volume. fsGroup gives it to him, once.
        runAsNonRoot: true
        runAsUser: 1000
        runAsGroup: 1000
        fsGroup: 1000
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
      containers:
      - name: train
        # EDIT: an image with bash, coreutils, findutils and `pip install 'equimoe[gpu]'`.
        image: @IMAGE@
        # Paths below without a leading / begin here. Recipe file, data and run folder must be on the volume.
        workingDir: @MOUNT@
        # One process a GPU; the run's process number is the pod's index times the GPUs of a host, plus the GPU's.
        command:
        - /bin/bash
        - -c
        - |
@START@
        - start
        args:
@ARGUMENTS@
        env:
        - name: RUN
          value: @RUN@
        - name: HOST_PROCESSES
          value: "@HOST_PROCESSES@"
        - name: EQUIMOE_PROCESSES
          value: "@DEVICES@"
        # Process 0 is in the pod of index 0.
        - name: EQUIMOE_MEETING
          value: @NAME@-0.@NAME@:@PORT@
        # How long pods wait for each other: images are pulled, a lost host is replaced.
        - name: EQUIMOE_START_TIMEOUT
          value: "@START_TIMEOUT@"
        # Prepared data and compiled programs, for all pods: process 0 makes them, the others find them.
        - name: EQUIMOE_CACHE
          value: @CACHE@
        - name: HOME
          value: /tmp
        # JAX takes 0.75 of the GPU's memory if it is not told; the rest of this is for NCCL and CUDA.
        - name: XLA_PYTHON_CLIENT_MEM_FRACTION
          value: "@MEMORY_FRACTION@"
        - name: NCCL_DEBUG
          value: WARN
        # Lines appear in the log when they are written.
        - name: PYTHONUNBUFFERED
          value: "1"
        # EDIT, for private datasets of the Hub. Write no token into this file.
        # - name: HF_TOKEN
        #   valueFrom:
        #     secretKeyRef:
        #       name: huggingface
        #       key: token
        ports:
        - name: meeting
          containerPort: @PORT@
        resources:
          limits:
            nvidia.com/gpu: @HOST_PROCESSES@
          # EDIT: what a host has, less what the system takes; and its network cards, such as rdma/ib: 1.
          # requests:
          #   cpu: "64"
          #   memory: 500Gi
        securityContext:
          allowPrivilegeEscalation: false
          capabilities:
            drop: [ALL]
            # EDIT: RDMA locks memory.
            # add: [IPC_LOCK]
        # A run that makes no step within @START_MINUTES@ minutes, or then writes nothing for @STALE_MINUTES@, hangs:
        # its pods are killed and start again. EDIT: prepare large data before, or allow more at the start.
        startupProbe:
          exec:
            command:
            - /bin/bash
            - -c
            - |
@BEGUN@
          periodSeconds: 60
          failureThreshold: @START_MINUTES@
          timeoutSeconds: 30
        livenessProbe:
          exec:
            command:
            - /bin/bash
            - -c
            - |
@ALIVE@
          periodSeconds: 60
          failureThreshold: 2
          timeoutSeconds: 30
          # What hangs does not save.
          terminationGracePeriodSeconds: 30
        volumeMounts:
        - name: shared
          mountPath: @MOUNT@
        # NCCL's buffers between the processes of a host.
        - name: shm
          mountPath: /dev/shm
      volumes:
      # EDIT: a volume that all pods can write to (ReadWriteMany), and on which flock works.
      - name: shared
        persistentVolumeClaim:
          claimName: shared
      - name: shm
        emptyDir:
          medium: Memory
          sizeLimit: 16Gi
"""

_RACKS = """\
    # EDIT: @SEGMENT_HOSTS@ hosts are one NVLink domain (@RACK_DEVICES@ GPUs), which the expert axis of the mesh
    # should not leave: pods 0 to @LAST_OF_SEGMENT@ belong into one, and so on. Kubernetes alone does not place pods so;
    # Kueue's topology-aware scheduling does:
    # metadata:
    #   annotations:
    #     kueue.x-k8s.io/podset-slice-required-topology: LABEL-OF-A-RACK
    #     kueue.x-k8s.io/podset-slice-size: "@SEGMENT_HOSTS@"
"""

_ONE_RACK = """\
      # EDIT: the @SEGMENT_HOSTS@ hosts should be of one NVLink domain, by the label that your cluster has for one:
      # affinity:
      #   podAffinity:
      #     requiredDuringSchedulingIgnoredDuringExecution:
      #     - topologyKey: nvidia.com/gpu.clique
      #       labelSelector:
      #         matchLabels:
      #           batch.kubernetes.io/job-name: @NAME@
"""


def manifests(job: Job, *, image: str = DEFAULT_IMAGE, mount: str = DEFAULT_MOUNT) -> str:
    """Service, NetworkPolicy and Job, for a job whose run is `on_volume`."""
    problems = Problems("options of Kubernetes")
    problems.require(
        _IMAGE.fullmatch(image) is not None, "--image", image, "must name a container image", "write registry/name:tag"
    )
    problems.raise_if_any()
    segment = job.segment_hosts or 1
    values = {
        "VERSION": __version__,
        "SUMMARY": job.summary,
        "NAME": job.name,
        "PORT": str(PORT),
        "HOSTS": str(job.hosts),
        "HOST_PROCESSES": str(job.host_processes),
        "DEVICES": str(job.devices),
        "STOP_SECONDS": str(STOP_SECONDS),
        "IMAGE": yaml_text(image),
        "MOUNT": yaml_text(mount),
        "RUN": yaml_text(_kept(job.run)),
        "CACHE": yaml_text(_kept(posixpath.join(mount, "equimoe-cache"))),
        "ARGUMENTS": "\n".join(f"        - {yaml_text(_kept(word))}" for word in job.command),
        "START": textwrap.indent(_START, " " * 10).rstrip(),
        "BEGUN": textwrap.indent(_BEGUN, " " * 14).rstrip(),
        "STALE_MINUTES": str(STALE_MINUTES),
        "START_MINUTES": str(START_MINUTES),
        "START_TIMEOUT": str(START_TIMEOUT_SECONDS),
        "MEMORY_FRACTION": str(USABLE),
        "SEGMENT_HOSTS": str(segment),
        "RACK_DEVICES": str(segment * job.host_processes),
        "LAST_OF_SEGMENT": str(segment - 1),
    }
    values["ALIVE"] = textwrap.indent(filled(_ALIVE, values), " " * 14).rstrip()
    values["TEMPLATE_METADATA"] = filled(_RACKS, values) if 1 < segment < job.hosts else ""
    values["PLACEMENT"] = filled(_ONE_RACK, values) if 1 < segment == job.hosts else ""
    return filled(_TEMPLATE, values)


def on_volume(job: Job, mount: str = DEFAULT_MOUNT) -> Job:
    """The job with the whole path of its run, on the volume that all pods share and that is mounted at `mount`."""
    problems, tidy = Problems("paths in the pods"), posixpath.normpath(mount)
    legal = mount.isprintable() and tidy.startswith("/") and tidy.strip("/") != "" and ":" not in mount
    rule = "must be the path of a folder, from the root, without :"
    problems.require(legal, "--mount", mount, rule, f"use {DEFAULT_MOUNT}")
    problems.raise_if_any()
    run = posixpath.normpath(posixpath.join(tidy, job.run))
    if not run.startswith(f"{tidy.rstrip('/')}/"):
        raise EquimoeError(
            "--run",
            f"must be on the volume that all pods share, which is mounted at {tidy}",
            "Name a folder below it, or say with --mount where the volume is",
            value=job.run,
        )
    return dataclasses.replace(job, run=run)


def _kept(text: str) -> str:
    """A value of `args` or `env` as Kubernetes must be given it: it would replace $(NAME), and $$ is one $."""
    return text.replace("$", "$$")


def yaml_text(text: str) -> str:
    """`text` as a quoted scalar of YAML on one line, whatever it holds."""
    return f'"{"".join(_escaped(c) for c in text)}"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character.isprintable():
        return character
    number = ord(character)
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
