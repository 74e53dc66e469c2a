"""Runs at the start of every Python process of an SGLang server on a CPU: once `sglang` is imported, the operations it lacks are there."""
import os
import sys


class BeforeSGLang:
    "Sees the import of `sglang` before Python does, once."

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "sglang":
            sys.meta_path.remove(cls)
            from kimi_spec.patching.sglang_cpu import install

            install()


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    sys.meta_path.insert(0, BeforeSGLang)
