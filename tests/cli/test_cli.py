"""The command line: what it prints, and how it fails."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import make_tiny_llama

from freewheel.cli import SAMPLING_OPTIONS, SPECULATION_OPTIONS, main
from freewheel.config import EngineConfig
from freewheel.sampling import SamplingParams

FREEWHEEL = [sys.executable, "-m", "freewheel"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREEWHEEL_HOME", str(tmp_path / "cache"))


def generate(tiny_model: Path, *arguments: str) -> list[str]:
    return ["generate", "hello there", "--model", str(tiny_model), "--max-tokens", "8", "--ignore-eos", *arguments]


def fails(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line that an error is."""
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("freewheel: error: ")
    return line


def test_generate_streams_text_and_sums_up_on_stderr(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(generate(tiny_model)) == 0
    printed = capsys.readouterr()
    assert printed.out.strip()
    for word in ("prompt", "tok/s", "first token", "output 8 tokens", "length"):
        assert word in printed.err


def test_answers_look_as_they_are_asked_to(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["é"]}', "utf-8")
    grammar.write_text('start: "a" "b"')
    for arguments, expected in (
        (["--json-schema", str(schema)], '"é"'),
        (["--grammar", str(grammar)], "ab"),
        (["--regex", "[x]{3}"], "xxx"),
        (["--choice", "yes", "--choice", "yes"], "yes"),
    ):
        assert main(generate(tiny_model, *arguments)) == 0
        assert capsys.readouterr().out.strip() == expected
    assert "grammar cannot be compiled" in fails(capsys, generate(tiny_model, "--regex", "(["))
    assert "json_schema: " in fails(capsys, generate(tiny_model, "--json-schema", str(tmp_path / "none")))
    assert "cannot be combined" in fails(capsys, generate(tiny_model, "--regex", "a", "--choice", "a"))


def test_json_is_one_object_with_tokens_logprobs_reason_and_timings(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(generate(tiny_model, "--json", "--logprobs", "2")) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    result = json.loads(printed.out)
    (choice,) = result["outputs"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]) == 8
    assert choice["finish_reason"] == "length"
    assert str(choice["token_ids"][0]) in choice["logprobs"][0]
    assert {"import_s", "load_s", "first_token_s", "prompt_tokens_per_s", "decode_tokens_per_s"} == set(
        result["timings"]
    )


def test_streamed_text_equals_the_json_text(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seeded = generate(tiny_model, "--temperature", "1", "--seed", "7")
    assert main(seeded) == 0
    streamed = capsys.readouterr().out
    assert main([*seeded, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["text"] == streamed.removesuffix("\n")


def test_raw_leaves_the_chat_template_out(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(generate(tiny_model, "--json"))
    templated = json.loads(capsys.readouterr().out)
    main(generate(tiny_model, "--json", "--raw"))
    raw = json.loads(capsys.readouterr().out)
    assert raw["prompt"] == "hello there"
    assert templated["prompt"] == "<|start|>user\nhello there<|end|><|start|>assistant\n"


def test_system_message_goes_into_the_template(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(generate(tiny_model, "--json", "--system", "be brief"))
    assert json.loads(capsys.readouterr().out)["prompt"].startswith("<|start|>system\nbe brief<|end|>")
    assert "system" in fails(capsys, generate(tiny_model, "--raw", "--system", "be brief"))


def test_prompt_from_standard_input(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["generate", "-", "--model", str(tiny_model), "--max-tokens", "1", "--json", "--raw"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "from a pipe"


def test_several_answers_are_printed_apart(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(generate(tiny_model, "--n", "3", "--temperature", "1", "--seed", "1")) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("--- ")] == [
        "--- 0",
        "--- 1",
        "--- 2",
    ]


def test_every_sampling_parameter_has_an_option() -> None:
    assert {*SAMPLING_OPTIONS, "grammar"} == {field.name for field in dataclasses.fields(SamplingParams)}


def test_speculation_changes_steps_and_no_text(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {field.name: field.default for field in dataclasses.fields(EngineConfig)}
    for name, (_, _, text) in SPECULATION_OPTIONS.items():
        assert type(fields[name]) is not int or f"default: {fields[name]}" in text
    told = []
    for options in (["--no-speculation"], ["--speculation", "--draft-width", "2", "--draft-nodes", "8"]):
        repeating = ["--max-tokens", "60", "--allowed-token-ids", "5", "--allowed-token-ids", "6"]
        assert main(generate(tiny_model, "--json", *repeating, *options)) == 0
        told.append(json.loads(capsys.readouterr().out))
    plain, drafted = (result["metrics"]["speculation"] for result in told)
    counts = [sum(choice.pop("from_draft")) for result in told for choice in result["outputs"]]
    assert counts == [0, drafted["accepted"]]
    assert told[0]["outputs"] == told[1]["outputs"]
    assert plain == {"steps": 60, "drafted": 0, "accepted": 0}
    assert drafted["steps"] + drafted["accepted"] >= 60 > drafted["steps"]


def test_what_is_wrong_with_a_corpus_is_said_with_file_and_line(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "texts.jsonl"
    corpus.write_text('"hello there"\n{"title": 1}\n')
    line = fails(capsys, generate(tiny_model, "--speculation", "--draft-corpus", str(corpus)))
    assert f"draft_corpus: {corpus}, line 2: must be a string" in line
    corpus.write_text('"hello there"\n')
    assert main(generate(tiny_model, "--speculation", "--draft-corpus", str(corpus))) == 0


def test_repeated_options_add_up(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allowed = ["--allowed-token-ids", "5", "--allowed-token-ids", "6"]
    assert main(generate(tiny_model, "--json", *allowed, "--logit-bias", "6=50", "--logit-bias", "7=90")) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"] == [6] * 8


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--n", "0"], "n"),
        (["--logit-bias", "9999999=1"], "logit_bias"),
        (["--stop-token-ids", "-5"], "stop_token_ids"),
        (["--max-model-len", "100000000"], "max_model_len"),
        (["--logit-bias", "5=1", "--logit-bias", "5=2"], "logit_bias has id 5 more than once"),
        (["--threads", "0"], "threads must be"),
        (["--threads", "99999"], "threads must be"),
        (["--threads", "9" * 99], "threads must be an integer from 1 to"),
        (["--device", "meta"], "device must be"),
        (["--device", ""], "device must be"),
    ],
)
def test_bad_parameters_are_one_line_that_names_them(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert named in fails(capsys, generate(tiny_model, *arguments))


def test_a_prompt_longer_than_the_context_is_refused(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, ["generate", "x" * 5000, "--model", str(tiny_model)])
    assert "tokens" in line


def test_bytes_that_are_not_utf_8_are_refused_by_name(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--model", str(tiny_model)]
    assert "prompt has" in fails(capsys, ["generate", "caf\udce9", *options])
    assert "system has" in fails(capsys, ["generate", "x", "--system", "caf\udce9", *options])
    assert "system has" in fails(capsys, ["chat", "--system", "caf\udce9", *options])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    assert "prompt has" in fails(capsys, ["generate", "-", *options])


@pytest.mark.parametrize(
    ("arguments", "redirection", "closed"),
    [
        (["generate", "-"], "<&-", "standard input is closed"),
        (["chat"], "<&-", "standard input is closed"),
        (["models"], ">&-", "standard output is closed"),
    ],
)
def test_a_closed_standard_stream_is_one_line(arguments: list[str], redirection: str, closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *FREEWHEEL, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, f"freewheel: error: {closed}\n")


def test_errors_never_go_to_standard_output() -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *FREEWHEEL, "generate", "hi", "--model", "unknown"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")


def test_unknown_model_and_broken_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "smolm2" in fails(capsys, ["generate", "x", "--model", "smolm2"])
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    assert "broken.gguf" in fails(capsys, ["generate", "x", "--model", str(broken)])
    assert str(tmp_path) in fails(capsys, ["generate", "x", "--model", str(tmp_path)])


@pytest.fixture
def sick_model(tiny_model: Path, tmp_path: Path) -> Path:
    """Its logits are NaN."""
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tiny_model, tmp_path / "sick"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"].fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_request_that_ends_in_an_error_is_one_line(sick_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(generate(sick_model)) == 2
    error = capsys.readouterr().err
    assert error.startswith("freewheel: error: ")
    assert "NaN" in error
    assert error.count("\n") == 1
    assert main(generate(sick_model, "--json")) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["outputs"][0]["finish_reason"] == "error"
    assert printed.err == error


def test_log_probabilities_that_nothing_would_show_are_refused(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "logprobs" in fails(capsys, generate(tiny_model, "--logprobs", "1"))
    assert "prompt_logprobs" in fails(capsys, generate(tiny_model, "--prompt-logprobs", "1"))
    assert "logprobs" in fails(capsys, ["chat", "--model", str(tiny_model), "--logprobs", "1"])


def test_a_terminal_without_the_character_gets_a_substitute(tiny_model: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [*FREEWHEEL, *generate(tiny_model, "--allowed-token-ids", "161", "--allowed-token-ids", "102")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0
    assert "?" in done.stdout


def test_options_that_do_not_parse_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["generate"], ["generate", "x", "--temperature", "warm"], ["fly"], []):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 2
        assert "Traceback" not in capsys.readouterr().err


def test_models_lists_what_is_built_in(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert str(tmp_path / "cache") in printed
    assert "smollm2" in printed
    assert "gemma3-270m" in printed
    assert main(["models", "--json"]) == 0
    listed = {model["name"]: model for model in json.loads(capsys.readouterr().out)}
    assert listed["smollm2"] == {"name": "smollm2", "path": None, "bytes": 98_362_432, "cached": False}


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines typed into ``freewheel chat``."""
    lines: list[str] = []

    def read(_: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", read)
    return lines


def test_chat_keeps_the_conversation(tiny_model: Path, capsys: pytest.CaptureFixture[str], talk: list[str]) -> None:
    arguments = ["chat", "--model", str(tiny_model), "--max-tokens", "4", "--ignore-eos"]
    talk += ["one", "", "two"]
    assert main(arguments) == 0
    told = capsys.readouterr().err
    prompts = [int(line.split()[1]) for line in told.splitlines() if line.startswith("prompt ")]
    assert len(prompts) == 2
    assert prompts[1] > prompts[0]

    talk += ["one", "/new", "one", "/quit", "never read"]
    assert main(arguments) == 0
    told = capsys.readouterr().err
    assert len({line.split()[1] for line in told.splitlines() if line.startswith("prompt ")}) == 1
    assert talk == ["never read"]


def test_chat_survives_a_conversation_that_outgrows_the_context(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], talk: list[str]
) -> None:
    talk += ["x" * 1000, "short"]
    assert main(["chat", "--model", str(tiny_model), "--max-tokens", "2"]) == 0
    told = capsys.readouterr().err
    assert "tokens" in told
    assert told.count("first token") == 1


def test_chat_goes_on_after_a_message_that_is_not_utf_8(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], talk: list[str]
) -> None:
    talk += ["caf\udce9", "short"]
    assert main(["chat", "--model", str(tiny_model), "--max-tokens", "2"]) == 0
    told = capsys.readouterr().err
    assert "[message has a lone surrogate at character 3" in told
    assert told.count("first token") == 1


def test_chat_goes_on_after_a_request_that_failed(
    sick_model: Path, capsys: pytest.CaptureFixture[str], talk: list[str]
) -> None:
    talk += ["one", "two"]
    assert main(["chat", "--model", str(sick_model)]) == 0
    assert talk == []
    assert capsys.readouterr().err.count("NaN") == 2


def start(tiny_model: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [*FREEWHEEL, "generate", "go", "--model", str(tiny_model), "--ignore-eos", *arguments]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its context is so long that it cannot be done before a signal or a closed pipe reaches it."""
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "long", context=1 << 15)


@pytest.mark.parametrize("moment", ["while importing", "while streaming"])
def test_control_c_ends_cleanly(long_model: Path, moment: str) -> None:
    process = start(long_model, "--max-tokens", "30000")
    assert process.stdout
    if moment == "while importing":
        while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.01)
    else:
        process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors
    assert process.returncode == 130


@pytest.mark.parametrize("module", ["argparse", "freewheel.bench.decode", "datetime"])
def test_control_c_within_an_import_ends_cleanly(tiny_model: Path, module: str) -> None:
    """The command's own imports, those of its parser, and one that NumPy makes from C and reports as its own error."""
    script = f"""
import os, signal, sys
from freewheel.__main__ import main

class Interruption:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interruption())
sys.exit(main())
"""
    command = [sys.executable, "-c", script, *generate(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "")


def test_a_reader_that_leaves_is_no_error(long_model: Path) -> None:
    process = start(long_model, "--max-tokens", "30000")
    assert process.stdout
    assert process.stderr
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert "Traceback" not in process.stderr.read()


def test_help_says_which_log_probabilities_the_mode_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "the same for the prompt's tokens, always the model's own" in said
    assert "--logprobs-mode MODE of --logprobs: raw, the model's own (default), or processed" in said


def test_help_needs_no_torch() -> None:
    script = "import sys; from freewheel.cli import build_parser; build_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_bench_speculation_counts_what_both_ways_bring(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    options = ["--model", str(tiny_model), "--dtype", "float32", "--batch", "2", "--output", "12", "--repeats", "1"]
    assert main(["bench", "speculation", *options, "--workloads", "random,noise", "--json", str(report)]) == 0
    results = json.loads(report.read_text())["results"]
    assert [(one["workload"], one["batch"], one["equal"]) for one in results] == [("random", 2, 1.0), ("noise", 2, 1.0)]
    assert all(one["tokens"] == 22 and one["plain"] > 0 and one["steps"] is None for one in results)
    assert "random" in capsys.readouterr().out
    assert "trace: needs a CUDA device" in fails(capsys, ["bench", "speculation", *options, "--trace", "trace.json"])


def test_bench_index_goes_by_the_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    assert main(["bench", "index", "--lengths", "512,4096", "--json", str(report)]) == 0
    results = json.loads(report.read_text())["results"]
    assert [(one["device"], one["length"], one["bytes_per_token"]) for one in results] == [
        ("cpu", 512, 28.0),
        ("cpu", 4096, 28.0),
    ]
    capsys.readouterr()
    assert "lengths: 5 is less than 400" in fails(capsys, ["bench", "index", "--lengths", "5"])
