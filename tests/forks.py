"""New Python processes in a tenth of the time: forks of one that has imported torch, which takes two seconds, no more.

A fork begins with an empty `__main__`, with its own environment and sys.path, and ends as any Python does. So a test
may ask of it what it asks of a new process, but for what Python or torch settle when they start.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import types
from pathlib import Path

# --- where the forks come from: python tests/forks.py


def serve() -> None:
    """Run the requests on stdin, one a line, one at a time; a fork leaves the loop and runs what was asked for."""
    import torch  # noqa: F401  # what all this is for

    assert not {"pkv", "triton", "pytest"} & set(sys.modules), "a fork must import these itself"
    requests = open(os.dup(0), "rb", buffering=0)  # noqa: SIM115  # unbuffered: a fork must not have the next request
    while line := requests.readline():
        if not (pid := os.fork()):
            requests.close()
            return become(json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def become(request: dict) -> None:
    """What `python -c` would have come to, with torch imported before the first line."""
    for number, (path, flags) in enumerate(request["files"]):
        descriptor = os.open(path, flags)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request["env"])
    sys.path[:1] = ["", *request["env"].get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = ["-c"]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    exec(compile(request["code"], "<string>", "exec"), main.__dict__)


# --- where they are asked for


class Forks:
    """The process that forks, started when first needed; it ends with the one that asks."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[bytes] | None = None

    def run(self, code: str, env: dict[str, str], timeout: float) -> subprocess.CompletedProcess[str]:
        """What subprocess.run would give of `python -c code`; subprocess.TimeoutExpired alike."""
        if self.server is None:
            at_start = {
                name: text for name, text in os.environ.items() if name not in ("PYTHONPATH", "TRITON_INTERPRET")
            }
            self.server = subprocess.Popen(
                [sys.executable, __file__], env=at_start | {"CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
            )  # fmt: skip  # unbuffered: what was read ahead, select() would wait for
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            written = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            files = [(os.devnull, os.O_RDONLY), (str(out), written), (str(err), written)]
            self.server.stdin.write(json.dumps({"code": code, "env": env, "files": files}).encode() + b"\n")
            pid = int(self.answer(60))
            try:
                exit_code = int(self.answer(timeout))
            except subprocess.TimeoutExpired:
                os.kill(pid, signal.SIGKILL)
                self.answer(60)  # so that the next answer is the next one's
                raise
            return subprocess.CompletedProcess(["-c"], exit_code, out.read_text(), err.read_text())

    def answer(self, timeout: float) -> bytes:
        """The server's next line."""
        if not select.select([self.server.stdout], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(["-c"], timeout)
        return self.server.stdout.readline()


if __name__ == "__main__":
    serve()
