"""Readers of a profiler's trace side by side: time of the CPU, memory, and whether they agree.

    python tests/bench/read_traces.py [--megabytes 500] [--gigabytes-alone 4]

HolisticTraceAnalysis and polars live in an environment of their own in data/cache, made at the first call.
Each reader runs in a process of its own and says how many kernels there are and how long they ran; time is the process's, with and without its imports.
"""
import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from trace_files import write_trace  # noqa: E402

from kimi_spec.core.paths import cache_dir  # noqa: E402

BEFORE, AFTER = """
import json, resource, sys, time
began = time.process_time()
""", """
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
found = dict(whole=time.process_time(), reading=time.process_time() - read_from, peak=peak, kernels=int(kernels), ns=int(round(ns)))
"""
SAID = """
print("found", json.dumps(found))
"""
TOTALS = {  # events by phase and category, and how many rows of each kind and name there are and how long they ran
    "kimi_spec": """
counts = trace.counts
rows = (e.end - e.start).groupby([e.kind.astype(str), e.name.astype(str)]).agg(["size", "sum"])
rows = {f"{kind} {name}": [int(n), int(t)] for (kind, name), n, t in zip(rows.index, rows["size"], rows["sum"])}
found["totals"] = dict(counts=counts, rows=rows)
""",
    "json": """
import collections, re
KINDS = dict(kernel="kernel", gpu_memcpy="copy", gpu_memset="set", gpu_user_annotation="gpu_annotation", user_annotation="annotation", cuda_runtime="call", cuda_driver="call")
counts, rows = collections.Counter(), collections.defaultdict(lambda: [0, 0])
for event in events:
    counts[f"{event['ph']}/{event['cat']}" if event.get("cat") else event["ph"]] += 1
    kind = KINDS.get(event.get("cat")) if event["ph"] == "X" else None
    if not kind or kind == "call" and not re.search("launch|memcpy|memset|synchronize", event["name"], re.I): continue
    row = rows[f"{kind} {event['name']}"]
    row[0] += 1
    row[1] += round(event["dur"] * 1000)
found["totals"] = dict(counts=counts, rows=rows)
"""}
READERS = {
    "kimi_spec": """
from kimi_spec.profiling.kineto import read_kineto
read_from = time.process_time()
trace = read_kineto(sys.argv[1])
e, is_kernel = trace.events, (trace.events.kind == "kernel").to_numpy()
kernels, ns = is_kernel.sum(), (e.end.to_numpy() - e.start.to_numpy())[is_kernel].sum()
""",
    "json": """
read_from = time.process_time()
with open(sys.argv[1], "rb") as file: events = json.load(file)["traceEvents"]
k = [e for e in events if e.get("ph") == "X" and e.get("cat") == "kernel"]
kernels, ns = len(k), sum(e["dur"] for e in k) * 1000
""",
    "polars": """
import polars as pl
read_from = time.process_time()
e = pl.read_json(sys.argv[1], infer_schema_length=None).select(pl.col("traceEvents")).explode("traceEvents").unnest("traceEvents")
k = e.filter((pl.col("ph") == "X") & (pl.col("cat") == "kernel"))
kernels, ns = len(k), k["dur"].cast(pl.Float64).sum() * 1000
""",
    "HTA 0.5.0": """
import logging
logging.disable(logging.CRITICAL)
from hta.common.trace import Trace
read_from = time.process_time()
trace = Trace(trace_files={0: sys.argv[1]}, trace_dir="")
trace.parse_traces(max_ranks=1, use_multiprocessing=False)
e, symbols = trace.get_trace(0), trace.symbol_table.sym_index
k = e[e["cat"] == symbols["kernel"]]
kernels, ns = len(k), k["dur"].sum() * 1000
""",
    "gzip alone": """
import gzip
read_from, kernels, ns = time.process_time(), -1, -1
with gzip.open(sys.argv[1]) as file:
    while file.read(1 << 20): pass
""",
    "isal alone": """
from isal import igzip
read_from, kernels, ns = time.process_time(), -1, -1
with igzip.open(sys.argv[1]) as file:
    while file.read(1 << 20): pass
""",
}


