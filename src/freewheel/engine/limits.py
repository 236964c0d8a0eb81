"""What an engine takes, as plain facts: a request is checked where it comes in, be it in another process."""

from dataclasses import dataclass, replace

from freewheel.grammar import Compiler
from freewheel.request import Request
from freewheel.sampling.params import shown


@dataclass(frozen=True)
class Limits:
    """Facts about model, cache and configuration.

    Attributes:
        max_model_len: most tokens of a sequence.
        logits: how many a row has.
        vocab_size: ids that the tokenizer knows; only these are drawn and accepted.
        eos_token_ids: every end-of-sequence id.
        repeatable: whether draws follow a seed.
    """

    max_model_len: int
    logits: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    repeatable: bool

    def validate(self, request: Request, grammars: Compiler | None) -> Request:
        """Check a request.

        Args:
            request: what comes in.
            grammars: compiles for the model; None: there are no requests with a grammar.

        Returns:
            It, with its grammar compiled, which may take seconds.

        Raises:
            ValueError: naming what is wrong. Nothing that passes can fail later for what it asks, but for a grammar
                that grows too large on the way.
        """
        prompt, params = request.prompt_ids, request.params
        if not prompt:
            raise ValueError("prompt is empty: at least one token is needed")
        if max(prompt) >= self.vocab_size or min(prompt) < 0:
            bad = next(token for token in prompt if not 0 <= token < self.vocab_size)
            raise ValueError(
                f"prompt_token_ids has id {shown(bad)}, but the vocabulary has only {self.vocab_size} tokens"
            )
        room = self.max_model_len - len(prompt)
        if room < 0:
            raise ValueError(f"prompt has {len(prompt)} tokens, the longest sequence is {self.max_model_len}")
        if room == 0 and params.max_tokens != 0:
            raise ValueError(
                f"prompt has {len(prompt)} tokens and leaves no room for output: the longest sequence is "
                f"{self.max_model_len} (max_tokens=0 only scores the prompt)"
            )
        if params.min_tokens > room:
            raise ValueError(
                f"min_tokens ({params.min_tokens}) exceeds the {room} tokens that the prompt leaves room for"
            )
        if params.seed is not None and not self.repeatable:
            raise ValueError("seed must be None: this engine draws by multinomial, which cannot be repeated")
        params.check_vocabulary(self.vocab_size, request.bad_word_ids, self.eos_token_ids)
        return with_grammar(request, grammars)


def with_grammar(request: Request, grammars: Compiler | None) -> Request:
    """The request with its grammar compiled, if it has one that matters.

    Raises:
        ValueError: it is wrong, or there is no one to compile it.
    """
    grammar = request.params.grammar
    if grammar is None or request.params.max_tokens == 0:
        return request
    if grammars is None:
        raise ValueError("grammar must be None: this engine knows no texts")
    try:
        return replace(request, grammar=grammars.compile(grammar))
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"grammar cannot be compiled: {type(error).__name__}: {error}") from error
