"""What Linux reports about a process from outside: state, CPU time, I/O, children. Standard library
only."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from training.host import proc_memory
from training.host import process as host_process
from training.host.process import COMPILERS

_TICKS = os.sysconf("SC_CLK_TCK")
CLOCK_SLACK_S = (
    60.0  # a start time is counted from the boot time, which moves when the clock is set
)
# Python helper processes, which load no data.
_HELPERS = ("multiprocessing.resource_tracker", *COMPILERS)
# also in the command line of the workers that it forks
FORKSERVER = "multiprocessing.forkserver"


@dataclass(frozen=True)
class Process:
    """One reading of /proc/<pid>. `state`, `main_cpu_s` and `waits_in` are those of the main
    thread, or of the thread that was asked for."""

    pid: int
    parent: int
    # R running, S sleeping, D uninterruptible, T stopped, t traced, Z dead and not yet reaped, X
    # gone
    state: str
    command: str
    cpu_s: float  # user + system, all threads
    main_cpu_s: float  # the same, of the main thread
    io_bytes: int | None  # by read and write; None: not permitted. Sockets: sockets.py
    waits_in: str  # kernel function, "" when unknown or running
    faults: int = 0  # page faults: new pages, or pages of a mapped file

    @property
    def exits(self) -> bool:
        """Has it exited, or given back its memory, and with it the command line?"""
        return self.state in "ZX" or self.command.startswith("[")


def read_process(pid: int, thread: int = 0) -> Process | None:
    """None if there is no such process. `thread`: 0 for its main thread."""
    whole = _stat(f"/proc/{pid}/stat")
    if whole is None:
        return None
    main = _stat(f"/proc/{pid}/task/{thread or pid}/stat") or whole
    waits_in = read_text(f"/proc/{pid}/task/{thread or pid}/wchan")
    return Process(
        pid=pid,
        parent=int(whole[2]),
        state=whole[1],
        command=command(pid) or f"[{whole[0]}]",
        cpu_s=_cpu(whole),
        main_cpu_s=_cpu(main),
        io_bytes=_io(pid),
        waits_in="" if waits_in == "0" else waits_in,
        faults=int(whole[8]) + int(whole[10]),
    )


def lives(pid: int) -> bool:
    process = read_process(pid)
    return process is not None and process.state not in "ZX"


def command(pid: int) -> str:
    """Its command line, or its name if it is stuck with the lock of its memory; "" when it has
    exited or is exiting, or of a kernel thread."""
    try:
        return host_process.command(pid)
    except OSError:
        return ""


def program(pid: int) -> str:
    """Name of the file or module that its Python executes; "" for -c and standard input."""
    words = iter(_memory(pid, "cmdline").decode("utf-8", "replace").split("\0")[1:-1])
    for word in words:
        if not word.startswith("-"):
            return os.path.basename(word.rstrip("/"))
        letters = "" if word.startswith("--") else word[1:]
        for at, letter in enumerate(letters, 1):
            if letter in "cmWX":
                value = letters[at:] or next(words, "")
                if letter in "cm":
                    return value if letter == "m" else ""
                break
    return ""


def scripts(pid: int) -> list[str]:
    """Python files in its command line, and that of `-m MODULE` below its working directory; named
    as Python names them in a stack."""
    words = _memory(pid, "cmdline").decode("utf-8", "replace").split("\0")
    try:
        folder = Path(f"/proc/{pid}/cwd").readlink()
    except OSError:
        return []
    modules = (folder.joinpath(*b.split(".")) for a, b in pairwise(words) if a == "-m")
    of_modules = (f for m in modules for f in (m.with_suffix(".py"), m / "__main__.py"))
    named = [os.path.join(folder, word) for word in words if word.endswith(".py")]  # /x/./train.py
    return [*named, *(str(file) for file in of_modules if file.is_file())]


def name(pid: int) -> str:
    """Name of its main thread, which a program may change; "" when it has exited."""
    return read_text(f"/proc/{pid}/comm")


def tracer(pid: int) -> int:
    """The debugger of this process; 0 without one, or where it has no PID in this container."""
    found = re.search(r"^TracerPid:\s*(\d+)$", read_text(f"/proc/{pid}/status"), re.MULTILINE)
    return int(found[1]) if found else 0


def threads(pid: int) -> set[str]:
    """Names of its threads."""
    return {read_text(f"/proc/{pid}/task/{thread}/comm") for thread in threads_of(pid)}


def began(pid: int) -> int:
    """When it was started, in clock ticks since boot; 0 when it has exited."""
    fields = _stat(f"/proc/{pid}/stat")
    return int(fields[20]) if fields else 0


def begun_by(pid: int, seen: float) -> bool:
    """Was it started before `seen` (unix s), as far as the clock shows?"""
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began(pid) / _TICKS
    return time.time() - age_s <= seen + CLOCK_SLACK_S


def exit_status(pid: int) -> int | None:
    """Wait status of a process that has exited; None when its parent has waited for it, or while it
    runs."""
    fields = _stat(f"/proc/{pid}/stat")
    return int(fields[50]) if fields and fields[1] == "Z" else None


def tree() -> dict[int, list[int]]:
    """Parent → children, of all processes of this machine: for lookups of several families."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (fields := _stat(f"/proc/{name}/stat")):
            children.setdefault(int(fields[2]), []).append(int(name))
    return children


def family(pid: int, children: dict[int, list[int]] | None = None) -> list[int]:
    """All descendants, parents before their children."""
    children = tree() if children is None else children
    found = sorted(children.get(pid, []))
    for child in found:  # grows during the iteration
        found += sorted(children.get(child, []))
    return found


