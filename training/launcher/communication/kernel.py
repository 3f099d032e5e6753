"""What the kernel has logged about a failed communication test."""

from __future__ import annotations

from training.core.plain_text import one_line
from training.core.redact import masked
from training.diagnose import kernel_lines
from training.host import gpu_processes, kernel_quotes
from training.host.kernel_log import KernelLog
from training.host.kernel_quotes import SHOWN, KernelQuotes
from training.launcher.communication.analysis import CommunicationFinding
from training.launcher.communication.result import KILLS, by_copies, gpu_hangs
from training.launcher.communication.runner import CommunicationOutcome


def consult(
    outcome: CommunicationOutcome, finding: CommunicationFinding, log: KernelLog, backend: str
) -> KernelQuotes | None:
    """None: the kernel has nothing to do with it. `log`: opened before the start."""
    if finding.killed:
        return _kills(outcome, log)
    if gpu_hangs(finding):
        return kernel_quotes.of_driver()
    if by_copies(finding, backend):
        return kernel_quotes.of_iommu()
    return None


def _kills(outcome: CommunicationOutcome, log: KernelLog) -> KernelQuotes:
    read = log.read()
    if not (gpu_processes.own_pids() and read.source and read.whole):
        return KernelQuotes(command=KILLS)
    lines = kernel_lines.about(read.lines, outcome.pids, [])
    return KernelQuotes(tuple(one_line(masked(line.text)) for line in lines[:SHOWN]))
