"""Code comes to the same in the sandbox as under `python -c`: output, exit code, the end of its traceback.

Different by design: the value of a last bare expression is shown (as in a notebook); of a traceback only the error is,
without what is guessed ("Did you mean") and the members of an exception group.
"""

import os
import subprocess
import sys
import tempfile
from functools import cache

import pytest
from helpers.python_tools import HANG_S, TIERS, start

from arpo.jail.wire import Reply

SNIPPETS = {
    "unicode": "print('\u00e4\u4e2d\U0001f600')",
    "bytes on stdout": "import sys; _ = sys.stdout.buffer.write(b'raw\\n')",
    "stdout by descriptor": "import os; os.write(1, b'direct\\n'); print('buffered')",
    "stderr": "import sys; print('oops', file=sys.stderr)",
    "warning": "import warnings; warnings.warn('careful')",
    "flush at the end": "import sys; _ = sys.stdout.write('no newline')",
    "output, then an exception": "print('before'); {}['key']",
    "exception with a cause": "try: 1 / 0\nexcept ZeroDivisionError as e: raise ValueError('v') from e",
    "exception with a note": "e = ValueError('v'); e.add_note('a note'); raise e",
    "exception whose str fails": "class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E",
    "name error": "number = 1\nprint(numbr)",
    "attribute error": "import math\nmath.sqr(2)",
    "syntax error": "print((1)",
    "indentation error": "def f():\nreturn 1",
    "recursion": "def f(): f()\nf()",
    "keyboard interrupt's name": "try: raise KeyboardInterrupt\nexcept BaseException as e: print(type(e).__name__)",
    "exit 256": "import sys; sys.exit(256)",
    "exit -1": "import sys; sys.exit(-1)",
    "os._exit loses no output": "import os; print('kept'); os._exit(5)",
    "quit": "quit(6)",
    "exit": "print('x')\nexit()",
    "help": "print(help)",
    "killed by itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "terminated by itself": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "atexit": "import atexit; atexit.register(print, 'late'); print('early')",
    "thread that is joined at the end": "import threading, time\n"
    "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start(); print('main')",
    "exception in a thread": "import threading; t = threading.Thread(target=lambda: print('t')); t.start(); t.join()",
    "finalizer": "class F:\n    def __del__(self): print('gone')\nf = F()",
    "end of stdin": "input()",
    "read of stdin": "import sys; print(repr(sys.stdin.read()))",
    "main guard": "if __name__ == '__main__': print('main')",
    "argv": "import sys; print(sys.argv)",
    "module of functions": "def f(): pass\nprint(f.__module__, f.__qualname__)",
    "file of the code": "import sys; print(sys._getframe().f_code.co_filename)",
    "no __file__": "__file__",
    "globals": "print(sorted(k for k in globals() if k not in ('__annotations__',)))",
    "annotations": "x: int = 1\nprint(__annotations__)",
    "future import": "from __future__ import annotations\ndef f(x: Nowhere): pass\nprint(f.__annotations__)",
    "pickle of a class of main": "import pickle\nclass C: x = 1\nprint(pickle.loads(pickle.dumps(C())).x)",
    "dataclass": "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int = 1\nprint(P())",
    "asyncio": "import asyncio\nasync def f(): return 7\nprint(asyncio.run(f()))",
    "recursion limit": "import sys; print(sys.getrecursionlimit() >= 1000)",
    "hash order": "print({'a', 'b', 'c'}, hash('a'))",
    "too many digits": "print(10**5000)",
    "locale and time zone": "import locale, time\nprint(locale.getpreferredencoding(), time.tzname)",
    "temporary file": "import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'x'))",
    "file in the working folder": "open('a', 'w').write('x'); print(open('a').read())",
    "missing file": "open('/no/such/file')",
    "numpy": "import numpy as np; print(np.arange(6).reshape(2, 3), np.float64(1) / 3)",
    "numpy error": "import numpy as np; np.ones(2) @ np.ones(3)",
    "sympy": "import sympy\nx = sympy.Symbol('x'); print(sympy.solve(x**2 - 2, x), sympy.integrate(x**2, x))",
    "gc is on": "import gc; print(gc.isenabled())",
    "standard streams": "import sys as s; print(s.stdout.encoding, s.stdin.name, s.stdout.fileno(), s.stderr.errors)",
    "signal handlers": "import signal\nfor s in (2, 13, 15, 17): print(signal.getsignal(s))",
}  # fmt: skip
ENVIRONMENT = {
    "PATH": os.defpath,
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@pytest.fixture(scope="module", params=TIERS)
def sandbox(request):
    tool = start(tier=request.param)
    yield tool.sandbox
    tool.sandbox.close()


@cache
def reference(name: str) -> Reply:
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-B", "-u", "-c", SNIPPETS[name]],  # unbuffered, as ours is for the first writes
            stdin=subprocess.DEVNULL, capture_output=True, env=ENVIRONMENT, cwd=folder, timeout=HANG_S, text=True,
        )  # fmt: skip
    return Reply("", done.returncode, done.stdout, done.stderr)


def last_error(stderr: str) -> str:
    """The last line of a traceback, without its guess."""
    return stderr.rstrip().rsplit("\n", 1)[-1].split(". Did you mean")[0]


@pytest.mark.parametrize("name", SNIPPETS)
def test_code_comes_to_the_same_as_under_python_u_c(sandbox, name):
    ours, theirs = sandbox.run(SNIPPETS[name]), reference(name)
    assert (ours.exit_code, ours.stdout) == (theirs.exit_code, theirs.stdout), (ours, theirs)
    assert last_error(ours.stderr) == last_error(theirs.stderr)
