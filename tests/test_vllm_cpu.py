"The four CPU faults of the installed vLLM, each seen first and then repaired, in one process of its own: importing vLLM takes ten seconds."

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, types
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.utils import cpu_triton_utils
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.worker.utils import select_common_block_size
from kimi_spec.patching import vllm_cpu

class Proxy:
    __slots__ = ()
    def __getattr__(self, name): return print

sys.modules["proxy_holder"] = types.ModuleType("proxy_holder")
sys.modules["proxy_holder"].library = Proxy()
current_platform.import_kernels()
with set_current_vllm_config(VllmConfig()): rope = RotaryEmbedding(64, 64, 256, 10000.0, False, torch.float32)
torch.manual_seed(0)
heads, latent, positions = torch.randn(5, 4, 128), torch.randn(5, 576), torch.arange(5) + 3

def block_size():
    try: return select_common_block_size(16, [CPUMLABackend, CPUAttentionBackend])
    except ValueError as e: return str(e)

def rotary(flat):
    "Worst difference of query and key from plain torch."
    query, key = heads.clone()[..., 64:], latent.clone()[:, 512:].unsqueeze(1)
    right = rope.forward_native(positions, query.clone(), key.clone())
    if flat: query, key = query.reshape(5, -1).contiguous(), key.reshape(5, -1).contiguous()
    got = rope.forward_cpu(positions, query, key)
    return max((g.reshape(5, -1) - r.reshape(5, -1)).abs().max().item() for g, r in zip(got, right))

def expand(dtype, cu_dtype):
    rows = torch.full((6,), -1, dtype=dtype)
    cpu_triton_utils._expand_kernel_impl(rows, torch.tensor([0, 2, 3], dtype=dtype), torch.tensor([2, 5, 5], dtype=cu_dtype), 0, 1)
    return rows.tolist()

def scan():
    try: current_platform.register_triton_kernel_overrides()
    except AttributeError as e: return str(e)
    return "passed"

def look():
    return dict(block_size=block_size(), strided=rotary(flat=False), flat=rotary(flat=True), scan=scan(),
                expand={f"{d}/{c}": expand(getattr(torch, d), getattr(torch, c)) for d in ("float32", "int32", "int64") for c in ("int32", "int64")})

before = look()
vllm_cpu.register(); vllm_cpu.register()
print("RESULT " + json.dumps(dict(before=before, after=look(), applied=sorted(vllm_cpu.applied), alias=vllm_cpu.alias_version())))
"""


@pytest.fixture(scope="module")
def seen():
    env = {**os.environ, "VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.split("RESULT ")[1])


def test_block_size(seen):
    assert "No common block size for 16" in seen["before"]["block_size"]
    assert seen["after"]["block_size"] == 16


def test_rotary(seen):
    assert seen["before"]["strided"] > 1
    assert seen["after"]["strided"] == 0
    assert seen["before"]["flat"] < 1e-6 and seen["after"]["flat"] < 1e-6


def test_expand(seen):
    assert seen["before"]["expand"]["float32/int32"] == [-1] * 6
    for dtype, rows in seen["after"]["expand"].items():
        assert rows == [1, 1, 2, 2, 2, -1], dtype  # 0 is replaced by 1, and a request without rows writes nothing


def test_kernel_scan(seen):
    assert "has no attribute 'get'" in seen["before"]["scan"]
    assert seen["after"]["scan"] == "passed"


def test_all_applied_once_and_named(seen):
    assert seen["applied"] == ["cpu-block-size", "cpu-expand", "cpu-kernel-scan", "cpu-rotary"]
    assert "cpu" in seen["alias"]


def test_entry_point_is_declared():
    from importlib.metadata import entry_points

    (ours,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "kimi_spec_cpu"]
    assert ours.value == "kimi_spec.patching.vllm_cpu:register"


def test_importing_the_plugin_is_light():
    code = "import sys, kimi_spec.patching.vllm_cpu; sys.exit(any(m in sys.modules for m in ('torch', 'vllm', 'pandas', 'libcst', 'fsspec')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
