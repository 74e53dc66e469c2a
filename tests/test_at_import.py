"Patches at import, beyond the notebook's toy: files in other styles, several patches for one file, copies on disk, and vLLM's own way of calling plugins."
import base64
import hashlib
import importlib
import json
import logging
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import libcst as cst
import libcst.matchers as m
import pytest
from vllm_shapes import TEXTS

from kimi_spec.patching import files
from kimi_spec.patching.at_import import AtImportError, PatchedModules, Swap, module_of, register, swaps
from kimi_spec.patching.catalogue import find
from kimi_spec.patching.in_place import apply, open_tree, problems, statuses
from kimi_spec.patching.kimi_eagle3 import DEEPSEEK, IMAGE_TOKEN, KIMI, PATCHES, STATES, WHITELIST
from kimi_spec.patching.patches import AT_IMPORT, IN_PLACE, Edit, Patch, extend, the_one

CONFIG, EAGLE = WHITELIST.edits[0].members[0], IMAGE_TOKEN.edits[0].members[-1]


def write(site, texts):
    for member, text in texts.items():
        for package in [p for p in (site / member).relative_to(site).parents if p.name]:
            (site / package).mkdir(parents=True, exist_ok=True)
            (site / package / "__init__.py").touch()
        (site / member).write_bytes(text.encode())
    return site


def adds(number, name="numbers", ways=(AT_IMPORT,)):
    "A patch that adds a number to the list in toy_engine/numbers.py."
    def rewrite(tree, mark):
        one = the_one(m.findall(tree, m.List()), "a list")
        if number in [e.value.value for e in one.elements]: return None
        tree = tree.deep_replace(one, extend(one, [cst.Element(cst.Integer(number))]))
        return tree.with_changes(footer=[*tree.footer, cst.EmptyLine(comment=cst.Comment(mark))])
    return Patch(f"add-{number}", "it is missing", "ValueError", "nobody asked", "1.0", "1.9", (Edit((f"toy_engine/{name}.py",), rewrite),), ways=ways, engine="toy")


@pytest.fixture
def toy(tmp_path, monkeypatch):
    "A toy engine that can be imported, and forgotten afterwards."
    site = write(tmp_path / "site", {"toy_engine/numbers.py": "from .one import ONE\r\nNUMBERS = [ONE, 2]\r\n\r\ndef fail(): raise ValueError(NUMBERS)\r\n", "toy_engine/one.py": "ONE = 1  # é\n"})
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    yield site
    for name in [n for n in sys.modules if n.startswith("toy_engine")]: del sys.modules[name]


def given(found, folder, monkeypatch):
    finder = PatchedModules(found, folder)
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    return importlib.import_module("toy_engine.numbers")


def test_several_patches_of_one_file_are_one_text(toy, tmp_path, monkeypatch, caplog):
    (found,) = swaps([adds("3"), adds("4"), adds("2")], toy, "1.5")
    assert found.patches == ("add-3", "add-4") and found.text.count("\r\n") == found.text.count("\n")
    with caplog.at_level(logging.INFO, "vllm.kimi_spec"): numbers = given([found], tmp_path / "copies", monkeypatch)
    assert numbers.NUMBERS == [1, 2, 3, 4] and sys.modules["toy_engine.one"].__file__ == str(toy / "toy_engine/one.py")
    assert caplog.messages == ["kimi_spec: toy_engine.numbers comes patched: add-3, add-4"]
    assert (toy / "toy_engine/numbers.py").read_bytes().endswith(b"raise ValueError(NUMBERS)\r\n")


def test_bytecode_lies_beside_the_copy_and_not_in_the_engine(toy, tmp_path, monkeypatch):
    numbers = given(swaps([adds("3")], toy, "1.5"), tmp_path / "copies", monkeypatch)
    assert Path(numbers.__cached__).is_relative_to(tmp_path / "copies") and Path(numbers.__cached__).is_file()
    assert {f.name.split(".")[0] for f in (toy / "toy_engine/__pycache__").iterdir()} == {"__init__", "one"}
    with pytest.raises(ValueError) as e: numbers.fail()
    assert str(e.traceback[-1].path) == numbers.__file__ and "raise ValueError" in str(e.traceback[-1].statement)


