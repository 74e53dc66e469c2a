"""The drift gate: what nbdev would write today must be what the tree holds.

Exports and cleans a copy, so that the tree itself stays as it is, committed or not.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
TRACKED = {"kimi_spec": "*.py", "nbs": "*.ipynb"}


def files(root: Path) -> dict[str, bytes]:
    "Relative path -> contents of every module and notebook."
    return {path.relative_to(root).as_posix(): path.read_bytes() for folder, pattern in TRACKED.items() for path in (root / folder).rglob(pattern)
            if not any(part.startswith((".", "_proc")) for part in path.relative_to(root).parts)}


def fresh(root: Path, copy: Path) -> dict[str, bytes]:
    "The same files after an export into an empty package and a clean of the notebooks."
    shutil.copy(root / "settings.ini", copy)
    shutil.copytree(root / "nbs", copy / "nbs", ignore=shutil.ignore_patterns(".*"))
    (copy / "kimi_spec").mkdir()
    shutil.copy(root / "kimi_spec/__init__.py", copy / "kimi_spec")
    for command in ("nbdev_export", "nbdev_clean"):
        done = subprocess.run([Path(sys.executable).parent / command], cwd=copy, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{command} failed:\n{done.stderr}")
    return files(copy)


def drift(root: Path = ROOT) -> list[str]:
    "One line for each file that is not what its notebook says."
    with TemporaryDirectory() as copy:
        now, then = files(root), fresh(root, Path(copy))
    lines = [f"{path}: no notebook exports it" for path in now.keys() - then.keys()]
    lines += [f"{path}: not exported yet" for path in then.keys() - now.keys()]
    lines += [f"{path}: {'not clean' if path.endswith('.ipynb') else 'not what its notebook says'}" for path in now.keys() & then.keys() if now[path] != then[path]]
    return sorted(lines)


if __name__ == "__main__":
    if lines := drift():
        sys.exit("\n".join([*lines, "Run .venv/bin/nbdev_export and .venv/bin/nbdev_clean; change notebooks, never kimi_spec/."]))
    print("Notebooks and package agree.")
