"""A Python that starts in a moment, because it is a fork of one that has imported torch already.

Elsewhere than on Linux, it is Python itself.

    with warm_python(FOLDER / "python"):
        subprocess.run([FOLDER / "python", "train.py", "--help"])

Importing torch takes two seconds of processor time, and what the first optimizer imports takes
another one and a half: most of what a tiny run takes. At its end Python would take another 0.3 s to
destroy what the fork shares with others. Nothing of the repository is imported before the fork.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Passes on its arguments, folder, environment and standard files, and ends with the exit status of
# the fork.
CLIENT = """
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(connection, [request], [0, 1, 2])
os._exit(int(connection.recv(8) or b"1"))
"""


def write_program(path: Path, *command: str) -> None:
    """Write a program that adds its arguments to those of the command."""
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)


@contextmanager
def warm_python(program: Path) -> Iterator[None]:
    """Write `program`, which takes the arguments of Python: [-u] SCRIPT, -m MODULE or -c CODE,
    within the block.
    """
    if sys.platform != "linux":
        write_program(program, sys.executable)
        yield
        return
    with (
        tempfile.TemporaryDirectory() as private,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening,
    ):
        address = f"{private}/socket"
        listening.bind(address)
        listening.listen()
        number = listening.fileno()
        server = subprocess.Popen(
            [sys.executable, __file__, str(number), program], pass_fds=[number], process_group=0
        )
        write_program(program, sys.executable, "-IS", "-c", CLIENT, address)
        try:
            yield
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def serve(number: int) -> tuple[list[str], socket.socket]:
    """Fork for each connection to the socket of this number.

    Return, in the fork, Python's arguments and its client.

    A client that is killed takes the fork with it.
    """
    import torch._dynamo  # noqa: F401 (imports torch too)

    # Otherwise each fork takes a second to collect what was imported before it, at its end.
    gc.freeze()
    listening = socket.socket(fileno=number)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    client, _ = listening.accept()
    while os.fork():
        client.close()
        client, _ = listening.accept()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listening.close()
    request, files, _, _ = socket.recv_fds(client, 1 << 20, 3)
    for standard, file in enumerate(files):
        os.dup2(file, standard)
        os.close(file)
    # By lines, which is what our scripts print.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    arguments, folder, environment = json.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)

    def end_with_client() -> None:
        client.recv(1)  # returns when it has closed its end
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_with_client, daemon=True).start()
    return arguments, client


def run(arguments: list[str]) -> None:
    """Do what `python ARGUMENTS` does."""
    kind, *rest = arguments
    if kind == "-u":  # lines are not kept back anyway
        run(rest)
    elif kind in ("-m", "-c"):
        sys.argv = [kind, *rest[1:]]
        sys.path[0] = os.getcwd()
        if kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    sys.executable = sys.argv[2]  # for scripts that start others
    status = 0
    words, caller = serve(int(sys.argv[1]))
    try:
        run(words)
    except SystemExit as e:
        if isinstance(e.code, str):  # which Python prints
            raise
        status = int(e.code or 0)
    # Ends this process as Python does, but destroys nothing.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    caller.sendall(str(status).encode())
    os._exit(status)
