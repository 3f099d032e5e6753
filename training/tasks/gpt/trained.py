"""A trained GPT with its tokenizer: continues text."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from training.config.schema import FIELDS
from training.core import log
from training.core.errors import Problem, UserError
from training.core.messages import msg
from training.data import corpus, tokenizer
from training.data.corpus import CorpusSource
from training.data.readers import DocumentPart, documents
from training.data.token_dataset import arrive
from training.data.tokenizer_base import BYTES, Bytes, Tokenizer
from training.tasks.gpt import generate, scores
from training.tasks.gpt import hub as hub_files
from training.tasks.gpt.generate import Sampling
from training.tasks.gpt.model import GPT, MemorySavings
from training.tasks.gpt.model_dims import of_checkpoint
from training.tasks.gpt.passages import Passages
from training.tasks.trained import Progress, TextModel, TextStep, silent
from training.tasks.weights import HUB

if TYPE_CHECKING:
    from training.core.contracts.kinds import FieldValues
    from training.tasks.evaluation import Part
    from training.tasks.weights import Weights

SEEDS = 1 << 31
EVALUATED = 8192  # tokens per batch
LOGITS = 1 << 26  # computed at once
LARGEST = 709.0  # loss; above, the perplexity exceeds float64
DECODED = 8  # tokens of the prompt before the first new one
KEPT = 2 << 30  # bytes of keys and values of samples computed together


class Uninitialized(TorchFunctionMode):
    """Skips random initial weights, which take seconds and are replaced anyway. The meta device
    would import torch._dynamo for the arithmetic of the positions."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


