"""The resource report: its lines, and the table."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Final, cast

from training.core import codes
from training.core.cells import cells, pad
from training.core.check_names import check_title
from training.core.errors import Problem
from training.core.messages import msg
from training.core.project import typed
from training.core.units import plural

if TYPE_CHECKING:
    from training.core.contracts.kinds import CheckStatus
    from training.core.contracts.preflight import CheckRecord

OK: Final = "ok"
WARNING: Final = "warning"
ERROR: Final = "error"
# Names of the checks that do not concern the machine.
DATA, WANDB = "data", "W&B"
# Names of those whose result does not depend on the GPU.
OF_MACHINE = ("host memory", "log folder", "run", "run folder", "torch")
SEVERITY = {OK: 0, WARNING: 1, ERROR: 2}
MARKS = {
    OK: msg("plan.check.ok"),
    WARNING: msg("plan.check.warning"),
    ERROR: msg("plan.check.error"),
}


@dataclass(frozen=True)
class Check:
    """One line of the resource report."""

    name: str
    status: CheckStatus
    text: str
    fixes: list[str] = field(default_factory=list)
    # the text as data; only in the check of versions
    facts: dict[str, str | None] = field(default_factory=dict)

    @property
    def line(self) -> str:
        """Title and text in one."""
        return f"{check_title(self.name)}: {self.text}"

    @property
    def code(self) -> str:
        """Machine-readable code, without the number of a GPU."""
        return f"{codes.CHECKS}.{codes.of_check(self.name)}"

    def record(self) -> CheckRecord:
        record = {"code": self.code} | asdict(self)
        del record["facts"]
        return cast("CheckRecord", record)

    def problem(self) -> Problem:
        return Problem(self.code, self.text, "", self.fixes)


def with_lines(text: str, lines: Iterable[str]) -> str:
    """With evidence below it."""
    return "\n".join([text, *(f"    │ {line}" for line in lines)])


def worst(checks: Iterable[Check]) -> CheckStatus:
    return max((c.status for c in checks), key=SEVERITY.__getitem__, default=OK)


def unusable(checks: Iterable[Check]) -> bool:
    """Whether ranks cannot use these GPUs at all, so that testing them is useless."""
    names = ("gpus", "gpu_parts", "torch", "torch_kernels")
    return any(c.status == ERROR and codes.of_check(c.name) in names for c in checks)


def table(records: list[CheckRecord]) -> str:
    """The resource report: one line per check, below failed ones their fixes, each fix once."""
    titles = [check_title(r["name"]) for r in records]
    width = max(map(cells, titles))
    shown: set[str] = set()
    lines = []
    for r, name in zip(records, titles, strict=True):
        lines.append(f"  {MARKS[r['status']]}  {pad(name, width)}  {r['text']}\n")
        fixes = dict.fromkeys(r["fixes"]) if r["status"] != OK else {}
        for number, fix in enumerate(one for one in fixes if one not in shown):
            word = msg("plan.check.or") if number else msg("plan.check.try")
            lines.append(f"           {'':<{width}}  {word}{typed(fix)}\n")
        shown |= fixes.keys()
    return "".join(lines)


def count(checks: list[Check]) -> str:
    """'14 checks: 12 ok, 2 warnings'."""
    ok, warnings, errors = (sum(c.status == status for c in checks) for status in SEVERITY)
    shown = [
        *([msg("plan.check.count_ok", ok=ok)] if ok else []),
        *([plural(warnings, "warning")] if warnings else []),
        *([plural(errors, "error")] if errors else []),
    ]
    checked = plural(len(checks), "check")
    return msg("plan.check.count", checks=checked, shown=msg("plan.word.comma").join(shown))
