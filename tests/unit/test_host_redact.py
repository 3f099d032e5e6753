"""Redaction of keys by name or form, and of users, hosts and home folders."""

from __future__ import annotations

import time

import pytest

from training import tasks
from training.core import redact

KEY = "0123456789abcdef0123456789abcdef01234567"
CLOUD_KEY = "AKIA" + "IOSF0DNN7EXAMPLE"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_API_KEY", "x"),
        ("HF_TOKEN", "x"),
        ("MY_SECRET", "x"),
        ("DB_PASSWORD", "x"),
        ("WANDB_IDENTITY_TOKEN_FILE", "/run/token"),
        ("WANDB_KEY", "abc"),
        ("ssh_key", "/home/me/.ssh/id"),
        ("key", "abc123"),
        ("key_password", "1234"),
        ("client_secret", "default"),
        ("token", "123456"),
        ("WANDB_NOTES", KEY),
        ("WANDB_NOTES", "wandb_v1_" + "Ab3" * 20),
        ("ANYTHING", "hf_abcdefghijklmnopqrst"),
        ("https_proxy", "http://alice:secret@proxy:3128"),
        ("UV_INDEX_URL", "https://pat-3kq7fgh2m9x4w8v5@packages.example/simple"),
    ],
)
def test_secrets(name: str, value: str) -> None:
    assert redact.shown(name, value) == "set, not shown"
    assert value not in redact.word(f"--{name.lower()}={value}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NCCL_IB_PKEY", "3"),
        ("CUDA_VISIBLE_DEVICES", "GPU-000000a1-0000-4000-8000-000000000000"),
        ("LD_LIBRARY_PATH", "/usr/local/cuda-13/lib64:/opt/another/long/folder/of/libraries"),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ("https_proxy", "http://proxy:3128"),
        ("REPOSITORY", "ssh://git@packages.example/models.git"),
        ("NCCL_DEBUG_SUBSYS", "INIT,NET"),
        ("WANDB_API_KEY", ""),
        ("TORCHELASTIC_RUN_ID", "none"),
        ("key_offset", "from the config file"),
        ("num_key_value_heads", "8"),
        ("key_dim", "sixty-four"),
        ("key-size", "large"),
        ("pad_token_id", "50257"),
        ("use_auth_token", "True"),
        ("key", "auto"),
    ],
)
def test_values_that_are_not_secrets(name: str, value: str) -> None:
    assert redact.shown(name, value) == value
    assert redact.word(f"--{name.lower()}={value}") == f"--{name.lower()}={value}"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("access_token", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmN-Hl0w5"),
        ("hub_token", "a8f3-99c1-77de-12ab"),
        ("run_token", "550e8400-e29b-41d4-a716-446655440000"),
        ("data_key", "kJ8+zY/1qQ=="),
        ("data_key", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"),
        ("data_key", "team/prod/a8f3k2m9q1"),
        ("key", "123456789012"),
        ("aws_access_key_id", CLOUD_KEY),
        ("note", CLOUD_KEY),
        ("api_key", "hunter42"),
    ],
)
def test_values_that_are_never_published(name: str, value: str) -> None:
    assert redact.is_surely_secret(name, value) and redact.is_secret(name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("image_key", "observation.images.camera_2"),
        ("image_key", "features/imagenet21k/v2"),
        ("pad_token", "<|reserved_special_token_250|>"),
        ("pad_token", "<extra_id_99>"),
        ("sort_key", "2024-06-30"),
        ("input_key", "model.0.conv2d_1x1.weight"),
        ("embed_key", "ViT-L-14-336px"),
        ("ckpt_key", "ema_0.9999_10000k"),
        ("sort_key", "val/psnr_y_x4plus"),
        ("data_key", "data/train/4xRGB16bit"),
        ("key_file", "~/keys/a8f3-99c1-77de"),
        ("key_file", "/data/a8f3-99c1-77de"),
        ("auth", "auto"),
        ("version", "a8f3-99c1-77de-12ab"),
    ],
)
def test_options_of_a_task_that_are_published(name: str, value: str) -> None:
    assert not redact.is_surely_secret(name, value)


def test_no_field_of_a_task_is_a_secret() -> None:
    """A report hid the origin and the value of key_offset."""
    assert [name for name in tasks.everything() if redact.is_secret(name, "words")] == []
    assert redact.masked_values({"key_offset": "default"}) == {"key_offset": "default"}
    assert redact.masked("key_offset: from --key_offset") == "key_offset: from --key_offset"
    assert redact.masked("my_key: abcdef1") == "my_key: …"


def test_the_command_line_of_a_process() -> None:
    command = "python  t.py --db_password hunter2x --lr=1\n"
    assert redact.running(command, 80) == "python  t.py --db_password … --lr=1 "
    assert redact.running(command, 6) == "python"