def test_a_copy_that_somebody_edited_is_written_again(toy, tmp_path):
    found = swaps([adds("3")], toy, "1.5")
    (file,) = PatchedModules(found, tmp_path / "copies").files.values()
    file.write_text("NUMBERS = []\n")
    PatchedModules(found, tmp_path / "copies")
    assert file.read_bytes().decode() == found[0].text


def test_no_place_for_a_copy_is_said(toy, tmp_path):
    (tmp_path / "taken").write_text("a file, not a folder")
    with pytest.raises(AtImportError, match="no patched copy of toy_engine/numbers.py can be kept in .*taken: Not a directory; set VLLM_CACHE_ROOT"): PatchedModules(swaps([adds("3")], toy, "1.5"), tmp_path / "taken")


def test_another_text_is_another_copy(tmp_path):
    texts = ["x = 1\n", "x = 2\n"]
    assert len({f for t in texts for f in PatchedModules([Swap("a.b", "a/b.py", t, ())], tmp_path).files.values()}) == 2


@pytest.mark.parametrize("bad, message", [
    (lambda site: swaps([adds("3", ways=(IN_PLACE,))], site, "1.5"), "can't be made at import"),
    (lambda site: swaps([adds("3")], site, "1.5", {"toy_engine.numbers": None}), "comes too late: toy_engine.numbers is imported already"),
    (lambda site: (site / "toy_engine/numbers.py").write_text("NUMBERS = 1, 2\n") and swaps([adds("3")], site, "1.5"), "add-3 in toy_engine/numbers.py of toy 1.5: the file looks different"),
    (lambda site: (site / "toy_engine/numbers.py").write_text("NUMBERS = [\n") and swaps([adds("3")], site, "1.5"), "looks different"),
    (lambda site: (site / "toy_engine/numbers.py").write_bytes(b"# \xe9\nNUMBERS = [1, 2]\n") and swaps([adds("3")], site, "1.5"), "looks different")])
def test_what_ends_a_start(toy, bad, message):
    with pytest.raises(AtImportError, match=message): bad(toy)


def test_what_is_not_needed_is_nothing(toy):
    assert swaps([adds("2")], toy, "1.5", {"toy_engine.numbers": None}) == []
    assert swaps([adds("2")], toy, "0.9") == []  # too old counts only where it is needed


# What an edit in place refuses, too

def site_of(tmp_path, members=TEXTS, release="0.17.1"):
    "A tree that both ways can look at."
    site = write(tmp_path / "site", {m: t for m, t in TEXTS.items() if m in members})
    info = site / f"vllm-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    hashes = {m: base64.urlsafe_b64encode(hashlib.sha256((site / m).read_bytes()).digest()).rstrip(b"=").decode() for m in members}
    (info / "RECORD").write_text("".join(f"{m},sha256={h},1\n" for m, h in hashes.items()))
    return site


def both_refuse(site, patches, release):
    "What the two ways say."
    with pytest.raises(AtImportError) as at_import: swaps(patches, site, release)
    tree = open_tree("vllm", path=str(site))
    in_place = problems(tree, patches, statuses(tree, patches))
    assert in_place
    return str(at_import.value), "; ".join(in_place)


@pytest.mark.parametrize("patches, members, says", [
    ([IMAGE_TOKEN, STATES], [m for m in TEXTS if m not in (CONFIG, KIMI)], "is for 0.15.0 to 0.17.1; this is 0.14.1"),
    ([IMAGE_TOKEN], [EAGLE], "kimi-image-token is for 0.15.0 to 0.17.1; this is 0.14.1"),
    ([STATES], [DEEPSEEK], "this vLLM has no Kimi-K2.5 model"),
    ([STATES], [KIMI], "vllm 0.14.1 has no such file")])
def test_a_release_before_the_model_is_refused_both_ways(tmp_path, patches, members, says):
    assert all(says in said for said in both_refuse(site_of(tmp_path, members, "0.14.1"), patches, "0.14.1"))


def test_after_a_change_that_was_cut_short_both_ways_are_refused(tmp_path):
    site = site_of(tmp_path)
    assert len(swaps([IMAGE_TOKEN], site, "0.17.1")) == 1
    state = site / ".kimi-spec/vllm"
    state.mkdir(parents=True)
    (state / "pending.json").write_text(json.dumps({"format": files.FORMAT, "members": {EAGLE: {}}, "time": "2026-11-29T12:00:00Z"}))
    assert all("a change was cut short at 2026-11-29T12:00:00Z; the next apply or revert" in said for said in both_refuse(site, [IMAGE_TOKEN], "0.17.1"))
    (state / "pending.json").write_text("{")
    with pytest.raises(AtImportError, match="pending.json is damaged"): swaps([IMAGE_TOKEN], site, "0.17.1")