class TrainedGpt(TextModel):
    """On a GPU the products are in bf16 where it computes in it, else in fp32."""

    model: GPT

    def __init__(
        self, weights: Weights, state: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        shape = of_checkpoint(weights.facts)
        with Uninitialized():
            model = GPT(shape)
        model.load_state_dict(state, assign=True)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        super().__init__(weights, model, device)
        if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
            for parameter in model.parameters():
                parameter.data = parameter.data.to(torch.bfloat16)
        self.tokenizer = tokenizer_of(weights)
        self.shortened = ""  # the last prompt that was too long

    @property
    def context(self) -> int:
        """Tokens."""
        return self.model.shape.max_seq_len

    def encode(self, text: str) -> list[int]:
        """The tokens of a document that begins with this text."""
        (ids,) = self.tokenizer.encode_documents([text])
        return [int(token) for token in ids]

    def together(self, prompt: str, max_tokens: int) -> int:
        shape = self.model.shape
        length = min(self.context, len(self.encode(prompt)) + max_tokens)
        size = 2 * shape.depth * shape.width * length * self.model.head.weight.element_size()
        return max(1, KEPT // size)

    def stream(
        self,
        prompt: str,
        max_tokens: int = 256,
        temperature: float = 0.8,
        top_k: int = 0,
        seed: int | None = None,
        samples: int = 1,
    ) -> Iterator[TextStep]:
        words = self.tokenizer
        drawn = random.randrange(SEEDS) if seed is None else seed
        how = Sampling(max_tokens, temperature, top_k, drawn, samples, words.bos, words.vocab)
        ids = self.encode(prompt)
        streams = [TextStream(words, ids) for _ in range(samples)]
        if len(ids) > self.context and prompt != self.shortened:
            log.warning(msg("tasks.gpt.trained.cut", count=len(ids), context=self.context))
            self.shortened = prompt
        for column in generate.generate(self.model, ids, how, check=self._check):
            texts = [
                "" if token is None else one.add(token)
                for one, token in zip(streams, column, strict=True)
            ]
            yield TextStep(texts, [token is not None for token in column])
        if any(rest := [one.end() for one in streams]):
            yield TextStep(rest, [False] * samples)

    @contextmanager
    def _training_arithmetic(self) -> Iterator[None]:
        """Weights in bf16, as in the validation of a training: embeddings become bf16 after their
        norm."""
        half = self.model.head.weight.dtype == torch.bfloat16

        def exact(module: torch.nn.Module, given: Any, found: torch.Tensor) -> torch.Tensor:
            return found.float()

        with (
            torch.no_grad(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=half),
            self.model.embedding.register_forward_hook(exact),
        ):
            yield

    def _check(self, logits: torch.Tensor) -> None:
        """Raises UserError for NaN, from which no token can be drawn."""
        if bool(logits.isnan().any()):
            what = msg("tasks.trained.not_numbers", title=self.weights.title)
            allowed = msg("tasks.trained.earlier_step")
            raise UserError(Problem("weights.unreadable", what, allowed))

    def evaluate(
        self, progress: Progress = silent, parts: list[Part] | None = None
    ) -> dict[str, float]:
        """Every token of the text is predicted once, from the tokens before it in its window of the
        context, as in the validation of a training; plus perplexity, tokens and bytes."""
        source, problem = evaluated(self.weights.plan["config"])
        if source is None:
            assert problem
            raise UserError(problem)
        field = str(self.weights.plan["config"].get("text_field", FIELDS["text_field"].default))
        lengths = torch.from_numpy(np.asarray(self.tokenizer.byte_lengths(), np.int64))
        lengths = lengths.to(self.device)
        size = max(1, EVALUATED // self.context)
        logits = size * self.context * self.model.shape.vocab
        self.model.frugal = MemorySavings(chunks=-(-logits // LOGITS))
        total = dict.fromkeys(("nats", "tokens", "bytes"), 0.0)
        seen = Passages(self.tokenizer)

        def pieces() -> Iterator[DocumentPart]:
            for piece in documents(source, field):
                progress(piece.done, source.total_bytes)
                yield piece

        for rows in windows(self.tokenizer, pieces(), self.context, size):
            inputs, targets = arrive(rows, self.device)
            with self._training_arithmetic():
                found = scores.each(self.model, inputs, targets, lengths)
            for name, value in found.items():
                total[name] += float(value.double().sum())
            if parts is not None:
                seen.add(rows, found)
        found = scores.scores(total)
        if not total["tokens"]:
            raise UserError(
                Problem("data.no_text", msg("tasks.gpt.trained.no_text", name=source.name))
            )
        if parts is not None:
            parts += seen.parts()
        more = {name: total[name] for name in ("tokens", "bytes")}
        loss = found["loss"]
        return {**found, "perplexity": math.inf if loss > LARGEST else math.exp(loss), **more}

    def describe(self) -> str:
        name = msg("tasks.gpt.model.name", depth=self.model.shape.depth)
        return f"{name}, {super().describe()}"

    def usage(self, form: str) -> str:
        return (
            hub_files.USAGE
            if form == HUB
            else (
                "from training.tasks import load_model\n\n"
                'trained = load_model("FOLDER")  # .model is a torch.nn.Module\n'
                'print(trained.generate("Once upon a time", max_tokens=100))'
            )
        )

    def export_files(self, folder: Path, hub: bool) -> str | None:
        if hub:
            hub_files.write(folder, self.model.shape, self.tokenizer)
        else:
            self.tokenizer.save(folder)
        file = tokenizer.file_in(folder)
        return BYTES if isinstance(self.tokenizer, Bytes) or not file else tokenizer.checksum(file)


def evaluated(config: FieldValues) -> tuple[CorpusSource | None, Problem | None]:
    return corpus.find(str(config["data"]), "--data", str(config.get("encoding", "")))


def windows(
    words: Tokenizer, pieces: Iterator[DocumentPart], context: int, size: int
) -> Iterator[torch.Tensor]:
    """Rows of `context` tokens plus the next one, at most `size` at a time, (rows, context + 1)
    int64; the last row ends in separators, which are not predicted."""
    wanted, left = size * context, np.zeros(0, np.int64)
    for tokens in words.encode_pieces(pieces):
        left = np.concatenate((left, tokens.astype(np.int64)))
        while len(left) > wanted:
            yield _rows(left[: wanted + 1], context)
            left = left[wanted:]
    for start in range(0, max(0, len(left) - 1), wanted):
        rest = left[start : start + wanted + 1]
        missing = -(len(rest) - 1) % context
        yield _rows(np.concatenate((rest, np.full(missing, words.bos))), context)


def _rows(tokens: npt.NDArray[np.int64], context: int) -> torch.Tensor:
    """(rows × context + 1,) → (rows, context + 1)."""
    starts = range(0, len(tokens) - 1, context)
    return torch.from_numpy(np.stack([tokens[n : n + context + 1] for n in starts]))


class TextStream:
    """Tokens one by one → text as soon as it is final: a character of several bytes may be spread
    over several tokens. `prompt`: the tokens before them, whose text is known."""

    def __init__(self, words: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self.words = words
        start = max(0, len(prompt) - DECODED)
        while start and words.decode(prompt[start:]).startswith("\ufffd"):
            start -= 1  # in the middle of a character
        self.ids = [*prompt[start:]]
        # the text of ids[:sent] is out; ids[before:sent] is its end
        self.before, self.sent = 0, len(self.ids)

    def add(self, token: int) -> str:
        """The new text, "" while a character is incomplete."""
        self.ids.append(token)
        return self._new(final=False)

    def end(self) -> str:
        """The rest; an incomplete character becomes U+FFFD."""
        return self._new(final=True)

    def _new(self, *, final: bool) -> str:
        # Decoded together with the tokens before: some tokenizers drop the space of the first word.
        known = self.words.decode(self.ids[self.before : self.sent])
        text = self.words.decode(self.ids[self.before :])
        if not final and text.endswith("\ufffd"):
            return ""
        self.before, self.sent = self.sent, len(self.ids)
        return text[len(known) :]


def tokenizer_of(weights: Weights) -> Tokenizer:
    """The tokenizer that the model was trained with. Raises UserError if its file is lost or was
    replaced."""
    identity, rows = weights.facts["tokenizer"], weights.facts["shape"]["vocab"]
    if identity in (BYTES, None):  # None: of checkpoints from before there was a choice
        return tokenizer.load(BYTES)
    for folder in weights.folders:
        file = tokenizer.file_in(folder)
        if file and tokenizer.checksum(file) == identity:
            return tokenizer.load(str(file), padded_vocab=rows)
    raise UserError(
        Problem(
            "tokenizer.lost",
            msg("tasks.gpt.trained.no_tokenizer", folders=", ".join(map(str, weights.folders))),
            msg("tasks.gpt.trained.tokenizer_wanted"),
        )
    )
