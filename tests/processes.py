"Processes that tests start, look at and wait for."
import time
from contextlib import contextmanager

import psutil

from kimi_spec.core.rig import load_rig
from kimi_spec.engines.server import Server, wait_ready


def is_running(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until(condition, seconds=10):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


@contextmanager
def started(names, folder):
    "Real servers of these rigs, all ready, by the rig's name."
    servers = {name: Server(load_rig(name), folder / f"{name}.log") for name in names}
    try:
        for server in servers.values(): server.start()
        wait_ready(servers.values())
        yield servers
    finally:
        for server in servers.values(): server.stop()