def test_what_the_notebook_tells_people_to_do_works(tmp_path):
    site = site_of(tmp_path)
    source = "".join("".join(c["source"]) for c in json.loads((Path(__file__).parents[1] / "nbs/patching/at_import.ipynb").read_text())["cells"] if c["cell_type"] == "markdown")
    (first, second) = re.findall(r"^    (kimi-spec patch apply .*|KIMI_SPEC_PATCHES=.* vllm serve .*)$", source, re.M)
    tree = open_tree("vllm", path=str(site))
    apply(tree, find(first.split()[-1]))
    found = swaps([p for name in second.split()[0].split("=")[1].split(",") for p in find(name)], site, "0.17.1")
    assert {name for s in found for name in s.patches} == {"kimi-image-token", "kimi-supports-eagle3"}
    assert swaps(PATCHES, site, "0.17.1") == found


def test_the_shapes_of_0_17(tmp_path):
    site = write(tmp_path, TEXTS)
    found = swaps([IMAGE_TOKEN, STATES], site, "0.17.1")
    assert [s.module for s in found] == [module_of(member) for member in TEXTS if member != CONFIG]
    with pytest.raises(AtImportError, match="eagle3-whitelist in vllm/config/speculative.py of vllm 0.17.1 is needed and can't be made at import.*kimi-spec patch apply eagle3-whitelist"): swaps(PATCHES, site, "0.17.1")
    write(tmp_path, {CONFIG: TEXTS[CONFIG].replace('"llama",', '"llama", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25",')})  # edited in place, say
    assert swaps(PATCHES, site, "0.17.1") == found


# In a process of its own, with a stand-in for vLLM

STUB = "from types import SimpleNamespace\n__version__ = '0.17.1'\nenvs = SimpleNamespace(VLLM_CACHE_ROOT={cache!r})\n"
CALL = """
import logging, sys
logging.basicConfig(format="%(message)s", level="INFO")
from importlib.metadata import entry_points
(plugin,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kimi_spec_patches"]
register = plugin.load()
{before}
register(); register()
print([type(f).__name__ for f in sys.meta_path].count("PatchedModules"))
"""


def call(tmp_path, patches, before=""):
    site = write(tmp_path / "site", {**TEXTS, "vllm/__init__.py": STUB.format(cache=str(tmp_path / "cache"))})
    env = {**os.environ, "PYTHONPATH": str(site), "KIMI_SPEC_PATCHES": patches}
    return subprocess.run([sys.executable, "-c", CALL.format(before=before)], env=env, capture_output=True, text=True, timeout=120)


def test_called_twice_it_patches_once(tmp_path):
    done = call(tmp_path, "kimi-supports-eagle3, kimi-image-token,kimi-supports-eagle3")
    assert done.returncode == 0 and done.stdout == "1\n", done.stderr
    assert sorted(p.name for p in (tmp_path / "cache").rglob("*.py")) == ["deepseek_v2.py", "eagle.py", "kimi_k25.py"]


@pytest.mark.parametrize("patches, before, message", [
    ("kimi-eagle", "", "Nearest: 'kimi-eagle3'"),
    ("kimi-eagle3", "", "eagle3-whitelist in vllm/config/speculative.py of vllm 0.17.1 is needed and can't be made at import"),
    ("kimi-image-token", "sys.modules['vllm.v1.spec_decode.eagle'] = sys", "comes too late")])
def test_a_start_that_ends_says_why(tmp_path, patches, before, message):
    done = call(tmp_path, patches, before)
    assert done.returncode and message in done.stderr.splitlines()[-1] and not list((tmp_path / "cache").rglob("*.py"))


@pytest.mark.parametrize("patches", ["", " , "])
def test_without_a_name_nothing_happens(tmp_path, patches):
    assert call(tmp_path, patches).stdout == "0\n"


def test_entry_point_is_declared():
    (ours,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kimi_spec_patches"]
    assert ours.value == "kimi_spec.patching.at_import:register" and ours.load() is register