def test_a_command_line_in_a_record() -> None:
    line = ["main.py", "--db_password", "hunter2x", "--mail", "me@example.com", "--token=abc", "…"]
    shown = ["main.py", "--db_password", "…", "--mail", "MAIL", "--token=…", "…"]
    assert redact.masked_values({"args": line, "tokens": [1, "x"]}) == {
        "args": shown,
        "tokens": [1, "x"],
    }
    assert redact.masked_values({"token": ["abc", "def"]}) == {"token": ["…", "…"]}


def test_a_key_alone_on_the_command_line() -> None:
    assert redact.word(KEY) == "…"
    assert redact.word("configs/dual_gpu/quickstart.py") == "configs/dual_gpu/quickstart.py"


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> redact.Anonymous:
    monkeypatch.setattr(redact.socket, "gethostname", lambda: "tower.lab.example")
    monkeypatch.setattr(
        redact.pwd,
        "getpwuid",
        lambda uid: type("Entry", (), {"pw_name": "alice", "pw_dir": "/home/alice"})(),
    )
    return redact.Anonymous({"USER": "alice", "HOME": "/data/people/alice"})


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "run folder /home/alice/duet/experiments: 3 GiB free",
            "run folder ~/duet/experiments: 3 GiB free",
        ),
        ("/data/people/alice/x and /data/people/alice2/x", "~/x and /data/people/alice2/x"),
        ("/home/bob/texts/a.txt", "/home/USER/texts/a.txt"),
        (
            "tower does not resolve; tower.lab.example neither",
            "HOST does not resolve; HOST neither",
        ),
        ("--run_name=alice-7", "--run_name=alice-7"),
        ("/mnt/alice/data", "/mnt/USER/data"),
        (
            "occupied by pid 4711 (bob, 1.0 GiB): python /home/bob/secret.py --key=1, pid 12 (eve, "
            "-): x",
            "occupied by pid 4711 …",
        ),
        ("port 5 is taken by pid 4 (alice): python x.py; using 6", "port 5 is taken by pid 4 …"),
        ("端口 5 被 pid 4（alice）：python x.py 占用；改用 6", "端口 5 被 pid 4 …"),
        ("占用它的进程：pid 4711（bob，1.0 GiB）：python x.py", "占用它的进程：pid 4711 …"),
        ("http://me:pw@host/", "http://…@host/"),
        ("towering palicexy stays", "towering palicexy stays"),
    ],
)
def test_names_of_users_and_hosts(text: str, shown: str, clean: redact.Anonymous) -> None:
    assert clean(text) == shown


def test_a_command_line(clean: redact.Anonymous) -> None:
    args = ["/home/alice/c.py", f"--wandb_api_key={KEY}", "--data=/home/alice/texts", KEY]
    assert (
        clean.command("train_dual_gpu.sh", args)
        == "train_dual_gpu.sh ~/c.py --wandb_api_key=… --data=~/texts …"
    )
    args = ["--notify=curl -d $X; a", "--run_name=", "--hf-token", "abc", "--data=/home/alice/a b"]
    command = clean.command("train.sh", args)
    assert command == "train.sh '--notify=curl -d $X; a' --run_name= --hf-token … '--data=~/a b'"


def test_a_user_without_an_entry_and_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(redact.pwd, "getpwuid", nobody)
    assert redact.Anonymous({})("/tmp/x stays") == "/tmp/x stays"
    assert redact.Anonymous({"HOME": "/"})("/tmp/x stays") == "/tmp/x stays"


def test_a_log_line_without_a_space_takes_no_time() -> None:
    """It took a minute for 64 KB: the report was given up."""
    begun = time.process_time()
    for part in ("QUJD-1_a", "a.b+c-", "key-", "a@b."):
        redact.masked(part * 8192)
    for part in (":", "a:", "://", "a"):
        redact.masked("https://" + part * 32768)
    assert time.process_time() - begun < 10


def test_the_word_after_the_name_of_a_secret() -> None:
    words = ["--hf-token", "abc", "x", "--auth", "--password", "p", "--tokenizer", "bpe"]
    assert redact.words(words) == [
        *("--hf-token", "…", "x", "--auth", "--password", "…", "--tokenizer", "bpe")
    ]
    settings = ["--num_key_value_heads", "8", "--key_offset", "false", "--pad_token_id", "0"]
    assert redact.words(settings) == settings


def test_the_machines_of_a_plan() -> None:
    hosts = "n1, alice@n2:22,n3:22222,[fe80::1]:2222,fe80::2,bob@[fe80::3]"
    plan = {"config": {"hosts": hosts}, "place": {"master_addr": "10.1.2.3"}}
    names = ["n1", "alice@n2", "n3", "fe80::1", "fe80::2", "bob@fe80::3", "10.1.2.3"]
    assert redact.machines_of(plan) == names