def workers(pid: int) -> list[int]:
    """Descendants that run Python: data-loader workers (a forked one has its parent's command line)
    and others."""
    own = command(pid)
    return [child for child in family(pid) if is_python(child, own)]


def turns(pid: int, thread: int = 0) -> int:
    """How often the computing threads (the main thread, torch's own for backward on a GPU, and this
    one) have gone to sleep: constant in a thread that waits for something that never arrives."""
    count = 0
    for one in threads_of(pid):
        if int(one) in (pid, thread) or read_text(f"/proc/{pid}/task/{one}/comm").startswith(
            "pt_autograd"
        ):
            count += sleeps(pid, int(one))
    return count


def sleeps(pid: int, thread: int = 0) -> int:
    """How often this thread (0: the main one) has gone to sleep."""
    status = read_text(f"/proc/{pid}/task/{thread or pid}/status")
    found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)
    return int(found[1]) if found else 0


def queued(pid: int) -> dict[int, float]:
    """Thread → seconds ready to run without a core, so far; {} where the kernel does not count
    that."""
    found: dict[int, float] = {}
    for thread in threads_of(pid):
        fields = read_text(f"/proc/{pid}/task/{thread}/schedstat").split()
        if len(fields) == 3:
            found[int(thread)] = int(fields[1]) / 1e9
    return found


def written_back() -> int:
    """Bytes that the whole machine has written to its disks, since an arbitrary time."""
    found = re.search(r"^nr_written (\d+)", read_text("/proc/vmstat"), re.MULTILINE)
    return int(found[1]) * os.sysconf("SC_PAGE_SIZE") if found else 0


def lock_holders() -> dict[int, int]:
    """Process that waits for the lock of a file → the one that holds it."""
    holders: dict[str, int] = {}
    found: dict[int, int] = {}
    for line in read_text("/proc/locks").splitlines():
        number, *words = line.split()
        waits = words[0] == "->"
        pid = int(words[waits + 3])
        if waits and number in holders:
            found[pid] = holders[number]
        elif not waits:
            holders[number] = pid
    return found


def locked_file(pid: int) -> str:
    """The file for whose lock this process waits; "" unknown."""
    locks = (line.split() for line in read_text("/proc/locks").splitlines())
    inodes = {int(w[6].split(":")[2]) for w in locks if w[1] == "->" and int(w[5]) == pid}
    for name in open_files(pid) if inodes else ():
        with contextlib.suppress(OSError):  # removed, or no file
            if Path(name).stat().st_ino in inodes:
                return name
    return ""


def is_closed(pid: int) -> bool:
    """Does it exist, but is it another user's, whose memory and environment cannot be read?"""
    # not by maps, whose mode allows everyone to read
    return os.path.exists(f"/proc/{pid}") and not os.access(f"/proc/{pid}/environ", os.R_OK)


def environment(pid: int) -> dict[str, str]:
    """Environment of a process at its start; {} without permission."""
    words = _memory(pid, "environ").split(b"\0")
    pairs = (word.decode("utf-8", "replace").partition("=") for word in words)
    return {name: value for name, equals, value in pairs if equals}


def uses_gpu(pid: int) -> bool:
    """Has it an NVIDIA device open, or the GPU of WSL? False also without permission."""
    return any(re.fullmatch(r"/dev/(nvidia\d+|dxg)", target) for target in open_files(pid))


def open_files(pid: int) -> set[str]:
    """Targets of its descriptors; `socket:[inode]` among them."""
    found: set[str] = set()
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return found
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(str(Path(folder, name).readlink()))
    return found


def maps(pid: int, text: str) -> bool:
    """Is this text in the list of the files that it has mapped, one a line?"""
    return os.fsencode(text) in _memory(pid, "maps")


def is_python(pid: int, parents_command: str = "") -> bool:
    """Does it run Python other than a helper of multiprocessing or torch.compile?"""
    words = command(pid)
    if not words or any(helper in words for helper in _HELPERS) or is_forkserver(pid, words):
        return False
    try:
        program = Path(f"/proc/{pid}/exe").readlink()
    except OSError:  # another user's, or exited
        first = _memory(pid, "cmdline").partition(b"\0")[0]
        program = Path(os.fsdecode(first) or words)
    return program.name.startswith("python") or words == parents_command


def is_forkserver(pid: int, words: str) -> bool:
    """Is it the server, which only forks, rather than a process that it has forked? `words`: its
    command line."""
    if FORKSERVER not in words:
        return False
    fields = _stat(f"/proc/{pid}/stat")
    return fields is None or FORKSERVER not in command(int(fields[2]))


def threads_of(pid: int) -> list[str]:
    """Their numbers; [] when it has exited."""
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _stat(path: str) -> list[str] | None:
    """[name, state, parent, …]: the fields of proc(5) from the second on. The name may contain
    spaces and parentheses."""
    text = read_text(path)
    start, end = text.find("("), text.rfind(")")
    return [text[start + 1 : end], *text[end + 2 :].split()] if end > 0 else None


def _cpu(fields: list[str]) -> float:
    return (int(fields[12]) + int(fields[13])) / _TICKS


def _io(pid: int) -> int | None:
    facts = dict(
        line.split(": ", 1) for line in read_text(f"/proc/{pid}/io").splitlines() if ": " in line
    )
    return (
        int(facts["rchar"]) + int(facts["wchar"]) if "rchar" in facts and "wchar" in facts else None
    )


def read_text(path: str) -> str:
    return _bytes(path).decode("utf-8", "replace").strip()


def _memory(pid: int, name: str) -> bytes:
    """As _bytes(); b"" also of a process that is stuck."""
    try:
        return proc_memory.read(pid, name)
    except OSError:
        return b""


def _bytes(path: str) -> bytes:
    """b"" when it has exited, or without permission: the caller distinguishes these by a file that
    all users may read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
