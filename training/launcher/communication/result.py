"""Result of a communication test as text: line of the resource report, evidence, fixes."""

from __future__ import annotations

from dataclasses import dataclass, field

from training.core.messages import msg
from training.host.gpus import VISIBLE
from training.host.kernel_quotes import KernelQuotes
from training.host.p2p_cache import P2P, P2PVerdict
from training.launcher.communication import analysis, stages
from training.launcher.communication.analysis import CommunicationFinding
from training.plan import preflight
from training.plan.communication import command

NAME = "communication"
INTERFACE = "GLOO_SOCKET_IFNAME"
KILLS = "sudo dmesg | tail"
# errors that peer-to-peer copies may raise (training/diagnose/signatures)
OF_P2P = ("nccl.p2p", "gpu.cuda.peer", "gpu.address.illegal")


def p2p_may_help(finding: CommunicationFinding) -> bool:
    """Could the failure be one of peer-to-peer copies?"""
    return finding.kind == analysis.WRONG or (
        finding.kind == analysis.HANG and stages.is_communication(finding.stage)
    )


def worth_without_p2p(finding: CommunicationFinding) -> bool:
    """Is it worth a test without peer-to-peer copies? Also after an error that they may raise. Not
    after others, such as a lack of memory or processes: a second attempt that succeeds by chance
    would be taken for a proof."""
    raised = finding.signature in OF_P2P
    return p2p_may_help(finding) or (raised and stages.is_communication(finding.stage))


def hardware(iommu: KernelQuotes) -> list[str]:
    """Why GPUs of one machine cannot copy to each other, and how to check (NCCL's manual,
    'Troubleshooting')."""
    logged = iommu.lines or iommu.commands
    return [
        msg("launcher.communication.fix.acs"),
        *([msg("launcher.communication.fix.iommu", kernel=iommu.newest)] if logged else []),
        msg("launcher.communication.fix.p2p"),
    ]


def gpu_hangs(finding: CommunicationFinding) -> bool:
    """Does the driver of a GPU not answer?"""
    return finding.kind == analysis.HANG and finding.stage == stages.GPU


@dataclass(frozen=True)
class AllReduceTimes:
    """Times of an all_reduce, of the slowest rank."""

    size_bytes: int
    small_ms: float
    algorithm_gb_per_s: float  # size / time
    # × 2(n-1)/n, as in nccl-tests: comparable with the hardware for any number of ranks
    bus_gb_per_s: float


@dataclass(frozen=True)
class CommunicationResult:
    """`finding` is None for a single rank, which communicates with none."""

    ranks: int
    device: str
    backend: str
    finding: CommunicationFinding | None
    figures: AllReduceTimes | None = None
    first: CommunicationFinding | None = (
        None  # of the first attempt, with peer-to-peer copies, when a second one followed
    )
    # of the last attempt: relevant variables of the user, and those that were set
    variables: dict[str, str] = field(default_factory=dict)
    note: str = ""  # whether the verdict was remembered
    seconds: float = 0.0
    verdict: P2PVerdict | None = None  # of GPUs that can communicate
    kernel: KernelQuotes = field(default_factory=KernelQuotes)  # about a failure

    @property
    def ok(self) -> bool:
        return self.finding is None or self.finding.kind == analysis.OK

    @property
    def again(self) -> str:
        """Command of this test alone, on the same GPUs."""
        return command(self.ranks, self.device, self.variables.get(VISIBLE, ""))

    def checks(self) -> list[preflight.Check]:
        """Lines of the resource report."""
        if self.finding is None:
            return [preflight.Check(NAME, preflight.OK, msg("launcher.communication.one_rank"))]
        if not self.ok:
            text, first = self.finding.text, self.first
            alike = first and first.kind == self.finding.kind and p2p_may_help(self.finding)
            if first and (alike or first.text == text):
                text = msg("launcher.communication.the_same", text=text, variable=P2P)
            elif first:
                text = msg(
                    "launcher.communication.both_fail",
                    with_them=first.text,
                    variable=P2P,
                    without=text,
                )
            quoted = () if by_copies(self.finding, self.backend) else self.kernel.lines
            text = preflight.with_lines(text, [*self.finding.lines, *quoted])
            return [preflight.Check(NAME, preflight.ERROR, text, self._fixes(self.finding))]
        text, note = self._measured(), self.note
        if self.backend == "nccl" and self.variables.get(P2P) == "1" and not self.first:
            note = msg("launcher.communication.without_p2p", variable=P2P)
        if note:
            text = msg("launcher.communication.noted", text=text, note=note)
        if not self.first:
            return [preflight.Check(NAME, preflight.OK, text)]
        text = msg(
            "launcher.communication.only_without",
            variable=P2P,
            with_them=self.first.text,
            without=text,
        )
        fixes = [f"export {P2P}=1", *hardware(self.kernel)]
        return [preflight.Check(NAME, preflight.WARNING, text, fixes)]

    def _measured(self) -> str:
        figures = self.figures
        assert figures, "a successful test has measured"
        bus = (
            msg("launcher.communication.bus", rate=_short(figures.bus_gb_per_s))
            if self.ranks > 2
            else ""
        )
        return msg(
            "launcher.communication.measured",
            size=stages.size(figures.size_bytes),
            ranks=self.ranks,
            rate=_short(figures.algorithm_gb_per_s),
            bus=bus,
            small_size=stages.size(stages.SMALL_BYTES),
            small_ms=_short(figures.small_ms),
        )

    def _fixes(self, finding: CommunicationFinding) -> list[str]:
        again = self.again
        if finding.killed:
            return [self._killed(), again]
        if finding.kind == analysis.FAILED and not finding.guilty:
            return [f"TMPDIR=/another/folder {again}"]
        if gpu_hangs(finding):
            return [msg("launcher.communication.fix.driver"), *self.kernel.commands, again]
        if finding.kind == analysis.SLOW or (
            finding.kind == analysis.HANG and not stages.is_communication(finding.stage)
        ):
            return [
                msg("launcher.communication.fix.limit", again=again, limit_s=3 * stages.LIMIT_S)
            ]
        if finding.kind == analysis.STOPPED or not stages.is_communication(finding.stage):
            return [again]
        if by_copies(finding, self.backend):
            untried = not self.first and self.variables.get(P2P) != "1"
            without = [f"export {P2P}=1"] if untried and worth_without_p2p(finding) else []
            return [
                *without,
                msg("launcher.communication.fix.debug", again=again),
                *hardware(self.kernel),
            ]
        if finding.kind == analysis.WRONG:
            return [msg("launcher.communication.fix.memory", again=again)]
        own = self.variables.get(INTERFACE, "lo")
        other = (
            [msg("launcher.communication.fix.interface", variable=INTERFACE, own=own)]
            if own != "lo"
            else []
        )
        unmet = finding.kind == analysis.HANG or finding.stage == stages.RENDEZVOUS
        loopback = [msg("launcher.communication.fix.loopback")] if unmet else []
        return [*other, *loopback, f"TORCH_CPP_LOG_LEVEL=INFO {again}"]

    def _killed(self) -> str:
        if self.kernel.command:
            return msg("launcher.communication.fix.oom", command=self.kernel.command)
        if self.kernel.lines:
            return msg("launcher.communication.fix.memory_limits")
        return msg("launcher.communication.fix.not_oom")


def by_copies(finding: CommunicationFinding, backend: str) -> bool:
    """Whether copies between GPUs are to be checked; the kernel's messages are about these then."""
    return backend == "nccl" and stages.is_communication(finding.stage)


def _short(value: float) -> str:
    """Two significant digits; all digits of larger numbers."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"
