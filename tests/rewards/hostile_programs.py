"""Programs that attack what runs them. Each prints 'held' when it was kept from what it tries, else what it could do.

`ATTACKS[name] = (barriers, source)`: any one of `barriers` is enough to keep it off. Where that is "syscalls" alone,
only the filter's own answer (EPERM) counts: another error says that the attack did not come to the filter, and the
program prints neither. Modules that a launcher has not imported cannot be imported at every level. What a program may
do with itself, such as ending early, is no attack of this kind: those are in `GAMES`, and must not be rewarded.
"""

from __future__ import annotations

import platform

from system_calls import DENIED_ALONE, numbers_of

_KIT = """
import ctypes, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p

def mapped(num_bytes, protection):
    return libc.mmap(None, ctypes.c_size_t(num_bytes), protection, 0x22, -1, ctypes.c_long(0))

def refused(function, *arguments):
    try:
        function(*arguments)
    except (OSError, MemoryError, RuntimeError, ValueError) as error:
        if IS_FILTERED and not (isinstance(error, OSError) and error.errno == errno.EPERM):
            raise
        return True
    return False

def _call(arguments):
    if libc.syscall(*arguments) == -1:
        raise OSError(ctypes.get_errno(), "a system call", str(arguments))

def call(*arguments):
    return not refused(_call, arguments)

def report(*successes):
    print("breached" if any(successes) else "held")
"""


def _sockets(family: str, kind: str, action: str = "") -> str:
    return f"""
import socket
def reach():
    with socket.socket({family}, {kind}) as s:
        s.settimeout(0.2)
        {action or "pass"}
report(not refused(reach))
"""


_NUMBERS = "import platform\nX = platform.machine() == 'x86_64'\n"  # the rest of the system calls are the same for both

