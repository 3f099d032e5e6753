"""Every command of README.md is run, with small settings and the names that it leaves open."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.conftest import TOKEN
from tests.unit.test_readme import ENGLISH, commands

SCRIPT = Path(__file__).parent / "scripts/bare_ddp.py"
SMALL = {
    "DUET_DEVICE": "cpu",
    "DUET_DEPTH": "1",
    "DUET_MAX_SEQ_LEN": "32",
    "DUET_DEVICE_BATCH_SIZE": "8",
    "DUET_NUM_ITERATIONS": "3",
    "DUET_EVAL_TOKENS": "1024",
    "DUET_SAMPLE_TOKENS": "8",
}


def is_language_model(run: str) -> bool:
    plan = json.loads(Path(run, "plan.json").read_text())
    return plan.get("task", {}).get("name") == "gpt"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_commands(project: Path, tmp_path: Path, token: str) -> None:
    runs = tmp_path / "experiments"
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts/a.txt").write_text("All work and no play. " * 4000)
    (tmp_path / "train.log").write_text(
        "step 1 loss 2.0\nTraceback (most recent call last):\n"
        "  File \"a.py\", line 3, in <module>\nKeyError: 'labels'\n"
    )
    (tmp_path / "main.py").write_text(
        f"import sys; sys.argv[1:] = [{str(tmp_path / 'rank')!r}]\n" + SCRIPT.read_text()
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("DUET_", "WANDB_"))}
    clean |= {TOKEN: token, "DUET_OUT_DIR": str(runs), "DUET_LOG_DIR": str(tmp_path / "logs")}
    sleeper = subprocess.Popen(["sleep", "3600"], env=clean)
    try:
        # The runs come first: a comparison needs two of them.
        for command in sorted(commands(ENGLISH), key=lambda c: c.startswith("./duet report")):
            words = shlex.split(command)
            for name in ("main.py", "my_texts/", "my_model/", "train.log"):
                words = [word.replace(name, str(tmp_path / name)) for word in words]
            words = [word.replace("PID", str(sleeper.pid)) for word in words]
            finished = [str(path.parent) for path in sorted(runs.glob("*/summary.json"))]
            if "RUN" in words:
                words[words.index("RUN")] = next(filter(is_language_model, finished))
            if "RUN_A" in words:
                page = f"--out={tmp_path / 'page.html'}"
                words[words.index("RUN_A") :] = [finished[0], finished[-1], page]
            values = dict(SMALL)
            if words[0] == "./monitor_training.sh":
                # Runs are looked for in the project's own folder.
                words += ["--once"] + [f"--run={finished[0]}"] * (len(words) == 1)
            elif words[0] == "./submit_job.sh":
                words.append("--dry_run")
                values = {}
            elif "--script" in words or "--resume=latest" in words:
                values = {}
            elif any(word.startswith("--task") for word in words):
                values = {"DUET_NUM_ITERATIONS": "3"}
            elif words[0] != "./duet" and "--dry_run" not in words and "--check" not in words:
                words += [f"--total_batch_size={16 * 32}", "--vocab_size=300"]
            done = subprocess.run(
                words,
                cwd=project,
                env=clean | values,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=300,
            )
            # That process is not a training: 2 or 3, with the reason.
            allowed = (0, 2, 3) if "--pid" in command else (0,)
            assert done.returncode in allowed, f"{command}\n{done.stdout}{done.stderr}"
            assert "Traceback" not in done.stderr, done.stderr
    finally:
        sleeper.kill()
        sleeper.wait()
    assert len(list(runs.glob("*/summary.json"))) >= 4
