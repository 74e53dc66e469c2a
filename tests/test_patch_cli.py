"`kimi-spec patch` and `kimi-spec source` as a person types them."
import json
import os

import pytest
from test_in_place import digest, make
from typer.testing import CliRunner

from kimi_spec.cli import app
from kimi_spec.core.errors import KimiSpecError
from kimi_spec.patching.catalogue import find

GROUP = [p.name for p in find("kimi-eagle3")]


def patch(*args):
    "The command's exit code and what it printed; an expected failure is code 1 and its message."
    done = CliRunner().invoke(app, ["patch", *map(str, args)])
    if done.exception and not isinstance(done.exception, (KimiSpecError, SystemExit)): raise done.exception
    return (1, str(done.exception)) if isinstance(done.exception, KimiSpecError) else (done.exit_code, done.stdout)


@pytest.fixture
def root(tmp_path): return make(tmp_path / "site-packages")


def in_tree(root): return {row["patch"]: row["status"] for row in json.loads(patch("status", "kimi-eagle3", "--path", root, "--json")[1])}


def test_a_whole_life(root):
    before = digest(root)
    assert in_tree(root) == dict.fromkeys(GROUP, "needed")
    shown = patch("diff", "kimi-eagle3", "--path", root)[1]
    code, said = patch("apply", "kimi-eagle3", "--engine", "vllm==0.17.1", "--path", root)
    assert code == 0 and said.startswith(shown) and all(f"{name}: applied" in said for name in GROUP) and shown.count("\n+++ ") == 4
    assert patch("verify", "kimi-eagle3", "--path", root)[0] == patch("verify", "--path", root)[0] == 0
    again = json.loads(patch("apply", "kimi-eagle3", "--path", root, "--json")[1])
    assert again["patches"] == dict.fromkeys(GROUP, "already applied") and again["written"] == []
    code, said = patch("revert", "kimi-eagle3", "--path", root)
    assert code == 0 and digest(root) == before and "byte for byte as released" in said


@pytest.mark.parametrize("call", ["apply", "revert"])
def test_what_was_cut_short_is_put_right_by_the_next_call(root, call):
    before, swaps, rename = digest(root), [], os.replace

    def dying(source, target):
        if str(target).endswith(".py"): swaps.append(target)
        if len(swaps) == 3: os._exit(9)
        rename(source, target)

    if not (child := os.fork()):
        os.replace = dying
        patch("apply", "kimi-eagle3", "--path", root)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9 and digest(root) != before
    assert "applied" not in in_tree(root).values()
    code, said = patch("diff", "kimi-eagle3", "--path", root)
    assert code == 1 and "apply or revert" in said
    code, said = patch(call, "kimi-eagle3", "--path", root)
    assert code == 0 and "put back first" in said
    assert in_tree(root) == dict.fromkeys(GROUP, "applied" if call == "apply" else "needed")
    if call == "revert": assert digest(root) == before


def test_a_strangers_edit_stops_everything(root):
    (root / "vllm/config/speculative.py").write_text("# mine\n")
    before = digest(root)
    code, said = patch("apply", "kimi-eagle3", "--path", root)
    assert code == 1 and "nothing was written" in said and "vllm/config/speculative.py: changed" in said and digest(root) == before


@pytest.mark.parametrize("args, says", [
    (["apply", "kimi-eagle"], "unknown patch 'kimi-eagle'. Nearest: 'kimi-eagle3'"),
    (["apply", "kimi-eagle3", "--path", ""], "is empty"),
    (["diff", "kimi-eagle3", "--host", ""], "is empty"),
    (["status", "--path", "nowhere"], "nowhere: no such folder"),
    (["matrix", "--offline", "--keep"], "leave --offline out")])
def test_expected_failures(args, says):
    code, said = patch(*args)
    assert code == 1 and says in said


def test_the_kept_table():
    said = patch("matrix", "--offline")[1]
    assert "0.15.0 to 0.17.1: needs three patches" in said and "0.18.0 to 0.33.0: native" in said
    assert "0.12.0 to 0.14.1: has no Kimi-K2.5 model" in said
    kept = json.loads(patch("matrix", "--offline", "--json")[1])
    assert kept["made"] and {row["release"]: row["verdict"] for row in kept["rows"] if row["dist"] == "vllm"}["0.18.0"] == "native"
