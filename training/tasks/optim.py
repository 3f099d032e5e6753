"""Optimizers as used by the trainer, and the learning-rate schedule as a function of the step."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from training.config.schema import Config
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.core.units import plural
from training.tasks.collectives import gather_trees

# Of optimizers with the attribute `momentum_follows_step` (Muon): at the first step and from step
# MOMENTUM_STEPS.
MOMENTUM = (0.85, 0.95)
MOMENTUM_STEPS = 300
SCHEDULED = ("lr", "initial_lr")
BUILT = "built"  # in a saved state: the settings as built
SHOWN = 3  # parameters in a message
# settings → the part of the state without which torch's optimizers fail once they are on
NEEDED = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}

# torch's name for: reads found_inf and skips the step on the device
ON_DEVICE = "_step_supports_amp_scaling"

Group = dict[str, Any]  # torch parameter group


class Optimizers:
    """Several optimizers as one. Learning rates and momentum are functions of the step, so they are
    not saved."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        self.parts = parts
        self._untrained: list[Parameter] = []
        self._built: list[list[Group]] = []  # settings of each group before the first step
        self._gathered: dict[int, Group] = {}  # states that ranks share, until they are saved
        for group in self.param_groups:
            # a number of numpy would make the checkpoints unreadable
            group["initial_lr"] = (
                group["lr"] if isinstance(group["lr"], Tensor) else float(group["lr"])
            )
        # Read once: reading a rate on a GPU waits for it.
        self._peak = float(self.param_groups[0]["lr"])
        self._note_settings()

    @property
    def param_groups(self) -> list[Group]:
        return [group for part in self.parts for group in part.param_groups]

    def trained(self, model: Module) -> list[Parameter]:
        """The weights of `model` that the optimizers change, in its order. From now on, gradients
        of the others are discarded, which autograd would add up over the whole training. Raises
        UserError if the optimizers change anything else."""
        own = {id(one): one for group in self.param_groups for one in group["params"]}
        weights = list(model.parameters())
        inside = {id(weight) for weight in weights}
        outside = [w for key, w in own.items() if key not in inside and w.requires_grad]
        if outside:
            shapes = ", ".join(str(tuple(weight.shape)) for weight in outside[:SHOWN])
            what = msg(
                "tasks.optim.outside",
                parameters=plural(len(outside), "parameter"),
                shapes=shapes + (", …" if len(outside) > SHOWN else ""),
            )
            raise UserError(Problem("task.optimizer", what, msg("tasks.optim.inside")))
        self._untrained = [weight for weight in weights if id(weight) not in own]
        return [weight for weight in weights if id(weight) in own]

    def schedule(self, step: int, share: float) -> float:
        """Set the rates for step `step` (0-based) to `share` of their peak. Returns the first
        group's rate, which is recorded."""
        done = min(1.0, step / MOMENTUM_STEPS)
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = group["initial_lr"] * float(share)
                if getattr(part, "momentum_follows_step", False):
                    group["momentum"] = MOMENTUM[0] + (MOMENTUM[1] - MOMENTUM[0]) * done
        return self._peak * float(share)

    def skip_on_device(self) -> None:
        """Before the first step or load: Adam and AdamW step in one kernel, which can skip, unless
        the task has chosen another way."""
        for part in self.parts:
            if type(part) in (torch.optim.Adam, torch.optim.AdamW) and all(
                group["fused"] is group["foreach"] is None and not group["differentiable"]
                for group in part.param_groups
            ):
                for group in part.param_groups:
                    group["fused"] = True
                setattr(part, ON_DEVICE, True)
        self._note_settings()

    def _note_settings(self) -> None:
        self._built = [[_settings(group) for group in part.param_groups] for part in self.parts]

    def step(self, overflow: Tensor | None = None) -> None:
        """Change nothing, neither weights nor state, if `overflow` is 1.0."""
        for part in self.parts:
            if overflow is None:
                part.step()
            else:
                _step_unless(overflow, part)

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)
        for weight in self._untrained:
            weight.grad = None

    def gather(self) -> None:
        """Collect the state of all ranks on rank 0 for state_dict(). A collective."""
        for part in self.parts:
            if hasattr(part, "gather"):
                part.gather()
            elif hasattr(part, "consolidate_state_dict"):  # torch's ZeroRedundancyOptimizer
                self._gathered[id(part)] = _gathered(part)

    def state_dict(self) -> list[Group]:
        """Moments of all parameters, the same for any number of ranks, and the settings, now and as
        built. On rank 0, after gather()."""
        return [
            _interned({**self._state(part), BUILT: built})
            for part, built in zip(self.parts, self._built, strict=True)
        ]

    def _state(self, part: torch.optim.Optimizer) -> Group:
        shared = self._gathered.pop(id(part), None)
        if shared is None:
            return part.state_dict()
        return torch.optim.Optimizer.state_dict(part) | {"state": shared}

    def fits(self, states: list[Group]) -> bool:
        """Whether these states, of optimizers of the same classes, can be those of the parameters
        here, and have all that their settings need. load_state_dict() and the first step would fail
        with others."""
        return len(states) == len(self.parts) and all(map(_fits, self.parts, states))

    def load_state_dict(self, states: list[Group]) -> None:
        """Load moments, and settings in which an optimizer keeps its progress (Prodigy's `d`, the
        counters of schedule-free ones). A setting comes from the configuration where a resumed run
        has changed it, such as rates and decay; whether a step is one kernel, from the
        precision."""
        for part, state, built in zip(self.parts, states, self._built, strict=True):
            saved, before = state["param_groups"], state.get(BUILT)
            groups = [
                old | _changed(own, old, then, now)
                for own, old, then, now in zip(
                    map(_settings, part.param_groups),
                    saved,
                    # a checkpoint of an earlier version
                    [None] * len(saved) if before is None else before,
                    built,
                    strict=True,
                )
            ]
            rest = {name: value for name, value in state.items() if name != BUILT}
            part.load_state_dict({**rest, "param_groups": groups})


