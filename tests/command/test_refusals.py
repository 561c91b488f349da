"""What someone who is new here gets wrong is told in one line that says what to do, and nothing is harmed."""

from __future__ import annotations

import math
import os
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("typer")

from kvcache_engine.command import conformance

from .cli_held import KVCACHE
from .cli_rig import run

Make = Callable[..., Path]
ROOT = Path(__file__).resolve().parents[2]
SAVE = ["save", "--prompt", "And God said", "--out"]


def changed(folder: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    return folder


def saved(path: Path) -> Path:
    assert run("save", "--prompt", "And God said unto Noah,", "--out", path).exit_code == 0
    return path


def held(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


QUERY = "model.layers.1.self_attn.q_proj.weight"
PLACES: dict[str, Callable[[Path, Make], Path]] = {
    "notes": lambda path, make: held(path, b"no conversation"),
    "binary": lambda path, make: held(path, b"\xff\xfe\x00text"),
    "empty": lambda path, make: held(path, b"\n\n"),
    "model": lambda path, make: make(),
    "mamba": lambda path, make: changed(make(), "config.json", lambda b: b.replace(b"Llama", b"Mamba")),
    "untied": lambda path, make: changed(make(), "config.json", lambda b: b.replace(b'": true', b'": false')),
    "misshapen": lambda path, make: make({QUERY: np.zeros((32, 48), np.float32)}),
    "truncated": lambda path, make: changed(make(), "model.safetensors", lambda b: b[:-1000]),
    "wordless": lambda path, make: changed(make(), "tokenizer.json", lambda b: b"{}"),
    "saved": lambda path, make: saved(path),
    "damaged": lambda path, make: changed(
        saved(path).parent, path.name, lambda b: b[:-1] + bytes([b[-1] ^ 1])
    ) / path.name,
}  # fmt: skip


class Places(dict[str, object]):
    """What lines name in braces, made where it is asked for."""

    def __init__(self, folder: Path, make: Make, port: int) -> None:
        super().__init__(port=port)
        self.folder, self.make = folder, make

    def __missing__(self, name: str) -> Path:
        self[name] = found = PLACES[name](self.folder / name, self.make)
        return found


REFUSED = {
    "save --prompt x --out .": "kvcache: .: is a folder; give a file",
    "save --prompt x --out no/such.kv": "kvcache: no/such.kv: there is no folder no to write it to",
    "inspect valkey://localhost": "valkey://localhost: only a store in a folder can",
    "inspect {notes}": "{notes}: damaged, or not a saved conversation",
    "inspect /no/such/place": "there is no such file or folder",
    "inspect /": "is not a store",
    "inspect /tmp --budget much": "--budget='much'; it must be a number of bytes",
    "inspect --prompt x --backend abacus": "no backend 'abacus'",
    "load {notes}": "{notes}: damaged, or not a saved conversation",
    "load .": ".: cannot be read (Is a directory)",
    "load none.kv": "none.kv: cannot be read (No such file",
    "load {damaged}": "{damaged}: damaged: its digest does not match",
    "load {saved} --model {model}": "was saved with another model than",
    f"load {{saved}} --prompt '{'a ' * 600}'": "more than the model's 512 positions",
    "load {saved} --out /no/such/folder/c.kv": "there is no folder /no/such",
    "chat --store {notes}": "--store {notes}: is a file; --store must be a folder (use /load FILE",
    "serve --store {notes}": "--store {notes}: is a file; --store must be a folder\n",
    "generate --model {notes} --prompt x": "{notes}: a model must be a folder",
    "generate --model /no/such/folder --prompt x": "/no/such/folder: no such model folder",
    "generate --model . --prompt x": "no config.json",
    "generate --model {mamba} --runtime own --prompt x": (
        "unsupported architecture MambaForCausalLM; supported are LlamaForCausalLM, MistralForCausalLM"
    ),
    "generate --model {untied} --prompt x": "no tensor 'lm_head.weight'",
    "generate --model {misshapen} --prompt x": f"{QUERY} has shape (32, 48); the config says (32, 32)",
    "generate --model {truncated} --prompt x": "truncated or not a safetensors file",
    "generate --model {wordless} --prompt x": "not a tokenizer.json",
    "generate --model {model} --capacity 8 --prompt 'more than eight'": (
        "the prompt has 16 tokens, more than the capacity of 8"
    ),
    f"generate --model {{model}} --prompt {'x' * 300}": "301 tokens, more than the model's 256 positions",
    "generate --model {model} --prompt x --backend abacus": "no backend 'abacus'; known: ",
    "generate --model {model} --prompt x --device tpu": "no device 'tpu'",
    f"generate --model {{model}} --prompt x --capacity {10**12}": (
        "a cache of 1 x 1000000000000 tokens in F32 needs"
    ),
    "generate --model {model} --prompt x --stop ''": "--stop must not be empty",
    "generate --prompt-file {notes}x": "prompt: {notes}x: cannot be read (No such file",
    "generate --prompt-file /": "cannot be read (Is a directory",
    "generate --prompt-file {binary}": "binary is not UTF-8 text",
    "generate --prompt-lines {empty}": "empty is empty",
    "generate --prompt -": "standard input is empty",
    "generate --prompt - --prompt-lines -": "'-' is given more than once",
    "generate --prompt x --draft mtp": "no layer for multi-token prediction (model.layers.4.eh_proj.weight)",
    "generate --prompt x --draft /no/such/model": "--draft /no/such/model: no such model",
    "generate --prompt x --draft {model}": "its vocabulary has 259 tokens; the model's has 2048",
    "generate --model {model} --prompt x --cache-dtype q8_0": "cache_dtype=Q8_0: head_dim 8 in a cache of",
    "generate --prompt x --draft 5": "(--draft-tokens sets their number)",
    "serve --host-memory lots": "--host-memory='lots'; it must be a number of bytes",
    "generate --prompt x --draft lookup --tensor-parallel 2 --backend torch": "cannot be combined",
    "generate --prompt x --tensor-parallel 3": "cannot be split over 3 ranks; this model supports 1, 2, 4, 6",
    "generate --prompt x --tensor-parallel 2": "'numpy' cannot join processes; use torch",
    "generate --prompt x --tensor-parallel 2 --devices cpu:0,cpu:1": "cannot be combined",
    "generate --prompt x --tensor-parallel 2 --backend abacus": "abacus",
    "generate --prompt x --backend torch --devices cpu:0,cpu:0": "each must be named once",
    "generate --prompt x --backend torch --devices cpu:0,tpu:1": "no device 'tpu:1'",
    "generate --prompt x --backend torch --devices a,b,c,d,e": "5 devices for 4 layers",
    "generate --prompt x --backend torch --devices cpu:0,": "a name is empty",
    "generate --prompt x --backend torch --device cpu --devices cpu:0": "cannot be combined; use one of them",
    "generate --prompt x --backend numpy --devices cpu,cpu:1": "numpy keeps all layers on one device",
    "conformance --backend abacus": "no backend 'abacus'; known: ",
    "conformance --backend numpy --option foo=1": "no option 'foo'; there are: device, devices, ",
    "conformance --backend numpy --device tpu": "no device 'tpu'",
    "conformance --backend numpy --suite ml -k ((": "pytest failed before the first test: Wrong expression",
    "serve --tenant-budget /": "serve: --tenant-budget is '/'; it must be DEVICE/HOST",
    "serve --tenant-budget 1/2/3": "serve: --tenant-budget is '1/2/3'; it must be DEVICE/HOST",
    "serve --tenant-budget 1MiB/much": "TenantBudget: host='much'; it must be a number of bytes",
    "serve --port {port} --name a\udcffb": r"serve: the model's name is 'a\udcffb'; it must be valid UTF-8",
    "serve --kv-events nowhere": "serve: --kv-events: nowhere cannot be used",
    "serve --live": "serve: --live requires a terminal; /metrics has the same figures",
    "serve --backlog much": "--backlog='much'; it must be a number of bytes",
    "serve --model /no/such/folder": "kvcache: /no/such/folder: ",
    "serve --host no.such.host.invalid": "kvcache: serve: no.such.host.invalid:8000: no such address",
    "serve --port {port}": "is not available (Address already in use); choose another port, or 0",
}
"""What cannot be had: exit code 1."""
WRONG_USAGE = {
    "nonsense": "kvcache: no such command 'nonsense'",
    "bench --dtype f64": "bench: --dtype is 'f64'; it must be one of 'f32', 'f16', 'bf16'\n",
    "generate --max-tokens=-7": "kvcache generate: --max-tokens is '-7'; it must be at least 1\n",
    "generate --max-tokens many": ": --max-tokens is 'many'; it must be a whole number\n",
    "save --top-k -8 --top-k -9": "kvcache save: --top-k is '-9'; it must be at least 0\n",
    "save --temperature x": "kvcache save: --temperature is 'x'; it must be a number\n",
    "chat --top-p 0": "kvcache chat: --top-p is '0'; it must be above 0 and at most 1",
    "chat --temperature inf": "--temperature is 'inf'; it must be a finite number\n",
    "generate --prompt a --cache-type-v q9": (
        "--cache-type-v is 'q9'; it must be one of f32, f16, bf16, q8_0, q4_0, f8_e4m3, affine8_32"
    ),
    "serve --shutdown-timeout inf": "--shutdown-timeout is 'inf'; it must be a finite number\n",
    "generate --timeout 0": "--timeout is '0'; it must be at least 0.1\n",
    "load": "kvcache load: missing FILE: a file written by kvcache save\n",
    "save": "kvcache save: missing --prompt: the beginning of the conversation",
    "generate --prompt": "kvcache generate: option '--prompt' requires an argument; kvcache generate",
    "generat": "kvcache: no such command 'generat'. Did you mean 'generate'? kvcache --help lists",
    "generate": "missing prompt: give --prompt TEXT, --prompt-file FILE or a pipe",
    "generate --prompt x --temperature -1": "--temperature is '-1'",
    "generate --prompt x --nonsense": "no such option: --nonsense",
    "generate --prompt x --draft lookup --acceptance some": "some",
    "generate x": "got unexpected extra argument(s) (x)",
    "inspect": "kvcache inspect: give a store, a saved conversation, or --prompt",
    "inspect x --prompt y": "kvcache inspect: give a store, a saved conversation",
    "conformance --backend numpy --option x": "--option x: an option must be KEY=VALUE",
    "conformance --backend numpy --option dtype=F99": "--option dtype=F99: dtype must be one of F32",
    "conformance --backend numpy --suite ml -k no_such_test": "'no_such_test' selects no test",
    "conformance": "missing --backend",
}
"""Exit code 2."""


@pytest.mark.parametrize(
    ("code", "line", "message"),
    [*((1, *row) for row in REFUSED.items()), *((2, *row) for row in WRONG_USAGE.items())],
    ids=[*REFUSED, *WRONG_USAGE],
)
def test_what_cannot_be_done_is_one_line_and_nothing_is_written(
    code: int, line: str, message: str, make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(conformance, "EVERY_S", math.inf)  # no lines on how far it is, however long it takes
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = Places(elsewhere, make_model, taken.getsockname()[1])
        result = run(*(word.format_map(places) for word in shlex.split(line)))
    assert (result.exit_code, result.stdout) == (code, "")
    assert message.format_map(places) in result.stderr
    assert result.stderr.startswith("kvcache: " if code == 1 else "kvcache")
    assert result.stderr.count("\n") == 1
    assert not ("it must be" in result.stderr and "--help lists" in result.stderr)
    assert not [*here.iterdir()]


def test_kv_events_without_their_packages_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "kvcache.prefix.zmq_publisher", raising=False)
    result = run("serve", "--port", 0, "--kv-events", "tcp://*:5557")
    assert result.exit_code == 1
    assert "pip install 'ml-kvcache[events]'" in result.stderr


@pytest.mark.parametrize(
    "words", ["chat --store ", "serve --store a --store=", "serve --tenant-budget ", "generate --model "]
)
def test_an_empty_value_is_refused_by_name(words: str) -> None:
    command, *_, option = words.replace("=", " ").split()
    result = run(*words.split(" "))
    assert (result.exit_code, result.stdout) == (2, "")
    told = f"{option} is empty; give a value, or omit the option"
    assert result.stderr == f"kvcache {command}: {told}\n"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run(*SAVE, pipe)
    assert result.exit_code == 1
    assert result.stderr == f"kvcache: {pipe}: is a device or a pipe; give a regular file\n"
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    chat = run("chat", "--max-tokens", 2, text=f"And God said\n/save {pipe}\n/save {tmp_path}\n").stdout
    assert "is a device or a pipe" in chat
    assert "is a folder" in chat
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize("command", ["", "generate", "chat", "inspect"])
def test_h_is_help(command: str) -> None:
    arguments = [command] if command else []
    short, long = (run(*arguments, option) for option in ("-h", "--help"))
    assert (short.exit_code, short.stdout) == (0, long.stdout)
    assert "Usage: kvcache" in " ".join(short.stdout.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("line", ["--version", "generate --prompt x --max-tokens 1", "chat"])
def test_an_output_on_a_full_device_is_one_line(line: str) -> None:
    options = {"input": "/list\n", "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "timeout": 60}
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([*KVCACHE, *line.split()], stdout=full, check=False, **options)
    expected = "kvcache: the output cannot be written (No space left on device)\n"
    assert (ended.returncode, ended.stderr) == (1, expected)


CUT = "the model supports up to 256"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--capacity", 40], f"the text was cut short; --capacity is 40 tokens, and {CUT}"),
        (["--capacity", 40, "--prompt", "y", "--json"], "texts that were cut short: 1; --capacity is 40"),
        ([], f"the text was cut short; {CUT} tokens"),
    ],
)
def test_a_text_that_is_cut_short_for_want_of_room_says_so(
    arguments: list[object], told: str, make_model: Make
) -> None:
    prompt = "x" * (35 if arguments else 250)
    count = 20 if arguments else 50
    result = run("generate", "--model", make_model(), "--prompt", prompt, "--max-tokens", count, *arguments)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"kvcache: {told}")
    assert result.stderr.count("\n") == 1
