"""What `--inject` can do to a rank: each fault one function, with its description as docstring. They run inside the rank, on its main
thread, at a phase that training.config.fault_spec has waited for; the training knows nothing of them."""

from training.config.fault_table import CREATING, MAIN, TABLE, Fault, Here, table
from training.trainer.faults import data, stuck  # noqa: F401 – they fill the table

__all__ = ["CREATING", "MAIN", "TABLE", "Fault", "Here", "table"]
