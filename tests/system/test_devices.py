"""Peaks by the names that drivers and people use."""

import pytest

from saccade.config import load
from saccade.run.training_run import Run
from saccade.system import devices


@pytest.mark.parametrize(
    ("name", "tflops", "bandwidth"),
    [
        ("NVIDIA H200", 989, 4.8), ("NVIDIA GH200 480GB", 989, 4.0), ("NVIDIA H100 PCIe", 756, 2.0),
        ("NVIDIA A100-SXM4-40GB", 312, 1.555), ("NVIDIA L40S", 362, 0.864), ("NVIDIA L40", 181, 0.864),
        ("NVIDIA GeForce RTX 4090", 165, 1.008), ("rtx 4090", 165, 1.008), ("AMD Instinct MI300X", 1307, 5.3),
    ],
)  # fmt: skip
def test_known_devices(name, tflops, bandwidth):
    found = devices.lookup(name)
    assert (found.tflops, found.bandwidth) == (tflops, bandwidth)


def test_names_that_are_unknown_or_speak_of_memory():
    for name in ("NVIDIA H201", "Tesla T4", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", ""):
        assert devices.lookup(name) is None
    for name in ("A100 40 GB", "a100-40g", "A100 40GB", "A100 40 GiB", "NVIDIA A100-PCIE-40GB"):
        assert devices.lookup(name).memory == 39.4 and not devices.memory_contradicts(name, devices.lookup(name))
    assert devices.lookup_unique("4090") == devices.lookup("RTX 4090")
    assert devices.lookup_unique("rtx-6000").memory == 47.4
    for name in ("A100 48 GB", "A800 40GB", "RTX 4090 48GB"):
        assert devices.memory_contradicts(name, devices.lookup(name))
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB", "RTX 4090 GPU", "L4 24GB"):
        assert not devices.memory_contradicts(name, devices.lookup(name))
    assert devices.lookup_unique("RTX") is devices.lookup_unique("4090 laptop") is devices.lookup_unique("") is None


def test_a_limit_that_limits_nothing():
    gpu = devices.Device(name="GPU", memory=120.0)
    assert devices.limit_problem(None, gpu) is None and devices.limit_problem(80.0, gpu) is None
    assert devices.limit_problem(121.0, gpu) == ("run.gpu_memory_gib=121 has no effect: GPU has 120.0 GiB to give")


def test_a_training_run_is_told_of_a_limit_that_limits_nothing(tmp_path):
    config = load({"run.out": str(tmp_path), "run.device": "cpu", "run.gpu_memory_gib": 2})
    with Run(config, "rl", {}) as run:
        said = run.folder.log.read_text()
    assert said.count("run.gpu_memory_gib=2 has no effect on a CPU; it is for a GPU") == 1


@pytest.mark.parametrize("group", devices.GROUPS)
def test_limits_of_a_container_count(tmp_path, group):
    """That of the job, which is around the step; files that are cached can go."""
    controller, limit, used, cache = group
    own, job = tmp_path / "own", tmp_path / "root" / controller / "job"
    own.write_text(f"9:pids:/else\n{4 if controller else 0}:{controller}:/job/step\n")
    (job / "step").mkdir(parents=True)
    (job / "step" / "memory.max").write_text("max\n")
    (job / "step" / "memory.current").write_text("1\n")
    (job / "step" / "memory.stat").write_text("inactive_file 1\n")
    (job / limit).write_text("1000\n")
    (job / used).write_text("700\n")
    (job / "memory.stat").write_text(f"anon 600\n{cache} 100\n")
    assert list(devices.free_cgroup_bytes(own, tmp_path / "root")) == [400]
    assert list(devices.free_cgroup_bytes(tmp_path / "none", tmp_path / "none")) == []


def test_a_cpu_has_memory_and_no_peak():
    here = devices.current_device("cpu")
    assert here.memory > 0.5 and here.tflops is None and not here.is_gpu
    assert 0 < devices.free_host_bytes() < devices.current_device("cpu").memory * 2**30
