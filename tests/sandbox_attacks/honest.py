"""Code that means no harm but ends in odd ways: the reply must say exactly how."""

from sandbox_attacks.attack import Attack, ended, printed, raised

JUNK_ON_ALL_DESCRIPTORS = r"""
import os
for fd in range(256):
    try:
        os.write(fd, b"\xff\0{}" * 100)
    except OSError:
        pass
"""
HOSTILE_EXCEPTION = """
class Hostile(Exception):
    def __str__(self):
        raise Hostile
raise Hostile
"""
REPLACED_STREAMS = """
import sys
sys.stdout = sys.stderr = None
1 / 0
"""
RECURSION = """
def again():
    again()
again()
"""
PRETEND_A_FAILED_SET_UP = """
import os
for fd in range(2, 256):
    try:
        os.write(fd, b"OSError()")
    except OSError:
        pass
os._exit(1)
"""
NAME_THAT_IS_NO_TEXT = """
import ctypes, time
PR_SET_NAME = 15
ctypes.CDLL(None).prctl(PR_SET_NAME, b"\\xff) \\n0")
time.sleep(0.3)  # until somebody looks
print("fine")
"""
TEMPORARY_FILE = """
import tempfile
with tempfile.TemporaryFile() as file:
    file.write(b"fine")
    file.seek(0)
    print(file.read().decode())
"""
DIVISION = "division by zero"

HONEST = [
    Attack("junk_on_descriptors", JUNK_ON_ALL_DESCRIPTORS, lambda r: r.status == "ok" and "\ufffd" in r.stdout),
    Attack("read_stdin", "input()", raised("EOFError")),
    Attack("exit_code", "import sys; sys.exit(3)", lambda r: r.status == "error" and r.exit_code == 3),
    Attack("hard_exit", "import os; os._exit(7)", lambda r: r.status == "error" and r.exit_code == 7),
    Attack("pretend_a_failed_set_up", PRETEND_A_FAILED_SET_UP, lambda r: r.status == "error" and r.exit_code == 1),
    Attack("recursion", RECURSION, lambda r: "RecursionError" in r.stderr and len(r.stderr) < 1000),
    Attack("nested_source", "(" * 5000, ended("error")),
    Attack("surrogate", r"print('\ud800')", raised("UnicodeEncodeError")),
    Attack("exact_unicode", "print('\u00e4\u4e2d\U0001f600')", printed("\u00e4\u4e2d\U0001f600")),
    Attack("hostile_exception", HOSTILE_EXCEPTION, ended("error")),
    Attack("replaced_streams", REPLACED_STREAMS, raised(DIVISION)),
    Attack("segmentation_fault", "import ctypes; ctypes.string_at(0)", ended("signal")),
    Attack("abort", "import os; os.abort()", ended("signal")),
    Attack("kill_itself", "import os; os.kill(os.getpid(), 9)", ended("killed")),
    Attack("name_that_is_no_text", NAME_THAT_IS_NO_TEXT, printed("fine")),
    Attack("temporary_file_works", TEMPORARY_FILE, printed("fine")),
    Attack("asyncio_works", "import asyncio; asyncio.run(asyncio.sleep(0, 'fine'))", printed("'fine'")),
]
