"""The page on clusters: Ray Train and submitit run on this machine, and other files are checked. ``make clusters``."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.run import parse_args

from onecopy import checkpoint
from tests.support.examples import EXAMPLES, result_in
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/clusters.md").read_text()
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}

KUBERNETES = "1.37"
"""The version whose schema is used, as the page says."""


def block(start: str) -> str:
    """The block of code on the page that has a line with this beginning."""
    (found,) = [text for text in re.findall(r"^```\w+\n(.*?)^```$", PAGE, re.M | re.S) if f"\n{start}" in f"\n{text}"]
    return str(found)


# Ray Train, with examples/ray_train.py

EPOCHS, LAST_STEP, SAVE_EVERY = 9, 75, 5
"""75 batches of 12 are 9 epochs of 100 samples."""

MACHINE = {"num_cpus": 1, "object_store_memory": 80_000_000}

WAIT = 400.0
"""Seconds that the run may take to the next checkpoint: Ray starts processes that import torch."""


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A Ray cluster of a head without processors, and three machines with one processor each."""
    pytest.importorskip("ray", reason="ray is not installed: make clusters")
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    from ray.cluster_utils import Cluster

    head = {**MACHINE, "num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(3):
            cluster.add_node(**MACHINE)
        yield cluster
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def ray_train(cluster: Any, root: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the example on the cluster, and end it after the block. Its output goes to a file."""
    root.mkdir()
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), "--root", str(root), "--epochs", str(EPOCHS), *options]
    faster = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5"}
    environment = {**ENVIRONMENT, **faster, "RAY_ADDRESS": cluster.address}
    with (root / "output").open("wb") as output:
        run = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    with run:
        try:
            yield run
        finally:
            run.kill()


def wait_for(root: Path, ranks: list[int], run: subprocess.Popen[bytes]) -> None:
    """Wait until checkpoints were saved by these numbers of workers, one after the other."""
    end = time.monotonic() + WAIT
    while numbers_of_workers(root) != ranks:
        assert run.poll() is None, (root / "output").read_text()
        assert time.monotonic() < end, (root / "output").read_text()
        time.sleep(0.5)


def numbers_of_workers(root: Path) -> list[int]:
    """The numbers of workers that have trained up to the newest checkpoint, without repetitions."""
    loaded = checkpoint.load(root / "onecopy", missing_ok=True)
    return [] if loaded is None else [number for number, _ in itertools.groupby(loaded.extra["world_sizes"])]


@pytest.mark.timeout(1800)
def test_a_ray_run_that_loses_and_gains_a_machine_ends_as_an_undisturbed_one(cluster: Any, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    with ray_train(cluster, undisturbed, "--workers", "3", "3") as run:
        assert run.wait(WAIT) == 0, (undisturbed / "output").read_text()
    # With a pause in each step the run is still there when Ray has noticed a new machine.
    options = ["--workers", "1", "3", "--pause", "0.7", "--resize-every", "2"]
    with ray_train(cluster, disturbed, *options) as run:
        wait_for(disturbed, [3], run)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        wait_for(disturbed, [3, 2], run)
        cluster.add_node(**MACHINE)
        assert run.wait(WAIT) == 0, (disturbed / "output").read_text()

    params, loaded = result_in(disturbed / "onecopy")
    expected, _ = result_in(undisturbed / "onecopy")
    earlier, _ = result_in(disturbed / "onecopy" / f"step-{LAST_STEP - SAVE_EVERY:08}")
    assert numbers_of_workers(disturbed) == [3, 2, 3]
    assert len(loaded.extra["world_sizes"]) == LAST_STEP
    assert f"\n{{'step': {LAST_STEP}," in (disturbed / "output").read_text(), "fit() returns the last metrics"
    # The samples of a step are the same, so only sums over workers are rounded differently.
    torch.testing.assert_close(params, expected, rtol=1e-4, atol=1e-5)
    assert (params - earlier).abs().max() > 100 * (params - expected).abs().max(), "a lost step would not be noticed"


# SLURM

TRAIN = f"""
import os, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import elastic
from onecopy import checkpoint

def main(root):
    advance = checkpoint.ResumableSampler.advance

    def advance_and_signal(sampler):
        advance(sampler)
        if sampler.position == int(os.environ["SIGNAL_AT"]) * elastic.BATCH:
            os.environ["SIGNAL_AT"] = "0"
            os.kill(os.getpid(), signal.SIGUSR2)

    if os.path.isdir(root):  # the second attempt
        os.environ["SIGNAL_AT"] = "0"
    checkpoint.ResumableSampler.advance = advance_and_signal
    sys.argv = ["train.py", "--root", root]
    elastic.main()
"""
"""A training that gets SLURM's signal at a step of its first attempt."""


def submit(folder: Path, signal_at: int) -> str:
    """Run the block of the page with two tasks on this machine, and return the output of rank 0."""
    folder.mkdir()
    text = block("import submitit")
    for old, new in {
        "nodes=4, tasks_per_node=8, gpus_per_node=8": "nodes=1, tasks_per_node=2",
        '"/shared/run"': repr(str(folder / "run")),
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "train.py").write_text(TRAIN)
    (folder / "submit.py").write_text(f"{text}\njob.results()\n")
    environment = {**ENVIRONMENT, "SIGNAL_AT": str(signal_at)}
    done = subprocess.run(
        [sys.executable, "submit.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    (output,) = (folder / "logs").glob("*_0_log.out")
    assert done.returncode == 0, done.stderr + output.read_text()
    return output.read_text()


@pytest.mark.timeout(400)
def test_a_submitit_job_that_is_preempted_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed: make clusters")
    undisturbed, preempted = tmp_path / "undisturbed", tmp_path / "preempted"
    assert re.findall("^from .*", submit(undisturbed, 0), re.M) == ["from step 0 on 2 ranks"]
    attempts = re.findall("^from .*", submit(preempted, 7), re.M)
    assert attempts == ["from step 0 on 2 ranks", "from step 5 on 2 ranks"]
    assert torch.equal(result_in(preempted / "run")[0], result_in(undisturbed / "run")[0])


def test_the_file_for_slurm_is_a_shell_script_whose_command_torchrun_understands() -> None:
    script = block("#SBATCH")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    command = shlex.split(script[script.index("torchrun") :].replace("\\\n", " "))
    assert parse_args(command[1:]).training_script == "train.py"


# Kubernetes


def test_the_manifest_fits_the_schema_of_kubernetes_and_its_command_torchrun() -> None:
    validation = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: make clusters"
    )
    import yaml

    service, job = yaml.safe_load_all(block("kind: Job"))
    for part in (service, job):
        validation.validate(part, KUBERNETES, strict=True)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    arguments = parse_args(container["command"][1:])
    # Kubernetes names the pods by the job and the index, in the domain of the service.
    assert arguments.rdzv_endpoint.startswith(f"{job['metadata']['name']}-0.{pod['subdomain']}:")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert arguments.nnodes.endswith(f":{job['spec']['completions']}")
