"""From what a user writes to what the engine takes."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from freewheel.request import Request
from freewheel.sampling import SamplingParams
from freewheel.sampling.params import check_text, shown

if TYPE_CHECKING:
    from freewheel.models.tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    """A prompt as token ids, and the text that it stands for, if that is known."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


Prompt = str | Sequence[int] | TokensPrompt


def make_request(
    tokenizer: "Tokenizer", request_id: str, prompt: Prompt, params: SamplingParams | None, priority: int = 0
) -> tuple[Request, str | None]:
    """Tokenise a prompt and the texts among its parameters.

    Args:
        prompt: text, token ids, or a mapping with ``prompt_token_ids``.
        params: None for the defaults.
        priority: smaller is more urgent.

    Returns:
        The request, and the prompt's text if it was given.

    Raises:
        ValueError: naming the field. What depends on the model's size is left to :meth:`Limits.validate`.
    """
    if params is None:
        params = SamplingParams()
    elif not isinstance(params, SamplingParams):
        raise ValueError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise ValueError(f"priority must be an integer, not {shown(priority)}")
    text, ids = _read_prompt(tokenizer, prompt)
    bad_words = tuple(tuple(word) for word in tokenizer.bad_word_ids(params.bad_words)) if params.bad_words else ()
    return Request(request_id, ids, params, bad_words, int(priority)), text


def _read_prompt(tokenizer: "Tokenizer", prompt: Any) -> tuple[str | None, tuple[int, ...]]:
    if isinstance(prompt, str):
        check_text("prompt", prompt)
        return prompt, tuple(tokenizer.encode(prompt))
    text, name = None, "prompt"
    if isinstance(prompt, Mapping):
        unknown = prompt.keys() - TokensPrompt.__annotations__.keys()
        if unknown:
            raise ValueError(f"prompt may have prompt_token_ids and prompt, not {shown(unknown.pop())}")
        if "prompt_token_ids" not in prompt:
            raise ValueError("prompt is a mapping and has no prompt_token_ids")
        text, prompt, name = prompt.get("prompt"), prompt["prompt_token_ids"], "prompt_token_ids"
        if text is not None:
            if not isinstance(text, str):
                raise ValueError(f"prompt must be text where prompt_token_ids are given, not {type(text).__name__}")
            check_text("prompt", text)
    if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Sequence):
        raise ValueError(f"{name} must be text or a list of token ids, not {type(prompt).__name__}")
    for token in prompt:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ValueError(f"{name} must hold token ids, not {shown(token)}")
    return text, tuple(int(token) for token in prompt)