ATTACKS: dict[str, tuple[set[str], str]] = {
    "tcp": (
        {"syscalls", "network"},
        _sockets("socket.AF_INET", "socket.SOCK_STREAM", "s.connect(('127.0.0.1', PORT))"),
    ),
    "udp": (
        {"syscalls", "network"},
        _sockets("socket.AF_INET", "socket.SOCK_DGRAM", "s.connect(('10.0.0.1', 53)); s.send(b'x')"),
    ),
    "unix sockets": ({"syscalls"}, _sockets("socket.AF_UNIX", "socket.SOCK_STREAM")),
    "abstract sockets": ({"syscalls"}, _sockets("socket.AF_UNIX", "socket.SOCK_DGRAM", "s.bind('\\0slipstream')")),
    "netlink": ({"syscalls"}, _sockets("socket.AF_NETLINK", "socket.SOCK_RAW")),
    "datagram pairs": (
        {"syscalls"},
        "import socket\nreport(not refused(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM))",
    ),
    "fork": ({"syscalls"}, "report(not refused(os.fork))"),
    "double fork": (
        {"syscalls"},
        "def leave():\n    if os.fork() == 0: os.setsid(); os.fork(); os._exit(0)\nreport(not refused(leave))",
    ),
    "programs": (  # the C library's linker, which is a program too, is there without a folder of programs
        {"syscalls"},
        """
folders = filter(os.path.isdir, ("/lib", "/lib64"))
path = [*[f"{folder}/{name}" for folder in folders for name in os.listdir(folder) if name[:3] == "ld-"], os.__file__][0]
report(not refused(os.execv, path, [path]))
""",
    ),
    "set-uid programs": ({"privileges"}, "report(libc.prctl(39, 0, 0, 0, 0) != 1)"),  # PR_GET_NO_NEW_PRIVS
    "ptrace": ({"syscalls"}, _NUMBERS + "report(call(101 if X else 117, 0, 0, 0, 0))"),  # by its parent: PTRACE_TRACEME
    "memory of others": ({"syscalls"}, _NUMBERS + "report(call(310 if X else 270, os.getpid(), 0, 0, 0, 0, 0))"),
    "memory of the launcher": (
        {"limits"},  # nobody of the same user may look at it
        "folder = f'/proc/{os.getppid() or 1}'\n"
        "report(*[not refused(open, f'{folder}/{name}', 'rb') for name in ('mem', 'environ')])",
    ),
    "all calls that are denied": (
        {"syscalls"},
        f"report(*[call(n, *[ctypes.c_long(-1)] * 6) for n in {numbers_of(DENIED_ALONE, platform.machine())}])",
    ),
    "signals to others": (
        {"syscalls", "processes"},
        "report(*[not refused(os.kill, pid, 0) for pid in (-1, os.getppid(), 1, 2, 3) if pid not in (0, os.getpid())])",
    ),
    "user namespaces": ({"syscalls"}, _NUMBERS + "report(call(272 if X else 97, 0x10000000))"),
    "namespaces by clone": ({"syscalls"}, _NUMBERS + "report(call(56 if X else 220, 0x10000000 | 17, 0, 0, 0, 0))"),
    "clone3": (  # there is none, for the C library to use clone
        {"syscalls"},
        "done = libc.syscall(435, ctypes.create_string_buffer(88), 88)\n"
        "report(done != -1 or ctypes.get_errno() != errno.ENOSYS)",
    ),
    "mounts": ({"syscalls", "user"}, "report(libc.mount(b'x', b'/tmp', b'tmpfs', 0, None) == 0)"),
    "bpf": ({"syscalls"}, _NUMBERS + "report(call(321 if X else 280, 5, ctypes.create_string_buffer(128), 128))"),
    "keys": ({"syscalls"}, _NUMBERS + "report(call(250 if X else 219, 0, -3, 0, 0, 0))"),
    "io_uring": ({"syscalls"}, "report(call(425, 4, ctypes.create_string_buffer(120)))"),
    "performance events": (
        {"syscalls"},
        _NUMBERS + "report(call(298 if X else 241, ctypes.create_string_buffer(128), 0, -1, -1, 0))",
    ),
    "32-bit system calls": (
        {"syscalls"},
        """
import platform
if platform.machine() != "x86_64":
    report()
else:
    code, held = bytes.fromhex("53b814000000cd805bc3"), mapped(4096, 7)
    ctypes.memmove(held, code, len(code))  # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
    report(ctypes.CFUNCTYPE(ctypes.c_int)(held)() > 0)
""",
    ),
    "memory files": ({"syscalls"}, "report(not refused(os.memfd_create, 'x'))"),
    "shared memory of System V": ({"syscalls"}, _NUMBERS + "report(call(29 if X else 194, 0, 1 << 30, 0o1600))"),
    "files in shared memory": ({"files"}, "report(os.access('/dev/shm', os.W_OK))"),
    "heap": ({"limits"}, "report(not refused(bytearray, 1 << 30))"),
    "mappings": ({"limits"}, "report(mapped(1 << 30, 3) != ctypes.c_void_p(-1).value)"),
    "large files": (
        {"limits"},
        "def fill():\n    with open('big', 'wb', 0) as f:\n        for _ in range(64):\n"
        "            assert f.write(bytes(1 << 20)) == 1 << 20 or f.write(b'x')\nreport(not refused(fill))",
    ),
    "many descriptors": ({"limits"}, "report(not refused(lambda: [os.dup(0) for _ in range(5000)]))"),
    "higher limits": (
        {"user"},
        "import resource as r\nreport(*[not refused(r.setrlimit, w, (r.RLIM_INFINITY,) * 2) for w in "
        "(r.RLIMIT_AS, r.RLIMIT_NOFILE, r.RLIMIT_FSIZE)])",
    ),
    "limits of others": (
        {"syscalls"},
        "import resource as r\nreport(not refused(r.prlimit, os.getppid() or 1, r.RLIMIT_CPU))",
    ),
    "other users": ({"user", "privileges"}, "report(not refused(os.setuid, 0 if os.getuid() else 1))"),
    "descriptors": (
        {"limits"},  # they are closed in any case
        "report(*[not refused(os.fstat, fd) for fd in range(3, 1024)])",
    ),
    "environment": ({"limits"}, "report(bool(os.environ), *[len(v) > 0 for v in os.environ.values()])"),
    "processes": (
        {"files"},
        "report(*[not refused(os.listdir, path) for path in ('/proc', '/proc/1', '/proc/self/fd')])",
    ),
    "files of the system": (
        {"files"},
        "report(*[not refused(os.stat, p) for p in ('/etc', '/home', '/var', '/sys', '/run')])",
    ),
    "keys and run folders": ({"files"}, "report(*[not refused(os.stat, p) for p in PRIVATE])"),
    "writes": (
        {"files"},
        """
def write(folder):
    path = os.path.join(folder, f"slipstream-test-{os.getpid()}")
    with open(path, "x"):
        os.unlink(path)
report(*[not refused(write, p) for p in ("/", "/dev", "/lib", os.path.dirname(os.__file__), *PRIVATE)])
""",
    ),
    "symbolic links": (
        {"files"},
        "os.symlink('/etc/passwd', 'a'); os.symlink('/proc/self/root', 'b')\n"
        "report(not refused(open, 'a'), not refused(os.listdir, 'b/etc'))",
    ),
    "devices": (
        {"files", "user"},
        "import stat\nreport(not refused(os.mknod, 'd', stat.S_IFBLK | 0o666, os.makedev(8, 0)))",
    ),
    "terminals": (
        {"files"},
        "report(*[not refused(open, p, 'w') for p in ('/dev/tty', '/dev/pts/0', '/dev/console')])",
    ),
    "expected outputs in memory": (
        {"limits"},  # they are never in the process
        """
import gc
found = []
for thing in gc.get_objects():
    if thing is not found and isinstance(thing, (dict, list, tuple)):
        found += [v for v in (thing.values() if isinstance(thing, dict) else thing)
                  if isinstance(v, str) and SECRET[::-1] in v]
frame = sys._getframe()
while frame:
    found += [v for v in frame.f_locals.values() if isinstance(v, str) and SECRET[::-1] in v]
    frame = frame.f_back
report(found)
""",
    ),
}


