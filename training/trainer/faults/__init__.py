"""What `--inject` can do to a rank: each fault one function, with its description as docstring. They run inside the rank, on its main
thread, at a phase that training.inject has waited for; the training knows nothing of them."""

from training.faults import data, stuck  # noqa: F401 – they fill the table
from training.faults.table import CREATING, MAIN, TABLE, Fault, Here, table

__all__ = ["CREATING", "MAIN", "TABLE", "Fault", "Here", "table"]