def environment():
    "Python with the other readers."
    folder = cache_dir() / "trace-readers"
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "-q", "-r", Path(__file__).with_name("requirements.txt")], check=True)
    return folder / "bin" / "python"


def measure(reader, path, times=1):
    "Run a reader; the fastest of a few runs."
    python = environment() if reader in ("polars", "HTA 0.5.0") else sys.executable
    best = None
    for _ in range(times):
        run = subprocess.run([python, "-c", BEFORE + READERS[reader] + AFTER + TOTALS.get(reader, "") + SAID, path], capture_output=True, text=True)
        line = next((line for line in run.stdout.splitlines() if line.startswith("found ")), None)
        if not line: return dict(failed=(run.stderr.strip().splitlines() or [f"exit {run.returncode}"])[-1][:150])
        found = json.loads(line[6:])
        best = min(best or found, found, key=lambda f: f["whole"])
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--gigabytes-alone", type=float, default=0, help="a second, larger file for our reader only")
    parser.add_argument("--readers", nargs="*", default=[*READERS], choices=[*READERS])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_trace(Path(folder) / "trace.json", given.megabytes * 1_000_000)
        size, rows = path.stat().st_size / 1e6, []
        packed = path.with_suffix(".json.gz")
        with path.open("rb") as source, gzip.open(packed, "wb", compresslevel=6) as out: shutil.copyfileobj(source, out, 1 << 20)
        for reader in given.readers:
            alone = reader.endswith("alone")
            rows.append((reader, measure(reader, packed if alone else path, 3 if alone or reader == "kimi_spec" else 1), size))
            if reader == "kimi_spec": rows.append(("kimi_spec, gzip", measure(reader, packed, 3), size))
        if given.gigabytes_alone:
            packed.unlink()
            path = write_trace(path, int(given.gigabytes_alone * 1e9))
            rows.append((f"kimi_spec, {given.gigabytes_alone:g} GB", measure("kimi_spec", path), path.stat().st_size / 1e6))
    print(f"\n{size:,.0f} MB of JSON; seconds and MB/s are CPU time\n")
    print(f"{'reader':24}{'whole s':>9}{'reading s':>11}{'MB/s':>8}{'peak MB':>9}  kernels and their ns")
    for name, found, size in rows:
        if "failed" in found: print(f"{name:24}{found['failed']}")
        else: print(f"{name:24}{found['whole']:>9.2f}{found['reading']:>11.2f}{size / found['reading']:>8.0f}{found['peak']:>9.0f}  {found['kernels']:,} {found['ns']:,}")
    by_name = {name: found for name, found, _ in rows if "failed" not in found}
    if {"kimi_spec", "json"} <= by_name.keys():
        ours, theirs = (by_name[name]["totals"] for name in ("kimi_spec", "json"))
        print(f"\nplain json counts {sum(theirs['counts'].values()):,} events in {len(theirs['counts'])} categories and {len(theirs['rows']):,} names of rows; ours are {'the same' if ours == theirs else 'OTHERS'}, in every count and every ns")
    if {"kimi_spec", "HTA 0.5.0"} <= by_name.keys():
        ours, theirs = by_name["kimi_spec"], by_name["HTA 0.5.0"]
        print(f"\nHTA takes {theirs['reading'] / ours['reading']:.1f} times the time (whole processes: {theirs['whole'] / ours['whole']:.1f}) and {theirs['peak'] / ours['peak']:.1f} times the memory")
    if "kimi_spec, gzip" in by_name:
        for alone in ("gzip alone", "isal alone"):
            if alone in by_name: print(f"reading gzip takes {by_name['kimi_spec, gzip']['reading'] / by_name[alone]['reading']:.2f} times {alone}")
