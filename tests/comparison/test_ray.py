"""Runs as tasks of a Ray cluster of three nodes on this machine; the soak kills one of them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from comparison.small_plan import make_plan, what_must_agree
from comparison.test_killed_plan import alive, children_of, rows_done, said, start, wait_until

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast.cli import main
from holdfast.comparison.scheduler import compare
from holdfast.io.outputs import claim

CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
pids = [node.all_processes["raylet"][0].process.pid for node in nodes]
print(json.dumps({"address": cluster.address, "nodes": pids}), flush=True)
sys.stdin.read()
cluster.shutdown()
"""
UPDATES = 40

needs_ray = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


@pytest.fixture(scope="module")
def cluster():
    """The address of the cluster, and the processes of its two worker nodes."""
    pytest.importorskip("ray", reason="the ray extra is not installed")
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", CLUSTER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"},
    )
    try:
        lines = (line for line in process.stdout if line.startswith("{"))
        yield json.loads(next(lines))
    finally:
        process.stdin.close()  # which it waits for
        process.stdout.close()
        process.wait(300)


def on_ray(plan, out, cluster):
    return start(plan, out, "--engine=ray", f"--address={cluster['address']}")


def at_work(cluster):
    """The processes that currently do runs."""
    found = []
    for pid in [child for node in cluster["nodes"] for child in children_of(node)]:
        try:
            if "_run_on_node" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
        except OSError:
            continue
    return found


@needs_ray
@pytest.mark.soak
def test_a_run_that_raises_is_not_done_again_and_ctrl_c_ends_the_rest(cluster, tmp_path):
    plan = make_plan(tmp_path, seeds=(0,), updates=UPDATES)
    wrong, other = (spec.id for spec in plan.runs)
    out = tmp_path / "out"
    with claim(out, "compare"):
        (out / "runs" / wrong / "seconds").mkdir(parents=True)  # where its first row is timed
    driver = on_ray(plan, out, cluster)
    assert driver.wait(300) == 1, said(out)[-3000:]  # as after every run that failed
    results = json.loads((out / "results.json").read_text())
    assert [run["id"] for run in results["runs"]] == [other]
    assert list(results["failed"]) == [wrong]
    assert "Traceback" in (out / "failed" / f"{wrong}.txt").read_text()
    rows = (out / "runs" / wrong / "history.jsonl").read_text().splitlines()
    assert [json.loads(row)["update"] for row in rows] == [0]

    out = tmp_path / "stopped"
    driver = on_ray(make_plan(tmp_path, updates=4000), out, cluster)
    wait_until(lambda: rows_done(out) > 0, driver, out)
    busy = at_work(cluster)
    assert busy
    os.killpg(driver.pid, signal.SIGINT)
    assert driver.wait(300) == 130
    assert said(out).strip().splitlines()[-1] == "holdfast: stopped; what was finished is kept"
    deadline = time.monotonic() + 60
    while at_work(cluster) and any(map(alive, busy)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@needs_ray
@pytest.mark.soak
def test_a_killed_driver_and_a_killed_node(cluster, tmp_path, monkeypatch):
    plan = make_plan(tmp_path, seeds=(0, 1), updates=UPDATES)
    out = tmp_path / "out"
    driver = on_ray(plan, out, cluster)
    wait_until(lambda: rows_done(out) > 10, driver, out)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait(300)
    told = len(said(out))
    driver = on_ray(plan, out, cluster)
    done = rows_done(out)
    wait_until(lambda: len(at_work(cluster)) == 2 and rows_done(out) > done + 5, driver, out)
    node = cluster["nodes"][1]
    for pid in [node, *children_of(node)]:
        os.kill(pid, signal.SIGKILL)
    assert driver.wait(300) == 0, said(out)[-3000:]
    ended = re.findall(r"^\[\d/4\] (.*): done", said(out)[told:], re.MULTILINE)
    assert len(set(ended)) == len(ended) >= 2
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    here = compare(plan, tmp_path / "here", jobs=2)
    ours = what_must_agree((out / "results.json").read_text())
    assert ours == what_must_agree(here.to_json())
    assert len(ours["runs"]) == 4


def test_without_ray_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    given = ["compare", f"--out={tmp_path}", "--recipes", "standard", "--seeds", "0"]
    assert main([*given, "--engine=ray"]) == 1
    assert 'pip install "holdfast[ray]"' in capsys.readouterr().err


def test_an_address_without_a_cluster(tmp_path):
    pytest.importorskip("ray", reason="the ray extra is not installed")
    plan = make_plan(tmp_path, recipes=("standard",), seeds=(0,))
    with pytest.raises(ConnectionError, match=r"cannot join a Ray cluster at 127\.0\.0\.1:1"):
        compare(plan, tmp_path / "out", engine="ray", address="127.0.0.1:1")
