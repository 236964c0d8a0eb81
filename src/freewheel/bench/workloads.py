"""What ``freewheel bench serve`` asks for: bodies of requests, the same for the same seed."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from freewheel.bench.speculation import CODE, TEXTS, edit_prompt, extract_prompt

Body = dict[str, Any]
WORKLOADS = ("random", "shared-prefix", "jsonl", "copy")
TEXT = """
the river runs past a quiet town where people sell bread fish and tea each morning while children look for stones
under old trees near water that turns green when summer comes slowly over hills some say rain will bring back what
winter took from fields so they wait count days write names on doors keep lamps lit all night long
"""
WORDS = TEXT.split()
LETTERS = 4  # of a token of English or code, or about as many


@dataclass(frozen=True)
class Shape:
    """How long prompts and answers are, and what prompts are made of.

    Attributes:
        prompt, output: tokens (or words) on average.
        spread: they are as likely to be anything up to this share shorter or longer.
        words: prompts are texts of so many words; else token ids.
        vocab: ids are below this one. The first tenth, where special tokens often are, is left out.
        groups, prefix: with shared prefixes, how many there are and how long they are.
    """

    prompt: int
    output: int
    spread: float = 0.0
    words: bool = False
    vocab: int = 10_000
    groups: int = 1
    prefix: int = 0


def bodies(workload: str, count: int, shape: Shape, seed: int, dataset: Path | None = None) -> list[Body]:
    """So many bodies of completions, each with its prompt (or messages) and ``max_tokens``.

    Raises:
        ValueError: the dataset has no prompts.
    """
    rng = random.Random(seed)
    if workload == "jsonl":
        assert dataset is not None
        lines = read_lines(dataset)
        return [{"max_tokens": shape.output, **lines[number % len(lines)]} for number in range(count)]
    if workload == "copy":
        return [_copy(number, shape.output) for number in range(count)]

    def length(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - shape.spread, 1 + shape.spread)))

    def tokens(length: int) -> list[Any]:
        return (
            rng.choices(WORDS, k=length)
            if shape.words
            else rng.choices(range(shape.vocab // 10, shape.vocab), k=length)
        )

    groups = shape.groups if workload == "shared-prefix" else 1
    prefixes = [tokens(shape.prefix if workload == "shared-prefix" else 0) for _ in range(groups)]
    made = []
    for _ in range(count):
        prompt = rng.choice(prefixes) + tokens(length(shape.prompt))
        made.append({"prompt": " ".join(prompt) if shape.words else prompt, "max_tokens": length(shape.output)})
    return made


def read_lines(path: Path) -> list[Body]:
    """A JSON object a line, each a body, or a part of one that has a prompt or messages.

    Raises:
        ValueError: naming the line.
    """
    made = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"dataset: {path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            body = json.loads(line)
        except ValueError as error:
            raise ValueError(f"dataset: line {number} of {path} is not JSON: {error}") from None
        if not isinstance(body, dict) or ("prompt" in body) == ("messages" in body):
            raise ValueError(f"dataset: line {number} of {path} must be an object with a prompt, or with messages")
        made.append(body)
    if not made:
        raise ValueError(f"dataset: {path} is empty")
    return made


def _copy(number: int, longest: int) -> Body:
    """Code with a name changed, and texts again, in turn."""
    kinds: tuple[tuple[Callable[[int], tuple[str, str]], int], ...] = (
        (edit_prompt, len(CODE)),
        (extract_prompt, len(TEXTS)),
    )
    make, different = kinds[number % 2]
    prompt, again = make(number // 2 % different)
    return {"prompt": prompt, "max_tokens": min(longest, len(again) // LETTERS)}


def fitted(body: Body, endpoint: str) -> Body:
    """A body as an endpoint takes it: for chats a prompt becomes a conversation of one message.

    Raises:
        ValueError: it has messages, and they are no prompt; or its prompt is no text.
    """
    if endpoint == "completions" and "messages" in body:
        raise ValueError("endpoint: messages are for chats: give --endpoint chat")
    if endpoint == "completions" or "messages" in body:
        return body
    prompt = body["prompt"]
    if not isinstance(prompt, str):
        raise ValueError("endpoint: a chat takes texts, and this prompt is a list of token ids: give --words")
    rest = {name: value for name, value in body.items() if name != "prompt"}
    return {"messages": [{"role": "user", "content": prompt}], **rest}
