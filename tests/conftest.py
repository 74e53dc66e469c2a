"A quiet machine for every test, no process left behind, and a project of its own for each test that writes runs."
import os
import shutil
import signal
import time

import nbformat
import psutil
import pytest
from fake_index import home, serve  # noqa: F401 (fixtures)

from kimi_spec.core.paths import root

PARAMETERS = '''rig: str = "nano-vllm"  # rig to run on
run_dir: str = ""  # folder for records and logs
quick: bool = False  # smaller sizes
size: int = 3  # what to measure'''

# Before anything imports torch: idle cores are few, and no test may fetch a model.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell's background job ignores Ctrl-C, and so would every process that a test interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
KEPT = "resource_tracker", "forkserver"  # multiprocessing keeps these for the next test


def children():
    "Processes under this one that a test could have forgotten."
    def forgotten(process):
        try:
            return process.status() != psutil.STATUS_ZOMBIE and not any(kept in " ".join(process.cmdline()) for kept in KEPT)
        except psutil.NoSuchProcess:
            return False
    return {process for process in psutil.Process().children(recursive=True) if forgotten(process)}


@pytest.fixture(autouse=True)
def nothing_left_running():
    "Fail a test that leaves a process behind, and end that process."
    before = children()
    yield
    deadline = time.monotonic() + 5
    while (left := children() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    names = [" ".join(process.cmdline())[:120] for process in left]
    for process in left:
        process.kill()
    assert not names, f"still running after the test: {names}"


@pytest.fixture(scope="module")
def one_thread():
    "Tiny matrices on one thread, for a module that asks for it: more threads only wait for each other."
    import torch
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def project(tmp_path, monkeypatch):
    "A temporary project with the rigs of this one."
    here = root()
    shutil.copy(here / "settings.ini", tmp_path)
    shutil.copytree(here / "data" / "rigs", tmp_path / "data" / "rigs")
    (tmp_path / "nbs").mkdir()
    monkeypatch.setenv("KIMI_SPEC_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def add_phase(project):
    "A function that writes a phase notebook of a few cells."
    def add(stem, *cells):
        name = stem.split("_")[1]
        start = f'#| default_exp fake.{name}\nfrom kimi_spec.core.reports import start_run\nrun = start_run(rig, run_dir, phase="{name}")'
        nb = nbformat.v4.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "python3", "language": "python"}})
        nb.cells = [nbformat.v4.new_markdown_cell(f"# {name}"), nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})]
        nb.cells += [nbformat.v4.new_code_cell(c) for c in (start, *cells)]
        nbformat.write(nb, project / "nbs" / f"{stem}.ipynb")
    return add
