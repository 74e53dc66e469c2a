"What the profilers of all known releases take: the table without gaps, and launches that the engine's own parser accepts."
import json

from packaging.version import Version

from kimi_spec.core.rig import list_rigs, load_rig
from kimi_spec.engines.preflight import arguments_are_right
from kimi_spec.profiling.profilers import capture_commands, launch_options, offer_of, offers, with_profiler


def test_the_table_of_releases():
    "Ranges follow each other, and every rig of the suite that names a known release finds itself in one."
    for engine in ("vllm", "sglang"):
        rows = [o for o in offers() if o.engine == engine]
        assert all(Version(a.first) <= Version(a.last) < Version(b.first) for a, b in zip(rows, rows[1:]))
        assert all(offer_of(engine, r)[0] is o and not offer_of(engine, r)[1] for o in rows for r in (o.first, o.last))
    for rig in list_rigs():
        assert offer_of(rig.engine.name, rig.engine.release)[1] == "" or rig.engine.release == "unknown"
        assert capture_commands(rig)[-1].argv[0] == "curl"


def test_a_started_rig_can_be_profiled():
    "The engine's own parser takes what is added."
    rig = with_profiler(load_rig("nano-vllm-base"), "/traces", steps=20, shapes=True)
    assert json.loads(rig.launch.extra_args[-1])["torch_profiler_record_shapes"] is True
    assert arguments_are_right(rig)
    assert launch_options(load_rig("nano-sglang")).text() == "nothing"
