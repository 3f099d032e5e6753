"""Reader of one option file: what each key sets, problems, and unused keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from typing import Any

from training.config.jsonc import Document, Keys, is_number, kind, short, spelled
from training.config.loader import ConfigFile
from training.core.errors import Problem
from training.core.jsonl import Record
from training.core.messages import msg
from training.core.suggest import suggest
from training.tasks.video_restoration.kair import cosine
from training.tasks.video_restoration.kair import keys as vocabulary
from training.tasks.video_restoration.kair.keys import (
    KEYS,
    KINDS,
    NETWORK,
    OWN_SECTION,
    SECTIONS,
    converted,
    leaf,
    nothing,
)

EXAMPLE = "options/vrt/006_train_vrt_videodeblurring_gopro_rgbspike.json"
PROGRAM = "main_train_vrt.py"
# Parts of VRT that an option file freezes for some steps; Duet's network has none of them.
PARTS_OF_VRT = ("spynet", "deform", "pa_deform")


class OptionReader:
    """`ranks`: for the command that runs KAIR's own program. Results are stored in `loaded`."""

    def __init__(self, name: str, document: Document, ranks: int, loaded: ConfigFile) -> None:
        self.name, self.document, self.ranks, self.loaded = name, document, ranks, loaded
        self.values, self.notes = loaded.values, loaded.notes
        self.found: Record = {}  # dotted key → value of known keys that are not null
        self.lines = {
            ".".join(keys): line
            for keys, line in document.lines.items()
            if "." not in "".join(keys)
        }
        self.problems: list[tuple[int, Problem]] = []  # (line, problem)
        self.unused: dict[str, list[str]] = {}  # section → keys
        network = document.value.get("netG")
        self.ours = not isinstance(network, dict) or network.get("net_type") in (None, NETWORK)
        self.special: dict[str, Callable[[str, Any], None]] = {
            "task": self.task,
            "model": self.model,
            "gpu_ids": self.gpu_ids,
            "n_channels": self.n_channels,
            "path.root": self.root,
            "datasets.train.io_backend.type": self.back_end,
            "datasets.test.io_backend.type": self.back_end,
            "datasets.train.dataloader_shuffle": self.shuffle,
            "datasets.train.val_partition": self.val_partition,
            "netG.net_type": self.net_type,
            "netG.in_chans": self.in_chans,
            "train.fix_keys": self.fix_keys,
            cosine.PERIODS: self.periods,
            cosine.WEIGHTS: self.restart_weights,
            "logging.use_wandb": self.use_wandb,
            "logging.wandb_api_key": self.wandb_key,
        }

    def read(self) -> None:
        model = self.document.value.get("model")
        if isinstance(model, str) and model != "vrt":
            self.other_model(model)
        else:
            self.everything()
        self.loaded.problems = [
            problem for _, problem in sorted(self.problems, key=lambda one: one[0])
        ]

    def everything(self) -> None:
        for keys, first, second in self.document.twice:
            self.wrong(
                second,
                msg(
                    "tasks.kair.key.twice",
                    key=spelled(keys),
                    file=self.name,
                    first=first,
                    second=second,
                ),
                msg("config.loader.each_key_once"),
            )
        self.walk(self.document.value, ())
        for dotted, value in self.found.items():
            self.take(dotted, value)
        self.whole_file()
        self.lacking()
        for dotted, key in KEYS.items():
            if key.absent is not None and dotted not in self.found:
                self.values[key.field] = (
                    converted(key.field, key.absent),
                    msg("tasks.kair.key.default", file=self.name, dotted=dotted),
                )
        self.note_unused()

    # Single keys.

    def walk(self, tree: Record, above: Keys) -> None:
        for name, value in tree.items():
            keys = (*above, name)
            dotted = ".".join(keys)
            if "." in name:
                self.unknown(keys)
            elif dotted in KEYS or (above == (OWN_SECTION,) and name in vocabulary.own_fields()):
                if value is not None:
                    self.found[dotted] = value
            elif dotted in SECTIONS:
                if isinstance(value, dict):
                    self.walk(value, keys)
                elif value is not None:
                    self.wrong_kind(dotted, value, msg("tasks.kair.key.object", shape="{…}"))
            elif above != ("netG",) or self.ours:  # keys of other networks are not checked
                self.unknown(keys)

    def unknown(self, keys: Keys) -> None:
        fixes = vocabulary.meant(".".join(keys)) or [msg("tasks.kair.key.all_keys")]
        line = self.document.lines[keys]
        self.wrong(
            line,
            msg("tasks.kair.key.unknown", key=spelled(keys), file=self.name, line=line),
            "",
            fixes,
        )

    def take(self, dotted: str, value: Any) -> None:
        """Process a key: set its value, call its special method, or record it as unused."""
        key = KEYS.get(dotted) or vocabulary.to(leaf(dotted))
        if dotted.startswith("netG.") and not self.ours and key.field not in ("scale", "net_type"):
            return
        if dotted in self.special:
            self.special[dotted](dotted, value)
        elif key.field and key.why in (vocabulary.AGREE, vocabulary.SAME_AS_TRAIN):
            self.agreeing(dotted, key.field, value)
        elif key.field:
            self.set(dotted, key.field, value)
        elif key == vocabulary.UNUSED and value:
            self.leave(dotted)

    def leave(self, dotted: str) -> None:
        section, _, name = dotted.rpartition(".")
        self.unused.setdefault(section, []).append(name)

    def set(self, dotted: str, name: str, value: Any) -> None:
        origin = f"{self.name}:{self.lines[dotted]}: {dotted}"
        if self.is_plain(dotted, name, value):
            new, known = converted(name, value), self.values.get(name)
            if known and known[0] != new:
                self.wrong_at(
                    dotted,
                    msg("tasks.kair.key.two_values", name=name, known=known[1], origin=origin),
                    msg("tasks.kair.key.one_of_two"),
                )
            self.values[name] = (new, origin)

    def is_plain(self, dotted: str, name: str, value: Any) -> bool:
        """Check for a single value, or numbers for a comma-separated field. The value itself is
        checked later, with all others."""
        listed = KINDS[name] == "str" and isinstance(value, list)
        if isinstance(value, dict) or (
            isinstance(value, list) and not (listed and all(map(is_number, value)))
        ):
            self.wrong_kind(
                dotted,
                value,
                msg("tasks.kair.key.numbers") if listed else msg("tasks.kair.key.one_value"),
            )
            return False
        return True

    def agreeing(self, dotted: str, name: str, value: Any) -> None:
        """A fact stated in several places, which must agree."""
        if name not in self.values:
            self.set(dotted, name, value)
        elif self.is_plain(dotted, name, value) and self.values[name][0] != converted(name, value):
            origin = self.values[name][1]
            other = short(self.found[origin.rpartition(": ")[2]])
            self.wrong_at(
                dotted,
                msg(
                    "tasks.kair.key.disagrees",
                    given=self.given(dotted, value),
                    other=other,
                    origin=origin,
                ),
                msg("tasks.kair.key.same_value"),
            )

    def root(self, dotted: str, value: Any) -> None:
        if value != "experiments":
            self.set(dotted, "out_dir", value)

    def task(self, dotted: str, value: Any) -> None:
        if isinstance(value, str):
            name = re.sub(r"[^\w.-]+", "_", value).strip("._-")
            self.loaded.title = name.encode()[:100].decode(errors="ignore")
        else:
            self.wrong_kind(dotted, value, msg("tasks.kair.key.text", why=KEYS[dotted].why))

    def model(self, dotted: str, value: Any) -> None:
        if not isinstance(value, str):
            self.wrong_kind(dotted, value, '"vrt"')

    def gpu_ids(self, dotted: str, value: Any) -> None:
        if (
            isinstance(value, list)
            and all(type(one) is int and one >= 0 for one in value)
            and len(set(value)) == len(value)
        ):
            self.loaded.gpu_ids = value
        else:
            self.wrong_at(
                dotted,
                self.given(dotted, value),
                msg("tasks.kair.key.gpu_list"),
            )

    def n_channels(self, dotted: str, value: Any) -> None:
        if value != 3 or isinstance(value, bool):
            self.wrong_at(
                dotted,
                self.given(dotted, value),
                msg("tasks.kair.key.colour"),
            )

    def shuffle(self, dotted: str, value: Any) -> None:
        if value is False:
            self.notes.append(
                msg("tasks.kair.key.why", given=self.given(dotted, value), why=KEYS[dotted].why)
            )

    def in_chans(self, dotted: str, value: Any) -> None:
        given = bool(self.found.get("datasets.train.dataroot_spike"))
        spikes = self.found.get("datasets.train.spike_channels", 1)
        if isinstance(spikes, int) and value != (wanted := 3 + spikes * given):
            allowed = (
                msg("tasks.kair.key.channels_spikes", wanted=wanted, spikes=spikes)
                if given
                else msg("tasks.kair.key.channels", wanted=wanted)
            )
            what = msg(
                "tasks.kair.key.input_channels", given=self.given(dotted, value), wanted=wanted
            )
            self.wrong_at(dotted, what, allowed)

    def val_partition(self, dotted: str, value: Any) -> None:
        if self.found.get("datasets.train.name") == "REDS":
            what = msg("tasks.kair.key.reds", given=self.given(dotted, value))
            self.wrong_at(
                dotted,
                what,
                KEYS[dotted].why,
                [msg("tasks.kair.key.reds_fix")],
            )

    def fix_keys(self, dotted: str, value: Any) -> None:
        parts = value if isinstance(value, list) else [value]
        others = [part for part in parts if part not in PARTS_OF_VRT]
        if others and self.ours and self.found.get("train.fix_iter") not in (None, 0, -1):
            what = msg(
                "tasks.kair.key.why", given=self.given(dotted, value), why=vocabulary.FREEZING
            )
            self.wrong_at(dotted, what, msg("tasks.kair.key.no_fix_keys"), ['"fix_iter": 0'])
        elif parts:
            self.leave(dotted)

    def periods(self, dotted: str, value: Any) -> None:
        grown = cosine.periods(self.found) if cosine.has_multiplier(self.found) else []
        self.set(dotted, leaf(dotted), grown or value)

    def restart_weights(self, dotted: str, value: Any) -> None:
        if not cosine.has_multiplier(self.found):
            self.set(dotted, leaf(dotted), value)
            return
        what, why = self.given(dotted, value), KEYS[dotted].why
        if cosine.periods(self.found):
            self.set(dotted, leaf(dotted), 1)
            self.notes.append(msg("tasks.kair.key.why", given=what, why=why))
        else:
            self.wrong_at(dotted, what, why, [f'"{leaf(dotted)}": [{short(value)}]'])

    def back_end(self, dotted: str, value: Any) -> None:
        if value not in ("disk", "lmdb"):
            self.wrong_at(
                dotted,
                self.given(dotted, value),
                KEYS[dotted].why,
                ['"io_backend": {"type": "disk"}'],
            )

    def use_wandb(self, dotted: str, value: Any) -> None:
        if not isinstance(value, bool):
            self.wrong_kind(dotted, value, msg("config.allowed.bool"))
            return
        origin = f"{self.name}:{self.lines[dotted]}: {dotted}"
        self.values["use_dummy_wandb"] = (not value, origin)
        if value and "logging.wandb_mode" not in self.found:
            self.values["wandb_mode"] = ("online", origin)

    def wandb_key(self, dotted: str, value: Any) -> None:
        if not isinstance(value, str):
            self.wrong_kind(dotted, value, msg("tasks.kair.key.key_wanted"))

    def net_type(self, dotted: str, value: Any) -> None:
        if self.ours:
            self.set(dotted, "net_type", value)
            return
        near = isinstance(value, str) and suggest(value, [NETWORK])
        what = self.given(dotted, value)
        network = msg("tasks.kair.key.own_network", network=NETWORK, example=EXAMPLE)
        if near:
            self.wrong_at(dotted, what, f"{NETWORK}", [network])
            return
        flow = self.found.get("netG.spynet_path")
        weights = self.found.get("path.pretrained_netG")
        if flow and weights:
            missing = msg(
                "tasks.kair.key.network_flow_weights",
                what=what,
                flow=short(flow),
                weights=short(weights),
            )
        elif flow:
            missing = msg("tasks.kair.key.network_flow", what=what, flow=short(flow))
        elif weights:
            missing = msg("tasks.kair.key.network_weights", what=what, weights=short(weights))
        else:
            missing = msg("tasks.kair.key.network", what=what)
        self.wrong_at(dotted, missing, f'"{NETWORK}"', [self.own_program(), network])

    # All keys together.

    def whole_file(self) -> None:
        for part in ("datasets.train", "datasets.test"):
            type_key = f"{part}.io_backend.type"
            roots = {
                k: v
                for k, v in self.found.items()
                if k.startswith(f"{part}.dataroot_") and isinstance(v, str)
            }
            plain = [k for k, v in roots.items() if not v.rstrip("/").endswith(".lmdb")]
            if self.found.get(type_key) != "lmdb" or not plain:
                continue
            shows = ", ".join(f"{leaf(k)} {short(self.found[k])}" for k in plain)
            what = msg("tasks.kair.key.lmdb", part=part, shows=shows, at=self.at(type_key))
            fixes = ['"io_backend": {"type": "disk"}']
            self.wrong_at(type_key, what, msg("tasks.kair.key.lmdb_wanted"), fixes)
        if (
            self.ours
            and len(self.loaded.gpu_ids) > 1
            and "datasets.train.dataloader_batch_size" in self.found
        ):
            where = self.at("datasets.train.dataloader_batch_size")
            self.notes.append(msg("tasks.kair.key.per_rank", where=where))

    def lacking(self) -> None:
        """Unsupported keys, one problem per reason."""
        groups: dict[tuple[str, str], list[str]] = {}
        for dotted, value in self.found.items():
            key = KEYS.get(dotted)
            # reported with the network
            theirs = dotted.startswith("path.pretrained_") and not self.ours
            if (
                key
                and key.harmless is not None
                and value
                and value not in key.harmless
                and not theirs
            ):
                groups.setdefault((dotted.rpartition(".")[0], key.why), []).append(dotted)
        for (section, why), keys in groups.items():
            shown = ", ".join(f"{leaf(k)} {short(self.found[k])}" for k in keys)
            fixes = [", ".join(f'"{leaf(k)}": {nothing(k, self.found[k])}' for k in keys)]
            self.wrong_at(
                keys[0],
                msg(
                    "tasks.kair.key.lacking",
                    section=section,
                    shown=shown,
                    at=self.at(keys[0]),
                    why=why,
                ),
                "",
                fixes if self.ours else [],
            )

    def note_unused(self) -> None:
        parts = [
            f"{section or msg('tasks.kair.key.top')}: {', '.join(names)}"
            for section, names in self.unused.items()
        ]
        if parts:
            self.notes.append(msg("tasks.kair.key.unused", file=self.name, parts="; ".join(parts)))

    def other_model(self, model: str) -> None:
        what = self.given("model", model)
        if program := vocabulary.PROGRAMS.get(model):
            single = msg("tasks.kair.key.single_pictures", what=what)
            self.wrong_at("model", single, '"vrt"', [self.own_program(program)])
        else:
            self.wrong_at("model", what, '"vrt"', ['"model": "vrt"'])

    def own_program(self, program: str = PROGRAM) -> str:
        return msg(
            "tasks.kair.key.own_program",
            ranks=self.ranks,
            program=program,
            file=shlex.quote(self.name),
        )

    def at(self, dotted: str) -> str:
        return f"{self.name}:{self.lines[dotted]}"

    def given(self, dotted: str, value: Any) -> str:
        """A key with its value and place."""
        return msg("tasks.kair.key.given", dotted=dotted, value=short(value), at=self.at(dotted))

    def wrong_kind(self, dotted: str, value: Any, allowed: str) -> None:
        self.wrong_at(
            dotted,
            msg("tasks.kair.key.kind", dotted=dotted, kind=kind(value), at=self.at(dotted)),
            allowed,
        )

    def wrong_at(
        self, dotted: str, what: str, allowed: str = "", fixes: list[str] | None = None
    ) -> None:
        self.wrong(self.lines[dotted], what, allowed, fixes)

    def wrong(
        self, line: int, what: str, allowed: str = "", fixes: list[str] | None = None
    ) -> None:
        self.problems.append((line, Problem("kair.option", what, allowed, fixes or [])))
