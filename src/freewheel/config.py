"""What a user may set about an engine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Draw = Literal["two_level", "gumbel", "multinomial"]

MOST_LOOKAHEAD = 8
MOST_DRAFT_NODES = 63  # an ancestor mask has 64 bits, and the root one of them


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine, checked on construction.

    Attributes:
        max_model_len: most tokens of a sequence, prompt and output; None: the model's context, or what the cache holds.
        max_num_seqs: most sequences that run at once (slots).
        max_num_batched_tokens: most rows of a step; longer prompts are cut into chunks. None: 512 on CPUs, and 8,192 on
            CUDA devices, which can do more at once; or as many as there are slots.
        page_size: tokens in a page of the key-value cache.
        kv_cache_memory: bytes for the key-value cache; None: what ``max_num_seqs`` full sequences need, but at most a
            third of the memory that is free, or on a CUDA device nine tenths of what a step of the most rows leaves.
        enable_prefix_caching: reuse the keys and values of beginnings that requests share.
        lookahead: steps that are launched before the results of an earlier one are read, so that the device does not
            wait for the host; None: 1 on CUDA devices, with ``speculation`` 2 while no draft would pay, and 0 on CPUs,
            where there is nobody to wait for.
        fused: let kernels do what they can in place of torch's operations; None: on CUDA devices, which they are for.
        graphs: launch decode steps as CUDA graphs; None: wherever there are such kernels and graphs.
        draw: how tokens are drawn; see :mod:`freewheel.sampling.draw`.
        speculation: draft tokens by what followed the same ones before, and verify many in a step (see
            :mod:`freewheel.speculative`). It changes no token. On CPUs the host drafts from a sequence's last token,
            so each step is read before the next is launched, whatever ``lookahead`` says. On CUDA devices kernels
            draft, and the host stays ahead.
        draft_width: most leaves of a draft; 1 drafts a chain.
        draft_depth: most tokens that a draft goes ahead.
        draft_nodes: most tokens of a draft, which are rows of a step. With more than ``draft_depth`` there is room for
            branches, of which there are ``draft_width``.
        draft_corpus: a file of texts to draft from as well, for all requests: plain text, or with the ending ``.jsonl``
            a document a line. Others can tell by the time that a request takes whether the texts hold it.
        seed: makes requests without a seed of their own repeatable, in the order in which they are added; a signed
            64-bit integer. With ``draw="multinomial"`` there are no seeds, here or in requests.

    Raises:
        ValueError: naming the field.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int | None = None
    page_size: int = 16
    kv_cache_memory: int | None = None
    enable_prefix_caching: bool = True
    lookahead: int | None = None
    fused: bool | None = None
    graphs: bool | None = None
    draw: Draw = "two_level"
    speculation: bool = False
    draft_width: int = 1
    draft_depth: int = 32
    draft_nodes: int = 32
    draft_corpus: str | Path | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "page_size", "draft_width", "draft_depth", "draft_nodes"):
            _check_count(name, getattr(self, name))
        for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_memory"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can advance in a step"
            )
        ahead = self.lookahead
        most = MOST_LOOKAHEAD
        if ahead is not None and (isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead <= most):
            raise ValueError(f"lookahead must be an integer from 0 to {most} or None, not {ahead!r}")
        for name in ("enable_prefix_caching", "speculation"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        for name in ("fused", "graphs"):
            if getattr(self, name) not in (None, True, False):
                raise ValueError(f"{name} must be True, False or None, not {getattr(self, name)!r}")
        if self.graphs and self.fused is False:
            raise ValueError("graphs must not be True with fused=False: torch's operations are not captured")
        if self.draft_nodes > MOST_DRAFT_NODES:
            raise ValueError(f"draft_nodes must be at most {MOST_DRAFT_NODES}, not {self.draft_nodes}")
        if self.draft_corpus is not None and not self.speculation:
            raise ValueError("draft_corpus must be None without speculation: nothing would be drafted from it")
        if self.draw not in ("two_level", "gumbel", "multinomial"):
            raise ValueError(f"draw must be 'two_level', 'gumbel' or 'multinomial', not {self.draw!r}")
        if self.seed is not None:
            if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**63:
                raise ValueError("seed must be a signed 64-bit integer or None")
            if self.draw == "multinomial":
                raise ValueError("seed must be None with draw='multinomial', which cannot be repeated")

    def uses_kernels(self, device: str) -> bool:
        """On this type of device."""
        return device == "cuda" if self.fused is None else self.fused

    def most_rows(self, device: str) -> int:
        """Of a step on this type of device."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(8192 if device == "cuda" else 512, self.max_num_seqs)


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 48:
        raise ValueError(f"{name} must be a positive integer, not {value!r}")
