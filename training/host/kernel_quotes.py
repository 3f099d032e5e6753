"""What the kernel has logged about a device since the boot, for a report; where that may not be
read, the command that shows it."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass

from training.core.messages import msg
from training.core.plain_text import one_line
from training.core.redact import masked
from training.host.kernel_log import KernelLog

SHOWN = 3  # the newest
FAULTS_OF_GPUS = re.compile(r"NVRM:.*(?:\bXid\b|fallen off the bus)")
OF_DRIVER = re.compile(r"NVRM: (?!loading )")
# without the lines that each device has
OF_IOMMU = re.compile(r"^(?!.*(?:Adding to iommu group|ACPI:)).*(?:iommu|DMAR|AMD-Vi)", re.I)
OF_PCIE = re.compile(r"PCIe Bus Error", re.I)


@dataclass(frozen=True)
class KernelQuotes:
    """`lines`: oldest first; `command`: shows them, "" if the log was read."""

    lines: tuple[str, ...] = ()
    command: str = ""

    @property
    def commands(self) -> list[str]:
        return [self.command] if self.command else []

    @property
    def newest(self) -> str:
        """One line: the newest message, that there is none, or the command."""
        if self.command:
            return self.command
        if not self.lines:
            return msg("host.kernel_log.nothing")
        return msg("host.kernel_log.newest", text=self.lines[-1])


def quotes(
    pattern: re.Pattern[str],
    command: str,
    *,
    about: Collection[str] = (),
    without: Collection[str] = (),
) -> KernelQuotes:
    """`about`: addresses, one of which each message has; () for any; `without`: those that none
    has."""
    read = KernelLog(since_boot=True).read()
    if not read.source:
        return KernelQuotes(command=command)
    found = [
        one_line(masked(line))
        for line in dict.fromkeys(read.lines)
        if pattern.search(line)
        and (not about or any(address in line for address in about))
        and not any(address in line for address in without)
    ]
    return KernelQuotes(tuple(found[-SHOWN:]))


@functools.cache  # the monitor asks again and again
def of_silent_gpus(working: tuple[str, ...]) -> KernelQuotes:
    """About GPUs that the driver counts but that do not answer. `working`: addresses of others."""
    # the driver omits the function
    others = [address.rpartition(".")[0] for address in working]
    return quotes(FAULTS_OF_GPUS, "sudo dmesg | grep -i xid", without=others)


def of_driver() -> KernelQuotes:
    return quotes(OF_DRIVER, "sudo dmesg | grep -i nvrm")


def of_iommu() -> KernelQuotes:
    return quotes(OF_IOMMU, "sudo dmesg | grep -i -e IOMMU -e DMAR -e AMD-Vi")


def of_link(addresses: Collection[str]) -> KernelQuotes:
    """PCIe errors of a GPU and the bridges above it."""
    return quotes(OF_PCIE, "sudo dmesg | grep -i 'pcie bus error'", about=addresses)
