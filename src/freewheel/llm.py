"""The offline API: load a model, give it prompts, get their continuations."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from freewheel.config import Draw, EngineConfig
from freewheel.engine.build import build_engine, prepare
from freewheel.engine.inputs import Prompt, TokensPrompt, make_request
from freewheel.engine.outputs import Reply, RequestOutput
from freewheel.interrupts import held_interrupts
from freewheel.models.load import load
from freewheel.sampling import SamplingParams
from freewheel.speculative import SpeculationMetrics

if TYPE_CHECKING:
    import torch

    from freewheel.models.load import DType

Message = Mapping[str, Any]
Value = TypeVar("Value")


class LLM:
    """A model and an engine for it, to be used from one thread.

    ``with LLM("smollm2") as llm: print(llm.generate("Once upon a time")[0].outputs[0].text)``

    Args:
        model: built-in name, folder, ``.gguf`` file or Hub id.
        dtype: "auto" keeps quantised weights small; "float32" is the exact mode; or "bfloat16", "float16".
        device: where it runs: "cpu", "cuda" or "cuda:N".
        max_model_len, max_num_seqs, max_num_batched_tokens, page_size, kv_cache_memory, enable_prefix_caching,
            lookahead, fused, graphs, draw, speculation, draft_width, draft_depth, draft_nodes, draft_corpus,
            seed: see :class:`freewheel.config.EngineConfig`.

    Attributes:
        tokenizer: the model's tokenizer and chat template.
        max_model_len: most tokens of prompt and output together.
        weight_bytes: bytes of weights that a decode step reads.

    Raises:
        ValueError: an option is wrong or cannot be met.
        freewheel.models.errors.ModelError: the model cannot be found, read or run.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: "DType" = "auto",
        device: "str | torch.device" = "cpu",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int | None = None,
        page_size: int = 16,
        kv_cache_memory: int | None = None,
        enable_prefix_caching: bool = True,
        lookahead: int | None = None,
        fused: bool | None = None,
        graphs: bool | None = None,
        draw: Draw = "two_level",
        speculation: bool = False,
        draft_width: int = 1,
        draft_depth: int = 32,
        draft_nodes: int = 32,
        draft_corpus: str | Path | None = None,
        seed: int | None = None,
    ) -> None:
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            kv_cache_memory=kv_cache_memory,
            enable_prefix_caching=enable_prefix_caching,
            lookahead=lookahead,
            fused=fused,
            graphs=graphs,
            draw=draw,
            speculation=speculation,
            draft_width=draft_width,
            draft_depth=draft_depth,
            draft_nodes=draft_nodes,
            draft_corpus=draft_corpus,
            seed=seed,
        )
        loaded = load(model, dtype=dtype, device=device)
        self.tokenizer = loaded.tokenizer
        self.weight_bytes = loaded.decoder.weight_bytes
        self._engine = build_engine(loaded, config)
        prepare(self._engine)
        self.max_model_len = self._engine.max_model_len
        self._replies: dict[str, Reply] = {}
        self._abandoned: list[str] = []
        self._closed = False
        self._ids = count()

    @property
    def speculation(self) -> SpeculationMetrics | None:
        """What drafts have brought, over all requests; None without speculation."""
        return self._engine.speculation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts, all at once.

        Args:
            prompts: one or several; each is text, a list of token ids, or a mapping with ``prompt_token_ids``.
            sampling_params: for all prompts, or one for each; None for the defaults.
            use_tqdm: show a progress bar when there are several prompts and a terminal.
            priority: for all prompts, or one for each; smaller is more urgent.

        Returns:
            One output for each prompt, in their order. A request that failed has the finish reason "error".

        Raises:
            ValueError: a prompt or parameter is wrong; then nothing is generated at all.
            KeyboardInterrupt: after Ctrl-C; these requests are gone, and the model can go on with others.
        """
        one = (
            isinstance(prompts, str | Mapping)
            or not isinstance(prompts, Sequence)
            or (len(prompts) > 0 and isinstance(prompts[0], Integral))
        )
        batch: Sequence[Any] = [prompts] if one else prompts  # type: ignore[assignment]
        all_params = _spread("sampling_params", sampling_params, len(batch))
        priorities = _spread("priority", 0 if priority is None else priority, len(batch))
        replies: list[Reply] = []
        try:
            for number, (prompt, params, urgency) in enumerate(zip(batch, all_params, priorities)):
                try:
                    replies.append(self._submit(prompt, params, urgency))
                except ValueError as error:
                    if len(batch) == 1:
                        raise
                    raise ValueError(f"prompts[{number}]: {error}") from error
            self._run(replies, use_tqdm and len(replies) > 1)
            return [output for reply in replies if (output := reply.take())]
        finally:
            self._forget(replies)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: int | Sequence[int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> list[RequestOutput]:
        """Answer conversations: one (a list of messages), or several.

        Arguments beyond those of :meth:`render` and the errors are :meth:`generate`'s.
        """
        one = not isinstance(messages, Sequence) or len(messages) == 0 or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if one else messages
        prompts = [
            self.render(conversation, tools=tools, add_generation_prompt=add_generation_prompt, **variables)
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, priority=priority)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> TokensPrompt:
        """The prompt that the model's chat template makes of a conversation.

        Args:
            messages: mappings with ``role`` and ``content``.
            tools: JSON schemas of functions.
            add_generation_prompt: end with what begins the assistant's turn.
            variables: what else the template knows (``enable_thinking=False``...).

        Raises:
            ValueError: there is no chat template, or it refuses the messages.
        """
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt, **variables}
        ids, text = self.tokenizer.encode_chat(messages, **options)
        return {"prompt_token_ids": ids, "prompt": text}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, priority: int = 0) -> "Stream":
        """Continue one prompt; iterating yields its state whenever it has news, and ``output.delta`` is what is new.

        Closing the iterator aborts the request. Other calls may be made in between: their requests run beside this one.

        Raises:
            ValueError: the prompt or a parameter is wrong.
        """
        return Stream(self, self._submit(prompt, sampling_params, priority))

    def close(self) -> None:
        """Free model and cache. Unfinished streams end with an error."""
        for reply in self._replies.values():
            reply.fail("the LLM was closed")
        self._replies.clear()
        if not self._closed:
            self._closed = True
            del self._engine

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, replies: Sequence[Reply], show_progress: bool) -> None:
        """Step until all replies are finished."""
        if not show_progress:
            while not all(reply.finished for reply in replies):
                with held_interrupts() as interrupts:  # for many steps, as it takes some 50 us
                    while not interrupts and not all(reply.finished for reply in replies):
                        self._step()
            return
        from tqdm import tqdm

        with tqdm(total=len(replies), desc="Requests", dynamic_ncols=True, disable=None) as bar:
            while not all(reply.finished for reply in replies):
                with held_interrupts():
                    self._step()
                bar.update(sum(reply.finished for reply in replies) - bar.n)
                seconds = bar.format_dict["elapsed"]
                if seconds > 0:
                    tokens = sum(reply.metrics.output_tokens for reply in replies)
                    bar.set_postfix_str(f"{tokens / seconds:.1f} output tok/s", refresh=False)

    def _submit(self, prompt: Prompt, params: SamplingParams | None, priority: int) -> Reply:
        if self._closed:
            raise RuntimeError("the LLM was closed")
        request, text = make_request(self.tokenizer, str(next(self._ids)), prompt, params, priority)
        reply = Reply(request, text, self.tokenizer)
        try:
            with held_interrupts():
                self._engine.add(request)
                self._replies[request.request_id] = reply
        except BaseException:
            self._forget([reply])
            raise
        return reply

    def _step(self) -> None:
        """One step; must not be interrupted."""
        self._drop_abandoned()
        for output in self._engine.step():
            reply = self._replies.get(output.request_id)
            if reply is None:
                continue
            try:
                if reply.add(output):
                    self._engine.finish(output.request_id, output.index)
            except Exception as error:  # the others' outputs of this step come only once
                reply.fail(f"{type(error).__name__}: {error}")
                self._engine.abort(output.request_id)

    def _forget(self, replies: Sequence[Reply]) -> None:
        """Abort what is not finished."""
        with held_interrupts():
            self._abandoned.extend(reply.request.request_id for reply in replies)
            self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            request_id = self._abandoned.pop()
            reply = self._replies.pop(request_id, None)
            if reply is not None and not reply.finished:
                self._engine.abort(request_id)


class Stream(Iterator[RequestOutput]):
    """The outputs of one request, as they come. Made by :meth:`LLM.stream`; dropping it aborts the request as well."""

    def __init__(self, llm: LLM, reply: Reply) -> None:
        self._llm = llm
        self._reply = reply
        self._closed = False

    def __next__(self) -> RequestOutput:
        try:
            while not self._closed:
                if (output := self._reply.take()) is not None:
                    return output
                if self._reply.finished:
                    break
                with held_interrupts():
                    self._llm._step()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Abort the request, if it is not finished."""
        self._closed = True
        self._llm._forget([self._reply])

    def __del__(self) -> None:
        # May run at any moment, even within a step: leave it to the next one.
        self._llm._abandoned.append(self._reply.request.request_id)


def _spread(name: str, value: Value | Sequence[Value], length: int) -> Sequence[Value]:
    """One value for each prompt."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * length  # type: ignore[list-item]
    if len(value) != length:
        raise ValueError(f"{name} has {len(value)} entries for {length} prompts")
    return value
