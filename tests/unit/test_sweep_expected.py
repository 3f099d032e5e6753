"""The runs whose speed a sweep expects of its own."""

from __future__ import annotations

from tests.cases import each
from training.cli.sweep import expected


@each(
    ("name", "same"),
    [
        ("lr", True),
        ("weight_decay", True),
        ("G_optimizer_lr", True),
        ("num_frame", False),
        ("width", False),  # of a user's task
        ("depth", False),
    ],
)
def test_options_of_the_optimizer_do_not_change_the_time_of_a_step(name: str, same: bool) -> None:
    first, second = (expected._key({"task": "x", name: value}, 2) for value in (1, 2))
    assert (first == second) == same
