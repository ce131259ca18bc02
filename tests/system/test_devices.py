"""Peaks by the names that drivers and people use."""

import pytest

from saccade.config import load
from saccade.run.training_run import Run
from saccade.system import devices


@pytest.mark.parametrize(
    ("name", "tflops", "bandwidth"),
    [
        ("NVIDIA H200", 989, 4.8),
        ("NVIDIA GH200 480GB", 989, 4.0),
        ("NVIDIA H100 80GB HBM3", 989, 3.35),
        ("NVIDIA H100 PCIe", 756, 2.0),
        ("NVIDIA H20", 148, 4.0),
        ("NVIDIA A100-SXM4-80GB", 312, 2.0),
        ("NVIDIA A100-SXM4-40GB", 312, 1.555),
        ("NVIDIA B200", 2250, 8.0),
        ("NVIDIA L40S", 362, 0.864),
        ("NVIDIA L40", 181, 0.864),
        ("NVIDIA L4", 121, 0.3),
        ("NVIDIA GeForce RTX 4090", 165, 1.008),
        ("rtx 4090", 165, 1.008),
        ("AMD Instinct MI300X", 1307, 5.3),
    ],
)
def test_known_devices(name, tflops, bandwidth):
    found = devices.named(name)
    assert (found.tflops, found.bandwidth) == (tflops, bandwidth)


@pytest.mark.parametrize("name", ["NVIDIA H201", "Tesla T4", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", ""])
def test_an_unknown_device_has_no_peak(name):
    assert devices.named(name) is None


@pytest.mark.parametrize("name", ["A100 40 GB", "a100-40g", "A100 40GB", "A100 40 GiB", "NVIDIA A100-PCIE-40GB"])
def test_the_memory_in_a_name_chooses_the_row(name):
    found = devices.named(name)
    assert found.memory == 39.4 and not devices.says_otherwise(name, found)


def test_words_that_one_row_alone_has_name_it():
    assert devices.only("4090") == devices.named("RTX 4090")
    assert devices.only("rtx-6000").memory == 47.4
    assert devices.only("RTX") is devices.only("4090 laptop") is devices.only("") is None


@pytest.mark.parametrize(
    ("name", "otherwise"),
    [
        ("A100 48 GB", True),
        ("A800 40GB", True),
        ("RTX 4090 48GB", True),
        ("NVIDIA H100 80GB HBM3", False),
        ("NVIDIA GH200 480GB", False),
        ("RTX 4090 GPU", False),
        ("L4 24GB", False),
    ],
)
def test_a_name_may_contradict_its_row(name, otherwise):
    assert devices.says_otherwise(name, devices.named(name)) is otherwise


def test_a_cpu_has_memory_and_no_peak():
    here = devices.present("cpu")
    assert here.memory > 0.5 and here.tflops is None and not here.is_gpu


def test_a_limit_that_limits_nothing():
    gpu = devices.Device(name="GPU", memory=120.0)
    assert devices.no_limit(None, gpu) is None and devices.no_limit(80.0, gpu) is None
    assert devices.no_limit(121.0, gpu) == ("run.gpu_memory_gib=121 has no effect: GPU has 120.0 GiB to give")


@pytest.mark.parametrize("command", ["rl", "sft", "dpo", "reward-model"])
def test_every_training_run_is_told_of_a_limit_that_limits_nothing(command, tmp_path):
    config = load({"run.out": str(tmp_path), "run.device": "cpu", "run.gpu_memory_gib": 2})
    with Run(config, command, {}) as run:
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
    assert list(devices.left_in_groups(own, tmp_path / "root")) == [400]
    assert list(devices.left_in_groups(tmp_path / "none", tmp_path / "none")) == []


def test_free_memory_is_no_more_than_the_machine_has():
    assert 0 < devices.free_host_bytes() < devices.present("cpu").memory * 2**30
