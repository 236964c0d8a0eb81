"""The systems that decode benchmarks compare, behind one small interface.

Each system is measured in a process of its own (thread pools and memory stay apart). It loads one model and answers
``generate(prompts, tokens)``: exactly ``tokens`` greedy tokens for each prompt, all prompts at once, no early stop.
"""

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from freewheel.models.load import DType

TokenIds = list[int]


class System(Protocol):
    """A loaded model of one serving system."""

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        """Return how many tokens each prompt got."""
        ...


class Freewheel:
    """This engine, prefix cache off so that repetitions measure the same work."""

    def __init__(self, model: Path, dtype: str, batch: int, context: int) -> None:
        from freewheel.llm import LLM

        self.llm = LLM(
            str(model),
            dtype=cast("DType", dtype),
            max_num_seqs=batch,
            max_model_len=context,
            enable_prefix_caching=False,
        )

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        from freewheel.sampling import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        outputs = self.llm.generate(list(prompts), params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


class Transformers:
    """transformers' eager ``generate`` on the weights it dequantises from the same file."""

    def __init__(self, model: Path, dtype: str, batch: int, context: int) -> None:
        del batch, context
        import torch

        self.torch = torch
        self.model = load_transformers(model, dtype)

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return [out.shape[1] - ids.shape[1]] * len(prompts)


class LlamaCpp:
    """llama.cpp through the xllamacpp package, one slot for each prompt of the batch."""

    def __init__(self, model: Path, dtype: str, batch: int, context: int) -> None:
        del dtype  # the file's own quantisation
        import torch

        xllamacpp: Any = import_module("xllamacpp")
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_parallel = batch
        params.n_ctx = batch * context
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.verbosity = 0
        self.server = xllamacpp.Server(params)
        self.pool = ThreadPoolExecutor(batch)

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        def complete(prompt: TokenIds) -> int:
            reply = self.server.handle_completions(
                {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
            )
            return reply["usage"]["completion_tokens"]

        return list(self.pool.map(complete, prompts))


class CTranslate2:
    """CTranslate2's generator on a conversion of the same weights."""

    def __init__(self, model: Path, dtype: str, batch: int, context: int) -> None:
        del batch, context
        import torch
        from transformers import AutoTokenizer

        ctranslate2: Any = import_module("ctranslate2")
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder, "transformers"), Path(folder, "ctranslate2")
            source_model = load_transformers(model, "float32")
            if hasattr(source_model.config, "quantization_config"):  # says GGUF, but the weights are float32 by now
                source_model.hf_quantizer = None
                del source_model.config.quantization_config
            source_model.save_pretrained(source)
            folder_of_model, where = _transformers_location(model)
            tokenizer = AutoTokenizer.from_pretrained(folder_of_model, **where)
            tokenizer.save_pretrained(source)
            ctranslate2.converters.TransformersConverter(str(source)).convert(str(target), quantization=dtype)
            self.generator = ctranslate2.Generator(
                str(target), device="cpu", compute_type=dtype, inter_threads=1, intra_threads=torch.get_num_threads()
            )
        self.tokens_of = tokenizer.convert_ids_to_tokens

    def generate(self, prompts: Sequence[TokenIds], tokens: int) -> list[int]:
        results = self.generator.generate_batch(
            [self.tokens_of(prompt) for prompt in prompts],
            max_length=tokens,
            min_length=tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        return [len(result.sequences_ids[0]) for result in results]


def _transformers_location(model: Path) -> tuple[Path, dict[str, str]]:
    """What ``from_pretrained`` takes for a GGUF file or a checkpoint folder."""
    return (model.parent, {"gguf_file": model.name}) if model.suffix == ".gguf" else (model, {})


def load_transformers(model: Path, dtype: str) -> Any:
    """A transformers causal LM from a GGUF file or a checkpoint folder, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, where = _transformers_location(model)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **where).eval()


SYSTEMS: dict[str, Callable[[Path, str, int, int], System]] = {
    "freewheel": Freewheel,
    "transformers": Transformers,
    "llamacpp": LlamaCpp,
    "ctranslate2": CTranslate2,
}
