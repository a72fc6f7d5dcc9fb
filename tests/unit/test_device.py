import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitckpt.device import (
    CUDA_LIBRARIES,
    DeviceError,
    check_libraries,
    choose_device,
    device_environment,
    driver_answers,
)

LIBRARIES = Path("/opt/jitckpt/lib")
words = st.text(st.sampled_from("abc/."), min_size=1, max_size=8)
environments = st.dictionaries(
    st.sampled_from(["LD_PRELOAD", "LD_LIBRARY_PATH", "SOFTGPU_DEVICES", "HOME"]),
    st.lists(words, max_size=3).map(":".join),
)


def test_softgpu_is_preloaded_after_jitckpt() -> None:
    assert device_environment("softgpu", 3, LIBRARIES, {"HOME": "/root"}) == {
        "LD_PRELOAD": "/opt/jitckpt/lib/libjitckpt.so:/opt/jitckpt/lib/libsoftgpu.so",
        "LD_LIBRARY_PATH": "/opt/jitckpt/lib/driver",
        "SOFTGPU_DEVICES": "3",
    }


def test_on_cuda_only_jitckpt_is_preloaded() -> None:
    assert device_environment("cuda", 3, LIBRARIES, {}) == {"LD_PRELOAD": "/opt/jitckpt/lib/libjitckpt.so"}


def test_what_the_user_preloads_comes_after() -> None:
    environment = {"LD_PRELOAD": "libtcmalloc.so libfoo.so", "LD_LIBRARY_PATH": "/usr/local/lib:"}
    variables = device_environment("softgpu", 1, LIBRARIES, environment)
    assert variables["LD_PRELOAD"].split(":")[2:] == ["libtcmalloc.so", "libfoo.so"]
    assert variables["LD_LIBRARY_PATH"] == "/opt/jitckpt/lib/driver:/usr/local/lib"


def test_the_users_number_of_devices_stays() -> None:
    assert device_environment("softgpu", 2, LIBRARIES, {"SOFTGPU_DEVICES": "8"})["SOFTGPU_DEVICES"] == "8"


@given(st.sampled_from(["softgpu", "cuda"]), st.integers(1, 16), environments, st.booleans())
def test_applying_it_twice_changes_nothing(
    kind: str, devices: int, environment: dict[str, str], proxy: bool
) -> None:
    once = environment | device_environment(kind, devices, LIBRARIES, environment, proxy=proxy)
    assert once | device_environment(kind, devices, LIBRARIES, once, proxy=proxy) == once


def test_behind_a_proxy_only_the_server_has_softgpu() -> None:
    variables = device_environment("softgpu", 1, LIBRARIES, {"LD_LIBRARY_PATH": "/usr/local/lib"}, proxy=True)
    preloaded = [Path(library).name for library in variables["LD_PRELOAD"].split(":")]
    assert preloaded == ["libjitckpt.so", "libjitckpt_proxy.so", "libsoftgpu_host.so"]
    assert variables["JITCKPT_PROXY_PRELOAD"] == "/opt/jitckpt/lib/libsoftgpu.so"
    assert variables["JITCKPT_PROXY_ONE_CORE"] == "1"
    folders = variables["JITCKPT_PROXY_LIBRARY_PATH"].split(":")
    assert folders[0] == "/opt/jitckpt/lib/driver"
    assert folders[-1] == "/usr/local/lib"
    assert (Path(folders[1]) / "libtorch_cpu.so").is_file()
    assert choose_device("auto", variables) == "softgpu"


def test_the_user_says_whether_a_server_stays_on_one_core() -> None:
    variables = device_environment("softgpu", 1, LIBRARIES, {"JITCKPT_PROXY_ONE_CORE": "0"}, proxy=True)
    assert variables["JITCKPT_PROXY_ONE_CORE"] == "0"


def test_behind_a_proxy_only_the_server_has_cuda() -> None:
    variables = device_environment("cuda", 1, LIBRARIES, {"LD_LIBRARY_PATH": "/usr/local/lib"}, proxy=True)
    assert variables["LD_PRELOAD"] == "/opt/jitckpt/lib/libjitckpt.so:/opt/jitckpt/lib/libjitckpt_proxy.so"
    assert variables["LD_LIBRARY_PATH"] == "/opt/jitckpt/lib/driver:/usr/local/lib"
    named = [Path(library).name for library in variables["JITCKPT_PROXY_PRELOAD"].split(":")]
    assert [name.partition(".")[0] for name in named] == list(CUDA_LIBRARIES)
    assert "/opt/jitckpt/lib/driver" not in variables["JITCKPT_PROXY_LIBRARY_PATH"]
    assert "JITCKPT_PROXY_ONE_CORE" not in variables


def test_auto_stays_on_softgpu_inside_softgpu() -> None:
    inside = device_environment("softgpu", 2, LIBRARIES, {})
    assert choose_device("auto", inside) == "softgpu"


def test_softgpu_is_there_always() -> None:
    assert choose_device("softgpu", {}) == "softgpu"


@pytest.mark.parametrize(("devices", "answers"), [(2, True), (0, False), (-1, False)])
def test_auto_asks_the_driver(tmp_path: Path, devices: int, answers: bool) -> None:
    compiler = shutil.which("g++")
    assert compiler is not None, "g++ is needed to build the driver of this test"
    source = tmp_path / "driver.cpp"
    source.write_text(
        f'extern "C" int cuInit(unsigned) {{ return {devices} < 0 ? 100 : 0; }}\n'
        f'extern "C" int cuDeviceGetCount(int* count) {{ *count = {devices}; return 0; }}\n'
    )
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", tmp_path / "libcuda.so.1"], check=True)
    code = """
from jitckpt.device import choose_device, driver_answers
print(driver_answers(), choose_device("auto", {}), choose_device("cuda", {}) if driver_answers() else "")
"""
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert output.split() == (["True", "cuda", "cuda"] if answers else ["False", "softgpu"])


@pytest.mark.skipif(driver_answers(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_auto_is_softgpu_and_cuda_is_refused() -> None:
    assert choose_device("auto", {}) == "softgpu"
    with pytest.raises(DeviceError, match=r"Slurm has given this step 4 GPUs .* --device softgpu"):
        choose_device("auto", {"SLURM_GPUS_ON_NODE": "4"})
    assert choose_device("softgpu", {"SLURM_GPUS_ON_NODE": "4"}) == "softgpu"
    with pytest.raises(DeviceError, match="Choose --device softgpu"):
        choose_device("cuda", {})


def test_missing_libraries_are_named(tmp_path: Path) -> None:
    (tmp_path / "libjitckpt.so").touch()
    check_libraries("cuda", tmp_path)
    with pytest.raises(DeviceError, match=r"libsoftgpu.so and driver/libcuda.so.1 not found .* `pip"):
        check_libraries("softgpu", tmp_path)


def test_a_folder_that_ld_preload_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "my libraries"
    folder.mkdir()
    (folder / "libjitckpt.so").touch()
    with pytest.raises(DeviceError, match="space or a colon"):
        check_libraries("cuda", folder)