def source(name: str, *, private: tuple[str, ...] = (), secret: str = "", port: int = 9) -> str:
    """The attack's program. It tries to reach `private` paths and `port`, and looks for `secret` in its memory."""
    barriers, attack = ATTACKS[name]
    given = f"PRIVATE, SECRET, PORT, IS_FILTERED = {private!r}, {secret[::-1]!r}, {port}, {barriers == {'syscalls'}}"
    return f"{_KIT}\n{given}\n{attack}\n"


# What a program may try to be rewarded for without an answer: (program, tests). None of it may give anything.
_ADD = ["assert add(1, 2) == 3", "assert add(5, 5) == 10"]
_ZERO = "def add(a, b): return 0\n"


def _sent(body: str) -> str:
    """A program that answers before it is asked, on whatever descriptor it has."""
    return (
        f"import os, struct\nbody = {body}\nfor fd in range(3, 64):\n"
        "    try: os.write(fd, struct.pack('<I', len(body)) + body)\n    except OSError: pass\n" + _ZERO
    )


GAMES: dict[str, tuple[str, object]] = {
    "early exit": ("import os\nos._exit(0)", _ADD),
    "sys.exit": ("import sys\nsys.exit(0)", _ADD),
    "exit within a call": ("import os\ndef add(a, b): os._exit(0)", _ADD),
    "system exit within a call": ("def add(a, b): raise SystemExit(0)", _ADD),
    "equal to everything": (
        "class Any(int):\n    __eq__ = lambda s, o: True\n    __hash__ = None\n"
        "class Other:\n    __eq__ = lambda s, o: True\ndef add(a, b): return Other() if a == 1 else Any()",
        _ADD,
    ),
    "patched builtins": (
        "import builtins\nbuiltins.AssertionError = type('Quiet', (BaseException,), {})\n"
        "builtins.isinstance = lambda *a: True\n"
        "import sys\nsys.excepthook = lambda *a: None\ndef add(a, b): return None",
        _ADD,
    ),
    "names of the tests": (
        "def abs(x): return 0\ndef all(x): return True\ndef isinstance(*a): return True\ndef len(x): return 7\n"
        "def add(a, b): return 100",
        ["assert abs(add(1, 2) - 3) < 1e-6", "assert all([add(1, 2) == 3])", "assert len([add(1, 2)]) == 7"],
    ),
    "a hidden interpreter exit": ("import atexit, os\natexit.register(os._exit, 0)\nraise KeyboardInterrupt", _ADD),
    "forged verdicts": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'1' * 64)\n    except OSError: pass\n" + _ZERO,
        _ADD,
    ),
    "forged values": (
        _sent("""b'{"value": 3}'"""),
        ["assert add(1, 2) == 4", "assert add(5, 5) == 10"],
    ),
    "giant frames": (
        "import os, struct\nos.write(4, struct.pack('<I', 0xffffffff) + b'x' * 1000)\ndef add(a, b): return 0",
        _ADD,
    ),
    "deep frames": (
        _sent("b'[' * 200000"),
        _ADD,
    ),
    "malformed frames": (
        _sent("bytes(range(256))"),
        _ADD,
    ),
    "malformed values": (
        _sent("""b'{"value": {"complex": [{}, {}]}}'"""),
        _ADD,
    ),
    "deep values": ("x = []\nfor _ in range(100000): x = [x]\ndef add(a, b): return x", _ADD),
    "endless values": (
        "import itertools\nclass L(list):\n    __iter__ = lambda s: ('x' * size for size in itertools.count(100_000))\n"
        "def add(a, b): return L([1])",
        _ADD,
    ),
    "a crash": ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\ndef add(a, b): return f()", _ADD),
    "a segmentation fault": ("import ctypes\ndef add(a, b): return ctypes.string_at(0)", _ADD),
    "output that is expected elsewhere": ("print('3')\nprint('10')", _ADD),
    "a success that is printed": (
        "import os\nos.write(1, b'ok passed 1')\nos._exit(0)",
        {"inputs": [""], "outputs": ["42"]},
    ),
    "output before a failure": ("print(42, flush=True)\nraise SystemExit(1)", {"inputs": [""], "outputs": ["42"]}),
    "a flood": ("while True: print('42' * 1000)", {"inputs": [""], "outputs": ["42"]}),
    "no program": ("syntax error (", _ADD),
    "null bytes": ("\0", _ADD),
}

# What never ends by itself: the deadline does it.
ENDLESS: dict[str, str] = {
    "spinning": "while True: pass",
    "sleeping": "import time\ntime.sleep(600)",
    "ignoring signals": "import signal\nfor s in range(1, 64):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\n"
    "while True: pass",
    "threads": "import threading\nwait = lambda: threading.Event().wait()\nwhile True:\n"
    "    try: threading.Thread(target=wait).start()\n"
    "    except RuntimeError: pass",
    "waiting for input": "import os\nwhile True: os.read(0, 1)",
    "a pattern": "import re\nre.match('(a+)+$', 'a' * 64 + '!')",
}
