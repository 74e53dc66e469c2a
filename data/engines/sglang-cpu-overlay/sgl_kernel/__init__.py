"""Stands in for SGLang's compiled package, which has no build for these CPUs. It registers no operation, so SGLang takes its plain torch paths."""
