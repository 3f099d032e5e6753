"""Files with which Hugging Face's transformers load an exported GPT and its tokenizer."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path

from training.core import rundir
from training.core.jsonl import Record
from training.data import bpe, hugging_face
from training.data.tokenizer_base import JSON, Tokenizer
from training.host import packages
from training.tasks.gpt.model import ROPE_BASE, SOFTCAP
from training.tasks.gpt.model_dims import ModelDims

MODULE = "modeling_duet"
USAGE = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("FOLDER", trust_remote_code=True)
tokens = model.generate(**tokenizer("Once upon a time", return_tensors="pt"), max_new_tokens=100)
print(tokenizer.decode(tokens[0], skip_special_tokens=True))"""


def write(folder: Path, shape: ModelDims, words: Tokenizer) -> None:
    """Raises OSError."""
    shutil.copyfile(Path(__file__).with_name(f"{MODULE}.py"), folder / f"{MODULE}.py")
    vocabulary = hugging_face.tokenizer_json(words)
    _save(vocabulary, folder / JSON)
    # Without pad_token_id, with which generate(eos_token_id=None) would mask each separator.
    special = {"bos_token_id": words.bos, "eos_token_id": words.bos}
    rundir.write_json(folder / "config.json", _config(shape) | special)
    padding = list(range(words.vocab, shape.vocab))
    rundir.write_json(
        folder / "generation_config.json",
        special | ({"suppress_tokens": padding} if padding else {}),
    )
    name = hugging_face.bos_name(vocabulary)
    rundir.write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": name,
            "eos_token": name,
            "pad_token": name,
            "model_max_length": shape.max_seq_len,
            "clean_up_tokenization_spaces": False,
        },
    )


def _save(vocabulary: Record, file: Path) -> None:
    """As the library writes it, so that a later run with this file has the same tokenizer."""
    rundir.write_json(file, vocabulary)
    if packages.found("tokenizers"):
        bpe.save(import_module("tokenizers").Tokenizer.from_file(str(file)), file)


def _config(shape: ModelDims) -> Record:
    return {
        "architectures": ["DuetForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{MODULE}.DuetConfig",
            "AutoModelForCausalLM": f"{MODULE}.DuetForCausalLM",
        },
        "model_type": "duet_gpt",
        "dtype": "float32",
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_seq_len,
        "rope_base": ROPE_BASE,
        "softcap": SOFTCAP,
        "key_offset": shape.key_offset,
        "tie_word_embeddings": False,
    }
