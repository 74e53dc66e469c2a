"""The names that SGLang's host-side KV cache imports. That cache is off on a CPU; calling one is an error."""


def __getattr__(name):
    if not name.startswith("transfer_kv_"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.kvcacheio.{name} has no stand-in for the CPU")

    return missing
