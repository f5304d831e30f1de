"""A fork of a process that has torch is to a test what a new process is."""

import os
import subprocess
from pathlib import Path

import pytest


def test_a_fork_begins_with_nothing_of_what_runs_here_but_torch(forks, fresh):
    code = """
        import sys
        print({"pkv", "triton", "pytest", "torch._dynamo"} & {*sys.modules}, "torch" in sys.modules)
        print(__name__, [*vars(sys.modules["__main__"])], sys.argv, sys.stdin.read())
        import pkv; print(pkv.__file__)
    """
    done = fresh(code)
    names = "['__name__', '__doc__', '__package__', '__loader__', '__spec__', '__builtins__', 'sys']"
    root = Path(__file__).resolve().parents[1]
    assert done.out.splitlines() == ["set() True", f"__main__ {names} ['-c'] ", str(root / "pkv" / "__init__.py")]


def test_each_fork_has_its_own_environment_and_leaves_the_next_one_nothing(fresh):
    said = "import os, sys; print(os.environ.get('A_WORD')); sys.path.append('x'); os.environ['B_WORD'] = 'b'"
    assert fresh(said, A_WORD="a").out == "a\n"
    assert fresh(f"{said}; print(sys.path.count('x'))").out == "None\n1\n"
    assert fresh("import os; print('B_WORD' in os.environ, 'HOME' in os.environ)", HOME=None).out == "False False\n"


def test_a_fork_ends_as_python_does(fresh):
    raised = fresh("import atexit; atexit.register(print, 'the end'); 1 / 0", ok=False)
    assert (raised.code, raised.out) == (1, "the end\n")
    assert raised.err.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert fresh("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)", ok=False).code == 3
    assert fresh("import os; os.kill(os.getpid(), 11)", ok=False).code == -11
    assert fresh("print('as ever')").out == "as ever\n"


def test_a_fork_that_takes_too_long_is_ended_and_the_next_one_runs(fresh):
    with pytest.raises(subprocess.TimeoutExpired):
        fresh("import os, time; print(os.getpid(), flush=True); time.sleep(1000)", timeout=0.5)
    assert fresh("print(1)").out == "1\n"


def test_the_server_ends_with_the_process_that_asks(forks):
    from forks import Forks

    own = Forks()
    assert own.run("print(1)", dict(os.environ), 60).stdout == "1\n"
    own.server.stdin.close()
    assert own.server.wait(60) == 0
