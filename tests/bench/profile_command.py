"""`kimi-spec profile` from its start to its last table: time of the CPU, speed, memory, and whether it found the steps that were laid down.

    python tests/bench/profile_command.py [--megabytes 500] [--graphs] [--cache]

Time and memory are those of the whole process, Python's start and all imports among them. With --cache the file is profiled three times: unknown, read anew and kept; and twice from the cache.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from trace_files import write_trace  # noqa: E402

COMMAND = "import sys; from kimi_spec.cli import main; sys.argv[0] = 'kimi-spec'; sys.exit(main())"


def measure(*arguments):
    "What a command says, its CPU time and its peak memory in MB."
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([sys.executable, "-c", COMMAND, *map(str, arguments)], stdout=out, stderr=subprocess.DEVNULL, env=os.environ | dict(OMP_NUM_THREADS="1"))
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        return out.read().decode(), used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--graphs", action="store_true", help="the forward pass of a decode step is one launch")
    parser.add_argument("--cache", action="store_true", help="keep what was read, and read that")
    given = parser.parse_args()
    start = measure("--help")  # before this process grows: a child is charged with its parent's memory until it runs its own program
    with tempfile.TemporaryDirectory() as folder:
        laid, path = [], Path(folder) / "trace.json"
        size = write_trace(path, given.megabytes * 1_000_000, graphs=given.graphs, laid_down=laid).stat().st_size / 1e6
        print(f"{size:,.0f} MB, {len(laid)} steps\n\n{'':28}{'CPU s':>8}{'MB/s':>8}{'peak MB':>9}")
        print(f"{'kimi-spec --help':28}{start[1]:>8.2f}{'':8}{start[2]:>9.0f}")
        for run in ("unknown", "from the cache", "again") if given.cache else ("without a cache",):
            text, seconds, peak = measure("profile", path, "--json", *([] if given.cache else ["--no-cache"]))
            print(f"{'profile, ' + run:28}{seconds:>8.2f}{size / seconds:>8.0f}{peak:>9.0f}")
        found, kinds = json.loads(text)["steps"][0], Counter(step["kind"] for step in laid)
        print(f"\nsteps: {dict(kinds)} laid down, {({kind: found[kind] for kind in kinds})} found, confidence {found['confidence']}")
