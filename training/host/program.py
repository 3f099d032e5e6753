"""Common main function of all `python -m training.X`: help, closed pipes, Ctrl-C and missing
packages."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from training.core import log, messages, project
from training.core.errors import Exit, Problem, UserError
from training.core.messages import msg

# A thread in which a library calls Python: up to 3.13, Python ends it with the interpreter by an
# exception that such a library turns into SIGABRT.
NATIVE = "native"
NO_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def run(
    main: Callable[[list[str]], int],
    doc: str | None,
    *,
    internal: bool = False,
    needs: tuple[str, ...] = (),
    pipe: bool = True,
    pages: bool = False,
) -> int:
    """The exit status of main(arguments). `internal`: called by the launch scripts, with `doc` as
    its --help. `needs`: required packages. `pipe`: a closed pipe ends the process silently; False
    if it must continue. `pages`: it writes files that stay in the language that was asked for, as
    do the runs of the launch scripts."""
    argv = sys.argv[1:]
    replace_unknown()
    if not (internal or pages):
        use_readable_language()
    if pipe:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `… | head` ends it silently
    helps = any(word in ("-h", "--help") for word in (argv[:1] if internal else argv))
    if internal and (helps or not argv):
        print(project.typed((doc or "").strip()))
        return int(Exit.DONE if argv else Exit.CONFIG)
    try:
        if not internal:
            require_output()
        require(() if helps else needs)
        code = int(main(argv))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except UserError as error:
        log.report(error)
        return int(error.code)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except BrokenPipeError:
        if not pipe:
            raise
        discard_output()
        return int(Exit.DONE)
    except OSError as error:
        return unwritable(error)


def leave(status: int) -> NoReturn:
    """End this process: at once while a thread of the name NATIVE runs."""
    if any(thread.name == NATIVE for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, OSError):  # it is closed
                stream.flush()
        os._exit(status)
    sys.exit(status)


def replace_unknown() -> None:
    """Print characters that the encoding of the output lacks as '?', before any output."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def shows_chinese() -> bool:
    """Whether the encoding of the standard output has the letters of Chinese texts and of tables;
    those of Taiwan, Japan and Korea have only a part of the simplified ones."""
    return shows("训练复运·–…→≥×│▁█")


def shows(text: str) -> bool:
    """Whether the encoding of the standard output has these characters."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def use_readable_language() -> None:
    """English where Chinese would be question marks."""
    if not shows_chinese():
        os.environ[messages.VARIABLE] = "en"


def answer(path: os.PathLike[str]) -> None:
    """Print a path for the launch script, byte for byte: it need not be text in the encoding of the
    output."""
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(path) + b"\n")
    sys.stdout.flush()


def require_output() -> None:
    """Raises UserError if the standard output is closed."""
    if sys.stdout is None:
        what, allowed = msg("host.program.output_closed"), msg("host.program.output_allowed")
        raise UserError(Problem("output.closed", what, allowed))


def require_folder() -> None:
    """Raises UserError if the current directory was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        what = msg("host.program.no_folder", folder=os.environ.get("PWD", "."))
        raise UserError(Problem("folder.removed", what, "", ["cd /another/folder"])) from None


def unwritable(error: OSError) -> int:
    """Exit status after output that cannot be written; raises any other error. What is written
    elsewhere has a file name."""
    if error.errno not in NO_OUTPUT or error.filename is not None:
        raise error
    log.error(msg("host.program.unwritable", error=error.strerror))
    discard_output()
    return int(Exit.RESOURCES)


def discard_output() -> None:
    """For the flush when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def require(names: tuple[str, ...], said_by_another: bool = False) -> None:
    """Raises UserError (exit 3) if this interpreter lacks one of these packages."""
    if not names:
        return
    from training.host import packages

    lacks = packages.lacking(names)
    if not lacks:
        return
    own = project.ROOT / ".venv"
    ready = own.joinpath("duet.stamp").exists() and sys.prefix != str(own)
    fixes = (
        [msg("host.package.activate", script=shlex.quote(f"{own}/bin/activate"))] if ready else []
    )
    text = msg("host.package.lacks", executable=sys.executable, lacks=", ".join(lacks))
    raise UserError(
        Problem(
            "package.missing",
            text,
            msg("host.package.environment"),
            [*fixes, packages.install(lacks)],
        ),
        Exit.RESOURCES,
        said_by_another=said_by_another,
    )