def _gathered(part: Any) -> Group:
    """On rank 0 the state of torch's ZeroRedundancyOptimizer, by the number of the parameter. Its
    own consolidate_state_dict() sends bytes that Python copies one by one."""
    weights = [weight for group in part.param_groups for weight in group["params"]]
    own = part.optim.state  # of the parameters that this rank updates
    mine = {number: own[weight] for number, weight in enumerate(weights) if weight in own}
    every = gather_trees(mine, weights[0].device, part.process_group)
    return dict(sorted(item for states in every for item in states.items()))


def _fits(part: torch.optim.Optimizer, state: Group) -> bool:
    groups, saved = part.param_groups, state["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
        return False
    shapes: dict[str, list[tuple[torch.Size, torch.Size]]] = {}  # own and saved, by name
    for group, old in zip(groups, saved, strict=True):
        found = [state["state"].get(number, {}) for number in old["params"]]
        begun = [one for one in found if one]  # parameters that have made a step
        for name, needed in NEEDED.items():
            on = group.get(name) and not old.get(name, True)
            if on and any(needed not in one for one in begun):
                return False
        for weight, one in zip(group["params"], found, strict=True):
            for name, value in one.items():
                if isinstance(value, Tensor):
                    shapes.setdefault(name, []).append((weight.shape, value.shape))
    # The same shapes in another order: the order of the parameters has changed. Other shapes do not
    # follow the parameters.
    both = [tuple(zip(*pairs, strict=True)) for pairs in shapes.values()]
    return not any(own != other and sorted(own) == sorted(other) for own, other in both)


def _step_unless(overflow: Tensor, part: torch.optim.Optimizer) -> None:
    """torch's contract with optimizers that skip on the device (torch.amp.GradScaler.step): they
    read `found_inf`. For any other one the host reads it, which waits for the GPU."""
    # The first step of a fused SGD with momentum would leave its state uninitialised.
    if not getattr(part, ON_DEVICE, False) or isinstance(part, torch.optim.SGD):
        if not overflow.item():
            part.step()
        return
    own: Any = part
    own.grad_scale, own.found_inf = None, overflow
    try:
        part.step()
    finally:
        del own.grad_scale, own.found_inf


def _settings(group: Group) -> Group:
    """A copy of a group without its parameters."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _changed(own: Group, old: Group, then: Group | None, now: Group) -> Group:
    """The settings of a new group, `own`, that replace those saved, `old`. `then`, `now`: as built
    by the run that saved them and by this one."""
    if then is None:
        return own

    def kept(name: str) -> bool:
        if name in SCHEDULED or name not in old:
            return False
        return name in then and name in now and _same(then[name], now[name])

    return {name: value for name, value in own.items() if not kept(name)}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    return bool(one == other)


def _interned(value: Any) -> Any:
    """The same with one object per name: names that were read from a checkpoint are other objects,
    which pickle writes again, so that equal states would not be equal files."""
    if isinstance(value, dict):
        return {sys.intern(k) if isinstance(k, str) else k: _interned(v) for k, v in value.items()}
    return [_interned(one) for one in value] if isinstance(value, list) else value


def multiplier(step: int, total: int, config: Config) -> float:
    """Share of the peak learning rate at this step (0-based): linear warm-up, constant, linear
    decay."""
    warmup, warmdown = round(config.warmup_ratio * total), round(config.warmdown_ratio * total)
    if step < warmup:
        return (step + 1) / warmup
    left = total - step
    if left > warmdown:
        return 1.0
    share = left / (warmdown + 1)
    return share + (1 - share) * config.final_lr_frac
