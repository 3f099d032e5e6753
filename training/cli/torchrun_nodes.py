"""torchrun's rendezvous for `duet run`: its elastic backends number the machines themselves, Duet
needs a number for each."""

from __future__ import annotations

import string
from collections.abc import Mapping

from training.config import flags
from training.config.resolve import PREFIX
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.host import hosts, platform_env, topology
from training.host.hosts import Host
from training.host.placement import LOOPBACK, LauncherOptions
from training.plan.cli_args import command
from training.plan.script_words import RUN, SEPARATOR, split

COUNTS = ("gpu", "cpu", "auto")  # in place of a number of processes
STATIC, ELASTIC = "static", "c10d"
LISTS = ("hosts", "hostfile")
_ADDRESS = ("master_addr", "master_port")


def check(backend: str, words: list[str], environ: Mapping[str, str]) -> None:
    """`backend`: torchrun's --rdzv-backend; `words`: those of launch_train.sh. Raises UserError for
    machines without a number, and for a backend that needs a server of its own."""
    if backend in ("", STATIC):
        return
    origin = "--nnodes" if "nnodes" in flags.parse(split(words)[0]).flags else f"{PREFIX}NNODES"
    found = _asked(words, environ)
    nodes = int(found["nnodes"]) if found["nnodes"].isdecimal() else 1
    alone = nodes == 1 or bool(found["hosts"] or found["hostfile"])
    numbered = alone or bool(found["node_rank"]) or _by_platform(found, nodes, environ)
    if backend != ELASTIC:
        # the endpoint is that server, no machine of the run
        words = _without(words, _ADDRESS)
        fixes = [command(RUN, words)] if alone else _commands(words, nodes, "", numbered=numbered)
        what = msg("cli.run.backend", backend=backend)
        raise UserError(Problem("run.backend", what, f"{STATIC}, {ELASTIC}", fixes))
    if not numbered:
        what = msg("cli.run.no_node_rank", backend=backend, nodes=nodes, origin=origin)
        allowed = msg("host.place.node_ranks", last=nodes - 1)
        fixes = _commands(words, nodes, found["master_addr"], numbered=False)
        raise UserError(Problem("nodes.no_node_rank", what, allowed, fixes, "node_rank"))


def ranks_variable(words: list[str], environ: Mapping[str, str], with_number: str) -> str:
    """The variable in which a platform gives torchrun the processes of this machine; '' if none
    counts. Raises UserError for any other text than a number or COUNTS. `with_number`: the command
    with a number."""
    text = platform_env.ranks_per_node(environ, _options(_asked(words, environ)))
    if not text:
        return ""
    if text not in COUNTS and not (text.isascii() and text.isdecimal() and int(text)):
        what = msg("cli.run.no_count", name=platform_env.RANKS, text=text)
        fixes = [f"export {platform_env.RANKS}=2", with_number]
        raise UserError(Problem("environment.rank_variable", what, msg("cli.run.counts"), fixes))
    return platform_env.RANKS


def slots(words: list[str], environ: Mapping[str, str]) -> int:
    """The most slots of a machine of --hosts or --hostfile; 0 without. The plan reports machines
    with fewer, and the problems of the list."""
    return max((host.slots for host in _machines(_options(_asked(words, environ)))), default=0)


def check_count(words: list[str], environ: Mapping[str, str]) -> None:
    """For a number of ranks that depends on the machine; `words`: with an example of it. Raises
    UserError if this machine, where it is counted, is not one of --hosts."""
    asked = _options(_asked(words, environ))
    machines = _machines(asked)
    if not machines or any(hosts.target(one.name, asked.ssh_args).is_here() for one in machines):
        return
    listed = hosts.written(Host(one.name, int(words[0])) for one in machines)
    fixes = [command(RUN, words), command(RUN, _without(words, LISTS)[1:], hosts=listed)]
    what = msg("cli.run.no_count_of_hosts", hosts=hosts.written(machines))
    raise UserError(Problem("ranks.of_hosts", what, msg("cli.run.count_of_hosts"), fixes))


def _machines(asked: LauncherOptions) -> list[Host]:
    return hosts.read(asked)[0] if hosts.given(asked) else []


def fewest(words: list[str], environ: Mapping[str, str]) -> int:
    """The machines that a platform lets torchrun continue with; 0 if it has to have all."""
    found = _asked(words, environ)
    return 0 if found["nnodes"] else platform_env.fewest_nodes(environ, _options(found))


def _asked(words: list[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The fields that place this machine, from the flags, else from DUET_ variables."""
    given = flags.parse(split(words)[0]).flags
    return {
        name: given[name][0] if name in given else environ.get(f"{PREFIX}{name.upper()}", "")
        for name in ("launcher", "nnodes", "node_rank", "master_addr", *LISTS, "ssh_args")
    }


def _options(found: Mapping[str, str]) -> LauncherOptions:
    return LauncherOptions(
        launcher=found["launcher"] or "auto",
        master_addr=found["master_addr"],
        hosts=found["hosts"],
        hostfile=found["hostfile"],
        ssh_args=found["ssh_args"],
    )


def _by_platform(found: Mapping[str, str], nodes: int, environ: Mapping[str, str]) -> bool:
    """Whether a platform numbers the machines; the plan reports variables that are invalid."""
    launcher, address = found["launcher"] or "auto", found["master_addr"] or LOOPBACK
    asked = LauncherOptions(launcher=launcher, nnodes=nodes, master_addr=address)
    try:
        return topology.find(environ, asked, starts_ranks=True).source != "flags"
    except UserError:
        return True


def _commands(words: list[str], nodes: int, address: str, *, numbered: bool) -> list[str]:
    """The commands of the first two machines, or of this one, and the one that starts all."""
    missing = {} if address else {"master_addr": "ADDRESS"}
    if numbered:
        each = [command(RUN, words, **missing)]
    else:
        first = msg("cli.run.on_first", address=address or "ADDRESS")
        more = nodes > 2
        second = msg("cli.run.on_others", last=nodes - 1) if more else msg("cli.run.on_second")
        each = [
            f"{command(RUN, words, node_rank=rank, **missing)}   # {where}"
            for rank, where in enumerate((first, second))
        ]
    if nodes > len(string.ascii_lowercase):
        return each
    names = ",".join(string.ascii_lowercase[:nodes])
    once = _without(words, ("nnodes", "node_rank", *_ADDRESS))
    return [*each, f"{command(RUN, once, hosts=names)}   # {msg('cli.run.on_all')}"]


def _without(words: list[str], names: tuple[str, ...]) -> list[str]:
    own, theirs = split(words)
    kept = [word for word in own if not word.startswith(tuple(f"--{name}=" for name in names))]
    return [*kept, SEPARATOR, *theirs] if theirs else kept
